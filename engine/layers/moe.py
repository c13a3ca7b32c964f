"""Mixture-of-experts block: norm, router, grouped experts, shared expert and residual; experts cut by width."""

from dataclasses import dataclass

import torch

from kernels.routing import Routing
from weights.formats import ExpertNames

from .mlp import MLP


@dataclass(frozen=True)
class Router:
    """What chooses a row's experts: what every format of expert weights hands on to the table of operations."""

    gate: torch.Tensor  # [E, D]
    rule: Routing
    bias: torch.Tensor | None = None  # [E], of the logits
    correction: torch.Tensor | None = None  # [E] fp32, for the choice alone

    @classmethod
    def declare(cls, source, name, experts, hidden, rule, *, bias=False, correction=None):
        """`name`: of the module; bias: it has one; correction: its name below the module, None: it has none.

        The correction stays fp32 whatever the model's dtype: experts often differ by less than a bf16 step."""
        return cls(
            gate=source.take(f"{name}.weight", (experts, hidden)),
            rule=rule,
            bias=source.take(f"{name}.bias", (experts,)) if bias else None,
            correction=source.take(f"{name}.{correction}", (experts,), dtype=torch.float32) if correction else None,
        )

    def __call__(self, ops, x, norm_weight, eps, *shared):
        """x [N, D], before its norm, or after it where norm_weight is None -> normed [N, D], ids [N, k], weights [N, k]
        fp32, and what a shared expert's gate and up, where they are given, make of the normed rows (kernels.routing).
        """
        return ops.route(x, norm_weight, eps, self.gate, self.rule, self.bias, self.correction, *shared)


def projections(expert):
    """Names of an expert's matrices in most checkpoints, below the block's name."""
    return ExpertNames(*(f"experts.{expert}.{part}_proj" for part in ("gate", "up", "down")))


class MoE:
    """x + sum over chosen experts of weight * expert(norm x), + shared(norm x) where there is a shared expert.

    Args:
        norm: layers.norm.Norm, of the experts' and the router's input; router: Router.
        experts: parameters that a format of weights.formats declared.
        shared: the layers.mlp.MLP that every row passes, of the same norm, or None. It is added last, unweighted.
    """

    def __init__(self, norm, router, experts, activation, ops, tp, shared=None):
        self.norm, self.router, self.experts, self.shared = norm, router, experts, shared
        self.activation, self.ops, self.tp = activation, ops, tp

    def __call__(self, x, normed=None):
        """[N, D] -> [N, D]; normed: norm(x), where it is there already."""
        return self.tp.add(x, lambda carried: self._share(*self.norm.given(x, normed), carried))

    def _share(self, x, norm_weight, carried):
        """This rank's part of the sum, on top of `carried`."""
        given = self.ops, x, norm_weight, self.norm.eps, self.router, self.activation, carried
        if self.shared is None:
            return self.experts.apply(*given)
        return self.experts.apply_beside(*given, self.shared)


def beside_shared(source, norm, config, weight_format, ops, tp):
    """The block as DeepSeek and GLM write it, names below `source`: experts chosen in groups, by sigmoid and correction
    or by softmax, beside a shared one.

    config: experts, experts_per_token, expert_intermediate, score, norm_topk_prob, groups, top_groups, scale,
    shared_intermediate (0: no shared expert), hidden, activation.
    """
    c, correction = config, "e_score_correction_bias" if config.score == "sigmoid" else None
    rule = Routing(c.experts_per_token, c.norm_topk_prob, c.score, c.groups, c.top_groups, 2, c.scale)
    router = Router.declare(source, "gate", c.experts, c.hidden, rule, correction=correction)
    experts = weight_format.declare(source, projections, c.experts, c.hidden, c.expert_intermediate)
    shared = None
    if c.shared_intermediate:
        at = source.prefixed("shared_experts.")
        shared = MLP(at, norm, c.hidden, c.shared_intermediate, c.activation, ops, tp)
    return MoE(norm, router, experts, c.activation, ops, tp, shared)
