"""Which of the settings that were found are measured, where the device is in this machine.

Predicted times of one number format are wrong by much the same factor, since its kernels are the
same; those of two formats are not. So the best of each format that may be the fastest is measured
first. What these runs took corrects the predicted times of their format, and the fastest by that is
measured last.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memlab.api import measure
from memlab.config import StepConfig
from memlab.recommending.alternatives import may_be_faster
from memlab.recommending.reasons import reason_of_limit
from memlab.recommending.recommendations import Recommendation
from memlab.result import Outcome, StepResult
from memlab.running import Ended

REPEATS = 5  # timed steps of each
FORMATS_FIRST = 2  # this many runs at least go to different number formats


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
    def configs(self) -> set[StepConfig]:
        """The settings that were measured."""
        return {one.config for one in (*self.kept, *self.dropped)}

    def seconds(self, one: Recommendation) -> float:
        """Return the predicted time, corrected by runs of its format; infinite if not known."""
        seconds = one.predicted.step_seconds
        factor = self.factors.get(one.config.precision, 1.0)
        return float("inf") if seconds is None else factor * seconds

    def add(self, one: Recommendation, result: StepResult) -> None:
        """Note what a run has found."""
        is_kept = result.outcome is Outcome.OK and bool(result.fits)
        (self.kept if is_kept else self.dropped).append(replace(one, result=result))
        seconds = result.step_seconds, one.predicted.step_seconds
        known = seconds[0] / seconds[1] if seconds[0] and seconds[1] else 1.0
        self.factors.setdefault(one.config.precision, known)


def confirmed(
    certain: Sequence[Recommendation],
    likely: Sequence[Recommendation],
    most: int,
    *,
    limit_bytes: int,
    headroom: float,
    options: dict[str, Any],
) -> Confirmed:
    """Measure some of what was found.

    Args:
        certain: predicted to fit, the fastest first.
        likely: too close to say, but more likely to fit; one of them is measured at most, and not
            before one that is certain.
        most: how many to measure.
        limit_bytes: that a step may hold, before the headroom is taken off.
        headroom: the share of it that is to stay free.
        options: of `measure`, such as the workload and the device.

    Raises:
        Ended: it was cancelled.
    """
    found, limit = Confirmed(), int(limit_bytes * (1.0 - headroom))
    for number in range(most):
        is_likely_next = not certain if number == 0 else not found.configs & _configs(likely)
        left = [
            one
            for one in [*certain, *(likely if is_likely_next else ())]
            if one.config not in found.configs
        ]
        if not left:
            break
        of_formats = _of_other_formats(left, found, [*certain, *likely])
        is_for_formats = number < max(FORMATS_FIRST, most - 1)
        one = min(of_formats if of_formats and is_for_formats else left, key=found.seconds)
        result = measure(config=one.config, repeats=REPEATS, memory_limit=limit, **options)
        if result.outcome is Outcome.CANCELLED:
            raise Ended(result.outcome, result.message)
        found.add(one, result)

    for at, one in enumerate(found.kept):
        last = reason_of_limit(one.result, limit_bytes, headroom)
        found.kept[at] = replace(one, reasons=(*one.reasons[:-1], last))
    found.kept.sort(key=lambda one: one.result.step_seconds or float("inf"))
    return found


def _of_other_formats(
    left: Sequence[Recommendation], found: Confirmed, every: Sequence[Recommendation]
) -> list[Recommendation]:
    """Return what is of a number format that was not measured yet, and may be the fastest."""
    fastest = min(every, key=lambda one: one.predicted.step_seconds or float("inf"))
    return [
        one
        for one in left
        if one.config.precision not in found.factors
        and may_be_faster(one.predicted, fastest.predicted)
    ]


def _configs(some: Collection[Recommendation]) -> set[StepConfig]:
    return {one.config for one in some}


def why_dropped(one: Recommendation, *, was_close: bool) -> str:
    """Return a sentence on a setting that was measured and is not recommended."""
    before = "was too close to say" if was_close else "was predicted to fit"
    result = one.result
    is_too_large = result.outcome is Outcome.OUT_OF_MEMORY or result.fits is False
    how = "did not fit when it was measured" if is_too_large else "could not be measured"
    return f"{result.config} {before}, and {how}: {result.message}"
