"""Linear projection with optional bias and residual: fp32 accumulation, rounded once."""

import torch
import triton
import triton.language as tl

from .tile import groups, inverse_rms, product, tile_of


def reference(x, weight, bias=None, residual=None):
    """x [N, I], weight [O, I], bias [O], residual [N, O] -> [N, O] in x's dtype."""
    y = x.float() @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def _project(
    x_ptr, norm_ptr, eps, w_ptr, bias_ptr, residual_ptr, y_ptr, rows, outputs, columns, stride,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (o, r): BO outputs of row tile r. stride: from row to row of x."""
    out = tl.program_id(0) * BO + tl.arange(0, BO)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    ok, live = out < outputs, row < rows
    start = row.to(tl.int64) * stride
    scale = tl.zeros([BR], tl.float32)
    if NORM:
        scale = inverse_rms(x_ptr, start, live, columns, eps, BR, 64 * SPLIT)
    y = product(x_ptr, start, live, scale, norm_ptr, w_ptr, out, ok, columns, NORM, BO, SPLIT, BK, BR, STAGES)
    if BIAS:
        y += tl.load(bias_ptr + out, mask=ok, other=0.0).to(tl.float32)[:, None]
    at = row.to(tl.int64)[None, :] * outputs + out[:, None]
    inside = ok[:, None] & live[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def project(x, norm_weight, eps, weight, bias=None, residual=None, dtype=None):
    """Launch: (norm and) projection of rows [N, I] -> [N, O] in `dtype` (None: that of x); rows may be columns of wider
    ones."""
    (rows, columns), outputs, x = x.shape, weight.shape[0], x if x.stride(1) == 1 else x.contiguous()
    y, tile = x.new_empty(rows, outputs, dtype=dtype), tile_of(x.dtype, columns)
    given = [norm_weight is not None, bias is not None, residual is not None]
    _project[(triton.cdiv(outputs, tile.outputs), groups(rows))](
        x, norm_weight, eps, weight, bias, None if residual is None else residual.contiguous(), y,
        rows, outputs, columns, x.stride(0), *given, **tile.constants, **tile.options,
    )  # fmt: skip
    return y


def fused(x, weight, bias=None, residual=None):
    """The twin of `reference`: weights streamed once for each tile of rows, one order of summation."""
    return project(x, None, 0.0, weight, bias, residual)


def specimens():
    """Compile specimens: the layouts that the engine launches."""
    cases = []
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        for columns in (2048, 4096, 256, 80):
            for norm, bias, residual in ((False, False, True), (True, True, False)):
                tile = tile_of(dtype, columns)
                pointers = {"x_ptr": name, "w_ptr": name, "y_ptr": name, "residual_ptr": name}
                types = {**pointers, "norm_ptr": name, "bias_ptr": name, "eps": "fp32"}
                types |= dict.fromkeys(("rows", "outputs", "columns", "stride"), "i32")
                given = {"NORM": norm, "BIAS": bias, "RESIDUAL": residual}
                cases.append((_project, types, given | tile.constants, tile.options))
    tile = tile_of(torch.bfloat16, 2048)  # a router's logits
    types = dict.fromkeys(("x_ptr", "w_ptr", "norm_ptr", "bias_ptr", "residual_ptr"), "*bf16") | {"y_ptr": "*fp32"}
    types |= {"eps": "fp32"} | dict.fromkeys(("rows", "outputs", "columns", "stride"), "i32")
    given = {"NORM": False, "BIAS": False, "RESIDUAL": False}
    return [*cases, (_project, types, given | tile.constants, tile.options)]
