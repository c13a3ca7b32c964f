"""What is refused and what has an effect: trees that cannot be (B15), options (B16), broken checkpoints and pairs that
do not fit, in a process that goes on (B33, B07)."""

import os
from pathlib import Path

import pytest
import torch
from toys import BRANCH, NEXT, V, follow, one_line, pair, still_serves

from engine import Engine, Refused, Sampling, Shape
from weights.checkpoint import Checkpoint

PLAIN, CHAIN, TREE = Shape(0, 1, 1), Shape(3, 1, 4), Shape(3, 2, 8)
pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.fixture(scope="module")
def engine(toys):
    return pair(toys.map(), toys.map_draft())


def test_memory_is_stated_before_a_weight_is_read(toys, monkeypatch):
    """Mutant: the statement after the fill, when a machine that is too small has already run out."""
    order, read = [], Checkpoint.read_into
    monkeypatch.setattr(Checkpoint, "read_into", lambda *a: (order.append("read"), read(*a))[1])
    Engine.load(toys.map(), toys.map_draft(), device="cpu", max_context=64, announce=order.append)
    assert order[0].startswith("memory: needs ") and set(order[1:]) == {"read"}


def test_progress_is_of_the_whole_pair(toys):
    """Bytes of target and head together, up to all of them. Mutants: the head counted from zero; the target's bytes as
    all there are."""
    told = []
    engine = Engine.load(toys.map(), toys.map_draft(), device="cpu", max_context=64, progress=lambda *n: told.append(n))
    done, total = zip(*told, strict=True)
    need = sum(report.nbytes for report in engine.parts.reports)
    assert set(total) == {need} and done[-1] == need and list(done) == sorted(set(done))


# ------------------------------------------------------------------ B15
@pytest.mark.parametrize(
    "shape, words",
    [
        ((1, 2, 8), ["2 to 3"]),
        ((3, 1, 5), ["2 to 4"]),
        ((2, 4, 22), ["2 to 21"]),
        ((8, 8, 65), ["2 to 64"]),
        ((3, 1, 1), ["2 to 4"]),
        ((0, 2, 1), ["plain"]),
        ((10, 8, 64), ["72", "64"]),
        ((-1, 1, 1), ["steps"]),
        ((3, 0, 4), ["topk"]),
        ((3, True, 4), ["topk"]),
    ],
)
def test_a_tree_that_cannot_be_is_refused(shape, words):
    """States the most that fits. Mutant: candidates counted without the branch factor."""
    with pytest.raises(Refused) as error:
        Shape(*shape)
    one_line(error, *words)


def test_a_tree_wider_than_the_draft_vocabulary_is_refused(toys):
    engine = pair(toys.map(), toys.fixed_draft(BRANCH))
    with pytest.raises(Refused) as error:
        engine.generate([9], shape=Shape(2, 5, 8))
    one_line(error, "topk is 5", "4 tokens")


def test_plain_pair_refuses_to_draft(toys):
    engine = pair(toys.map())
    assert engine.shape == PLAIN
    with pytest.raises(Refused) as error:
        engine.generate([9], shape=CHAIN)
    one_line(error, "3-1-4", "draft")
    still_serves(engine, PLAIN)


@pytest.mark.parametrize("batch", [1, 2])
def test_proposals_stay_inside_the_vocabulary_to_the_end(toys, batch):
    """Contexts grown to the very limit. Mutant: buffers or parent look-ups one request too short."""
    engine = pair(toys.history(), toys.random_draft(), max_context=48, max_batch=2)
    proposed = []
    propose = engine.drafter.propose

    def noted(state, tree, cache):
        propose(state, tree, cache)
        proposed.append(tree.tokens.clone())

    engine.drafter.propose = noted
    prompts = [[3, 1, 4], [1, 5]][:batch]
    results = engine.generate(prompts, Sampling(max_new_tokens=99), shape=Shape(3, 4, 8))
    assert [len(r.token_ids) for r in results] == [48 - len(p) for p in prompts]
    assert all(((t >= 0) & (t < V)).all() for t in proposed) and len(proposed) > 20


@pytest.mark.parametrize("shape", [CHAIN, TREE, Shape(5, 8, 64)], ids=str)
def test_draft_logits_all_equal(toys, shape):
    """Ties go to the lowest ids, a tree of different siblings, and the run ends. Mutant: an unstable top-k that gives
    one id twice, or a parent after its child."""

    def flatten(config, tensors):
        tensors["lm_head.weight"].zero_()

    engine = pair(toys.map(), toys.altered(toys.map_draft(), flatten))
    for event in engine.stream([9], Sampling(max_new_tokens=8), shape=shape):
        if event.tree is not None:
            children = list(zip(event.tree.parents.tolist(), event.tree.tokens.tolist(), strict=True))[1:]
            assert len(set(children)) == len(children)
            assert all(parent < node for node, (parent, _) in enumerate(children, 1))
            assert {token for _, token in children} == set(range(min(shape.topk, V)))
    assert engine.generate([9], Sampling(max_new_tokens=30), shape=shape).token_ids == follow(9, 30, NEXT)


# ------------------------------------------------------------------ B16
def test_width_two_shows_two_candidates(engine):
    """Mutant: topk accepted and a chain drawn."""
    events = list(engine.stream([9], Sampling(max_new_tokens=9), shape=TREE))
    for event in events[1:]:
        assert event.tree.depths.tolist().count(1) == 2 and event.tree.parents[0] == -1
    chain = list(engine.stream([9], Sampling(max_new_tokens=9), shape=CHAIN))[1]
    assert chain.tree.depths.tolist() == [0, 1, 2, 3] and chain.accepted == [0, 1, 2, 3]


