"""What a load measures of a head whose files leave its wiring open, and what it says."""

import json

import pytest
from test_wiring import HELD, IDS, altered
from toys import NEXT, follow, pair

from engine import Engine, Sampling, generate
from engine.options import DEMO
from engine.report import loaded


def ambiguous(config, tensors):
    config["norm_output"] = True  # the normed hidden to servers, perhaps not to SpecForge's trainer
    config["eagle_config"][IDS] = [2, 4, 6]  # outputs, or boundaries as the head was trained on


def test_an_ambiguous_head_is_measured_at_load(tmp_path, capsys):
    """The right reading is taken and said, and drafts as the head does whose file is clear. Mutants: measured and not
    taken; taken by the target and not by the drafter; said to be guessed still; the features of the wrong layers."""
    head, stats = altered(tmp_path, ambiguous), tmp_path / "stats.json"
    runs = {}
    for name, more in (("clear", ()), ("measured", ("--draft", head)), ("guessed", ("--draft", head, "--no-check"))):
        words = ["def quicksort(items):", "--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"), *more]
        assert generate.main([*words, "--device", "cpu", "--max-new-tokens", "40", "--stats", str(stats)]) == 0
        runs[name] = json.loads(stats.read_text()) | {"said": capsys.readouterr().err}
    clear, measured, guessed = runs["clear"], runs["measured"], runs["guessed"]
    assert measured["capture_layers"] == {"boundaries": [2, 4, 6], "source": "measured"}
    assert guessed["capture_layers"] == {"boundaries": [3, 5, 7], "source": "guessed"}
    assert "measured: top-1" in measured["said"] and "recycle pre-norm (measured" in measured["said"]
    assert "--no-check" in measured["said"] and "GUESSED" not in measured["said"] and "GUESSED" in guessed["said"]
    assert measured["weights"]["guessed"] == [] and "norm_output" in guessed["weights"]["guessed"][0]
    (mine,), (theirs,), (worse,) = measured["requests"], clear["requests"], guessed["requests"]
    assert mine["token_ids"] == theirs["token_ids"] == worse["token_ids"]
    assert mine["emitted_per_cycle"] == theirs["emitted_per_cycle"] and mine["cycles"] < worse["cycles"]


def test_a_speculators_head_without_its_switch_is_measured(tmp_path):
    """Its residual is normed to vLLM and not to the library: to this head it is not. The layers are no question.
    Mutants: its guess kept in the report; another switch than the open one taken; boundaries called measured."""

    def change(config, tensors):
        layer = {key: value for key, value in config.items() if key not in ("architectures", "eagle_config")}
        draft_vocab = layer.pop("draft_vocab_size")
        config.clear()
        config.update(architectures=["Eagle3Speculator"], speculators_model_type="eagle3", draft_vocab_size=draft_vocab)
        config.update({IDS: [2, 4, 6], "transformer_layer_config": layer, "speculators_version": "0.3.0"})

    engine = Engine.load(str(DEMO / "target"), altered(tmp_path, change), device="cpu", max_batch=1)
    parts = engine.parts
    assert (parts.capture.source, engine.target.boundaries) == ("config", HELD) and parts.reports[1].guessed == []
    assert not engine.drafter.config.norm_before_residual and len(parts.measured) == 1
    assert parts.measured[0].startswith("norm_before_residual False (measured: top-1 ")


def test_a_right_guess_is_confirmed(tmp_path):
    """Mutant: only a change counts as measured."""

    def change(config, tensors):
        config["architectures"] = ["Eagle3LlamaForCausalLM"]  # to vLLM ids are boundaries, but these start with 1
        del config["eagle_config"]["use_aux_hidden_state"]

    engine = Engine.load(str(DEMO / "target"), altered(tmp_path, change), device="cpu", max_batch=1)
    assert (engine.parts.capture.source, engine.target.boundaries) == ("measured", HELD)


def test_what_makes_no_difference_stays_a_guess(toys):
    """A head that uses no features, on a target without a tokenizer (its own text is drawn): no reading is better, and
    none is taken. Mutants: the first of equals called measured; a chance difference taken."""

    def change(config, tensors):
        config["eagle_config"][IDS] = [2, 3, 4]

    draft = toys.altered(toys.map_draft(), change)
    engine = pair(toys.map(layers=8), draft, check=True)
    assert (engine.parts.capture.source, engine.target.boundaries) == ("guessed", (3, 4, 5))
    assert any("GUESSED" in line and "no reading is clearly" in line for line in loaded(engine.parts))
    assert engine.generate([3, 9], Sampling(max_new_tokens=9)).token_ids == follow(9, 9, NEXT)


@pytest.mark.gpu
def test_measured_before_anything_is_captured(tmp_path):
    """Graphs hold the boundaries and the recycling that were measured, not those that were guessed."""
    prompt, sampling = "def quicksort(items):", Sampling(max_new_tokens=60)
    runs = []
    for head in (str(DEMO / "draft"), altered(tmp_path, ambiguous)):
        engine = Engine.load(str(DEMO / "target"), head, device="cuda", max_batch=1, graphs="required")
        runs.append(engine.generate(prompt, sampling))
    assert (engine.parts.capture.source, engine.target.boundaries) == ("measured", HELD)
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].stats["emitted_per_cycle"] == runs[1].stats["emitted_per_cycle"]
