"""`Answers`: what the worker has answered, and what that says of any other question.

A question has the same answer as another one if both budgets have the same plan. Of other batch
sizes an answer tells by interpolation, of other numbers of micro-batches and of other budgets it
gives an estimate.

Only so many are kept; the one that was looked at longest ago goes first. No thread and no lock:
`forecasts.py` has both.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from memlab._panel.questions import Estimate, How, Question
from memlab.config import StepConfig
from memlab.predicting.interpolation import interpolated
from memlab.predicting.regrouping import can_regroup, regrouped
from memlab.predicting.replanning import can_replan, plan_at, renamed, replanned
from memlab.result import Outcome, StepResult

if TYPE_CHECKING:
    from memlab.planning.chain import Chain
    from memlab.predicting.forecast import Forecast
    from memlab.predicting.predict import Prediction

MOST_KEPT = 128  # each from a half to two MB


class Answers:
    """Predictions of the worker by question.

    Args:
        chain_of: returns the plans of the budgets of a question, if they are known.
    """

    def __init__(self, chain_of: "Callable[[Question], Chain | None]") -> None:
        self._chain_of = chain_of
        self._kept: dict[Question, Prediction] = {}  # the one looked at last comes last
        self._doubted: set[Question] = set()  # those of them that the worker predicts again

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)

    def get(self, question: Question) -> "Prediction | None":
        """Return the answer to this question; None if there is none."""
        key = self._key(question)
        if key is None or key == question:
            return None if key is None else self._kept[key]

        prediction, chain = self._kept[key], self._chain(question)
        if chain is None:
            return None
        result = renamed(prediction.result, question.config, chain)
        return dataclasses.replace(prediction, result=result)

    def _key(self, question: Question) -> Question | None:
        """Return the answered question that has the answer to this one: itself, or its plan."""
        if question in self._kept:
            return question
        chain = self._chain(question) if question.config.is_planned else None
        if chain is None:
            return None

        plan = plan_at(chain, question.config)
        return next(
            (
                known
                for known, prediction in self._kept.items()
                if known.relatives == question.relatives
                and known == question.with_budget(known.config.memory_budget)
                and known.config.is_planned
                and plan_at(chain, known.config) is plan
                and prediction.result.outcome is Outcome.OK  # what ended early tells of itself only
            ),
            None,
        )

    def _chain(self, question: Question) -> "Chain | None":
        """Return the plans of a question if they are known, and if there is one that recomputes."""
        chain = self._chain_of(question)
        return chain if chain is not None and len(chain.plans) > 1 else None

    def of(self, workload_name: str, device: str) -> "list[Prediction]":
        """Return every answer about a workload on a device."""
        there = (workload_name, device)
        return [
            prediction
            for question, prediction in self._kept.items()
            if (question.workload_name, question.device) == there
        ]

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

    def is_exact(self, question: Question) -> bool:
        """Return whether the worker could say nothing more of a question."""
        if not self.is_open(question):
            return True
        base = self._covering(question)
        return base is not None and self._covers_exactly(base, question)

    def can_tell(self, question: Question) -> bool:
        """Return whether something is known of a question, be it an estimate."""
        return (
            not self.is_open(question)
            or self._covering(question) is not None
            or self._regroupable(question) is not None
            or self._replannable(question) is not None
        )

    def best(self, question: Question) -> Estimate | None:
        """Return what is known of a question; None if that is nothing."""
        found = self.get(question)
        if found is not None:
            is_sure = not self.is_open(question)
            return Estimate(
                question=question, result=found.result, exact=is_sure, forecast=found.forecast
            )
        return self._of_same_budget(question) or self._of_other_budget(question)

    def _of_same_budget(self, question: Question) -> Estimate | None:
        """Return what an answer about another batch size or accumulation says of a question."""
        config = question.config
        if (near := self._covering(question)) is not None:
            base, exact = self._kept[near], self._covers_exactly(near, question)
            return Estimate(
                question=question,
                result=interpolated(base, config),
                exact=exact,
                forecast=base.forecast,
                how=How.PREDICTED if exact else How.INTERPOLATED,
            )
        if (near := self._regroupable(question)) is not None:
            result = regrouped(self._kept[near], config)
            return Estimate(question=question, result=result, exact=False, how=How.ESTIMATED)
        return None

    def _of_other_budget(self, question: Question) -> Estimate | None:
        """Return what an answer about another memory budget says of a question."""
        known = self._replannable(question)
        if known is None:
            return None

        same = question.with_budget(known.config.memory_budget)
        exact = self._kept.get(same)
        of_batch = None if exact else self._of_same_budget(same)
        base = exact.result if exact else of_batch.result if of_batch else None
        planned = question if self._chain(question) else known
        chain = self._chain(planned)
        if base is None or chain is None or base.outcome is not Outcome.OK:
            return None
        result = replanned(base, question.config, chain, planned.config)
        return Estimate(question=question, result=result, exact=False, how=How.ESTIMATED)

    def _replannable(self, question: Question) -> Question | None:
        """Return the answered question of another budget that says most of this one.

        The plans of one of them must be known.
        """
        config = question.config
        kind = "cpu" if question.device == "cpu" else "cuda"
        if not can_replan(config, kind):
            return None

        has_plans = self._chain(question) is not None
        found = [
            known
            for known, prediction in self._kept.items()
            if prediction.forecast is not None
            and known.relatives == question.relatives
            and known.family != question.family
            and self._can_be_moved(known, config)
            and (has_plans or self._chain(known) is not None)
        ]
        return min(found, key=partial(self._remoteness, question), default=None)

    def _can_be_moved(self, known: Question, config: StepConfig) -> bool:
        """Return whether an answer says something of the micro-batches of a config."""
        forecast = self._kept[known].forecast
        there = dataclasses.replace(config, memory_budget=known.config.memory_budget)
        return forecast is not None and (
            forecast.covers(config.micro_batch_sizes) or can_regroup(forecast, there)
        )

    def _remoteness(self, question: Question, known: Question) -> tuple[bool, float, float]:
        """Return a key that is the least for the answer that says most of a question."""
        one, other = question.config, known.config
        budgets = abs(one.memory_budget - other.memory_budget)
        return known in self._doubted, _distance(one, other), budgets

    def doubt(self, workload_name: str, device: str) -> None:
        """Have everything predicted again for a workload on a device."""
        where = (workload_name, device)
        self._doubted |= {one for one in self._kept if (one.workload_name, one.device) == where}

    def _covering(self, question: Question) -> Question | None:
        """Return the closest question of the same family whose forecast covers this one."""
        sizes = question.config.micro_batch_sizes
        return self._nearest(question, lambda forecast: forecast.covers(sizes))

    def _regroupable(self, question: Question) -> Question | None:
        """Return the closest one whose micro-batches tell of those of the question."""
        config = question.config
        return self._nearest(question, lambda forecast: can_regroup(forecast, config))

    def _covers_exactly(self, near: Question, question: Question) -> bool:
        forecast = self._kept[near].forecast
        is_recorded = forecast is not None and forecast.is_exact(question.config.micro_batch_sizes)
        return is_recorded and near not in self._doubted

    def _nearest(self, question: Question, covers: Callable[["Forecast"], bool]) -> Question | None:
        family, config = question.family, question.config
        found = [
            (known in self._doubted, _distance(known.config, config), -age, known)
            for age, (known, prediction) in enumerate(self._kept.items())
            if prediction.forecast is not None
            and known.family == family
            and covers(prediction.forecast)
        ]
        return min(found, key=lambda one: one[:3])[3] if found else None


def is_within(measured: StepResult, predicted: StepResult) -> bool:
    """Return whether a measured time lies within a prediction's uncertainty; True without times."""
    if not measured.step_seconds_all or not predicted.step_seconds:
        return True
    width = (predicted.uncertainty or {}).get("step_seconds", 0.0)
    error = min(measured.step_seconds_all) / predicted.step_seconds - 1.0
    return abs(error) <= width


def _distance(one: StepConfig, other: StepConfig) -> float:
    """Return the distance between two micro-batch sizes, in doublings."""
    return abs(math.log2(one.micro_batch_size / other.micro_batch_size))
