"""How draft and target are wired together: layers (B01), id table (B04), borrowed weights (B05), positions (B08)."""

import pytest
import torch
from oracles import Transformers
from toys import BRANCH, NEXT, OTHER, RING, V, follow, pair

from engine import Refused, Sampling, Shape
from engine.report import loaded

CHAIN = Shape(3, 1, 4)
KEY = "eagle_aux_hidden_state_layer_ids"
pytestmark = pytest.mark.usefixtures("nan_memory")


def tokens_proposed(engine, prompt, shape, count=12):
    """Node tokens of every tree of a run."""
    events = engine.stream(prompt, Sampling(max_new_tokens=count), shape=shape)
    return [event.tree.tokens[1:].tolist() for event in events if event.tree is not None]


# ------------------------------------------------------------------ B01
def listing(toys, top=None, nested=None):
    def change(config, tensors):
        config.pop("eagle_config")
        config.update({KEY: top} if top else {}, **({"eagle_config": {KEY: nested}} if nested else {}))

    return toys.altered(toys.random_draft(layers=8), change)


def test_layers_are_those_listed(toys):
    """The list at top level, in the nested block and as layer outputs: bit for bit the same features, those of B_2, B_4
    and B_8. Mutants: the nested list not read; output i taken as B_i; the default triple taken in silence."""
    target, prompt = toys.history(layers=8), [3, 1, 4, 1, 5]
    seen = []
    for draft in (listing(toys, top=[2, 4, 8]), listing(toys, nested=[2, 4, 8]), listing(toys, top=[1, 3, 7])):
        engine = pair(target, draft)
        assert engine.target.boundaries == (2, 4, 8) and engine.parts.capture.source == "config"
        assert not any("GUESSED" in line for line in loaded(engine.parts))
        events = list(engine.stream(prompt, Sampling(max_new_tokens=6), shape=CHAIN))
        text = prompt + [t for e in events for t in e.tokens]
        seen.append((torch.cat([e.features for e in events]), [e.tree.tokens.tolist() for e in events[1:]], text))
    for features, proposals, text in seen[1:]:
        assert torch.equal(features, seen[0][0]) and (proposals, text) == seen[0][1:]
    want = Transformers(target).features(text[:-1], (2, 4, 8))[len(prompt) - 1 :]
    torch.testing.assert_close(seen[0][0], want, atol=1e-4, rtol=1e-4)


def test_layers_not_listed_are_guessed_aloud(toys):
    """Mutant: a guess that looks like a reading."""
    engine = pair(toys.history(layers=8), listing(toys))
    assert engine.parts.capture.source == "guessed" and engine.target.boundaries == (2, 4, 5)
    (line,) = [line for line in loaded(engine.parts) if "GUESSED" in line]
    assert "2, 4, 5" in line and "--capture-layers" in line
    engine = pair(toys.history(layers=8), listing(toys), capture_layers="output:1,3,7")
    assert (engine.parts.capture.source, engine.target.boundaries) == ("override", (2, 4, 8))


# ------------------------------------------------------------------ B04
def test_id_table_maps_what_is_proposed(toys):
    """Four ids: proposals come from them alone, and where the target walks among them all are accepted. Mutants: the
    table not loaded; taken as ids and not as offsets."""
    engine = pair(toys.map(RING), toys.map_draft(RING, BRANCH))
    assert {t for tree in tokens_proposed(engine, [3, 7], Shape(2, 4, 8)) for t in tree} <= set(BRANCH)
    result = engine.generate([3, 7], Sampling(max_new_tokens=41), shape=CHAIN)
    assert result.token_ids == follow(7, 41, RING) and set(result.stats["emitted_per_cycle"]) == {4}


def test_missing_id_table_is_refused(toys):
    """Mutant: the first n ids in its place."""

    def change(config, tensors):
        del tensors["d2t"]

    with pytest.raises(Refused, match="lacks tensor d2t"):
        pair(toys.map(RING), toys.altered(toys.map_draft(RING, BRANCH), change))


@pytest.mark.parametrize("after", [NEXT, RING])
def test_full_vocabulary_needs_no_table(toys, after):
    """Ids are themselves, the last one too. Mutant: offsets 0..n-1 where there is no table (id i becomes 2i)."""
    draft = toys.map_draft(after)
    engine = pair(toys.map(after), draft)
    before = after.index(V - 1)
    assert tokens_proposed(engine, [after.index(before)], Shape(1, 1, 2))[0] == [V - 1]


@pytest.mark.parametrize("entry, value", [(0, V), (3, V - 3), (2, -3)])
def test_entry_outside_the_vocabulary_is_refused(toys, entry, value):
    """Mutant: the table taken as it comes; ids wrap or crash later."""

    def change(config, tensors):
        tensors["d2t"][entry] = value

    with pytest.raises(Refused, match=rf"d2t.*entry {entry} is {value}, .*id {entry + value},"):
        pair(toys.map(RING), toys.altered(toys.map_draft(RING, BRANCH), change))


