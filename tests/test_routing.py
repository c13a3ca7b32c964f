"""Every kind of routing against a plain rule written beside it, one row at a time (B39)."""

import dataclasses
import json
import math
import random

import pytest
import torch

from engine import Engine
from engine.batch import Batch
from kernels import REFERENCE
from kernels.moe import composed
from kernels.routing import Routing

E = 8
KINDS = {
    "softmax renormalised": Routing(3, True),
    "softmax as it is": Routing(3, False),
    "softmax of the chosen": Routing(3, False, "logits"),
    "sigmoid": Routing(3, True, "sigmoid", scale=2.5),
    "sigmoid as it is": Routing(3, False, "sigmoid"),
    "V3 groups": Routing(3, True, "sigmoid", 4, 2, 2, 2.5),
    "V2 groups": Routing(3, False, "softmax", 4, 2, 1, 16.0),
}


def plain(logits, rule, correction):
    """ids and weights of one row, by the definitions of the models' own papers."""
    if rule.score == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        scores = [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    choice = [s + c for s, c in zip(scores, correction, strict=True)]
    size = E // rule.groups
    groups = [sorted(choice[g * size : (g + 1) * size])[-rule.group_best :] for g in range(rule.groups)]
    kept = sorted(range(rule.groups), key=lambda g: -sum(groups[g]))[: rule.top_groups]
    ids = sorted((e for e in range(E) if e // size in kept), key=lambda e: -choice[e])[: rule.top_k]
    weights = [scores[e] for e in ids]
    if rule.renormalise or rule.score == "logits":  # a softmax over the chosen is a renormalised softmax over all
        weights = [w / sum(weights) for w in weights]
    return ids, [w * rule.scale for w in weights]


def chosen(logits, rule, **given):
    """ids [k] and weights [k] of one row of logits: the gate undoes the norm, whose gain is one."""
    x = torch.tensor([logits])
    gate = torch.eye(E) * x.square().mean().sqrt()
    _, ids, weights = REFERENCE.route(x, torch.ones(E), 0.0, gate, rule, **given)
    return ids[0].tolist(), weights[0]


@pytest.mark.parametrize("kind", KINDS)
def test_routing_follows_its_definition(kind):
    """The correction reverses the ranking and is a hundred times the scores. Mutants: it enters the weights; it is
    left out; groups ranked by their best alone, or by their sum; scale before renormalising; softmax for sigmoid."""
    rule, draw = KINDS[kind], random.Random(kind)
    for correction in ([0.0] * E, [100.0 * e for e in range(E)], [draw.gauss(0, 0.2) for _ in range(E)]):
        if rule.score != "sigmoid":
            correction = [0.0] * E
        for _ in range(20):
            logits = [draw.gauss(0, 1.5) for _ in range(E)]
            given = torch.tensor(correction) if rule.score == "sigmoid" else None
            ids, weights = chosen(logits, rule, correction=given)
            want_ids, want = plain(logits, rule, correction)
            assert ids == want_ids
            torch.testing.assert_close(weights, torch.tensor(want), atol=1e-6, rtol=1e-5)


def test_a_correction_that_differs_in_the_fourth_digit_decides():
    """Two experts of equal scores whose corrections differ by 1e-4 near 8. Mutant: corrections rounded to bf16."""
    logits, correction = [1.0] * E, torch.full((E,), 8.0)
    correction[5] += 1e-4
    ids, _ = chosen(logits, Routing(1, True, "sigmoid"), correction=correction)
    assert ids == [5]


def test_a_bias_moves_logits_and_weights():
    """gpt-oss: the router's bias counts in the weights too. Mutant: the bias only chooses."""
    rule, bias = Routing(2, False, "logits"), torch.linspace(-1, 1, E)
    logits = [0.5, -0.5] * (E // 2)
    ids, weights = chosen(logits, rule, bias=bias)
    want_ids, want = plain([x + b for x, b in zip(logits, bias.tolist(), strict=True)], rule, [0.0] * E)
    assert ids == want_ids
    torch.testing.assert_close(weights, torch.tensor(want), atol=1e-6, rtol=1e-5)


def test_sigmoids_that_are_all_zero_do_not_divide_by_zero():
    """Logits of -200 underflow to scores of zero. Mutant: no floor under the sum."""
    ids, weights = chosen([-200.0] * E, Routing(2, True, "sigmoid"))
    assert ids == [0, 1] and weights.tolist() == [0.0, 0.0]


def test_rows_of_a_random_model_choose_by_themselves(tmp_path):
    """At every depth four rows choose about as many different experts as independent choices would. Kills random
    weights whose layers add so much that all rows become one."""
    sizes = dict(hidden_size=128, num_hidden_layers=20, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    sizes |= dict(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=64, intermediate_size=64, vocab_size=512)
    sizes |= dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", max_position_embeddings=256, rms_norm_eps=1e-6
    )
    raw = sizes | dict(
        norm_topk_prob=True, rope_theta=1e4, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=0
    )
    (tmp_path / "random.json").write_text(json.dumps({"target": raw}))
    counts = []

    def noted(*args):
        out = REFERENCE.route(*args)
        counts.append(out[1].unique().numel())
        return out

    ops = dataclasses.replace(REFERENCE, route=noted, moe=composed(noted, REFERENCE.experts))
    engine = Engine.load(random=str(tmp_path / "random.json"), device="cpu", max_context=96, max_batch=1, ops=ops)
    draw = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, 512, (1, 36), generator=draw)
    pages, end = torch.arange(1, 3, dtype=torch.int32)[None], torch.tensor([32])
    engine.target.forward(Batch.causal(prompt[:, :32], end * 0, pages), engine.cache)
    counts.clear()
    engine.target.forward(Batch.causal(prompt[:, 32:], end, pages), engine.cache)
    independent = 64 * (1 - (1 - 4 / 64) ** 4)
    deep = counts[10:]
    assert len(counts) == 20 and sum(deep) / len(deep) > 0.9 * independent
