"""Packed experts in CUDA C++ (csrc/fewrows/packed.cuh, int4.cuh, fp4.cuh): twins of the references whose first argument
is the kernels.native.Library that holds them. Sizes that no kernel is built for keep their Triton twin."""

import torch

from . import experts_int4 as int4
from . import experts_mxfp4 as mxfp4
from .structs import structure
from .tile import groups

HIDDEN, WIDTHS = (256, 512, 2048, 4096, 7168), (256, 512, 768, 1024, 1536, 2048)  # of int4.cuh
FP4_HIDDEN = (256, 320, 2880)  # of fp4.cuh, whose widths are whole groups
MOST_CHOICES, MOST_EXPERTS, CHOSEN = 8, 512, 64
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
    (experts, columns, words), (rows, choices) = down.shape, ids.shape
    width, bf16 = words * 8, gate_up_scale.dtype == down_scale.dtype == x.dtype == torch.bfloat16
    groups_of_32 = gate_up_scale.shape[-1] * 32 == columns and down_scale.shape[-1] * 32 == width
    sizes = columns in HIDDEN and width in WIDTHS and choices <= MOST_CHOICES and experts <= MOST_EXPERTS
    packed = gate_up, gate_up_scale, down, down_scale
    if not (sizes and groups_of_32 and bf16 and activation == "silu"):
        return int4.fused(x, ids, weights, *packed, activation, residual, hidden, shared)
    if shared is not None and shared.shape[1] not in SHARED:
        return library.linear(
            hidden, shared, None, experts_int4(library, x, ids, weights, *packed, activation, residual)
        )
    y = x.new_empty(rows, columns)
    library.call(
        "eagle3_int4_experts", Int4Experts, library.blocks,
        x=x.contiguous(), ids=ids.contiguous(), weights=weights.contiguous(), gate_up=gate_up,
        gate_up_scale=gate_up_scale, down=down, down_scale=down_scale,
        hidden=x.new_empty(groups(rows), CHOSEN, 8, width),
        residual=None if residual is None else residual.contiguous(), shared=hidden, shared_down=shared, y=y,
        rows=rows, columns=columns, width=width, experts=experts, choices=choices,
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
