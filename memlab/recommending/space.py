"""The settings that `recommend` tries, as the techniques state them in `Technique.searches`."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from memlab.arguments.quoting import shown
from memlab.config import BudgetEngine, Checkpointing, Sharding, StepConfig
from memlab.errors import ConfigError
from memlab.techniques.every import EVERY
from memlab.techniques.technique import Keeps, Technique
from memlab.verifying.accumulation import AccumulationEffect

STRATEGY = {"sharding", "shard_group_size"}
NO_TIMES = (
    "The time of communication is not known here. So what fits is ordered by what a rank sends, "
    "settings that only make a step faster were not tried, and settings that save memory for time "
    "only if no strategy fits by itself. For times name a cluster, such as device='8x-h100'."
)

Settings = Mapping[str, Any]
"""Fields of `StepConfig` that are changed together."""

ACCUMULATION, BUDGET = "accumulation_steps", "memory_budget"
BUDGETS = tuple(round(0.05 * step, 2) for step in range(20))
"""Memory budgets below 1, from 0 to 0.95."""

BUDGETS_OF_RANKS = (0.5, 0.2, 0.0)
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
        freeing: those of `savers` that leave less of parameters or optimizer state on the device.
        has_times: whether predictions have a time.
        notes: what is left alone, in sentences.
        divided: a sentence on the gradient of micro-batches; empty if it is that of the whole
            batch.
    """

    base: StepConfig
    faster: tuple[tuple[Settings, ...], ...]
    savers: tuple[tuple[Settings, ...], ...]
    accumulation_steps: tuple[int, ...]
    budgets: tuple[float, ...]
    freeing: tuple[tuple[Settings, ...], ...] = ()
    has_times: bool = True
    notes: tuple[str, ...] = ()
    divided: str = ""

    def with_one_more(
        self, chosen: tuple[Settings, ...], *, savers: bool
    ) -> Iterator[tuple[Settings, ...]]:
        """Yield the choices with one setting more, so that each choice is yielded once.

        Args:
            chosen: settings of some groups, in the order of the groups.
            savers: whether what only saves memory is added too.
        """
        groups = (*self.faster, *self.savers)
        last = max((groups.index(self._group_of(one)) for one in chosen), default=-1)
        most = len(groups) if savers else len(self.faster)
        for group in groups[last + 1 : most]:
            for settings in group:
                yield (*chosen, settings)

    def is_faster(self, settings: Settings) -> bool:
        """Return whether a setting may make a step faster."""
        return any(settings in group for group in self.faster)

    def frees_states(self, settings: Settings) -> bool:
        """Return whether a setting leaves less of parameters or optimizer state on the device."""
        return any(settings in group for group in self.freeing)

    def _group_of(self, settings: Settings) -> tuple[Settings, ...]:
        return next(group for group in (*self.faster, *self.savers) if settings in group)


def with_settings(base: StepConfig, chosen: tuple[Settings, ...]) -> StepConfig:
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
    free = known - changed if allow is None else set(allow) - changed
    free -= STRATEGY
    if any_strategy and (allow is None or "sharding" in allow):
        free |= STRATEGY
    kept = {Keeps.BITS} if exact else {Keeps.BITS, Keeps.ROUNDED}

    def group(technique: Technique) -> tuple[Settings, ...]:
        if allow is None and technique.keeps not in kept:
            return ()
        if exact and technique.keeps is not Keeps.BITS:
            return ()
        found = (one for one in technique.searches if set(one) <= free)
        if base.sharding is Sharding.NONE:  # one process gets two techniques one after the other
            found = (one for one in found if set(one) <= set(technique.fields))
        return tuple(one for one in found if not any_strategy or _go_together(base, one))

    groups = [(technique, group(technique)) for technique in EVERY]
    faster = [(one, found) for one, found in groups if one.may_be_faster and found]
    if not has_times:
        faster = [(one, found) for one, found in faster if "sharding" in one.fields]
    steps: tuple[int, ...] = (base.accumulation_steps,)
    divided, notes = "", tuple[str, ...]()
    is_split = base.accumulation_steps * base.data_parallel_size > 1
    if base.batch_size > 1 and (ACCUMULATION in free or is_split):
        found = effect()
        divided = str(found)
        if ACCUMULATION in free:
            steps, notes = _accumulation_steps(base, allow, found, exact=exact)
        if divided and is_split:
            notes = (*notes, f"{divided[0].upper()}{divided[1:]}.")
    space = Space(
        base=base,
        faster=tuple(found for _, found in faster),
        savers=tuple(found for one, found in groups if not one.may_be_faster and found),
        accumulation_steps=steps,
        budgets=BUDGETS if BUDGET in free and can_be_planned(base) else (),
        freeing=tuple(found for one, found in groups if one.frees_states and found),
        has_times=has_times,
        notes=notes if has_times else (*notes, NO_TIMES),
        divided=divided,
    )
    return space if base.sharding is Sharding.NONE else _of_ranks(space)


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
    planned = tuple({BUDGET: budget} for budget in BUDGETS_OF_RANKS if space.budgets)
    more = tuple(group for group in (divided, planned) if group)
    others = tuple(group for group in space.savers if group not in space.freeing)
    return replace(
        space,
        savers=(*space.freeing, *more, *others),
        accumulation_steps=(space.base.accumulation_steps,),
        budgets=(),
    )


def _accumulation_steps(
    base: StepConfig, allow: Collection[str] | None, found: AccumulationEffect, *, exact: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the numbers of micro-batches to try, and why there are no others."""
    own, is_asked_for = (base.accumulation_steps,), allow is not None and not exact
    said = str(found)
    if found.same == "refused":
        return own, (f"The batch is not divided, because {said}.",)
    if found.same == "no" and not is_asked_for and (exact or not found.draws):
        how = "exact=False" if exact else "allow=['accumulation_steps', ...]"
        how += " with allow=['accumulation_steps', ...]" * (exact and not found.draws)
        return own, (f"The batch is not divided, because {said}; {how} divides it.",)
    if found.same == "unknown" and exact:
        return own, (f"The batch is not divided, because {said}; exact=False divides it.",)
    samples = base.rank_batch_size
    divisors = tuple(n for n in range(1, samples + 1) if samples % n == 0)
    return divisors, (f"{said[0].upper()}{said[1:]}.",) if said else ()
