"""Command lines of several ranks: started here or by torchrun, printed by rank 0, ended by the first that fails."""

import contextlib
import importlib
import os
import sys
import tempfile

from . import ranks, tp


def command(module, argv, size):
    """Run `python -m module argv` as `size` ranks; rank 0 has this process's stdout and stderr.

    Returns:
        The exit code: 0; 2 where it was refused; 1 where a rank failed, whose own error was then printed first.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            notes = ranks.run(_main, size, folder, module, argv)
        except KeyboardInterrupt:
            print("error: interrupted", file=sys.stderr)
            return 1
    if notes and notes[0].refused:
        print(f"error: {notes[0].line}", file=sys.stderr)
        return 2
    for note in notes:
        print(f"error: {note.told()}", file=sys.stderr)
    return 1 if notes else 0


def _main(module, argv):
    sys.exit(importlib.import_module(module).main(argv))


def guarded(body):
    """body() -> exit code of a rank: rank 0 prints, others are silent, and any failure ends this process at once, so
    that the others learn of it. Why is said by the starting process; under torchrun here."""
    rank, out, err = tp.launched()[0], sys.stdout, sys.stderr
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        code = body()
        tp.leave()
        return code
    except BaseException as error:
        sys.stdout, sys.stderr = out, err
        note = ranks.Note.of(rank, error)
        if tp.failures() is None and not (note.refused and rank):  # all ranks refuse in the same words
            print(f"error: {note.line if note.refused else note.told()}", file=sys.stderr)
        for stream in (out, err):
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
        ranks.end(error)
