"""What carries the sums of a tensor-parallel engine, chosen once at start-up: peer memory where all ranks reach each
other's, the collectives of a library elsewhere. The bits are the same."""

from dataclasses import replace

import torch

from kernels import norm, peers

from .tp import Library, Lost

REDUCTIONS = ("auto", "library")
PROOF_ROWS = (3, peers.ONE_SHOT + 2)  # of the sums that are compared before peer memory is trusted
PROOF_PATIENCE, EPS = 20.0, 1e-6  # seconds; of its norms


class Linked(Library):
    """Peer memory for what it takes, else the library."""

    def __init__(self, library, links):
        vars(self).update(vars(library))
        self.library, self.links = library, links
        two = f"two-shot above {peers.ONE_SHOT} rows or {peers.ONE_SHOT_ELEMENTS} elements"
        self.name = f"one-shot over peer memory, {two}; beyond {links.rows} rows {library.name}"

    def sum(self, x, residual=None):
        """Sum over ranks of x [N, D], + residual [N, D]."""
        return self.links.sum(x, residual)[0] if self.links.fits(x) else super().sum(x, residual)

    def sum_and_norm(self, x, residual, weight, eps):
        """`sum`, and its norm [N, D] where the same launch makes it, else None.

        Counted for a layer's experts: in the sum the norm is a barrier, two trees of shuffles and a store, 0.3-0.4 us.
        Without it, a router that norms its rows pays for their squares and gains after it has waited for the sum,
        0.4-0.5 us; a norm that is a launch of its own (Triton's routers, MLPs with biases) 2-3 us.
        """
        most = self.links.rows
        if not self.links.fits(x[:most]):
            return super().sum_and_norm(x, residual, weight, eps)
        if len(x) <= most:
            return self.links.sum(x, residual, weight, eps)
        # in several sums: a row's norm must not depend on how many others there are
        turns = [self.links.sum(*each, weight, eps) for each in zip(x.split(most), residual.split(most), strict=True)]
        return tuple(torch.cat(part) for part in zip(*turns, strict=True))

    def gather(self, x):
        """x of all ranks -> [size, *x.shape]."""
        return self.links.gather(x) if self.links.gathers(x) else super().gather(x)

    def check(self):
        """Raises Lost where a sum has given another rank up."""
        try:
            self.links.check()
        except peers.GaveUp as error:
            raise Lost(str(error)) from None


def fastened(tp, device, dtype, columns, reduction, announce=None):
    """`tp` with the fastest links there are, for rows of up to `columns` elements; all ranks call it and get the same.

    reduction: "auto", or "library" to leave peer memory alone; announce: callable(line) or None, of a compiler's run.
    """
    if tp.size == 1 or device.type != "cuda" or reduction == "library":
        return tp
    try:
        if dtype != torch.bfloat16:
            raise peers.Unavailable(f"it serves bfloat16, this is {dtype}")
        links = peers.Peers(tp.rank, tp.size, device, columns, tp.every, announce=announce)
        proved = tp.every(_proof(tp, links, columns, device))
        if not all(proved):
            raise peers.Unavailable(f"its sums were wrong on ranks {[r for r, good in enumerate(proved) if not good]}")
    except peers.Unavailable as reason:
        tp.links.name += f" (no peer memory: {reason})"
        return tp
    links.wait(peers.PATIENCE)
    return replace(tp, links=Linked(tp.links, links))


def _proof(tp, links, columns, device):
    """Whether sums over peer memory are those of the library, to the bit, and their norms those of kernels.norm."""
    links.wait(PROOF_PATIENCE)
    for rows in PROOF_ROWS:
        # a residual is the same on all ranks: whoever adds a row up adds his own
        x, residual = (_noise(seed, rows, columns, device) for seed in (1 + tp.rank, 0))
        gain = torch.linspace(0.5, 1.5, columns, device=device).bfloat16()
        y, normed = links.sum(x, residual, gain, EPS)
        torch.cuda.synchronize(device)
        try:
            links.check()
        except peers.GaveUp:
            return False
        same = torch.equal(y, tp.links.sum(x, residual))
        if not same or not torch.allclose(normed, norm.reference(y, gain, EPS), rtol=2**-6, atol=1e-6):
            return False
    return True


def _noise(seed, rows, columns, device):
    draws = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, generator=draws, device=device).bfloat16()
