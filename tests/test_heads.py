"""Random weights, the names of draft heads, and hub ids. Each test names the mutant that it kills."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weights import AnyCheckpoint, Checkpoint, RandomCheckpoint, Refused, Renamed, Source, head_names
from weights.heads import check_table, tolerated


def save(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_random_values_depend_on_seed_and_name_only():
    """Mutants: one generator for all names (order counts); the slice drawn instead of the whole."""
    shapes = {"a.weight": ((64, 32), torch.float32), "b.weight": ((64, 32), torch.float32)}
    one, other = RandomCheckpoint({}, shapes, 5), RandomCheckpoint({}, dict(reversed(shapes.items())), 5)
    b = other.read("b.weight")
    a = other.read("a.weight")
    assert one.read("a.weight").equal(a) and one.read("b.weight").equal(b) and not a.equal(b)
    assert not RandomCheckpoint({}, shapes, 6).read("a.weight").equal(a)
    index = (slice(8, 24), slice(4, 8))
    assert one.read("a.weight", "cpu", index).equal(a[index])
    assert abs(a.std().item() * 32**0.5 - 1) < 0.1


@pytest.mark.parametrize("draft, vocab", [(32, 100), (7, 7), (32000, 151936)])
def test_random_id_tables_are_valid(draft, vocab):
    """Mutants: ids in place of offsets; a table outside the vocabulary; a mask that is not the table's."""
    checkpoint = AnyCheckpoint({"draft_vocab_size": draft, "vocab_size": vocab}, present={"d2t"})
    source = Source(Renamed(checkpoint, head_names(checkpoint)), "cpu", torch.float32)
    assert source.optional("d2t") and not source.optional("embed_tokens.weight")
    d2t, t2d = source.take("d2t", (draft,), dtype=torch.int64), source.take("t2d", (vocab,), dtype=torch.bool)
    source.fill()
    ids = d2t + torch.arange(draft)
    assert ids.unique().numel() == draft and t2d.nonzero().flatten().equal(ids)
    check_table(checkpoint, vocab)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
def test_heads_are_read_by_canonical_names(tmp_path, prefix, layer):
    """Mutants: either renaming left out; a view that reads another tensor than it names."""
    stored = {f"{prefix}{layer}.hidden_norm.weight": torch.rand(4), f"{prefix}fc.weight": torch.rand(4, 12)}
    stored["lm_head.weight"] = torch.rand(6, 4)
    checkpoint = Checkpoint.open(save(tmp_path, stored))
    view = Renamed(checkpoint, head_names(checkpoint))
    assert view.names() == ["fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight"]
    source = Source(view, "cpu", torch.float32, tolerates=tolerated)
    fc, head = source.take("fc.weight", (4, 12)), source.take("lm_head.weight", (6, 4))
    with pytest.raises(Refused) as error:
        source.fill()
    assert f"unexpected tensor {prefix}{layer}.hidden_norm.weight" in str(error.value)
    source.take("layers.0.hidden_norm.weight", (4,))
    source.fill()
    assert fc.equal(stored[f"{prefix}fc.weight"]) and head.equal(stored["lm_head.weight"])


def test_leftovers_are_tolerated_and_arithmetic_is_not():
    """B06. Mutant: a norm or bias of a switch that nobody set served as if it were not there."""
    assert tolerated("_extra_state") and tolerated("step")
    for name in ("input_norm.weight", "fc.bias", "fc_norm.0.weight", "layers.1.mlp.up_proj.weight", "mask_hidden"):
        assert not tolerated(name)


def test_two_names_of_one_tensor_are_refused(tmp_path):
    """Mutant: the later name wins."""
    stored = {"midlayer.x": torch.rand(4), "layers.0.x": torch.rand(4)}
    checkpoint = Checkpoint.open(save(tmp_path, stored))
    with pytest.raises(Refused, match="layers.0.x and midlayer.x"):
        head_names(checkpoint)


@pytest.mark.parametrize("offset, refused", [(96, False), (97, True), (-4, True)])
def test_a_table_outside_the_target_vocabulary_is_refused(tmp_path, offset, refused):
    """B04 (d). Mutants: the entry itself compared in place of draft id + offset; only the upper end checked."""
    stored = {"d2t": torch.tensor([0, 0, 5, offset]), "x": torch.rand(1)}
    checkpoint = Checkpoint.open(save(tmp_path, stored))
    if not refused:
        return check_table(checkpoint, 100)
    with pytest.raises(Refused, match=f"d2t: entry 3 is {offset},.* 0 to 99"):
        check_table(checkpoint, 100)


def resolve(home, *names):
    """What each name resolves to in a process whose hub cache is `home`, without a network."""
    script = (
        "import sys\nfrom weights import Checkpoint, Refused, resolve\nfor name in sys.argv[1:]:\n"
        "    try:\n        print(Checkpoint.open(resolve(name)).names())\n"
        "    except Refused as e:\n        print('refused', e)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", script, *names]
    run = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_hub_ids_come_from_the_cache_when_offline(tmp_path):
    """Mutants: a hub id taken for a directory; a traceback of the hub library in place of one line."""
    repository = tmp_path / "hub" / "models--some--head"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (tmp_path / "a-file").touch()
    (repository / "refs" / "main").write_text("0" * 40)
    save(snapshot, {"a": torch.ones(1), "b": torch.ones(1)})
    found = resolve(tmp_path, "some/head", str(snapshot), "some/other", "/no/such/place", "a-file")
    assert found[:2] == ["['a', 'b']"] * 2 and len(found) == 5
    assert re.fullmatch(r"refused some/other: .*hub.*", found[2])
    assert found[3:] == [f"refused {name}: no such directory" for name in ("/no/such/place", "a-file")]
