"""Paged attention under the one law: committed keys, then the keys named by an ancestor bitset.

Query i sees the committed rows [0, prefix) and, past them, row prefix + j for every set bit j of tree[i]; without a
bitset row i of the pass sees prefix + 0 .. prefix + i. The i-th set bit of a query is the key at position prefix + i,
so the query's own position is prefix + popcount - 1.
"""

import torch

from .cache_write import slots


def causal_bits(t, device):
    """Bitsets of a causal pass over t <= 64 rows: row i holds bits 0..i (as int64; bit 63 is the sign)."""
    one = torch.ones(t, dtype=torch.int64, device=device)
    return torch.cumsum(one << torch.arange(t, device=device), 0)


def visible(prefix, tree, rows, t):
    """Which logical rows each query sees, and each seen row's position.

    Args:
        prefix: [B]; tree: [B, T] int64 or None; rows: L, the logical rows considered; t: T.

    Returns:
        seen [B, T, L] bool, position [B, T, L] int64 (valid where seen).
    """
    device, col = prefix.device, torch.arange(rows, device=prefix.device)
    rel = col[None] - prefix[:, None]  # B L
    if tree is None:
        seen = rel[:, None] <= torch.arange(t, device=device)[None, :, None]
        return seen, col.expand_as(seen)
    bit = (tree[:, :, None] >> rel[:, None].clamp(0, 63)) & 1
    path = (rel[:, None] >= 0) & (rel[:, None] < 64) & (bit == 1)
    depth = path.long().cumsum(-1) - 1  # rank of the bit among the query's set bits
    return path | (rel[:, None] < 0), torch.where(path, prefix[:, None, None] + depth, col)


def reference(q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window=None, sinks=None):
    """Attention of B*T query rows over their sequences' pages.

    Args:
        q: [B*T, H, Dh]; k_plane [slots, G, Dh], v_plane [slots, G, Dv]; H a multiple of G.
        pages: [B, NP] int32; prefix: [B] int64 committed rows; tree: [B, T] int64 ancestor bits or None (causal).
        scale: softmax scale; window: keys at position > own - window are seen (None: all);
        sinks: [H] logits that join the softmax's denominator only, or None.

    Returns:
        [B*T, H*Dv] in q's dtype.
    """
    b, rows = pages.shape[0], pages.shape[1] * page_size
    t, (h, g) = q.shape[0] // b, (q.shape[1], k_plane.shape[1])
    index = torch.arange(rows, device=q.device).expand(b, rows)
    slot = slots(index, pages, page_size)
    k, v = k_plane[slot].float(), v_plane[slot].float()  # B L G D
    seen, position = visible(prefix, tree, rows, t)
    if window is not None:
        own = torch.where(seen, position, -1).amax(-1, keepdim=True)
        seen = seen & (position > own - window)
    query = q.float().view(b, t, g, h // g, -1)
    scores = torch.einsum("btgrd,blgd->bgrtl", query, k) * scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(1, g, h // g, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    # rows that nobody sees may hold noise or NaN, and 0 * NaN is NaN
    v = v.masked_fill(~seen.any(1)[:, :, None, None], 0)
    return torch.einsum("bgrtl,blgd->btgrd", weights, v).reshape(b * t, -1).to(q.dtype)
