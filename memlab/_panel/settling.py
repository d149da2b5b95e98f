"""Waits until what a person did before a press has arrived. No widgets."""

import threading
import time
from collections.abc import Callable

SETTLED_SECONDS = 0.5
# where the kernel takes long for a change, the page does too: it has as much to do with it, and
# sends its next change only after that; 0.5 s was too short on two cores with 14 busy processes
TIMES_HANDLING = 10
LONGEST_SECONDS = 5.0


class Settling:
    """Calls a function with all that a person changed before it.

    While a change of a control is on its way to the kernel, the page holds its next change back.
    The press of a button, or of Enter, is not held back and may overtake it: who types 16 and
    presses Enter would run a batch of 1.
    """

    def __init__(self) -> None:
        self._changed_at = float("-inf")
        self._settled_seconds = SETTLED_SECONDS  # after the last change
        self._lock = threading.Lock()
        self._waiting: threading.Timer | None = None
        self._closed = False

    def note(self, handling_seconds: float = 0.0) -> None:
        """Take note of a change, and of how long the kernel took for it."""
        self._changed_at = time.monotonic()
        self._settled_seconds = max(
            SETTLED_SECONDS, min(TIMES_HANDLING * handling_seconds, LONGEST_SECONDS)
        )

    def call(self, function: Callable[[], None]) -> None:
        """Call the function: now, or in a thread a moment after the last change.

        What comes while a call waits is that call pressed again, and is dropped.
        """
        seconds = self._changed_at + self._settled_seconds - time.monotonic()
        if seconds <= 0:
            function()
            return

        with self._lock:
            if self._waiting is None and not self._closed:
                self._waiting = threading.Timer(seconds, self._call_now, (function,))
                self._waiting.daemon = True
                self._waiting.start()

    def close(self) -> None:
        """Drop a call that waits, and all later ones."""
        with self._lock:
            self._closed = True
            if self._waiting is not None:
                self._waiting.cancel()

    def _call_now(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._waiting = None
            if self._closed:
                return
        function()
