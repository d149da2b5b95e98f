"""`recommend`: the fastest settings that fit a memory limit, with reasons.

The effective batch stays as it is. Settings are searched by prediction. If the device is in this
machine, a few are measured: the best of each number format, and the fastest after that.
"""

import itertools
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from memlab._util.checks import anything, checked, count, number, seconds, size
from memlab._util.units import is_a, shown
from memlab.api import accumulation_effect, inspect_workload, measure
from memlab.config import Precision, Sharding, StepConfig
from memlab.devices.here import available_memory_bytes, resolve_device
from memlab.errors import ConfigError, MemlabError, WorkloadError
from memlab.result import Outcome, StepResult
from memlab.running import Ended
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress
from memlab.search.alternatives import Space, may_be_faster, space_of
from memlab.search.answer import (
    Recommendation,
    Recommendations,
    choices_in_words,
    least_of,
    message_of,
    more_cards_in_words,
    notes_of,
    on_more_cards,
    other_limits,
    reason_of_limit,
    recommendation,
    values_of,
)
from memlab.search.largest_batch import limit_of
from memlab.search.search import Known, Race, WorkloadSearch, known_of
from memlab.store.recorded import is_here, target_for
from memlab.techniques.sharding.sharding import most_ranks
from memlab.workload import Value, Workload

# The workloads that `recommend` chooses among: one for each combination of what may be
# chosen.
#
# A combination that a workload refuses, such as a 4-bit base without an adapter, is left
# out with its reason. Combinations that give the same workload, such as two ranks without
# low-rank matrices, are one.

MOST_COMBINATIONS = 64
Choices = Mapping[str, Sequence[Value]]


@dataclass(kw_only=True, slots=True)
class Combinations:
    """What a search chooses among.

    Attributes:
        names: of what is chosen, in the order in which a person has given them.
        workloads: that can be made, by name; the first is the given one if it is among them.
        left_out: why others were left out, by the combination in words.
        num_possible: combinations that were not left out; some give the same workload.
    """

    names: tuple[str, ...] = ()
    workloads: dict[str, Workload]
    left_out: dict[str, str] = field(default_factory=dict)
    num_possible: int = 1

    def leave_out(self, workload: Workload, why: str) -> None:
        """Leave out a workload that turned out to be impossible."""
        del self.workloads[workload.name]
        self.left_out[choices_in_words(values_of(workload, self.names))] = why
        self.num_possible -= 1


def combinations_of(workload: Workload, choices: Choices | None) -> Combinations:
    """Return the workloads of all combinations of these choices; the workload alone for None.

    Raises:
        ConfigError: a name or a value that the workload does not have, too many combinations, or
            none that can be made.
    """
    if choices is None:
        return Combinations(workloads={workload.name: workload})

    asked = _checked(workload, choices)
    found = Combinations(names=tuple(asked), workloads={}, num_possible=0)
    possible, refused = set[tuple[str, Value]](), dict[tuple[str, Value], str]()
    for each in itertools.product(*asked.values()):
        values = dict(zip(asked, each, strict=True))
        try:
            one = workload.chosen(**values)
        except WorkloadError as error:
            found.left_out[choices_in_words(values)] = str(error)
            for pair in values.items():
                refused.setdefault(pair, str(error))
            continue
        found.num_possible += 1
        found.workloads.setdefault(one.name, one)
        possible.update(values.items())

    for name, value in refused:
        if (name, value) not in possible:
            _check_is_had(workload, name, value)
    if not found.workloads:
        what, why = next(iter(found.left_out.items()))
        raise ConfigError(
            f"choices={shown(dict(asked))} leaves nothing to choose: {what}: {why}; add a value "
            "that goes with the others"
        )
    if workload.name in found.workloads:
        given = {workload.name: found.workloads[workload.name]}
        found.workloads = given | found.workloads
    return found


