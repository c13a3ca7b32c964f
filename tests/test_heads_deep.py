"""Heads of several layers in full rounds: trees, every accept length, and catching up after plain cycles with
padding in the pass (B10, B47)."""

import pytest
from oracles import Forced, FreshHead, Replay, Transformers
from reference_head import Reference
from test_faults_shapes import PLAIN, switching
from test_heads_layouts import LAYERS, LAYOUTS, PROMPT
from toys import V, disturb, pair

from engine import Sampling, Shape
from engine.buffers import BACKLOG

pytestmark = pytest.mark.usefixtures("nan_memory")


class Deep(FreshHead):
    """A reference of any head, with the checks of FreshHead."""

    def __init__(self, layout, tensors, text, features):
        self.reference, self.text, self.features = Reference(layout.head, tensors), text, features

    def logits(self, n, path):
        """As FreshHead.logits."""
        return self.reference.draft(self.text[: n + 1], self.features, len(path) + 1, path)

    @property
    def ids(self):
        return self.reference.ids


def start(toys, name, prompts, count):
    """(engine with a forced drafter, texts, a Deep for each) of a layout."""
    layout, target = LAYOUTS[name], toys.history(layers=LAYERS)
    path, tensors = layout.save(toys)
    engine, model = pair(target, path, max_context=512), Transformers(target)
    texts = [p + engine.generate(p, Sampling(max_new_tokens=count), shape=PLAIN).token_ids for p in prompts]
    tensors.setdefault("embed_tokens.weight", None)
    if "embed" in layout.dropped:
        tensors["embed_tokens.weight"] = model.model.model.embed_tokens.weight.detach()
    heads = [Deep(layout, tensors, text, model.features(text, layout.boundaries)) for text in texts]
    engine.drafter = Forced(engine.drafter, Replay(texts, V, 0.7, seed=3))
    return engine, texts, heads


@pytest.mark.parametrize("name", ["ModelOpt Deep", "speculators Qwen3"])
@pytest.mark.parametrize("shape", [Shape(3, 1, 4), Shape(3, 2, 8)], ids=str)
def test_rounds_of_a_deep_head(toys, name, shape):
    """Mutants: rows of a later layer not rewritten after a round, or kept from a rejected branch; another beam's
    hidden; the window of one layer in all."""
    prompts = [PROMPT, PROMPT[::-1][:5]]
    engine, texts, heads = start(toys, name, prompts, 60)
    disturb(engine, float("nan"))
    results = engine.generate(prompts, Sampling(max_new_tokens=40), shape=shape)
    assert {n for r in results for n in r.stats["emitted_per_cycle"]} == set(range(1, shape.path + 1))
    for slot, result in enumerate(results):
        assert prompts[slot] + result.token_ids == texts[slot][: len(prompts[slot]) + 40]
        for round in engine.drafter.rounds[: len(result.cycles)]:
            heads[slot].check(round, slot)


def test_padding_of_a_catch_up_disturbs_no_layer(toys):
    """Long plain stretches, then one pass over a backlog shorter than it is wide, all unwritten rows NaN. Mutants:
    padding written to a live row of any layer; real rows that see it; a second layer that does not catch up."""
    prompts = [PROMPT, [(11 * i + 3) % V for i in range(20)]]
    engine, texts, heads = start(toys, "ModelOpt Deep", prompts, BACKLOG + 70)
    disturb(engine, float("nan"))
    requests = switching(engine, prompts, [Shape(3, 1, 4), *[PLAIN] * 5, Shape(3, 2, 8), *[PLAIN] * (BACKLOG + 9)], 95)
    for slot, (request, text, head) in enumerate(zip(requests, texts, heads, strict=True)):
        assert request.token_ids == text[len(prompts[slot]) :][:95]
        rounds = [r for r in engine.drafter.rounds if r.seq_lens[slot] > 0]
        known = [int(r.seq_lens[slot]) for r in rounds]
        assert len(known) >= 3 and max(b - a for a, b in zip(known, known[1:], strict=False)) > BACKLOG
        for round in rounds:
            head.check(round, slot)
