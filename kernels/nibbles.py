"""Grouped experts whose weights are four-bit codes: what INT4 and MXFP4 share.

Eight codes lie in an int32 along a row of the matrix, INT4 the lowest bits first, MXFP4 as kernels.experts_mxfp4 has
them; `scale` of each group of codes multiplies them. A product takes its columns in the order of their place in the
word: first all columns 8 w, then all 8 w + 1 …, so that a tile of words is unpacked where it lies in registers, one
shift for a whole tile. The rows it meets are stored in that order too: [N, 8, columns / 8], "by place". Law 1 as in
kernels.tile: fixed tiles, one order of summation.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import experts
from .activation import gated
from .mlp import halves
from .tile import ROWS, up

PLACES = 8  # codes in an int32


@dataclass(frozen=True)
class Tile:
    """Launch sizes: `split` warps share the words of a row, each takes `depth` of them at a time.

    outputs: weight rows a program handles; stages: loads in flight.
    """

    outputs: int
    split: int
    depth: int
    stages: int

    @property
    def constants(self):
        """The kernel's compile-time arguments."""
        return {"BO": self.outputs, "SPLIT": self.split, "BW": self.depth, "BR": ROWS, "STAGES": self.stages}

    @property
    def options(self):
        """Launch options."""
        return {"num_warps": self.split, "num_stages": self.stages}


