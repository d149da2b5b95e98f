"""`recommend`: the fastest settings that fit a memory limit, with reasons.

The effective batch stays as it is. Settings are searched by prediction. If the device is in this
machine, a few are measured: the best of each number format, and the fastest after that.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from memlab._util.checks import anything, checked, count, number, seconds, size
from memlab.api import accumulation_effect, inspect_workload, measure
from memlab.config import Precision, Sharding, StepConfig
from memlab.devices.here import available_memory_bytes, resolve_device
from memlab.errors import MemlabError, WorkloadError
from memlab.result import Judgement, Outcome, StepResult
from memlab.running import Ended
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress
from memlab.search.alternatives import Alternative, may_be_faster, space_of
from memlab.search.answer import (
    Searched,
    least_of,
    message_of,
    more_cards_in_words,
    notes_of,
    on_more_cards,
    other_limits,
    reason_of_limit,
    recommendation,
    with_ranks,
)
from memlab.search.goal import Goal, Steps, known_of
from memlab.search.largest_batch import limit_of
from memlab.search.recommendations import (
    Choices,
    Combinations,
    Recommendation,
    Recommendations,
    combinations_of,
)
from memlab.search.search import Found, search_together
from memlab.store.recorded import is_here, target_for
from memlab.techniques.sharding.sharding import most_ranks
from memlab.workload import Workload

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
        has_no_room = result.outcome is Outcome.OUT_OF_MEMORY or result.fits is False
        is_ok = result.outcome is Outcome.OK and bool(result.fits)
        if before and not is_ok and not has_no_room:
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
    is_too_large = result.outcome is Outcome.OUT_OF_MEMORY or result.fits is False
    how = "did not fit when it was measured" if is_too_large else "could not be measured"
    return f"{result.config} {before}, and {how}: {result.message}"


# The other ranks of what is recommended: the search records of each step the rank that
# holds most.
#
# With ZeRO-1 every rank holds something else, and with `fully_shard` the last ones may hold
# less. To compare settings one rank is enough. Of the settings that are returned all are
# predicted, as `memlab.predict` does.


def with_every_rank(goal: Goal, found: Found) -> Found:
    """Return what a search found, with every rank of the best and of what is too close to say.

    A rank that holds less may reserve a little more, so that the best are judged again.

    Raises:
        Ended: it was cancelled.
    """
    waiting, fitting, close = list(found.fitting), list[Alternative](), list[Alternative]()
    while waiting and len(fitting) < goal.most and not (fitting and goal.steps.is_over):
        one = _whole(goal, waiting.pop(0))
        if one.result.fit is Judgement.FITS:
            fitting.append(one)
        elif one.result.fit is Judgement.TOO_CLOSE:
            close.append(one)
    close += [one if goal.steps.is_over else _whole(goal, one) for one in found.close]

    looked_at = {one.result.config: one for one in (*fitting, *close)}
    return replace(
        found,
        fitting=[*sorted(fitting, key=lambda one: one.rank), *waiting],
        close=sorted(close, key=lambda one: one.rank),
        tried=[looked_at.get(one.result.config, one) for one in found.tried],
    )


def _whole(goal: Goal, one: Alternative) -> Alternative:
    """Return an alternative with every rank; as it is if nothing is missing."""
    config = one.result.config
    if config not in goal.known.of_one_rank:
        return one
    whole = goal.known.predicted(goal.workload, config, goal.device, goal.options)
    if whole.result.outcome is not Outcome.OK or whole.forecast is None:
        return one
    return replace(one, result=whole.forecast.against_limit(whole.result, goal.limit_bytes))


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
            the search has taken, and what is the best so far.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed, the workload has no such choice, it cannot be
            built, or the search was cancelled.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> ranked = recommend(workload, "64MiB", 32, "t4", allow=["accumulation_steps"])
    >>> ranked[0].config.accumulation_steps, ranked[0].result.fit
    (1, <Judgement.FITS: 'fits'>)
    """
    steps = Steps(on_progress, patience)
    base = config or StepConfig()
    base = base if batch_size is None else replace(base, batch_size=batch_size)
    combinations = combinations_of(workload, choices)
    limit_bytes = limit_of(memory_limit, device)
    cluster = target_for(device, base).cluster
    base, any_strategy = with_ranks(base, world_size, cluster.num_devices if cluster else 1)
    target = target_for(device, base)
    has_times = base.sharding is Sharding.NONE or cluster is not None

    def goal_of(one: Workload) -> Goal:
        """Return what is searched of one workload."""
        known = known_of(one, target, seed, beside=len(combinations.workloads))
        start: StepResult | None = None
        if len(combinations.workloads) == 1:  # the search begins with this prediction
            start = known.predicted(one, base, device, {
                "seed": seed, "timeout_seconds": timeout_seconds,
                "on_progress": steps, "cancel": cancel,
            }, every_rank=False).result  # fmt: skip
        if start is None or start.outcome not in (Outcome.OK, Outcome.UNSUPPORTED):
            inspect_workload(one, timeout_seconds=timeout_seconds)  # it raises if that has no model
        return Goal(
            workload=one,
            space=space_of(
                base,
                allow,
                partial(
                    accumulation_effect,
                    one,
                    timeout_seconds=min(patience / 2, LONGEST_TRIAL),  # for each of two trials
                    on_progress=steps,
                    cancel=cancel,
                ),
                exact=exact,
                any_strategy=any_strategy,
                has_times=has_times,
            ),
            device=device,
            target=target,
            limit_bytes=int(limit_bytes * (1.0 - headroom)),
            most=top,
            each_format=confirm > 0 and _can_run(base, device),
            seed=seed,
            timeout_seconds=timeout_seconds,
            cancel=cancel,
            known=known,
            steps=steps,
        )

    try:
        goals, combinations = _possible(combinations, goal_of)
        searched = [
            Searched(goal=goal, found=with_every_rank(goal, found))
            for goal, found in zip(goals, search_together(goals), strict=True)
        ]
        return _answer(combinations, searched, limit_bytes, headroom, confirm)
    except Ended as ended:
        raise MemlabError(f"the recommendation of {workload.name!r} ended: {ended}") from None


