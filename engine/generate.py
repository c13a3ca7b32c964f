"""`python -m engine.generate`: text from a target and its draft (engine.decoding). Exit codes: 0; 2 for what is refused
(one line on stderr); 1 for a failure."""

import os
import sys

from .interrupt import Interruptions


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        with Interruptions() as stop:
            with stop.later():  # torch's own import forgets them, and is broken then
                from .decoding import command
            return command(sys.argv[1:] if argv is None else argv, stop)
    except KeyboardInterrupt:
        exec("")  # where it passed a text being executed, `python -m` ends by SIGINT; unless another is executed
        print("error: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read stdout has left: what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
