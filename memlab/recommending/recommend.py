"""`recommend`: the fastest settings that fit a memory limit, with reasons.

The effective batch stays as it is. Settings are searched by prediction. If the device is in this
machine, a few are measured: the best of each number format, and the fastest after that.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from memlab.api import inspect_workload
from memlab.arguments.checks import checked, count, number, seconds, size
from memlab.arguments.units import format_bytes
from memlab.config import Sharding, StepConfig
from memlab.devices.card_table import TABLE
from memlab.devices.here import available_memory_bytes, resolve_device
from memlab.errors import MemlabError
from memlab.limits.judgement import Judgement
from memlab.recommending.alternatives import Alternative, counted
from memlab.recommending.confirming import confirmed, why_dropped
from memlab.recommending.every_rank import with_every_rank
from memlab.recommending.goal import MOST_STEPS, Goal, Steps
from memlab.recommending.known import known_of
from memlab.recommending.largest import limit_of
from memlab.recommending.ranks import more_cards_in_words, on_more_cards, with_ranks
from memlab.recommending.reasons import reasons_of
from memlab.recommending.recommendations import AtLimit, Recommendation, Recommendations
from memlab.recommending.search import PATIENCE, Found, search
from memlab.recommending.space import space_of
from memlab.records.targets import target_for
from memlab.records.where import is_here
from memlab.running import Ended
from memlab.techniques.sharding.sharding import most_ranks
from memlab.trace import Category
from memlab.worker.isolation import OnProgress, prewarm, runner
from memlab.workload import Workload

MOST_HEADROOM = 0.9
NEAREST_LIMITS = 2  # smaller ones, and larger ones
STANDING = (Category.PARAMETERS, Category.BUFFERS, Category.OPTIMIZER_STATE, Category.INPUTS)


@checked(
    memory_limit=size,
    headroom=number(0.0, MOST_HEADROOM),
    top=count(1),
    confirm=count(0),
    timeout_seconds=seconds,
)
def recommend(
    workload: Workload,
    memory_limit: int | str | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    *,
    config: StepConfig | None = None,
    allow: Sequence[str] | None = None,
    exact: bool = False,
    headroom: float = 0.0,
    top: int = 5,
    confirm: int = 3,
    world_size: int | None = None,
    seed: int = 0,
    timeout_seconds: float = 600,
    on_progress: OnProgress | None = None,
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

    Args:
        workload: what is trained.
        memory_limit: bytes, or text such as "24GiB": allocated on a CPU, reserved on CUDA. None is
            what PyTorch can reserve on the card, or the memory of this machine.
        batch_size: samples per optimizer update; None is that of `config`.
        device: as for `predict`; of a cluster all cards are used.
        config: what is already chosen: a field that is not at its default stays as it is.
        allow: names of the fields that may be changed, such as ["memory_budget", "optimizer"]. None
            is every field that leaves the training as it is but for rounding.
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
        seed: as for `predict`.
        timeout_seconds: as for `predict`, for each prediction and each run.
        on_progress: as for `measure`; the text says which step of the search is predicted.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed, the workload cannot be built, or the search was
            cancelled.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> ranked = recommend(workload, "64MiB", 32, "t4", allow=["accumulation_steps"])
    >>> ranked[0].config.accumulation_steps, ranked[0].result.fit
    (1, <Judgement.FITS: 'fits'>)
    """
    base = config or StepConfig()
    base = base if batch_size is None else replace(base, batch_size=batch_size)
    limit_bytes = limit_of(memory_limit, device)
    cluster = target_for(device, base).cluster
    base, any_strategy = with_ranks(base, world_size, cluster.num_devices if cluster else 1)
    target = target_for(device, base)
    has_times = base.sharding is Sharding.NONE or cluster is not None
    prewarm()  # the worker for predictions starts while this inspects
    facts = inspect_workload(workload, timeout_seconds=timeout_seconds)
    steps = Steps(on_progress)
    told: dict[str, Any] = {"on_progress": steps, "cancel": cancel}
    goal = Goal(
        workload=workload,
        space=space_of(
            base, allow, facts, exact=exact, any_strategy=any_strategy, has_times=has_times
        ),
        device=device,
        target=target,
        limit_bytes=int(limit_bytes * (1.0 - headroom)),
        most=top,
        each_format=confirm > 0 and _can_run(base, device),
        seed=seed,
        options={"seed": seed, "timeout_seconds": timeout_seconds, **told},
        run=runner(True, timeout_seconds, steps, cancel),
        known=known_of(workload, target, seed),
        steps=steps,
    )
    try:
        found = with_every_rank(goal, search(goal))
        return _answer(goal, found, limit_bytes, headroom, confirm if goal.each_format else 0)
    except Ended as ended:
        raise MemlabError(f"the recommendation of {workload.name!r} ended: {ended}") from None


