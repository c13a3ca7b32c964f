"""Law 1, op by op: a row's bits depend on the row alone, not on its neighbours, their number, order, batch or pages.

Each test runs in Triton's interpreter (fp32, fp16) and compiled on a GPU (bf16 too).
"""

import pytest
import torch
from test_twins import RUNS
from twin_cases import Make, fill

import kernels
from kernels.routing import Routing

ROWS = 21
ROW_OPS = ["norm", "linear", "route", "route in groups", "route by logits", "experts", "biased experts", "mlp", "head"]
ROW_OPS += ["draft_input"]


def same(a, b):
    """Equal to the bit, NaN included."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def row_ops(make):
    """name -> (rows' own arguments, function of them): every op whose rows are independent of one another."""
    ops, d, e, i, v = kernels.FUSED, 328, 20, 80, 150
    gain, residual = make.gain(d), make.floats(ROWS, d)
    x = make.floats(ROWS, d)
    w, bias, gate = make.weight(75, d), make.floats(75), make.weight(e, d)
    wide, tall = make.weight(e, 2 * i, d), make.weight(e, d, i)
    biases = make.floats(e, 2 * i), make.floats(e, d)
    vocabulary, rule = make.weight(v, d), Routing(4, True)
    corrected, correction = Routing(4, True, "sigmoid", 4, 2, 2, 2.5), make.floats(e, scale=0.1, dtype=torch.float32)
    chosen, moved = Routing(4, False, "logits"), make.floats(e)
    ids = torch.rand(ROWS, e, generator=make.generator).topk(4, 1).indices.to(make.device)
    weights = torch.rand(ROWS, 4, generator=make.generator).to(make.device)
    scores = make.floats(ROWS, 75)

    def head(x):
        logits = torch.full((x.shape[0], v), float("nan"), device=x.device)
        return *ops.head(x, gain, 1e-6, vocabulary, 3, logits), logits

    return {
        "norm": ((x,), lambda x: (ops.norm(x, gain, 1e-6),)),
        "linear": ((x, scores), lambda x, r: (ops.linear(x, w, bias, r),)),
        "route": ((x,), lambda x: ops.route(x, gain, 1e-6, gate, rule)),
        "route in groups": ((x,), lambda x: ops.route(x, gain, 1e-6, gate, corrected, None, correction)),
        "route by logits": ((x,), lambda x: ops.route(x, gain, 1e-6, gate, chosen, moved)),
        "biased experts": (
            (x, ids, weights, residual),
            lambda x, i, w, r: (ops.experts(x, i, w, wide, tall, "clamped_swiglu", r, *biases),),
        ),
        "experts": (
            (x, ids, weights, residual),
            lambda x, i, w, r: (ops.experts(x, i, w, wide, tall, "silu", r),),
        ),
        "mlp": ((x, residual), lambda x, r: (ops.mlp(x, gain, 1e-6, wide[0], tall[0], "silu", r),)),
        "head": ((x,), head),
        "draft_input": (
            (residual, ids[:, 0].contiguous()),
            lambda h, i: ops.draft_input(i, x, gain, h, None, gain, 1e-6, True),
        ),
    }


@pytest.mark.parametrize("device, dtype", RUNS)
@pytest.mark.parametrize("op", ROW_OPS)
def test_a_row_is_alone(op, device, dtype):
    """Kills: sums whose order follows the number of rows; NaN of one row that reaches its tile."""
    make = Make(dtype, device, 3)
    own, run = row_ops(make)[op]
    whole = run(*own)
    assert all(torch.isfinite(y).all() for y in whole if y.is_floating_point())
    order = torch.randperm(ROWS, generator=make.generator).to(device)
    for mixed, straight in zip(run(*(x[order] for x in own)), whole, strict=True):
        assert same(mixed, straight[order])
    for n in (1, 2, 7, 8, 9, 16):
        for part, straight in zip(run(*(x[ROWS - n :] for x in own)), whole, strict=True):
            assert same(part, straight[ROWS - n :]), n
    spoilt = list(own)
    spoilt[0] = own[0].clone()
    spoilt[0][::2] = float("nan")
    for y, straight in zip(run(*spoilt), whole, strict=True):
        assert same(y[1::2], straight[1::2])


@pytest.mark.parametrize("device, dtype", RUNS)
def test_a_head_without_logits_says_the_same(device, dtype):
    """Plain callers take no logits; whoever asks for them must not change an id."""
    make = Make(dtype, device, 5)
    x, gain, weight = make.floats(5, 328), make.gain(328), make.weight(300, 328)
    logits = torch.empty(5, 300, device=device)
    silent = kernels.FUSED.head(x, gain, 1e-6, weight, 1)
    asked = kernels.FUSED.head(x, gain, 1e-6, weight, 1, logits)
    assert all(same(a, b) for a, b in zip(silent, asked, strict=True))
    assert same(asked[0][:, 0], logits.gather(1, asked[1])[:, 0])


@pytest.mark.parametrize("device, dtype", RUNS)
def test_qkv_row_is_alone(device, dtype):
    """One row of a batch of trees, and the same row by itself on other pages: same queries, same cached rows."""
    make = Make(dtype, device, 7)
    b, t, d, h, g, dh = 3, 5, 328, 4, 2, 20
    x, gain, weight, norms = make.floats(b * t, d), make.gain(d), make.weight((h + 2 * g) * dh, d), make.gain(dh)
    table = make.floats(64, 10, dtype=torch.float32)
    start = make.ints([[3], [17], [30]])
    at = start + torch.arange(t, device=device)

    def run(rows, positions, pages, page):
        planes = make.planes(2, pages, page, g, dh)
        q = kernels.FUSED.qkv(
            rows, gain, 1e-6, weight, None, norms, norms, table, positions, positions, pages, page, *planes
        )
        slots = pages.long().gather(1, positions // page) * page + positions % page
        return q, planes[0][slots.view(-1)], planes[1][slots.view(-1)]

    whole = run(x, at, make.pages(b, 10), 4)
    for n in (0, 7, 14):
        alone = run(x[n : n + 1], at.view(-1)[n].view(1, 1), make.pages(1, 3), 16)
        assert all(same(one[0], all_[n]) for one, all_ in zip(alone, whole, strict=True)), n


@pytest.mark.parametrize("device, dtype", RUNS)
@pytest.mark.parametrize("q_rank", [40, None])
def test_latent_row_is_alone(q_rank, device, dtype):
    """One row of a batch of trees, and the same row by itself on other pages: same queries, same cached row. Kills: a
    norm or an absorption whose order follows the number of rows."""
    make = Make(dtype, device, 7)
    b, t, d, h, nope, turned, latent = 3, 5, 328, 3, 20, 8, 72
    x, gain, wide = make.floats(b * t, d), make.gain(d), h * (nope + turned)
    down, up = make.weight((q_rank or wide) + latent + turned, d), make.weight(h, nope, latent)
    query = (make.gain(q_rank), make.weight(wide, q_rank)) if q_rank else (None, None)
    table, norm, start = make.floats(64, turned, dtype=torch.float32), make.gain(latent), make.ints([[3], [17], [30]])
    at = start + torch.arange(t, device=device)

    def run(rows, positions, pages, page):
        (plane,) = make.planes(1, pages, page, 1, latent + turned)
        q = kernels.FUSED.mla_qkv(
            rows, gain, 1e-6, down, *query, norm, up, table, positions, positions, pages, page, plane
        )
        slots = pages.long().gather(1, positions // page) * page + positions % page
        return q, plane[slots.view(-1)]

    whole = run(x, at, make.pages(b, 10), 4)
    assert all(torch.isfinite(y).all() for y in whole)
    for n in (0, 7, 14):
        alone = run(x[n : n + 1], at.view(-1)[n].view(1, 1), make.pages(1, 3), 16)
        assert all(same(one[0], all_[n]) for one, all_ in zip(alone, whole, strict=True)), n


class Text:
    """Keys, values and queries of positions 0..length-1, the same in every layout they are laid out in."""

    def __init__(self, make, length, heads, groups, width):
        self.make, self.width = make, width
        self.q = make.floats(length, heads, width)
        self.rows = make.floats(length, groups, width), make.floats(length, groups, width)

    def run(self, q, planes, pages, prefixes, bits, page, window):
        """The op on rows laid out."""
        return kernels.FUSED.attention(q, *planes, pages, prefixes, bits, page, self.width**-0.5, window)

    def attend(self, layouts, page, window=None):
        """layouts: for each sequence (prefix, nodes of a pass, path = node of each position past the prefix).

        Rows off the path hold another random text. -> [B, T, H*Dh]; node path[i] is position prefix + i.
        """
        make, t = self.make, layouts[0][1]
        columns = -(-(max(prefix for prefix, *_ in layouts) + t) // page)
        pages = make.pages(len(layouts), columns)
        planes = make.planes(len(self.rows), pages, page, *self.rows[0].shape[1:])
        fill(make, planes, pages, page, [prefix + t for prefix, *_ in layouts])
        q, bits = make.floats(len(layouts), t, *self.q.shape[1:]), []
        for b, (prefix, _, path) in enumerate(layouts):
            parents = [0] * t  # rows off the path hang from the root
            for above, node in zip((0, *path), path, strict=False):
                parents[node] = above
            bits.append(make.path_bits(parents))
            position = torch.arange(prefix + len(path), device=make.device)
            row = torch.cat([position[:prefix], prefix + make.ints(path)])
            slot = pages[b].long()[row // page] * page + row % page
            for plane, rows in zip(planes, self.rows, strict=True):
                plane[slot] = rows[position]
            q[b, path] = self.q[prefix : prefix + len(path)]
        prefixes = make.ints([prefix for prefix, *_ in layouts])
        y = self.run(q.flatten(0, 1), planes, pages, prefixes, make.ints(bits), page, window)
        return y.view(len(layouts), t, -1)


class LatentText(Text):
    """The same of rows that are keys and values at once: latents of 24, keys of 8 beside them, three heads."""

    def __init__(self, make, length):
        super().__init__(make, length, 3, 1, 32)
        self.rows, self.v_up = self.rows[:1], make.weight(3, 10, 24)

    def run(self, q, planes, pages, prefixes, bits, page, window):
        return kernels.FUSED.mla_attention(q, *planes, self.v_up, pages, prefixes, bits, page, self.width**-0.5)


TEXTS = {"attention": lambda make, length: Text(make, length, 2, 1, 16), "mla_attention": LatentText}


# The interpreter is slow, so a test has one position there; the last in two splits of a lane, its chain across a split.
FEW = {"attention": (3, 63, 79, 128, 593), "mla_attention": (63, 593)}
MORE = (62, 64, 65, 78, 80, 126, 127, 129, 142, 143, 144, 190, 191, 192, 255, 2110, 2111, 2112, 2175, 4200)


def placed():
    """(op, device, dtype, positions) of tests that a machine is through with in time."""
    for run in RUNS:
        for op, few in FEW.items():
            for positions in [(p,) for p in few] if run.values[0] == "cpu" else [few + MORE]:
                number = f"-{positions[0]}" if len(positions) == 1 else ""
                yield pytest.param(op, *run.values, positions, marks=run.marks, id=f"{op}-{run.id}{number}")


@pytest.mark.parametrize("op, device, dtype, positions", list(placed()))
def test_attention_of_a_position_is_the_same_in_every_layout(op, device, dtype, positions):
    """Plain, chain and scattered tree; borders of pages, of splits and of the recent stretch; batch; page size.

    Kills: splits counted from the prefix or the sequence's end, ancestors folded in node order, a border by sequence.
    """
    make = Make(dtype, device, 11)
    text = TEXTS[op](make, 700 if device == "cpu" else 4300)
    for p in positions:
        plain = text.attend([(p, 1, (0,))], 16)[0, 0]
        for depth, nodes, path, page in (
            (3, 4, (0, 1, 2, 3), 16),
            (3, 9, (0, 2, 5, 8), 4),
            (1, 20, (0, 19), 64),
            (5, 20, (0, 3, 4, 9, 15, 19), 1),
            *(() if device == "cpu" else ((1, 64, (0, 63), 64), (4, 64, (0, 7, 30, 31, 63), 16))),
        ):
            if p >= depth:
                y = text.attend([(p - depth, nodes, path)], page)[0, path[-1]]
                assert same(y, plain), (p, path)
        others = [(p, 9, (0,)), (650, 9, (0, 4)), (max(0, p - 2), 9, tuple(range(9))[: min(p, 2) + 1])]
        y = text.attend(others, 16)
        assert same(y[0, 0], plain) and same(y[2, min(p, 2)], plain), p


@pytest.mark.parametrize("device, dtype", RUNS)
@pytest.mark.parametrize("op", TEXTS)
def test_attention_of_a_deep_branch(op, device, dtype):
    """A branch of 63 nodes that leaves one out, each as in plain decoding. Kills: a recent stretch shorter than a tree
    is deep, whose early nodes would be read as if they lay in position order."""
    make = Make(dtype, device, 13)
    text = TEXTS[op](make, 200)
    path = (0, *range(2, 64))
    branch = text.attend([(100, 64, path)], 16)
    for i in (0, 1, 20, 27, 28, 43, 44, 61, 62):
        assert same(text.attend([(100 + i, 1, (0,))], 16)[0, 0], branch[0, path[i]]), i


@pytest.mark.parametrize("device, dtype", RUNS)
def test_attention_in_a_window(device, dtype):
    """The same with a window, beside rows whose windows begin elsewhere. Kills: splits dealt to lanes from where the
    tile's first window begins."""
    make = Make(dtype, device, 17)
    text = Text(make, 960, 2, 1, 16)
    for p, window in ((200, 90), (900, 560)):  # the second gives some lanes two splits
        plain = text.attend([(p, 1, (0,))], 16, window)[0, 0]
        y = text.attend([(p - 40, 48, (*range(0, 40), 47))], 4, window)
        assert same(y[0, 47], plain), p
