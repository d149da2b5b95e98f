"""Which of the settings that were found are measured, where the device is in this machine.

Predicted times of one number format are wrong by much the same factor, since its kernels are the
same; those of two formats are not. So the best of each format that may be the fastest is measured
first. What these runs took corrects the predicted times of their format, and the fastest by that is
measured last.

Other programs make a run slower and never faster. So if the repeats of the two that may be the
fastest overlap, both are run once more, and of each the faster run counts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memlab.api import measure
from memlab.config import Precision, StepConfig
from memlab.recommending.alternatives import may_be_faster
from memlab.recommending.reasons import reason_of_limit
from memlab.recommending.recommendations import Recommendation
from memlab.result import Outcome, StepResult
from memlab.running import Ended

REPEATS = 5  # timed steps of each
FORMATS_FIRST = 2  # this many runs at least go to different number formats
Key = tuple[str, StepConfig]


@dataclass(slots=True)
class Confirmed:
    """What was measured.

    Attributes:
        kept: what fits, the fastest first.
        dropped: what did not fit or failed, with what was predicted.
        factors: measured over predicted times, by the number formats that were measured, of each
            workload: of the fastest repeats, the least; None where no run has a time.
        num_runs: how often something was measured.
    """

    kept: list[Recommendation] = field(default_factory=list)
    dropped: list[Recommendation] = field(default_factory=list)
    factors: dict[tuple[str, Precision], float | None] = field(default_factory=dict)
    num_runs: int = 0

    @property
    def keys(self) -> set[Key]:
        """The settings that were measured."""
        return {key_of(one.result) for one in (*self.kept, *self.dropped)}

    def seconds(self, one: Recommendation) -> float:
        """Return the predicted time, corrected by runs of its format; infinite if not known."""
        seconds = one.predicted.step_seconds
        factor = self.factors.get(_format_of(one)) or 1.0
        return float("inf") if seconds is None else factor * seconds

    def add(self, one: Recommendation, result: StepResult) -> None:
        """Note what a run has found.

        Of two runs of a setting the faster one is kept, and also one that could not be repeated,
        unless the second had no room.
        """
        self.num_runs += 1
        key = key_of(one.result)
        before = [kept for kept in self.kept if key_of(kept.result) == key]
        has_no_room = result.outcome is Outcome.OUT_OF_MEMORY or result.fits is False
        is_ok = result.outcome is Outcome.OK and bool(result.fits)
        if before and not is_ok and not has_no_room:
            return
        self.kept = [kept for kept in self.kept if key_of(kept.result) != key]
        if is_ok:
            self.kept.append(min([*before, replace(one, result=result)], key=_median))
        else:
            self.dropped.append(replace(one, result=result))
        self._correct(one, result)

    def _correct(self, one: Recommendation, result: StepResult) -> None:
        of_which, predicted = _format_of(one), one.predicted.step_seconds
        if not result.step_seconds_all or not predicted:
            self.factors.setdefault(of_which, None)
            return
        factor = min(result.step_seconds_all) / predicted
        self.factors[of_which] = min(factor, self.factors.get(of_which) or factor)


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
        options: of `measure`, such as the device; the workload is that of each.

    Raises:
        Ended: it was cancelled.
    """
    found, limit = Confirmed(), int(limit_bytes * (1.0 - headroom))

    def run(one: Recommendation) -> None:
        own = options if one.workload is None else {**options, "workload": one.workload}
        result = measure(config=one.config, repeats=REPEATS, memory_limit=limit, **own)
        if result.outcome is Outcome.CANCELLED:
            raise Ended(result.outcome, result.message)
        found.add(one, result)

    for number in range(most):
        is_likely_next = not certain if number == 0 else not found.keys & _keys(likely)
        left = [
            one
            for one in [*certain, *(likely if is_likely_next else ())]
            if key_of(one.result) not in found.keys
        ]
        if not left:
            break
        of_formats = _of_other_formats(left, found, [*certain, *likely])
        is_for_formats = number < max(FORMATS_FIRST, most - 1)
        run(min(of_formats if of_formats and is_for_formats else left, key=found.seconds))
    for one in _unclear(found):
        run(one)

    for at, one in enumerate(found.kept):
        last = reason_of_limit(one.result, limit_bytes, headroom)
        found.kept[at] = replace(one, reasons=(*one.reasons[:-1], last))
    found.kept.sort(key=_median)
    return found


def _of_other_formats(
    left: Sequence[Recommendation], found: Confirmed, every: Sequence[Recommendation]
) -> list[Recommendation]:
    """Return what is of a number format that was not measured yet, and may be the fastest."""
    fastest = min(every, key=lambda one: one.predicted.step_seconds or float("inf"))
    return [
        one
        for one in left
        if _format_of(one) not in found.factors and may_be_faster(one.predicted, fastest.predicted)
    ]


def _unclear(found: Confirmed) -> list[Recommendation]:
    """Return the two that may be the fastest, if their repeats do not tell which one is.

    A whole run may have been slowed down, so a setting may be as fast as its predicted time, as
    the fastest run of its format corrects it.
    """

    def least(one: Recommendation) -> float:
        return min([found.seconds(one), *one.result.step_seconds_all])

    first_two = sorted(found.kept, key=least)[:2]
    if len(first_two) < 2:
        return []
    times = [one.result.step_seconds_all for one in first_two]
    is_clear = max(times[0], default=0.0) < least(first_two[1])
    return [] if is_clear else first_two


def _median(one: Recommendation) -> float:
    seconds = one.result.step_seconds
    return float("inf") if seconds is None else seconds


def key_of(result: StepResult) -> Key:
    """Return of which workload a step is, and its settings."""
    return result.workload_name, result.config


def _format_of(one: Recommendation) -> tuple[str, Precision]:
    """Return the workload and the precision: a workload as built has formats of its own."""
    return one.predicted.workload_name, one.config.precision


def _keys(some: Collection[Recommendation]) -> set[Key]:
    return {key_of(one.result) for one in some}


def why_dropped(one: Recommendation, *, was_close: bool) -> str:
    """Return a sentence on a setting that was measured and is not recommended."""
    before = "was too close to say" if was_close else "was predicted to fit"
    result = one.result
    is_too_large = result.outcome is Outcome.OUT_OF_MEMORY or result.fits is False
    how = "did not fit when it was measured" if is_too_large else "could not be measured"
    return f"{result.config} {before}, and {how}: {result.message}"
