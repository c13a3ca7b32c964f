"""The paged cache: one page table for target and draft, one block of storage for each kind of row.

Page 0 is scratch: padding writes there and nobody reads it. A draft position p sits in the slot of target position p.
"""

import hashlib
import itertools
from array import array
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
        self.storage, self.kinds = {}, {}
        for kind, rows in kinds.items():
            self.adopt(kind, rows)

    def adopt(self, kind, rows):
        """Give `kind` storage for its rows (None: it keeps none); storage of the same size is zeroed and kept."""
        if rows is not None and rows == self.kinds.get(kind):
            self.storage[kind].zero_()
            return
        self.storage.pop(kind, None)
        self.kinds[kind] = rows
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


@dataclass
class Block:
    """Rows of a prompt's beginning that later prompts may read: their pages, and who holds them."""

    pages: tuple[int, ...]
    users: set[int]  # ids of the page lists it is part of


class Pool:
    """Host-side accounts of the pages. A request takes all pages it can ever need before its first pass.

    Prefixes are reused in blocks of `unit` rows, a common multiple of the page and the prefill chunk, so that no page
    is shared in part and every shared row was written by a whole prefill chunk with the borders that a fresh prefill
    has: its bits are the same (law 1). Rows of a prompt's last, incomplete chunk and rows that cycles wrote are never
    reused. A block's name covers all tokens before its end AND the one after it, which the drafter's last row pairs
    with; a block that ends with its prompt is therefore not kept. A block that nobody holds counts as free and is
    given up, the least recently used first, where pages run short; never before the blocks that follow it.

    Args:
        pages: in all, page 0 (scratch) included; page_size: rows a page; unit: rows a block, None: nothing is reused.
    """

    def __init__(self, pages, page_size, unit=None):
        self.page_size, self.size, self.unit = page_size, pages - 1, unit
        self._free = list(range(pages - 1, 0, -1))  # low pages first
        self._held = {}  # id of a page list -> the list
        self._blocks, self._owner = {}, {}  # name -> Block, least recently used first; page -> name of its block

    @property
    def free(self):
        """Pages that a request could have: free ones and those of blocks that nobody holds."""
        return len(self._free) + sum(len(block.pages) for block in self._blocks.values() if not block.users)

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

    def names(self, ids, drafted):
        """Names of a prompt's blocks in order, a hash chain; drafted: a drafter's rows are part of them."""
        if self.unit is None:
            return []
        out, name = [], b"drafted" if drafted else b"plain"
        for end in range(self.unit, len(ids), self.unit):
            name = hashlib.sha256(name + array("q", ids[end - self.unit : end + 1]).tobytes()).digest()
            out.append(name)
        return out

    def cached(self, names):
        """Rows at the beginning of a prompt of these blocks that need no prefill."""
        return (self.unit or 0) * len(self._known(names))

    def _known(self, names):
        return list(itertools.takewhile(self._blocks.__contains__, names))

    def take(self, rows, names=(), into=None):
        """Pages for `rows` rows, or None while too few are free: first those of the blocks cached under `names`.

        into: empty list to fill and return, so that a caller who is interrupted in here still has what he took.
        """
        pages, known = [] if into is None else into, self._known(names)
        shared = [page for name in known for page in self._blocks[name].pages]
        idle = sum(len(self._blocks[name].pages) for name in known if not self._blocks[name].users)
        need = self.pages_for(rows) - len(shared)
        if need > self.free - idle:
            return None
        self._held[id(pages)] = pages
        pages.extend(shared)
        for name in known:
            self._blocks[name].users.add(id(pages))
        while len(self._free) < need:
            self._give_up()
        for _ in range(need):
            pages.append(self._free.pop())
        return pages

    def keep(self, pages, names):
        """Let later prompts read the beginning of `pages`, whose rows are written: blocks `names`, in order."""
        size = (self.unit or 0) // self.page_size
        for at, name in enumerate(names):
            if name not in self._blocks:
                block = Block(tuple(pages[at * size : (at + 1) * size]), {id(pages)})
                self._blocks[name] = block
                self._owner.update(dict.fromkeys(block.pages, name))

    def give_back(self, pages):
        """Return pages taken before, the same list."""
        self._held.pop(id(pages), None)
        names = dict.fromkeys(self._owner[page] for page in pages if page in self._owner)
        for name in reversed(names):  # the first block was used last: it outlives those that follow it
            block = self._blocks.pop(name, None)
            if block is not None:  # it may be, where this was interrupted before
                block.users.discard(id(pages))
                self._blocks[name] = block
        self._free.extend(page for page in reversed(pages) if page not in self._owner)

    def _give_up(self):
        name = next(name for name, block in self._blocks.items() if not block.users)
        pages = self._blocks.pop(name).pages
        for page in pages:
            del self._owner[page]
        self._free.extend(reversed(pages))

    def forget(self):
        """Drop all blocks: what they hold is no longer what a prefill would write. No request may be in progress."""
        self._settle({})

    def settle(self):
        """Work out anew what is free from the lists held and the blocks: after an interruption at any place in here."""
        self._settle(self._blocks)

    def _settle(self, blocks):
        for block in blocks.values():
            block.users &= self._held.keys()
        owner = {page: name for name, block in blocks.items() for page in block.pages}
        taken = owner.keys() | {page for pages in self._held.values() for page in pages}
        free = [page for page in range(self.size, 0, -1) if page not in taken]
        self._blocks, self._owner, self._free = blocks, owner, free  # one step: nothing comes between
