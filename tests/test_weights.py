"""Checkpoints and sources: a checkpoint is loaded whole and right, and the shares of all ranks are the whole. Each test
names the mutant that it kills; what is refused is in test_weights_refused.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weights import AnyCheckpoint, Checkpoint, Cut, Refused, Source
from weights.formats import Dense, ExpertNames
from weights.heads import tolerated

ROOT = Path(__file__).parents[1]
CONFIG = {"model_type": "toy"}
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def tensors(seed=0):
    """Eight experts of 16 by 8, attention of 4 heads and 2 KV heads of 4, an odd norm."""
    torch.manual_seed(seed)
    shapes = {"q.weight": (16, 8), "k.weight": (8, 8), "v.weight": (8, 8), "o.weight": (8, 16), "norm.weight": (8,)}
    for e in range(8):
        shapes |= {f"experts.{e}.{n}.weight": (16, 8) for n in ("gate", "up")} | {f"experts.{e}.down.weight": (8, 16)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write(folder, stored, config=CONFIG):
    """Two shards and their index."""
    folder.mkdir(exist_ok=True)
    names = sorted(stored)
    table = {name: FIRST if i < len(names) // 2 else SECOND for i, name in enumerate(names)}
    for shard in (FIRST, SECOND):
        save_file({n: stored[n].contiguous() for n in names if table[n] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "toy", tensors())


def declare(source):
    """What a model's constructor does: (qkv, o, norm, experts)."""
    qkv = [("q.weight", (16, 8), Cut(0, 4)), ("k.weight", (8, 8), Cut(0, 2)), ("v.weight", (8, 8), Cut(0, 2))]
    names = [ExpertNames(*(f"experts.{e}.{n}" for n in ("gate", "up", "down"))) for e in range(8)]
    return (
        source.concat(qkv),
        source.take("o.weight", (8, 16), cut=1),
        source.take("norm.weight", (8,)),
        Dense().declare(source, names.__getitem__, 8, hidden=8, intermediate=16),
    )


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text and all(w in text for w in words), text


def rewrite(path, change):
    """Change a shard's tensors and leave the index as it was."""
    from safetensors.torch import load_file

    held = load_file(path)
    change(held)
    save_file(held, path)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def without(folder, *names):
    for name in names:
        (folder / name).unlink()


# ------------------------------------------------------------------ reading
@pytest.mark.parametrize("layout", ["sharded", "single", "pickled"])
def test_slices_are_the_slices_of_the_whole(tmp_path, layout):
    """Mutant: `read` drops its index; a layout that maps a name to another file."""
    held, folder = tensors(), tmp_path / "toy"
    write(folder, held)
    if layout != "sharded":
        without(folder, FIRST, SECOND, INDEX)
    if layout == "single":
        save_file(held, folder / "model.safetensors")
    if layout == "pickled":
        torch.save(held, folder / "pytorch_model.bin")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.names() == sorted(held) and checkpoint.config == CONFIG
    for name, whole in held.items():
        assert checkpoint.shape(name) == whole.shape and checkpoint.dtype(name) == whole.dtype
        assert checkpoint.nbytes(name) == whole.nbytes
        assert checkpoint.read(name).equal(whole)
        index = (slice(1, 5),) if whole.ndim == 1 else (slice(2, 7), slice(3, 8))
        assert checkpoint.read(name, "cpu", index).equal(whole[index])


