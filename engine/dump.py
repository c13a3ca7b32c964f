"""`python -m engine.dump`: what a target says of every token of a file of prompts, on disk, to train heads on. A killed
run goes on where it was when the same command is given again. Exit codes: 0; 2 refused; 1 failed."""

import argparse
import contextlib
import fcntl
import hashlib
import shutil
import sys
from array import array
from pathlib import Path

from . import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from weights.capture import boundaries, usual
from weights.config import Refused
from weights.dump import Plan, Sequence, Writer

from . import prompts
from .device import DTYPES, device_of, dtype_of
from .engine import Engine
from .forced import Teacher
from .lessons import fingerprint
from .loading import SHORT, Options
from .opening import open_target
from .options import Parser, least
from .ranks import RankFailed, spawn
from .streams import read_stream
from .text import Text
from .tp import launched


def parser() -> Parser:
    """Every option."""
    p = Parser("python -m engine.dump", __doc__)
    add = p.add_argument
    add("--target", required=True, metavar="DIR|HUB_ID", help="the target")
    add("--prompts", required=True, metavar="FILE", help="*.jsonl, ids in *.bin[.xz], or one text")
    add("--out", required=True, metavar="DIR", help="where the dump goes, or goes on")
    add(
        "--capture-layers",
        metavar="boundary:A,B,C|output:A,B,C",
        help="layers that are dumped; default: an early, a middle and a late one",
    )
    add("--length", type=least(2), metavar="N", help="most tokens of a sequence; default 2048, or the target's context")
    add("--shard-tokens", type=least(1), default=16384, metavar="N", help="tokens of a shard; default %(default)s")
    add("--tp", type=least(1), default=1, metavar="N", help="ranks, a GPU each; default %(default)s")
    add("--device", metavar="cpu|cuda|cuda:N", help="default: CUDA where there is a GPU")
    add("--dtype", choices=tuple(DTYPES), help="of target and dump; default: bfloat16 on CUDA, float32 on the CPU")
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    o, unknown = parser().parse_known_args(argv)
    if unknown:
        raise Refused(f"{unknown[0]}: there is no such option; --help lists all")
    if launched() is not None:
        raise Refused("torchrun: this command starts its ranks itself; supported: --tp N")
    if Path(o.out).is_file():
        raise Refused(f"--out {o.out}: it is a file; supported: a directory")
    return o


def sequences(path: str, folder, vocabulary: int, length: int) -> tuple[Sequence, ...]:
    """The prompts of a file in pieces of at most `length` tokens. Raises Refused."""
    if path.removesuffix(".xz").endswith(".bin"):
        texts = [array("i", read_stream(path, folder, vocabulary).numpy().tobytes())]
        if not texts[0]:
            raise Refused(f"--prompts {path}: it is empty; supported: at least one token")
    else:
        text = Text.find(folder)
        texts = [array("i", prompts.encoded(one, text, vocabulary)) for one in prompts.read(path, "--prompts")]
    return tuple(
        Sequence(ids[at : at + length], number, at)
        for number, ids in enumerate(texts)
        for at in range(0, len(ids), length)
    )


def digest(pieces: tuple[Sequence, ...]) -> str:
    """Of all ids and where they belong."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(array("q", [piece.prompt, piece.start, len(piece.ids)]).tobytes() + piece.ids.tobytes())
    return found.hexdigest()


def planned(o) -> tuple[Plan, str]:
    """What will be dumped, and the boundaries in the words of --capture-layers. No weight is read. Raises Refused."""
    opened = open_target(Options(target=o.target))
    config, most = opened.config, opened.config.max_positions
    length = min(2048, most) if o.length is None else o.length
    if length > most:
        raise Refused(f"--length {length}: supported: up to the target's {most} positions")
    override = o.capture_layers or "boundary:" + ",".join(map(str, usual(config.layers)))
    layers = boundaries(None, config.layers, override).boundaries
    device = device_of(o.device, o.tp)
    dtype = dtype_of(o.dtype, device)
    pieces = sequences(o.prompts, opened.folder, config.vocab, length)
    settings = {
        "target": fingerprint(opened),
        "boundaries": list(layers),
        "hidden": config.hidden,
        "vocab": config.vocab,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "tp": o.tp,
        "length": length,
        "shard_tokens": o.shard_tokens,
        "prompts": digest(pieces),
    }
    width = (len(layers) + 1) * config.hidden * dtype.itemsize
    return Plan(pieces, o.shard_tokens, settings, width), override


@contextlib.contextmanager
def alone(folder: Path):
    """Refused while another run writes there. A kill lets go of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(f"--out {folder}: another run is writing there; wait for it, or give another") from None
        yield


def room(writer: Writer) -> None:
    """Refused where the disk has too little of it; else said."""
    plan, free, missing = writer.plan, shutil.disk_usage(writer.folder).free, len(writer.missing)
    if writer.need > free:
        raise Refused(
            f"--out {writer.folder}: needs {writer.need / 1e9:.3f} GB more, the disk has {free / 1e9:.3f} GB free; "
            "make room, or dump fewer prompts"
        )
    for name in writer.broken:
        say(f"{name} is listed and not whole there: made again")
    say(
        f"{len(plan.sequences)} sequences, {plan.tokens} tokens; {missing} of {len(plan.shards)} shards to write: "
        f"{writer.need / 1e9:.3f} GB, {free / 1e9:.3f} GB free"
    )


def run(o) -> None:
    """Plan, check, load, write."""
    plan, override = planned(o)
    with alone(Path(o.out)):
        writer = Writer(o.out, plan)
        room(writer)
        writer.begin()
        if not writer.missing:
            say("nothing is missing")
        elif o.tp == 1:
            work(o, plan, override, writer.missing)
        else:
            spawn(work, o.tp, o, plan, override, writer.missing)


def work(o, plan: Plan, override: str, missing: list[int]) -> None:
    """Load the target and make the shards `missing`: on every rank, and rank 0 writes them."""
    length = plan.settings["length"]
    words = {name: getattr(o, name) for name in ("device", "dtype", "tp")}
    engine = Engine.load(o.target, max_batch=1, capture_layers=override, max_context=length, announce=say, **words)
    parts = engine.parts
    if parts.device.type == "cpu":
        torch.set_num_threads(1)
    writer = Writer(o.out, plan) if parts.tp.rank == 0 else None
    teacher = Teacher(parts.target, 1, length, parts.device, parts.dtype)
    left = sum(len(s.ids) for number in missing for s in plan.shards[number])
    with tqdm(total=plan.tokens, initial=plan.tokens - left, unit=" tokens", disable=None) as bar:
        for number in missing:
            found = passed(teacher, plan.shards[number], min(SHORT, parts.prefill_chunk), bar)
            if writer is not None:
                writer.write(number, *found)


def passed(teacher: Teacher, shard: tuple[Sequence, ...], chunk: int, bar) -> list[torch.Tensor]:
    """features, hidden and best of a shard's tokens, in the host's memory."""
    found = []
    for sequence in shard:
        whole = teacher.read(list(sequence.ids), chunk)
        found.append([part.cpu() for part in (whole.features, whole.hidden, whole.best)])
        bar.update(len(sequence.ids))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def say(line: str) -> None:
    """A line for the person at the terminal."""
    print(line, file=sys.stderr, flush=True)


def command(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        run(parse(argv))
    except Refused as error:
        say(f"error: {error}")
        return 2
    except (OSError, RankFailed) as error:
        say(f"error: {error}")
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code, 1 where it was interrupted."""
    own = sys.argv[1:] if argv is None else argv
    return interrupt.command(lambda _: command(own), "interrupted; the same command goes on")
