"""Drawing tokens: the filtered distribution of a row of logits, and a draw from it that may keep a drafted token.

Filters are applied in this order (transformers' and, but for min-p, vLLM's): temperature, top-k, top-p over what top-k
left, min-p against the greatest probability. Each keeps a beginning of the row sorted by (logit, lowest id), so all of
them are one cut: the last entry kept.
"""

import torch
import triton
import triton.language as tl

from .tile import up

TINY = 1e-5  # temperatures below are greedy: ties go to the lowest id, nothing is drawn


def cutoff(logits, temperature, top_k, top_p, min_p):
    """The last entry that the filters keep.

    Args:
        logits: [N, V] fp32; temperature [N] fp32; top_k [N] int64, 0: off; top_p [N] fp32 in (0, 1], 1: off: the
        fewest entries that hold that much; min_p [N] fp32 in [0, 1]: a share of the greatest probability.

    Returns:
        values [N] fp32, ids [N] int64: an entry is kept where it is greater, or equal with no greater id. One at least.
    """
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    weight = ((values - values[:, :1]) / _divisor(temperature)).exp()
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    mass = torch.where(keep, weight, 0).double().cumsum(1)  # fp64: the same cut however many rows ride along
    before = mass - weight
    keep = keep & ((before < top_p[:, None] * mass[:, -1:]) | (top_p == 1)[:, None]) & (weight >= min_p[:, None])
    last = (keep.sum(1, keepdim=True) - 1).clamp(min=0)
    return values.gather(1, last)[:, 0], ids.gather(1, last)[:, 0]


def _divisor(temperature):
    """[N, 1]; rows that draw nothing are divided by one."""
    return torch.where(temperature < TINY, 1, temperature)[:, None]


def soften(logits, temperature, cut=None):
    """Probabilities at a temperature, zero past the cut.

    Args:
        logits: [N, V] fp32; temperature: [N] fp32 (below TINY: not read); cut: (values, ids) of `cutoff`, or None.

    Returns:
        [N, V] fp32, rows that sum to one. A row that is not finite gives nonsense, not an error.
    """
    scaled = (logits - logits.amax(-1, keepdim=True)) / _divisor(temperature)
    if cut is not None:
        value, last = (x[:, None] for x in cut)
        kept = (logits > value) | ((logits == value) & (torch.arange(logits.shape[1], device=logits.device) <= last))
        scaled = torch.where(kept, scaled, float("-inf"))
    return scaled.softmax(-1)


def draw(p, u, q=None, tokens=None, coins=None):
    """Draw from p in vocabulary order: the first id whose cumulative probability exceeds u. With q: keep the drafted
    token with probability min(1, p/q), else draw from what p has above q (Leviathan et al., 2023; Chen et al., 2023).

    Args:
        p: [N, V] fp32; u: [N] fp32 in [0, 1).
        q: [N, V] fp32 the distribution that tokens [N] int64 were drawn from, or None; a row of zeros: nothing was
        drawn, and u draws from p itself. coins: [N] fp32 in [0, 1).

    Returns:
        ids [N] int64, inside the vocabulary, of probability above zero in any row that is a distribution.
    """
    weight = p
    if q is not None:
        above = (p - q).clamp(min=0)
        weight = torch.where(above.sum(1, keepdim=True) > 0, above, p)  # all equal but for rounding
    mass = weight.double().cumsum(1)
    hit = (mass > u[:, None] * mass[:, -1:]) & (weight > 0)
    last = weight.shape[1] - 1 - (weight > 0).flip(1).long().argmax(1)
    ids = torch.where(hit.any(1), hit.long().argmax(1), last)
    if q is None:
        return ids
    at = tokens.clamp(min=0)[:, None]
    has, drafted = p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]
    kept = (tokens >= 0) & (drafted > 0) & (coins * drafted < has)  # strict: a coin of 0 keeps no probability of 0
    return torch.where(kept, tokens, ids)


