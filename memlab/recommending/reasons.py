"""What each setting of a recommendation saves and costs, in words."""

from collections.abc import Iterator, Mapping, Sequence

from memlab.arguments.quoting import shown
from memlab.arguments.units import format_bytes
from memlab.limits.judgement import Judgement
from memlab.recommending.alternatives import Alternative, counted, may_be_faster, time_width
from memlab.recommending.combinations import in_words as chosen_in_words
from memlab.recommending.combinations import values_of
from memlab.recommending.one_step import key_of
from memlab.recommending.search import Found
from memlab.recommending.space import Settings
from memlab.result import Outcome, StepResult, format_percent
from memlab.techniques.technique import in_words
from memlab.workload import Value, Workload

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