def test_opening_reads_headers_only(tmp_path):
    """Mutant: opening, or reading a slice, reads the tensor: 2 GiB of a file that has no blocks on the disk."""
    rows, path = 2**20, tmp_path / "model.safetensors"
    entry = {"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [0, rows * 2048]}
    header = json.dumps({"big": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + rows * 2048)
    (tmp_path / "config.json").write_text("{}")
    script = (
        "import resource, sys; from weights import Checkpoint;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "c = Checkpoint.open(sys.argv[1]); t = c.read('big', 'cpu', (slice(7, 9), slice(0, 4))).clone();"
        "print(tuple(t.shape), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, tmp_path]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "(2, 4) True\n"


@pytest.mark.parametrize("size", [1, 2])
def test_shares_of_all_ranks_are_the_whole(folder, nan_memory, size):
    """Mutants: q‖k‖v cut after joining; ranks that all take the first share; up before gate; a part left unfilled."""
    held, checkpoint = tensors(), Checkpoint.open(folder)
    ranks = []
    for rank in range(size):
        dry = Source(checkpoint, "meta", torch.float32, rank, size)
        declare(dry)
        source = Source(checkpoint, "cpu", torch.float32, rank, size)
        ranks.append(declare(source))
        steps = []
        report = source.fill(lambda done, total, steps=steps: steps.append((done, total)))
        assert source.nbytes == dry.nbytes == steps[-1][0] == steps[-1][1]
        assert report.loaded == len(held) and not report.unexpected + report.missing + report.skipped
    heads = [qkv.split([16 // size, 8 // size, 8 // size]) for qkv, *_ in ranks]
    for i, name in enumerate(("q.weight", "k.weight", "v.weight")):
        assert torch.cat([h[i] for h in heads]).equal(held[name])
    assert torch.cat([o for _, o, *_ in ranks], 1).equal(held["o.weight"])
    assert all(norm.equal(held["norm.weight"]) for *_, norm, _ in ranks)
    for e in range(8):
        gate, up = zip(*(experts.gate_up[e].chunk(2) for *_, experts in ranks), strict=True)
        assert torch.cat(gate).equal(held[f"experts.{e}.gate.weight"])
        assert torch.cat(up).equal(held[f"experts.{e}.up.weight"])
        assert torch.cat([experts.down[e] for *_, experts in ranks], 1).equal(held[f"experts.{e}.down.weight"])


@pytest.mark.parametrize("dim", [0, 1])
def test_four_shares_of_a_matrix(folder, dim):
    """Mutant: the wrong dimension is cut (square matrices hide it from the shape)."""
    checkpoint, shares = Checkpoint.open(folder), []
    for rank in range(4):
        source = Source(checkpoint, "cpu", torch.bfloat16, rank, 4)
        source.ignore("[!k]*")
        shares.append(source.take("k.weight", (8, 8), cut=dim))
        source.fill()
    assert torch.cat(shares, dim).equal(tensors()["k.weight"].bfloat16())


@pytest.mark.parametrize("cut, size, works", [(0, 3, "1, 2, 4, 8"), (Cut(0, 2), 4, "1, 2"), (Cut(0, 6), 2, "")])
def test_an_uneven_cut_is_refused(folder, cut, size, works):
    """Mutants: sizes rounded down; a share that holds half a head (2 heads of 4 rows at size 4)."""
    source = Source(Checkpoint.open(folder), "meta", torch.float32, 0, size)
    with pytest.raises(Refused) as error:
        source.prefixed("k.").take("weight", (8, 8), cut=cut)
    one_line(error, "k.weight", f"size {size}", f"sizes that work: {works}")


def test_a_dry_pass_takes_no_memory_and_is_not_filled(folder):
    source = Source(Checkpoint.open(folder), "meta", torch.bfloat16)
    declare(source)
    assert source.nbytes == sum(t.numel() for t in tensors().values()) * 2
    assert source.check().loaded == len(tensors())
    with pytest.raises(ValueError, match="dry pass"):
        source.fill()


def test_the_report_names_what_was_not_taken_from_the_file(tmp_path):
    """Mutants: prefixes that do not reach patterns; a borrowed name reported as missing although it is stored."""
    stored = {name: torch.ones(2) for name in ("a.x", "a.b.y", "a.b.inv_freq", "head", "embed", "leftover")}
    checkpoint = Checkpoint.open(write(tmp_path / "toy", stored))
    source = Source(checkpoint, "cpu", torch.float32, tolerates=tolerated)
    inner = source.prefixed("a.")
    inner.take("x", (2,))
    inner.prefixed("b.").take("y", (2,))
    inner.prefixed("b.").ignore("inv*")
    source.alias("head")
    source.borrowed("embed", "the target's")
    source.borrowed("d2t", "identity")
    assert inner.optional("x") and not source.optional("x")
    report = source.fill()
    assert report.skipped == ["a.b.inv_freq", "embed", "head"] and report.unexpected == ["leftover"]
    assert report.borrowed == [("d2t", "identity"), ("embed", "the target's")] and report.missing == ["d2t"]
    assert any("borrowed embed" in line for line in report.lines()) and report.loaded == 2


def test_any_checkpoint_has_what_a_model_declares():
    """Mutants: shares drawn per rank; norms like matrices. The two ranks' shares are those of the whole."""
    checkpoint = AnyCheckpoint({}, seed=1)
    ranks = []
    for rank in range(2):
        dry = Source(checkpoint, "meta", torch.bfloat16, rank, 2)
        declare(dry)
        dry.check()
        source = Source(checkpoint, "cpu", torch.bfloat16, rank, 2)
        ranks.append(declare(source))
        assert source.fill().loaded == len(tensors())
    assert torch.cat([o for _, o, *_ in ranks], 1).equal(checkpoint.read("o.weight"))
    assert (checkpoint.read("norm.weight").float() - 1).abs().max() < 0.2
