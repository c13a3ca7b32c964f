"""Ranks as processes of this host: started together, ended together. Where one fails, all end, and what is said first
is why that one did."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from torch.distributed import TCPStore
from tqdm import tqdm

from weights.config import Refused

from . import tp
from .session import NonFinite

LAST_WORDS = 3.0  # seconds for ranks that are losing each other to say so, and again to end when told to
STRAGGLE = 60.0  # seconds between the first rank's regular end and the last one's
PARENT_DEATH = 1  # PR_SET_PDEATHSIG


class RankFailed(RuntimeError):
    """A rank of `spawn` ended before its time; the message begins with its own error."""


def spawn(function, size, *args):
    """Call function(*args) in `size` new processes, each a rank: there `Engine.load(tp=size)` makes them one engine.

    The function is one that a new process can import. All ranks must make the same calls of the engine.

    Returns:
        What it returned on each rank, a list (values that pickle can carry).

    Raises Refused, in the rank's words, or RankFailed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        notes = run(_call, size, folder, function, args)
        if notes:
            said = "\n".join(note.told() for note in notes)
            raise Refused(notes[0].line) if notes[0].refused else RankFailed(said)
        return [pickle.loads(Path(folder, f"{rank}.result").read_bytes()) for rank in range(size)]


@dataclass(frozen=True)
class Note:
    """Why a rank ended before its time. lost: it only lost another; at: by the clock of this host."""

    rank: int
    line: str
    trace: str = ""
    refused: bool = False
    lost: bool = False
    at: float = 0.0

    @classmethod
    def of(cls, rank, error):
        """Of an exception; where it came from is told unless the line says all there is."""
        refused, lost = isinstance(error, Refused), isinstance(error, tp.Lost)
        plain = refused or lost or isinstance(error, NonFinite | KeyboardInterrupt | BrokenPipeError)
        line = str(error) if refused or isinstance(error, NonFinite) else f"{type(error).__name__}: {error}"
        trace = "" if plain else "".join(traceback.format_exception(error)).rstrip()
        return cls(rank, line, trace, refused, lost, time.time())

    def told(self):
        """For the reader."""
        return "\n".join(filter(None, (f"rank {self.rank}: {self.line}", self.trace)))


def end(error):
    """Note why this rank fails, where the starting process looks, and end at once: other threads of it may wait for
    ranks that wait for this one."""
    rank, folder = tp.launched()[0], tp.failures()
    if folder is not None:
        part = Path(folder, f"{rank}.part")
        part.write_text(json.dumps(asdict(Note.of(rank, error))), encoding="utf-8")
        part.rename(Path(folder, f"{rank}.note"))
    os._exit(2 if isinstance(error, Refused) else 1)


def _rank(entry, rank, size, port, folder, parent, args):
    """What a new process runs: life and death with its parent, stdout and stderr to where nobody is disturbed."""
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    tp.enter(rank, size, port, folder)
    tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which a rank that dies would leave behind
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that came meanwhile comes now
        entry(*args)
    except KeyboardInterrupt:
        os._exit(1)  # who started this process was interrupted too, and says so


@contextlib.contextmanager
def _deferred():
    """Ctrl-C waits, and in processes that start in here until `_rank` has it: their imports would print tracebacks."""
    resource_tracker.ensure_running()  # its start would let signals in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call(function, args):
    try:
        value = function(*args)
        Path(tp.failures(), f"{tp.launched()[0]}.result").write_bytes(pickle.dumps(value))
        tp.leave()
    except BaseException as error:
        end(error)


def run(entry, size, folder, *args):
    """Start `size` processes that call entry(*args), see them all end -> notes of what went wrong, the cause first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, shared = multiprocessing.get_context("spawn"), _shared()
    ranks = [
        context.Process(target=_rank, args=(entry, rank, size, store.port, folder, os.getpid(), args))
        for rank in range(size)
    ]
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _leave) if main else None
    try:
        with _deferred():
            for process in ranks:
                process.start()
        _watch(ranks)
    finally:
        ended = _end(ranks)
        _sweep(_shared() - shared)
        if main:
            signal.signal(signal.SIGTERM, before)
    notes = [_found(rank, process.exitcode, rank in ended, folder) for rank, process in enumerate(ranks)]
    return sorted(filter(None, notes), key=lambda note: (note.lost, note.at))


def _leave(number, frame):
    sys.exit(128 + number)


def _watch(ranks):
    """Wait until all have ended well, or one has not, or some are long past the others' end."""
    since = None
    while True:
        codes = [process.exitcode for process in ranks]
        if None not in codes or any(codes):
            return
        if 0 in codes:
            since = since or time.monotonic()
            if time.monotonic() - since > STRAGGLE:
                return
        time.sleep(0.02)


def _end(ranks):
    """Let those that still run say their last words, then end them -> the numbers of those that had to be."""
    ended = set()
    for name in ("is_alive", "terminate", "kill"):
        alive = [rank for rank, process in enumerate(ranks) if process.pid is not None and process.is_alive()]
        for rank in alive:
            getattr(ranks[rank], name)()
        if name != "is_alive":
            ended |= set(alive)
        until = time.monotonic() + LAST_WORDS
        while time.monotonic() < until and any(ranks[rank].is_alive() for rank in alive):
            time.sleep(0.02)
    return ended


def _found(rank, code, ended, folder):
    """The Note of a rank, None where it ended well or only because others had not."""
    note, printed = Path(folder, f"{rank}.note"), Path(folder, f"{rank}.err")
    if note.exists():
        return Note(**json.loads(note.read_text(encoding="utf-8")))
    if ended:
        return Note(rank, "did not end by itself", lost=True, at=time.time())
    if not code:
        return None
    words = printed.read_text(encoding="utf-8", errors="replace").rstrip() if printed.exists() else ""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return Note(rank, how, "\n".join(words.splitlines()[-20:]))


def _shared():
    """NCCL's files in shared memory."""
    return set(Path("/dev/shm").glob("nccl-*"))


def _sweep(files):
    """Remove those that killed ranks have left: nobody has them open."""
    for file in files:
        if not any(str(file) in text for text in _maps()):
            file.unlink(missing_ok=True)


def _maps():
    """What each process that may be asked has mapped."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace")
