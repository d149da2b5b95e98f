"""`Estimator`: what the worker's answers say of any other question.

Of other batch sizes an answer tells by interpolation, of other numbers of micro-batches and of
other budgets it gives an estimate. No thread and no lock, as in `answers.py`.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from memlab._panel.answers import Answers
from memlab._panel.questions import Estimate, How, Question
from memlab.config import StepConfig
from memlab.predicting.interpolation import interpolated
from memlab.predicting.regrouping import can_regroup, regrouped
from memlab.predicting.replanning import can_replan, replanned
from memlab.result import Outcome

if TYPE_CHECKING:
    from memlab.predicting.forecast import Forecast


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
                question=question, result=found.result, exact=is_sure, forecast=found.forecast
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
                forecast=base.forecast,
                how=How.PREDICTED if exact else How.INTERPOLATED,
            )
        if (near := self._regroupable(question)) is not None:
            result = regrouped(self._answers.kept[near], config)
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
        chain = self._answers.plans_of(planned)
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

        has_plans = self._answers.plans_of(question) is not None
        found = [
            known
            for known, prediction in self._answers.kept.items()
            if prediction.forecast is not None
            and known.relatives == question.relatives
            and known.family != question.family
            and self._can_be_moved(known, config)
            and (has_plans or self._answers.plans_of(known) is not None)
        ]
        return min(found, key=partial(self._remoteness, question), default=None)

    def _can_be_moved(self, known: Question, config: StepConfig) -> bool:
        """Return whether an answer says something of the micro-batches of a config."""
        forecast = self._answers.kept[known].forecast
        there = dataclasses.replace(config, memory_budget=known.config.memory_budget)
        return forecast is not None and (
            forecast.covers(config.micro_batch_sizes) or can_regroup(forecast, there)
        )

    def _remoteness(self, question: Question, known: Question) -> tuple[bool, float, float]:
        """Return a key that is the least for the answer that says most of a question."""
        one, other = question.config, known.config
        budgets = abs(one.memory_budget - other.memory_budget)
        return self._answers.is_doubted(known), _distance(one, other), budgets

    def _covering(self, question: Question) -> Question | None:
        """Return the closest question of the same family whose forecast covers this one."""
        sizes = question.config.micro_batch_sizes
        return self._nearest(question, lambda forecast: forecast.covers(sizes))

    def _regroupable(self, question: Question) -> Question | None:
        """Return the closest one whose micro-batches tell of those of the question."""
        config = question.config
        return self._nearest(question, lambda forecast: can_regroup(forecast, config))

    def _covers_exactly(self, near: Question, question: Question) -> bool:
        forecast = self._answers.kept[near].forecast
        is_recorded = forecast is not None and forecast.is_exact(question.config.micro_batch_sizes)
        return is_recorded and not self._answers.is_doubted(near)

    def _nearest(self, question: Question, covers: Callable[["Forecast"], bool]) -> Question | None:
        family, config = question.family, question.config
        found = [
            (self._answers.is_doubted(known), _distance(known.config, config), -age, known)
            for age, (known, prediction) in enumerate(self._answers.kept.items())
            if prediction.forecast is not None
            and known.family == family
            and covers(prediction.forecast)
        ]
        return min(found, key=lambda one: one[:3])[3] if found else None


def _distance(one: StepConfig, other: StepConfig) -> float:
    """Return the distance between two micro-batch sizes, in doublings."""
    return abs(math.log2(one.micro_batch_size / other.micro_batch_size))
