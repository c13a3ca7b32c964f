"""Packed experts of prompts: grouped products that unpack a tile of weights once for a whole tile of rows. `OPERATIONS`
joins kernels.prefill's; what is said there of a prompt's bits holds here.

Weights are the M of a product and stay in registers from their words to the tensor cores, rows are its N; columns come
in turns (kernels.turns).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import experts as moe
from . import experts_fp8 as fp8
from . import moe as block_of_experts
from . import prefill
from .activation import gated
from .mlp import halves
from .turns import CODES, LIFT, TURN, factors, places, spread, turned, unpacked


@dataclass(frozen=True)
class Packed:
    """Launch sizes: `rows` pairs of one expert and `outputs` weight rows a program, `turns` turns of them at a time.
    The order of a sum follows from the turns alone, however many are taken together."""

    rows: int
    outputs: int
    turns: int
    warps: int
    stages: int

    def constants(self, kind):
        """The kernel's compile-time arguments."""
        return {"KIND": kind, "BR": self.rows, "BO": self.outputs, "BW": TURN // CODES[kind] * self.turns}

    @property
    def options(self):
        """Launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


NARROW = Packed(16, 32, 1, 4, 2)  # in fp32, whose products are IEEE and run on the FMA units
PAIRS = 24  # an expert, on average, from which on the second sizes are faster
SIZES = {
    "int4": (Packed(32, 64, 2, 4, 3), Packed(64, 128, 1, 8, 3)),
    "fp4": (Packed(32, 64, 1, 4, 3), Packed(64, 128, 1, 8, 3)),
    "fp8": (Packed(32, 64, 1, 4, 3), Packed(64, 128, 1, 4, 3)),  # a turn at a time: each has a scale
}


def of_experts(kind, dtype, pairs, experts):
    """Sizes of a product whose tiles are pairs of one expert."""
    return NARROW if dtype == torch.float32 else SIZES[kind][pairs > PAIRS * experts]


@triton.jit
def _scales(s_ptr, first, ok, word, KIND: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, BW: tl.constexpr):
    """Scales of a turn that begins at word `word`: [BO, BW / 4], as stored; of FP8 the block's [BO]. Past the last
    word: zero."""
    if KIND == "fp8":
        s = tl.load(s_ptr + first + word // GROUP, mask=ok & (word < WORDS), other=0.0)
    else:
        four = word // 4 + tl.arange(0, BW // 4)  # words: no scale is of fewer
        mask = ok[:, None] & (four < WORDS // 4)[None, :]
        s = tl.load(s_ptr + first[:, None] + (four // (GROUP // 4))[None, :], mask=mask, other=0)
    return s


@triton.jit
def _sums(
    x_ptr, start, live, w_ptr, s_ptr, outs, scaled, ok, KIND: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Packed rows `outs` [BO] times BR rows of x, in turns -> [BO, BR] fp32.

    start: [BR] int64, element of x where each row begins; live: [BR], dead rows count as zeros; ok: [BO] likewise;
    scaled: [BO] int64, row of scales; GROUP: words that share a scale. FP8: a turn is a block, whose sum is scaled in
    fp32; else a weight is code * scale rounded to the dtype of x. Scales are asked for a turn ahead.
    """
    codes: tl.constexpr = 4 if KIND == "fp8" else 8
    places: tl.constexpr = (WORDS * codes + 127) // 128 * 128
    at, k = tl.arange(0, BW), tl.arange(0, codes * BW)
    low, first = outs.to(tl.int64) * WORDS, scaled * ((WORDS + GROUP - 1) // GROUP)
    total = tl.zeros([BO, BR], tl.float32)
    following = _scales(s_ptr, first, ok, 0, KIND, WORDS, GROUP, BW)
    for word in tl.range(0, WORDS, BW):
        mask = ok[:, None] & ((word + at < WORDS) | (WORDS % BW == 0))[None, :]
        w = tl.load(w_ptr + low[:, None] + (word + at)[None, :], mask=mask, other=0)
        place = codes * word + k
        mask = live[:, None] & ((place < places) | (places % (codes * BW) == 0))[None, :]
        x = tl.load(x_ptr + start[:, None] + place[None, :], mask=mask, other=0.0)
        s = following
        following = _scales(s_ptr, first, ok, word + BW, KIND, WORDS, GROUP, BW)
        if KIND == "fp8":
            part = tl.dot(unpacked(w, s, KIND, x.dtype, PACKED), tl.trans(x), input_precision="ieee")
            total += part * s[:, None]
        else:
            factor = tl.broadcast_to(factors(s, KIND, PACKED)[:, :, None], [BO, BW // 4, 4])
            part = unpacked(w, tl.reshape(factor, [BO, BW]), KIND, x.dtype, PACKED)
            total = tl.dot(part, tl.trans(x), total, input_precision="ieee")
    if PACKED and KIND != "fp8":
        total *= LIFT
    return total


@triton.jit(do_not_specialize=["choices"])
def _gate_up(
    x_ptr, w_ptr, s_ptr, bias_ptr, order_ptr, expert_ptr, h_ptr, choices, width,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, WOVEN: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Program (i, tile): BO/2 gated units of the tile's pairs -> h [pairs, width in whole turns] in turns.

    WOVEN: rows are gate 0, up 0, gate 1, up 1 …, else all gate rows, then all up rows.
    """
    expert = tl.load(expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        half: tl.constexpr = BO // 2
        codes: tl.constexpr = 4 if KIND == "fp8" else 8
        m = tl.arange(0, BO)
        unit = tl.program_id(0) * half + m % half
        outs = unit * 2 + m // half if WOVEN else unit + m // half * width
        pair = tl.load(order_ptr + tl.program_id(1) * BR + tl.arange(0, BR))
        start = (pair // choices).to(tl.int64) * ((WORDS * codes + 127) // 128 * 128)
        if KIND == "fp8":
            blocks = (width + 127) // 128
            scaled = expert * 2 * blocks + unit // 128 + m // half * blocks
        else:
            scaled = expert * 2 * width + outs
        y = _sums(
            x_ptr, start, pair >= 0, w_ptr + expert * 2 * width * WORDS, s_ptr, outs, scaled, unit < width,
            KIND, PACKED, WORDS, GROUP, BO, BR, BW,
        )  # fmt: skip
        if BIAS:
            y += tl.load(bias_ptr + expert * 2 * width + outs, mask=unit < width, other=0.0).to(tl.float32)[:, None]
        gate, up = halves(y, half, BR)
        h = turned(gated(gate, up, ACTIVATION).to(h_ptr.dtype.element_ty), KIND)
        first, at = tl.program_id(0) * half, tl.arange(0, half)
        run: tl.constexpr = half // codes * 2  # places that lie together
        at = first // 128 * 128 + at // run * (256 // codes) + first % 128 // codes * 2 + at % run
        start = pair.to(tl.int64) * ((width + 127) // 128 * 128)
        tl.store(h_ptr + start[:, None] + at[None, :], h, mask=(pair >= 0)[:, None])


@triton.jit
def _down(
    h_ptr, w_ptr, s_ptr, bias_ptr, order_ptr, expert_ptr, y_ptr, outputs,
    KIND: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Program (o, tile): BO outputs of the tile's pairs -> y [pairs, outputs] fp32."""
    expert = tl.load(expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        codes: tl.constexpr = 4 if KIND == "fp8" else 8
        out = tl.program_id(0) * BO + tl.arange(0, BO)
        pair = tl.load(order_ptr + tl.program_id(1) * BR + tl.arange(0, BR))
        start = pair.to(tl.int64) * ((WORDS * codes + 127) // 128 * 128)
        scaled = expert * outputs + out if KIND != "fp8" else expert * ((outputs + 127) // 128) + out // 128
        y = _sums(
            h_ptr, start, pair >= 0, w_ptr + expert * outputs * WORDS, s_ptr, out, scaled, out < outputs,
            KIND, PACKED, WORDS, GROUP, BO, BR, BW,
        )  # fmt: skip
        if BIAS:
            y += tl.load(bias_ptr + expert * outputs + out, mask=out < outputs, other=0.0).to(tl.float32)[:, None]
        at = pair.to(tl.int64)[None, :] * outputs + out[:, None]
        tl.store(y_ptr + at, y, mask=(out < outputs)[:, None] & (pair >= 0)[None, :])


def run(kind, x, ids, weights, gate_up, down, activation, residual, woven=False):
    """Experts of `kind`; gate_up, down: (words int32 [E, out, words], scale, bias or None) each. -> [N, D]."""
    x, (wide, wide_scale, wide_bias), (tall, tall_scale, tall_bias) = x.contiguous(), gate_up, down
    (count, columns, words), pairs, choices = tall.shape, ids.numel(), ids.shape[1]
    sizes = of_experts(kind, x.dtype, pairs, count)
    order, expert = moe.group(ids, count, sizes.rows)
    rows, h = spread(kind, x), x.new_empty(pairs, places(words * CODES[kind]))
    packed = x.dtype == torch.bfloat16 and (kind != "int4" or wide_scale.dtype == tall_scale.dtype == x.dtype)
    own = {"PACKED": packed} | sizes.constants(kind) | sizes.options
    _gate_up[(triton.cdiv(h.shape[1], sizes.outputs // 2), expert.numel())](
        rows, wide, wide_scale, wide_bias, order, expert, h, choices, words * CODES[kind], ACTIVATION=activation,
        BIAS=wide_bias is not None, WOVEN=woven, WORDS=wide.shape[2], GROUP=group(kind, wide, wide_scale), **own,
    )  # fmt: skip
    parts = x.new_empty(pairs, columns, dtype=torch.float32)
    _down[(triton.cdiv(columns, sizes.outputs), expert.numel())](
        h, tall, tall_scale, tall_bias, order, expert, parts, columns, BIAS=tall_bias is not None,
        WORDS=words, GROUP=group(kind, tall, tall_scale), **own,
    )  # fmt: skip
    return moe.combine(parts, weights, residual, x)


def group(kind, words, scale):
    """Words that share a scale."""
    return fp8.BLOCK // CODES[kind] if kind == "fp8" else words.shape[2] // scale.shape[2]


def experts_int4(
    x, ids, weights, gate_up, gate_up_scale, down, down_scale, activation, residual=None, hidden=None, shared=None
):
    """As kernels.experts_int4.reference."""
    wide, tall = (gate_up, gate_up_scale, None), (down, down_scale, None)
    y = run("int4", x, ids, weights, wide, tall, activation, residual)
    return y if hidden is None else prefill.linear(hidden, shared, None, y)


def experts_mxfp4(
    x, ids, weights, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, activation, residual=None
):
    """As kernels.experts_mxfp4.reference."""
    wide, tall = (gate_up, gate_up_scale, gate_up_bias), (down, down_scale, down_bias)
    return run("fp4", x, ids, weights, wide, tall, activation, residual, woven=True)


def experts_fp8(x, ids, weights, gate_up, gate_up_scale, down, down_scale, activation, residual=None):
    """As kernels.experts_fp8.reference; sizes that are not whole words of 16 bytes are left to FUSED's."""
    if gate_up.shape[2] % 16 or down.shape[2] % 16:
        return fp8.fused(x, ids, weights, gate_up, gate_up_scale, down, down_scale, activation, residual)
    wide, tall = ((w.view(torch.int32), s, None) for w, s in ((gate_up, gate_up_scale), (down, down_scale)))
    return run("fp8", x, ids, weights, wide, tall, activation, residual)


OPERATIONS = {
    "experts_int4": experts_int4,
    "experts_fp8": experts_fp8,
    "experts_mxfp4": experts_mxfp4,
    "moe_int4": block_of_experts.composed_int4(prefill.route, experts_int4),
}


def specimens():
    """Compile specimens: one of eight ranks of Kimi-K2.5 and of DeepSeek-V3, and gpt-oss."""
    cases = []
    for name in ("*bf16", "*fp16", "*fp32"):
        cases += _specimens("int4", name, "silu", name, 7168, 256, 4)
        cases += _specimens("fp8", "*fp32", "silu", name, 7168, 256, 32)
        cases += _specimens("fp4", "*u8", "clamped_swiglu", name, 2880, 2880, 4)
    return cases


def _specimens(kind, scale, act, name, columns, width, words):
    types = dict.fromkeys(("x_ptr", "h_ptr", "bias_ptr"), name) | {"w_ptr": "*i32", "s_ptr": scale}
    types |= dict.fromkeys(("order_ptr", "expert_ptr"), "*i32") | dict.fromkeys(("choices", "width"), "i32")
    tall = {n: types[n] for n in _down.arg_names if n in types} | {"y_ptr": "*fp32", "outputs": "i32"}
    biased, cases = act != "silu", []
    for sizes in [NARROW] if name == "*fp32" else SIZES[kind]:
        own = {"PACKED": name == "*bf16", "BIAS": biased, "GROUP": words} | sizes.constants(kind)
        first = {"ACTIVATION": act, "WOVEN": biased, "WORDS": columns // CODES[kind]}
        cases.append((_gate_up, types, own | first, sizes.options))
        cases.append((_down, tall, own | {"WORDS": width // CODES[kind]}, sizes.options))
    return cases
