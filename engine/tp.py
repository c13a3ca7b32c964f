"""Tensor parallelism: which share of a model this process holds, and the few collectives it needs."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def environment():
    """{name: value} of the NCCL_* variables: settings that change how fast collectives run."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}


@dataclass(frozen=True)
class TP:
    """`rank` of `size` processes; TP() is one device and every collective is the identity."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def all_reduce(self, x):
        """Sum over ranks in rank order, the same bits on every rank: gathered, then added one by one in fp32."""
        if self.size == 1:
            return x
        total = None
        for part in self._gather(x):
            total = part.float() if total is None else total + part.float()
        return total.to(x.dtype)

    def add(self, residual, product):
        """residual + the sum over ranks of product(...).

        `product(residual or None)` computes this rank's share; alone it may add the residual inside its own kernel.
        """
        if self.size == 1:
            return product(residual)
        return self.all_reduce(product(None)) + residual

    def all_gather(self, x, dim=-1):
        """Shares of all ranks side by side along `dim`, in rank order."""
        return x if self.size == 1 else torch.cat(self._gather(x), dim)

    def _gather(self, x):
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts
