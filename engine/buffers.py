"""Static buffers of a cycle: State survives it, Tree dies with it."""

from dataclasses import dataclass, fields, replace

import torch

from .rules import Draws, Greedy, Sampled
from .shape import MAX_NODES, Shape

GREEDY = Greedy()
BACKLOG = MAX_NODES  # rows the drafter may lag behind; one cycle emits at most as many


def _said(place, what):
    """A number of every slot's report, behind the tokens."""
    return property(lambda state: state.report[:, MAX_NODES + place], doc=f"[B] {what}")


@dataclass
class State:
    """What B sequences carry from one cycle to the next, int64 on the device.

    `block` is what the host reads of a cycle: `report`, of which emitted, accept_lens, matched, done, fault, agreed,
    compared, chain and missed are views, then `stamps`. A whole cycle leaves it in row turn % AHEAD of `host`.
    """

    table: torch.Tensor  # B NP int32 pages; a slot without a request has zeros: all its rows are scratch
    pages: torch.Tensor  # the columns of it that a pass sees
    seq_lens: torch.Tensor  # B   committed rows
    limits: torch.Tensor  # B   rows there may be
    root: torch.Tensor  # B   last emitted token: the next tree's root
    stop_ids: torch.Tensor  # B M -1 where unused
    backlog: torch.Tensor  # B   rows the drafter has yet to see
    backlog_tokens: torch.Tensor  # B W+1; row W is scratch
    backlog_features: torch.Tensor  # B W+1 F
    block: torch.Tensor  # B*(64+8) + 5
    host: torch.Tensor  # AHEAD B*(64+8)+5 of the CPU; page-locked where the rest is on a GPU
    turn: torch.Tensor  # 1   whole cycles since a session began
    draws: Draws  # what each slot draws with; no cycle writes it

    STOPS = 32  # stop ids a request may have
    WIDTH = MAX_NODES + 8  # of a slot's report
    STAMPS = 5  # times of a cycle: its begin and the ends of its stages
    AHEAD = 2  # cycles whose numbers the host may have yet to read

    @classmethod
    def allocate(cls, batch, pages, features, dtype, device):
        """Empty state: B = batch slots, NP = columns of the page table, F = width of the features."""

        def ints(*shape):
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        table = torch.zeros(batch, pages, dtype=torch.int32, device=device)
        width, locked = batch * cls.WIDTH + cls.STAMPS, torch.device(device).type == "cuda"
        state = cls(
            table=table,
            pages=table,
            seq_lens=ints(batch),
            limits=ints(batch),
            root=ints(batch),
            stop_ids=ints(batch, cls.STOPS) - 1,
            backlog=ints(batch),
            backlog_tokens=ints(batch, BACKLOG + 1),
            backlog_features=torch.zeros(batch, BACKLOG + 1, features, dtype=dtype, device=device),
            block=ints(width),
            host=torch.zeros(cls.AHEAD, width, dtype=torch.int64, device="cpu", pin_memory=locked),
            turn=ints(1),
            draws=Draws.allocate(batch, device),
        )
        state.done.fill_(1)
        return state

    def seen(self, columns):
        """The same tensors, to a pass that sees the first `columns` columns of the page table."""
        return replace(self, pages=self.table[:, :columns])

    @property
    def batch(self):
        """B."""
        return self.seq_lens.shape[0]

    @property
    def report(self):
        """[B, 64 + 8] what there is to say of each slot."""
        return self.block[: -self.STAMPS].view(self.batch, self.WIDTH)

    @property
    def stamps(self):
        """[5] times of the last cycle that took them, in nanoseconds."""
        return self.block[-self.STAMPS :]

    @property
    def emitted(self):
        """[B, 64] tokens of the last cycle, the first accept_lens of them real."""
        return self.report[:, :MAX_NODES]

    accept_lens = _said(0, "tokens the last cycle emitted, after every cut.")
    matched = _said(1, "draft tokens the target agreed with, before the cuts.")
    done = _said(2, "1 once the sequence has ended.")
    fault = _said(3, "1 where it ended on non-finite logits.")
    agreed = _said(4, "proposals of the last catch-up that were the tokens that came.")
    compared = _said(5, "proposals of the last catch-up whose tokens had come.")
    chain = _said(6, "draft tokens that a chain of the tree's first children would have kept.")
    missed = _said(7, "1 where that chain had a further token, which was wrong.")

    def snapshot(self):
        """Copies of all tensors that a cycle writes, for `restore`."""
        return [getattr(self, name).clone() for name in self._written()]

    def restore(self, snapshot):
        """Put the copies back."""
        for name, kept in zip(self._written(), snapshot, strict=True):
            getattr(self, name).copy_(kept)

    def _written(self):
        return [f.name for f in fields(self) if f.name not in ("pages", "host", "draws")]

    def clear(self, slot):
        """Empty one slot: whatever a cycle writes for it goes to the scratch page, and it emits nothing."""
        self.draws.seat(slot)
        self._empty(slot)

    def _empty(self, slot):
        for tensor in (self.table, self.seq_lens, self.limits, self.root, self.backlog, self.report):
            tensor[slot] = 0
        self.stop_ids[slot] = -1
        self.done[slot] = 1

    def start(self, slot, pages, rows, limit, first, feature, stop_ids):
        """Seat a prefilled request: exactly what accept leaves after emitting its first token. `draws` stay.

        Args:
            pages: list of page numbers; rows: committed rows n; limit: rows there may be; first: [1] token at n;
            feature: [1, F] the target's features at n - 1; stop_ids: list.
        """
        self._empty(slot)
        self.table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=self.table.device)
        self.stop_ids[slot, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64, device=self.table.device)
        self.seq_lens[slot], self.limits[slot], self.backlog[slot], self.done[slot] = rows, limit, 1, 0
        self.root[slot], self.backlog_tokens[slot, 0], self.emitted[slot, 0] = first[0], first[0], first[0]
        self.backlog_features[slot, 0] = feature[0]
        self.accept_lens[slot] = 1