def _possible(
    combinations: Combinations, goal_of: Callable[[Workload], Goal]
) -> tuple[list[Goal], Combinations]:
    """Return a goal for each workload that can be built, and the combinations without the others.

    Raises:
        MemlabError: none can be built.
    """
    goals = list[Goal]()
    for one in combinations.workloads:
        try:
            goals.append(goal_of(one))
        except WorkloadError as error:
            if len(combinations.workloads) == 1:
                raise
            combinations = combinations.without(one, str(error))
    return goals, combinations


def _answer(
    combinations: Combinations,
    searched: Sequence[Searched],
    limit_bytes: int,
    headroom: float,
    confirm: int,
) -> Recommendations:
    """Return what was found, the best of it measured."""
    goal = searched[0].goal

    def said(found: Iterable[tuple[Searched, Alternative]]) -> list[Recommendation]:
        """Return what was found of all workloads, the fastest first."""
        return [
            recommendation(one, alternative, combinations, searched, limit_bytes, headroom)
            for one, alternative in sorted(found, key=lambda pair: pair[1].rank)
        ]

    predicted = said((one, each) for one in searched for each in one.found.fitting)
    close = said((one, each) for one in searched for each in one.found.close)
    measured = confirmed(
        predicted,
        [one for one in close if one.result.fits] if _is_harmless(goal) else [],
        confirm if goal.each_format else 0,
        limit_bytes=limit_bytes,
        headroom=headroom,
        options={
            **goal.options,
            "workload": goal.workload,
            "device": goal.device,
            "timeout_seconds": goal.timeout_seconds,
        },
    )
    too_close = [one for one in close if key_of_result(one.result) not in measured.keys]
    rest = [one for one in predicted if key_of_result(one.result) not in measured.keys]
    fitting = (*measured.kept, *sorted(rest, key=measured.seconds))[: goal.most]
    near = {key_of_result(one.result) for one in close}
    least = least_of(searched)
    more = None if fitting or too_close or least is None else on_more_cards(least[0].goal)
    message = message_of(searched, fitting, too_close, limit_bytes)
    if more is not None:
        message = f"{message}; {more_cards_in_words(more, limit_bytes)}"
    why = [
        why_dropped(one, was_close=key_of_result(one.predicted) in near) for one in measured.dropped
    ]
    tried = [one for each in searched for one in each.found.tried if one.exact]
    latest = [one for each in searched for one in each.found.latest()]
    return Recommendations(
        fitting=fitting,
        message=message,
        limit_bytes=limit_bytes,
        workloads=tuple(one.goal.workload for one in searched),
        too_close=tuple(too_close),
        dropped=tuple(one.result for one in measured.dropped),
        on_more_cards=more,
        other_limits=tuple(other_limits(combinations, searched, limit_bytes)),
        tried=tuple(one.result for one in tried),
        estimated=tuple(one.result for one in latest if not one.exact),
        num_measured=measured.num_runs,
        notes=(*notes_of(combinations, searched, (*fitting, *too_close), limit_bytes), *why),
    )


def _can_run(config: StepConfig, device: str | torch.device | None) -> bool:
    """Return whether this machine has the devices for all ranks."""
    return is_here(device) and config.world_size <= most_ranks(resolve_device(device))


def _is_harmless(goal: Goal) -> bool:
    """Return whether a run that takes a little more than the limit does no harm.

    On a CPU the limit is only compared with what a step took; the machine must have the memory.
    """
    available, ranks = available_memory_bytes() or 0, goal.space.base.world_size
    return goal.target.kind == "cpu" and ranks * goal.limit_bytes < available / 2