def test_graphs_off_or_auto_give_the_same(toys):
    """Mutant: an attribute that only the captured path sets. Required is refused without CUDA."""
    for graphs in ("auto", "off"):
        engine = pair(toys.map(), toys.map_draft(), graphs=graphs)
        still_serves(engine)
        (entry,) = engine.graphs.report()
        assert (entry["captured"], entry["replays"], entry["shape"]) == (False, 0, "3-1-4")
        assert entry["reason"] and entry["eager"] == 2
    with pytest.raises(Refused) as error:
        pair(toys.map(), toys.map_draft(), graphs="required")
    one_line(error, "required", "CUDA")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"device": "tpu"}, ["tpu"]),
        ({"dtype": "int8"}, ["int8", "bfloat16"]),
        ({"max_context": 1025}, ["1025", "1024"]),
        ({"max_context": 1}, ["max_context", "1"]),
        ({"graphs": "perhaps"}, ["perhaps", "auto"]),
        ({"layers": 2}, ["layers", "random"]),
        ({"capture_layers": "boundary:1,1,2"}, ["twice"]),
        ({"capture_layers": "boundary:1,2"}, ["names 2 layers"]),
        ({"capture_layers": "boundary:0,1,3"}, ["outside", "2 layers"]),
        ({"capture_layers": "layers 1"}, ["expected boundary:"]),
        ({"page_size": 0}, ["page_size"]),
        ({"prefill_chunk": 0}, ["prefill_chunk"]),
        ({"tp": 2}, ["tp: 2 needs 2 processes", "torchrun", "engine.spawn"]),
        ({"expert_parallel": True}, ["expert_parallel"]),
        ({"draft_tp": "cut"}, ["draft_tp", "auto"]),
        ({"max_batch": 0}, ["max_batch"]),
        ({"pages": 1}, ["pages"]),
        ({"nonsense": 1}, ["nonsense"]),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(toys, options, words):
    """One line with the option and its value. Mutant: an option that is taken and ignored."""
    with pytest.raises(Refused) as error:
        pair(toys.map(), toys.map_draft(), **options)
    one_line(error, *words)


# ------------------------------------------------------------------ B33
def test_a_broken_checkpoint_leaves_the_process_usable(toys, monkeypatch):
    """Refused before a weight is read, for target and head; the next load and the engine before it serve. Mutant: a
    loader that fills first and looks after."""
    engine = pair(toys.map(), toys.map_draft())
    read = []
    into = Checkpoint.read_into
    monkeypatch.setattr(Checkpoint, "read_into", lambda self, *args: read.append(args) or into(self, *args))

    def lose(config, tensors):
        tensors.pop("model.norm.weight", None)
        tensors.pop("norm.weight", None)

    def odd(config, tensors):
        tensors["extra.proj.weight"] = torch.zeros(2)

    def bend(config, tensors):
        name = next(n for n in tensors if n.endswith("embed_tokens.weight"))
        tensors[name] = tensors[name][:, :32]

    for change, word in ((lose, "norm.weight"), (odd, "extra.proj.weight"), (bend, "embed_tokens.weight")):
        for target, draft in (
            (toys.altered(toys.map(), change), toys.map_draft()),
            (toys.map(), toys.altered(toys.map_draft(), change)),
        ):
            with pytest.raises(Refused) as error:
                pair(target, draft)
            one_line(error, word)
    short = toys.altered(toys.map(), lambda config, tensors: None)
    os.truncate(f"{short}/model.safetensors", 5000)
    for path in (short, f"{short}/nowhere", str(Path(short).parent)):
        with pytest.raises(Refused):
            pair(path)
    assert read == []
    still_serves(engine)
    still_serves(pair(toys.map(), toys.map_draft()))
    assert read


def test_wrong_pairs_are_refused_by_both_widths(toys):
    """B07: a head for another vocabulary or width. Mutant: buffers sized from the wrong model."""

    def other(key, value):
        def change(config, tensors):
            config[key] = value

        return toys.altered(toys.map_draft(), change)

    with pytest.raises(Refused) as error:
        pair(toys.map(), other("target_hidden_size", 32))
    one_line(error, "32", "64")
    with pytest.raises(Refused) as error:
        pair(toys.map(), other("vocab_size", 128))
    one_line(error, "128", "64")
    with pytest.raises(Refused) as error:
        pair(toys.map(), other("eagle_config", {"eagle_aux_hidden_state_layer_ids": [2]}))
    one_line(error, "fc.weight", "[64, 192]", "[64, 64]")


def test_every_parameter_was_filled(toys):
    """With fresh memory NaN, none is left in a loaded pair. Mutant: a parameter that is declared and never read."""

    def tensors(thing, seen):
        if isinstance(thing, torch.Tensor):
            yield thing
        elif id(thing) not in seen and (hasattr(thing, "__dict__") or isinstance(thing, list | tuple)):
            seen.add(id(thing))
            parts = thing if isinstance(thing, list | tuple) else vars(thing).values()
            for part in parts:
                yield from tensors(part, seen)

    for options in ({}, {"draft_vocab": V}):
        engine = Engine.load(target=toys.history(), draft=toys.random_draft(**options), device="cpu", max_context=64)
        found = [t for model in (engine.target, engine.drafter) for t in tensors(model, set())]
        assert len(found) > 30 and all(t.isfinite().all() for t in found)
