"""Packed weights in turns: the order in which products over many rows take their columns, so that a tile of words
becomes a matrix of 16-bit weights where it lies in registers.

A word (int32) holds `CODES` weights. Two of them, whose bits lie 16 apart or in neighbouring bytes, become a pair of
16-bit numbers at once. A turn is `WORDS` words of a row: first the first pair of every word, then the second pair …
Rows that meet such weights are stored in the same order, their last turn filled up with zeros: "rows in turns".
"""

import triton
import triton.language as tl

from . import nibbles

CODES = {"int4": 8, "fp4": 8, "fp8": 4}  # weights in an int32
WORDS = {"int4": 16, "fp4": 16, "fp8": 32}  # of a turn: 128 columns, which of FP8 are a block


def places(kind, words):
    """Places of a row in turns whose matrices have rows of so many words."""
    return triton.cdiv(words, WORDS[kind]) * WORDS[kind] * CODES[kind]


@triton.jit
def _pair(words, factor, number: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Weights of the `number`-th pair of each word [BO, BW], times `factor` of INT4 and MXFP4 -> [BO, BW, 2].

    PACKED: in bf16, by instructions for two at once. MXFP4 codes are moved where bf16 has its sign and the last bits of
    its exponent, 2^126 too low (subnormals too); INT4 codes are the last bits of 128 + code. Else each weight is
    computed in fp32 and rounded to DTYPE.
    """
    if KIND == "fp8":
        if PACKED:
            low, high = tl.inline_asm_elementwise(
                """{ .reg .b16 a, b; .reg .b32 c; .reg .f32 x, y;
                cvt.u16.u32 a, $2;
                cvt.rn.f16x2.e4m3x2 c, a;
                mov.b32 {a, b}, c;
                cvt.f32.f16 x, a;
                cvt.f32.f16 y, b;
                cvt.rn.bf16x2.f32 c, y, x;
                mov.b32 {$0, $1}, c; }""",
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
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, s;
            mov.b32 s, {$3, $3};
            mov.b32 b, 0x43004300;
            lop3.b32 a, $2, 0x000f000f, b, 0xea;
            mov.b32 b, 0x43084308;
            sub.rn.bf16x2 a, a, b;
            mul.rn.bf16x2 a, a, s;
            mov.b32 {$0, $1}, a; }""",
            "=h,=h,r,h",
            [words >> 4 * number, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    elif PACKED:
        if number == 0:
            bits = words & -0x7E3F7E40
        elif number == 1:
            bits = (words << 3) & -0x7E3F7E40
        elif number == 2:
            bits = ((words << 6) & 0x01C001C0) | ((words << 2) & -0x7FFF8000)
        else:
            bits = ((words >> 3) & 0x01C001C0) | ((words << 1) & -0x7FFF8000)
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, s;
            mov.b32 s, {$3, $3};
            mov.b32 b, 0x7e807e80;
            mul.rn.bf16x2 a, $2, b;
            mul.rn.bf16x2 a, a, s;
            mov.b32 {$0, $1}, a; }""",
            "=h,=h,r,h",
            [bits, factor],
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
def unpacked(words, factor, KIND: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Words [BO, BW] -> weights of a turn [BO, CODES * BW], in the order of rows in turns."""
    rows: tl.constexpr = words.shape[0]
    first = tl.join(_pair(words, factor, 0, KIND, DTYPE, PACKED), _pair(words, factor, 1, KIND, DTYPE, PACKED))
    if KIND == "fp8":
        y = tl.reshape(tl.permute(first, (0, 3, 1, 2)), [rows, 4 * words.shape[1]])
    else:
        second = tl.join(_pair(words, factor, 2, KIND, DTYPE, PACKED), _pair(words, factor, 3, KIND, DTYPE, PACKED))
        y = tl.reshape(tl.permute(tl.join(first, second), (0, 4, 3, 1, 2)), [rows, 8 * words.shape[1]])
    return y


@triton.jit
def _columns(at, KIND: tl.constexpr, BW: tl.constexpr):
    """Columns of a matrix at places `at` of a row in turns."""
    codes: tl.constexpr = 4 if KIND == "fp8" else 8
    pair, half = at // (2 * BW) % (codes // 2), at % 2
    code = pair + 4 * half if KIND == "int4" else 2 * pair + half
    return (at // (codes * BW) * BW + at // 2 % BW) * codes + code


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
def _spread(x_ptr, y_ptr, columns, places, KIND: tl.constexpr, BW: tl.constexpr, BX: tl.constexpr):
    """Program (n, i): BX places of row n in turns, zeros past the last column."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BX + tl.arange(0, BX)
    column = _columns(at, KIND, BW)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0)
    tl.store(y_ptr + row * places + at, x, mask=at < places)


def spread(kind, x):
    """Rows [N, D] -> rows in turns [N, places]."""
    rows, columns = x.shape
    y = x.new_empty(rows, places(kind, columns // CODES[kind]))
    _spread[(rows, triton.cdiv(y.shape[1], 1024))](
        x, y, columns, y.shape[1], KIND=kind, BW=WORDS[kind], BX=1024, num_warps=4
    )
    return y


def specimens():
    """Compile specimens."""
    cases = []
    for name in ("*bf16", "*fp16", "*fp32"):
        types = {"x_ptr": name, "y_ptr": name, "columns": "i32", "places": "i32"}
        cases += [(_spread, types, {"KIND": kind, "BW": WORDS[kind], "BX": 1024}, {"num_warps": 4}) for kind in CODES]
    return cases