def _checked(workload: Workload, choices: Any) -> Mapping[str, tuple[Value, ...]]:
    """Return the choices, each as a tuple without repeated values."""
    known = list(workload.choices.values) if workload.choices else []
    has = f"the choices of {workload.name} are {known}" if known else f"{workload.name} has none"
    if not is_a(choices, Mapping):
        raise ConfigError(
            f"choices={shown(choices)} is of type {type(choices).__name__}; allowed is a dict of "
            f"lists, such as choices={_example(workload)}"
        )
    if not choices:
        raise ConfigError(f"choices={shown(choices)} names nothing; pass None to vary nothing")
    asked = dict[str, tuple[Value, ...]]()
    for name, values in choices.items():
        if not is_a(name, str) or name not in known:
            raise ConfigError(f"choices names {shown(name)}; {has}")
        if not is_a(values, list | tuple) or not values or not all(map(_is_value, values)):
            raise ConfigError(
                f"choices[{name!r}]={shown(values)}; allowed is a list of at least one value, each "
                "a text, an int, True, False, None or a tuple of texts"
            )
        asked[name] = tuple(dict.fromkeys(values))
    count = math.prod(map(len, asked.values()))
    if count > MOST_COMBINATIONS:
        raise ConfigError(
            f"choices={shown(dict(asked))} has {count} combinations; allowed are at most "
            f"{MOST_COMBINATIONS}: name fewer values"
        )
    return asked


def _example(workload: Workload) -> str:
    """Return choices as a person may write them for this workload."""
    if workload.choices is None:
        return "{'adapter': ['lora', 'dora']}"
    name, values = next(iter(workload.choices.offered.items()))
    return str({name: [*values[:2]]})


def _is_value(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(one) is str for one in value)
    return value is None or type(value) in (str, int, bool)


def _check_is_had(workload: Workload, name: str, value: Value) -> None:
    """Raise ConfigError if a value goes with nothing, and not because of what it was put beside."""
    assert workload.choices is not None
    known = workload.choices.offered[name]
    if any(type(value) is type(one) and value == one for one in known):
        return  # only what it was put beside is wrong
    try:
        workload.chosen(**{name: value})
    except WorkloadError as error:
        offered = ", ".join(map(shown, known))
        raise ConfigError(
            f"choices[{name!r}] has {shown(value)}: {error}; {workload.name} offers {offered}"
        ) from None


# Which of the settings that were found are measured, where the device is in this machine.
#
# Predicted times of one number format are wrong by much the same factor, since its kernels
# are the same; those of two formats are not. So the best of each format that may be the
# fastest is measured first. What these runs took corrects the predicted times of their
# format, and the fastest by that is measured last.
#
# Other programs make a run slower and never faster. So if the repeats of the two that may
# be the fastest overlap, both are run once more, and of each the faster run counts.

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
        return {key_of_result(one.result) for one in (*self.kept, *self.dropped)}

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
        key = key_of_result(one.result)
        before = [kept for kept in self.kept if key_of_result(kept.result) == key]
        is_ok = result.outcome is Outcome.OK and bool(result.fits)
        if before and not is_ok and not _has_no_room(result):
            return
        self.kept = [kept for kept in self.kept if key_of_result(kept.result) != key]
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

    for turn in range(most):
        is_likely_next = not certain if turn == 0 else not found.keys & _keys(likely)
        left = [
            one
            for one in [*certain, *(likely if is_likely_next else ())]
            if key_of_result(one.result) not in found.keys
        ]
        if not left:
            break
        of_formats = _of_other_formats(left, found, [*certain, *likely])
        is_for_formats = turn < max(FORMATS_FIRST, most - 1)
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


def key_of_result(result: StepResult) -> Key:
    """Return of which workload a step is, and its settings."""
    return result.workload_name, result.config


def _format_of(one: Recommendation) -> tuple[str, Precision]:
    """Return the workload and the precision: a workload as built has formats of its own."""
    return one.predicted.workload_name, one.config.precision


def _keys(some: Collection[Recommendation]) -> set[Key]:
    return {key_of_result(one.result) for one in some}


def why_dropped(one: Recommendation, *, was_close: bool) -> str:
    """Return a sentence on a setting that was measured and is not recommended."""
    before = "was too close to say" if was_close else "was predicted to fit"
    result = one.result
    how = "did not fit when it was measured" if _has_no_room(result) else "could not be measured"
    return f"{result.config} {before}, and {how}: {result.message}"


def _has_no_room(result: StepResult) -> bool:
    return result.outcome is Outcome.OUT_OF_MEMORY or result.fits is False


MOST_HEADROOM = 0.9
LONGEST_TRIAL = 60.0  # seconds, of whether micro-batches give the same gradient


