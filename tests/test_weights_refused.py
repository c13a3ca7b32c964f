"""A checkpoint that is broken, or does not hold what a model declares, is refused by name before memory is filled
(B33). Each test names the mutant that it kills."""

import os

import pytest
import torch
from safetensors.torch import save_file
from test_weights import FIRST, INDEX, SECOND, declare, edit_index, one_line, rewrite, tensors, without, write

from weights import Checkpoint, Refused, Source


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "toy", tensors())


def truncate(folder, by=4):
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - by)


def outside(folder):
    rewrite(folder / FIRST, lambda held: held.pop("experts.0.down.weight"))
    save_file({"experts.0.down.weight": tensors()["experts.0.down.weight"]}, folder.parent / "other.safetensors")
    edit_index(folder, lambda m: m.update({"experts.0.down.weight": "../other.safetensors"}))


BROKEN = {
    "shard deleted": (lambda f: without(f, SECOND), [SECOND, "missing"]),
    "empty folder": (lambda f: without(f, FIRST, SECOND, INDEX, "config.json"), ["config.json"]),
    "no weights": (lambda f: without(f, FIRST, SECOND, INDEX), ["no weights", "model.safetensors"]),
    "no index": (lambda f: without(f, INDEX), [FIRST, INDEX]),
    "tensor not in index": (lambda f: edit_index(f, lambda m: m.pop("v.weight")), [SECOND, "v.weight"]),
    "shard not in index": (
        lambda f: edit_index(f, lambda m: [m.pop(n) for n, s in list(m.items()) if s == FIRST]),
        [FIRST, "not named"],
    ),
    "index names an absent tensor": (
        lambda f: edit_index(f, lambda m: m.update({"ghost.weight": FIRST})),
        [FIRST, "ghost.weight"],
    ),
    "tensor in the other shard": (lambda f: edit_index(f, lambda m: m.update({"v.weight": FIRST})), ["v.weight"]),
    "last bytes missing": (truncate, [SECOND, "bytes"]),
    "half a header": (lambda f: os.truncate(f / SECOND, 40), [SECOND, "not a safetensors file"]),
    "no bytes": (lambda f: os.truncate(f / SECOND, 0), [SECOND]),
    "git-lfs pointer": (lambda f: (f / SECOND).write_text("version https://git-lfs.github.com/spec/v1\n"), [SECOND]),
    "two models": (lambda f: save_file({"q.weight": torch.ones(2)}, f / "model.safetensors"), ["model.safetensors"]),
    "index is no JSON": (lambda f: (f / INDEX).write_text("{"), [INDEX, "JSON"]),
    "index leaves the folder": (outside, [INDEX, "weight_map"]),
    "config is no object": (lambda f: (f / "config.json").write_text("[]"), ["config.json"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints_are_refused(folder, name):
    """Mutants: each of the checks in weights/checkpoint.py taken out."""
    breaking, words = BROKEN[name]
    breaking(folder)
    with pytest.raises(Refused) as error:
        Checkpoint.open(folder)
    one_line(error, *words)


def wrong_shape(held):
    held["norm.weight"] = torch.zeros(9)


def wrong_rank(held):
    held["o.weight"] = torch.zeros(8, 16, 1)


def integers(held):
    held["norm.weight"] = torch.zeros(8, dtype=torch.int64)


def float8(held):
    held["norm.weight"] = torch.zeros(8, dtype=torch.float8_e4m3fn)


def unknown(held):
    held["o.bias"] = torch.zeros(8)


def missing(held):
    del held["norm.weight"]


MISFITS = [
    (wrong_shape, ["norm.weight", "[9]", "[8]"]),
    (wrong_rank, ["o.weight", "[8, 16, 1]", "[8, 16]"]),
    (integers, ["norm.weight", "int64", "floating point"]),
    (float8, ["norm.weight", "float8"]),
    (unknown, ["unexpected", "o.bias"]),
    (missing, ["lacks", "norm.weight"]),
]


@pytest.mark.parametrize("change, words", MISFITS, ids=[m[0].__name__ for m in MISFITS])
def test_misfits_are_refused_before_memory_is_filled(tmp_path, nan_memory, change, words):
    """Mutants: a check taken out; `fill` checking after it has read. Nothing is half-loaded: all stays NaN."""
    held = tensors()
    change(held)
    checkpoint = Checkpoint.open(write(tmp_path / "toy", held))
    with pytest.raises(Refused) as error:
        dry = Source(checkpoint, "meta", torch.float32)
        declare(dry)
        dry.check()
    one_line(error, str(tmp_path / "toy"), *words)
    source = Source(checkpoint, "cpu", torch.float32)
    parameters = declare(source)
    with pytest.raises(Refused):
        source.fill()
    assert parameters[0].isnan().all() and parameters[3].gate_up.isnan().all()


class Code:
    """Unpickled without care, it calls a function of the file's choice, here a harmless one."""

    def __reduce__(self):
        return torch.ones, (2,)


def test_a_broken_pickle_is_refused(tmp_path):
    """Mutants: weights_only=False (runs code from a file); errors of the pickle reader let through."""
    (tmp_path / "config.json").write_text("{}")
    torch.save({"x": Code()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Refused) as error:
        Checkpoint.open(tmp_path)
    one_line(error, "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 half")
    with pytest.raises(Refused):
        Checkpoint.open(tmp_path)
