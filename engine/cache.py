"""The paged cache: one page table for target and draft, one block of storage for each kind of row.

Page 0 is scratch: padding writes there and nobody reads it. A draft position p sits in the slot of target position p.
"""

from dataclasses import dataclass

import torch

from weights.config import Refused


@dataclass(frozen=True)
class Rows:
    """What a model keeps for each position: `layers` x `planes` rows of [heads, width] elements.

    GQA has two planes (keys, values) of [kv heads, head size].
    """

    layers: int
    planes: int
    heads: int
    width: int

    def nbytes(self, dtype):
        """Bytes one position takes in all layers."""
        return self.layers * self.planes * self.heads * self.width * dtype.itemsize


class Cache:
    """Storage for several kinds of rows under one page table.

    Args:
        kinds: {"target": Rows, "draft": Rows}; pages: pages in all, page 0 (scratch) included; page_size: rows a page.
    """

    def __init__(self, kinds, pages, page_size, dtype, device):
        self.page_size, self.pages, self.dtype, self.device = page_size, pages, dtype, device
        self.storage = {}
        for kind, rows in kinds.items():
            self.adopt(kind, rows)

    def adopt(self, kind, rows):
        """Give `kind` storage for its rows (None: it keeps none)."""
        self.storage.pop(kind, None)
        if rows is not None:
            shape = (rows.layers, rows.planes, self.pages * self.page_size, rows.heads, rows.width)
            self.storage[kind] = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def layer(self, kind, number):
        """Planes [planes, slots, heads, width] of one layer."""
        return self.storage[kind][number]

    @staticmethod
    def nbytes(kinds, pages, page_size, dtype):
        """Bytes that such a cache would take."""
        return sum(r.nbytes(dtype) for r in kinds.values()) * pages * page_size


class Pool:
    """Host-side list of free pages. A request takes all pages it can ever need before its first pass."""

    def __init__(self, pages, page_size):
        self.page_size, self.size = page_size, pages - 1
        self._free = list(range(pages - 1, 0, -1))  # page 0 is scratch; low pages first

    @property
    def free(self):
        """Free pages."""
        return len(self._free)

    def pages_for(self, rows):
        """Pages that `rows` cache rows need."""
        return -(-rows // self.page_size)

    def demand(self, rows):
        """Raises Refused where the whole pool could not hold `rows` rows."""
        need = self.pages_for(rows)
        if need > self.size:
            raise Refused(
                f"cache: the request needs {need} pages of {self.page_size} rows ({rows} rows: prompt, new tokens and "
                f"the rows a cycle writes past them), the cache has {self.size}; raise pages or lower max_new_tokens"
            )

    def take(self, rows):
        """Pages for `rows` rows, or None while too few are free."""
        need = self.pages_for(rows)
        return None if need > self.free else [self._free.pop() for _ in range(need)]

    def give_back(self, pages):
        """Return pages taken before."""
        self._free.extend(reversed(pages))