@checked(
    memory_limit=size,
    headroom=number(0.0, MOST_HEADROOM),
    choices=anything,  # `combinations_of` checks them
    top=count(1),
    confirm=count(0),
    patience=seconds,
    timeout_seconds=seconds,
)
@shows_progress
def recommend(
    workload: Workload,
    memory_limit: int | str | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    *,
    config: StepConfig | None = None,
    allow: Sequence[str] | None = None,
    choices: Choices | None = None,
    exact: bool = False,
    headroom: float = 0.0,
    top: int = 5,
    confirm: int = 3,
    world_size: int | None = None,
    patience: float = 60,
    seed: int = 0,
    timeout_seconds: float = 600,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> Recommendations:
    """Return the fastest settings that fit a memory limit, the best first.

    Number formats, recomputing, micro-batches and the other techniques are tried by prediction. A
    setting that lies too near to the limit to say whether it fits is in `too_close`; it is never
    recommended unless a run has shown that it fits. The batch size stays as it is, and the
    optimizer too unless `allow` names it.

    Of several ranks their strategies are searched too, and each must fit the limit. Where no time
    of communication is known, what fits is ordered by the bytes that a rank sends. For a card on
    which nothing fits, the message says on how many of them something does.

    With `choices` the workload is searched too, for instance its adapter: all that the workload
    offers may be named (`Workload.choices`). Another adapter, rank or base trains another model, so
    these are compared by memory and time alone. Each combination is predicted once as it is; a
    step that is too slow beside what another combination has found is not predicted.

    Args:
        workload: what is trained.
        memory_limit: bytes, or text such as "24GiB": allocated on a CPU, reserved on CUDA. None is
            what PyTorch can reserve on the card, or the memory of this machine.
        batch_size: samples per optimizer update; None is that of `config`.
        device: as for `predict`; of a cluster all cards are used.
        config: what is already chosen: a field that is not at its default stays as it is.
        allow: names of the fields that may be changed, such as ["memory_budget", "optimizer"]. None
            is every field that leaves the training as it is but for rounding.
        choices: by name, the values that the workload may have, such as {"adapter": ["lora",
            "none"], "base": ["bf16", "nf4"], "rank": [8, 64]}. A combination that the workload
            refuses is left out, and the notes say why. None: the workload stays as it is.
        exact: try only what changes no bit of the gradient, and micro-batches that change nothing
            but the order of a sum.
        headroom: the share of the limit that is to stay free, 0 to 0.9.
        top: the most settings to return.
        confirm: the most settings that are measured, if the device is in this machine: first the
            best of each number format that may be the fastest, last what is the fastest after
            these runs. On a CPU one of them may be too close to say, but more likely to fit. The
            two fastest are run once more if their times overlap.
        world_size: number of ranks; None is that of `config`, or all cards of a cluster. Without a
            sharding in `config` their strategy is searched.
        patience: seconds that the search may take, without the runs of `confirm`. Then what was
            found so far is returned, and the notes say what was not tried. The prediction that goes
            on is ended first; while nothing fits, the search takes up to twice as long. The step as
            it is, is always predicted.
        seed: as for `predict`.
        timeout_seconds: as for `predict`, for each prediction and each run.
        on_progress: as for `measure`; the text says which step of the search is predicted, how long
            the search has taken, and what is the best so far. A new best so far is told as a
            `memlab.search.search.BestSoFar`, which has its result.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed, the workload has no such choice, it cannot be
            built, or the search was cancelled.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> ranked = recommend(workload, "64MiB", 32, "t4", allow=["accumulation_steps"])
    >>> ranked[0].config.accumulation_steps, ranked[0].result.fit
    (1, <FitStatus.FITS: 'fits'>)
    """
    base = config or StepConfig()
    base = base if batch_size is None else replace(base, batch_size=batch_size)
    combinations = combinations_of(workload, choices)
    limit_bytes = limit_of(memory_limit, device)
    cluster = target_for(device, base).cluster
    base, any_strategy = with_ranks(base, world_size, cluster.num_devices if cluster else 1)
    target = target_for(device, base)
    race = Race(on_progress, patience, top)
    options: dict[str, Any] = {"seed": seed, "timeout_seconds": timeout_seconds, "cancel": cancel}

    def space(one: Workload) -> Space:
        """Return what may be changed of one workload."""
        effect = partial(
            accumulation_effect,
            one,
            timeout_seconds=min(patience / 2, LONGEST_TRIAL),  # for each of two trials
            on_progress=race,
            cancel=cancel,
        )
        has_times = base.sharding is Sharding.NONE or cluster is not None
        return space_of(
            base, allow, effect, exact=exact, any_strategy=any_strategy, has_times=has_times
        )

    try:
        for one in list(combinations.workloads.values()):
            known = known_of(one, target, seed, beside=len(combinations.workloads))
            try:
                begin = None if len(combinations.workloads) > 1 else base
                _check_is_built(one, known, begin, device, {**options, "on_progress": race})
            except WorkloadError as error:
                if len(combinations.workloads) == 1:
                    raise
                combinations.leave_out(one, str(error))
                continue
            race.searches.append(WorkloadSearch(
                workload=one, space=space(one), device=device, target=target, known=known,
                race=race, limit_bytes=int(limit_bytes * (1.0 - headroom)),
                each_format=confirm > 0 and _can_run(base, device), **options,
            ))  # fmt: skip
        race.run()
        for search in race.searches:
            search.add_every_rank()
        return _answer(combinations, race, limit_bytes, headroom, confirm)
    except Ended as ended:
        raise MemlabError(f"the recommendation of {workload.name!r} ended: {ended}") from None


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


def _check_is_built(
    workload: Workload, known: Known, begin: StepConfig | None, device: Any, options: dict[str, Any]
) -> None:
    """Raise WorkloadError if a workload has no model; `begin` is predicted first, if it is one.

    Where the search has one workload it begins with this prediction.
    """
    if begin is not None:
        start = known.predicted(workload, begin, device, options, every_rank=False).result
        if start.outcome in (Outcome.OK, Outcome.UNSUPPORTED):
            return
    inspect_workload(workload, timeout_seconds=options["timeout_seconds"])


def _answer(
    combinations: Combinations, race: Race, limit_bytes: int, headroom: float, confirm: int
) -> Recommendations:
    """Return what was found, the best of it measured."""
    names, searches, first = combinations.names, race.searches, race.searches[0]

    def said(what: str) -> list[Recommendation]:
        """Return what was found of all workloads, the fastest first."""
        found = [(one, each) for one in searches for each in getattr(one, what)]
        return [
            recommendation(one, each, names, searches, limit_bytes, headroom)
            for one, each in sorted(found, key=lambda pair: pair[1].rank)
        ]

    predicted, close = said("fitting"), said("close")
    measured = confirmed(
        predicted,
        [one for one in close if one.result.fits] if _is_harmless(first) else [],
        confirm if first.each_format else 0,
        limit_bytes=limit_bytes,
        headroom=headroom,
        options={
            **first.options,
            "workload": first.workload,
            "device": first.device,
            "timeout_seconds": first.timeout_seconds,
        },
    )
    too_close = [one for one in close if key_of_result(one.result) not in measured.keys]
    rest = [one for one in predicted if key_of_result(one.result) not in measured.keys]
    fitting = (*measured.kept, *sorted(rest, key=measured.seconds))[: race.most]
    least = least_of(searches)
    more = None if fitting or too_close or least is None else on_more_cards(least[0])
    message = message_of(searches, fitting, too_close, limit_bytes)
    if more is not None:
        message = f"{message}; {more_cards_in_words(more, limit_bytes)}"
    notes = notes_of(
        names, combinations.left_out, combinations.num_possible, searches,
        (*fitting, *too_close), limit_bytes,
    )  # fmt: skip
    near = {key_of_result(one.result) for one in close}
    why = [
        why_dropped(one, was_close=key_of_result(one.predicted) in near) for one in measured.dropped
    ]
    return Recommendations(
        fitting=fitting,
        message=message,
        limit_bytes=limit_bytes,
        workloads=tuple(one.workload for one in searches),
        too_close=tuple(too_close),
        dropped=tuple(one.result for one in measured.dropped),
        on_more_cards=more,
        other_limits=tuple(other_limits(names, searches, limit_bytes)),
        tried=tuple(each.result for one in searches for each in one.tried if each.exact),
        estimated=tuple(each.result for one in searches for each in one.latest() if not each.exact),
        num_measured=measured.num_runs,
        notes=(*notes, *why),
    )


def _can_run(config: StepConfig, device: str | torch.device | None) -> bool:
    """Return whether this machine has the devices for all ranks."""
    return is_here(device) and config.world_size <= most_ranks(resolve_device(device))


def _is_harmless(search: WorkloadSearch) -> bool:
    """Return whether a run that takes a little more than the limit does no harm.

    On a CPU the limit is only compared with what a step took; the machine must have the memory.
    """
    available, ranks = available_memory_bytes() or 0, search.space.base.world_size
    return search.target.kind == "cpu" and ranks * search.limit_bytes < available / 2
