"""Predictions for a panel: by arithmetic at once where it can tell, from the worker soon after.

One prediction gives other batch sizes as sums, so a slider need not wait for it; what is between
the recorded sizes is interpolated, and the worker is then asked for that very setting. The newest
question alone waits: no queue. A prediction that nobody waits for any more is let finish, since a
worker that is killed takes seconds to come back, unless it goes on for long. No widgets.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from memlab.api import predict_with_forecast
from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.predicting.interpolation import interpolated
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab.predicting.forecast import Forecast
    from memlab.predicting.predict import Prediction

SETTLE_SECONDS = 0.15  # a slider that has not moved for so long is worth an exact prediction
PATIENCE_SECONDS = 10.0  # after which a prediction that nobody waits for is worth a new worker
MOST_KEPT = 64  # predictions, about 1 MB each; the oldest goes


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be predicted: a workload by its name, a config, a device by its name."""

    workload_name: str
    config: StepConfig
    device: str

    @property
    def family(self) -> "Question":
        """What all batch sizes and accumulations of this question have in common."""
        plain = dataclasses.replace(self.config, batch_size=1, accumulation_steps=1)
        return dataclasses.replace(self, config=plain)

    @property
    def plain(self) -> "Question | None":
        """The same without recomputing; None if nothing is recomputed."""
        config = self.config.without_recompute()
        return None if config == self.config else dataclasses.replace(self, config=config)

    def is_of(self, result: StepResult) -> bool:
        """Return whether the result is one of this very setting."""
        here = (result.workload_name, result.config, result.device)
        return here == (self.workload_name, self.config, self.device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Estimate:
    """What is known of a question now.

    Attributes:
        question: that it answers.
        result: predicted; its outcome may be any.
        exact: whether the worker could tell nothing better.
        forecast: that the result comes from; None if there is none.
    """

    question: Question
    result: StepResult
    exact: bool
    forecast: "Forecast | None" = None

    @property
    def is_ok(self) -> bool:
        """Whether there are numbers."""
        return self.result.outcome is Outcome.OK

    def against_limit(self, limit_bytes: int | None) -> "Estimate":
        """Return the estimate with a limit, and whether the step fits it, as `predict` says it."""
        if self.forecast is None:
            result = self.result.against_limit(limit_bytes)
        else:
            result = self.forecast.against_limit(self.result, limit_bytes)
        return self if result is self.result else dataclasses.replace(self, result=result)

    def may_need_replay(self, limit_bytes: int | None) -> bool:
        """Whether a limit is new, so that the caching allocator may have to be replayed at it."""
        has_cache = self.forecast is not None and self.forecast.settings is not None
        return has_cache and self.result.memory_limit_bytes != limit_bytes


def is_within(measured: StepResult, predicted: StepResult) -> bool:
    """Return whether a measured time is one that a prediction allows; True if one has no time."""
    if not measured.step_seconds_all or not predicted.step_seconds:
        return True
    width = (predicted.uncertainty or {}).get("step_seconds", 0.0)
    error = min(measured.step_seconds_all) / predicted.step_seconds - 1.0
    return abs(error) <= width


class Forecasts:
    """Every prediction of a panel, and the thread that asks the worker for the newest question.

    Args:
        workloads: by name.
        arrived: called in that thread with what the worker said.
        tell: called in that thread with what the worker does.
    """

    def __init__(
        self,
        workloads: Mapping[str, Workload],
        arrived: Callable[[Estimate], None],
        tell: Callable[[str], None],
    ) -> None:
        self._workloads, self._arrived, self._tell = workloads, arrived, tell
        self._known: dict[Question, Prediction] = {}  # the oldest first
        self._doubted: set[Question] = set()  # of these: the worker is to be asked again
        self._last: Estimate | None = None  # looked for last, of what the worker has not said
        self._condition = threading.Condition()
        self._wanted: Question | None = None
        self._asked: Question | None = None  # what the worker is at
        self._asked_at = 0.0
        self._held = self._closed = False
        self._thread: threading.Thread | None = None

    def look(self, question: Question, limit_bytes: int | None = None) -> Estimate | None:
        """Return what can be told at once of a question under a limit; None if nothing.

        It takes milliseconds, of a card some more: for a new limit its allocator may be replayed.
        """
        estimate = self._estimate(question)
        if estimate is None:
            return None

        judged = estimate.against_limit(limit_bytes)
        with self._condition:
            found = self._known.get(question)
            if found is None:
                self._last = judged
            elif found.result is estimate.result:
                self._known[question] = dataclasses.replace(found, result=judged.result)
        return judged

    def _estimate(self, question: Question) -> Estimate | None:
        """Return what can be told of a question, under whatever limit was looked at last."""
        with self._condition:
            found, last = self._known.get(question), self._last
            base = None if found else self._nearest(question)
            is_sure = question not in self._doubted

        if found is not None:
            return Estimate(
                question=question, result=found.result, exact=is_sure, forecast=found.forecast
            )
        if last is not None and last.question == question:
            return last
        if base is None or base.forecast is None:
            return None

        result = interpolated(base, question.config)
        exact = base.forecast.is_exact(question.config.micro_batch_sizes)
        return Estimate(question=question, result=result, exact=exact, forecast=base.forecast)

    def known(self, question: Question) -> StepResult | None:
        """Return what the worker has said of this very question; None if nothing."""
        with self._condition:
            found = self._known.get(question)
        return None if found is None else found.result

    def doubt(self, measured: StepResult) -> None:
        """Doubt what was predicted for a workload and a device, if a run there took another time.

        It is shown until the worker, which holds predictions against that run, has been asked anew.
        """
        setting = Question(measured.workload_name, measured.config, measured.device)
        predicted = self.known(setting)
        if predicted is None or is_within(measured, predicted):
            return

        with self._condition:
            self._doubted |= {
                question
                for question in self._known
                if (question.workload_name, question.device)
                == (setting.workload_name, setting.device)
            }
            self._last = None

    def ask(self, question: Question) -> None:
        """Have the worker predict this, unless it is at it; no other question waits any more."""
        with self._condition:
            if self._closed:
                return

            is_known = question in self._known and question not in self._doubted
            self._wanted = None if is_known or question == self._asked else question
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, daemon=True)
                self._thread.start()

            self._condition.notify_all()

    def hold(self, held: bool) -> None:
        """Begin no prediction while a measurement runs, whose times it would spoil."""
        with self._condition:
            self._held = held
            self._condition.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until nothing is asked for and nothing runs; return whether that came true."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self._wanted is None and self._asked is None, timeout_seconds
            )

    def close(self) -> None:
        """End the thread, after the prediction that it is at if that does not take long."""
        with self._condition:
            self._closed, self._wanted = True, None
            self._condition.notify_all()

    def is_overdue(self) -> bool:
        """Whether the worker has been for long at what nobody waits for any more."""
        unwanted = self._closed or self._wanted is not None
        return unwanted and time.monotonic() - self._asked_at > PATIENCE_SECONDS

    def _nearest(self, question: Question) -> "Prediction | None":
        """Return the prediction whose forecast covers the question from nearest by."""
        sizes, family = question.config.micro_batch_sizes, question.family
        covering = [
            (known in self._doubted, _distance(known.config, question.config), -age, prediction)
            for age, (known, prediction) in enumerate(self._known.items())
            if known.family == family
            and prediction.forecast is not None
            and prediction.forecast.covers(sizes)
        ]

        return min(covering, key=lambda one: one[:3], default=(False, 0, 0, None))[3]

    def _loop(self) -> None:
        while (question := self._next()) is not None:
            prediction = self._predict(question)
            cancelled = prediction.result.outcome is Outcome.CANCELLED
            with self._condition:
                self._asked = None
                if not cancelled:
                    self._known[question] = prediction
                    self._doubted.discard(question)
                    if len(self._known) > MOST_KEPT:
                        oldest = next(iter(self._known))
                        del self._known[oldest]
                        self._doubted.discard(oldest)

                self._condition.notify_all()

            if not cancelled and not self._closed:
                self._arrived(Estimate(question=question, result=prediction.result, exact=True))

    def _next(self) -> Question | None:
        """Wait for a question that stays the newest for a while; None once closed."""
        with self._condition:
            while not self._closed:
                self._condition.wait_for(lambda: self._closed or self._is_open())
                newest = self._wanted
                if not self._condition.wait_for(partial(self._has_changed, newest), SETTLE_SECONDS):
                    break

            if self._closed:
                return None

            self._wanted, self._asked, self._asked_at = None, newest, time.monotonic()
            return newest

    def _is_open(self) -> bool:
        return self._wanted is not None and not self._held

    def _has_changed(self, newest: Question | None) -> bool:
        return self._closed or self._wanted != newest or not self._is_open()

    def _predict(self, question: Question) -> "Prediction":
        from memlab.predicting.predict import (
            Prediction,  # late, as everything that fake tensors need
        )

        try:
            return predict_with_forecast(
                self._workloads[question.workload_name],
                question.config,
                question.device,
                on_progress=self._progress,
                cancel=_Overdue(self),
            )
        except Exception as error:  # a thread has no caller, and a panel goes on without it
            kind = "" if isinstance(error, MemlabError) else f"{type(error).__name__}: "
            result = StepResult(
                outcome=Outcome.FAILED,
                message=f"{kind}{error}",
                source=Source.PREDICTED,
                device=question.device,
                config=question.config,
                workload_name=question.workload_name,
            )
            return Prediction(result=result, forecast=None)

    def _progress(self, progress: Progress) -> None:
        if not self._closed:
            self._tell(progress.text)


class _Overdue(threading.Event):
    """Set once the prediction that it belongs to has become a burden."""

    def __init__(self, forecasts: Forecasts) -> None:
        super().__init__()
        self._forecasts = forecasts

    def is_set(self) -> bool:
        return self._forecasts.is_overdue()


def _distance(one: StepConfig, other: StepConfig) -> float:
    """Return by how many doublings the micro-batches differ."""
    return abs(math.log2(one.micro_batch_size / other.micro_batch_size))
