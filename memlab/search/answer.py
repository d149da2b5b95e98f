"""`Recommendations`: what `recommend` returns, the best first, and the words for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, overload

from memlab._util.tables import columns_table, facts_table
from memlab._util.units import format_bytes, format_percent, plus_minus, shown, signed_bytes
from memlab.config import Sharding, StepConfig
from memlab.devices.cards import compared, of_several
from memlab.errors import ConfigError, DeviceError
from memlab.result import FitStatus, Outcome, StepResult, counted
from memlab.search.alternatives import Alternative, Chosen, may_be_faster, time_beside
from memlab.search.search import MOST_IN_VAIN, MOST_STEPS, Known, WorkloadSearch, key_of
from memlab.techniques.technique import in_words
from memlab.trace import STANDING
from memlab.workload import Value, Workload

LONGER = "search longer, with more patience"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recommendation:
    """A setting that fits.

    Attributes:
        result: what the step costs: measured if it was confirmed by a run, else predicted.
        reasons: what each choice and setting saves and costs, and how much of the limit is left.
        predicted: what was predicted, also where it was measured.
        workload: what is trained: the given one, or one that was chosen. `recommend` always sets
            it.
        chosen: what the workload was chosen by, by name; empty if nothing was to be chosen.
    """

    result: StepResult
    reasons: tuple[str, ...]
    predicted: StepResult
    workload: Workload | None = None
    chosen: Mapping[str, Value] = field(default_factory=dict)

    @property
    def config(self) -> StepConfig:
        """The setting."""
        return self.result.config

    @property
    def cost(self) -> str:
        """The time of a step, and its source."""
        return f"{self.result.time_words or 'time not known'}, {self.result.source}"

    def to_dict(self) -> dict[str, Any]:
        """Return the recommendation as plain JSON types, without timelines."""
        return {
            "workload": self.result.workload_name,
            "chosen": dict(self.chosen),
            "result": _plain(self.result),
            "reasons": list(self.reasons),
            "predicted": _plain(self.predicted),
        }

    def __str__(self) -> str:
        """Return the setting and its reasons, one to a line."""
        which = f"{choices_in_words(self.chosen)}; " if self.chosen else ""
        first = f"{which}{self.result.settings}: {self.cost}"
        return "\n".join([first, *(f"  {reason}" for reason in self.reasons)])


@dataclass(frozen=True, kw_only=True, slots=True)
class AtLimit:
    """What another limit would mean.

    Attributes:
        limit_bytes: the other limit.
        card: the name of a card that holds as much; "" if the limit is that of none.
        result: the fastest step that is estimated to fit it, on the same device; None if none of
            those tried does.
        best: the step of the best recommendation; None if nothing has a time.
        chosen: by what its workload was chosen, in words; "" if nothing was to be chosen.
    """

    limit_bytes: int
    result: StepResult | None
    best: StepResult | None
    card: str = ""
    chosen: str = ""

    @property
    def slower(self) -> float | None:
        """The time of the step over that of the best, minus 1; None if it is not known."""
        times = self.result and self.result.step_seconds, self.best and self.best.step_seconds
        return times[0] / times[1] - 1.0 if times[0] and times[1] else None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        config = self.result and self.result.config.to_dict()
        return {"limit_bytes": self.limit_bytes, "config": config, "slower": self.slower}

    def __str__(self) -> str:
        """Return a sentence."""
        limit = f"at {format_bytes(self.limit_bytes)}"
        if self.card:
            limit += f", as much as {self.card} can hold"
        if self.result is None:
            return f"{limit}: nothing that was tried fits"
        step = f"{self.chosen}{'; ' * bool(self.chosen)}{self.result.config}"
        change = time_beside(self.result, self.best) if self.best else ""
        if not change:
            return f"{limit}: {step}"
        return f"{limit}: {change} (estimated for {self.result.device}), with {step}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recommendations(Sequence[Recommendation]):
    """Settings that fit, the best first. It is empty if none does; `message` then says why.

    Attributes:
        fitting: the recommendations, the fastest first; measured ones before predicted ones.
        message: the answer in one sentence.
        limit_bytes: that a step may hold.
        workloads: that the search chose among; the given one alone if nothing was to be chosen.
        too_close: settings so near to the limit that a prediction cannot say whether they fit.
        dropped: settings that were measured, and did not fit or failed; the notes say how.
        other_limits: what other limits would mean.
        on_more_cards: the step predicted on so many of these cards that it fits, where it fits on
            none of them alone; None if that is not known.
        tried: every step that was predicted.
        estimated: other accumulation steps and budgets of these steps, by arithmetic alone.
        num_measured: how many runs were made; a setting may be run twice.
        notes: sentences on what was left out.
    """

    fitting: tuple[Recommendation, ...]
    message: str
    limit_bytes: int
    workloads: tuple[Workload, ...] = ()
    too_close: tuple[Recommendation, ...] = ()
    dropped: tuple[StepResult, ...] = ()
    other_limits: tuple[AtLimit, ...] = ()
    on_more_cards: StepResult | None = None
    tried: tuple[StepResult, ...] = ()
    estimated: tuple[StepResult, ...] = ()
    num_measured: int = 0
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Recommendation: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Recommendation, ...]: ...
    def __getitem__(self, index: int | slice) -> Recommendation | tuple[Recommendation, ...]:
        """Return a recommendation; 0 is the best."""
        return self.fitting[index]

    def __len__(self) -> int:
        """Return how many settings are recommended."""
        return len(self.fitting)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain JSON types, without timelines and without what was tried."""
        return {
            "message": self.message,
            "limit_bytes": self.limit_bytes,
            "recommendations": [one.to_dict() for one in self.fitting],
            "too_close": [one.to_dict() for one in self.too_close],
            "dropped": [_plain(one) for one in self.dropped],
            "other_limits": [one.to_dict() for one in self.other_limits],
            "on_more_cards": self.on_more_cards and _plain(self.on_more_cards),
            "num_measured": self.num_measured,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """Return the message, the recommendations, the other limits and the notes."""
        listed = [f"{number}. {one}" for number, one in enumerate(self.fitting, start=1)]
        near, limits = map(str, self.too_close), map(str, self.other_limits)
        return "\n".join([self.message, *listed, *near, *limits, *self.notes])

    def _repr_html_(self) -> str:
        """Return tables for notebooks: a reason, another limit and a note have a line each."""
        is_chosen = any(one.chosen for one in (*self.fitting, *self.too_close))
        heads = ["", "settings", "time per step", "what each setting does"]
        if is_chosen:
            heads[1:1] = ["chosen"]
            heads[-1] = "what each choice and setting does"
        named = [(str(at), one) for at, one in enumerate(self.fitting, start=1)]
        named += [("too close to say", one) for one in self.too_close]
        lines = []
        for name, one in named:
            first, *others = one.reasons
            chosen = [choices_in_words(one.chosen)] if is_chosen else []
            lines.append([name, *chosen, one.result.settings, one.cost, first])
            lines += [[*[""] * (len(heads) - 1), reason] for reason in others]
        facts = {"answer": self.message, "memory limit": format_bytes(self.limit_bytes)}
        return (
            facts_table("recommended settings", facts)
            + columns_table(heads, lines)
            + columns_table(["other limits"], [[one] for one in self.other_limits])
            + columns_table(["notes"], [[note] for note in self.notes])
        )


def _plain(result: StepResult) -> dict[str, Any]:
    return replace(result, timeline=None).to_dict()


def values_of(workload: Workload, names: Sequence[str]) -> Mapping[str, Value]:
    """Return what a workload was made with, by these names; not what has no effect on it."""
    own = workload.choices
    if own is None:
        return {}
    return {name: own.values[name] for name in names if len(own.offered[name]) > 1}


def choices_in_words(values: Mapping[str, Value]) -> str:
    """Return choices as a person writes them: "adapter='lora', rank=8"."""
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())


