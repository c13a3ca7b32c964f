"""Prefill passes: the same operations in wide tiles, for many rows. `OPERATIONS` replaces fields of kernels.FUSED.

A prompt's bits may differ from what decode passes would write (design.md, law 1); like theirs they do not depend on the
batch or the Shape: tiles are fixed, and a row's sums follow from the row alone.
"""

import importlib.util
import itertools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from . import attend, norm, routing
from . import experts as moe
from . import moe as block_of_experts
from . import qkv as block
from .activation import gated
from .attention import slot_of
from .tile import up


@dataclass(frozen=True)
class Wide:
    """Launch sizes of a product over many rows: `rows` x `outputs` a program, `depth` columns at a time."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int

    @property
    def constants(self):
        """The kernel's compile-time arguments."""
        return {"BM": self.rows, "BN": self.outputs, "BK": self.depth}

    @property
    def options(self):
        """Launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def wide(dtype, *, rows=128, gated=False):
    """Sizes by dtype; `rows`: 128 for dense products, 64 where tiles are pairs of one expert; gated: two products."""
    if dtype == torch.float32:
        return Wide(32, 32, 32, 4, 2)
    return Wide(rows, 128 if rows == 128 and not gated else 64, 64, 8 if rows == 128 else 4, 3)


@triton.jit
def _gather(order_ptr, tile, rows, choices, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Rows of x, rows of y and which of them exist, for tile `tile`."""
    at = tile * BM + tl.arange(0, BM)
    if EXPERTS:
        pair = tl.load(order_ptr + at)
        return pair // choices, pair, pair >= 0
    return at, at, at < rows


