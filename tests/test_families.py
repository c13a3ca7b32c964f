"""Mixtral, GLM-4.5 and gpt-oss against transformers: logits and every boundary in fp32, whole, in pieces, cached and as
a tree; and speculation on them, windows crossed."""

import json

import pytest
import torch
from families import VARIANTS, checkpoint
from oracles import Forced, FreshHead, Replay, Transformers
from test_heads_layouts import LAYERS, LAYOUTS, features_of, follows
from test_targets import agrees
from toys import V, disturb, draft_config, pair

from engine import Sampling, Shape

pytestmark = pytest.mark.usefixtures("nan_memory")
PROMPTS = [[9, 8, 7, 40, 2], [(11 * i + 3) % V for i in range(33)]]
SHAPES = [Shape(1, 1, 2), Shape(3, 1, 4), Shape(3, 2, 8), Shape(4, 4, 16), Shape(5, 8, 64)]
PLAIN = Shape(0, 1, 1)


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_boundaries(tmp_path, variant, style):
    """Mutants: w1 and w3 swapped; a window that counts one key more; half of the other lanes turned; a bias left out;
    the correction in the weights; weights scaled before they are renormalised; the shared expert scaled, or fed the
    residual; the first dense layer one late; a sink that adds
    to the output; gate and up not taken apart, or not clamped on one side; weights that sum up all experts."""
    agrees(checkpoint(tmp_path, VARIANTS[variant], style))


@pytest.fixture(scope="module", params=["mixtral windowed, tied", "glm groups", "gpt-oss"])
def family(request, tmp_path_factory):
    """A target's directory, its plain texts after PROMPTS, and the target in transformers."""
    path = checkpoint(tmp_path_factory.mktemp("family"), VARIANTS[request.param])
    results = pair(path).generate(PROMPTS, Sampling(max_new_tokens=60, ignore_eos=True), shape=PLAIN)
    return path, [p + r.token_ids for p, r in zip(PROMPTS, results, strict=True)], Transformers(path)


def test_plain_decoding_is_greedy(family):
    """Every token is the best one of an uncached pass. Mutants: a window over cache rows instead of positions."""
    _, texts, model = family
    for prompt, text in zip(PROMPTS, texts, strict=True):
        logits, _ = model(text[:-1])
        best = logits.topk(2).values
        clear = (best[:, 0] - best[:, 1] > 1e-3)[len(prompt) - 1 :]
        same = logits.argmax(-1)[len(prompt) - 1 :] == torch.tensor(text[len(prompt) :])
        assert (same | ~clear).all() and clear.float().mean() > 0.9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_speculation_keeps_the_text(toys, family, shape):
    """A head whose real numbers are those of an uncached pass of other code, and an oracle that decides what is
    accepted: chains and trees keep the ids of plain decoding, far past the window. Mutants: the window counted from the
    last row of the pass, or from a node's number; committed rows inside the window not moved."""
    path, texts, model = family
    draft = toys.random_draft()
    engine = pair(path, draft, page_size=4)
    engine.drafter = Forced(engine.drafter, Replay(texts, V, 0.7, seed=3))
    disturb(engine)
    results = engine.generate(PROMPTS, Sampling(max_new_tokens=40, ignore_eos=True), shape=shape)
    lengths = {n for result in results for n in result.stats["emitted_per_cycle"]}
    assert len(lengths) > 1
    for slot, (result, text) in enumerate(zip(results, texts, strict=True)):
        assert PROMPTS[slot] + result.token_ids == text[: len(PROMPTS[slot]) + 40]
        if shape.topk < 8:
            head = FreshHead(draft, text, model.features(text, engine.target.boundaries))
            for round in engine.drafter.rounds[: len(result.cycles)]:
                head.check(round, slot)


@pytest.mark.parametrize("name", ["mixtral", "glm groups", "gpt-oss"])
def test_random_weights_by_config(tmp_path, name):
    """A config alone, target and head: texts that vary, the same whatever the shape. Mutants: a tensor that random
    weights lack, or make flat."""
    (tmp_path / "target.json").write_text(json.dumps(VARIANTS[name]))
    (tmp_path / "head.json").write_text(json.dumps(draft_config(layers=3, draft_vocab=32)))
    engine = pair(None, f"random:{tmp_path}/head.json", random=f"{tmp_path}/target.json")
    sampling = Sampling(max_new_tokens=30, ignore_eos=True)
    want, *others = (engine.generate(PROMPTS[0], sampling, shape=s).token_ids for s in (PLAIN, *SHAPES[1:4]))
    assert all(ids == want for ids in others) and len(set(want)) > 5


@pytest.fixture(scope="module", params=["mixtral", "glm", "gpt-oss"])
def deep(request, tmp_path_factory):
    """A family with as many layers as the published layouts' ids need: its directory, its oracle and features."""
    raw = {**VARIANTS[request.param], "num_hidden_layers": LAYERS, "layer_types": None}
    path = checkpoint(tmp_path_factory.mktemp("deep"), raw)
    return path, features_of(Transformers(path))


@pytest.mark.parametrize(
    "layout", ["SafeAILab", "SpecForge", "SpecForge 3.1", "ModelOpt", "one final feature", "speculators"]
)
def test_published_heads_on_these_targets(toys, deep, layout):
    """The layouts in which heads for gpt-oss, GLM and others are published: three features, per-feature norms, a norm
    before fc with the target's embedding and head lent, the one final feature. Mutants: a boundary read before a shared
    expert is added, or after the norm; a borrowed head of another target."""
    path, model = deep
    assert follows(toys, model, LAYOUTS[layout], target=path).target.boundaries == LAYOUTS[layout].boundaries
