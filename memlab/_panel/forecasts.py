"""Predictions for a panel: interpolated at once where possible, exact from the worker soon after.

The memory of other batch sizes follows from one prediction by sums, so a slider need not wait.
Between the recorded sizes it is interpolated, and of another number of micro-batches it is
estimated; the worker then predicts the exact setting. Only the newest question waits; there is no
queue. An outdated prediction is stopped only if it runs for long, because a new worker takes
seconds to start. While nothing is asked for, the worker predicts the neighbours of the settings on
screen, one after another, and then rests. No widgets.
"""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from memlab._panel.answers import Answers, is_within
from memlab._panel.estimating import Estimator
from memlab._panel.questions import Estimate, Question
from memlab.api import predict_with_forecast
from memlab.errors import MemlabError
from memlab.planning.plans import known_chain
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.worker.isolation import is_measuring
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab.planning.chain import Chain
    from memlab.predicting.predict import Prediction

SETTLE_SECONDS = 0.15  # a slider at rest for this long gets an exact prediction
PATIENCE_SECONDS = 10.0  # an outdated prediction may run this long before its worker is replaced
MOST_AHEAD = 12  # neighbours of one setting
# a model whose predictions take longer has none made ahead: a question would wait behind them
LONGEST_AHEAD_SECONDS = 4.0
LOOK_AGAIN_SECONDS = 0.5  # whether a measurement is over, before a prediction ahead
# a prediction made ahead that is younger than this is not stopped for a question, because it will
# end before a new worker has started
AHEAD_PATIENCE_SECONDS = 5.0


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
        self._answers = Answers(self._chain_of)
        self._estimator = Estimator(self._answers)
        self._last: Estimate | None = None  # the last one that did not come from the worker
        self._condition = threading.Condition()
        self._wanted: Question | None = None
        self._later: list[Question] = []  # to be predicted after that, the first one first
        self._neighbours: list[Question] = []  # to be predicted ahead, the first one first
        self._asked: Question | None = None  # the question that the worker is answering
        self._asked_at = 0.0  # when the worker began with it
        self._has_begun = self._is_ahead = False  # and whether nobody has asked for it yet
        self._seconds: dict[tuple[str, str], float] = {}  # the last one, by `_about`
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
            found = self._answers.get(question)
            if found is None:
                self._last = judged
            elif found.result is estimate.result:
                self._answers.look(question, dataclasses.replace(found, result=judged.result))
        return judged

    def _estimate(self, question: Question) -> Estimate | None:
        """Return an estimate, under whatever limit was asked for last."""
        with self._condition:
            last = self._last
            if last is not None and last.question == question and self._answers.is_open(question):
                return last
            return self._estimator.best(question)

    def _chain_of(self, question: Question) -> "Chain | None":
        workload = self._workloads[question.workload_name]
        return known_chain(workload, question.config, question.device, seed=0)

    def known(self, question: Question) -> StepResult | None:
        """Return the worker's answer to exactly this question; None if there is none."""
        with self._condition:
            found = self._answers.get(question)
        return None if found is None else found.result

    def exact(self, question: Question) -> StepResult | None:
        """Return the result to which the worker could add nothing; None while there is none."""
        with self._condition:
            is_exact = self._estimator.is_exact(question)
            found = self._estimator.best(question) if is_exact else None
        return None if found is None else found.result

    def known_of(self, question: Question) -> list[StepResult]:
        """Return every prediction with numbers for the workload and device of a question."""
        with self._condition:
            found = self._answers.of(question.workload_name, question.device)
        return [one.result for one in found if one.result.outcome is Outcome.OK]

    def doubt(self, measured: StepResult) -> None:
        """Predict a workload on a device again if a measured run contradicts the predicted time.

        It is shown until the worker, which holds predictions against that run, has been asked anew.
        """
        setting = Question(measured.workload_name, measured.config, measured.device)
        predicted = self.known(setting)
        if predicted is None or is_within(measured, predicted):
            return

        with self._condition:
            self._answers.doubt(setting.workload_name, setting.device)
            self._last = None

    def ask(self, question: Question) -> bool:
        """Have the worker predict this next, unless it already does; drop what was to come.

        Returns whether an answer will arrive.
        """
        with self._condition:
            if self._closed:
                return False

            is_open, is_asked = self._answers.is_open(question), question == self._asked
            self._wanted = question if is_open and not is_asked else None
            self._neighbours = []
            self._is_ahead = self._is_ahead and not is_asked
            self._wake()
            return is_open

    def ask_later(self, questions: Iterable[Question]) -> None:
        """Have the worker predict these, in this order, whenever nothing else is asked for.

        They come before neighbours, and replace those of the last call that are still waiting.
        """
        with self._condition:
            if not self._closed:
                self._later = [asked for asked in questions if not self._estimator.is_exact(asked)]
                self._wake()

    def ahead(self, questions: Sequence[Question]) -> None:
        """Have the worker predict these while nothing is asked for; drop what was to come.

        Those of which nothing can be said yet come first. There are none for a model whose
        predictions take long.
        """
        with self._condition:
            if self._closed:
                return

            found = [question for question in questions if self._is_worth(question)]
            self._wanted = None
            self._neighbours = sorted(found, key=self._estimator.can_tell)[:MOST_AHEAD]
            self._wake()

    def hold(self, held: bool) -> None:
        """Start no prediction during a measurement, because it would slow the measured step."""
        with self._condition:
            self._held = held
            self._condition.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until no question is waiting or running; return whether that happened in time."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self._upcoming is None and self._asked is None, timeout_seconds
            )

    def close(self) -> None:
        """End the thread, after its current prediction if that does not take long."""
        with self._condition:
            self._closed, self._wanted, self._later, self._neighbours = True, None, [], []
            self._condition.notify_all()

    def is_overdue(self) -> bool:
        """Whether the worker has worked for long on an outdated question."""
        unwanted = self._closed or self._wanted is not None
        patience = AHEAD_PATIENCE_SECONDS if self._is_ahead else PATIENCE_SECONDS
        return unwanted and time.monotonic() - self._asked_at > patience

    @property
    def _upcoming(self) -> Question | None:
        """What the worker is to predict next: what is asked for, then the rest in its order."""
        return self._wanted or next(iter([*self._later, *self._neighbours]), None)

    def _is_worth(self, question: Question) -> bool:
        """Return whether the worker would find something new of a neighbour, and that soon."""
        seconds = self._seconds.get(self._about(question), math.inf)
        is_new = question != self._asked and not self._estimator.is_exact(question)
        return seconds <= LONGEST_AHEAD_SECONDS and is_new

    def _about(self, question: Question) -> tuple[str, str]:
        """Return the workload, whatever its sample size is, and the device of a question."""
        return self._workloads[question.workload_name].base_name, question.device

    def _loop(self) -> None:
        while (question := self._next()) is not None:
            prediction = self._predict(question)
            cancelled = prediction.result.outcome is Outcome.CANCELLED
            with self._condition:
                self._asked = None
                if prediction.result.outcome is Outcome.OK:
                    seconds = time.monotonic() - self._asked_at
                    self._seconds[self._about(question)] = seconds
                if not cancelled:
                    self._answers.add(question, prediction)
                    self._later = [asked for asked in self._later if asked != question]
                self._condition.notify_all()

            if not cancelled and not self._closed:
                self._arrived(Estimate(question=question, result=prediction.result, exact=True))

    def _next(self) -> Question | None:
        """Wait for a question that stays the newest for a moment; None once closed."""
        with self._condition:
            while not self._closed:
                self._condition.wait_for(lambda: self._closed or self._upcoming is not None)
                # nobody tells of the end of a measurement in a cell
                if not self._condition.wait_for(self._may_begin, LOOK_AGAIN_SECONDS):
                    continue
                newest = self._upcoming
                is_next = self._is_ahead and self._wanted is None  # the hand rests already
                settle = 0.0 if is_next else SETTLE_SECONDS
                if not self._condition.wait_for(
                    functools.partial(self._has_changed, newest), settle
                ):
                    break

            if self._closed:
                return None

            self._is_ahead = self._wanted is None
            self._neighbours = [one for one in self._neighbours if one != newest]
            self._wanted, self._asked, self._has_begun = None, newest, False
            self._asked_at = time.monotonic()
            return newest

    def _may_begin(self) -> bool:
        """Return whether there is something to predict now, or whether this is the end."""
        if self._closed or self._wanted is not None:
            return self._closed or not self._held
        return self._upcoming is not None and not self._held and not is_measuring()

    def _has_changed(self, newest: Question | None) -> bool:
        return self._closed or self._upcoming != newest or not self._may_begin()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()
        self._condition.notify_all()

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
        if progress.fraction > 0 and not self._has_begun:  # before that, the worker was starting
            self._has_begun, self._asked_at = True, time.monotonic()
        if not self._closed and not self._is_ahead:
            self._tell(progress.text)


class _Overdue(threading.Event):
    """An event that counts as set once its prediction is outdated and has run for too long."""

    def __init__(self, forecasts: Forecasts) -> None:
        super().__init__()
        self._forecasts = forecasts

    def is_set(self) -> bool:
        return self._forecasts.is_overdue()