def tile_of(dtype, words):
    """Tile for rows of `words` words: a function of the matrix, as law 1 asks."""
    if dtype == torch.float32:  # IEEE products on the FMA units
        return Tile(16, min(4, up(-(-words // 16))), 16, 2)
    depth = 32 if words % 32 == 0 else 16
    return Tile(64, min(4, up(-(-words // depth))), depth, 3)


@triton.jit
def paired(words, number: tl.constexpr):
    """The `number`-th pair of codes of each word of MXFP4, as kernels.experts_mxfp4.paired has it."""
    if number == 0:
        bits = words
    elif number == 1:
        bits = words << 6
    elif number == 2:
        bits = (words << 12) | ((words >> 20) & 0xFFF)
    else:
        bits = (words << 2) ^ (words >> 6)
    return bits & -0x7E3F7E40


@triton.jit
def _codes(words, place: tl.constexpr, KIND: tl.constexpr):
    """The values of the codes at one place of each word, fp32."""
    if KIND == "int4":
        value = (((words >> (4 * place)) & 15) - 8).to(tl.float32)
    else:  # e2m1: sign, two bits of exponent, one of mantissa, where kernels.experts_mxfp4 has them
        pair = paired(words, place // 2) >> place % 2 * 16
        low, power, sign = (pair >> 6) & 1, (pair >> 7) & 3, (pair >> 15) & 1
        bits = tl.where(power == 0, low * 0x3F000000, ((power + 126) << 23) | (low << 22))
        value = (bits | (sign << 31)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _scales(scale, KIND: tl.constexpr):
    """Stored scales as factors, fp32. MXFP4 stores a power of two by its exponent + 127; 255 is NaN."""
    if KIND == "int4":
        factor = scale.to(tl.float32)
    else:
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        factor = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    return factor


@triton.jit
def product(
    x_ptr, start, live, w_ptr, s_ptr, outs, ok, words, group, KIND: tl.constexpr,
    BO: tl.constexpr, SPLIT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Packed rows `outs` [BO] times a tile of BR rows of x, by place -> [BO, BR] fp32.

    start: [BR] int64, element of x where each row begins; live: [BR], dead rows count as zeros; ok: [BO] likewise;
    group: words that share a scale. A weight is code * scale rounded to the dtype of x.
    """
    piece, at = tl.arange(0, SPLIT), tl.arange(0, BW)
    low, groups = outs.to(tl.int64) * words, words // group
    first = outs.to(tl.int64) * groups
    total = tl.zeros([SPLIT, BO, BR], tl.float32)
    for c in tl.range(0, words, SPLIT * BW, num_stages=STAGES):
        word = c + piece[:, None] * BW + at[None, :]  # SPLIT BW
        inside = word < words
        mask = ok[None, :, None] & inside[:, None, :]
        w = tl.load(w_ptr + low[None, :, None] + word[:, None, :], mask=mask, other=0)
        s = _scales(tl.load(s_ptr + first[None, :, None] + (word // group)[:, None, :], mask=mask, other=0), KIND)
        for place in tl.static_range(8):
            x = tl.load(
                x_ptr + start[None, None, :] + (place * words + word)[:, :, None],
                mask=live[None, None, :] & inside[:, :, None],
                other=0.0,
            )
            total = tl.dot((_codes(w, place, KIND) * s).to(x.dtype), x, total, input_precision="ieee")
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["rows", "pairs", "tiles"])
def _prepare(
    x_ptr, y_ptr, ids_ptr, order_ptr, expert_ptr, rank_ptr, rows, words, pairs, tiles, experts_,
    BP: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Program (0, 0) deals the pairs to tiles (kernels.experts), (n + 1, i) writes BX words of row n by place."""
    row = tl.program_id(0).to(tl.int64) - 1
    if row < 0:
        if tl.program_id(1) == 0:
            experts._group(ids_ptr, order_ptr, expert_ptr, rank_ptr, pairs, tiles, experts_, BP, BE, BR)
    else:
        word, place = tl.program_id(1) * BX + tl.arange(0, BX), tl.arange(0, 8)
        inside = (word < words)[:, None]
        x = tl.load(x_ptr + row * words * 8 + word[:, None] * 8 + place[None, :], mask=inside)
        tl.store(y_ptr + row * words * 8 + place[None, :] * words + word[:, None], x, mask=inside)


@triton.jit(do_not_specialize=["choices"])
def _gate_up(
    x_ptr, w_ptr, s_ptr, bias_ptr, order_ptr, expert_ptr, h_ptr, choices, width, words, group,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, WOVEN: tl.constexpr,
    BO: tl.constexpr, SPLIT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, tile): BO/2 gated units of the tile's pairs -> h [pairs, 8, width / 8], by place.

    WOVEN: rows are gate 0, up 0, gate 1, up 1 …, else all gate rows, then all up rows.
    """
    expert = tl.load(expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        half: tl.constexpr = BO // 2
        m = tl.arange(0, BO)
        unit = tl.program_id(0) * half + m % half
        outs = unit * 2 + m // half if WOVEN else unit + m // half * width
        pair = tl.load(order_ptr + tl.program_id(1) * BR + tl.arange(0, BR))
        start = (pair // choices).to(tl.int64) * words * 8
        w_ptr += expert * 2 * width * words
        s_ptr += expert * 2 * width * (words // group)
        y = product(
            x_ptr, start, pair >= 0, w_ptr, s_ptr, outs, unit < width, words, group, KIND, BO, SPLIT, BW, BR, STAGES
        )
        if BIAS:
            y += tl.load(bias_ptr + expert * 2 * width + outs, mask=unit < width, other=0.0).to(tl.float32)[:, None]
        gate, up = halves(y, half, BR)
        unit = tl.program_id(0) * half + tl.arange(0, half)
        at = pair.to(tl.int64)[None, :] * width + (unit % 8 * (width // 8) + unit // 8)[:, None]
        h = gated(gate, up, ACTIVATION).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, h, mask=(unit < width)[:, None] & (pair >= 0)[None, :])


@triton.jit
def _down(
    h_ptr, w_ptr, s_ptr, bias_ptr, order_ptr, expert_ptr, y_ptr, outputs, words, group,
    KIND: tl.constexpr, BIAS: tl.constexpr,
    BO: tl.constexpr, SPLIT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (o, tile): BO outputs of the tile's pairs -> y [pairs, outputs] fp32."""
    expert = tl.load(expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        out = tl.program_id(0) * BO + tl.arange(0, BO)
        pair = tl.load(order_ptr + tl.program_id(1) * BR + tl.arange(0, BR))
        start = pair.to(tl.int64) * words * 8
        w_ptr += expert * outputs * words
        s_ptr += expert * outputs * (words // group)
        y = product(
            h_ptr, start, pair >= 0, w_ptr, s_ptr, out, out < outputs, words, group, KIND, BO, SPLIT, BW, BR, STAGES
        )
        if BIAS:
            y += tl.load(bias_ptr + expert * outputs + out, mask=out < outputs, other=0.0).to(tl.float32)[:, None]
        at = pair.to(tl.int64)[None, :] * outputs + out[:, None]
        tl.store(y_ptr + at, y, mask=(out < outputs)[:, None] & (pair >= 0)[None, :])


def prepare(x, ids, count):
    """Rows by place, and their pairs by expert: x [N, 8, D / 8], order, expert (kernels.experts.group). One launch
    where pairs are few."""
    (rows, columns), pairs = x.shape, ids.numel()
    tiles, words, y = experts.tiles(pairs, count, ROWS), columns // PLACES, torch.empty_like(x)
    if pairs > experts.MANY:
        order, expert = experts.group(ids, count)
        rank, pairs, tiles = order, 0, 0  # dealt already
    else:
        order, expert, rank = (
            torch.empty(n, dtype=torch.int32, device=x.device) for n in (tiles * ROWS, tiles, max(1, pairs))
        )
    _prepare[(rows + 1, triton.cdiv(words, 256))](
        x, y, ids.contiguous(), order, expert, rank, rows, words, pairs, tiles, count,
        **experts.grouping(count), BX=256, num_warps=8,
    )  # fmt: skip
    return y, order, expert


def run(kind, x, ids, weights, gate_up, down, activation, residual, woven=False):
    """Experts of `kind` ("int4", "fp4"); gate_up, down: (words, scale, bias or None) each. -> [N, D]."""
    (wide, wide_scale, wide_bias), (tall, tall_scale, tall_bias) = gate_up, down
    count, columns, tall_words = tall.shape
    width, words = tall_words * PLACES, wide.shape[-1]
    spread, order, expert = prepare(x.contiguous(), ids, count)
    pairs, choices, tiles = ids.numel(), ids.shape[1], expert.numel()
    h, tile = x.new_empty(pairs, width), tile_of(x.dtype, words)
    _gate_up[(triton.cdiv(width, tile.outputs // 2), tiles)](
        spread, wide, wide_scale, wide_bias, order, expert, h, choices, width, words, words // wide_scale.shape[-1],
        KIND=kind, ACTIVATION=activation, BIAS=wide_bias is not None, WOVEN=woven, **tile.constants, **tile.options,
    )  # fmt: skip
    parts, tile = x.new_empty(pairs, columns, dtype=torch.float32), tile_of(x.dtype, tall_words)
    _down[(triton.cdiv(columns, tile.outputs), tiles)](
        h, tall, tall_scale, tall_bias, order, expert, parts, columns, tall_words, tall_words // tall_scale.shape[-1],
        KIND=kind, BIAS=tall_bias is not None, **tile.constants, **tile.options,
    )  # fmt: skip
    return experts.combine(parts, weights, residual, x)


def samples(kind, sizes, names, scale, activation, bias=False):
    """Compile specimens of experts of `kind`: (D, I, E) in `sizes`, activations of each type in `names`, scales of type
    `scale` (None: that of the activations)."""
    dtypes = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
    cases = []
    for name in names:
        tables = {"w_ptr": "*i32", "s_ptr": scale or name, "bias_ptr": name, "order_ptr": "*i32", "expert_ptr": "*i32"}
        for columns, width, count in sizes:
            tile = tile_of(dtypes[name], columns // PLACES)
            types = tables | {"x_ptr": name, "h_ptr": name} | dict.fromkeys(("choices", "width", "words"), "i32")
            fixed = {"KIND": kind, "ACTIVATION": activation, "BIAS": bias, "WOVEN": bias}
            cases.append((_gate_up, types | {"group": "i32"}, fixed | tile.constants, tile.options))
            tile = tile_of(dtypes[name], width // PLACES)
            types = tables | {"h_ptr": name, "y_ptr": "*fp32"} | dict.fromkeys(("outputs", "words", "group"), "i32")
            cases.append((_down, types, {"KIND": kind, "BIAS": bias} | tile.constants, tile.options))
            types = {"x_ptr": name, "y_ptr": name, "ids_ptr": "*i64"}
            types |= dict.fromkeys(("order_ptr", "expert_ptr", "rank_ptr"), "*i32")
            types |= dict.fromkeys(("rows", "words", "pairs", "tiles", "experts_"), "i32")
            cases.append((_prepare, types, experts.grouping(count) | {"BX": 256}, {"num_warps": 8}))
    return cases
