"""Tensor parallelism: which share of a model this process holds, the few collectives it needs, and the words by which
ranks agree on the host. The only reader and writer of environment variables.

Every sum runs in rank order in fp32 and is rounded once, so all ranks hold the same bits, whatever the row count; what
ranks decide, they decide from gathered numbers or take rank 0's word for it.
"""

import contextlib
import datetime
import gc
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weights.config import Refused

GATHERED_ROWS = 64  # up to here everybody gets everybody's rows; beyond, each rank adds up its share of the rows
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # one function, renamed in torch 2.13
TIMEOUT = datetime.timedelta(minutes=10)  # of one collective: a rank may be reading weights meanwhile


class Lost(RuntimeError):
    """A collective failed because another rank is gone, or too late."""


def environment():
    """{name: value} of the NCCL_* variables: settings that change how fast collectives run."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}


def settings(variables):
    """Set NCCL_* variables, {name: value}, of this process; NCCL reads them when the group is made."""
    os.environ.update(variables)


def launched():
    """(rank, ranks, rank on this host, ranks on this host) as torchrun or engine.ranks set them, None in a process of
    neither."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name not in os.environ for name in (*names, "MASTER_ADDR", "MASTER_PORT")):
        return None
    return tuple(int(os.environ[name]) for name in names)


def ranks_started():
    """Ranks that were started together with this one; 1 in a process of its own."""
    found = launched()
    return 1 if found is None else found[1]


def ranks_here():
    """Ranks on this host, this one among them."""
    found = launched()
    return 1 if found is None else found[3]


def own_gpu(size, count):
    """Name of this rank's GPU of the host's `count`. Raises Refused where the host has fewer GPUs than ranks."""
    here = launched()
    if here is None:
        return "cuda"
    if here[3] > count:
        raise Refused(f"tp: {size}: {here[3]} ranks on a host of {count} GPUs; supported: a GPU a rank, or device cpu")
    return f"cuda:{here[2]}"


def enter(rank, size, port, folder):
    """Make this process rank `rank` of `size` on this host, as torchrun would, with its share of the CPU's threads.

    port: of the store that the starting process keeps; folder: where ranks note why they ended (`failures`).
    """
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in names.items()} | {"EAGLE3_FAILURES": folder})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not resolve
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))


def failures():
    """The folder in which ranks that engine.ranks started note why they ended; None elsewhere."""
    return os.environ.get("EAGLE3_FAILURES")


def leave():
    """Leave the group, where this process is in one. NCCL waits for the end of every captured graph that has its calls:
    engines that nobody holds any more go first."""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def join(size, device, total):
    """The TP of this process among `size` ranks; device: this rank's; total: kernels.Ops.total.

    Raises Refused where there are not so many processes: the same words on each of them.
    """
    if size == 1:
        return TP()
    if not dist.is_initialized():
        here = launched()
        if here is None:
            raise Refused(
                f"tp: {size} needs {size} processes, and this is one; supported: `torchrun --nproc-per-node {size} "
                f"SCRIPT`, or engine.spawn(function, {size})"
            )
        if here[1] != size:
            raise Refused(f"tp: {size}, but {here[1]} ranks were started; supported: {here[1]}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    if dist.get_world_size() != size:
        ranks = dist.get_world_size()
        raise Refused(f"tp: {size}, but torch.distributed's group has {ranks} ranks; supported: {ranks}")
    return TP(dist.get_rank(), size, Library(size, device, total))


def machine():
    """{what: value} of the GPUs of this host: what decides how fast they reach each other."""
    gpus = range(torch.cuda.device_count())
    access = [[int(a == b or torch.cuda.can_device_access_peer(a, b)) for b in gpus] for a in gpus]
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "peer_access": access}