# What each setting of a recommendation saves and costs, in words.

WORTH_SAYING = 0.005  # a smaller difference is none
NOTHING = "takes the same memory and the same time"


def recommendation(
    one: WorkloadSearch,
    alternative: Alternative,
    names: Sequence[str],
    searches: Sequence[WorkloadSearch],
    limit_bytes: int,
    headroom: float,
) -> Recommendation:
    """Return a setting that a search found, with its reasons.

    Args:
        one: the search.
        alternative: the setting.
        names: of what the workload was chosen by.
        searches: of all workloads.
        limit_bytes: that a step may hold.
        headroom: the share of it that is to stay free.
    """
    result, workload = alternative.result.against_limit(limit_bytes), one.workload
    starts: dict[tuple[str, ...], StepResult] = {
        **{key_of(each.settings): each.result for each in reversed(one.latest())},
        **one.starts,
        key_of(alternative.settings): alternative.result,
    }
    reasons = [*_of_choice(workload, names, searches), *_of_settings(alternative.settings, starts)]
    reasons += _of_ranks(result)
    is_split = result.config.accumulation_steps * result.config.data_parallel_size > 1
    if one.space.divided and is_split:
        reasons.append(one.space.divided)
    # the last one, for a run may say it anew
    reasons.append(reason_of_limit(alternative.result, limit_bytes, headroom))
    return Recommendation(
        result=result,
        reasons=tuple(reasons),
        predicted=result,
        workload=workload,
        chosen=values_of(workload, names),
    )


