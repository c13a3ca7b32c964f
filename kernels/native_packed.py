"""Packed experts in CUDA C++ (csrc/fewrows/packed.cuh, int4.cuh, fp4.cuh): twins of the references whose first argument
is the kernels.native.Library that holds them. Sizes that no kernel is built for keep their Triton twin."""

import ctypes
import functools

import torch

from . import experts_int4 as int4
from . import experts_mxfp4 as mxfp4
from . import moe, native_routing
from .native_routing import MOST_EXPERTS
from .structs import filled, structure
from .tile import groups

HIDDEN, WIDTHS = (256, 512, 2048, 4096, 7168), (256, 512, 768, 1024, 1536, 2048)  # of int4.cuh
FP4_HIDDEN = (256, 320, 2880)  # of fp4.cuh, whose widths are whole groups
MOST_CHOICES, CHOSEN = 8, 64
SHARED = (256, 512)  # of a shared expert that int4.cuh adds

Int4Experts = structure(
    "Int4Experts",
    p="x ids weights gate_up gate_up_scale down down_scale hidden residual shared shared_down y",
    i="rows columns width experts choices shared_width",
)
Fp4Experts = structure(
    "Fp4Experts",
    p="x ids weights gate_up gate_up_scale gate_up_bias down down_scale down_bias hidden residual y",
    i="rows columns width experts choices",
)


def experts_int4(
    library, x, ids, weights, gate_up, gate_up_scale, down, down_scale, activation, residual=None, hidden=None,
    shared=None,
):  # fmt: skip
    """The twin of experts_int4.reference."""
    packed = gate_up, gate_up_scale, down, down_scale
    if not _serves(x, ids.shape[1], *packed, activation):
        return int4.fused(x, ids, weights, *packed, activation, residual, hidden, shared)
    if shared is not None and shared.shape[1] not in SHARED:
        return library.linear(
            hidden, shared, None, experts_int4(library, x, ids, weights, *packed, activation, residual)
        )
    return _launched(
        library, None, x.contiguous(), ids.contiguous(), weights.contiguous(), *packed, residual, hidden, shared
    )


def moe_int4(
    library, x, norm_weight, eps, gate, rule, bias, correction, gate_up, gate_up_scale, down, down_scale, activation,
    residual=None, shared_gate_up=None, shared_down=None,
):  # fmt: skip
    """The twin of moe.composed_int4: a router in the launch of gate and up for up to 8 rows, beside which a shared
    expert's gate and up are read; of more rows in one of its own, with the same sums."""
    packed = gate_up, gate_up_scale, down, down_scale
    fits = shared_down is None or shared_down.shape[1] in SHARED
    if not (fits and native_routing.serves(x, gate, rule) and _serves(x, rule.top_k, *packed, activation)):
        parts = (functools.partial(f, library) for f in (native_routing.route, experts_int4))
        return moe.composed_int4(*parts)(
            x, norm_weight, eps, gate, rule, bias, correction, *packed, activation, residual, shared_gate_up,
            shared_down,
        )  # fmt: skip
    x = x.contiguous()
    given = native_routing.fields(library, x, norm_weight, eps, gate, rule, bias, correction, shared_gate_up)
    router = filled(native_routing.Router, **given)
    return _launched(
        library, router, x, given["ids"], given["weights"], *packed, residual, given["hidden"], shared_down
    )


def _serves(x, choices, gate_up, gate_up_scale, down, down_scale, activation):
    """Whether int4.cuh has kernels for these sizes."""
    experts, columns, words = down.shape
    width, bf16 = words * 8, gate_up_scale.dtype == down_scale.dtype == x.dtype == torch.bfloat16
    groups_of_32 = gate_up_scale.shape[-1] * 32 == columns and down_scale.shape[-1] * 32 == width
    sizes = columns in HIDDEN and width in WIDTHS and choices <= MOST_CHOICES and experts <= MOST_EXPERTS
    return sizes and groups_of_32 and bf16 and activation == "silu"


def _launched(library, router, x, ids, weights, gate_up, gate_up_scale, down, down_scale, residual, hidden, shared):
    """Experts of rows that come routed, or that `router` routes first, a struct that writes ids, weights and hidden."""
    (experts, columns, words), (rows, choices) = down.shape, ids.shape
    y = x.new_empty(rows, columns)
    library.call(
        "eagle3_int4_experts", Int4Experts, None if router is None else ctypes.byref(router), library.blocks,
        x=x, ids=ids, weights=weights, gate_up=gate_up, gate_up_scale=gate_up_scale, down=down, down_scale=down_scale,
        hidden=x.new_empty(groups(rows), CHOSEN, 8, words * 8),
        residual=None if residual is None else residual.contiguous(), shared=hidden, shared_down=shared, y=y,
        rows=rows, columns=columns, width=words * 8, experts=experts, choices=choices,
        shared_width=0 if shared is None else shared.shape[1],
    )  # fmt: skip
    return y


def experts_mxfp4(
    library, x, ids, weights, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, activation,
    residual=None,
):  # fmt: skip
    """The twin of experts_mxfp4.reference."""
    (experts, columns, words), (rows, choices) = down.shape, ids.shape
    sizes = columns in FP4_HIDDEN and choices <= MOST_CHOICES and experts <= MOST_EXPERTS
    if not (sizes and activation == "clamped_swiglu"):
        packed = gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias
        return mxfp4.fused(x, ids, weights, *packed, activation, residual)
    y, spans = x.new_empty(rows, columns), -(-words // 32)
    library.call(
        "eagle3_fp4_experts", Fp4Experts, library.blocks,
        x=x.contiguous(), ids=ids.contiguous(), weights=weights.contiguous(), gate_up=gate_up,
        gate_up_scale=gate_up_scale, gate_up_bias=gate_up_bias, down=down, down_scale=down_scale,
        down_bias=down_bias, hidden=x.new_empty(groups(rows), CHOSEN, 8, spans * 256),
        residual=None if residual is None else residual.contiguous(), y=y,
        rows=rows, columns=columns, width=words * 8, experts=experts, choices=choices,
    )  # fmt: skip
    return y
