"""Hidden states of a target on disk, for training heads: shards of whole sequences in safetensors, and an index that
names them. The index is the truth: a shard counts once it is in there, and is written whole before.

A shard holds s sequences of n tokens in all, one behind the other: `tokens` [n] int32; `offsets` [s + 1] int64 where
each begins; `prompts` [s] int32 which prompt it is a piece of, `starts` [s] int32 from which of its tokens on (a piece
was passed through the target on its own); `features` [n, A·D] the boundaries in ascending order; `hidden` [n, D] the
residual stream after the last layer, from which the target's norm and head make its logits; `best` [n] int32 the
target's own next token after each.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import os
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from weights.fields import Refused

INDEX = "dump.json"
FORMAT = "eagle3-hidden-states-1"
HEADER = 4096  # bytes of a shard beside its tensors, at most


@dataclass(frozen=True)
class Sequence:
    """A piece of a prompt: its ids (int32), the prompt's number, the piece's first token's number in it."""

    ids: array
    prompt: int
    start: int


@dataclass(frozen=True)
class Plan:
    """What a dump will hold, decided before it begins: the same prompts and settings give the same shards.

    settings: what its numbers depend on, ready for JSON; width: bytes of features and hidden a token.
    """

    sequences: tuple[Sequence, ...]
    shard_tokens: int
    settings: dict
    width: int

    @functools.cached_property
    def shards(self) -> list[tuple[Sequence, ...]]:
        """Sequences of each shard: as many in turn as keep it within shard_tokens, at least one."""
        out, room = [], 0
        for sequence in self.sequences:
            if not out or len(sequence.ids) > room:
                out.append([])
                room = self.shard_tokens
            out[-1].append(sequence)
            room -= len(sequence.ids)
        return [tuple(shard) for shard in out]

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    def nbytes(self, number: int) -> int:
        """Bytes of a shard, at most."""
        shard = self.shards[number]
        return sum(len(s.ids) for s in shard) * (self.width + 8) + 16 * len(shard) + 8 + HEADER

    def index(self, done: dict[int, dict]) -> dict:
        """The index while the shards of `done` are there."""
        listed = [done[number] for number in sorted(done)]
        return {
            "format": FORMAT,
            "settings": self.settings,
            "sequences": len(self.sequences),
            "tokens": self.tokens,
            "shards_in_all": len(self.shards),
            "complete": len(done) == len(self.shards),
            "shards": listed,
        }


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def durable(path: Path, write) -> None:
    """write(part) a file beside `path`, then put it there: a kill or a power cut leaves the old one or the new one."""
    part = path.with_name(path.name + ".part")
    write(part)
    with open(part, "rb+") as file:
        os.fsync(file.fileno())
    part.chmod(0o644)  # safetensors writes files that only their owner can read
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Writer:
    """Shards of a Plan into a folder; what an earlier run has finished stays.

    Raises Refused where the folder holds anything but an unfinished or whole dump of the same plan.
    """

    def __init__(self, folder: str | Path, plan: Plan):
        self.folder, self.plan = Path(folder), plan
        self.done, self.broken = self._there()

    def _there(self) -> tuple[dict[int, dict], list[str]]:
        """(entries of finished shards by number, names of those that the index lists and the folder has lost)."""
        path, done, broken = self.folder / INDEX, {}, []
        if not path.is_file():
            strangers = [p.name for p in self.folder.iterdir() if p.name not in (".lock", f"{INDEX}.part")]
            if strangers:
                raise Refused(f"{self.folder}: holds {strangers[0]} and no {INDEX}; supported: an empty directory")
            return done, broken
        index = read_index(self.folder)
        for name, value in self.plan.settings.items():
            if index["settings"].get(name) != value:
                was = index["settings"].get(name)
                raise Refused(f"{path}: '{name}' is {was!r}, of this run {value!r}; go on with the same, or elsewhere")
        for entry in index["shards"]:
            file = self.folder / entry["file"]
            if file.is_file() and file.stat().st_size == entry["bytes"]:
                done[int(entry["file"].split("-")[1].split(".")[0])] = entry
            else:
                broken.append(entry["file"])
        return done, broken

    @property
    def missing(self) -> list[int]:
        """Numbers of the shards to be written, in order."""
        return [number for number in range(len(self.plan.shards)) if number not in self.done]

    @property
    def need(self) -> int:
        """Bytes still to be written, at most."""
        return sum(self.plan.nbytes(number) for number in self.missing)

    def begin(self) -> None:
        """Clear what a kill left half written, and write the index of what there is."""
        for part in self.folder.glob("*.part"):
            part.unlink()
        self._index()

    def write(self, number: int, features: torch.Tensor, hidden: torch.Tensor, best: torch.Tensor) -> None:
        """Shard `number` from the features [n, F], hidden [n, D] and best [n] of its tokens, in order."""
        shard, path = self.plan.shards[number], self.folder / shard_name(number)
        ends = list(itertools.accumulate((len(s.ids) for s in shard), initial=0))
        tensors = {
            "tokens": torch.cat([torch.tensor(s.ids, dtype=torch.int32) for s in shard]),
            "offsets": torch.tensor(ends),
            "prompts": torch.tensor([s.prompt for s in shard], dtype=torch.int32),
            "starts": torch.tensor([s.start for s in shard], dtype=torch.int32),
            "features": features.contiguous(),
            "hidden": hidden.contiguous(),
            "best": best.int(),
        }
        durable(path, lambda part: save_file(tensors, part, metadata={"format": "pt"}))
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entry = {"file": path.name, "sequences": len(shard), "tokens": ends[-1]}
        self.done[number] = entry | {"bytes": path.stat().st_size, "sha256": digest}
        self._index()

    def _index(self) -> None:
        text = json.dumps(self.plan.index(self.done), indent=1) + "\n"
        durable(self.folder / INDEX, lambda part: part.write_text(text, encoding="utf-8"))