@dataclass
class Tree:
    """One cycle's draft tree and the target's answer to it. Node 0 is the root; parents precede children."""

    shape: Shape
    tokens: torch.Tensor  # B T   -1: no proposal
    parents: torch.Tensor  # B T   parents[0] = 0
    depths: torch.Tensor  # B T
    ancestors: torch.Tensor  # B T   bit j: node j is an ancestor, or the node itself
    positions: torch.Tensor  # B T   n + depth
    index: torch.Tensor  # B T   n + node, the cache row it writes
    aux: torch.Tensor  # B T F the target's features at each node
    target_ids: torch.Tensor  # B T   the target's token after each node
    lse: torch.Tensor  # B T   fp32 log-sum-exp of the node's logits
    path: torch.Tensor  # B P   accepted nodes, root first
    logits: torch.Tensor | None  # B T V fp32 where somebody asked for them
    rule: Greedy | Sampled
    q: torch.Tensor | None  # B T V fp32 what node j+1 of a sampled chain was drawn from; zeros: it was not drawn

    @classmethod
    def allocate(cls, batch, shape, features, dtype, device, vocabulary=None, rule=GREEDY):
        """Buffers for `batch` trees of `shape` under an accept rule; `vocabulary` keeps the logits of all nodes too."""

        def ints(width):
            return torch.zeros(batch, width, dtype=torch.int64, device=device)

        t = shape.draft_tokens
        return cls(
            shape=shape,
            tokens=ints(t),
            parents=ints(t),
            depths=ints(t),
            ancestors=ints(t),
            positions=ints(t),
            index=ints(t),
            aux=torch.zeros(batch, t, features, dtype=dtype, device=device),
            target_ids=ints(t),
            lse=torch.zeros(batch, t, device=device),
            path=ints(shape.path),
            logits=None if vocabulary is None else torch.zeros(batch, t, vocabulary, device=device),
            rule=rule,
            q=torch.zeros(batch, t, vocabulary, device=device) if rule.drafts and shape.topk == 1 < t else None,
        )
