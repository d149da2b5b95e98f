"""`Question`, a step to predict, and `Estimate`, the best answer to it so far. No widgets."""

import dataclasses
import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from memlab.config import StepConfig
from memlab.result import Outcome, StepResult

if TYPE_CHECKING:
    from memlab.predicting.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Question:
    """A step to predict: the name of a workload, a config and the name of a device."""

    workload_name: str
    config: StepConfig
    device: str

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
        here = (result.workload_name, result.config, result.device)
        return here == (self.workload_name, self.config, self.device)


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
        forecast: the forecast that gave the result; None if there is none.
        how: how the result was found.
    """

    question: Question
    result: StepResult
    exact: bool
    forecast: "Forecast | None" = None
    how: How = How.PREDICTED

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
