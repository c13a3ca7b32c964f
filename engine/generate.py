"""`python -m engine.generate`: text from a target and its draft (engine.decoding). Exit codes: 0; 2 for what is refused
(one line on stderr); 1 for a failure."""

import sys

from . import interrupt


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def body(stop):
        with stop.later():  # torch's own import forgets them, and is broken then
            from .decoding import command
        return command(sys.argv[1:] if argv is None else argv, stop)

    return interrupt.command(body)


if __name__ == "__main__":
    sys.exit(main())
