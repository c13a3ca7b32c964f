"""The wiring case to get right: a 61-layer DeepSeek target, a head trained on boundaries 3, 31, 59, and a config that
says [2, 30, 58], which is the default triple of boundaries and the outputs that were meant (B01)."""

import json
from argparse import Namespace

import pytest
import torch
from latent_toys import deepseek, deepseek_config, deepseek_tensors
from test_heads_latent import HEADS
from test_heads_layouts import LAYERS as EIGHT
from test_heads_layouts import LAYOUTS
from toys import Noise, V, draft_config, pair

from engine import Sampling, Shape, diagnose, dump, generate
from engine.lessons import FromDump
from engine.loading import Options
from engine.opening import open_target
from engine.report import loaded
from engine.train_head import Head, losses
from weights.config import Eagle3Config

LAYERS, HALF = 61, 32
HEAD = {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True}


def target_of(toys):
    """What comes next is what layer 58's attention, a mean over the text, writes in the upper half of the stream: B_58
    knows nothing of it, B_59 nearly all."""
    config = deepseek_config(layers=LAYERS, first_k_dense_replace=56, rope_scaling=None)
    tensors = deepseek_tensors(config, Noise(8, gain=1.5))
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.3
            tensor[HALF:] *= 60 if name == "model.layers.58.self_attn.o_proj.weight" else 0
    tensors["model.embed_tokens.weight"][:, HALF:] = 0
    tensors["lm_head.weight"][:, :HALF] = 0
    tensors["lm_head.weight"] *= 6
    tensors["model.layers.58.self_attn.q_b_proj.weight"] *= 0.1
    return toys.save(config, tensors)


def texts(folder, name, count, seed):
    ids = torch.randint(V, (count, 64), generator=torch.Generator().manual_seed(seed)).tolist()
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"token_ids": row}) + "\n" for row in ids))
    return str(path)


@pytest.fixture(scope="module")
def trained(toys, tmp_path_factory):
    """(target, head trained on a dump of its boundaries 3, 31, 59, texts of neither)."""
    folder, target = tmp_path_factory.mktemp("deep"), target_of(toys)
    argv = ["--target", target, "--prompts", texts(folder, "train", 32, 1), "--out", str(folder / "dump")]
    assert dump.main([*argv, "--capture-layers", "boundary:3,31,59", "--device", "cpu"]) == 0
    o = Namespace(dump=str(folder / "dump"), target=target, length=64, batch=16, seed=0, sharpen=1.0)
    o.device = torch.device("cpu")
    study = FromDump(o, open_target(Options(target=target)))
    raw = draft_config(layers=LAYERS, eagle_config=HEAD)
    torch.manual_seed(0)
    head = Head(Eagle3Config.read(raw, "test"), torch.arange(V), study.target, 64)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0)
    for step in range(60):
        loss, _ = losses(head, study.lesson(step, head.draft_ids), 3)
        loss.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (folder / "head").mkdir()
    head.save(raw, folder / "head")
    return target, str(folder / "head"), texts(folder, "held", 12, 2)


def test_diagnose_names_what_it_was_trained_on(trained, capsys):
    """Mutants: [2, 30, 58] believed since it is the default; output i taken as B_i."""
    target, head, text = trained
    words = ["--target", target, "--draft", head, "--text", text, "--device", "cpu"]
    assert diagnose.main(words) == 3
    said = capsys.readouterr().out
    print(said)
    assert said.startswith("in force: boundaries 2, 30, 58, GUESSED")
    (best,) = [line for line in said.splitlines() if line.startswith("* ")]
    assert "ids are layer outputs" in best and best.endswith(" 3, 31, 59")
    assert "give --capture-layers boundary:3,31,59" in said.splitlines()[-1]
    assert diagnose.main([*words, "--capture-layers", "output:2,30,58"]) == 0
    assert "in force is right" in capsys.readouterr().out.splitlines()[-1]


def test_the_engine_measures_it_at_load(trained):
    """On text that the target draws itself, there being no tokenizer. Mutants: the guess kept; the features of the
    guess under the boundaries that were measured."""
    target, head, _ = trained
    engine = pair(target, head, check=True)
    assert (engine.parts.capture.source, engine.target.boundaries) == ("measured", (3, 31, 59))
    assert any("3, 31, 59 (measured: top-1" in line for line in loaded(engine.parts))
    sampling, shape, prompt = Sampling(max_new_tokens=40, ignore_eos=True), Shape(3, 1, 4), list(range(20))
    got = engine.generate(prompt, sampling, shape=shape)
    want = pair(target, head, capture_layers="boundary:3,31,59").generate(prompt, sampling, shape=shape)
    guessed = pair(target, head).generate(prompt, sampling, shape=shape)
    assert got.token_ids == want.token_ids == guessed.token_ids
    assert got.stats["emitted_per_cycle"] == want.stats["emitted_per_cycle"]
    assert got.stats["accept_length"] > guessed.stats["accept_length"] + 0.3


def test_the_command_says_so(trained, tmp_path):
    """Mutant: `source` of the statistics left at "guessed"."""
    target, head, _ = trained
    (tmp_path / "p.jsonl").write_text('{"token_ids": [3, 9, 27]}\n')
    words = ["--prompt-file", str(tmp_path / "p.jsonl"), "--target", target, "--draft", head, "--device", "cpu"]
    words += ["--max-new-tokens", "3", "--max-context", "128", "--stats", str(tmp_path / "s.json")]
    assert generate.main(words) == 0
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["capture_layers"] == {"boundaries": [3, 31, 59], "source": "measured"}


@pytest.mark.parametrize(
    "name, readings",
    [
        ("EAGLE-3.1", "order reversed"),
        ("two layers", "one layer lower"),
        ("one final feature", "before the final norm"),
    ],
)
def test_every_kind_of_head_can_be_examined(toys, capsys, name, readings):
    """Latent attention, several layers, norms before fusion, no fusion: random heads know nothing, and that is said.
    Mutants: fusion fed with a boundary where it expects the final norm; a twin that shares the cache of another."""
    layout = (HEADS | LAYOUTS)[name]
    head, _ = layout.save(toys)
    words = ["--target", deepseek(toys, layers=EIGHT), "--draft", head, "--tokens", "400", "--device", "cpu"]
    assert diagnose.main(words) == 0
    said = capsys.readouterr().out
    assert readings in said and "recycling" in said and said.splitlines()[-1].startswith("verdict: ")
