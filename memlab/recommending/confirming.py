"""Which of the settings that were found are measured, where the device is in this machine.

Predicted times of one number format are wrong by much the same factor, since its kernels are the
same; those of two formats are not. So the best of each format is measured first. What these runs
took corrects the predicted times of their format, and the fastest by that is measured next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memlab.api import measure
from memlab.limits.judgement import Judgement
from memlab.recommending.reasons import reason_of_limit
from memlab.recommending.recommendations import Recommendation
from memlab.result import Outcome, StepResult
from memlab.running import Ended

REPEATS = 5  # timed steps of each


@dataclass(slots=True)
class Confirmed:
    """What was measured.

    Attributes:
        kept: what fits, the fastest first.
        dropped: what did not fit or failed, with what was predicted.
        factors: measured over predicted times, by the number formats that were measured.
    """

    kept: list[Recommendation] = field(default_factory=list)
    dropped: list[Recommendation] = field(default_factory=list)
    factors: dict[Any, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many steps were measured."""
        return len(self.kept) + len(self.dropped)

    def turn(self, one: Recommendation) -> tuple[bool, float]:
        """The least is measured next: a format that was not measured yet, then the fastest."""
        number_format, seconds = one.config.precision, one.predicted.step_seconds
        factor = self.factors.get(number_format, 1.0)
        return number_format in self.factors, float("inf") if seconds is None else factor * seconds

    def add(self, one: Recommendation, result: StepResult) -> None:
        """Note what a run has found."""
        is_kept = result.outcome is Outcome.OK and bool(result.fits)
        (self.kept if is_kept else self.dropped).append(replace(one, result=result))
        seconds = result.step_seconds, one.predicted.step_seconds
        if seconds[0] and seconds[1]:
            self.factors[one.config.precision] = seconds[0] / seconds[1]
        elif result.outcome is not Outcome.OUT_OF_MEMORY:  # a smaller one of this format may run
            self.factors.setdefault(one.config.precision, 1.0)


def confirmed(
    candidates: Sequence[Recommendation],
    most: int,
    *,
    limit_bytes: int,
    headroom: float,
    options: dict[str, Any],
) -> Confirmed:
    """Measure some of what was found.

    Args:
        candidates: what was found, the fastest first, predicted.
        most: how many to measure.
        limit_bytes: that a step may hold, with the headroom.
        headroom: the share of it that is to stay free.
        options: of `measure`, such as the workload and the device.

    Raises:
        Ended: it was cancelled.
    """
    found, waiting = Confirmed(), list(candidates)
    limit = int(limit_bytes * (1.0 - headroom))
    while waiting and found.count < most:
        one = min(waiting, key=found.turn)
        waiting.remove(one)
        result = measure(config=one.config, repeats=REPEATS, memory_limit=limit, **options)
        if result.outcome is Outcome.CANCELLED:
            raise Ended(result.outcome, result.message)
        found.add(one, result)

    for at, one in enumerate(found.kept):
        last = reason_of_limit(one.result, limit_bytes, headroom)
        found.kept[at] = replace(one, reasons=(*one.reasons[:-1], last))
    found.kept.sort(key=lambda one: one.result.step_seconds or float("inf"))
    return found


def why_dropped(one: Recommendation) -> str:
    """Return a sentence on a setting that was measured and is not recommended."""
    before = "was too close to say" if one.predicted.fit is Judgement.TOO_CLOSE else (
        "was predicted to fit"
    )  # fmt: skip
    result = one.result
    is_too_large = result.outcome is Outcome.OUT_OF_MEMORY or result.fits is False
    how = "did not fit when it was measured" if is_too_large else "could not be measured"
    return f"{result.config} {before}, and {how}: {result.message}"
