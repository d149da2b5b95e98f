"""Work beside the kernel's thread: a measurement that can be stopped, and newest-wins tasks."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from memlab._panel.questions import Question
from memlab.api import measure, verify
from memlab.config import StepConfig
from memlab.result import Outcome, StepResult
from memlab.running import Progress
from memlab.runtime.verify_report import VerifyReport
from memlab.store.recorded import is_recorded, recorded
from memlab.workload import Workload

UPDATE_SECONDS = 0.1  # a page with more frequent updates falls behind


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelJob:
    """What was on screen when Run was pressed.

    Attributes:
        memory_limit: that was typed, with which the step is measured; None if none was.
        limit_bytes: with which its peak is compared: that, or what the device can hold.
    """

    workload: Workload
    config: StepConfig
    device: str
    memory_limit: int | None
    limit_bytes: int | None
    check_gradients: bool
    by_cell: bool = False
    cancel: threading.Event = field(default_factory=threading.Event)

    def run(
        self,
        tell: Callable[[Progress], None],
        measured: Callable[[StepResult], None],
        checked: Callable[[VerifyReport], None],
    ) -> None:
        """Measure, then compare the gradients if that was asked for; or play a record back.

        Raises:
            MemlabError: an argument is not allowed, or the workload cannot be sent to the worker.
        """
        if is_recorded(self.device):
            measured(recorded(self.workload, self.config, self.device))
            return

        throttled = Throttle(tell)
        try:
            result = measure(
                self.workload,
                self.config,
                self.device,
                memory_limit=self.memory_limit,
                on_progress=throttled,
                cancel=self.cancel,
            )
            throttled.drop()  # late progress would overwrite the result on screen
            measured(result)

            if self.check_gradients and result.outcome is Outcome.OK:
                checked(
                    verify(
                        self.workload,
                        self.config,
                        self.device,
                        on_progress=throttled,
                        cancel=self.cancel,
                    )
                )
        finally:
            throttled.close()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FitJob:
    """What was on screen when *Fit for me* was pressed.

    Attributes:
        workload: on screen.
        question: on screen.
        base: the same with what is to be searched at its default.
        limit_bytes: that the step may hold; None if it is not known.
        cancel: once set, the search ends.
        by_cell: whether a cell has started it.
    """

    stopped: ClassVar[str] = "the search was stopped before anything was found that fits"
    workload: Workload
    question: Question
    base: Question
    limit_bytes: int | None
    cancel: threading.Event = field(default_factory=threading.Event)
    by_cell: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BaseJob:
    """What was on screen when a person asked what its quantized base saves.

    Attributes:
        workload: on screen.
        question: on screen.
        cancel: once set, the comparison ends.
        by_cell: whether a cell has started it.
    """

    stopped: ClassVar[str] = "the comparison was stopped"
    workload: Workload
    question: Question
    cancel: threading.Event = field(default_factory=threading.Event)
    by_cell: bool = False


class Throttle:
    """Passes values on at most every `UPDATE_SECONDS`; the last one always arrives."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._last = 0.0
        self._timer: threading.Timer | None = None
        self._waiting: Any = None
        self._closed = False

    def __call__(self, value: Any) -> None:
        """Send the value now, or keep it until the next update is due."""
        with self._lock:
            self._waiting = value
            if self._timer is not None or self._closed:
                return

            rest = self._last + UPDATE_SECONDS - time.monotonic()
            if rest <= 0:
                self._flush()
                return

            self._timer = threading.Timer(rest, self._later)
            self._timer.daemon = True
            self._timer.start()

    def _later(self) -> None:
        with self._lock:
            self._timer = None
            if not self._closed and self._waiting is not None:
                self._flush()

    def _flush(self) -> None:
        self._last = time.monotonic()
        self._send(self._waiting)

    def drop(self) -> None:
        """Drop a value that waits; a value that is being sent has arrived when this returns."""
        with self._lock:
            self._waiting = None

    def close(self) -> None:
        """Send nothing more."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()


class Latest:
    """Runs a function in a thread of its own for the newest argument; older ones are dropped."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self._condition = threading.Condition()
        self._waiting: list[Any] = []
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def __call__(self, argument: Any = None) -> None:
        """Ask for a run with this argument."""
        with self._condition:
            if self._closed:
                return
            self._waiting = [argument]
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, daemon=True)
                self._thread.start()

            self._condition.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until no argument is waiting or running; return whether that happened in time."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._busy and not self._waiting, timeout_seconds
            )

    def close(self) -> None:
        """End the thread after its current call."""
        with self._condition:
            self._closed, self._waiting = True, []
            self._condition.notify_all()

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return

                argument = self._waiting.pop()
                self._busy = True

            self._function(argument)