@contextlib.contextmanager
def lost():
    """A collective's own error is that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(f"lost the others in a collective: {str(error).splitlines()[0].split('. ')[0]}") from error


class Library:
    """Collectives of torch.distributed (NCCL, gloo) over its default group, sums in rank order.

    total: kernels.Ops.total, which adds up gathered rows.
    """

    def __init__(self, size, device, total):
        self.size, self.total = size, total
        self.name = f"{'NCCL' if device.type == 'cuda' else 'gloo'}, all_gather and a sum in rank order"
        self.facts = machine() if device.type == "cuda" else {}

    def sum(self, x, residual=None):
        """Sum over ranks of x [N, D], + residual [N, D]."""
        rows = x.shape[0]
        if rows <= GATHERED_ROWS:
            return self.total(self.gather(x), residual)
        share = -(-rows // self.size)
        padded = torch.nn.functional.pad(x, (0, 0, 0, share * self.size - rows))
        mine = torch.empty_like(padded)
        with lost():
            dist.all_to_all_single(mine, padded)
        if residual is not None:
            start = share * dist.get_rank()
            residual = torch.nn.functional.pad(residual, (0, 0, 0, share * self.size - rows))[start : start + share]
        return self.gather(self.total(mine.view(self.size, share, -1), residual)).flatten(0, 1)[:rows]

    def sum_and_norm(self, x, residual, weight, eps):
        """`sum`, and None: after a library's sum a norm is cheapest in the kernel that reads its rows."""
        return self.sum(x, residual), None

    def check(self):
        """A library's own errors are raised where they occur."""

    def gather(self, x):
        """x of all ranks -> [size, *x.shape]."""
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with lost():
            GATHER(parts, x.contiguous())
        return parts.view(self.size, *x.shape)


@dataclass(frozen=True)
class TP:
    """`rank` of `size` processes; TP() is one device and every collective is the identity. links: what carries them
    (Library, or engine.links.Linked, whose bits are the same)."""

    rank: int = 0
    size: int = 1
    links: Any = None

    def share(self, heads):
        """Key and value heads of `heads` that a rank holds: its part of them, or one that it shares with others."""
        return max(1, heads // self.size)

    def known(self, ids, share):
        """Ids [N] of a vocabulary of which each rank holds `share`, as this rank's embedding is asked for them."""
        return ids

    def all_reduce(self, x):
        """Sum over ranks of x [N, D], in rank order in fp32: the same bits on every rank."""
        return x if self.size == 1 else self.links.sum(x)

    def add(self, residual, product):
        """residual + the sum over ranks of product(...), rounded once after the sum.

        `product(residual or None)` computes this rank's share; alone it may add the residual inside its own kernel.
        """
        if self.size == 1:
            return product(residual)
        return self.links.sum(product(None), residual)

    def add_and_norm(self, residual, product, norm):
        """`add`, and what the norm that follows (layers.norm.Norm) makes of it where that comes with the sum, else
        None: what follows norms its rows itself then."""
        if self.size == 1:
            return product(residual), None
        return self.links.sum_and_norm(product(None), residual, norm.weight, norm.eps)

    def gather(self, x):
        """x of all ranks -> [size, *x.shape]."""
        return x[None] if self.size == 1 else self.links.gather(x)

    def all_gather(self, x, dim=-1):
        """Shares of all ranks side by side along `dim`, in rank order."""
        return x if self.size == 1 else torch.cat(self.gather(x).unbind(), dim)

    def check(self):
        """Raises Lost where a sum that has run went without another rank; waits for nothing."""
        if self.links is not None:
            self.links.check()

    def follow(self, x):
        """Make x what rank 0 has, in place: one rank's decision is what all use."""
        if self.size > 1:
            x.copy_(self.links.gather(x)[0])

    def word(self, make):
        """make() as rank 0 has it, on every rank: a value, or what it was refused with. Others do not call it."""
        if self.size == 1:
            return make()
        outcome = [outcome_of(make) if self.rank == 0 else None]
        with lost():
            dist.broadcast_object_list(outcome)
        return result(outcome[0])

    def together(self, make):
        """make() of this rank; where it is refused on any, it is on all, in the words of the first."""
        if self.size == 1:
            return make()
        own, all_of_them = outcome_of(make), [None] * self.size
        with lost():
            dist.all_gather_object(all_of_them, own[1])
        result((None, next((refused for refused in all_of_them if refused is not None), None)))
        return own[0]

    def held(self, weights):
        """One line; weights: GB of each rank."""
        return f"{self.size} ranks hold {weights} GB of weights; sums by {self.links.name}"

    def every(self, value):
        """[value of each rank], small things of the host."""
        values = [value]
        if self.size > 1:
            values = [None] * self.size
            with lost():
                dist.all_gather_object(values, value)
        return values


def outcome_of(make):
    """(make(), None), or (None, the line it was refused with)."""
    try:
        return make(), None
    except Refused as error:
        return None, str(error)


def result(outcome):
    """The value of an outcome, or its refusal raised."""
    if outcome[1] is not None:
        raise Refused(outcome[1])
    return outcome[0]
