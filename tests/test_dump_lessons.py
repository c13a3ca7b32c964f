"""Training on a dump: its lessons are the target's own, whatever the family; what cannot serve is refused."""

import json
import re
from argparse import Namespace

import pytest
import torch
from families import VARIANTS, checkpoint
from latent_toys import KIMI, deepseek, nested
from safetensors import safe_open
from toys import V, pair

from engine import Sampling, Shape, dump, train
from engine.forced import Teacher
from engine.lessons import FromDump
from engine.loading import Options
from engine.opening import open_target
from weights.dump import Dump


@pytest.fixture(scope="module")
def dumped(toys, tmp_path_factory):
    """(target, folder) of a dump of a MAP target, as ids in a *.bin file."""
    folder = tmp_path_factory.mktemp("dump")
    ids = torch.randint(V, (4000,), generator=torch.Generator().manual_seed(1))
    ids.numpy().astype("<u2").tofile(folder / "text.bin")
    argv = ["--target", toys.map(layers=4), "--prompts", folder / "text.bin", "--out", folder / "out"]
    argv += ["--capture-layers", "output:1,2", "--length", 60, "--shard-tokens", 500, "--device", "cpu"]
    assert dump.main([str(word) for word in argv]) == 0
    return toys.map(layers=4), folder / "out"


def training(dumped, out, *more):
    given = ["--target", dumped[0], "--dump", dumped[1], "--out", out, "--draft-vocab", 48, "--intermediate", 64]
    given += [
        "--steps",
        80,
        "--batch",
        4,
        "--length",
        40,
        "--ttt",
        3,
        "--lr",
        0.01,
        "--device",
        "cpu",
        "--log-every",
        0,
        *more,
    ]
    return [str(word) for word in given]


