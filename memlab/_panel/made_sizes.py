"""`MadeSizes`: workloads in other sample sizes, made in a thread.

A person's own `make_workload` may take seconds, and a page that waits for it moves no slider. So
the page looks at what is made, and hears of the rest; only code waits. No widgets.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from memlab._panel.job import Latest
from memlab.errors import MemlabError, WorkloadError
from memlab.workload import Workload

PATIENCE_SECONDS = 0.05  # the page waits so long, so that nothing flickers where making is quick

Size = tuple[str, Any]  # the name of a workload, and a size that may yet be refused
CLOSED = "the panel was closed before the workload was made in this size"


class MadeSizes:
    """Makes workloads in other sizes, one at a time, and keeps them.

    What code waits for comes first, then what is on screen, then its neighbours.

    Args:
        workloads: by name; those that are made are added.
        arrived: called in another thread once the size on screen is made, and after the last of its
            neighbours.
    """

    def __init__(self, workloads: dict[str, Workload], arrived: Callable[[], None]) -> None:
        self._workloads = workloads
        # not by the thread that makes: whoever is told may look, and hold what others wait for
        self._arrived = Latest(lambda _: arrived())
        self._condition = threading.Condition()
        self._found: dict[Size, Workload | str] = {}  # or why there is none
        self._waited: list[Size] = []  # by code
        self._shown: Size | None = None
        self._shown_since = 0.0
        self._neighbours: list[Size] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def get(self, given: Workload, size: Any) -> Workload:
        """Return a workload in this size, and wait until it is made.

        For code alone: nothing that the page's lock is held for may wait here.

        Raises:
            WorkloadError: it cannot be made, or the panel was closed.
        """
        if _is_own(given, size):
            return given

        key = given.name, size
        with self._condition:
            self._waited.append(key)
            self._wake()
            try:
                self._condition.wait_for(lambda: key in self._found or self._closed)
            finally:
                self._waited.remove(key)
            return self._known(key)

    def look(self, given: Workload, size: Any) -> Workload | None:
        """Return the workload on screen; None while it is being made, of which `arrived` tells.

        Raises:
            WorkloadError: it cannot be made, or the panel was closed.
        """
        if _is_own(given, size):
            return given

        key = given.name, size
        with self._condition:
            if self._shown != key:
                self._shown, self._shown_since = key, time.monotonic()
                self._neighbours = []
                self._wake()
            patience = self._shown_since + PATIENCE_SECONDS - time.monotonic()
            is_over = self._condition.wait_for(
                lambda: key in self._found or self._closed, max(patience, 0.0)
            )
            return self._known(key) if is_over else None

    def made(self, given: Workload, sizes: Sequence[int]) -> list[Workload]:
        """Return those of these sizes that are made, in their order; make the others meanwhile."""
        with self._condition:
            own = [size for size in sizes if _is_own(given, size)]
            others = [size for size in sizes if size not in own]
            self._neighbours = [
                (given.name, size) for size in others if (given.name, size) not in self._found
            ]
            self._wake()
            found = [
                given if size in own else self._found.get((given.name, size)) for size in sizes
            ]
        return [one for one in found if isinstance(one, Workload)]

    def close(self) -> None:
        """End the thread after what it makes; whoever waits hears that the panel was closed."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._arrived.close()

    def _known(self, key: Size) -> Workload:
        found = self._found.get(key, CLOSED)
        if isinstance(found, str):
            raise WorkloadError(found)
        return found

    @property
    def _next(self) -> Size | None:
        """What is to be made next."""
        wanted = [*self._waited, *([self._shown] if self._shown else []), *self._neighbours]
        return next((key for key in wanted if key not in self._found), None)

    def _wake(self) -> None:
        if self._thread is None and not self._closed and self._next is not None:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._condition:
                key = None if self._closed else self._next
                if key is None:
                    self._thread = None
                    return
                given = self._workloads[key[0]]

            try:
                found: Workload | str = given.resized(key[1])
            except MemlabError as error:
                found = str(error)
            except BaseException as error:  # such as a person's sys.exit(); somebody waits
                found = f"{given.name} cannot be made in size {key[1]}: {type(error).__name__}"

            with self._condition:
                self._found[key] = found
                if isinstance(found, Workload):
                    self._workloads[found.name] = found
                is_awaited = key in (self._shown, *self._neighbours[-1:])
                self._condition.notify_all()
            if is_awaited and not self._closed:
                self._arrived()


def _is_own(given: Workload, size: Any) -> bool:
    """Return whether samples of a workload have this size already; None stands for their own."""
    own = given.sample_size
    return size is None or (own is not None and size == own.value)
