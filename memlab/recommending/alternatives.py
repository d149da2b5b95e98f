"""What a predicted step says of other accumulation steps and memory budgets: no model runs.

A prediction of the whole batch comes with a `Forecast`, which gives other micro-batch sizes, and
one recording of the plain step gives the plans of all budgets. Both are estimates with a wider
uncertainty, good enough to decide what is worth an exact prediction.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memlab.arguments.units import format_bytes, format_percent, format_seconds
from memlab.config import StepConfig
from memlab.limits.judgement import CountedPeak
from memlab.planning.chain import Chain
from memlab.predicting.interpolation import interpolated
from memlab.predicting.predict import Prediction
from memlab.predicting.regrouping import can_regroup, regrouped
from memlab.predicting.replanning import can_replan, plan_at, replanned
from memlab.recommending.space import Settings, Space
from memlab.result import StepResult

MOST_DRAWN = 3  # micro-batches of an estimate, whose timeline nobody sees; the others are alike
SINGLE = 0.3  # wider for these: see test_an_estimate_of_single_samples_holds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alternative:
    """One way to train, with what it is predicted or estimated to cost.

    Attributes:
        settings: that were added to the base.
        result: of the step; an estimate has no timeline.
        exact: whether the result is a prediction of this very step, not an estimate.
        is_single: whether it is estimated for micro-batches of one sample by those of two.
    """

    settings: tuple[Settings, ...]
    result: StepResult
    exact: bool
    is_single: bool = False

    @property
    def seconds(self) -> float:
        """The time of the step; infinite if it is not known."""
        seconds = self.result.step_seconds
        return float("inf") if seconds is None else seconds

    @property
    def cost(self) -> float:
        """What the search compares; infinite if it is not known. See `cost_of`."""
        cost = cost_of(self.result)
        return float("inf") if cost is None else cost

    @property
    def rank(self) -> tuple[float, int, int]:
        """The least is the best: the least cost, then the simplest, then the smallest."""
        return self.cost, len(self.settings), counted(self.result).nbytes


def cost_of(result: StepResult) -> float | None:
    """Return the time of a step, or else the bytes that a rank sends; None if neither is known.

    A search compares one of them: where no time of communication is known, no step has a time. Nor
    has one whose shards are offloaded; it comes last, for it sends more bytes than others take
    seconds.
    """
    if result.step_seconds is not None:
        return result.step_seconds
    return None if result.sent_bytes is None else float(result.sent_bytes)


def counted(result: StepResult) -> CountedPeak:
    """Return the peak that counts against a limit, of a result that has one."""
    peak = result.counted_peak
    assert peak is not None
    return peak


def in_brief(result: StepResult) -> str:
    """Return what a step that fits costs, and its settings."""
    peak = counted(result)
    least = format_bytes(min(peak.nbytes, peak.needed_bytes or peak.nbytes))
    seconds = result.step_seconds
    time = "" if seconds is None else f"{format_seconds(seconds)} a step, "
    return f"{time}{least}, with {result.config}"


def time_beside(result: StepResult, fastest: StepResult, named: str = "") -> str:
    """Return how much slower a step is than the fastest, if the times are certain enough; else "".

    `named` is what the fastest is called here. Two times differ if their intervals, the predicted
    times with their uncertainties, do not meet.
    """
    times = result.step_seconds, fastest.step_seconds
    if times[0] is None or times[1] is None or result is fastest:
        return ""
    if not may_be_faster(result, fastest):
        return f"{format_percent(times[0] / times[1] - 1)} slower{' than ' * bool(named)}{named}"
    if not may_be_faster(fastest, result):
        return f"{format_percent(1 - times[0] / times[1])} faster{' than ' * bool(named)}{named}"
    width = max(map(time_width, (result, fastest)))
    return f"as fast{' as ' * bool(named)}{named}" + (
        f", within ± {format_percent(width)}" if width else ""
    )


def time_width(result: StepResult) -> float:
    """Return the relative uncertainty of the time of a step; 0 of a measured one."""
    return (result.uncertainty or {}).get("step_seconds", 0.0)


def may_be_faster(result: StepResult, other: StepResult) -> bool:
    """Return whether a step may be faster than another one, as far as both times are certain."""
    times = result.step_seconds, other.step_seconds
    if times[0] is None or times[1] is None:
        return True
    widths = time_width(result), time_width(other)
    return times[0] * (1.0 - widths[0]) <= times[1] * (1.0 + widths[1])


def may_fit(
    alternative: Alternative, start: StepResult, limit_bytes: int, bias: float | None
) -> bool:
    """Return whether an estimate fits if its peak is as low as its uncertainty allows.

    Args:
        alternative: the estimate.
        start: the recorded step.
        limit_bytes: that it may hold.
        bias: what others of this step were above their estimates; None if that is not known.
    """
    peak = counted(alternative.result)
    needed, taken = start.needed_bytes, start.peak_reserved_bytes
    share = needed / taken if needed and taken else 1.0
    width = peak.uncertainty
    if alternative.is_single and bias is not None:
        width -= SINGLE  # which bias it has is known
    return peak.nbytes * share * (bias or 1.0) * (1.0 - width) <= limit_bytes


def likely_fits(alternative: Alternative, limit_bytes: int) -> bool:
    """Return whether an alternative most likely fits."""
    peak = counted(alternative.result)
    width = peak.uncertainty - (SINGLE if alternative.is_single else 0.0)
    return peak.nbytes * (1.0 + width) <= limit_bytes


def alternatives_of(
    predicted: Prediction,
    settings: tuple[Settings, ...],
    space: Space,
    chain: Chain | None,
    kind: str,
) -> Iterator[Alternative]:
    """Yield the predicted step first, then estimates of other accumulation steps and budgets.

    Args:
        predicted: the step with the base's own accumulation steps and budget.
        settings: that it adds to the base.
        space: the other accumulation steps and budgets.
        chain: the plans of this step; None if there are none.
        kind: of the device, "cpu" or "cuda".
    """
    config = predicted.result.config
    own = config.accumulation_steps
    # of several ranks another number of micro-batches is a step of its own
    counts = space.accumulation_steps if own in space.accumulation_steps else (own,)
    for steps in sorted(counts, key=lambda steps: (steps != own, steps)):
        wanted = replace(config, accumulation_steps=steps)
        divided = _divided(predicted, wanted)
        is_single = divided is None and wanted.micro_batch_size == 1
        if is_single:
            divided = _of_single_samples(predicted, wanted)
        if divided is None:
            continue
        is_own = steps == own
        added = settings if is_own else (*settings, {"accumulation_steps": steps})
        light = divided if is_own else replace(divided, timeline=None)  # of hundreds
        yield Alternative(settings=added, result=light, exact=is_own, is_single=is_single)
        for one in _planned(divided, added, space, chain, config, kind) if chain else ():
            yield replace(one, is_single=is_single)


def _divided(predicted: Prediction, config: StepConfig) -> StepResult | None:
    """Return what other accumulation steps cost; None if the forecast cannot tell."""
    forecast = predicted.forecast
    assert forecast is not None  # the outcome is ok
    if config == predicted.result.config:
        return predicted.result
    if forecast.covers(config.micro_batch_sizes):
        return interpolated(predicted, config)
    if can_regroup(forecast, config):
        return regrouped(predicted, config, most_drawn=MOST_DRAWN)
    return None


def _of_single_samples(predicted: Prediction, config: StepConfig) -> StepResult | None:
    """Return about what micro-batches of one sample cost, by those of two; None if not known.

    One sample may run other operators than two, and `Forecast.covers` does not allow it. So this
    only tells what is worth an exact prediction. A sample takes no less time alone than its share
    of a pair, which a step with twice the batch tells.
    """
    forecast, pairs = predicted.forecast, replace(config, batch_size=2 * config.batch_size)
    if forecast is None or not can_regroup(forecast, pairs):
        return None
    found = regrouped(predicted, config, most_drawn=MOST_DRAWN)
    of_pairs = regrouped(predicted, pairs, most_drawn=MOST_DRAWN).step_seconds
    seconds = found.step_seconds
    if seconds is not None and of_pairs is not None:
        seconds = max(seconds, of_pairs / 2)
    return replace(
        found,
        step_seconds=seconds,
        samples_per_second=config.batch_size / seconds if seconds else None,
        uncertainty={name: w + SINGLE for name, w in (found.uncertainty or {}).items()},
    )


def _planned(
    divided: StepResult,
    settings: tuple[Settings, ...],
    space: Space,
    chain: Chain,
    planned: StepConfig,
    kind: str,
) -> Iterator[Alternative]:
    """Yield what other budgets cost: of those with the same plan only the largest."""
    before = plan_at(chain, divided.config)
    for budget in sorted(space.budgets, reverse=True):
        config = replace(divided.config, memory_budget=budget)
        plan = plan_at(chain, config)
        if plan is before or not can_replan(config, kind):
            continue
        before = plan
        result = replace(replanned(divided, config, chain, planned), timeline=None)
        added = (*settings, {"memory_budget": budget})
        yield Alternative(settings=added, result=result, exact=False)
