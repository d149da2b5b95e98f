"""The answer of `recommend` in words: its message, its notes, and what other limits would mean."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memlab._util.units import format_bytes, format_seconds, shown
from memlab.config import Sharding, StepConfig
from memlab.devices.cards import every_card
from memlab.errors import ConfigError, DeviceError
from memlab.result import Judgement, Outcome, StepResult, format_percent
from memlab.search.alternatives import (
    Alternative,
    Settings,
    Space,
    counted,
    may_be_faster,
    time_width,
)
from memlab.search.goal import MOST_STEPS, Goal, Known
from memlab.search.recommendations import (
    AtLimit,
    Combinations,
    Recommendation,
    choices_in_words,
    values_of,
)
from memlab.search.recommendations import choices_in_words as chosen_in_words
from memlab.search.search import MOST_IN_VAIN, Found, key_of
from memlab.techniques.technique import in_words
from memlab.trace import Category
from memlab.workload import Value, Workload

# What each setting of a recommendation saves and costs, in words.

WORTH_SAYING = 0.005  # a smaller difference is none
NOTHING = "takes the same memory and the same time"


def reasons_of(
    alternative: Alternative, found: Found, limit_bytes: int, headroom: float
) -> tuple[str, ...]:
    """Return a sentence for each setting of an alternative, and one for what is left free."""
    known: Mapping[tuple[str, ...], StepResult] = {
        **{key_of(one.settings): one.result for one in reversed(found.latest())},
        **found.starts,
        key_of(alternative.settings): alternative.result,
    }
    return (
        *_of_settings(alternative.settings, known),
        *_of_ranks(alternative.result),
        reason_of_limit(alternative.result, limit_bytes, headroom),
    )


def _of_settings(
    settings: tuple[Settings, ...], known: Mapping[tuple[str, ...], StepResult]
) -> Iterator[str]:
    """Yield what each setting changes, beside the step with those before it."""
    before, names = known.get(()), list[str]()
    if not settings:
        config = known[()].config
        ranks = f" but sharding={str(config.sharding)!r} over {config.world_size} ranks"
        yield f"nothing has to be changed{ranks * (config.world_size > 1)}"
        return

    for at, one in enumerate(settings, start=1):
        after = known.get(key_of(settings[:at]))
        names.append(in_words(one))
        if after is None:
            continue  # it was refused without the next one
        said = " and ".join(names)
        told = _difference(before, after) if before else ""
        if told != NOTHING:
            yield f"{said} {told}".strip()
        before, names = after, []


def reasons_of_choice(
    workload: Workload, names: Sequence[str], as_it_is: Mapping[str, tuple[Workload, StepResult]]
) -> Iterator[str]:
    """Yield what was chosen, and what each choice changes in the step before any other setting.

    Args:
        workload: that was chosen.
        names: of what was to be chosen.
        as_it_is: all workloads with their steps, by name; the first is what others are compared
            with.
    """
    known = {name: pair for name, pair in as_it_is.items() if pair[1].outcome is Outcome.OK}
    if len(as_it_is) < 2 or workload.name not in known:
        return
    first, before = next(iter(known.values()))
    if first.name == workload.name:
        yield f"{chosen_in_words(values_of(workload, names))}: the others are compared with this"
        return

    assert first.choices is not None
    assert workload.choices is not None
    own, here, changed = workload.choices.values, dict(first.choices.values), list[str]()
    for name in names:
        if own[name] == here[name]:
            continue
        changed.append(f"{name}={shown(own[name])} instead of {shown(here[name])}")
        here[name] = own[name]
        step = next((step for one, step in known.values() if _agrees(one, names, here)), None)
        if step is None:
            continue  # it is not possible without the next choice
        said = " and ".join(changed)
        if step is not before:  # else what was chosen has no effect
            yield f"{said} {_difference(before, step, with_bytes=True)}; what is trained differs"
        before, changed = step, []


def _agrees(workload: Workload, names: Sequence[str], values: Mapping[str, Value]) -> bool:
    """Return whether a workload has these choices, where they have an effect on it."""
    return all(values[name] == value for name, value in values_of(workload, names).items())


def _difference(before: StepResult, after: StepResult, *, with_bytes: bool = False) -> str:
    """Return for instance "takes 46 % less memory and 38 % less time"."""
    peaks = counted(before), counted(after)
    told = [_change(peaks[1].nbytes / peaks[0].nbytes - 1.0, "memory")]
    if with_bytes:
        more = peaks[1].nbytes - peaks[0].nbytes
        told = [f"{told[0]} ({'-' if more < 0 else '+'}{format_bytes(abs(more))} {peaks[1].kind})"]
    if before.step_seconds and after.step_seconds:
        change = _change(after.step_seconds / before.step_seconds - 1.0, "time")
        width = max(map(time_width, (before, after)))
        is_sure = not (may_be_faster(before, after) and may_be_faster(after, before))
        about = f" (± {format_percent(width)})" if width and not is_sure else ""
        told.append(change if change == "the same time" else f"{change}{about}")
    sent = before.sent_bytes, after.sent_bytes
    if sent[0] and sent[1]:
        told.append(_change(sent[1] / sent[0] - 1.0, "communication"))
    *others, last = told
    return f"takes {', '.join(others)}{' and ' * bool(others)}{last}"


def _of_ranks(result: StepResult) -> Iterator[str]:
    """Yield what several ranks send, and by what their strategies were compared."""
    sent = result.sent_bytes
    if sent is None:
        return
    said = f"a rank sends {format_bytes(sent)} a step"
    if result.config.offloads_shards:
        yield (
            f"{said}; how long the host takes to update the offloaded parameters is not known, so "
            "this comes after what has a time"
        )
        return
    by = "time" if result.step_seconds else "that, since the time of communication is not known"
    yield f"{said}; strategies are compared by {by}"


def _change(share: float, what: str) -> str:
    if abs(share) < WORTH_SAYING:
        return f"the same {what}"
    return f"{format_percent(abs(share))} {'more' if share > 0 else 'less'} {what}"


def reason_of_limit(result: StepResult, limit_bytes: int, headroom: float) -> str:
    """Return how much of the limit is left."""
    peak = counted(result)
    kind = f"{peak.kind}, {result.source}"
    size, limit = format_bytes(peak.nbytes), format_bytes(limit_bytes)
    about = f", ± {format_percent(peak.uncertainty)}" if peak.uncertainty else ""
    free = 1.0 - peak.nbytes / limit_bytes
    kept_free = f", of which {format_percent(headroom)} were to stay free" if headroom else ""
    if result.fit is Judgement.TOO_CLOSE:
        about = format_percent(peak.judged_uncertainty)
        if free < -peak.judged_uncertainty:
            return (
                f"too close to say whether it fits {limit} with less cache ({size} {kind} where "
                f"there is room; ± {about})"
            )
        return f"too close to say: {size} of {limit} ({kind}, ± {about})"
    if peak.needed_bytes is not None and peak.upper_bytes > limit_bytes * (1.0 - headroom):
        least = f"{format_bytes(peak.needed_bytes)} ± {format_percent(peak.needed_uncertainty)}"
        return (
            f"fits: can run in {least} of {limit}, and reserves {size} where there is room ({kind})"
        )
    return f"fits with {format_percent(free)} of {limit} free ({kind}{about}){kept_free}"


MOST_NAMED = 3  # of what was not tried
NEAREST_LIMITS = 2  # smaller ones, and larger ones
STANDING = (Category.PARAMETERS, Category.BUFFERS, Category.OPTIMIZER_STATE, Category.INPUTS)
ANOTHER_MODEL = (
    "What is trained differs between these workloads, so their gradients are not the same and "
    "neither is what is learned: they are compared by memory and time alone."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What was found for one workload."""

    goal: Goal
    found: Found