@triton.jit(do_not_specialize=["rows", "choices"])
def _product(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, order_ptr, expert_ptr, rows, outputs, columns, choices,
    EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (o, m): BN outputs of row tile m. EXPERTS: a tile holds pairs of one expert (kernels.experts.group).
    ACTIVATION: act(gate) * up of weight rows o and outputs + o, else the plain product."""
    expert = tl.program_id(1) * 0
    if EXPERTS:
        expert = tl.load(expert_ptr + tl.program_id(1))
    if expert >= 0:
        source, target, live = _gather(order_ptr, tl.program_id(1), rows, choices, EXPERTS, BM)
        out, at = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
        ok = out < outputs
        matrix = outputs.to(tl.int64) * columns
        w_ptr += expert * (matrix * 2 if ACTIVATION != "" else matrix)
        x_low, w_low = source.to(tl.int64)[:, None] * columns, out.to(tl.int64)[:, None] * columns
        y, above = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        for c in range(0, columns, BK):
            column = (c + at)[None, :]
            inside = column < columns
            x = tl.load(x_ptr + x_low + column, mask=live[:, None] & inside, other=0.0)
            w = tl.load(w_ptr + w_low + column, mask=ok[:, None] & inside, other=0.0)
            y = tl.dot(x, tl.trans(w), y, input_precision="ieee")
            if ACTIVATION != "":
                w = tl.load(w_ptr + matrix + w_low + column, mask=ok[:, None] & inside, other=0.0)
                above = tl.dot(x, tl.trans(w), above, input_precision="ieee")
        if BIAS:
            if EXPERTS:
                bias_ptr += expert * (outputs * 2 if ACTIVATION != "" else outputs)
            y += tl.load(bias_ptr + out, mask=ok, other=0.0).to(tl.float32)[None, :]
            if ACTIVATION != "":
                above += tl.load(bias_ptr + outputs + out, mask=ok, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            y = gated(y, above, ACTIVATION)
        place, both = target.to(tl.int64)[:, None] * outputs + out[None, :], live[:, None] & ok[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + place, mask=both, other=0.0).to(tl.float32)
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=both)


def _dense(x, weight, bias=None, residual=None, *, outputs=None, activation="", dtype=None):
    """x [N, I] times weight -> [N, outputs]."""
    (rows, columns), outputs, x = x.shape, outputs or weight.shape[0], x.contiguous()
    y, sizes = x.new_empty(rows, outputs, dtype=dtype), wide(x.dtype, gated=activation != "")
    _product[(triton.cdiv(outputs, sizes.outputs), triton.cdiv(rows, sizes.rows))](
        x, weight, bias, None if residual is None else residual.contiguous(), y, None, None, rows, outputs, columns, 1,
        EXPERTS=False, ACTIVATION=activation, BIAS=bias is not None, RESIDUAL=residual is not None,
        **sizes.constants, **sizes.options,
    )  # fmt: skip
    return y


def linear(x, weight, bias=None, residual=None):
    """As kernels.linear.reference."""
    return _dense(x, weight, bias, residual)


def qkv(x, norm_weight, eps, weight, bias, *rest):
    """As kernels.qkv.reference."""
    if norm_weight is not None:
        x = norm.fused(x, norm_weight, eps)
    q_norm, k_norm, *rest = rest
    return block.place(_dense(x, weight, bias), eps, q_norm, k_norm, *rest)


def mlp(x, norm_weight, eps, gate_up, down, activation, residual=None):
    """As kernels.mlp.reference."""
    normed = norm.fused(x, norm_weight, eps)
    h = _dense(normed, gate_up, outputs=down.shape[1], activation=activation)
    return _dense(h, down, None, residual)


def experts(x, ids, weights, gate_up, down, activation, residual=None, gate_up_bias=None, down_bias=None):
    """As kernels.experts.reference."""
    x, (count, columns, width), sizes = x.contiguous(), down.shape, wide(x.dtype, rows=64)
    order, expert = moe.group(ids, count, sizes.rows)
    pairs, tiles = ids.numel(), expert.numel()
    h, parts = x.new_empty(pairs, width), x.new_empty(pairs, columns, dtype=torch.float32)
    for source, weight, bias, target, choices, act in (
        (x, gate_up, gate_up_bias, h, ids.shape[1], activation),
        (h, down, down_bias, parts, 1, ""),
    ):
        outputs = target.shape[1]
        _product[(triton.cdiv(outputs, sizes.outputs), tiles)](
            source, weight, bias, None, target, order, expert, pairs, outputs, source.shape[1], choices,
            EXPERTS=True, ACTIVATION=act, BIAS=bias is not None, RESIDUAL=False, **sizes.constants, **sizes.options,
        )  # fmt: skip
    return moe.combine(parts, weights, residual, x)


@triton.jit(do_not_specialize=["t", "columns", "table"])
def _flash(
    q_ptr, k_ptr, v_ptr, pages_ptr, prefix_ptr, sinks_ptr, y_ptr, t, columns, table, groups, scale, window,
    PAGE: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Program (s, g, b): BT queries of sequence b and their R heads of group g over all keys up to their own."""
    head, b, m = tl.program_id(1), tl.program_id(2), tl.arange(0, BT * BR)
    row, own = tl.program_id(0) * BT + m // BR, m % BR
    live, lane_k, lane_v = (row < t) & (own < R), tl.arange(0, BK), tl.arange(0, BV)
    prefix = tl.load(prefix_ptr + b).to(tl.int32)
    last = prefix + row
    at = (b.to(tl.int64) * t + row) * (groups * R) + head * R + own
    q = tl.load(q_ptr + at[:, None] * DK + lane_k[None, :], mask=live[:, None] & (lane_k < DK)[None, :], other=0.0)
    end = tl.minimum(tl.minimum(prefix + t, prefix + (tl.program_id(0) + 1) * BT), columns * PAGE)
    begin = prefix * 0
    if WINDOW:
        begin = tl.maximum(prefix + tl.program_id(0) * BT - window + 1, 0) // BN * BN
    top, norm_ = tl.full([BT * BR], float("-inf"), tl.float32), tl.zeros([BT * BR], tl.float32)
    total = tl.zeros([BT * BR, BV], tl.float32)
    for start in range(begin, end, BN):
        key = start + tl.arange(0, BN)
        inside = key < end
        low = (slot_of(pages_ptr + b.to(tl.int64) * table, key, inside, PAGE) * groups + head)[:, None]
        k = tl.load(k_ptr + low * DK + lane_k[None, :], mask=inside[:, None] & (lane_k < DK)[None, :], other=0.0)
        v = tl.load(v_ptr + low * DV + lane_v[None, :], mask=inside[:, None] & (lane_v < DV)[None, :], other=0.0)
        seen = live[:, None] & (key[None, :] <= last[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > last[:, None] - window)
        score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
        high = tl.maximum(top, tl.max(score, 1))
        base = tl.where(high == float("-inf"), 0.0, high)
        weight, keep = tl.math.exp2(score - base[:, None]), tl.math.exp2(top - base)
        norm_, top = norm_ * keep + tl.sum(weight, 1), high
        total = tl.dot(weight.to(v.dtype), v, total * keep[:, None], input_precision="ieee")
    if SINKS:
        sink = tl.load(sinks_ptr + head * R + own, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        high = tl.maximum(top, sink)
        keep = tl.math.exp2(top - high)
        norm_, total = norm_ * keep + tl.math.exp2(sink - high), total * keep[:, None]
    y = (total / norm_[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at[:, None] * DV + lane_v[None, :], y, mask=live[:, None] & (lane_v < DV)[None, :])


def _flash_sizes(dtype, ratio, width_k, width_v):
    """Constants and launch options: 64 (query, head) rows a program, 16 in fp32."""
    padded, narrow = up(ratio), dtype == torch.float32
    queries = max(1, (16 if narrow else 64) // padded)
    constants = {"R": ratio, "DK": width_k, "DV": width_v, "BT": queries, "BR": padded, "BN": 16 if narrow else 64}
    constants |= {"BK": max(16, up(width_k)), "BV": max(16, up(width_v))}
    return constants, {"num_warps": 4, "num_stages": 1 if narrow else 2}


def attention(q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window=None, sinks=None):
    """As kernels.attention.reference, of a causal pass. Raises ValueError for a tree."""
    if tree is not None:
        raise ValueError("prefill attention is causal; a tree takes kernels.attention.fused")
    (rows, heads, width_k), (groups, width_v), b = q.shape, v_plane.shape[1:], pages.shape[0]
    constants, options = _flash_sizes(q.dtype, heads // groups, width_k, width_v)
    t, y = rows // b, q.new_empty(rows, heads * width_v)
    _flash[(triton.cdiv(t, constants["BT"]), groups, b)](
        q.contiguous(), k_plane, v_plane, pages, prefix, sinks, y, t, pages.shape[1], pages.stride(0), groups,
        scale * 1.4426950408889634, window or 0, PAGE=page_size, WINDOW=window is not None, SINKS=sinks is not None,
        **constants, **options,
    )  # fmt: skip
    return y


def route(x, norm_weight, eps, gate, rule, bias=None, correction=None):
    """As kernels.routing.reference."""
    normed = norm.fused(x, norm_weight, eps)
    return normed, *routing.best(_dense(normed, gate, bias, dtype=torch.float32), rule, correction)


class FlashInfer:
    """Prefill attention by FlashInfer's paged kernels, where that package is installed.

    A pass has to be announced by `begin`: a plan is host work over lengths that only the host may read; all layers
    of one width share it. It takes 128 MiB of `device`.
    """

    def __init__(self, device):
        self.workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        self.starts, self.plans = [], {}

    def begin(self, starts):
        """The next pass follows so many committed rows of each sequence (host ints)."""
        self.starts, self.plans = list(starts), {}

    @staticmethod
    def installed():
        """Whether the package is there (nothing is imported)."""
        return importlib.util.find_spec("flashinfer") is not None

    def __call__(self, q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window=None, sinks=None):
        """As `attention`, which serves passes with sinks. Raises ValueError for a tree."""
        if sinks is not None:
            return attention(q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window, sinks)
        if tree is not None:
            raise ValueError("FlashInfer prefill is causal; a tree takes kernels.attention.fused")
        key = (q.shape, k_plane.shape[1:], q.dtype, scale, window)
        if key not in self.plans:
            self.plans[key] = self._plan(q, k_plane, pages, page_size, scale, window)
        paged = tuple(plane.view(-1, page_size, *plane.shape[1:]) for plane in (k_plane, v_plane))
        return self.plans[key].run(q.contiguous(), paged).reshape(q.shape[0], -1)

    def _plan(self, q, k_plane, pages, page_size, scale, window):
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        t = q.shape[0] // len(self.starts)
        used = [-(-(start + t) // page_size) for start in self.starts]
        queries = torch.arange(len(used) + 1, dtype=torch.int32) * t
        bounds = torch.tensor([0, *itertools.accumulate(used)], dtype=torch.int32)
        last = torch.tensor([(start + t - 1) % page_size + 1 for start in self.starts], dtype=torch.int32)
        indices = torch.cat([pages[b, :n] for b, n in enumerate(used)])
        wrapper = BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
        wrapper.plan(
            queries, bounds, indices, last, q.shape[1], k_plane.shape[1], q.shape[2], page_size, causal=True,
            sm_scale=scale, window_left=-1 if window is None else window - 1,
            q_data_type=q.dtype, kv_data_type=k_plane.dtype,
        )  # fmt: skip
        return wrapper


ATTENTIONS = {"triton": None, "flashinfer": FlashInfer}  # of prompts: function(device), None: the table's own


def with_attention(table, op):
    """The table of a prompt's passes with another attention in it, e.g. FlashInfer."""
    return replace(table, attention=op, attend=attend.composed(qkv, op))


OPERATIONS = {
    "linear": linear,
    "qkv": qkv,
    "mlp": mlp,
    "experts": experts,
    "attention": attention,
    "route": route,
    "attend": attend.composed(qkv, attention),
    "moe": block_of_experts.composed(route, experts),
}


def specimens():
    """Compile specimens: Qwen3-30B-A3B and the demo pair."""
    cases = []
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        for experts_, act, bias, residual in (
            (False, "", True, True),
            (False, "silu", False, False),
            (True, "silu", False, False),
            (True, "clamped_swiglu", True, False),
            (True, "", True, False),
        ):
            sizes = wide(dtype, rows=64 if experts_ else 128, gated=act != "")
            types = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "residual_ptr", "y_ptr"), name)
            types |= {"order_ptr": "*i32", "expert_ptr": "*i32"}
            types |= dict.fromkeys(("rows", "outputs", "columns", "choices"), "i32")
            given = {"EXPERTS": experts_, "ACTIVATION": act, "BIAS": bias, "RESIDUAL": residual}
            cases.append((_product, types, given | sizes.constants, sizes.options))
        for ratio, width, extra in ((8, 128, False), (2, 64, True), (3, 80, False)):
            constants, options = _flash_sizes(dtype, ratio, width, width)
            types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "sinks_ptr", "y_ptr"), name) | {"pages_ptr": "*i32"}
            types |= {"prefix_ptr": "*i64", "scale": "fp32"} | dict.fromkeys(
                ("t", "columns", "table", "groups", "window"), "i32"
            )
            cases.append((_flash, types, constants | {"PAGE": 16, "WINDOW": extra, "SINKS": extra}, options))
    return cases
