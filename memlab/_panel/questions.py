"""`Question`, a step to predict, and `Estimate`, the best answer to it so far. No widgets."""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from memlab.api import predict_with_size_model
from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.prediction.interpolation import (
    can_regroup,
    can_replan,
    estimate_accumulation,
    estimate_budget,
    interpolated,
    plan_at,
    renamed,
)
from memlab.prediction.plans import known_frontier
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.runtime.isolation import is_measuring, is_predicting, is_waited_for
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab.prediction.batch_size_model import BatchSizeModel
    from memlab.prediction.budget_frontier import BudgetFrontier
    from memlab.prediction.predict import Prediction


@dataclass(frozen=True, slots=True)
class Question:
    """A step to predict: the name of a workload, a config and the name of a device."""

    workload_name: str
    config: StepConfig
    device: str

    @classmethod
    def of(cls, result: StepResult) -> "Question":
        """Return the question that a result answers."""
        return cls(result.workload_name, result.config, result.device)

    @property
    def family(self) -> "Question":
        """The question without its batch size and accumulation."""
        return _family(self)

    @property
    def relatives(self) -> "Question":
        """The question without its batch size, accumulation and memory budget."""
        return _relatives(self)

    def with_budget(self, memory_budget: float) -> "Question":
        """Return the same question with another memory budget."""
        config = dataclasses.replace(self.config, memory_budget=memory_budget)
        return dataclasses.replace(self, config=config)

    @property
    def plain(self) -> "Question | None":
        """The same question without recomputation; None if nothing is recomputed."""
        config = self.config.without_recompute()
        return None if config == self.config else dataclasses.replace(self, config=config)

    def is_of(self, result: StepResult) -> bool:
        """Return whether the result has exactly these settings."""
        return self == Question.of(result)


# every look compares these with those of all that is known
@functools.lru_cache(maxsize=512)
def _family(question: Question) -> Question:
    least = question.config.data_parallel_size  # a sample for each rank
    plain = dataclasses.replace(question.config, batch_size=least, accumulation_steps=1)
    return dataclasses.replace(question, config=plain)


@functools.lru_cache(maxsize=512)
def _relatives(question: Question) -> Question:
    return _family(question).with_budget(1.0)


class How(StrEnum):
    """How the result of an estimate was found.

    The worker predicted it; it is interpolated between batch sizes that it predicted; or it was put
    together from predictions of another number of micro-batches or of another memory budget.
    """

    PREDICTED = "predicted"
    INTERPOLATED = "interpolated"
    ESTIMATED = "estimate"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Estimate:
    """The best answer to a question so far.

    Attributes:
        question: the question.
        result: the predicted result, with any outcome.
        exact: whether the worker could predict nothing more exact.
        size_model: the size model that gave the result; None if there is none.
        how: how the result was found.
    """

    question: Question
    result: StepResult
    exact: bool
    size_model: "BatchSizeModel | None" = None
    how: How = How.PREDICTED

    @property
    def is_ok(self) -> bool:
        """Whether there are numbers."""
        return self.result.outcome is Outcome.OK

    def against_limit(self, limit_bytes: int | None) -> "Estimate":
        """Return the estimate with a limit; it fits if `predict` says so under that limit."""
        if self.size_model is None:
            result = self.result.against_limit(limit_bytes)
        else:
            result = self.size_model.against_limit(self.result, limit_bytes)
        return self if result is self.result else dataclasses.replace(self, result=result)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recorded:
    """An answer from which a page computes others, and the plans of its memory budgets if known."""

    question: Question
    prediction: "Prediction"
    frontier: "BudgetFrontier | None"


# `Answers`: what the worker has answered.
#
# A question has the same answer as another one if both budgets have the same plan. What
# answers say of further questions, an `Estimator` knows.
#
# Only so many are kept; the one that was looked at longest ago goes first. No thread and no
# lock: `Forecasts` has both.

MOST_KEPT = 128  # each from a half to two MB


