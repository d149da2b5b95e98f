"""The runs of a panel: kept for ever, shown until cleared, pinned to be named. No widgets.

A prediction that a person keeps is a run too, which says that it was predicted.
"""

import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from memlab.result import Outcome, Source, StepResult
from memlab.verifying.report import VerifyReport

MOST_SHOWN = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One press of Run, or of *Keep this prediction*.

    Attributes:
        number: from 1, in the order in which they ended.
        result: what it cost, or would cost.
        prediction: of the same step, made without it; None if there is none.
        limit_bytes: the limit on screen when it was asked for; None if there was none.
        report: the comparison of gradients, if it was asked for.
        name: given when it was pinned; "" while it is not.
        cleared: whether it was taken off the table.
        key: another for each run of any panel.
        is_earlier: whether an earlier panel of this cell ran it, perhaps with another model.
    """

    number: int
    result: StepResult
    prediction: StepResult | None = None
    limit_bytes: int | None = None
    report: VerifyReport | None = None
    name: str = ""
    cleared: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_earlier: bool = False

    @property
    def label(self) -> str:
        """How pictures call it: its name, or its number as the table has it."""
        name = self.name or self.default_name
        return f"{name}, predicted" if self.is_predicted else name

    @property
    def default_name(self) -> str:
        """Its name while it is pinned and a person has given it none."""
        return f"run {self.number}"

    @property
    def is_predicted(self) -> bool:
        """Whether it is a prediction that was kept."""
        return self.result.source is Source.PREDICTED

    @property
    def is_stopped(self) -> bool:
        """Whether a person stopped it."""
        return self.result.outcome is Outcome.CANCELLED

    @property
    def predicted(self) -> StepResult | None:
        """What was predicted; None if nothing was."""
        return self.result if self.is_predicted else self.prediction

    @property
    def measured(self) -> StepResult | None:
        """What was measured, here or where it was recorded; None if it was only predicted."""
        return None if self.is_predicted else self.result

    @property
    def prediction_error(self) -> float | None:
        """The signed relative error of the predicted peak allocated; None if there is none."""
        predicted = self.prediction.peak_allocated_bytes if self.prediction else None
        # on a CPU a limit is compared with the whole step, on CUDA it ends the step
        is_whole = self.result.outcome is Outcome.OK or self.result.device == "cpu"
        return _error(predicted, self.result.peak_allocated_bytes) if is_whole else None

    @property
    def time_error(self) -> float | None:
        """The signed relative error of the predicted time per step; None if there is none."""
        predicted = self.prediction.step_seconds if self.prediction else None
        return _error(predicted, self.result.step_seconds)

    @property
    def own_name(self) -> str:
        """The name that a person gave it, or ""."""
        return "" if self.name == self.default_name else self.name


class RunLog:
    """All runs in order.

    Args:
        earlier: the runs with which it begins.
        added: called with each new run.
        changed: called with a changed run and the names of the changed fields.

    Attributes:
        lock: held by whoever changes anything here, since runs end in threads of their own.
        compared: the number of the run that pictures compare with, or 0.
    """

    def __init__(
        self,
        earlier: Iterable[Run] = (),
        added: Callable[[Run], None] = lambda _: None,
        changed: Callable[[Run, Iterable[str]], None] = lambda *_: None,
    ) -> None:
        self.lock = threading.RLock()
        self.runs: list[Run] = list(earlier)
        self.compared = 0
        self._added, self._changed = added, changed
        self._last_cleared: list[int] = []  # the runs of the last clear; empty after the next run
        self._was_compared = 0

    def add(
        self,
        result: StepResult,
        prediction: StepResult | None = None,
        limit_bytes: int | None = None,
    ) -> Run:
        """Add a result as the newest run, with what was predicted for it and the limit on screen.

        Without a limit on screen it is the one under which it ran.
        """
        run = Run(
            number=len(self.runs) + 1,
            result=result,
            prediction=prediction,
            limit_bytes=limit_bytes or result.memory_limit_bytes,
        )
        self.runs.append(run)
        self._last_cleared = []
        self._added(run)
        return run

    def change(self, number: int, **changes: object) -> None:
        """Change fields of one run."""
        self.runs[number - 1] = dataclasses.replace(self.runs[number - 1], **changes)  # type: ignore[arg-type]
        self._changed(self.runs[number - 1], changes)

    def pin(self, number: int, name: str) -> None:
        """Give a run a name and compare with it; an empty name unpins it."""
        self.change(number, name=name)
        if name:
            self.compared = number
        elif self.compared == number:
            self.compared = 0

    def clear(self) -> None:
        """Take every run off the table that is neither pinned nor the last one."""
        self._was_compared = self.compared
        self._last_cleared = [r.number for r in self.runs[:-1] if not r.name and not r.cleared]
        for number in self._last_cleared:
            self.change(number, cleared=True)
            if self.compared == number:
                self.compared = 0

    def undo_clear(self) -> None:
        """Put the runs of the last clear back on the table."""
        for number in self._last_cleared:
            self.change(number, cleared=False)
        if self._was_compared in self._last_cleared:
            self.compared = self.compared or self._was_compared
        self._last_cleared = []

    @property
    def can_undo_clear(self) -> bool:
        """Whether runs were cleared since the last one was added."""
        return bool(self._last_cleared)

    @property
    def own(self) -> list[Run]:
        """The runs of this panel itself, oldest first; the model of earlier ones may be another."""
        return [run for run in self.runs if not run.is_earlier]

    @property
    def last(self) -> Run | None:
        """The newest run."""
        return self.runs[-1] if self.runs else None

    @property
    def visible(self) -> list[Run]:
        """The runs on the table, oldest first."""
        kept = [run for run in self.runs if not run.cleared]
        recent = {run.number for run in kept[-MOST_SHOWN:]}
        return [run for run in kept if run.name or run.number in recent]

    @property
    def compared_run(self) -> Run | None:
        """The run that pictures compare with."""
        return self.runs[self.compared - 1] if self.compared else None

    def comparison(self, shown: Run | None) -> Run | None:
        """Return the run to draw beside the shown one; None if that is the same or nothing is."""
        run = self.compared_run
        return None if shown is None or run is None or run.number == shown.number else run


def count_runs(number: int) -> str:
    """Return a number of runs in words."""
    return f"{number} run{'' if number == 1 else 's'}"


def _error(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted divided by measured, minus one; None if either is missing."""
    return predicted / measured - 1 if predicted is not None and measured else None
