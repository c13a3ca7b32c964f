"""Ctrl-C that is not lost: KeyboardInterrupt comes wherever Python happens to be, and in a destructor, a weak
reference's callback or a library's own it is printed and forgotten."""

import contextlib
import importlib
import os
import signal
import sys
import threading

SOON = 0.02  # seconds until what was forgotten comes again


def command(body, said="interrupted"):
    """The exit code of a command line: body(Interruptions) gives it; 1 where it is interrupted, which is `said` on
    stderr, or where whoever read stdout has left."""
    try:
        with Interruptions() as stop:
            return body(stop)
    except KeyboardInterrupt:
        exec("")  # where it passed a text being executed, `python -m` ends by SIGINT; unless another is executed
        print(f"error: {said}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def start(name):
    """The exit code of main() of the module `name`, for `python -m name`, which calls this before it imports anything
    that takes long: torch's import forgets a Ctrl-C, and is broken then; one that comes meanwhile ends the command as
    soon as all is imported."""

    def body(stop):
        with stop.later():
            module = importlib.import_module(name)
        return module.main()

    return command(body)


class Interruptions:
    """What the first SIGINT does while this is entered: it raises KeyboardInterrupt at once or, in the steps of
    `between`, at the next border; if that is forgotten, again a moment later where Python tells, else at the next
    border or `look`. The second one ends the process, whatever it waits for.

    Only where Python's own handler would have answered: not for a background job, which its shell had ignore SIGINT,
    nor under a handler of somebody's own, nor outside the main thread.
    """

    def __init__(self):
        self.come = self.waits = self.ours = False
        self.hook = self.again = None

    def __enter__(self):
        main = threading.current_thread() is threading.main_thread()
        self.ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.ours:
            signal.signal(signal.SIGINT, self._take)
            self.hook, sys.unraisablehook = sys.unraisablehook, self._forgotten
        return self

    def __exit__(self, *_):
        if self.ours:
            self._once()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self.hook

    def _take(self, number, frame):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.come = True
        if not self.waits:
            raise KeyboardInterrupt

    def _forgotten(self, lost):
        if lost.exc_type is not KeyboardInterrupt or not self.come:
            return self.hook(lost)
        signal.signal(signal.SIGINT, self._take)
        to = threading.main_thread().ident, signal.SIGINT
        self.again = threading.Timer(SOON, signal.pthread_kill, to)
        self.again.daemon = True
        self.again.start()

    def _once(self):
        if self.again is not None:
            self.again.cancel()

    def look(self):
        """Raise KeyboardInterrupt where one has come."""
        if self.come:
            self._once()
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def later(self):
        """Interrupted behind the block, not inside."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False
        self.look()

    def between(self, steps):
        """Yield what the generator `steps` does, interrupted only at the borders from its first item on: that may take
        long. `steps` is closed whatever happens."""
        with contextlib.closing(steps):
            self.look()
            try:
                for step in steps:
                    self.waits = True
                    yield step
                    self.look()
            finally:
                self.waits = False
            self.look()
