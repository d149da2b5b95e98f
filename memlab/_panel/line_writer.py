"""Appends lines to a file in a thread of its own, so that nobody waits for the disk.

A line waits for a moment, and a newer one takes its place: of a name that is being typed only the
last is written. `flush` writes all that waits. It is called when a panel is closed and when the
kernel ends, so that only a kernel that is killed loses lines, those of its last moment.
"""

import atexit
import contextlib
import threading
from collections.abc import Callable, Hashable
from pathlib import Path

MOMENT_SECONDS = 1.0
# a full disk, and a value that JSON does not know: neither must stop a panel
UNWRITABLE = (OSError, TypeError, ValueError)


class LineWriter:
    """Lines that wait to be written, in the order in which they were added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what waits; never held while anything is written
        self._writing = threading.Lock()
        self._waiting: dict[Hashable, tuple[Path, Callable[[], str]]] = {}
        self._timer: threading.Timer | None = None
        atexit.register(self.flush)

    def add(
        self, path: Path, about: Hashable, line: Callable[[], str], *, soon: bool = False
    ) -> None:
        """Have a line appended to a file.

        Args:
            path: of the file, whose folder need not exist.
            about: what the line says; an older line about the same that still waits is dropped.
            line: makes the text of the line, in the thread that writes it.
            soon: whether it does not wait for a newer line.
        """
        with self._lock:
            self._waiting.pop(about, None)
            self._waiting[about] = path, line
            if soon and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._timer is None:
                self._timer = threading.Timer(0.0 if soon else MOMENT_SECONDS, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Write what waits, and return once it is written."""
        with self._writing:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

            for path, line in waiting.values():
                with contextlib.suppress(*UNWRITABLE):  # the others are written all the same
                    _append(path, line())


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # in one piece, since another kernel may append at the same time
    with path.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())
