"""The answer of `recommend` in words: its message, its notes, and what other limits would mean."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memlab.arguments.units import format_bytes, format_seconds
from memlab.config import StepConfig
from memlab.devices.card_table import TABLE
from memlab.limits.judgement import Judgement
from memlab.recommending.alternatives import Alternative, counted
from memlab.recommending.combinations import Combinations, in_words, values_of
from memlab.recommending.goal import MOST_STEPS, Goal
from memlab.recommending.reasons import reasons_of, reasons_of_choice
from memlab.recommending.recommendations import AtLimit, Recommendation
from memlab.recommending.search import MOST_IN_VAIN, Found
from memlab.recommending.space import Space
from memlab.result import StepResult
from memlab.trace import Category
from memlab.workload import Workload

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
    found, which = one.found, in_words(values_of(one.goal.workload, names))
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
    return in_words(values_of(workload, combinations.names))


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
    cards = {card.usable_bytes: card.name for card in TABLE if is_card}
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