def _of_settings(settings: Chosen, known: Mapping[tuple[str, ...], StepResult]) -> Iterator[str]:
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


def _of_choice(
    workload: Workload, names: Sequence[str], searches: Sequence[WorkloadSearch]
) -> Iterator[str]:
    """Yield what was chosen, and what each choice changes in the step before any other setting."""
    begun = [(one.workload, one.starts[()]) for one in searches if () in one.starts]
    known = [pair for pair in begun if pair[1].outcome is Outcome.OK]
    if len(begun) < 2 or workload.name not in [one.name for one, _ in known]:
        return
    first, before = known[0]
    if first.name == workload.name:
        yield f"{choices_in_words(values_of(workload, names))}: the others are compared with this"
        return

    assert first.choices is not None
    assert workload.choices is not None
    own, here, changed = workload.choices.values, dict(first.choices.values), list[str]()
    for name in names:
        if own[name] == here[name]:
            continue
        changed.append(f"{name}={shown(own[name])} instead of {shown(here[name])}")
        here[name] = own[name]
        step = next((step for one, step in known if _agrees(one, names, here)), None)
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
    then, now = counted(before), counted(after)
    told = [_change(now.nbytes / then.nbytes - 1.0, "memory")]
    if with_bytes:
        told = [f"{told[0]} ({signed_bytes(now.nbytes - then.nbytes)} {now.kind})"]
    if before.step_seconds and after.step_seconds:
        change = _change(after.step_seconds / before.step_seconds - 1.0, "time")
        is_sure = not (may_be_faster(before, after) and may_be_faster(after, before))
        is_told = is_sure or change == "the same time"
        width = 0.0 if is_told else max(before.time_width, after.time_width)
        told.append(f"{change} ({plus_minus(width).strip()})" if width else change)
    if before.sent_bytes and after.sent_bytes:
        told.append(_change(after.sent_bytes / before.sent_bytes - 1.0, "communication"))
    *others, last = told
    return f"takes {', '.join(others)}{' and ' * bool(others)}{last}"


def _change(share: float, what: str) -> str:
    if abs(share) < WORTH_SAYING:
        return f"the same {what}"
    return f"{format_percent(abs(share))} {'more' if share > 0 else 'less'} {what}"


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


