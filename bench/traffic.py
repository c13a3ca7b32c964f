"""Which experts a pass really read, counted on the device, and the bytes that a pass must read from memory."""

from dataclasses import dataclass

import torch

from engine.watch import tensors
from kernels import moe


class Routed:
    """An operation `route` that also counts each layer's different experts; nothing in it waits for the device.

    Args:
        route: the operation whose results it passes on; layers: most layers that route; experts: most of a layer.
    """

    def __init__(self, route, layers, experts, device):
        self.route, self.rows = route, {}  # a layer is known by where its router's weights lie
        self.seen = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self.total = torch.zeros(layers, dtype=torch.int64, device=device)
        self.passes = torch.zeros(layers, dtype=torch.int64, device=device)

    def __call__(self, x, norm_weight, eps, gate, *rest):
        """As the operation."""
        out = self.route(x, norm_weight, eps, gate, *rest)
        row = self.rows.setdefault(gate.data_ptr(), len(self.rows))
        seen = self.seen[row]
        seen.zero_()
        seen.index_fill_(0, out[1].reshape(-1), 1)
        self.total[row] += seen.sum()
        self.passes[row] += 1
        return out

    @classmethod
    def table(cls, ops, config, device):
        """-> the counter, and the table `ops` with it in place of its routing; config: of a target with experts."""
        count = cls(ops.route, config.layers, config.experts, device)
        return count, moe.routed_by(ops, count)

    def reset(self):
        """Count from here."""
        self.total.zero_()
        self.passes.zero_()

    def means(self):
        """Different experts a pass of each layer that routed, a list."""
        used = self.passes > 0
        return (self.total[used] / self.passes[used]).tolist()


@dataclass(frozen=True)
class Bytes:
    """What passes of one target read: `fixed` once a pass, `expert` for each different expert of a layer (the sum over
    layers), `position` for each committed position, `row` for each row of the pass; `draft` a pass of the drafter."""

    fixed: int
    expert: int
    position: int
    row: int
    draft: int

    @classmethod
    def of(cls, target, drafter, dtype) -> "Bytes":
        """Counted from the tensors of the loaded pair."""
        blocks = [layer.mlp.experts for layer in target.layers if hasattr(layer.mlp, "experts")]
        own = {id(tensor): tensor for block in blocks for _, tensor in tensors([block])}
        expert = sum(tensor.nbytes // tensor.shape[0] for tensor in own.values())
        embedding = target.embedding.weight
        tied = target.head.weight is embedding
        fixed = sum(t.nbytes for t in _weights(target) if id(t) not in own and (tied or t is not embedding))
        row = embedding.shape[1] * embedding.element_size()
        draft = 0
        if drafter is not None:
            draft = sum(t.nbytes for t in _weights(drafter) if t is not embedding)
        return cls(fixed, expert, target.cache_rows.nbytes(dtype), row, draft)

    def verify(self, rows: int, experts: float, positions: int) -> float:
        """Bytes of a pass of `rows` that reads `experts` different experts a layer behind so many positions."""
        return self.fixed + self.expert * experts + self.position * (positions + rows) + self.row * rows


def _weights(model):
    """Every weight below a model once: what a pass reads whole, so no rotary tables and no id tables."""
    found = {id(t): t for (_, name), t in tensors([model]) if name != "cos_sin" and t.is_floating_point()}
    return list(found.values())
