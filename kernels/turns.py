"""Packed weights in turns: the order in which products over many rows take their columns, so that a tile of words
becomes a matrix of 16-bit weights where it lies in registers.

A word (int32) holds `CODES` weights. Two of them, whose bits lie 16 apart or in neighbouring bytes, become a pair of
16-bit numbers at once. A turn is `TURN` columns: first the first pair of every word, then the second pair … Rows that
meet such weights are stored in the same order, their last turn filled up with zeros: "rows in turns".
"""

import triton
import triton.language as tl

from . import nibbles

TURN = 128  # columns: of FP8 a block
CODES = {"int4": 8, "fp4": 8, "fp8": 4}  # weights in a word
LIFT = tl.constexpr(2.0**32)  # keeps factors of codes that lie in the last bits of a bf16 below its infinity


def places(columns):
    """Places of a row of so many columns in whole turns."""
    return triton.cdiv(columns, TURN) * TURN


@triton.jit
def _pair(words, factor, number: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Weights of the `number`-th pair of each word [BO, BW], times `factor` of INT4 and MXFP4 -> [BO, BW, 2].

    PACKED: in bf16, by instructions for two at once, times 1 / LIFT of INT4 and MXFP4: INT4 codes are the last bits of
    a number of bf16, 2^-133 or 2^-129 each, MXFP4 codes are moved where bf16 has its sign and the last bits of its
    exponent, 2^126 too low (subnormals too; `factor` makes up for that). Else in fp32, rounded to DTYPE.
    """
    if KIND == "fp8":
        if PACKED:
            low, high = tl.inline_asm_elementwise(
                "{ .reg .b16 a, b; .reg .b32 c; .reg .f32 x, y; cvt.u16.u32 a, $2; cvt.rn.f16x2.e4m3x2 c, a;"
                " mov.b32 {a, b}, c; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 c, y, x;"
                " mov.b32 {$0, $1}, c; }",
                "=h,=h,r",
                [words >> 16 * number],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=1,
            )
        else:
            low = (words >> 16 * number).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
            high = (words >> 16 * number + 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif PACKED and KIND == "int4":
        step: tl.constexpr = 2.0**97 if number % 2 else 2.0**101
        # -2^-29 by its bits: Triton (3.6 and 3.9) keeps six decimals of a number that meets a tensor of bf16
        eight = tl.inline_asm_elementwise(
            "{ .reg .b16 c; mov.b16 c, 0xb100; mul.rn.bf16 $0, $1, c; }",
            "=h,h",
            [factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=1,
        )
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 a, f, o; mov.b32 f, {$3, $3}; mov.b32 o, {$4, $4}; fma.rn.bf16x2 a, $2, f, o;"
            " mov.b32 {$0, $1}, a; }",
            "=h,=h,r,h,h",
            [(words >> number // 2 * 8) & (0x00F000F0 if number % 2 else 0x000F000F), factor * step, eight],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    elif PACKED:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 a, f; mov.b32 f, {$3, $3}; mul.rn.bf16x2 a, $2, f; mov.b32 {$0, $1}, a; }",
            "=h,=h,r,h",
            [nibbles.paired(words, number), factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        first: tl.constexpr = number if KIND == "int4" else 2 * number
        other: tl.constexpr = number + 4 if KIND == "int4" else 2 * number + 1
        low = (nibbles._codes(words, first, KIND) * factor).to(DTYPE)
        high = (nibbles._codes(words, other, KIND) * factor).to(DTYPE)
    return tl.join(low, high)


@triton.jit
def factors(scale, KIND: tl.constexpr, PACKED: tl.constexpr):
    """Stored scales as `unpacked` takes them. PACKED: bf16; of MXFP4 those from 2^34 on count as infinite, and weights
    below 2^-100 lose their last bits."""
    if not PACKED:
        y = nibbles._scales(scale, KIND)
    elif KIND == "int4":
        y = scale
    else:  # 2^126 times the power of two that is stored, over LIFT
        y = ((tl.minimum(scale.to(tl.int32), 161) + 94) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def unpacked(words, factor, KIND: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Words of whole turns [BO, BW] -> their weights [BO, CODES * BW], in the order of rows in turns."""
    rows: tl.constexpr = words.shape[0]
    first = tl.join(_pair(words, factor, 0, KIND, DTYPE, PACKED), _pair(words, factor, 1, KIND, DTYPE, PACKED))
    if KIND == "fp8":
        y = tl.reshape(tl.permute(first, (0, 3, 1, 2)), [rows, 4 * words.shape[1]])
    else:
        second = tl.join(_pair(words, factor, 2, KIND, DTYPE, PACKED), _pair(words, factor, 3, KIND, DTYPE, PACKED))
        y = tl.reshape(tl.join(first, second), [rows, words.shape[1] // 16, 16, 2, 2, 2])
        y = tl.reshape(tl.permute(y, (0, 1, 5, 4, 2, 3)), [rows, 8 * words.shape[1]])
    return y


@triton.jit
def _columns(at, KIND: tl.constexpr):
    """Columns of a matrix at places `at` of a row in turns."""
    codes: tl.constexpr = 4 if KIND == "fp8" else 8
    words: tl.constexpr = 128 // codes
    pair, half = at // (2 * words) % (codes // 2), at % 2
    code = pair + 4 * half if KIND == "int4" else 2 * pair + half
    return at // 128 * 128 + at // 2 % words * codes + code


@triton.jit
def turned(h, KIND: tl.constexpr):
    """Units [U, BR], a part of a turn -> [BR, U], all first pairs, then all second pairs …"""
    codes: tl.constexpr = 4 if KIND == "fp8" else 8
    units: tl.constexpr = h.shape[0]
    h = tl.trans(h)
    if KIND == "int4":
        h = tl.permute(tl.reshape(h, [h.shape[0], units // 8, 2, 4]), (0, 3, 1, 2))
    else:
        h = tl.permute(tl.reshape(h, [h.shape[0], units // codes, codes // 2, 2]), (0, 2, 1, 3))
    return tl.reshape(h, [h.shape[0], units])


@triton.jit
def _spread(x_ptr, y_ptr, columns, places, KIND: tl.constexpr, BX: tl.constexpr):
    """Program (n, i): BX places of row n in turns, zeros past the last column."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BX + tl.arange(0, BX)
    column = _columns(at, KIND)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0)
    tl.store(y_ptr + row * places + at, x, mask=at < places)


def spread(kind, x):
    """Rows [N, D] -> rows in turns [N, places]."""
    rows, columns = x.shape
    y = x.new_empty(rows, places(columns))
    _spread[(rows, triton.cdiv(y.shape[1], 1024))](x, y, columns, y.shape[1], KIND=kind, BX=1024, num_warps=4)
    return y


def specimens():
    """Compile specimens."""
    cases = []
    for name in ("*bf16", "*fp16", "*fp32"):
        types = {"x_ptr": name, "y_ptr": name, "columns": "i32", "places": "i32"}
        cases += [(_spread, types, {"KIND": kind, "BX": 1024}, {"num_warps": 4}) for kind in CODES]
    return cases