def reason_of_limit(result: StepResult, limit_bytes: int, headroom: float) -> str:
    """Return how much of the limit is left."""
    peak = counted(result)
    kind = f"{peak.kind}, {result.source}"
    size, limit = format_bytes(peak.nbytes), format_bytes(limit_bytes)
    free = 1.0 - peak.nbytes / limit_bytes
    if result.fit is FitStatus.TOO_CLOSE:
        about = plus_minus(peak.judged_uncertainty).strip()
        if free < -peak.judged_uncertainty:
            return (
                f"too close to say whether it fits {limit} with less cache ({size} {kind} where "
                f"there is room; {about})"
            )
        return f"too close to say: {size} of {limit} ({kind}, {about})"
    if peak.needed_bytes is not None and peak.upper_bytes > limit_bytes * (1.0 - headroom):
        least = f"{format_bytes(peak.needed_bytes)} ± {format_percent(peak.needed_uncertainty)}"
        return (
            f"fits: can run in {least} of {limit}, and reserves {size} where there is room ({kind})"
        )
    about = f",{plus_minus(peak.uncertainty)}" if peak.uncertainty else ""
    kept_free = f", of which {format_percent(headroom)} were to stay free" if headroom else ""
    return f"fits with {format_percent(free)} of {limit} free ({kind}{about}){kept_free}"


# The message and the notes of an answer.

MOST_NAMED = 3  # of what was not tried
ANOTHER_MODEL = (
    "What is trained differs between these workloads, so their gradients are not the same and "
    "neither is what is learned: they are compared by memory and time alone."
)


def least_of(searches: Sequence[WorkloadSearch]) -> tuple[WorkloadSearch, Alternative] | None:
    """Return what takes the least memory of all that was tried; None if nothing was."""
    every = [(one, found) for one in searches for found in one.latest()]
    return min(every, key=lambda pair: pair[1].nbytes, default=None)


def message_of(
    searches: Sequence[WorkloadSearch],
    fitting: Sequence[Recommendation],
    too_close: Sequence[Recommendation],
    limit_bytes: int,
) -> str:
    """Return the answer in one sentence."""
    limit, name = format_bytes(limit_bytes), searches[0].workload.name
    if len(searches) > 1:
        name = f"the {len(searches)} workloads that were compared"
    batch = f"batch {searches[0].space.base.batch_size}"
    if fitting:
        best = fitting[0].result
        return f"{best.workload_name}, {batch}, on {best.device}, within {limit}: {best.config}"
    if any(one.fitting for one in searches):
        return (
            f"every setting of {name}, {batch}, that was predicted to fit {limit} failed when it "
            "was measured; the notes say how"
        )
    if too_close:
        return (
            f"no setting of {name}, {batch}, certainly fits {limit}; {len(too_close)} lie too "
            "near to it to say: measure them, or raise memory_limit"
        )
    if any(one.close for one in searches):
        return (
            f"no setting of {name}, {batch}, fits {limit}: what was too close to say did not fit "
            "when it was measured; raise memory_limit, or use a smaller batch"
        )
    found = least_of(searches)
    if found is None:
        every = (why for one in searches for why in one.refused.values())
        return f"nothing can be recommended for {name}: {next(every, 'no step could be predicted')}"
    ended_by_time = any(one.left for one in searches)
    return _too_large(
        found[1].result, batch, limit_bytes, searches[0].limit_bytes, ended_by_time=ended_by_time
    )


