"""The CUDA C++ kernels for few rows, which need a GPU: each against its reference at real sizes; law 1 to the bit."""

import pytest
import torch
from packed_cases import CASES, exact
from test_twins import compare, copies
from twin_cases import Make, attend, fill, moe

from kernels import FUSED, native
from kernels.routing import Routing

pytestmark = pytest.mark.gpu

B16 = torch.bfloat16
ROWS = (1, 2, 4, 5, 8, 9, 24, 64)
ATTEND = (
    (1, 1, 2048, 32, 4, 128, 128, 64, [512], "tree", None, True),
    (2, 4, 2048, 32, 4, 128, 128, 16, [511, 60], "tree", None, True),
    (1, 64, 512, 8, 2, 64, 64, 16, [100], "tree", None, True),
    (3, 9, 4096, 32, 8, 128, 128, 64, [700, 0, 63], "causal", None, False),
    (2, 6, 256, 4, 4, 64, 64, 16, [200, 130], "tree", 90, True),
    (1, 3, 256, 8, 4, 128, 64, 16, [1000], "tree", None, True),
    (2, 1, 4096, 32, 4, 128, 128, 16, [63, 500], "beam", None, False),
    (2, 8, 4096, 32, 4, 128, 128, 16, [63, 500], "beam", None, False),
    (2, 8, 4096, 32, 4, 128, 128, 16, [1063, 500], "beam", None, False),
    (1, 5, 4096, 64, 8, 64, 64, 48, [2090], "tree", 1100, True),
    (1, 4, 2880, 64, 8, 64, 64, 64, [500], "tree", 128, True),
    (2, 4, 2048, 32, 4, 128, 128, 64, [4200, 1022], "tree", None, True),
)
# prefixes, heads, groups, head size, rotating lanes, page size, window
LONG = (
    ((500,), 32, 4, 128, 128, 64, None),  # a short table, then a long one
    ((1023, 511), 8, 1, 128, 64, 48, None),
    ((2047,), 8, 8, 64, 64, 16, None),
    ((1500,), 8, 2, 128, 128, 20, None),  # a page's rows are not multiples of 8: copied one by one
    ((4200, 90), 16, 4, 128, 128, 64, None),
    ((8190,), 32, 4, 128, 128, 64, None),
    ((13000,), 8, 1, 128, 128, 64, None),  # a rank has more tiles than stages
    ((4100,), 32, 32, 64, 64, 64, None),  # more blocks than a GPU takes at once, in two launches
    ((5000, 900), 16, 2, 64, 64, 16, 1500),
)
MOE = (
    (1, 2048, 128, 768, 8, True),
    (5, 2048, 128, 768, 8, False),
    (24, 2048, 128, 768, 8, True),
    (3, 256, 16, 64, 4, True),
    (2, 2048, 32, 384, 8, True),  # shares of 2, 4 and 8 ranks
    (9, 2048, 32, 192, 8, False),
    (1, 2048, 32, 96, 8, True),
)
INT4 = (  # rows, hidden, experts, width, choices
    (1, 7168, 16, 256, 8),
    (5, 7168, 24, 2048, 8),
    (24, 2048, 40, 512, 4),
    (9, 4096, 16, 768, 2),
    (64, 512, 384, 1536, 8),
    (3, 256, 8, 1024, 4),
    (8, 7168, 8, 256, 8),  # all rows choose all experts
    (3, 256, 8, 256, 4),
    (9, 4096, 16, 256, 2),
    (20, 2048, 24, 256, 6),
)

