"""Arguments for every field of kernels.Ops: small, odd sizes, ties, NaN, pages in disorder, noise in unread rows.

CASES[field](dtype, device) yields (name, arguments); the twins must agree on what they return and on what they write.
"""

import torch

from kernels.attention import causal_bits
from kernels.routing import Routing

NOISE = float("nan")


class Make:
    """Seeded tensors of one dtype on one device."""

    def __init__(self, dtype, device, seed=0):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def floats(self, *shape, scale=1.0, dtype=None):
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.device, dtype or self.dtype)

    def weight(self, *shape):
        return self.floats(*shape, scale=shape[-1] ** -0.5)

    def gain(self, n):
        return (1 + 0.1 * torch.randn(n, generator=self.generator)).to(self.device, self.dtype)

    def routed(self, n, width):
        """Rows and gains that stay the same however a norm rounds them, signs times powers of two: a choice among
        hundreds of experts hangs on less than a rounding. Rows differ in their norms."""
        signs, factors = torch.where(self.floats(n, width) < 0, -1.0, 1.0), 2.0 ** (torch.arange(n) % 3)[:, None]
        gain = 2.0 ** (self.gain(width).float() - 1).mul(10).round()
        return (signs * factors.to(self.device)).to(self.dtype), gain.to(self.dtype)

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def tie(self, weight, first, second):
        """Give two rows equal products, often the best: one column only, so that no order of summation matters."""
        weight[[first, second]] = 0
        weight[[first, second], first % 5] = 3

    def pages(self, batch, columns):
        """A page table in disorder, columns of a wider one; page 0 is nobody's."""
        table = torch.full((batch, columns + 3), 1 << 30, dtype=torch.int32, device=self.device)
        order = torch.randperm(batch * columns, generator=self.generator) + 1
        table[:, :columns] = order.view(batch, columns)
        return table[:, :columns]

    def tree(self, nodes):
        """Parents of a random tree [T]."""
        return [0] + [int(torch.randint(0, i, (1,), generator=self.generator)) for i in range(1, nodes)]

    def path_bits(self, parents):
        """Ancestor bitsets [T] of a tree, as signed 64-bit numbers."""
        bits = [1]
        for node, parent in enumerate(parents[1:], 1):
            bits.append(bits[parent] | 1 << node)
        return [b - (1 << 64) if b >> 63 else b for b in bits]

    def planes(self, count, pages, page_size, heads, width):
        """Cache planes of noise: [slots, heads, width] each."""
        slots = (int(pages.max()) + 1) * page_size
        shape = (slots, heads, width)
        return [torch.full(shape, NOISE, dtype=self.dtype, device=self.device) for _ in range(count)]


