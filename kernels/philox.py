"""Philox4x32-10, a counter-based generator: a uniform number is a pure function of (key, position, purpose).

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). Both twins give the same bits everywhere.
"""

import torch
import triton
import triton.language as tl

from .tile import up

TARGET, DRAFT, COIN = range(3)  # purposes: the target's draw, the draft's draw, whether a drafted token is accepted
LOW = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def _product(constant, x):
    """(high, low) 32 bits of constant * x for x [..] int64 below 2^32, without leaving 63 bits."""
    low, high = (constant & 0xFFFF) * x, (constant >> 16) * x  # below 2^48 both
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & LOW


def philox(key, c0, c1, c2, c3):
    """The block cipher: key int64 (64 bits), counters int64 below 2^32, one shape -> four words int64 below 2^32."""
    k0, k1 = key & LOW, (key >> 32) & LOW
    for _ in range(ROUNDS):
        (h0, l0), (h1, l1) = _product(MULTIPLIERS[0], c0), _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def uniform(keys, positions, purpose):
    """Uniform numbers in [0, 1), multiples of 2^-24.

    Args:
        keys: [B] int64, 64 bits of a request; positions: [B, T] int64 >= 0, the position a token is drawn for;
        purpose: TARGET, DRAFT or COIN (host int).

    Returns:
        [B, T] fp32.
    """
    zero = torch.zeros_like(positions)
    key = keys[:, None].expand_as(positions)
    word = philox(key, positions & LOW, positions >> 32, zero + purpose, zero)[0]
    return (word >> 8).float() * 2.0**-24


@triton.jit
def _uniform(keys_ptr, positions_ptr, out_ptr, width, PURPOSE: tl.constexpr, BT: tl.constexpr):
    """Program b: the numbers of one request."""
    b, t = tl.program_id(0).to(tl.int64), tl.arange(0, BT)
    at = b * width + t
    position = tl.load(positions_ptr + at, mask=t < width, other=0)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(tl.load(keys_ptr + b), low, high, zero + PURPOSE, zero)
    tl.store(out_ptr + at, (word >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=t < width)


def uniform_fused(keys, positions, purpose):
    """The twin of `uniform`."""
    b, t = positions.shape
    out = torch.empty(b, t, dtype=torch.float32, device=positions.device)
    _uniform[(b,)](keys, positions.contiguous(), out, t, PURPOSE=purpose, BT=up(t), num_warps=1)
    return out


def specimens():
    """Compile specimens: one draw and a whole tree."""
    types = {"keys_ptr": "*i64", "positions_ptr": "*i64", "out_ptr": "*fp32", "width": "i32"}
    return [(_uniform, types, {"PURPOSE": p, "BT": t}, {"num_warps": 1}) for p, t in ((TARGET, 1), (COIN, 64))]
