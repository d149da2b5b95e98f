"""What `recommend` may change, and what a predicted step says of the rest of it: no model runs.

A prediction of the whole batch comes with a `BatchSizeModel`, which gives other micro-batch sizes,
and one recording of the plain step gives the plans of all budgets. Both are estimates with a wider
uncertainty, good enough to decide what is worth an exact prediction.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from memlab._util.units import format_percent, shown
from memlab.config import BudgetEngine, Checkpointing, Sharding, StepConfig
from memlab.errors import ConfigError
from memlab.prediction.budget_frontier import BudgetFrontier
from memlab.prediction.interpolation import (
    can_regroup,
    can_replan,
    estimate_accumulation,
    estimate_budget,
    interpolated,
    plan_at,
)
from memlab.prediction.predict import Prediction
from memlab.result import StepResult, counted
from memlab.runtime.accumulation import AccumulationEffect
from memlab.techniques.registry import EVERY
from memlab.techniques.technique import Equivalence, Technique, offers_of

# The settings that `recommend` tries: what the catalogue of the techniques offers, and numbers.

STRATEGY = {"sharding", "shard_group_size"}
NO_TIMES = (
    "The time of communication is not known here. So what fits is ordered by what a rank sends, "
    "settings that only make a step faster were not tried, and settings that save memory for time "
    "only if no strategy fits by itself. For times name a cluster, such as device='8x-h100'."
)

Settings = Mapping[str, Any]
"""Fields of `StepConfig` that are changed together."""

Chosen = tuple[Settings, ...]
"""Settings that are added to the base, in the order of the techniques."""

ACCUMULATION, BUDGET = "accumulation_steps", "memory_budget"
BUDGETS = tuple(round(0.05 * step, 2) for step in range(20))
"""Memory budgets below 1, from 0 to 0.95."""

MOST_STEPS_OF_RANKS = 4  # numbers of micro-batches of which each is predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What may be changed.

    Attributes:
        base: the settings that a person has chosen, and the batch size.
        faster: alternatives that may make a step faster; of each group one, or none.
        savers: alternatives that save memory and cost time; of each group one, or none.
        accumulation_steps: that are tried, the base's own first.
        budgets: that are tried besides the base's own.
        has_times: whether predictions have a time.
        notes: what is left alone, in sentences.
        divided: a sentence on the gradient of micro-batches; empty if it is that of the whole
            batch.
    """

    base: StepConfig
    faster: tuple[Chosen, ...]
    savers: tuple[Chosen, ...]
    accumulation_steps: tuple[int, ...]
    budgets: tuple[float, ...]
    has_times: bool = True
    notes: tuple[str, ...] = ()
    divided: str = ""

    def with_one_more(self, chosen: Chosen, *, savers: bool) -> Iterator[Chosen]:
        """Yield the choices with one setting more, so that each choice is yielded once.

        Args:
            chosen: settings of some groups, in the order of the groups.
            savers: whether what only saves memory is added too.
        """
        groups = (*self.faster, *self.savers)
        used = [at for at, group in enumerate(groups) if any(one in group for one in chosen)]
        most = len(groups) if savers else len(self.faster)
        for group in groups[max(used, default=-1) + 1 : most]:
            for settings in group:
                yield (*chosen, settings)

    def is_faster(self, settings: Settings) -> bool:
        """Return whether a setting may make a step faster."""
        return any(settings in group for group in self.faster)


def frees_states(settings: Settings) -> bool:
    """Return whether a setting leaves less of parameters or optimizer state on the device."""
    return any(technique.frees_states and settings in technique.searches for technique in EVERY)


def with_settings(base: StepConfig, chosen: Chosen) -> StepConfig:
    """Return a config with these settings."""
    merged: dict[str, Any] = {}
    for settings in chosen:
        merged |= settings
    return replace(base, **merged)