def _too_large(
    least: StepResult, batch: str, limit_bytes: int, free_bytes: int, *, ended_by_time: bool
) -> str:
    """Return what the smallest step takes, and the remedy."""
    peak = counted(least)
    if peak.nbytes <= free_bytes:
        return (
            f"nothing that was predicted exactly fits {format_bytes(limit_bytes)}; "
            f"{least.workload_name}, {batch}, may take {peak} by estimate, with {least.config}: "
            f"{LONGER}"
        )
    text = (
        f"nothing that was tried fits {format_bytes(limit_bytes)}: {least.workload_name}, "
        f"{batch}, takes at least {peak}, with {least.config}"
    )
    if ended_by_time:
        return (
            f"nothing that was tried before the time ended fits {format_bytes(limit_bytes)}; the "
            f"least of it is {peak}, of {least.workload_name}, {batch}, with {least.config}: "
            f"{LONGER}"
        )
    standing = sum((least.peak_by_category or {}).get(category, 0) for category in STANDING)
    if standing > free_bytes:
        return (
            f"{text}. {format_bytes(standing)} of it are parameters, buffers, optimizer state and "
            "inputs: use a smaller model, another optimizer (allow=['optimizer', ...]) or a larger "
            "card"
        )
    return f"{text}; use a smaller batch or a larger card"


def notes_of(
    names: Sequence[str],
    left_out: Mapping[str, str],
    num_possible: int,
    searches: Sequence[WorkloadSearch],
    listed: Sequence[Recommendation],
    limit_bytes: int,
) -> list[str]:
    """Return sentences on what was left out, each once.

    Args:
        names: of what the workloads were chosen by.
        left_out: why combinations of choices were left out, by the combination in words.
        num_possible: combinations that were not.
        searches: of all workloads.
        listed: what fits or is too close.
        limit_bytes: that a step may hold.
    """
    notes = list[str]()
    if len(searches) > 1:
        notes.append(ANOTHER_MODEL)
        there = {one.result.workload_name for one in listed}
        absent = [one for one in searches if one.workload.name not in there]
        notes += [_not_recommended(one, names, limit_bytes) for one in absent]
    if left_out:
        is_or_are = "is" if len(left_out) == 1 else "are"
        total = len(left_out) + num_possible
        notes.append(f"{len(left_out)} of {total} combinations {is_or_are} left out:")
        notes += [f"{what}: {why}" for what, why in left_out.items()]
    for one in searches:
        chosen = choices_in_words(values_of(one.workload, names))
        which = f"{chosen}: " if len(searches) > 1 else ""
        notes += [f"{which}{note}" for note in one.space.notes]
        refused = one.refused.items()
        notes += [f"{which}{what} is left out: {why}" for what, why in refused if what]
    if left := list(dict.fromkeys(what for one in searches for what in one.left)):
        patience = searches[0].race.patience
        notes.append(
            f"The search ended by time, with patience={patience:g} seconds. Not tried: {len(left)} "
            f"further {'setting' if len(left) == 1 else 'settings'}, first "
            f"{', then '.join(left[:MOST_NAMED])}. A faster one may be among them: "
            f"patience={2 * patience:g} searches longer."
        )
    elif not all(one.is_whole for one in searches):
        notes.append(
            "Not every combination was tried: what saves no memory by itself is left out beside "
            f"other settings, and the search ends after {MOST_STEPS} recorded steps, or after "
            f"{MOST_IN_VAIN} in a row that bring nothing faster. A faster setting may exist; name "
            "fewer fields in allow to search those wholly."
        )
    return list(dict.fromkeys(notes))


def _not_recommended(one: WorkloadSearch, names: Sequence[str], limit_bytes: int) -> str:
    """Return why no setting of a workload is among what is recommended."""
    which = f"{choices_in_words(values_of(one.workload, names))} is not recommended:"
    limit, tried = format_bytes(limit_bytes), one.latest()
    if one.fitting:
        best = one.fitting[0].result
        return f"{which} its fastest that fits {limit} takes {_time(best)}, with {best.config}"
    if not tried and one.left:
        return f"{which} the time was over before it was tried"
    if not tried:
        return f"{which} {one.refused.get('', 'no step could be predicted')}"
    peak = min(each.nbytes for each in tried)
    if peak > one.limit_bytes and one.is_whole:
        return (
            f"{which} what was tried of it takes {format_bytes(peak)} or more, which does not fit "
            f"{limit}"
        )
    fastest = min(tried, key=lambda each: each.rank).result
    return (
        f"{which} nothing that was tried of it fits {limit} for certain, and what else may fit "
        f"was not tried, because it takes {_time(fastest)} or more"
    )