KIMI = Routing(8, True, "sigmoid", scale=2.827)
MOE_INT4 = (  # hidden, experts, width, rule, width of a shared expert
    (7168, 384, 256, KIMI, 256),
    (256, 40, 256, Routing(4, True, "sigmoid", 4, 2, 2, 1.5), 512),
    (256, 300, 512, Routing(8, False), 0),
    (2048, 64, 512, Routing(8, True), 0),
    (7168, 400, 256, KIMI, 256),
)
ROUTE = (  # rows, hidden, experts, rule, whether logits have a bias, whether the choice has a correction
    (1, 7168, 384, KIMI, False, True),
    (9, 7168, 256, Routing(8, True, "sigmoid", 8, 4, 2, 2.5), False, True),
    (4, 5120, 160, Routing(8, True, "sigmoid", scale=2.5), False, True),
    (5, 2880, 128, Routing(4, False, "logits"), True, False),
    (3, 2048, 64, Routing(6, False, "softmax"), False, False),
    (2, 4096, 160, Routing(6, False, "softmax", 8, 3, 1, 16.0), False, False),
    (64, 512, 512, Routing(8, True), False, False),
    (3, 256, 6, Routing(2, True, "sigmoid", 3, 2, 2), True, True),
)
MXFP4 = (  # likewise
    (1, 2880, 16, 2880, 4),
    (5, 2880, 24, 1440, 4),
    (24, 320, 40, 288, 4),
    (64, 256, 128, 96, 8),
)


@pytest.fixture(scope="module")
def table():
    return native.table(FUSED, torch.device("cuda"))


@pytest.mark.parametrize(
    "op", ["linear", "mlp", "head", "attend", "moe", "route", "experts_int4", "moe_int4", "experts_mxfp4"]
)
def test_twin_at_small_sizes(table, op):
    for name, arguments in CASES[op](B16, "cuda"):
        compare(table, op, name, arguments, B16)


def test_attend_at_real_sizes(table):
    """Kills path nodes in node order, keys past the prefix read from the cache, windows off by one, forgotten tiles."""
    for name, arguments in attend(B16, "cuda", ATTEND):
        compare(table, "attend", name, arguments, B16)


def test_moe_at_real_sizes(table):
    """Kills experts of other rows that count, choices that are not the best, groups of rows mixed up."""
    for name, arguments in moe(B16, "cuda", MOE):
        compare(table, "moe", name, arguments, B16)


class Quick(Make):
    """Numbers drawn on the device: at real sizes the CPU takes seconds."""

    def __init__(self):
        super().__init__(B16, "cuda")
        self.own = torch.Generator("cuda").manual_seed(0)

    def floats(self, *shape, scale=1.0, dtype=None):
        return (torch.randn(*shape, generator=self.own, device="cuda") * scale).to(dtype or self.dtype)