def test_lessons_of_a_dump_are_the_targets(dumped):
    """Mutants: features of another row; windows that cross into the next sequence, or all begin with one; logits of the
    normed hidden normed again; the same windows at every step."""
    opened = open_target(Options(target=dumped[0]))
    o = Namespace(dump=dumped[1], target=dumped[0], length=40, batch=5, seed=2, sharpen=1.5, device=torch.device("cpu"))
    study, ids = FromDump(o, opened), torch.arange(0, V, 2)
    lesson = study.lesson(7, ids)
    assert not torch.equal(lesson.tokens, study.lesson(8, ids).tokens)
    assert torch.equal(lesson.tokens, study.lesson(7, ids).tokens)
    text, places = torch.randint(V, (4000,), generator=torch.Generator().manual_seed(1)).unfold(0, 40, 1), []
    for window in lesson.tokens:
        (at,) = (text == window).all(1).nonzero()[:, 0].tolist()
        places.append(at % 60)
    assert max(places) <= 20 and len(set(places)) > 2
    target = pair(dumped[0], capture_layers="output:1,2").target
    want = Teacher(target, 5, 60, "cpu").lesson(lesson.tokens, ids, 1.5)  # this target looks at no other token
    torch.testing.assert_close(lesson.features, want.features, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lesson.wanted, want.wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(lesson.best, want.best)
    assert study.own is None and float(study.shares.sum()) == pytest.approx(1) and len(study.target.layers) == 0


def test_a_head_trained_on_a_dump_drafts(dumped, tmp_path):
    """Mutants: boundaries of the usual three in its config; gradients of nothing."""
    assert train.main(training(dumped, tmp_path / "head")) == 0
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["boundaries"] == [2, 3] and record["heldout_top1"][0] > 0.3
    curve = record["loss_and_top1_by_step"]
    assert curve[-1][1] < 0.7 * curve[0][1]
    engine = pair(dumped[0], str(tmp_path / "head"), shape=Shape(3, 1, 4))
    assert engine.parts.capture.boundaries == (2, 3)
    result = engine.generate([5, 9, 30], Sampling(max_new_tokens=60))
    assert result.stats["accept_length"] > 1.3


def test_training_refuses_dumps_it_cannot_use(dumped, toys, tmp_path, capsys):
    """Mutants: another target's states trained on; half a dump; windows past a sequence's end."""

    def refused(argv, *said):
        assert train.main(argv) == 2
        error = capsys.readouterr().err
        assert re.fullmatch(r"error: [^\n]+\n", error) and all(word in error for word in said), error

    refused(training(dumped, tmp_path, "--length", 61), "--dump", "61 tokens of --length", "at least 2")
    refused(training(dumped, tmp_path, "--corpus", "x"), "--corpus", "--dump", "exactly one")
    refused(training(dumped, tmp_path, "--capture-layers", "output:1,2"), "--capture-layers output:1,2")
    refused(training(dumped, tmp_path, "--heldout", "x"), "--heldout x")
    refused(training(dumped, tmp_path, "--dump", tmp_path), "dump.json", "cannot be read")
    refused(training(dumped, tmp_path, "--target", toys.map(layers=5)), "of another target")
    refused(training(dumped, tmp_path, "--target", toys.map(list(reversed(range(V))), layers=4)), "of other weights")
    index = dumped[1] / "dump.json"
    kept = index.read_text()
    half = json.loads(kept)
    half["shards"], half["complete"] = half["shards"][:2], False
    index.write_text(json.dumps(half))
    refused(training(dumped, tmp_path), "2 of", "to its end")
    index.write_text(kept)
    shard = dumped[1] / "shard-00003.safetensors"
    stored = shard.read_bytes()
    shard.write_bytes(stored[:-9])
    refused(training(dumped, tmp_path), "shard-00003.safetensors", "bytes")
    shard.write_bytes(b"\xff" * len(stored))
    refused(training(dumped, tmp_path), "shard-00003.safetensors", "cannot be read")
    shard.write_bytes(stored)


@pytest.mark.parametrize("name", ["gpt-oss", "glm groups", "mixtral windowed, tied", "Kimi-K2.5"])
def test_every_family_can_be_learnt_from(toys, tmp_path, name):
    """Embedding, norm and head alone of targets whose layers differ in kind, whose names have a prefix, that are tied.
    Mutants: a table of layers longer than the layers; the prefix not part of what is skipped; the outer rope."""
    if name == "Kimi-K2.5":
        target = nested(toys, deepseek(toys, layers=4, rope_theta=777.0, **KIMI))
    else:
        target = checkpoint(tmp_path / "target", VARIANTS[name])
    ids = torch.randint(V, (300,), generator=torch.Generator().manual_seed(1))
    ids.numpy().astype("<u2").tofile(tmp_path / "text.bin")
    argv = ["--target", target, "--prompts", tmp_path / "text.bin", "--out", tmp_path / "out", "--length", 40]
    argv += ["--capture-layers", "output:1,2", "--device", "cpu"]
    assert dump.main([str(word) for word in argv]) == 0
    assert train.main(training((target, tmp_path / "out"), tmp_path / "head", "--steps", 2)) == 0
    engine = pair(target, str(tmp_path / "head"))
    assert engine.parts.capture.boundaries == (2, 3) and engine.generate([5, 9], Sampling(max_new_tokens=4))
    theta = json.loads((tmp_path / "head" / "config.json").read_text())["rope_theta"]
    assert theta == (777.0 if name == "Kimi-K2.5" else VARIANTS[name]["rope_theta"])


def test_shards_are_plain_safetensors(dumped):
    """Mutant: files only their owner can read."""
    shard = dumped[1] / "shard-00000.safetensors"
    assert shard.stat().st_mode & 0o044 == 0o044
    with safe_open(shard, "pt") as file:
        assert sorted(file.keys()) == ["best", "features", "hidden", "offsets", "prompts", "starts", "tokens"]
    assert len(Dump(dumped[1]).sequences) == -(-4000 // 60)