def fill(make, planes, pages, page_size, rows):
    """Real numbers in the first rows[b] logical rows of each sequence; the rest stays noise."""
    for b, n in enumerate(rows):
        row = torch.arange(n, device=make.device)
        slot = pages[b].long()[row // page_size] * page_size + row % page_size
        for plane in planes:
            plane[slot] = make.floats(n, *plane.shape[1:])


def norm(dtype, device):
    make = Make(dtype, device)
    for n, d in ((1, 64), (5, 80), (9, 300), (2, 4100)):
        yield f"{n}x{d}", (make.floats(n, d), make.gain(d), 1e-6)


def linear(dtype, device):
    make = Make(dtype, device)
    for n, i, o, bias, residual in (
        (1, 64, 48, False, False),
        (9, 80, 100, True, True),
        (17, 300, 33, False, True),
        (3, 520, 64, True, False),
        (8, 1024, 16, False, False),
    ):
        extra = make.floats(o) if bias else None, make.floats(n, o) if residual else None
        yield f"{n}x{i}-{o}", (make.floats(n, i), make.weight(o, i), *extra)


def qkv(dtype, device):
    make = Make(dtype, device)
    for b, t, d, h, g, dh, turned, page, normed, head_norm, bias in (
        (1, 1, 64, 4, 2, 16, 16, 1, True, True, False),
        (2, 5, 80, 6, 2, 20, 10, 4, True, False, True),
        (3, 4, 96, 3, 1, 32, 32, 16, False, True, False),
        (1, 9, 64, 4, 4, 24, 24, 64, False, False, False),
    ):
        columns = -(-40 // page)
        pages = make.pages(b, columns)
        planes = make.planes(2, pages, page, g, dh)
        start = torch.randint(0, 20, (b, 1), generator=make.generator).to(device)
        at = start + torch.arange(t, device=device)
        index = torch.where(torch.arange(t, device=device) == t - 1, -1, at) if t > 1 else at
        weight = make.weight((h + 2 * g) * dh, d)
        extra = make.floats((h + 2 * g) * dh) if bias else None
        norms = (make.gain(dh), make.gain(dh)) if head_norm else (None, None)
        table = make.floats(64, turned, dtype=torch.float32)
        first = make.gain(d) if normed else None
        yield (
            f"b{b}t{t}page{page}",
            (make.floats(b * t, d), first, 1e-6, weight, extra, *norms, table, at, index, pages, page, *planes),
        )


def attention(dtype, device):
    make = Make(dtype, device)
    for b, t, h, g, dh, page, prefix, kind, window, sinks in (
        (1, 1, 4, 2, 16, 1, [0], "tree", None, False),
        (2, 1, 6, 2, 20, 4, [150, 7], "tree", None, False),
        (2, 5, 8, 1, 32, 16, [140, 63], "chain", None, True),
        (2, 7, 4, 2, 16, 64, [130, 64], "tree", 20, True),
        (1, 40, 6, 2, 16, 16, [97], "tree", None, False),
        (1, 64, 2, 1, 16, 16, [70], "tree", 33, False),
        (2, 6, 4, 4, 16, 4, [79, 80], "causal", None, False),
        (1, 90, 4, 2, 16, 16, [30], "causal", 40, False),
    ):
        columns = -(-(max(prefix) + t + 3) // page)
        pages = make.pages(b, columns)
        planes = make.planes(2, pages, page, g, dh)
        fill(make, planes, pages, page, [n + t for n in prefix])
        tree = None
        if kind == "chain":
            tree = causal_bits(t, device).expand(b, t)
        elif kind == "tree":
            tree = make.ints([make.path_bits(make.tree(t)) for _ in range(b)])
        sink = make.floats(h) if sinks else None
        yield (
            f"{kind}{t}-{prefix[0]}-page{page}",
            (make.floats(b * t, h, dh), *planes, pages, make.ints(prefix), tree, page, dh**-0.5, window, sink),
        )


def attend(
    dtype,
    device,
    cases=(
        (1, 1, 64, 4, 2, 64, 64, 1, [0], "tree", None, True),
        (2, 5, 80, 6, 2, 20, 10, 4, [70, 7], "tree", None, False),
        (2, 7, 64, 4, 1, 64, 64, 16, [60, 140], "tree", 20, True),
        (1, 9, 64, 4, 4, 24, 24, 64, [33], "causal", None, False),
        (2, 3, 64, 4, 2, 64, 64, 16, [62, 9], "beam", None, True),
    ),
):
    """cases: (B, T, D, heads, groups, head size, rotating lanes, page size, prefixes, kind, window, head norms)."""
    make = Make(dtype, device)
    for b, t, d, h, g, dh, turned, page, prefix, kind, window, normed in cases:
        columns = -(-(max(prefix) + 2 * t + 3) // page)
        pages = make.pages(b, columns)
        planes = make.planes(2, pages, page, g, dh)
        fill(make, planes, pages, page, prefix)
        start, node = make.ints(prefix)[:, None], torch.arange(t, device=device)
        if kind == "beam":  # one step of a draft: row i has index t + i and continues node i of the step before
            fill(make, planes, pages, page, [n + t for n in prefix])
            node = node + t
        trees = [make.tree(t) for _ in range(b)]
        tree = make.ints([make.path_bits(tree) for tree in trees]) if kind == "tree" else None
        depths = [[bin(bits & (1 << 64) - 1).count("1") - 1 for bits in make.path_bits(tree)] for tree in trees]
        positions = start + (make.ints(depths) if kind == "tree" else node)
        if kind == "beam":
            bits = [1 << i | 1 << t + i for i in range(t)]
            tree, positions = make.ints([bits] * b), (start + 1).repeat(1, t)
        weight, bias = make.weight((h + 2 * g) * dh, d), None if normed else make.floats((h + 2 * g) * dh)
        norms = (make.gain(dh), make.gain(dh)) if normed else (None, None)
        angles = make.floats(max(prefix) + t + 1, turned // 2, dtype=torch.float32)
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        first, sinks = (make.gain(d), make.floats(h)) if normed else (None, None)
        yield (
            f"{kind}{t}-{prefix[0]}-page{page}-{d}",
            (
                make.floats(b * t, d), first, 1e-6, weight, bias, *norms, cos_sin, positions, start + node, pages, page,
                *planes, make.ints(prefix), tree, dh**-0.5, window, sinks,
            ),
        )  # fmt: skip


def moe(dtype, device, cases=((1, 64, 16, 32, 4, True), (9, 80, 6, 48, 2, False))):
    """cases: (rows, D, experts, width, choices, whether weights are renormalised and there is a residual). Of many rows
    there is a case that comes normed too."""
    make = Make(dtype, device)
    for n, d, e, i, k, both in cases:
        x, own = make.routed(n, d)
        gate = make.weight(e, d)
        matrices = make.weight(e, 2 * i, d), make.weight(e, d, i)
        rule = Routing(k, both)
        for gain in (own, None)[: 2 if n > 8 else 1]:
            yield (
                f"{n}x{d}-{e}-{i}{'' if gain is not None else '-normed'}",
                (x, gain, 1e-6, gate, rule, None, None, *matrices, "silu", x if both else None),
            )


def route(dtype, device):
    make = Make(dtype, device)
    for n, d, e, rule, biased, corrected in (
        (1, 64, 16, Routing(4, True), False, False),
        (9, 80, 100, Routing(8, False), False, False),
        (5, 300, 6, Routing(2, True), True, False),
        (5, 80, 12, Routing(4, False, "logits"), True, False),
        (3, 64, 20, Routing(3, True, "sigmoid", scale=2.5), False, True),
        (9, 64, 24, Routing(4, True, "sigmoid", 4, 2, 2, 1.5), True, True),
        (4, 64, 20, Routing(3, False, "softmax", 5, 2, 1, 16.0), False, False),
        (2, 64, 18, Routing(2, False, "sigmoid", 6, 5, 3), False, True),
    ):
        gate, x = make.weight(e, d), make.floats(n, d)
        make.tie(gate, 0, e - 1)
        make.tie(gate, 1, e // 2)
        if n == 9:
            x[2] = NOISE
        bias = make.floats(e) if biased else None
        correction = make.floats(e, scale=0.3, dtype=torch.float32) if corrected else None
        if corrected:
            correction[[0, e - 1]] = 0.25
        gain = None if n == 4 else make.gain(d)
        given = x, gain, 1e-6, gate, rule, bias, correction
        yield f"{n}x{d}-{e}-{rule.score}-{rule.groups}", given
        if n == 3:
            yield f"{n}x{d}-{e}-shared", (*given, make.weight(2 * 48, d))


def experts(dtype, device):
    make = Make(dtype, device)
    for n, d, e, i, k, residual, act in (
        (1, 64, 16, 80, 4, True, "silu"),
        (9, 80, 6, 48, 2, False, "silu"),
        (37, 64, 20, 32, 8, True, "silu"),
        (2, 80, 6, 48, 4, True, "clamped_swiglu"),
        (19, 64, 10, 40, 3, False, "clamped_swiglu"),
    ):
        scores = torch.rand(n, e, generator=make.generator)
        scores[:, 0] += 0.5  # one expert that most rows share
        ids = scores.topk(k, 1).indices.to(device)
        weights = torch.rand(n, k, generator=make.generator).to(device)
        extra = make.floats(n, d) if residual else None
        gate_up, down = make.weight(e, 2 * i, d), make.weight(e, d, i)
        biases = ()
        if act != "silu":  # products on both sides of the clamp's limits
            gate_up, biases = gate_up * 6, (make.floats(e, 2 * i), make.floats(e, d))
        yield f"{n}x{d}-{e}", (make.floats(n, d), ids, weights, gate_up, down, act, extra, *biases)


def mlp(dtype, device):
    make = Make(dtype, device)
    for n, d, i, residual in ((1, 64, 80, True), (9, 80, 300, False), (17, 300, 64, True), (3, 80, 64, True)):
        extra = make.floats(n, d) if residual else None
        gain = None if n == 3 else make.gain(d)
        yield (
            f"{n}x{d}",
            (make.floats(n, d), gain, 1e-6, make.weight(2 * i, d), make.weight(d, i), "silu", extra),
        )


def head(dtype, device):
    make = Make(dtype, device)
    for n, d, v, k, asked, spoilt in (
        (1, 64, 100, 1, False, False),
        (9, 80, 100, 4, True, False),
        (4, 64, 333, 8, True, True),
        (2, 64, 70, 70, False, False),
        (5, 64, 4400, 64, False, True),
    ):
        weight = make.weight(v, d)
        make.tie(weight, 3, v - 1)
        make.tie(weight, 7, v // 2)
        if spoilt:
            weight[11, 0] = NOISE
            weight[12, 0] = float("inf")
        x = make.floats(n, d)
        if spoilt:
            x[0] = NOISE
        logits = torch.full((n, v), NOISE, device=device) if asked else None
        yield f"{n}x{d}-{v}-{k}", (x, make.gain(d), 1e-6, weight, k, logits)


CASES = {f.__name__: f for f in (norm, linear, qkv, attention, attend, moe, route, experts, mlp, head)}
