"""The search: which steps are predicted, the most promising first.

The search begins with the settings as they are, and adds one setting at a time: first what may make
a step faster (number format, fused optimizer), then what only saves memory. Each such step is
predicted once; its other accumulation steps and budgets are estimated by arithmetic. A setting that
changes nothing here is dropped. A technique that only saves memory makes no step faster, so it is
not added to a step that fits, and the search is over once the next step to look at is slower than
what has been found, or once several steps in a row have brought nothing faster.

Only an exact prediction decides whether a setting fits. Left out: compiled steps, which cannot be
predicted, and channels last.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any

from memlab.api import predict_with_forecast
from memlab.config import StepConfig
from memlab.devices.cards import Target
from memlab.limits.judgement import Judgement
from memlab.planning.chain import Chain
from memlab.planning.plans import chain_for
from memlab.predicting.predict import Prediction
from memlab.recommending.alternatives import Alternative, alternatives_of, counted
from memlab.recommending.space import Settings, Space, can_be_planned, with_settings
from memlab.result import Outcome, StepResult
from memlab.running import Ended, Run
from memlab.techniques import every
from memlab.techniques.technique import in_words
from memlab.workload import Workload

MOST_STEPS = 40  # that are recorded; each takes one or two seconds
PATIENCE = 8  # steps in a row that are recorded for nothing, once a setting has been found
SAME_TIME = 1.02  # a step that saves memory alone and is predicted faster than this is no slower


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What is searched for, and where.

    Attributes:
        workload: what is trained.
        space: what may be changed.
        device: as `memlab.predict` takes it.
        target: the same device.
        limit_bytes: that a step may hold, the headroom taken off.
        most: how many settings to find.
        seed: set before the model, the batch and each step.
        options: of `predict_with_forecast`: the time limit, and how to tell and stop.
        run: how a plan is made.
    """

    workload: Workload
    space: Space
    device: Any
    target: Target
    limit_bytes: int
    most: int
    seed: int
    options: dict[str, Any]
    run: Run


@dataclass(slots=True)
class Found:
    """What the search found.

    Attributes:
        fitting: predicted to fit, the fastest first.
        close: predicted to lie too near to the limit to say.
        tried: every step that was predicted or estimated.
        starts: results by the settings that were added to the base, without those of arithmetic.
        refused: messages of settings that this model or device refuses, by setting; "" is the base.
        idle: settings that change nothing when they are added to the base.
        is_whole: whether the search ended because no step was left that may be faster.
    """

    fitting: list[Alternative] = field(default_factory=list)
    close: list[Alternative] = field(default_factory=list)
    tried: list[Alternative] = field(default_factory=list)
    starts: dict[tuple[str, ...], StepResult] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)
    is_whole: bool = True

    def worst_seconds(self, most: int) -> float:
        """Return the time that a further setting has to beat; infinite while some are missing."""
        return self.fitting[most - 1].seconds if len(self.fitting) >= most else float("inf")


@dataclass(order=True, slots=True)
class _Waiting:
    """A step to look at; those with the shortest known bound come first."""

    bound_seconds: float
    number: int
    settings: tuple[Settings, ...] = field(compare=False)
    parent: StepResult | None = field(compare=False)


def key_of(settings: tuple[Settings, ...]) -> tuple[str, ...]:
    """Return settings as a key that does not depend on their order."""
    return tuple(sorted(f"{name}={value}" for one in settings for name, value in one.items()))


def search(goal: Goal) -> Found:
    """Return the settings that fit, the fastest first."""
    found, numbers = Found(), itertools.count()
    waiting = [_Waiting(0.0, next(numbers), (), None)]
    looked = in_vain = 0
    while waiting:
        next_one = heapq.heappop(waiting)
        if next_one.bound_seconds > found.worst_seconds(goal.most):
            break
        is_in_vain = next_one.bound_seconds > 0.0 and found.fitting and in_vain >= PATIENCE
        if looked >= MOST_STEPS or is_in_vain:
            found.is_whole = False
            break
        best = found.worst_seconds(1)
        predicted = _predicted(goal, next_one, found)
        looked += 1
        in_vain += 1
        if predicted is None or predicted.result.outcome is not Outcome.OK:
            continue

        alternatives = _alternatives(goal, next_one.settings, predicted)
        found.tried += alternatives
        _confirm(goal, predicted, alternatives, found)
        in_vain = 0 if found.worst_seconds(1) < best else in_vain
        fits = _exact(goal, predicted, alternatives[0]).fit is Judgement.FITS
        bound = (predicted.result.step_seconds or 0.0) / SAME_TIME
        for settings in goal.space.with_one_more(next_one.settings, savers=not fits):
            if _name_of_last(settings) in found.idle:
                found.is_whole = False  # it may save something beside other settings
                continue
            if _is_refused(goal, settings, found):
                continue
            least = 0.0 if goal.space.is_faster(settings[-1]) else bound
            heapq.heappush(waiting, _Waiting(least, next(numbers), settings, predicted.result))

    return found


