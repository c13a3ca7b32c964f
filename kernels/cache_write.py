"""Logical cache rows -> slots of the paged storage, and the write of new rows.

Slot arithmetic is 64-bit. A negative index is padding: it goes to slot 0, in the scratch page that nobody reads.
"""

import torch


def slots(index, pages, page_size):
    """index [B, T] logical rows, pages [B, NP] int32 -> [B, T] int64 slots (0 for negative rows)."""
    row = index.clamp(min=0)
    page = pages.long().gather(1, row // page_size)
    return torch.where(index < 0, 0, page * page_size + row % page_size)


def reference(plane, rows, index, pages, page_size):
    """Write rows [B*T, G, W] into plane [slots, G, W] at the logical rows `index` [B, T]."""
    plane.index_copy_(0, slots(index, pages, page_size).view(-1), rows.to(plane.dtype))