def recommendation(
    one: Searched,
    alternative: Alternative,
    combinations: Combinations,
    searched: Sequence[Searched],
    limit_bytes: int,
    headroom: float,
) -> Recommendation:
    """Return a setting that was found, with its reasons."""
    result, workload = alternative.result.against_limit(limit_bytes), one.goal.workload
    as_it_is = {
        each.goal.workload.name: (each.goal.workload, each.found.starts[()])
        for each in searched
        if () in each.found.starts
    }
    return Recommendation(
        result=result,
        reasons=(
            *reasons_of_choice(workload, combinations.names, as_it_is),
            *reasons_of(alternative, one.found, limit_bytes, headroom),
            *_of_division(one.goal.space, result.config),
        ),
        predicted=result,
        workload=workload,
        chosen=values_of(workload, combinations.names),
    )


def _of_division(space: Space, config: StepConfig) -> Iterator[str]:
    """Yield what is to be known of a batch that is divided."""
    if space.divided and config.accumulation_steps * config.data_parallel_size > 1:
        yield space.divided


def least_of(searched: Sequence[Searched]) -> tuple[Searched, Alternative] | None:
    """Return what takes the least memory of all that was tried; None if nothing was."""
    every = [(one, found) for one in searched for found in one.found.latest()]
    return min(every, key=lambda pair: counted(pair[1].result).nbytes, default=None)


