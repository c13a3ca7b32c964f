"""Ctrl-C that is not lost: KeyboardInterrupt comes wherever Python happens to be, and in a destructor, a weak
reference's callback or a library's own it is printed and forgotten."""

import contextlib
import signal
import threading


class Interruptions:
    """What the first SIGINT does while this is entered: it raises KeyboardInterrupt at once or, in the steps of
    `between`, at the next border; if that is forgotten, again at the next border or `look`. The second one ends the
    process, whatever it waits for.

    Only where Python's own handler would have answered: not for a background job, which its shell had ignore SIGINT,
    nor under a handler of somebody's own, nor outside the main thread.
    """

    def __init__(self):
        self.come = self.waits = self.ours = False

    def __enter__(self):
        main = threading.current_thread() is threading.main_thread()
        self.ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.ours:
            signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_):
        if self.ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _take(self, number, frame):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.come = True
        if not self.waits:
            raise KeyboardInterrupt

    def look(self):
        """Raise KeyboardInterrupt where one has come."""
        if self.come:
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