def chain(make, prefixes, heads, groups, width, turned, page, window):
    """Rows of chains behind `prefixes` rows: function(first, count, wider) -> arguments of attend for `count` of them
    from `first`, with a longer page table where `wider`. What a pass writes, later ones read."""
    columns, b, hidden = -(-(max(prefixes) + 64) // page), len(prefixes), 256
    extra = 2048 // page
    table = make.pages(b, columns + extra)
    planes = make.planes(2, table, page, groups, width)
    fill(make, planes, table, page, prefixes)
    x, weight = make.floats(b, 64, hidden), make.weight((heads + 2 * groups) * width, hidden)
    gains = make.gain(hidden), make.gain(width), make.gain(width)
    angles = make.floats(max(prefixes) + 64, turned // 2, dtype=torch.float32)
    cos_sin, sinks = torch.cat([angles.cos(), angles.sin()], 1), make.floats(heads) if window else None

    def arguments(first, count, wider=False):
        start = make.ints(prefixes)[:, None] + first
        at = start + torch.arange(count, device=make.device)
        own = x[:, first : first + count].reshape(b * count, hidden)
        return (
            own, gains[0], 1e-6, weight, None, *gains[1:], cos_sin, at, at, table[:, : columns + extra * wider], page,
            *planes, start[:, 0].contiguous(), None, width**-0.5, window, sinks,
        )  # fmt: skip

    return arguments


@pytest.mark.parametrize("sizes", LONG, ids=str)
def test_long_contexts(table, sizes):
    """Law 1 across the borders of tiles and ranks, and the reference. Kills partials merged in another order where
    there are more rows or a longer table, tiles that nobody folds, partials that are not made zero again."""
    arguments, b = chain(Quick(), *sizes), len(sizes[0])
    compare(table, "attend", f"{sizes}, 64 rows", arguments(0, 64), B16)
    want = table.attend(*arguments(0, 64)).view(b, 64, -1)
    for first, count, wider in [
        (0, 64, True),
        *((n, 1, False) for n in range(0, 64, 7)),
        (5, 1, True),
        (2, 4, False),
        (9, 4, True),
        (13, 8, True),
    ]:
        got = table.attend(*arguments(first, count, wider)).view(b, count, -1)
        assert torch.equal(got, want[:, first : first + count]), (first, count, wider)


def packed(make, n, hidden, experts, width, top_k):
    """Arguments of experts_int4: random codes, scales that differ tenfold, residual added."""
    own = {"generator": make.own, "device": "cuda"}

    def matrix(rows, columns):
        words = torch.randint(-(1 << 31), 1 << 31, (experts, rows, columns // 8), dtype=torch.int32, **own)
        scale = torch.rand(experts, rows, columns // 32, **own) * 0.9 + 0.1
        return words, (scale * columns**-0.5 / 3).to(B16)

    ids = torch.rand(64, experts, **own).topk(top_k, 1).indices[:n].contiguous()
    weights, x = torch.rand(64, top_k, **own)[:n].contiguous(), make.floats(64, hidden)[:n].contiguous()
    return x, ids, weights, *matrix(2 * width, hidden), *matrix(hidden, width), "silu", x


def packed_mxfp4(make, n, hidden, experts, width, top_k):
    """Arguments of experts_mxfp4: random codes, scales that differ eightfold."""
    own = {"generator": make.own, "device": "cuda"}

    def matrix(rows, columns):
        words = torch.randint(-(1 << 31), 1 << 31, (experts, rows, columns // 8), dtype=torch.int32, **own)
        return words, torch.randint(118, 122, (experts, rows, columns // 32), **own).to(torch.uint8)

    ids = torch.rand(64, experts, **own).topk(top_k, 1).indices[:n].contiguous()
    weights, x = torch.rand(64, top_k, **own)[:n].contiguous(), make.floats(64, hidden)[:n].contiguous()
    wide, tall = (*matrix(2 * width, hidden), make.floats(experts, 2 * width)), matrix(hidden, width)
    return x, ids, weights, *wide, *tall, make.floats(experts, hidden), "clamped_swiglu", x


@pytest.mark.parametrize("sizes", MXFP4, ids=str)
def test_mxfp4_experts_at_real_sizes(table, sizes):
    """Kills gate and up rows taken apart wrongly, groups past the last column that count, biases of another expert,
    powers of two that overflow on the way."""
    arguments = packed_mxfp4(Quick(), *sizes)
    compare(table, "experts_mxfp4", str(sizes), arguments, B16)
    arguments[4][:, ::7, ::3], arguments[7][:, ::5, ::2] = 131, 0
    compare(table, "experts_mxfp4", f"{sizes}, large and small", arguments, B16)


@pytest.mark.parametrize("sizes", INT4, ids=str)
def test_int4_experts_at_real_sizes(table, sizes):
    """Kills codes in another order than the rows, scales of a neighbouring group, experts of other rows that count, a
    shared expert left out or of another row, scales that are no normal numbers raised all the same, digits by the
    largest column of another group, digits that overflow."""
    make, (n, hidden) = Quick(), sizes[:2]
    arguments = packed(make, *sizes)
    compare(table, "experts_int4", str(sizes), arguments, B16)
    arguments[4][:, ::7, ::3], arguments[6][:, ::5, ::2] = 0, 0
    compare(table, "experts_int4", f"{sizes}, zeros", arguments, B16)
    x = arguments[0] / 4
    x[:, 5:600:97] *= 30
    x[:, 32:64], x[:, 64:96], x[:, 128:256] = 0, x[:, 64:96] * 2.0**-110, 255 * 2.0**-9  # the largest significand
    arguments = x, *arguments[1:]
    compare(table, "experts_int4", f"{sizes}, uneven groups", arguments, B16)
    for width in (256, 512, 1024):
        beside = make.floats(n, width), make.weight(hidden, width)
        compare(table, "experts_int4", f"{sizes} beside {width}", (*arguments, *beside), B16)


def routed(make, n, hidden, experts, rule, biased, corrected):
    """Arguments of route: two experts that tie, and no others."""
    gate, (x, gain) = make.weight(experts, hidden), make.routed(64, hidden)
    x = x[:n].contiguous()
    make.tie(gate, 0, experts - 1)
    correction = make.floats(experts, scale=0.3, dtype=torch.float32) if corrected else None
    if corrected:
        correction[[0, experts - 1]] = 0.25
    return x, gain, 1e-6, gate, rule, make.floats(experts) if biased else None, correction


@pytest.mark.parametrize("sizes", ROUTE, ids=str)
def test_routers_at_real_sizes(table, sizes):
    """Kills experts of groups that are not the best, corrections that weigh, ties that go to the higher id, a last
    block that chooses before another one's logits are there, arrivals that are not reset, NaN that spreads."""
    for number in range(3):
        arguments = routed(Quick(), *sizes)
        arguments[0][: number > 1] = float("nan")
        compare(table, "route", str(sizes), arguments, B16)


@pytest.mark.parametrize("width", [1024, 2048])
def test_a_router_beside_a_wide_shared_expert(table, width):
    """Kills a block's later tiles whose sums lack the norm's factor, units and experts mixed up in one tile."""
    make = Quick()
    for n in (1, 9):
        arguments = *routed(make, n, 2048, 256, KIMI, True, True), make.weight(2 * width, 2048)
        compare(table, "route", f"{n} rows", arguments, B16)


def whole_int4(make, n, hidden, experts, width, rule, shared):
    """Arguments of moe_int4, the first n of 64 rows, whose gains make sums large: weights are exact. shared: width of a
    shared expert, 0: none."""
    chosen = routed(make, 64, hidden, experts, rule, False, rule.score == "sigmoid")
    x = chosen[0][:n].contiguous()
    beside = (make.weight(2 * shared, hidden), make.weight(hidden, shared)) if shared else (None, None)
    _, _, _, wide, wide_scale, tall, tall_scale, *_ = packed(make, 1, hidden, experts, width, rule.top_k)
    return x, *chosen[1:], *exact(wide, wide_scale), *exact(tall, tall_scale), "silu", x, *beside


@pytest.mark.parametrize("sizes", MOE_INT4, ids=str)
def test_int4_experts_with_their_router(table, sizes):
    """Kills a router whose sums differ inside gate and up, blocks that choose before all scores are there, a choice
    that down reads too early, launches that are counted twice or not at all."""
    rows, *others = whole_int4(Quick(), 20, *sizes)
    for number in range(3):
        for n in (1, 3, 4, 8, 9, 20):
            x = rows[:n].clone()
            x[: number > 1] = float("nan")
            others[11] = x
            compare(table, "moe_int4", f"{sizes}, {n} rows", (x, *others), B16)


def products(n):
    """(operation, arguments) of every kernel of products at real sizes, the first n rows of the same inputs."""
    make = Quick()

    def rows(width):
        return make.floats(64, width)[:n].contiguous()

    yield "linear", (rows(4096), make.weight(2048, 4096), None, rows(2048))
    yield "linear", (rows(6144), make.weight(2048, 6144))
    yield "linear", (rows(2048), make.weight(5120, 2048), make.floats(5120))
    yield (
        "mlp",
        (rows(2048), make.gain(2048), 1e-6, make.weight(2 * 12288, 2048), make.weight(2048, 12288), "silu", rows(2048)),
    )
    yield "linear", (rows(2880), make.weight(5120, 2880), make.floats(5120))
    yield "linear", (rows(4096), make.weight(2880, 4096), make.floats(2880), rows(2880))
    for d, i in ((7168, 256), (2880, 512), (7168, 2304), (1536, 512)):
        yield "mlp", (rows(d), make.gain(d), 1e-6, make.weight(2 * i, d), make.weight(d, i), "silu", rows(d))
    for d in (2048, 2880, 7168):  # rows that norm without rounding, or near ties fall as it falls
        x, gain = make.routed(64, d)
        yield "head", (x[:n].contiguous(), gain, 1e-6, make.weight(32000, d), 1)
    x, gain = make.routed(64, 2048)
    x = x[:n].contiguous()
    matrices = make.weight(32, 2 * 768, 2048), make.weight(32, 2048, 768)
    rule = next(moe(B16, "cuda", MOE[:1]))[1][4]
    yield "route", routed(make, n, 2880, 128, Routing(4, False, "logits"), True, False)
    yield "route", (*routed(make, n, 7168, 384, KIMI, False, True), make.weight(512, 7168))
    yield "experts_int4", (*packed(make, n, 7168, 48, 256, 8), rows(256), make.weight(7168, 256))
    yield "moe_int4", whole_int4(make, n, 7168, 48, 256, KIMI, 256)
    yield "experts_mxfp4", packed_mxfp4(make, n, 2880, 32, 2880, 4)
    yield "moe", (x, gain, 1e-6, make.weight(32, 2048), rule, None, None, *matrices, "silu", x)


@pytest.mark.parametrize("n", ROWS)
def test_products_at_real_sizes(table, n):
    for op, arguments in products(n):
        compare(table, op, f"{n} rows", arguments, B16)


def test_a_row_is_the_same_among_any(table):
    """Law 1: kills sums that follow the number of rows, experts of a neighbour, tiles that change."""
    want = None
    for n in reversed(ROWS):
        results = []
        for op, arguments in products(n):
            got = getattr(table, op)(*copies(arguments))
            results.append(got if isinstance(got, torch.Tensor) else torch.cat([x.float().view(n, -1) for x in got], 1))
        want = want or results
        for ours, theirs in zip(results, want, strict=True):
            assert torch.equal(ours, theirs[:n]), n


def test_experts_of_several_sizes_in_turn(table):
    """Widths and rows in turn, the same every time. Kills activations of an earlier launch taken for those of this one:
    a place that was not emptied, or emptied for another width; a turn that another launch counts."""
    make, cases = Make(B16, "cuda"), []
    rule = next(moe(B16, "cuda", MOE[:1]))[1][4]
    for width, experts in ((768, 32), (64, 140), (256, 16)):
        weights = make.weight(experts, 2 * width, 256), make.weight(experts, 256, width)
        for rows in (4, 1, 8, 2, 20, 9):
            x, gain, gate = make.floats(rows, 256), make.gain(256), make.weight(experts, 256)
            cases.append((x, gain, 1e-6, gate, rule, None, None, *weights, "silu", x))
    order = [0, 6, 1, 12, 2, 7, 3, 4, 8, 13, 5, 14, 0, 9, 15, 10, 16, 11, 17]
    results = [[table.moe(*cases[i]) for i in order] for _ in range(10)]
    for turn in results:
        for i, y in zip(order, turn, strict=True):
            assert torch.equal(y, results[0][order.index(i)]), i


def test_repeats_are_equal(table):
    """Kills races: partials that are not made zero again, rings overwritten before they are read."""
    for op, arguments in [*products(4), *(("attend", x) for _, x in attend(B16, "cuda", (ATTEND[1], ATTEND[-1])))]:
        results = [getattr(table, op)(*copies(arguments)) for _ in range(20)]
        results = [x if isinstance(x, torch.Tensor) else x[0] for x in results]
        assert all(torch.equal(x, results[0]) for x in results), op
