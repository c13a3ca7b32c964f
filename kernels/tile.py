"""What the fused kernels share: row tiles, the product of a row tile with streamed weights, and ordered keys.

Law 1 lives here. Rows come in tiles of ROWS whatever their number is; weights are the M of every matrix product and the
rows its N, so a row is one column that no other row touches. The columns of a weight matrix are dealt to `split` warps
in pieces of `depth`, each warp adds its pieces in ascending order, one fixed tree adds the warps' sums. Sizes follow
from dtype and matrix alone, never from how many rows ride along; arguments that change with the rows are not
specialised on, so that one binary serves all of them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 8  # rows of a tile: the N of an mma
SMALLEST = tl.constexpr(-(1 << 63))  # below every ordered key


@dataclass(frozen=True)
class Tile:
    """Launch sizes of a product with streamed weights; `split` warps share the columns.

    outputs: weight rows a program handles (the M of its products); depth: columns a warp takes at a time;
    stages: loads in flight.
    """

    outputs: int
    split: int
    depth: int
    stages: int

    @property
    def constants(self):
        """The kernel's compile-time arguments."""
        return {"BO": self.outputs, "SPLIT": self.split, "BK": self.depth, "BR": ROWS, "STAGES": self.stages}

    @property
    def options(self):
        """Launch options."""
        return {"num_warps": self.split, "num_stages": self.stages}


def tile_of(dtype, columns, outputs=16):
    """Tile for weights of `columns` columns: a function of the matrix, as law 1 asks.

    fp32 products are IEEE and run on the FMA units: narrower pieces, fewer in flight.
    """
    depth = 32 if dtype == torch.float32 else 64
    fits = [s for s in (8, 4) if columns % (s * depth) == 0]
    split = fits[0] if fits else min(8, triton.next_power_of_2(max(1, -(-columns // depth))))
    return Tile(outputs, split, depth, 2 if dtype == torch.float32 else (4 if outputs <= 16 else 3))


def groups(rows):
    """Row tiles that `rows` rows make."""
    return -(-rows // ROWS)


def up(n):
    """Next power of two."""
    return triton.next_power_of_2(n)


def copied(columns):
    """Columns that a program of a kernel that copies rows takes."""
    return min(1024, max(16, up(columns)))


@triton.jit
def begin(PDL: tl.constexpr):
    """The first thing a small kernel of a cycle does, under programmatic dependent launch: wait until all that the
    kernel before it wrote is there, then let the next one begin, which does the same."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def chained(x):
    """How a kernel that calls `begin` is launched where x is: its start overlaps the end of the kernel before it."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def inverse_rms(x_ptr, start, live, columns, eps, BR: tl.constexpr, BC: tl.constexpr):
    """1 / rms of BR rows that begin at element `start` [BR] (int64) of x: fp32, chunks of BC in ascending order."""
    at = tl.arange(0, BC)
    total = tl.zeros([BR, BC], tl.float32)
    for c in range(0, columns, BC):
        inside = live[:, None] & (c + at < columns)[None, :]
        x = tl.load(x_ptr + start[:, None] + (c + at)[None, :], mask=inside, other=0.0).to(tl.float32)
        total += x * x
    return tl.math.rsqrt(tl.sum(total, 1) / columns + eps)


@triton.jit
def product(
    x_ptr, start, live, scale, norm_ptr, w_ptr, outs, ok, columns,
    NORM: tl.constexpr, BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weight rows `outs` [BO] times a tile of BR rows of x -> [BO, BR] fp32.

    start: [BR] int64, element of x where each row begins; live: [BR], dead rows count as zeros; ok: [BO] likewise.
    With NORM a row is x * scale[row] * norm, rounded to the weights' dtype, before the product.
    """
    piece, at = tl.arange(0, SPLIT), tl.arange(0, BK)
    low = outs.to(tl.int64) * columns
    total = tl.zeros([SPLIT, BO, BR], tl.float32)
    for c in tl.range(0, columns, SPLIT * BK, num_stages=STAGES):
        column = c + piece[:, None] * BK + at[None, :]  # SPLIT BK
        inside = column < columns
        w = tl.load(
            w_ptr + low[None, :, None] + column[:, None, :], mask=ok[None, :, None] & inside[:, None, :], other=0.0
        )
        x = tl.load(
            x_ptr + start[None, None, :] + column[:, :, None], mask=live[None, None, :] & inside[:, :, None], other=0.0
        )
        if NORM:
            gain = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * scale[None, None, :] * gain[:, :, None]).to(w.dtype)
        total = tl.dot(w, x, total, input_precision="ieee")
    return tl.sum(total, 0)


@triton.jit
def ordered(value, index):
    """Unique int64 keys that sort by (value, lowest index): max of keys = the best. NaN must be gone; index < 2^31."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.float32).to(tl.int32, bitcast=True)  # -0 equals 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index.to(tl.int64))


@triton.jit
def value_of(key):
    """The value of an ordered key."""
    bits = (key >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def index_of(key):
    """The index of an ordered key, int64."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)
