"""Checkpoints: names, shapes and bytes of stored tensors, read by slices. Opening one reads headers only and proves
that every file is whole; `RandomCheckpoint` has the same interface and no files."""

from __future__ import annotations

import json
import math
import re
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import safe_open

from weights.fields import Refused, read_json, shown
from weights.rules import Rule, rules
from weights.upload import Lanes

Index = tuple[slice, ...]
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """One .safetensors file: `entries` name -> (shape, dtype) from its header. Refused when shorter than the header
    says."""

    def __init__(self, path: Path):
        self.path = path
        self.entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        size, header, start = self._header()
        end = 0
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise Refused(f"{path}: tensor '{name}' has dtype {entry['dtype']}, known are {', '.join(DTYPES)}")
            shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
            begin, stop = entry["data_offsets"]
            if stop - begin != math.prod(shape) * dtype.itemsize:
                raise Refused(
                    f"{path}: tensor '{name}' of shape {list(shape)} {entry['dtype']} has {stop - begin} bytes"
                )
            self.entries[name] = shape, dtype
            end = max(end, stop)
        if size != start + end:
            raise Refused(f"{path}: has {size} bytes where its header says {start + end} (interrupted download?)")

    def _header(self) -> tuple[int, dict, int]:
        """(file size, header without metadata, offset of the first tensor)."""
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                text = file.read(length) if length <= size - 8 else b""
            header = json.loads(text)
            header.pop("__metadata__", None)
        except (OSError, ValueError, AttributeError):
            raise Refused(f"{self.path}: not a safetensors file (interrupted download or git-lfs pointer?)") from None
        return size, header, 8 + length

    @cached_property
    def _file(self):
        return safe_open(self.path, framework="pt")

    def view(self, name: str, index: Index | None) -> torch.Tensor:
        """A view of the mapped file: only the bytes that are then used get read. Not to be written to."""
        shape = self.entries[name][0]
        if not shape:
            return self._file.get_tensor(name)
        index = index or (slice(None),) * len(shape)
        # steps are taken in memory: the file's reader would look up every element by itself
        whole = self._file.get_slice(name)[tuple(slice(s.start, s.stop) for s in index)]
        return whole[tuple(slice(None, None, s.step) for s in index)]