def can_be_planned(config: StepConfig) -> bool:
    """Return whether memlab can plan a memory budget for these settings."""
    is_eager = config.budget_engine is BudgetEngine.EAGER
    return is_eager and not config.compile and config.checkpointing is Checkpointing.NONE


def space_of(
    base: StepConfig,
    allow: Collection[str] | None,
    effect: Callable[[], AccumulationEffect],
    *,
    exact: bool,
    any_strategy: bool = False,
    has_times: bool = True,
) -> Space:
    """Return what may be changed.

    A field that the base sets to another value than its default stays as it is. Of several ranks no
    prediction tells of other micro-batches or budgets, so these are alternatives like all others.

    Args:
        base: the settings that a person has chosen.
        allow: fields that may be changed; None for all that leave the training as it is but for
            rounding.
        effect: tells what micro-batches do to the gradient; it is called if that matters.
        exact: whether only settings are tried that change no bit of the gradient, and micro-batches
            that change nothing but rounding.
        any_strategy: whether the ranks of the base may also train by another strategy.
        has_times: whether predictions for its device have a time; without one nothing is tried that
            only makes a step faster.

    Raises:
        ConfigError: `allow` names a field that is not tried.
    """
    free = _free_fields(base, allow, any_strategy=any_strategy)
    kept = {Equivalence.BITWISE} if exact else {Equivalence.BITWISE, Equivalence.NUMERICAL}

    def group(technique: Technique) -> Chosen:
        is_kept = technique.equivalence in kept or (allow is not None and not exact)
        found = (one for one in technique.searches if is_kept and set(one) <= free)
        if base.sharding is Sharding.NONE:  # one process gets two techniques one after the other
            found = (one for one in found if set(one) <= set(technique.fields))
        return tuple(one for one in found if not any_strategy or _go_together(base, one))

    groups = [(technique, found) for technique in EVERY if (found := group(technique))]
    steps: tuple[int, ...] = (base.accumulation_steps,)
    divided, notes = "", tuple[str, ...]()
    is_split = base.accumulation_steps * base.data_parallel_size > 1
    if base.batch_size > 1 and (ACCUMULATION in free or is_split):
        told = effect()
        divided = str(told)
        if ACCUMULATION in free:
            steps, notes = _accumulation_steps(base, allow, told, exact=exact)
        if divided and is_split:
            notes = (*notes, f"{_sentence(divided)}.")
    space = Space(
        base=base,
        faster=tuple(
            found
            for one, found in groups
            if one.may_be_faster and (has_times or "sharding" in one.fields)
        ),
        savers=tuple(found for one, found in groups if not one.may_be_faster),
        accumulation_steps=steps,
        budgets=BUDGETS if BUDGET in free and can_be_planned(base) else (),
        has_times=has_times,
        notes=notes if has_times else (*notes, NO_TIMES),
        divided=divided,
    )
    return space if base.sharding is Sharding.NONE else _of_ranks(space)


def _free_fields(
    base: StepConfig, allow: Collection[str] | None, *, any_strategy: bool
) -> set[str]:
    """Return the fields that may be changed."""
    known = {name for technique in EVERY for one in technique.searches for name in one}
    known |= {ACCUMULATION, BUDGET}
    for name in allow or ():
        if name not in known:
            raise ConfigError(
                f"allow names {shown(name)}; allowed is a field that recommend tries: "
                f"{', '.join(sorted(known))}"
            )
    default = StepConfig()
    changed = {f.name for f in fields(base) if getattr(base, f.name) != getattr(default, f.name)}
    free = (known if allow is None else set(allow)) - changed - STRATEGY
    is_searched = any_strategy and (allow is None or "sharding" in allow)
    return free | STRATEGY if is_searched else free


def _go_together(base: StepConfig, settings: Settings) -> bool:
    """Return whether the ranks divide into groups of this size, and more than one."""
    group: int = settings.get("shard_group_size", 1)
    return base.world_size % group == 0 and base.world_size != group


