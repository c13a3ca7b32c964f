"""Prefill passes: the same operations in wide tiles, for many rows. `OPERATIONS` replaces fields of kernels.FUSED.

A prompt's bits may differ from what decode passes would write (design.md, law 1); like theirs they do not depend on the
batch or the Shape: tiles are fixed, and a row's sums follow from the row alone.
"""

import importlib.util
import itertools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from . import attend, norm, routing
from . import experts as moe
from . import moe as block_of_experts
from . import qkv as block
from .activation import gated
from .flash import attention
from .wide import DENSE, FEW, MANY, NARROW, dense, described, halved, of_experts

HEADS = 8  # of a row that one program norms, turns and stores


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
    x_ptr, w_ptr, x_tiles, w_tiles, bias_ptr, residual_ptr, y_ptr, order_ptr, expert_ptr,
    rows, outputs, columns, choices, TILES: tl.constexpr, EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (o, m): BN outputs of row tile m. EXPERTS: a tile holds pairs of one expert (kernels.experts.group).
    ACTIVATION: act(gate) * up of weight rows o and outputs + o, else the plain product. EVEN: BK divides columns.
    TILES: w_tiles describes all weight rows [rows, columns], and x_tiles those of x where they come in order."""
    expert = tl.program_id(1) * 0
    if EXPERTS:
        expert = tl.load(expert_ptr + tl.program_id(1))
    if expert >= 0:
        source, target, live = _gather(order_ptr, tl.program_id(1), rows, choices, EXPERTS, BM)
        out, at = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
        ok = out < outputs
        matrix, first = outputs.to(tl.int64) * columns, tl.program_id(0) * BN
        if TILES:
            first += expert * (outputs * 2 if ACTIVATION != "" else outputs)
        else:
            w_ptr += expert * (matrix * 2 if ACTIVATION != "" else matrix)
        x_low, w_low = source.to(tl.int64)[:, None] * columns, out.to(tl.int64)[:, None] * columns
        y, above = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        for c in range(0, columns, BK):
            column = (c + at)[None, :]
            inside = (column < columns) | EVEN
            if TILES and not EXPERTS:
                x = x_tiles.load([tl.program_id(1) * BM, c])
            else:
                x = tl.load(x_ptr + x_low + column, mask=live[:, None] & inside, other=0.0)
            if TILES:
                w = w_tiles.load([first, c])
            else:
                w = tl.load(w_ptr + w_low + column, mask=ok[:, None] & inside, other=0.0)
            y = tl.dot(x, tl.trans(w), y, input_precision="ieee")
            if ACTIVATION != "":
                if TILES:
                    w = w_tiles.load([first + outputs, c])
                else:
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
    y, sizes = x.new_empty(rows, outputs, dtype=dtype), dense(x.dtype, rows, outputs, activation != "")
    tiles = described(sizes, x, weight)
    _product[(triton.cdiv(outputs, sizes.outputs), triton.cdiv(rows, sizes.rows))](
        x, weight, *tiles, bias, None if residual is None else residual.contiguous(), y, None, None,
        rows, outputs, columns, 1, TILES=tiles[1] is not None, EXPERTS=False, ACTIVATION=activation,
        BIAS=bias is not None, RESIDUAL=residual is not None, EVEN=columns % sizes.depth == 0,
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
    return block.place(_dense(x, weight, bias), eps, q_norm, k_norm, *rest, together=HEADS)


def mlp(x, norm_weight, eps, gate_up, down, activation, residual=None):
    """As kernels.mlp.reference."""
    normed = norm.fused(x, norm_weight, eps)
    h = _dense(normed, gate_up, outputs=down.shape[1], activation=activation)
    return _dense(h, down, None, residual)


def experts(x, ids, weights, gate_up, down, activation, residual=None, gate_up_bias=None, down_bias=None):
    """As kernels.experts.reference."""
    x, (count, columns, width), pairs = x.contiguous(), down.shape, ids.numel()
    first, second = (of_experts(x.dtype, pairs, count, gated) for gated in (True, False))
    order, expert = moe.group(ids, count, first.rows)
    h, parts = x.new_empty(pairs, width), x.new_empty(pairs, columns, dtype=torch.float32)
    for sizes, source, weight, bias, target, choices, act in (
        (first, x, gate_up, gate_up_bias, h, ids.shape[1], activation),
        (second, h, down, down_bias, parts, 1, ""),
    ):
        outputs, inner, tiles = target.shape[1], source.shape[1], described(sizes, source, weight, in_order=False)
        _product[(triton.cdiv(outputs, sizes.outputs), expert.numel())](
            source, weight, *tiles, bias, None, target, order, expert, pairs, outputs, inner, choices,
            TILES=tiles[1] is not None, EXPERTS=True, ACTIVATION=act, BIAS=bias is not None, RESIDUAL=False,
            EVEN=inner % sizes.depth == 0, **sizes.constants, **sizes.options,
        )  # fmt: skip
    return moe.combine(parts, weights, residual, x)


def route(x, norm_weight, eps, gate, rule, bias=None, correction=None, shared=None):
    """As kernels.routing.reference."""
    normed = norm.fused(x, norm_weight, eps)
    chosen = normed, *routing.best(_dense(normed, gate, bias, dtype=torch.float32), rule, correction)
    if shared is None:
        return chosen
    return *chosen, _dense(normed, shared, outputs=shared.shape[0] // 2, activation="silu")


class FlashInfer:
    """Prefill attention by FlashInfer's paged kernels, where that package is installed.

    A pass has to be announced by `begin`: a plan is host work over lengths that only the host may read; all layers
    of one shape and window share it. It takes 128 MiB of `device`, and a plan 8 MiB there and 8 MiB of pinned memory.

    other: serves what FlashInfer does not: sinks, and heads of other `WIDTHS` or with values of another width than
    keys, for which kernels of the package write wrong numbers without a word. event: makes a torch.cuda.Event.
    """

    WIDTHS = (64, 128, 256)

    def __init__(self, device, other=attention, event=torch.cuda.Event):
        self.workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        self.other, self.event = other, event
        self.starts, self.plans, self.before = [], {}, {}

    def begin(self, starts):
        """The next pass follows so many committed rows of each sequence (host ints).

        torch does not know of the package's own copy of a plan to the device, and would lend its pinned memory to the
        next plan with that copy still queued. So plans outlive their pass by one, and go when the copies have run.
        """
        for _, copied in self.before.values():
            copied.synchronize()
        self.starts, self.plans, self.before = list(starts), {}, self.plans

    @staticmethod
    def installed():
        """Whether the package is there (nothing is imported)."""
        return importlib.util.find_spec("flashinfer") is not None

    def __call__(self, q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window=None, sinks=None):
        """As `attention`. Raises ValueError for a tree."""
        if tree is not None:
            raise ValueError("FlashInfer prefill is causal; a tree takes kernels.attention.fused")
        if sinks is not None or k_plane.shape != v_plane.shape or q.shape[2] not in self.WIDTHS:
            return self.other(q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window, sinks)
        key = (q.shape, k_plane.shape[1:], q.dtype, scale, window)
        if key not in self.plans:
            self.plans[key] = self._plan(q, k_plane, pages, page_size, scale, window)
        paged = tuple(plane.view(-1, page_size, *plane.shape[1:]) for plane in (k_plane, v_plane))
        wrapper, _ = self.plans[key]
        return wrapper.run(q.contiguous(), paged, out=q.new_empty(q.shape)).reshape(q.shape[0], -1)

    def _plan(self, q, k_plane, pages, page_size, scale, window):
        """-> the package's wrapper, planned, and the event after its copy to the device."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        t = q.shape[0] // len(self.starts)
        used = [-(-(start + t) // page_size) for start in self.starts]
        queries = torch.arange(len(used) + 1, dtype=torch.int32) * t
        bounds = torch.tensor([0, *itertools.accumulate(used)], dtype=torch.int32)
        last = torch.tensor([(start + t - 1) % page_size + 1 for start in self.starts], dtype=torch.int32)
        indices = torch.cat([pages[b, :n] for b, n in enumerate(used)])
        wrapper, copied = BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD"), self.event()
        wrapper.plan(
            queries, bounds, indices, last, q.shape[1], k_plane.shape[1], q.shape[2], page_size, causal=True,
            sm_scale=scale, window_left=-1 if window is None else window - 1,
            q_data_type=q.dtype, kv_data_type=k_plane.dtype,
        )  # fmt: skip
        copied.record()
        return wrapper, copied


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
    """Compile specimens: all sizes, with experts and without."""
    cases = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for experts_, act, bias, residual, even in (
            (False, "", True, True, False),
            (False, "silu", False, False, True),
            (True, "silu", False, False, True),
            (True, "clamped_swiglu", True, False, True),
            (True, "", True, False, True),
        ):
            types = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "residual_ptr", "y_ptr"), f"*{name}")
            types |= {"order_ptr": "*i32", "expert_ptr": "*i32"}
            types |= dict.fromkeys(("rows", "outputs", "columns", "choices"), "i32")
            given = {"EXPERTS": experts_, "ACTIVATION": act, "BIAS": bias, "RESIDUAL": residual, "EVEN": even}
            several = [NARROW] if dtype == torch.float32 else (FEW, MANY) if experts_ else DENSE
            for sizes in several:
                own = sizes if sizes is FEW else halved(sizes, act != "" and dtype != torch.float32)
                for tiles in {False, own.rows >= 128}:
                    kinds = {"x_tiles": own.rows, "w_tiles": own.outputs} if tiles else {}
                    kinds = {n: f"tensordesc<{name}[{r}, {own.depth}]>" for n, r in kinds.items()}
                    if experts_:
                        kinds.pop("x_tiles", None)
                    none = dict.fromkeys({"x_tiles", "w_tiles"} - set(kinds))
                    cases.append(
                        (_product, types | kinds, given | none | {"TILES": tiles} | own.constants, own.options)
                    )
    return cases