class PickledFile:
    """One pytorch_model.bin of an old head, opened with weights_only and mapped; the same interface as
    SafetensorsFile."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            self.entries = {name: (tuple(t.shape), t.dtype) for name, t in self._tensors.items()}
        except Exception as error:  # the pickle reader raises a different type for each way of being broken
            reason = shown(str(error).split("\n")[0])
            raise Refused(f"{path}: not a readable file of tensors (interrupted download?): {reason}") from None

    def view(self, name: str, index: Index | None) -> torch.Tensor:
        return self._tensors[name] if index is None else self._tensors[name][index]


class Checkpoint:
    """A directory of weights. `where` for messages, `config` and `generation`: config.json and generation_config.json,
    raw. `threads`: how many read it fastest to a GPU."""

    threads = 8

    def __init__(self, where: str, config: dict, generation: dict, files: dict[str, SafetensorsFile | PickledFile]):
        self.where = where
        self.config = config
        self.generation = generation
        self._files = files
        self._lanes = Lanes()

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Reads the headers of the directory. Refused: a missing or short file, an index and shards that disagree."""
        folder = Path(path)
        if not folder.is_dir():
            raise Refused(f"{folder}: no such directory")
        if not (folder / "config.json").is_file():
            raise Refused(f"{folder}: has no config.json")
        generation = folder / "generation_config.json"
        return cls(
            str(folder),
            read_json(folder / "config.json"),
            read_json(generation) if generation.is_file() else {},
            _files(folder),
        )

    def names(self) -> list[str]:
        return sorted(self._files)

    def has(self, name: str) -> bool:
        return name in self._files

    def stored(self, name: str) -> str:
        """The name in the file, for messages: a `Renamed` view gives another one."""
        return name

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Called for each name that a model declares. A directory has what it has; `AnyCheckpoint` learns from this."""

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._files[name].entries[name][1]

    def nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str, device: torch.device | str = "cpu", index: Index | None = None) -> torch.Tensor:
        """A tensor as stored, or the part of it that `index` cuts; only those bytes are read. On the CPU it may be a
        view of the file: not to be written to."""
        return self._files[name].view(name, index).to(device)

    def read_into(self, place: torch.Tensor, name: str, index: Index | None = None) -> None:
        """Copies a tensor, or a part of it, to `place` and converts the dtype; any thread may."""
        stored = self._files[name].view(name, index)
        if place.is_cuda:
            self._lanes.put(place, stored)
        else:
            place.copy_(stored)


def _files(folder: Path) -> dict[str, SafetensorsFile | PickledFile]:
    """name -> the file that holds it."""
    single, index, pickled = folder / "model.safetensors", folder / INDEX, folder / "pytorch_model.bin"
    shards = sorted(p.name for p in folder.iterdir() if SHARD.fullmatch(p.name))
    if index.is_file():
        return _sharded(folder, index, shards)
    if shards:
        raise Refused(f"{folder}: has {shards[0]} and no {INDEX}")
    if single.is_file():
        file = SafetensorsFile(single)
    elif pickled.is_file():
        file = PickledFile(pickled)
    else:
        raise Refused(f"{folder}: no weights (looked for {single.name}, {INDEX}, {pickled.name})")
    return dict.fromkeys(file.entries, file)


def _sharded(folder: Path, index: Path, present: list[str]) -> dict[str, SafetensorsFile]:
    """name -> shard, when the index and the shards agree in both directions."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(v, str) and "/" not in v for v in table.values()):
        raise Refused(
            f"{index}: key 'weight_map' is {shown(table)}, expected tensor names with file names beside the index"
        )
    used = sorted(set(table.values()))
    missing = [name for name in used if not (folder / name).is_file()]
    if missing:
        raise Refused(f"{folder}: {listed('shard', missing)} of {len(used)} named in {index.name} missing")
    stale = sorted({*present, *(["model.safetensors"] if (folder / "model.safetensors").is_file() else [])} - set(used))
    if stale:
        raise Refused(f"{folder}: {listed('file', stale)} not named in {index.name} (one of them is stale)")
    files = {name: SafetensorsFile(folder / name) for name in used}
    for shard, file in files.items():
        named = {name for name, value in table.items() if value == shard}
        if absent := sorted(named - file.entries.keys()):
            raise Refused(f"{folder / shard}: lacks {listed('tensor', absent)} that {index.name} names")
        if extra := sorted(file.entries.keys() - named):
            raise Refused(f"{folder / shard}: has {listed('tensor', extra)} that {index.name} does not name for it")
    return {name: files[shard] for name, shard in table.items()}


def listed(noun: str, names: list[str], limit: int = 8) -> str:
    """'tensor a', 'tensors a, b' or the first few and the number of the others."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {', '.join(names[:limit])}{rest}"


class RandomCheckpoint:
    """Random values under given names, no files. A value depends on (seed, name) and on the kind of device only, and a
    slice is the slice of the whole; a CPU and a CUDA device give different numbers. `tensors`: name -> (shape,
    dtype)."""

    threads = 1  # numbers are drawn where they stay

    def __init__(self, config: dict, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], seed: int = 0):
        self.where = "random weights"
        self.config = config
        self.generation: dict = {}
        self.seed = seed
        self._tensors = dict(tensors)
        self._rules: list[tuple[re.Pattern, Rule]] = rules(config)

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def stored(self, name: str) -> str:
        return name

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        pass

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name][1]

    def nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str, device: torch.device | str = "cpu", index: Index | None = None) -> torch.Tensor:
        """The whole tensor is made on `device`, then cut."""
        shape, dtype = self._tensors[name]
        seed = int.from_bytes(blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest(), "little")
        generator = torch.Generator(device).manual_seed(seed)
        rule = next(rule for pattern, rule in self._rules if pattern.search(name))
        whole = rule(shape, dtype, generator)
        return whole if index is None else whole[index]

    def read_into(self, place: torch.Tensor, name: str, index: Index | None = None) -> None:
        place.copy_(self.read(name, place.device, index))


class AnyCheckpoint(RandomCheckpoint):
    """A RandomCheckpoint that has every name a model declares, in the shape and dtype declared; `present` are the
    optional names (those a model asks for with `Source.optional` before it takes them) that it also claims to have."""

    def __init__(self, config: dict, seed: int = 0, present: frozenset[str] | set[str] = frozenset()):
        super().__init__(config, {}, seed)
        self.present = frozenset(present)

    def has(self, name: str) -> bool:
        return name in self.present or super().has(name)

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._tensors[name] = tuple(shape), dtype
