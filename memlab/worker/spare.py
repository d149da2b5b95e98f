"""A spare worker that has run nothing yet and can replace another worker at once.

Starting a worker keeps a core busy for about two seconds. So the spare is started only after
nothing has run for a moment. If a timed run begins meanwhile, the spare is paused until that run is
over. Before a spare is started, workers that take no more jobs are replaced.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from memlab.errors import MemlabError
from memlab.worker.process import WorkerProcess

IDLE_SECONDS = 1.0


class Spare:
    """The spare worker of this process, and when it is started.

    Attributes:
        before_start: replaces the workers that take no more jobs; called while nothing runs.
        worker: None while there is none.
    """

    def __init__(self, before_start: Callable[[], None]) -> None:
        self.before_start = before_start
        self._lock = threading.RLock()
        self.worker: WorkerProcess | None = None
        self._timer: threading.Timer | None = None
        self._runs = 0
        self._timed_runs = 0

    def take(self) -> WorkerProcess | None:
        """Hand the spare worker over, which may still be starting; None if there is none."""
        with self._lock:
            worker, self.worker = self.worker, None
        if worker is None or worker.has_ended():
            return None
        _signal(worker, "SIGCONT")
        return worker

    @contextlib.contextmanager
    def waits(self, *, is_timed: bool) -> Iterator[None]:
        """Start none while a run lasts; one that is starting is stopped if the run is timed."""
        with self._lock:
            self._runs += 1
            self._timed_runs += is_timed
            self._forget_timer()
            if is_timed and self.worker is not None and not self.worker.is_ready():
                _signal(self.worker, "SIGSTOP")

        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                self._timed_runs -= is_timed
                if self.worker is not None and not self._timed_runs:
                    _signal(self.worker, "SIGCONT")
                if not self._runs:
                    self._timer = threading.Timer(IDLE_SECONDS, self._start)
                    self._timer.daemon = True
                    self._timer.start()

    def _start(self) -> None:
        if self._runs:
            return
        with contextlib.suppress(OSError, MemlabError):  # then the next job waits for one
            self.before_start()
            with self._lock:
                if self.worker is None and not self._runs:
                    self.worker = WorkerProcess()

    def end(self) -> None:
        """End it, and start none."""
        with self._lock:
            self._runs += 1
            self._forget_timer()
            if self.worker is not None:
                self.worker.kill()

    def forget(self) -> None:
        """In a forked child, forget the spare worker, because it belongs to the parent."""
        if self.worker is not None:
            self.worker.forget()
        self.__init__(self.before_start)  # type: ignore[misc]

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _signal(worker: WorkerProcess, name: str) -> None:
    number = getattr(signal, name, None)
    with contextlib.suppress(OSError, MemlabError):
        if number is not None:
            os.kill(worker.process.pid, number)
