"""Predictions for a panel: interpolated at once where possible, exact from the worker soon after.

The memory of other batch sizes follows from one prediction by sums, so a slider need not wait.
Between the recorded sizes it is interpolated, and the worker then predicts the exact setting. Only
the newest question waits; there is no queue. An outdated prediction is stopped only if it runs for
long, because a new worker takes seconds to start. No widgets.
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

SETTLE_SECONDS = 0.15  # a slider at rest for this long gets an exact prediction
PATIENCE_SECONDS = 10.0  # an outdated prediction may run this long before its worker is replaced
MOST_KEPT = 64  # predictions, about 1 MB each; the oldest goes


@dataclass(frozen=True, slots=True)
class Question:
    """A step to predict: the name of a workload, a config and the name of a device."""

    workload_name: str
    config: StepConfig
    device: str

    @property
    def family(self) -> "Question":
        """The question without its batch size and accumulation."""
        plain = dataclasses.replace(self.config, batch_size=1, accumulation_steps=1)
        return dataclasses.replace(self, config=plain)

    @property
    def plain(self) -> "Question | None":
        """The same question without recomputation; None if nothing is recomputed."""
        config = self.config.without_recompute()
        return None if config == self.config else dataclasses.replace(self, config=config)

    def is_of(self, result: StepResult) -> bool:
        """Return whether the result has exactly these settings."""
        here = (result.workload_name, result.config, result.device)
        return here == (self.workload_name, self.config, self.device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Estimate:
    """The best answer to a question so far.

    Attributes:
        question: the question.
        result: the predicted result, with any outcome.
        exact: whether the worker could predict nothing more exact.
        forecast: the forecast that gave the result; None if there is none.
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
        """Return the estimate with a limit; it fits if `predict` says so under that limit."""
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
    """Return whether a measured time lies within a prediction's uncertainty; True without times."""
    if not measured.step_seconds_all or not predicted.step_seconds:
        return True
    width = (predicted.uncertainty or {}).get("step_seconds", 0.0)
    error = min(measured.step_seconds_all) / predicted.step_seconds - 1.0
    return abs(error) <= width


class Forecasts:
    """Every prediction of a panel, and the thread that asks the worker for the newest question.

    Args:
        workloads: by name.
        arrived: called in that thread with each answer of the worker.
        tell: called in that thread with what the worker is doing.
    """

    def __init__(
        self,
        workloads: Mapping[str, Workload],
        arrived: Callable[[Estimate], None],
        tell: Callable[[str], None],
    ) -> None:
        self._workloads, self._arrived, self._tell = workloads, arrived, tell
        self._known: dict[Question, Prediction] = {}  # the oldest first
        self._doubted: set[Question] = set()  # those of them that the worker predicts again
        self._last: Estimate | None = None  # the last one that did not come from the worker
        self._condition = threading.Condition()
        self._wanted: Question | None = None
        self._asked: Question | None = None  # the question that the worker is answering
        self._asked_at = 0.0
        self._held = self._closed = False
        self._thread: threading.Thread | None = None

    def look(self, question: Question, limit_bytes: int | None = None) -> Estimate | None:
        """Return an estimate under a limit that takes milliseconds; None if that is impossible.

        For a card it takes a little longer if the limit is new: the allocator is replayed at it.
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
        """Return an estimate, under whatever limit was asked for last."""
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
        """Return the worker's answer to exactly this question; None if there is none."""
        with self._condition:
            found = self._known.get(question)
        return None if found is None else found.result

    def doubt(self, measured: StepResult) -> None:
        """Predict a workload on a device again if a measured run contradicts the predicted time.

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
        """Have the worker predict this next, unless it already does; drop the waiting question."""
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
        """Start no prediction during a measurement, because it would slow the measured step."""
        with self._condition:
            self._held = held
            self._condition.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until no question is waiting or running; return whether that happened in time."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self._wanted is None and self._asked is None, timeout_seconds
            )

    def close(self) -> None:
        """End the thread, after its current prediction if that does not take long."""
        with self._condition:
            self._closed, self._wanted = True, None
            self._condition.notify_all()

    def is_overdue(self) -> bool:
        """Whether the worker has worked for long on an outdated question."""
        unwanted = self._closed or self._wanted is not None
        return unwanted and time.monotonic() - self._asked_at > PATIENCE_SECONDS

    def _nearest(self, question: Question) -> "Prediction | None":
        """Return the closest prediction whose forecast covers the question."""
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
        """Wait for a question that stays the newest for a moment; None once closed."""
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
            Prediction,  # imported late, because it imports the modules of fake tensors
        )

        try:
            return predict_with_forecast(
                self._workloads[question.workload_name],
                question.config,
                question.device,
                on_progress=self._progress,
                cancel=_Overdue(self),
            )
        except Exception as error:  # a thread has no caller; the panel continues with the error
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
    """An event that counts as set once its prediction is outdated and has run for too long."""

    def __init__(self, forecasts: Forecasts) -> None:
        super().__init__()
        self._forecasts = forecasts

    def is_set(self) -> bool:
        return self._forecasts.is_overdue()


def _distance(one: StepConfig, other: StepConfig) -> float:
    """Return the distance between two micro-batch sizes, in doublings."""
    return abs(math.log2(one.micro_batch_size / other.micro_batch_size))