# ------------------------------------------------------------------ B05
def without(*names):
    def change(config, tensors):
        for name in names:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    "names", [["lm_head.weight"], ["embed_tokens.weight"], ["embed_tokens.weight", "lm_head.weight"]]
)
def test_missing_weights_are_borrowed_by_name(toys, names):
    """Accepts everything, and the report says what came from where. Mutants: left at what the memory held; borrowed in
    silence."""
    engine = pair(toys.map(), toys.altered(toys.map_draft(), without(*names)))
    result = engine.generate([3, 9], Sampling(max_new_tokens=41), shape=CHAIN)
    assert result.token_ids == follow(9, 41, NEXT) and set(result.stats["emitted_per_cycle"]) == {4}
    report = engine.parts.reports[1]
    assert [name for name, _ in report.borrowed] == sorted(names) == report.missing
    assert all(any(name in line and "target" in line for line in loaded(engine.parts)) for name in names)


def test_own_head_is_kept(toys):
    """Proposals follow the head's own weights, not the target's. Mutant: own head overwritten by the target's."""
    engine = pair(toys.map(), toys.map_draft(OTHER))
    assert engine.parts.reports[1].borrowed == []
    root = follow(9, 1, NEXT)[0]
    assert tokens_proposed(engine, [3, 9], CHAIN)[0] == follow(root, 3, OTHER)


def test_tie_flag_with_a_smaller_vocabulary_does_not_alias(toys):
    """The file's own head of four rows serves. Mutant: the embedding of 64 rows in its place."""

    def tie(config, tensors):
        config["tie_word_embeddings"] = True

    engine = pair(toys.map(RING), toys.altered(toys.map_draft(RING, BRANCH), tie))
    assert engine.drafter.head.weight.shape == (4, V)
    result = engine.generate([3, 7], Sampling(max_new_tokens=41), shape=CHAIN)
    assert result.token_ids == follow(7, 41, RING) and set(result.stats["emitted_per_cycle"]) == {4}


@pytest.mark.parametrize("flag", [True, False])
def test_a_head_of_another_size_is_not_borrowed(toys, flag):
    """Mutant: 64 rows of the target for a draft vocabulary of four, accept length 1.00."""

    def change(config, tensors):
        config["tie_word_embeddings"] = flag
        del tensors["lm_head.weight"]

    with pytest.raises(Refused, match=r"lm_head.weight.*\[4, 64\].*\[64, 64\]"):
        pair(toys.map(RING), toys.altered(toys.map_draft(RING, BRANCH), change))


@pytest.mark.parametrize(
    "name", ["fc.weight", "norm.weight", "midlayer.hidden_norm.weight", "midlayer.mlp.up_proj.weight"]
)
def test_any_other_missing_tensor_is_refused(toys, name):
    """Mutant: a warning about unexpected tensors only."""
    with pytest.raises(Refused, match=name.replace("midlayer", r"(midlayer|layers\.0)")):
        pair(toys.map(), toys.altered(toys.map_draft(), without(name)))


def test_unexpected_norm_is_refused(toys):
    """B06: a weight that the arithmetic has no place for."""

    def change(config, tensors):
        tensors["fc_norm.0.weight"] = torch.ones(64)

    with pytest.raises(Refused, match="fc_norm.0.weight"):
        pair(toys.map(), toys.altered(toys.map_draft(), change))


# ------------------------------------------------------------------ B09
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_draft_stored_in_another_dtype(toys, dtype, stored):
    """Converted, not reinterpreted: the same text, everything accepted. Mutant: the head kept in its own dtype."""

    def change(config, tensors):
        config["torch_dtype"] = str(stored).removeprefix("torch.")
        tensors.update({name: t.to(stored) for name, t in tensors.items()})

    engine = pair(toys.map(), toys.altered(toys.map_draft(), change), dtype=dtype)
    result = engine.generate([3, 9], Sampling(max_new_tokens=41), shape=CHAIN)
    assert result.token_ids == follow(9, 41, NEXT) and set(result.stats["emitted_per_cycle"]) == {4}


# ------------------------------------------------------------------ B08
@pytest.mark.parametrize("shape", [CHAIN, Shape(3, 2, 8)], ids=str)
def test_draft_trained_shorter_than_the_target(toys, shape):
    """64 positions of its own, run to 160 of the target's 512: still right at every step. Mutant: a rotary table of the
    head's own length."""
    draft = toys.map_draft(max_position_embeddings=64)
    engine = pair(toys.map(max_position_embeddings=512), draft, max_context=512)
    prompt = follow(5, 100, NEXT)
    result = engine.generate(prompt, Sampling(max_new_tokens=61), shape=shape)
    assert result.token_ids == follow(prompt[-1], 61, NEXT)
    assert set(result.stats["emitted_per_cycle"]) == {4}