class Answers:
    """Predictions of the worker by question.

    Args:
        frontier_of: returns the plans of the budgets of a question, if they are known.
    """

    def __init__(self, frontier_of: "Callable[[Question], BudgetFrontier | None]") -> None:
        self._frontier_of = frontier_of
        self._kept: dict[Question, Prediction] = {}  # the one looked at last comes last
        self._doubted: set[Question] = set()  # those of them that the worker predicts again

    @property
    def kept(self) -> "Mapping[Question, Prediction]":
        """Every answer, that which was looked at last comes last."""
        return self._kept

    def get(self, question: Question) -> "Prediction | None":
        """Return the answer to this question; None if there is none."""
        key = self._key(question)
        if key is None or key == question:
            return None if key is None else self._kept[key]

        prediction, frontier = self._kept[key], self.plans_of(question)
        if frontier is None:
            return None
        result = renamed(prediction.result, question.config, frontier)
        return dataclasses.replace(prediction, result=result)

    def _key(self, question: Question) -> Question | None:
        """Return the answered question that has the answer to this one: itself, or its plan."""
        if question in self._kept:
            return question
        frontier = self.plans_of(question) if question.config.is_planned else None
        if frontier is None:
            return None

        plan = plan_at(frontier, question.config)
        return next(
            (
                known
                for known, prediction in self._kept.items()
                if known.relatives == question.relatives
                and known == question.with_budget(known.config.memory_budget)
                and known.config.is_planned
                and plan_at(frontier, known.config) is plan
                and prediction.result.outcome is Outcome.OK  # what ended early tells of itself only
            ),
            None,
        )

    def plans_of(self, question: Question) -> "BudgetFrontier | None":
        """Return the plans of a question if they are known, and if there is one that recomputes."""
        frontier = self._frontier_of(question)
        return frontier if frontier is not None and len(frontier.plans) > 1 else None

    def add(self, question: Question, prediction: "Prediction") -> None:
        """Keep a new answer, which nobody doubts."""
        self.look(question, prediction)
        self._doubted.discard(question)

    def look(self, question: Question, prediction: "Prediction") -> None:
        """Keep an answer as the one that was looked at last."""
        self._kept.pop(question, None)
        self._kept[question] = prediction
        if len(self._kept) > MOST_KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._doubted.discard(oldest)

    def is_open(self, question: Question) -> bool:
        """Return whether the worker has yet to answer this question, or to answer it again."""
        key = self._key(question)
        return key is None or key in self._doubted

    def is_doubted(self, question: Question) -> bool:
        """Return whether the worker predicts an answered question again."""
        return question in self._doubted

    def doubt(self, workload_name: str, device: str) -> None:
        """Have everything predicted again for a workload on a device."""
        where = (workload_name, device)
        self._doubted |= {one for one in self._kept if (one.workload_name, one.device) == where}


def is_within(measured: StepResult, predicted: StepResult) -> bool:
    """Return whether a measured time lies within a prediction's uncertainty; True without times."""
    if not measured.step_seconds_all or not predicted.step_seconds:
        return True
    width = (predicted.uncertainty or {}).get("step_seconds", 0.0)
    error = min(measured.step_seconds_all) / predicted.step_seconds - 1.0
    return abs(error) <= width


# `Estimator`: what the worker's answers say of any other question.
#
# Of other batch sizes an answer tells by interpolation, of other numbers of micro-batches
# and of other budgets it gives an estimate. No thread and no lock, as in `Answers`.