def message_of(
    searched: Sequence[Searched],
    fitting: Sequence[Recommendation],
    too_close: Sequence[Recommendation],
    limit_bytes: int,
) -> str:
    """Return the answer in one sentence."""
    goal = searched[0].goal
    limit, name = format_bytes(limit_bytes), goal.workload.name
    if len(searched) > 1:
        name = f"the {len(searched)} workloads that were compared"
    batch = f"batch {goal.space.base.batch_size}"
    if fitting:
        best = fitting[0].result
        return f"{best.workload_name}, {batch}, on {best.device}, within {limit}: {best.config}"
    if any(one.found.fitting for one in searched):
        return (
            f"every setting of {name}, {batch}, that was predicted to fit {limit} failed when it "
            "was measured; the notes say how"
        )
    if too_close:
        return (
            f"no setting of {name}, {batch}, certainly fits {limit}; {len(too_close)} lie too "
            "near to it to say: measure them, or raise memory_limit"
        )
    if any(one.found.close for one in searched):
        return (
            f"no setting of {name}, {batch}, fits {limit}: what was too close to say did not fit "
            "when it was measured; raise memory_limit, or use a smaller batch"
        )
    found = least_of(searched)
    if found is None:
        every = (why for one in searched for why in one.found.refused.values())
        why = next(every, "no step could be predicted")
        return f"nothing can be recommended for {name}: {why}"
    return _too_large(found[1], batch, limit_bytes, goal.limit_bytes)


def _too_large(least: Alternative, batch: str, limit_bytes: int, free_bytes: int) -> str:
    """Return what the smallest step takes, and the remedy."""
    result, peak = least.result, counted(least.result)
    if peak.nbytes <= free_bytes:
        return (
            f"nothing that was predicted exactly fits {format_bytes(limit_bytes)}; "
            f"{result.workload_name}, {batch}, may take {format_bytes(peak.nbytes)} {peak.kind} by "
            f"estimate, with {result.config}: search longer, with more patience"
        )
    text = (
        f"nothing that was tried fits {format_bytes(limit_bytes)}: {result.workload_name}, "
        f"{batch}, takes at least {format_bytes(peak.nbytes)} {peak.kind}, with {result.config}"
    )
    standing = sum((result.peak_by_category or {}).get(category, 0) for category in STANDING)
    if standing > free_bytes:
        return (
            f"{text}. {format_bytes(standing)} of it are parameters, buffers, optimizer state and "
            "inputs: use a smaller model, another optimizer (allow=['optimizer', ...]) or a larger "
            "card"
        )
    return f"{text}; use a smaller batch or a larger card"