def _time(result: StepResult) -> str:
    return result.time_words or "a time that is not known"


# What other limits and more cards would mean.

NEAREST_LIMITS = 2  # smaller ones, and one larger one
MORE_CARDS = (2, 4, 8)
SMALLEST = Sharding.ZERO3  # holds the least, so it decides whether a number of cards is enough
FASTER = (Sharding.DDP, Sharding.ZERO2)  # communicate less; the least first


def other_limits(
    names: Sequence[str], searches: Sequence[WorkloadSearch], limit_bytes: int
) -> Iterator[AtLimit]:
    """Yield what the nearest other limits mean, as far as the search has seen.

    Limits are what cards can hold; halves and doubles on a CPU, or if the limit is smaller.
    """
    fitting = [one.result for each in searches for one in each.fitting]
    if not fitting:
        return
    best = min(fitting, key=lambda one: one.step_seconds or float("inf"))
    is_card = searches[0].target.kind == "cuda"
    cards = {card.usable_bytes: card.name for card in compared() if is_card}
    sizes = sorted(cards)
    if not sizes or limit_bytes < sizes[0]:
        sizes = [limit_bytes // 4, limit_bytes // 2, 2 * limit_bytes]
    smaller = [size for size in sizes if size < limit_bytes]
    below = [a for a, b in pairwise([*smaller, limit_bytes]) if b >= 1.05 * a][-NEAREST_LIMITS:]
    above = [size for size in sizes if size >= 1.05 * limit_bytes][:1]
    every = [(one.workload, found) for one in searches for found in one.latest()]
    every.sort(key=lambda pair: pair[1].rank)
    for size in reversed([*below, *above]):
        fits = (
            (choices_in_words(values_of(workload, names)), found.result)
            for workload, found in every
            if found.result.against_limit(size).fit is FitStatus.FITS
        )
        chosen, fastest = next(fits, ("", None))
        card = cards.get(size, "")
        yield AtLimit(limit_bytes=size, card=card, result=fastest, best=best, chosen=chosen)


def on_more_cards(search: WorkloadSearch) -> StepResult | None:
    """Return the step on the fewest of these cards on which it fits; None if that is not known.

    A few predictions: of zero3 on two, four and eight cards, until one fits, and there of the
    strategies that communicate less.

    Raises:
        Ended: it was cancelled.
    """
    base, card = search.space.base, search.target.card
    if base.sharding is not Sharding.NONE or card is None:
        return None
    for ranks in MORE_CARDS:
        device = of_several(ranks, card)
        fits = next(_fitting(search, device, ranks, (SMALLEST,)), None)
        if fits is not None:
            return next(_fitting(search, device, ranks, FASTER), fits)
    return None


def _fitting(
    search: WorkloadSearch, device: str, ranks: int, strategies: tuple[Sharding, ...]
) -> Iterator[StepResult]:
    """Yield the predictions that fit on a cluster."""
    for sharding in strategies:
        try:
            config = replace(search.space.base, sharding=sharding, world_size=ranks)
            found = Known().predicted(search.workload, config, device, search.options)
        except (ConfigError, DeviceError):  # a batch that does not divide, or no such machine
            continue
        result = search.judged(found)
        if found.size_model is not None and result.fit is FitStatus.FITS:
            yield result


def more_cards_in_words(result: StepResult, limit_bytes: int) -> str:
    """Return on how many cards a step fits, as the end of a sentence."""
    config, time = result.config, result.time_words
    return (
        f"on {config.world_size} of these cards (device={result.device!r}) it "
        f"{reason_of_limit(result, limit_bytes, 0.0)} each, with "
        f"sharding={str(config.sharding)!r}{f', at {time}' if time else ''}"
    )
