"""Routers of every kind in CUDA C++ (csrc/fewrows/router.cuh): the twin of routing.reference whose first argument is
the kernels.native.Library that holds it. Sizes that no kernel is built for keep their Triton twin."""

import torch

from . import routing
from .structs import structure
from .tile import groups

COLUMNS = (256, 512, 2048, 2880, 4096, 5120, 7168)  # of router.cuh
MOST_EXPERTS, MOST_CHOICES, MOST_GROUPS, MOST_TILES = 512, 32, 32, 64
SCORES = tuple(routing.SCORES)  # in the order of router.cuh's

Router = structure(
    "Router",
    p="x gamma gate bias correction shared normed hidden packets launches arrivals ids weights",
    f="eps scale",
    i="rows columns width experts choices score renormalise groups top_groups group_best",
)


def serves(x, gate, rule):
    """Whether a kernel is built for these sizes."""
    (experts, columns), few = gate.shape, rule.top_k <= MOST_CHOICES and rule.groups <= MOST_GROUPS
    return columns in COLUMNS and experts <= MOST_EXPERTS and few and groups(x.shape[0]) <= MOST_TILES


def route(library, x, norm_weight, eps, gate, rule, bias=None, correction=None, shared=None):
    """The twin of routing.reference."""
    if not serves(x, gate, rule):
        return routing.fused(x, norm_weight, eps, gate, rule, bias, correction, shared)
    x = x.contiguous()
    normed = x if norm_weight is None else torch.empty_like(x)
    given = fields(library, x, norm_weight, eps, gate, rule, bias, correction, shared)
    library.call("eagle3_route", Router, library.blocks, normed=normed, **given)
    chosen = normed, given["ids"], given["weights"]
    return chosen if shared is None else (*chosen, given["hidden"])


def fields(library, x, norm_weight, eps, gate, rule, bias, correction, shared):
    """Of a Router, all but the normed rows; what it writes is new."""
    (rows, columns), (experts, k) = x.shape, (gate.shape[0], rule.top_k)
    width = 0 if shared is None else shared.shape[0] // 2
    return dict(
        x=x, gamma=norm_weight, gate=gate, bias=bias, correction=correction, shared=shared,
        hidden=None if shared is None else x.new_empty(rows, width),
        packets=library.scores, launches=library.routes, arrivals=library.routed,
        ids=torch.empty(rows, k, dtype=torch.int64, device=x.device),
        weights=torch.empty(rows, k, dtype=torch.float32, device=x.device),
        eps=eps, scale=rule.scale, rows=rows, columns=columns, width=width, experts=experts, choices=k,
        score=SCORES.index(rule.score), renormalise=int(rule.renormalise), groups=rule.groups,
        top_groups=rule.top_groups, group_best=rule.group_best,
    )  # fmt: skip