def read_index(folder: str | Path) -> dict:
    """The index of the dump in a folder. Raises Refused where there is none that can be read."""
    path = Path(folder) / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        known = index["format"] == FORMAT and {"target", "boundaries"} <= index["settings"].keys()
        known = known and {"shards", "shards_in_all", "complete"} <= index.keys()
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise Refused(f"{path}: is no index of a dump of hidden states; supported: what `engine.dump` writes")
    return index


class Dump:
    """A whole dump, read piece by piece. Raises Refused where it is not whole."""

    def __init__(self, folder: str | Path):
        self.folder, self.index = Path(folder), read_index(folder)
        if not self.index["complete"]:
            have, due = len(self.index["shards"]), self.index["shards_in_all"]
            raise Refused(f"{self.folder}: {have} of {due} shards are there; run the same `engine.dump` to its end")
        self.settings, self.files = self.index["settings"], [entry["file"] for entry in self.index["shards"]]
        for entry in self.index["shards"]:
            file = self.folder / entry["file"]
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                what = "is missing" if not file.is_file() else f"has {file.stat().st_size} bytes, not {entry['bytes']}"
                raise Refused(f"{file}: {what}; run the same `engine.dump` again, which makes it anew")
        self._open = functools.lru_cache(maxsize=64)(self._opened)
        self.sequences: list[tuple[int, int, int]] = []  # shard, first row in it, length
        for number in range(len(self.files)):
            offsets = self._open(number).get_tensor("offsets").tolist()
            self.sequences += [(number, a, b - a) for a, b in itertools.pairwise(offsets)]

    def _opened(self, number: int):
        try:
            return safe_open(self.folder / self.files[number], "pt")
        except Exception as error:  # the reader raises a type of its own
            raise Refused(f"{self.folder / self.files[number]}: cannot be read ({error})") from None

    def rows(self, sequence: int, name: str, at: int = 0, count: int | None = None) -> torch.Tensor:
        """Rows at .. at + count (None: to its end) of tensor `name` of a sequence."""
        shard, first, length = self.sequences[sequence]
        count = length - at if count is None else count
        return self._open(shard).get_slice(name)[first + at : first + at + count]


class Choice:
    """Windows of `length` tokens of some sequences of a dump, each window numbered. Every sequence has at least one."""

    def __init__(self, dump: Dump, sequences: list[int], length: int):
        self.sequences = sequences
        self.ends = list(itertools.accumulate(dump.sequences[i][2] - length + 1 for i in sequences))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: int) -> tuple[int, int]:
        """(sequence, first token in it)."""
        at = bisect.bisect_right(self.ends, number)
        return self.sequences[at], number - (self.ends[at - 1] if at else 0)