@triton.jit
def _soften(
    logits_ptr, temperature_ptr, value_ptr, last_ptr, p_ptr, vocabulary, CUT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Program n: one row, in blocks of BV ids in ascending order."""
    n, block = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    temperature = tl.load(temperature_ptr + n)
    divisor = tl.where(temperature < 1e-5, 1.0, temperature)
    row = logits_ptr + n * vocabulary
    top = tl.full([BV], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BV):
        at = start + block
        top = tl.maximum(top, tl.load(row + at, mask=at < vocabulary, other=float("-inf")))
    high = tl.max(top, 0)
    value, last = 0.0, 0
    if CUT:
        value, last = tl.load(value_ptr + n), tl.load(last_ptr + n)
    total = tl.zeros([BV], tl.float32)
    for start in range(0, vocabulary, BV):
        at = start + block
        x = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
        kept = at < vocabulary
        if CUT:
            kept = kept & ((x > value) | ((x == value) & (at <= last)))
        total += tl.where(kept, tl.exp((x - high) / divisor), 0.0)
    whole = tl.sum(total, 0)
    for start in range(0, vocabulary, BV):
        at = start + block
        x = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
        kept = at < vocabulary
        if CUT:
            kept = kept & ((x > value) | ((x == value) & (at <= last)))
        y = tl.where(kept, tl.exp((x - high) / divisor) / whole, 0.0)
        tl.store(p_ptr + n * vocabulary + at, y, mask=at < vocabulary)


def soften_fused(logits, temperature, cut=None):
    """The twin of `soften`."""
    (rows, vocabulary), logits = logits.shape, logits.contiguous()
    p = torch.empty_like(logits)
    value, last = (None, None) if cut is None else (x.contiguous() for x in cut)
    # one request's temperature for all its rows is a view of stride 0
    _soften[(rows,)](
        logits,
        temperature.contiguous(),
        value,
        last,
        p,
        vocabulary,
        CUT=cut is not None,
        BV=_block(vocabulary),
        num_warps=16,
    )
    return p


@triton.jit
def _draw(
    p_ptr, u_ptr, q_ptr, tokens_ptr, coins_ptr, ids_ptr, vocabulary, DRAFTED: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Program n: one row, blocks of BV ids in ascending order; sums in fp64."""
    n, block = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    p_ptr += n * vocabulary
    if DRAFTED:
        q_ptr += n * vocabulary
    total, above = tl.zeros([BV], tl.float64), tl.zeros([BV], tl.float64)
    for start in range(0, vocabulary, BV):
        at = start + block
        p = tl.load(p_ptr + at, mask=at < vocabulary, other=0.0)
        total += p.to(tl.float64)
        if DRAFTED:
            above += tl.maximum(p - tl.load(q_ptr + at, mask=at < vocabulary, other=0.0), 0.0).to(tl.float64)
    whole, share = tl.sum(total, 0), 0.0
    if DRAFTED:
        residual = tl.sum(above, 0)
        share = (residual > 0.0).to(tl.float32)
        whole = tl.where(residual > 0.0, residual, whole)
    goal = tl.load(u_ptr + n).to(tl.float64) * whole
    sofar, found, last = whole * 0.0, vocabulary, -1
    for start in range(0, vocabulary, BV):
        at = start + block
        weight = tl.load(p_ptr + at, mask=at < vocabulary, other=0.0)
        if DRAFTED:
            q = tl.load(q_ptr + at, mask=at < vocabulary, other=0.0)
            weight = tl.maximum(weight - q * share, 0.0)
        mass = weight.to(tl.float64)
        hit = (sofar + tl.cumsum(mass, 0) > goal) & (weight > 0.0)
        found = tl.minimum(found, tl.min(tl.where(hit, at, vocabulary), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, -1), 0))
        sofar += tl.sum(mass, 0)
    picked = tl.where(found < vocabulary, found, tl.where(last < 0, vocabulary - 1, last)).to(tl.int64)
    if DRAFTED:
        token = tl.load(tokens_ptr + n)
        at = tl.maximum(token, 0)
        has, drafted = tl.load(p_ptr + at), tl.load(q_ptr + at)
        kept = (token >= 0) & (drafted > 0.0) & (tl.load(coins_ptr + n) * drafted < has)
        picked = tl.where(kept, token, picked)
    tl.store(ids_ptr + n, picked)


def draw_fused(p, u, q=None, tokens=None, coins=None):
    """The twin of `draw`."""
    rows, vocabulary = p.shape
    ids = torch.empty(rows, dtype=torch.int64, device=p.device)
    drafted = () if q is None else (q, tokens, coins)
    q, tokens, coins = (x.contiguous() for x in drafted) if drafted else (None, None, None)
    _draw[(rows,)](
        p.contiguous(), u.contiguous(), q, tokens, coins, ids, vocabulary,
        DRAFTED=bool(drafted), BV=_block(vocabulary), num_warps=16,
    )  # fmt: skip
    return ids


def _block(vocabulary):
    """Ids a program takes at a time: a function of the vocabulary alone (law 1)."""
    return min(4096, max(16, up(vocabulary)))


def specimens():
    """Compile specimens: with and without filters, with and without a draft's distribution."""
    soft = dict.fromkeys(("logits_ptr", "temperature_ptr", "value_ptr", "p_ptr"), "*fp32") | {"last_ptr": "*i64"}
    drawn = dict.fromkeys(("p_ptr", "u_ptr", "q_ptr", "coins_ptr"), "*fp32")
    drawn |= dict.fromkeys(("tokens_ptr", "ids_ptr"), "*i64") | {"vocabulary": "i32"}
    soft |= {"vocabulary": "i32"}
    options = {"num_warps": 16}
    return [
        *((_soften, soft, {"CUT": cut, "BV": b}, options) for cut in (False, True) for b in (64, 4096)),
        *((_draw, drawn, {"DRAFTED": d, "BV": b}, options) for d in (False, True) for b in (64, 4096)),
    ]
