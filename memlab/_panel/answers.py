"""`Answers`: what the worker has answered.

A question has the same answer as another one if both budgets have the same plan. What answers say
of further questions is in `estimating.py`.

Only so many are kept; the one that was looked at longest ago goes first. No thread and no lock:
`forecasts.py` has both.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from memlab._panel.questions import Question
from memlab.predicting.replanning import plan_at, renamed
from memlab.result import Outcome, StepResult

if TYPE_CHECKING:
    from memlab.planning.chain import Chain
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

    @property
    def kept(self) -> "Mapping[Question, Prediction]":
        """Every answer, that which was looked at last comes last."""
        return self._kept

    def get(self, question: Question) -> "Prediction | None":
        """Return the answer to this question; None if there is none."""
        key = self._key(question)
        if key is None or key == question:
            return None if key is None else self._kept[key]

        prediction, chain = self._kept[key], self.plans_of(question)
        if chain is None:
            return None
        result = renamed(prediction.result, question.config, chain)
        return dataclasses.replace(prediction, result=result)

    def _key(self, question: Question) -> Question | None:
        """Return the answered question that has the answer to this one: itself, or its plan."""
        if question in self._kept:
            return question
        chain = self.plans_of(question) if question.config.is_planned else None
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

    def plans_of(self, question: Question) -> "Chain | None":
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