class Estimator:
    """Finds the best that is known of a question.

    Args:
        answers: of the worker.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def is_exact(self, question: Question) -> bool:
        """Return whether the worker could say nothing more of a question."""
        if not self._answers.is_open(question):
            return True
        base = self._covering(question)
        return base is not None and self._covers_exactly(base, question)

    def covers(self, question: Question) -> bool:
        """Return whether there is a recording of as many micro-batches with that budget."""
        return self._covering(question) is not None

    def can_tell(self, question: Question) -> bool:
        """Return whether something is known of a question, be it an estimate."""
        return (
            not self._answers.is_open(question)
            or self._covering(question) is not None
            or self._regroupable(question) is not None
            or self._replannable(question) is not None
        )

    def best(self, question: Question) -> Estimate | None:
        """Return what is known of a question; None if that is nothing."""
        found = self._answers.get(question)
        if found is not None:
            is_sure = not self._answers.is_open(question)
            return Estimate(
                question=question, result=found.result, exact=is_sure, size_model=found.size_model
            )
        return self._of_same_budget(question) or self._of_other_budget(question)

    def _of_same_budget(self, question: Question) -> Estimate | None:
        """Return what an answer about another batch size or accumulation says of a question."""
        config = question.config
        if (near := self._covering(question)) is not None:
            base, exact = self._answers.kept[near], self._covers_exactly(near, question)
            return Estimate(
                question=question,
                result=interpolated(base, config),
                exact=exact,
                size_model=base.size_model,
                how=How.PREDICTED if exact else How.INTERPOLATED,
            )
        if (near := self._regroupable(question)) is not None:
            result = estimate_accumulation(self._answers.kept[near], config)
            return Estimate(question=question, result=result, exact=False, how=How.ESTIMATED)
        return None

    def _of_other_budget(self, question: Question) -> Estimate | None:
        """Return what an answer about another memory budget says of a question."""
        known = self._replannable(question)
        if known is None:
            return None

        same = question.with_budget(known.config.memory_budget)
        exact = self._answers.kept.get(same)
        of_batch = None if exact else self._of_same_budget(same)
        base = exact.result if exact else of_batch.result if of_batch else None
        planned = question if self._answers.plans_of(question) else known
        frontier = self._answers.plans_of(planned)
        if base is None or frontier is None or base.outcome is not Outcome.OK:
            return None
        result = estimate_budget(base, question.config, frontier, planned.config)
        return Estimate(question=question, result=result, exact=False, how=How.ESTIMATED)

    def _replannable(self, question: Question) -> Question | None:
        """Return the answered question of another budget that says most of this one.

        The plans of one of them must be known.
        """
        config = question.config
        kind = "cpu" if question.device == "cpu" else "cuda"
        if not can_replan(config, kind):
            return None

        has_plans = self._answers.plans_of(question) is not None
        found = [
            known
            for known, prediction in self._answers.kept.items()
            if prediction.size_model is not None
            and known.relatives == question.relatives
            and known.family != question.family
            and self._can_be_moved(known, config)
            and (has_plans or self._answers.plans_of(known) is not None)
        ]
        return min(found, key=partial(self._remoteness, question), default=None)

    def _can_be_moved(self, known: Question, config: StepConfig) -> bool:
        """Return whether an answer says something of the micro-batches of a config."""
        size_model = self._answers.kept[known].size_model
        there = dataclasses.replace(config, memory_budget=known.config.memory_budget)
        return size_model is not None and (
            size_model.covers(config.micro_batch_sizes) or can_regroup(size_model, there)
        )

    def _remoteness(self, question: Question, known: Question) -> tuple[bool, float, float]:
        """Return a key that is the least for the answer that says most of a question."""
        one, other = question.config, known.config
        budgets = abs(one.memory_budget - other.memory_budget)
        return self._answers.is_doubted(known), _distance(one, other), budgets

    def _covering(self, question: Question) -> Question | None:
        """Return the closest question of the same family whose size model covers this one."""
        sizes = question.config.micro_batch_sizes
        return self._nearest(question, lambda size_model: size_model.covers(sizes))

    def _regroupable(self, question: Question) -> Question | None:
        """Return the closest one whose micro-batches tell of those of the question."""
        config = question.config
        return self._nearest(question, lambda size_model: can_regroup(size_model, config))

    def _covers_exactly(self, near: Question, question: Question) -> bool:
        size_model = self._answers.kept[near].size_model
        is_recorded = size_model is not None and size_model.is_exact(
            question.config.micro_batch_sizes
        )
        return is_recorded and not self._answers.is_doubted(near)

    def _nearest(
        self, question: Question, covers: Callable[["BatchSizeModel"], bool]
    ) -> Question | None:
        family, config = question.family, question.config
        found = [
            (self._answers.is_doubted(known), _distance(known.config, config), -age, known)
            for age, (known, prediction) in enumerate(self._answers.kept.items())
            if prediction.size_model is not None
            and known.family == family
            and covers(prediction.size_model)
        ]
        return min(found, key=lambda one: one[:3])[3] if found else None


def _distance(one: StepConfig, other: StepConfig) -> float:
    """Return the distance between two micro-batch sizes, in doublings."""
    return abs(math.log2(one.micro_batch_size / other.micro_batch_size))


# Predictions for a panel: interpolated at once where possible, exact from the worker soon
# after.
#
# The memory of other batch sizes follows from one prediction by sums, so a slider need not
# wait. Between the recorded sizes it is interpolated, and of another number of micro-
# batches it is estimated; the worker then predicts the exact setting. Only the newest
# question waits; there is no queue. An outdated prediction is given up, unless the newest
# question can be estimated from it and it does not take long. While nothing is asked for, the
# worker predicts the neighbours of the settings on screen, one after another, and then rests;
# it leaves them for whoever else waits for it. No widgets.

SETTLE_SECONDS = 0.15  # a slider at rest for this long gets an exact prediction
# an outdated prediction from which the newest question can be estimated may run this long
PATIENCE_SECONDS = 10.0
MOST_AHEAD = 12  # neighbours of one setting
# a model whose predictions take longer has none made ahead: a question would wait behind them
LONGEST_AHEAD_SECONDS = 4.0
LOOK_AGAIN_SECONDS = 0.5  # whether a measurement is over, before a prediction ahead


class Forecasts:
    """Every prediction of a panel, and the thread that asks the worker for the newest question.

    Args:
        workloads: by name.
        arrived: called in that thread with each answer of the worker.
        tell: called in that thread with what the worker is doing; "" once it was stopped.
    """

    def __init__(
        self,
        workloads: Mapping[str, Workload],
        arrived: Callable[[Estimate], None],
        tell: Callable[[str], None],
    ) -> None:
        self._workloads, self._arrived, self._tell = workloads, arrived, tell
        self._answers = Answers(self._frontier_of)
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

    def _frontier_of(self, question: Question) -> "BudgetFrontier | None":
        workload = self._workloads[question.workload_name]
        return known_frontier(workload, question.config, question.device, seed=0)

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

    def recorded(self, question: Question) -> list[Recorded]:
        """Return what a page can compute a question and its relatives from, the newest last."""
        with self._condition:
            return [
                Recorded(question=known, prediction=one, frontier=self._answers.plans_of(known))
                for known, one in self._answers.kept.items()
                if known.relatives == question.relatives
                and one.size_model is not None
                and one.result.outcome is Outcome.OK
            ]

    def take(self, question: Question, prediction: "Prediction") -> None:
        """Keep what a search has predicted, unless the worker has answered that here."""
        with self._condition:
            if question not in self._answers.kept:
                self._answers.add(question, prediction)

    def doubt(self, measured: StepResult) -> None:
        """Predict a workload on a device again if a measured run contradicts the predicted time.

        It is shown until the worker, which holds predictions against that run, has been asked anew.
        """
        setting = Question.of(measured)
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

    def ahead(self, questions: Sequence[Question], first: Sequence[Question] = ()) -> None:
        """Have the worker predict these while nothing is asked for; drop what was to come.

        Args:
            questions: those of which nothing can be said yet come first. There are none for a
                model whose predictions take long.
            first: come before them, however long they take.
        """
        with self._condition:
            if self._closed:
                return

            found = [question for question in questions if self._is_worth(question)]
            found = sorted(found, key=self._estimator.can_tell)[:MOST_AHEAD]
            missing = [
                one
                for one in first
                if one != self._asked
                and self._answers.is_open(one)  # not what was refused
                and not self._estimator.covers(one)
            ]
            self._wanted = None
            self._neighbours = list(dict.fromkeys([*missing, *found]))
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
        """Whether the worker is to leave its question: an outdated one, or one asked ahead."""
        wanted, asked = self._wanted, self._asked
        if wanted is None or asked is None:
            return self._closed or (self._is_ahead and is_waited_for())
        is_related = wanted.relatives == asked.relatives
        return time.monotonic() - self._asked_at > (PATIENCE_SECONDS if is_related else 0.0)

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

            if cancelled:
                self._tell("")  # what it was doing
            elif not self._closed:
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
        is_free = not (self._held or is_measuring() or is_predicting())
        return self._upcoming is not None and is_free

    def _has_changed(self, newest: Question | None) -> bool:
        return self._closed or self._upcoming != newest or not self._may_begin()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _predict(self, question: Question) -> "Prediction":
        from memlab.prediction.predict import Prediction

        try:
            return predict_with_size_model(
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
            return Prediction(result=result, size_model=None)

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