def _answer(
    goal: Goal, found: Found, limit_bytes: int, headroom: float, confirm: int
) -> Recommendations:
    """Return what was found, the best of it measured."""

    def said(alternative: Alternative) -> Recommendation:
        result = alternative.result.against_limit(limit_bytes)
        reasons = reasons_of(alternative, found, limit_bytes, headroom)
        return Recommendation(result=result, reasons=reasons, predicted=result)

    predicted = [said(alternative) for alternative in found.fitting]
    measured = confirmed(
        predicted,
        [said(one) for one in found.close if one.result.fits] if _is_harmless(goal) else [],
        confirm,
        limit_bytes=limit_bytes,
        headroom=headroom,
        options={"workload": goal.workload, "device": goal.device, **goal.options},
    )
    done = measured.configs
    too_close = [said(one) for one in found.close if one.result.config not in done]
    rest = [one for one in predicted if one.config not in done]
    fitting = (*measured.kept, *sorted(rest, key=measured.seconds))[: goal.most]
    close = {one.result.config for one in found.close}
    more = None if fitting or too_close or not found.tried else on_more_cards(goal)
    message = _message(goal, found, fitting, too_close, limit_bytes)
    if more is not None:
        message = f"{message}; {more_cards_in_words(more, limit_bytes)}"
    why = [why_dropped(one, was_close=one.config in close) for one in measured.dropped]
    return Recommendations(
        fitting=fitting,
        message=message,
        limit_bytes=limit_bytes,
        too_close=tuple(too_close),
        dropped=tuple(one.result for one in measured.dropped),
        on_more_cards=more,
        other_limits=tuple(_other_limits(found, limit_bytes, goal.target.kind)),
        tried=tuple(one.result for one in found.tried if one.exact),
        estimated=tuple(one.result for one in found.latest() if not one.exact),
        num_measured=measured.num_runs,
        notes=(*goal.space.notes, *_notes(found), *why),
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


def _message(
    goal: Goal,
    found: Found,
    fitting: Sequence[Recommendation],
    too_close: Sequence[Recommendation],
    limit_bytes: int,
) -> str:
    """Return the answer in one sentence."""
    limit, name = format_bytes(limit_bytes), goal.workload.name
    batch = f"batch {goal.space.base.batch_size}"
    if fitting:
        best = fitting[0].result
        return f"{name}, {batch}, on {best.device}, within {limit}: {best.config}"
    if found.fitting:
        return (
            f"every setting of {name}, {batch}, that was predicted to fit {limit} failed when it "
            "was measured; the notes say how"
        )
    if too_close:
        return (
            f"no setting of {name}, {batch}, certainly fits {limit}; {len(too_close)} lie too "
            "near to it to say: measure them, or raise memory_limit"
        )
    if found.close:
        return (
            f"no setting of {name}, {batch}, fits {limit}: what was too close to say did not fit "
            "when it was measured; raise memory_limit, or use a smaller batch"
        )
    if not found.tried:
        why = next(iter(found.refused.values()), "no step could be predicted")
        return f"nothing can be recommended for {name}: {why}"

    least = min(found.latest(), key=lambda one: counted(one.result).nbytes).result
    peak = counted(least)
    text = (
        f"nothing that was tried fits {limit}: {name}, {batch}, takes at least "
        f"{format_bytes(peak.nbytes)} {peak.kind}, with {least.config}"
    )
    standing = sum((least.peak_by_category or {}).get(category, 0) for category in STANDING)
    if standing > goal.limit_bytes:
        return (
            f"{text}. {format_bytes(standing)} of it are parameters, buffers, optimizer state and "
            "inputs: use a smaller model, another optimizer (allow=['optimizer', ...]) or a larger "
            "card"
        )
    return f"{text}; use a smaller batch or a larger card"


def _notes(found: Found) -> list[str]:
    """Return sentences on what was left out."""
    notes = [f"{setting} is left out: {why}" for setting, why in found.refused.items() if setting]
    if not found.is_whole:
        notes.append(
            "Not every combination was tried: what saves no memory by itself is left out beside "
            f"other settings, and the search ends after {MOST_STEPS} recorded steps, or after "
            f"{PATIENCE} in a row that bring nothing faster. A faster setting may exist; name "
            "fewer fields in allow to search those wholly."
        )
    return notes


def _other_limits(found: Found, limit_bytes: int, kind: str) -> list[AtLimit]:
    """Return what the nearest other limits mean, as far as the search has seen.

    Limits are what cards can hold; halves and doubles on a CPU, or if the limit is smaller.
    """
    if not found.fitting:
        return []
    cards = {card.usable_bytes: card.name for card in TABLE if kind == "cuda"}
    sizes = sorted(cards)
    if not sizes or limit_bytes < sizes[0]:
        sizes = [limit_bytes // 4, limit_bytes // 2, 2 * limit_bytes]
    near = {size for size in sizes if abs(size / limit_bytes - 1.0) < 0.05}
    below = [size for size in sizes if size < limit_bytes and size not in near]
    above = [size for size in sizes if size > limit_bytes and size not in near]
    nearest = [*below[-NEAREST_LIMITS:], *above[:1]]
    return [_at_limit(found, size, cards.get(size, "")) for size in reversed(nearest)]


def _at_limit(found: Found, limit_bytes: int, card: str) -> AtLimit:
    """Return the fastest of what was tried that fits another limit, by its upper estimate."""
    best = found.fitting[0].seconds
    by_rank = sorted(found.latest(), key=lambda alternative: alternative.rank)
    fits = (
        alternative
        for alternative in by_rank
        if alternative.result.against_limit(limit_bytes).fit is Judgement.FITS
    )
    fastest = next(fits, None)
    if fastest is None:
        return AtLimit(limit_bytes=limit_bytes, card=card, result=None, slower=None)
    is_known = 0.0 < best < float("inf") and fastest.seconds < float("inf")
    slower = fastest.seconds / best - 1.0 if is_known else None
    return AtLimit(limit_bytes=limit_bytes, card=card, result=fastest.result, slower=slower)