def _predicted(goal: Goal, waiting: _Waiting, found: Found) -> Prediction | None:
    """Return the prediction of a step; None if it is refused, or does nothing here."""
    config = with_settings(goal.space.base, waiting.settings)
    name = _name_of_last(waiting.settings)
    is_alone = len(waiting.settings) <= 1
    predicted = predict_with_forecast(goal.workload, config, goal.device, **goal.options)
    result, parent = predicted.result, waiting.parent
    if result.outcome is Outcome.CANCELLED:
        raise Ended(result.outcome, result.message)
    if result.outcome is not Outcome.OK and is_alone:
        found.refused[name] = result.message
    if result.outcome is Outcome.OK and parent is not None and _is_idle(result, parent):
        if is_alone:
            found.idle.add(name)
        return None
    found.starts[key_of(waiting.settings)] = result
    return predicted


def _is_refused(goal: Goal, settings: tuple[Settings, ...], found: Found) -> bool:
    """Return whether a step is known to be refused, by its settings alone or by the model."""
    config = with_settings(goal.space.base, settings)
    return _name_of_last(settings) in found.refused or every.is_refused(config, goal.target.kind)


def _name_of_last(settings: tuple[Settings, ...]) -> str:
    return in_words(settings[-1]) if settings else ""


def _is_idle(result: StepResult, parent: StepResult) -> bool:
    """Return whether one more setting saves neither memory nor time."""
    times = result.step_seconds, parent.step_seconds
    if times[0] and times[1] and times[0] < times[1] / SAME_TIME:
        return False
    pairs = (
        (result.peak_allocated_bytes, parent.peak_allocated_bytes),
        (result.peak_reserved_bytes, parent.peak_reserved_bytes),
        (result.needed_bytes, parent.needed_bytes),
    )
    return not any(now < then for now, then in pairs if now is not None and then is not None)


def _alternatives(
    goal: Goal, settings: tuple[Settings, ...], predicted: Prediction
) -> list[Alternative]:
    """Return a predicted step as it is, then with other accumulation steps and budgets."""
    config = predicted.result.config
    chain = _chain(goal, config) if goal.space.budgets and can_be_planned(config) else None
    kind = goal.target.kind
    return list(alternatives_of(predicted, settings, goal.space, chain, kind))


def _chain(goal: Goal, config: StepConfig) -> Chain | None:
    try:
        return chain_for(goal.workload, config, goal.target, seed=goal.seed, run=goal.run)
    except Ended as ended:
        if ended.outcome is Outcome.CANCELLED:
            raise
        return None  # this model cannot be planned: its other settings are tried without a budget


def _confirm(goal: Goal, start: Prediction, alternatives: list[Alternative], found: Found) -> None:
    """Predict the best of these alternatives exactly, until one of them fits."""
    bias = 1.0  # what the last exact prediction was above its estimate
    for alternative in sorted(alternatives, key=lambda one: one.rank):
        if alternative.seconds > found.worst_seconds(goal.most):
            return
        if not _may_fit(alternative, start.result, goal.limit_bytes, bias):
            continue
        result = _exact(goal, start, alternative)
        if result.outcome is not Outcome.OK:
            continue
        bias = max(1.0, counted(result).nbytes / counted(alternative.result).nbytes)
        sure = Alternative(settings=alternative.settings, result=result, exact=True)
        if not alternative.exact:
            found.tried.append(sure)
        if result.fit is Judgement.TOO_CLOSE:
            found.close.append(sure)
        if result.fit is Judgement.FITS:
            found.fitting.append(sure)
            found.fitting.sort(key=lambda one: one.rank)
            return


def _may_fit(alternative: Alternative, start: StepResult, limit_bytes: int, bias: float) -> bool:
    """Return whether an alternative fits if its peak is as low as its estimate allows."""
    if alternative.exact:
        return True
    peak = counted(alternative.result)
    needed, taken = start.needed_bytes, start.peak_reserved_bytes
    share = needed / taken if needed and taken else 1.0
    return peak.nbytes * share * bias * (1.0 - peak.uncertainty) <= limit_bytes


def _exact(goal: Goal, start: Prediction, alternative: Alternative) -> StepResult:
    """Return the exact prediction of an alternative, with the limit."""
    if alternative.exact:
        assert start.forecast is not None
        return start.forecast.against_limit(alternative.result, goal.limit_bytes)
    predicted = predict_with_forecast(
        goal.workload,
        alternative.result.config,
        goal.device,
        memory_limit=goal.limit_bytes,
        **goal.options,
    )
    if predicted.result.outcome is Outcome.CANCELLED:
        raise Ended(predicted.result.outcome, predicted.result.message)
    return predicted.result