def notes_of(
    combinations: Combinations,
    searched: Sequence[Searched],
    listed: Sequence[Recommendation],
    limit_bytes: int,
) -> list[str]:
    """Return sentences on what was left out, each once; `listed` is what fits or is too close."""
    notes = list[str]()
    if len(searched) > 1:
        notes.append(ANOTHER_MODEL)
        there = {one.result.workload_name for one in listed}
        notes += [
            _not_recommended(one, combinations.names, limit_bytes)
            for one in searched
            if one.goal.workload.name not in there
        ]
    if combinations.left_out:
        left_out = combinations.left_out
        notes.append(
            f"{len(left_out)} of {len(left_out) + combinations.num_possible} combinations "
            f"{'is' if len(left_out) == 1 else 'are'} left out:"
        )
        notes += [f"{what}: {why}" for what, why in left_out.items()]
    for one in searched:
        which = f"{_chosen(one.goal.workload, combinations)}: " if len(searched) > 1 else ""
        notes += [f"{which}{note}" for note in one.goal.space.notes]
        refused = one.found.refused.items()
        notes += [f"{which}{what} is left out: {why}" for what, why in refused if what]
    if waiting := [what for one in searched for what in one.found.waiting]:
        notes.append(_ended_by_time(searched[0].goal, list(dict.fromkeys(waiting))))
    elif not all(one.found.is_whole for one in searched):
        notes.append(
            "Not every combination was tried: what saves no memory by itself is left out beside "
            f"other settings, and the search ends after {MOST_STEPS} recorded steps, or after "
            f"{MOST_IN_VAIN} in a row that bring nothing faster. A faster setting may exist; name "
            "fewer fields in allow to search those wholly."
        )
    return list(dict.fromkeys(notes))


def _ended_by_time(goal: Goal, waiting: Sequence[str]) -> str:
    """Return what was not tried, because the search had taken too long."""
    settings = "setting" if len(waiting) == 1 else "settings"
    return (
        f"The search ended by time, with patience={goal.steps.patience:g} seconds. Not tried: "
        f"{len(waiting)} further {settings}, first {', then '.join(waiting[:MOST_NAMED])}. A "
        f"faster one may be among them: patience={2 * goal.steps.patience:g} searches longer."
    )


def _not_recommended(one: Searched, names: Sequence[str], limit_bytes: int) -> str:
    """Return why no setting of a workload is among what is recommended."""
    found, which = one.found, choices_in_words(values_of(one.goal.workload, names))
    limit, tried = format_bytes(limit_bytes), found.latest()
    if found.fitting:
        best = found.fitting[0]
        return (
            f"{which} is not recommended: its fastest that fits {limit} takes "
            f"{_cost(best)}, with {best.result.config}"
        )
    if not tried and found.waiting:
        return f"{which} is not recommended: the time was over before it was tried"
    if not tried:
        return f"{which} is not recommended: {found.refused.get('', 'no step could be predicted')}"
    fastest = min(tried, key=lambda each: each.rank)
    peak = min(counted(each.result).nbytes for each in tried)
    if peak > one.goal.limit_bytes and found.is_whole:
        return (
            f"{which} is not recommended: what was tried of it takes {format_bytes(peak)} or more, "
            f"which does not fit {limit}"
        )
    return (
        f"{which} is not recommended: nothing that was tried of it fits {limit} for certain, and "
        f"what else may fit was not tried, because it takes {_cost(fastest)} or more"
    )


def _cost(one: Alternative) -> str:
    seconds = one.result.step_seconds
    return "a time that is not known" if seconds is None else f"{format_seconds(seconds)} a step"


def _chosen(workload: Workload, combinations: Combinations) -> str:
    return choices_in_words(values_of(workload, combinations.names))