def _of_ranks(space: Space) -> Space:
    """Return the space with a few micro-batches and budgets as alternatives that save memory.

    What leaves less of the states on the device comes first: where they alone are above the limit,
    all else is in vain without it.
    """
    most = space.base.rank_batch_size
    steps = [steps for steps in space.accumulation_steps if steps > 1]
    few = [n for n in steps if n & (n - 1) == 0 or n == most][:MOST_STEPS_OF_RANKS]
    divided = tuple({ACCUMULATION: n} for n in few if space.base.accumulation_steps == 1)
    planned = offers_of(BUDGET) if space.budgets else ()
    freeing = tuple(group for group in space.savers if frees_states(group[0]))
    others = tuple(group for group in space.savers if group not in freeing)
    return replace(
        space,
        savers=(*freeing, *(group for group in (divided, planned) if group), *others),
        accumulation_steps=(space.base.accumulation_steps,),
        budgets=(),
    )


def _accumulation_steps(
    base: StepConfig, allow: Collection[str] | None, found: AccumulationEffect, *, exact: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the numbers of micro-batches to try, and why there are no others."""
    said, is_asked_for = str(found), allow is not None and not exact
    how = ["exact=False"] if exact else []  # would divide it
    if found.same == "no" and not found.draws:
        how.append("allow=['accumulation_steps', ...]")
    is_left_whole = (
        found.same == "refused"
        or (found.same == "unknown" and exact)
        or (found.same == "no" and not is_asked_for and bool(how))
    )
    if is_left_whole:
        way = "" if found.same == "refused" else f"; {' with '.join(how)} divides it"
        return (base.accumulation_steps,), (f"The batch is not divided, because {said}{way}.",)
    samples = base.rank_batch_size
    divisors = tuple(n for n in range(1, samples + 1) if samples % n == 0)
    return divisors, (f"{_sentence(said)}.",) if said else ()


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


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

    settings: Chosen
    result: StepResult
    exact: bool
    is_single: bool = False

    @property
    def cost(self) -> float:
        """What the search compares; infinite if it is not known. See `cost_of`."""
        cost = cost_of(self.result)
        return float("inf") if cost is None else cost

    @property
    def nbytes(self) -> int:
        """The peak that counts against a limit."""
        return counted(self.result).nbytes

    @property
    def rank(self) -> tuple[float, int, int]:
        """The least is the best: the least cost, then the simplest, then the smallest."""
        return self.cost, len(self.settings), self.nbytes

    def may_fit(self, start: StepResult, limit_bytes: int, bias: float | None) -> bool:
        """Return whether this estimate fits if its peak is as low as its uncertainty allows.

        Args:
            start: the recorded step.
            limit_bytes: that it may hold.
            bias: what others of this step were above their estimates; None if that is not known.
        """
        needed, taken = start.needed_bytes, start.peak_reserved_bytes
        share = needed / taken if needed and taken else 1.0
        width = counted(self.result).uncertainty
        if self.is_single and bias is not None:
            width -= SINGLE  # which bias it has is known
        return self.nbytes * share * (bias or 1.0) * (1.0 - width) <= limit_bytes

    def likely_fits(self, limit_bytes: int) -> bool:
        """Return whether it most likely fits."""
        width = counted(self.result).uncertainty - (SINGLE if self.is_single else 0.0)
        return self.nbytes * (1.0 + width) <= limit_bytes


def cost_of(result: StepResult) -> float | None:
    """Return the time of a step, or else the bytes that a rank sends; None if neither is known.

    A search compares one of them: where no time of communication is known, no step has a time. Nor
    has one whose shards are offloaded; it comes last, for it sends more bytes than others take
    seconds.
    """
    if result.step_seconds is not None:
        return result.step_seconds
    return None if result.sent_bytes is None else float(result.sent_bytes)


def time_beside(result: StepResult, fastest: StepResult, named: str = "") -> str:
    """Return how much slower a step is than the fastest, if the times are certain enough; else "".

    `named` is what the fastest is called here. Two times differ if their intervals, the predicted
    times with their uncertainties, do not meet.
    """
    times = result.step_seconds, fastest.step_seconds
    if times[0] is None or times[1] is None or result is fastest:
        return ""
    than = f" than {named}" if named else ""
    if not may_be_faster(result, fastest):
        return f"{format_percent(times[0] / times[1] - 1)} slower{than}"
    if not may_be_faster(fastest, result):
        return f"{format_percent(1 - times[0] / times[1])} faster{than}"
    width = max(result.time_width, fastest.time_width)
    within = f", within ± {format_percent(width)}" if width else ""
    return f"as fast{f' as {named}' if named else ''}{within}"


def may_be_faster(result: StepResult, other: StepResult) -> bool:
    """Return whether a step may be faster than another one, as far as both times are certain."""
    seconds, others = result.step_seconds, other.step_seconds
    if seconds is None or others is None:
        return True
    return seconds * (1.0 - result.time_width) <= others * (1.0 + other.time_width)


def alternatives_of(
    predicted: Prediction,
    settings: Chosen,
    space: Space,
    frontier: BudgetFrontier | None,
    kind: str,
) -> Iterator[Alternative]:
    """Yield the predicted step first, then estimates of other accumulation steps and budgets.

    Args:
        predicted: the step with the base's own accumulation steps and budget.
        settings: that it adds to the base.
        space: the other accumulation steps and budgets.
        frontier: the plans of this step; None if there are none.
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
        added = settings if is_own else (*settings, {ACCUMULATION: steps})
        light = divided if is_own else replace(divided, timeline=None)  # of hundreds
        yield Alternative(settings=added, result=light, exact=is_own, is_single=is_single)
        for result in _planned(divided, space, frontier, config, kind) if frontier else ():
            with_budget = (*added, {BUDGET: result.config.memory_budget})
            yield Alternative(settings=with_budget, result=result, exact=False, is_single=is_single)


def _divided(predicted: Prediction, config: StepConfig) -> StepResult | None:
    """Return what other accumulation steps cost; None if the size model cannot tell."""
    size_model = predicted.size_model
    assert size_model is not None  # the outcome is ok
    if config == predicted.result.config:
        return predicted.result
    if size_model.covers(config.micro_batch_sizes):
        return interpolated(predicted, config)
    if can_regroup(size_model, config):
        return estimate_accumulation(predicted, config, most_drawn=MOST_DRAWN)
    return None


def _of_single_samples(predicted: Prediction, config: StepConfig) -> StepResult | None:
    """Return about what micro-batches of one sample cost, by those of two; None if not known.

    One sample may run other operators than two, and `BatchSizeModel.covers` does not allow it. So
    this only tells what is worth an exact prediction. A sample takes no less time alone than its
    share of a pair, which a step with twice the batch tells.
    """
    size_model, pairs = predicted.size_model, replace(config, batch_size=2 * config.batch_size)
    if size_model is None or not can_regroup(size_model, pairs):
        return None
    found = estimate_accumulation(predicted, config, most_drawn=MOST_DRAWN)
    of_pairs = estimate_accumulation(predicted, pairs, most_drawn=MOST_DRAWN).step_seconds
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
    divided: StepResult, space: Space, frontier: BudgetFrontier, planned: StepConfig, kind: str
) -> Iterator[StepResult]:
    """Yield what other budgets cost: of those with the same plan only the largest."""
    before = plan_at(frontier, divided.config)
    for budget in sorted(space.budgets, reverse=True):
        config = replace(divided.config, memory_budget=budget)
        plan = plan_at(frontier, config)
        if plan is before or not can_replan(config, kind):
            continue
        before = plan
        yield replace(estimate_budget(divided, config, frontier, planned), timeline=None)
