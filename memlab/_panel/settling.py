"""Waits until what a person did before a press has arrived. No widgets."""

import threading
import time
from collections.abc import Callable

SETTLED_SECONDS = 0.5
# where the kernel takes long for a change, the page does too: it has as much to do with it, and
# sends its next change only after that; 5 s was too short on two cores with 24 busy processes
TIMES_HANDLING = 10
LONGEST_SECONDS = 20.0
LEAST_PATIENCE = 2.0  # in seconds; a person who waits longer than that presses again


class Settling:
    """Calls a function with all that a person changed before it.

    While a change of a control is on its way to the kernel, the page holds its next change back.
    The press of a button, or of Enter, is not held back and may overtake it: who types 16 and
    presses Enter would run a batch of 1. JupyterLab may even send the first change of a control to
    another thread of the kernel than the press, which then finds no change at all.
    """

    def __init__(self) -> None:
        self._changed_at = float("-inf")
        self._settled_seconds = SETTLED_SECONDS  # after the last change
        self._lock = threading.Lock()
        self._waiting: threading.Timer | None = None
        self._closed = False

    @property
    def patience_seconds(self) -> float:
        """For how long a press waits for a thread that may hold a change: longer if all is slow."""
        return max(LEAST_PATIENCE, self._settled_seconds)

    def note(self, handling_seconds: float = 0.0) -> None:
        """Take note of a change, and of how long the kernel took for it."""
        self._changed_at = time.monotonic()
        self._settled_seconds = max(
            SETTLED_SECONDS, min(TIMES_HANDLING * handling_seconds, LONGEST_SECONDS)
        )

    def call(self, function: Callable[[], None], *, typed: bool = False) -> None:
        """Call the function: now, or in a thread once nothing has changed for a moment.

        What comes while a call waits is that call pressed again, and is dropped.

        Args:
            function: what was pressed for.
            typed: whether Enter was pressed, just before which something was typed.
        """
        if self._closed:
            return
        now = time.monotonic()
        last = now if typed else self._changed_at  # what was typed may still be on its way
        seconds = last + self._settled_seconds - now
        if seconds <= 0:
            function()
            return

        with self._lock:
            if self._waiting is None and not self._closed:
                self._wait(seconds, function, until=now + LONGEST_SECONDS)

    def close(self) -> None:
        """Drop a call that waits, and all later ones."""
        with self._lock:
            self._closed = True
            if self._waiting is not None:
                self._waiting.cancel()

    def _wait(self, seconds: float, function: Callable[[], None], *, until: float) -> None:
        self._waiting = threading.Timer(seconds, self._look, (function, until))
        self._waiting.daemon = True
        self._waiting.start()

    def _look(self, function: Callable[[], None], until: float) -> None:
        """Call the function, or wait on if something has changed meanwhile."""
        now = time.monotonic()
        seconds = min(self._changed_at + self._settled_seconds, until) - now
        with self._lock:
            if self._closed:
                return
            if seconds > 0:
                self._wait(seconds, function, until=until)
                return
            self._waiting = None
        function()