def other_limits(
    combinations: Combinations, searched: Sequence[Searched], limit_bytes: int
) -> Iterator[AtLimit]:
    """Yield what the nearest other limits mean, as far as the search has seen.

    Limits are what cards can hold; halves and doubles on a CPU, or if the limit is smaller.
    """
    fitting = [one for each in searched for one in each.found.fitting]
    if not fitting:
        return
    best = min(fitting, key=lambda one: one.seconds).result
    is_card = searched[0].goal.target.kind == "cuda"
    cards = {card.usable_bytes: card.name for card in every_card() if is_card}
    sizes = sorted(cards)
    if not sizes or limit_bytes < sizes[0]:
        sizes = [limit_bytes // 4, limit_bytes // 2, 2 * limit_bytes]
    near = {size for size in sizes if abs(size / limit_bytes - 1.0) < 0.05}
    below = [size for size in sizes if size < limit_bytes and size not in near]
    above = [size for size in sizes if size > limit_bytes and size not in near]
    nearest = [*below[-NEAREST_LIMITS:], *above[:1]]
    every = [(one.goal.workload, found) for one in searched for found in one.found.latest()]
    by_rank = sorted(every, key=lambda pair: pair[1].rank)
    for size in reversed(nearest):
        yield _at_limit(combinations, by_rank, best, size, cards.get(size, ""))


def _at_limit(
    combinations: Combinations,
    by_rank: Sequence[tuple[Workload, Alternative]],
    best: StepResult,
    limit_bytes: int,
    card: str,
) -> AtLimit:
    """Return the fastest of what was tried that fits another limit, by its upper estimate."""
    fits = (
        (workload, alternative)
        for workload, alternative in by_rank
        if alternative.result.against_limit(limit_bytes).fit is Judgement.FITS
    )
    workload, fastest = next(fits, (None, None))
    if workload is None or fastest is None:
        return AtLimit(limit_bytes=limit_bytes, card=card, result=None, best=best)
    return AtLimit(
        limit_bytes=limit_bytes,
        card=card,
        result=fastest.result,
        best=best,
        chosen=_chosen(workload, combinations),
    )


# How many ranks share a recommended step, and on how many cards one fits that fits on none.

MORE_CARDS = (2, 4, 8)
SMALLEST = Sharding.ZERO3  # holds the least, so it decides whether a number of cards is enough
FASTER = (Sharding.DDP, Sharding.ZERO2)  # communicate less; the least first


def with_ranks(base: StepConfig, world_size: int | None, num_cards: int) -> tuple[StepConfig, bool]:
    """Return settings for as many ranks, and whether their strategy is to be searched.

    A strategy that was chosen stays. Where it is searched the settings are those of ddp, in which
    every rank does what one process does; the others are compared with it.

    Args:
        base: what is already chosen.
        world_size: number of ranks; None is that of `base`, or all cards.
        num_cards: of a cluster; 1 of a device by itself.

    Raises:
        ConfigError: the ranks cannot divide the batch.
    """
    if base.sharding is not Sharding.NONE:
        return (base if world_size is None else replace(base, world_size=world_size)), False
    ranks = num_cards if world_size is None else world_size
    if ranks == 1:
        return base, False
    return replace(base, sharding=Sharding.DDP, world_size=ranks), True


def on_more_cards(goal: Goal) -> StepResult | None:
    """Return the step on the fewest of these cards on which it fits; None if that is not known.

    A few predictions: of zero3 on two, four and eight cards, until one fits, and there of the
    strategies that communicate less.

    Raises:
        Ended: it was cancelled.
    """
    base, card = goal.space.base, goal.target.card
    if base.sharding is not Sharding.NONE or card is None:
        return None
    for ranks in MORE_CARDS:
        device = f"{ranks}x-{card.name}"
        fits = next(_fitting(goal, device, ranks, (SMALLEST,)), None)
        if fits is not None:
            return next(_fitting(goal, device, ranks, FASTER), fits)
    return None


def _fitting(
    goal: Goal, device: str, ranks: int, strategies: tuple[Sharding, ...]
) -> Iterator[StepResult]:
    """Yield the predictions that fit on a cluster."""
    for sharding in strategies:
        try:
            config = replace(goal.space.base, sharding=sharding, world_size=ranks)
            found = Known().predicted(goal.workload, config, device, goal.options)
        except (ConfigError, DeviceError):  # a batch that does not divide, or no such machine
            continue
        if found.forecast is None:
            continue
        result = found.forecast.against_limit(found.result, goal.limit_bytes)
        if result.fit is Judgement.FITS:
            yield result


def more_cards_in_words(result: StepResult, limit_bytes: int) -> str:
    """Return on how many cards a step fits, as the end of a sentence."""
    config, seconds = result.config, result.step_seconds
    speed = "" if seconds is None else f", at {format_seconds(seconds)} a step"
    return (
        f"on {config.world_size} of these cards (device={result.device!r}) it "
        f"{reason_of_limit(result, limit_bytes, 0.0)} each, with "
        f"sharding={str(config.sharding)!r}{speed}"
    )
