"""What a prediction of one batch size says of another, by the arithmetic of its `BatchSizeModel`.

No model runs and none is recorded again. Between the two recorded sizes, and beyond them, the
workspace of kernels is interpolated, and the result states a larger uncertainty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from memlab._util.units import MIB, format_bytes
from memlab.config import Sharding, StepConfig
from memlab.cost_model.overlap import HOST_HALF_WIDTH
from memlab.cost_model.targets import OF_ITS_TIME
from memlab.memory.lifetimes import step_memory
from memlab.result import StepResult
from memlab.techniques import registry
from memlab.techniques.checkpointing import checkpointing
from memlab.techniques.offload import offload
from memlab.trace import CATEGORIES, PHASES, Category, Phase, Timeline
from memlab.tracing.program import MOST_RECORDED

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

    from memlab.prediction.batch_size_model import BatchSizeModel
    from memlab.prediction.budget_frontier import BudgetFrontier
    from memlab.prediction.predict import Prediction
    from memlab.techniques.technique import Plan

LOST = ("needed_bytes", "watts")  # of an estimate
# added to each uncertainty between recorded sizes; see tests/system/test_panel_forecasts.py
INTERPOLATED = 0.03


def interpolated(base: Prediction, config: StepConfig) -> StepResult:
    """Return what the size model of another prediction says of this config, which it must cover.

    The result has no limit: `BatchSizeModel.against_limit` judges whether it fits one.
    """
    size_model, sizes = base.size_model, config.micro_batch_sizes
    assert size_model is not None
    exact = size_model.is_exact(sizes)
    trace, reserved = size_model.trace(sizes)
    memory = step_memory(trace, 1)
    seconds = (
        size_model.step_seconds(sizes) or None
    )  # 0: timing noise, drawn out beyond the recorded
    spread = dict(base.result.uncertainty or {})
    if not exact:
        if "step_seconds" in spread:
            by_host = HOST_HALF_WIDTH * size_model.host_share(sizes)
            spread["step_seconds"] = max(spread["step_seconds"], by_host)
        spread = {name: width + INTERPOLATED for name, width in spread.items()}

    # how much offloading holds in host memory is known of the batch that was recorded
    of_batch = offload.notes(
        base.result.config, size_model.program.recording.host_memory, base.result.timeline
    )
    is_same = sizes == base.result.config.micro_batch_sizes

    how = "predicted" if exact else "interpolated"
    return dataclasses.replace(
        base.result,
        message=f"{how} peak {format_bytes(memory.peak_bytes)} allocated in {memory.peak_place}",
        config=config,
        timeline=memory.timeline,
        peak_allocated_bytes=memory.peak_bytes,
        peak_reserved_bytes=reserved,
        needed_bytes=None,  # searching for it takes as long as drawing the picture several times
        peak_by_category=memory.timeline.peak_by_category,
        peak_place=memory.peak_place,
        peak_holdings=memory.holdings(),
        first_step_peak_bytes=step_memory(trace, 0).peak_bytes,
        host_bytes=base.result.host_bytes if is_same else None,
        locked_host_bytes=base.result.locked_host_bytes if is_same else None,
        saving_peak_bytes=_saving_peak(base.result, memory.timeline),
        step_seconds=seconds,
        watts=base.result.watts if is_same else None,
        samples_per_second=config.batch_size / seconds if seconds else None,
        uncertainty=spread,
        notes=tuple(
            note
            for note in base.result.notes
            if is_same or not (note in of_batch or note.startswith(OF_ITS_TIME))
        ),
        memory_limit_bytes=None,
        fits=None,
        close_to_limit=None,
        fit=None,
        printed="",  # the shapes that it may name are of another batch
    )


def _saving_peak(result: StepResult, timeline: Timeline) -> int | None:
    """Return the peak of saving after this timeline: what is added does not depend on the batch."""
    if result.saving_peak_bytes is None or result.timeline is None:
        return None
    more = timeline.total_bytes[-1] - result.timeline.total_bytes[-1]
    return result.saving_peak_bytes + int(more)


# An estimate: the result of another config, with a timeline that was put together for this
# one.


def estimated(
    result: StepResult,
    config: StepConfig,
    timeline: Timeline,
    *,
    reserved_bytes: int | None,
    seconds: float | None,
    uncertainty: Mapping[str, float],
    of_what: str,
) -> StepResult:
    """Return what the result of another config says of this one.

    The result has no limit. Where in the model the memory is held is not known, nor how much
    the step needs.

    Args:
        result: of the other config.
        config: what is wanted.
        timeline: of a step with this config.
        reserved_bytes: the peak of reserved bytes; None if there is no caching allocator.
        seconds: the time of a step; None if it is not known.
        uncertainty: half-widths, relative, by field.
        of_what: the other config in words, for the message.
    """
    peak = int(timeline.total_bytes.max())
    return dataclasses.replace(
        result,
        message=f"estimated peak {format_bytes(peak)} allocated, from {of_what}",
        config=config,
        timeline=timeline,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved_bytes,
        needed_bytes=None,
        peak_by_category=timeline.peak_by_category,
        peak_place=None,
        peak_holdings=(),
        first_step_peak_bytes=None,
        saving_peak_bytes=None,
        saving_host_bytes=None,
        host_bytes=None,
        locked_host_bytes=None,
        step_seconds=seconds,
        watts=None,
        samples_per_second=config.batch_size / seconds if seconds else None,
        uncertainty={name: width for name, width in uncertainty.items() if name not in LOST},
        notes=tuple(note for note in result.notes if not note.startswith(OF_ITS_TIME)),
        memory_limit_bytes=None,
        fits=None,
        close_to_limit=None,
        fit=None,
    )


# What a prediction of one number of micro-batches says of another number: an estimate.
#
# A step with two micro-batches does twice what a step with one does, except that gradients
# are there when the second one begins. So its timeline can be put together from pieces of
# another step whose micro-batches have the same size:
#
#     recorded       forward 0, backward 0, optimizer
#     two wanted     forward 0, backward 0, forward 0*, backward 0*, optimizer
#
# Over a piece with a star every gradient is held from its beginning on. What its backward
# computes is added to these gradients and freed at once. If two micro-batches or more were
# recorded, the pieces are those of the recorded ones, and fewer can be had by leaving some
# out.
#
# Left out: what a micro-batch leaves to the next one, and where in the model memory is
# allocated.

# added to each uncertainty; see tests/system/test_panel_forecasts.py
REGROUPED = 0.03
ADDITIONS = 0.3  # more for time, where the kernels that add to gradients were not recorded
INPUTS, GRADIENTS, TEMPORARIES = (
    CATEGORIES.index(category)
    for category in (Category.INPUTS, Category.GRADIENTS, Category.TEMPORARIES)
)


def can_regroup(size_model: BatchSizeModel, config: StepConfig) -> bool:
    """Return whether a recorded step has micro-batches like those of this config.

    No two micro-batches of a rank of several are alike: what they gather, others use again.
    """
    if config.sharding is not Sharding.NONE:
        return False
    sizes = (config.micro_batch_size,) * size_model.program.num_recorded
    if not size_model.covers(sizes):
        return False
    return not registry.is_refused(config, "cpu" if size_model.settings is None else "cuda")


def estimate_accumulation(
    base: Prediction, config: StepConfig, *, most_drawn: int | None = None
) -> StepResult:
    """Return what another number of micro-batches would cost, which `can_regroup` must allow.

    The result has no limit.

    Args:
        base: the prediction of another config.
        config: what is wanted.
        most_drawn: as for `with_micro_batches`.
    """
    size_model = base.size_model
    assert size_model is not None
    count, recorded = config.accumulation_steps, size_model.program.num_recorded
    same = dataclasses.replace(
        config,
        batch_size=config.micro_batch_size * recorded,
        accumulation_steps=recorded,
    )
    told = interpolated(base, same)
    assert told.timeline is not None
    timeline = with_micro_batches(told.timeline, count, most_drawn=most_drawn)
    peak = int(timeline.total_bytes.max())
    more = peak - (told.peak_allocated_bytes or 0)
    reserved = told.peak_reserved_bytes

    each = size_model.micro_batch_seconds(config.micro_batch_size)
    seconds = None
    if told.step_seconds is not None and each is not None:
        seconds = told.step_seconds + (count - recorded) * each

    return estimated(
        told,
        config,
        timeline,
        reserved_bytes=None if reserved is None else reserved + more,
        seconds=seconds,
        uncertainty=_wider(told.uncertainty or {}, has_additions=recorded > 1),
        of_what=f"a step with {recorded} micro-batches",
    )


def _wider(uncertainty: Mapping[str, float], *, has_additions: bool) -> dict[str, float]:
    found = {name: width + REGROUPED for name, width in uncertainty.items()}
    if "step_seconds" in found and not has_additions:
        found["step_seconds"] += ADDITIONS
    return found


def with_micro_batches(
    timeline: Timeline, count: int, *, most_drawn: int | None = None
) -> Timeline:
    """Return a timeline with another number of micro-batches of the same size.

    Args:
        timeline: of a recorded step.
        count: of micro-batches.
        most_drawn: leave out all but so many of them, 3 or more; None draws them all. Those between
            the first and the last are alike, so the peak is the same.
    """
    recorded = int(timeline.micro_batch.max()) + 1
    is_update = timeline.phase == PHASES.index(Phase.OPTIMIZER)
    rows = [np.flatnonzero((timeline.micro_batch == i) & ~is_update) for i in range(recorded)]
    update = np.flatnonzero(is_update)

    drawn = count if most_drawn is None else min(count, most_drawn)
    # the first and the last are those of the recording, where it has both
    middle = rows[1] if recorded > 1 else rows[0]
    order = [rows[0], *[middle] * (drawn - 2), *([rows[-1]] if drawn > 1 else []), update]
    held = timeline.bytes_by_category
    pieces = [held[piece] for piece in order]
    if recorded == 1:
        later = _accumulating(pieces[0], timeline.operator[rows[0]])
        pieces[1:-1] = [later] * (drawn - 1)

    batch = int(held[0, INPUTS])  # of all micro-batches together
    together = np.concatenate(pieces)
    together[:, INPUTS] += batch * count // recorded - batch
    numbers = [*range(drawn), drawn - 1]
    return Timeline(
        bytes_by_category=together,
        phase=timeline.phase[np.concatenate(order)],
        micro_batch=np.repeat(numbers, [len(piece) for piece in order]).astype(np.int32),
        operator=_in_a_row([timeline.operator[piece] for piece in order]),
    )


def _accumulating(
    held: npt.NDArray[np.int64], operator: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Return what a micro-batch holds if the gradients are there when it begins.

    A gradient that is computed then lives as long as the operator that computes it.
    """
    later, gradients = held.copy(), held[:, GRADIENTS]
    begin = np.searchsorted(operator, operator, "left")  # of each row's operator
    computed = gradients - gradients[np.maximum(begin - 1, 0)]
    later[:, GRADIENTS] = gradients[-1]
    later[:, TEMPORARIES] += np.maximum(computed, 0)
    return later


def _in_a_row(operators: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """Return the numbers of operators of pieces that run one after the other."""
    found, before = [], 0
    for numbers in operators:
        if len(numbers):
            found.append(numbers - numbers[0] + before)
            before = int(found[-1][-1]) + 1
    return np.concatenate(found).astype(np.int32)


# What a prediction of one memory budget says of another, once the plans are known: an
# estimate.
#
# One recording of the plain step gives the plans of all budgets, and for each of them the
# peak and the time of what is recomputed (`memlab.prediction.budget_frontier`). So if a step is
# predicted with one plan, that with another differs by the difference of their plans: no
# model runs and none is recorded.
#
# Left out: when in the step the other activations are held. The timeline keeps its shape,
# and its activations are scaled until its peak is the estimated one.

# added to each uncertainty; see tests/system/test_panel_budgets.py
REPLANNED = 0.03
# and to that of reserved bytes the segment that the caching allocator may hold more or less
SEGMENT_BYTES = 20 * MIB
ACTIVATIONS = CATEGORIES.index(Category.ACTIVATIONS)


def plan_at(frontier: BudgetFrontier, config: StepConfig) -> Plan:
    """Return the plan with which a config is run; the plain one if it plans nothing."""
    return frontier.pick(config.memory_budget) if config.is_planned else frontier.plans[0]


def can_replan(config: StepConfig, kind: str) -> bool:
    """Return whether plans tell the memory of a config on a kind of device ("cpu", "cuda").

    They know nothing of offloading, which takes activations away that a plan counts, and nothing of
    parameters that are gathered to compute activations again.
    """
    offloads = config.offload_activations or config.offload_parameters
    is_alone = config.sharding is Sharding.NONE
    return is_alone and not offloads and not registry.is_refused(config, kind)


def renamed(result: StepResult, config: StepConfig, frontier: BudgetFrontier) -> StepResult:
    """Return a result as that of a config that differs by its budget and has the same plan."""
    notes = _notes(result, config, plan_at(frontier, result.config), plan_at(frontier, config))
    return dataclasses.replace(result, config=config, notes=notes)


def estimate_budget(
    result: StepResult, config: StepConfig, frontier: BudgetFrontier, planned: StepConfig
) -> StepResult:
    """Return what another memory budget would cost.

    Args:
        result: predicted or estimated for the same step with another budget.
        config: what is wanted.
        frontier: the plans.
        planned: the config that they were made for, whose micro-batches may have another size.
    """
    before, after = plan_at(frontier, result.config), plan_at(frontier, config)
    scale = config.micro_batch_size / planned.micro_batch_size
    more = round((after.peak_bytes - before.peak_bytes) * scale)
    peak = max((result.peak_allocated_bytes or 0) + more, 1)
    assert result.timeline is not None
    most = max(after.saved_bytes / max(before.saved_bytes, 1), 1.0)
    timeline = with_peak(result.timeline, peak, most)
    peak = int(timeline.total_bytes.max())
    reserved = result.peak_reserved_bytes
    reserved = None if reserved is None else max(reserved + more, peak)

    # the plans count the micro-batches that were recorded
    counted = min(planned.accumulation_steps, MOST_RECORDED)
    seconds = _with_time(result, before, after, scale * config.accumulation_steps / counted)

    found = estimated(
        result,
        config,
        timeline,
        reserved_bytes=reserved,
        seconds=seconds,
        uncertainty=_wider_replanning(result, reserved),
        of_what=f"memory_budget={result.config.memory_budget:g}",
    )
    return dataclasses.replace(found, notes=_notes(result, config, before, after))


def _with_time(result: StepResult, before: Plan, after: Plan, repeats: float) -> float | None:
    """Return the time with another plan; None if it is not known.

    The times of plans are not corrected by measured runs, as that of the step may be.
    """
    times = result.step_seconds, before.recompute_seconds, after.recompute_seconds
    if times[0] is None or times[1] is None or times[2] is None:
        return None
    seconds = times[0] + (times[2] - times[1]) * repeats
    return seconds if seconds > 0 else None


def with_peak(timeline: Timeline, peak_bytes: int, most: float) -> Timeline:
    """Return a timeline whose activations are scaled by one factor, so that it has this peak.

    It is higher if something else holds more, and lower if that would take more than a factor of
    `most`.
    """
    held = timeline.bytes_by_category
    activations = held[:, ACTIVATIONS]
    others = held.sum(axis=1) - activations
    has = activations > 0
    if not has.any():
        return timeline

    factor = float(((peak_bytes - others[has]) / activations[has]).min())
    factor = min(max(factor, 0.0), most)
    scaled = held.copy()
    scaled[:, ACTIVATIONS] = np.round(activations * factor).astype(np.int64)
    return dataclasses.replace(timeline, bytes_by_category=scaled)


def _wider_replanning(result: StepResult, reserved: int | None) -> dict[str, float]:
    found = {name: width + REPLANNED for name, width in (result.uncertainty or {}).items()}
    if reserved and "peak_reserved_bytes" in found:
        found["peak_reserved_bytes"] += SEGMENT_BYTES / reserved
    return found


def _notes(result: StepResult, config: StepConfig, before: Plan, after: Plan) -> tuple[str, ...]:
    """Return the notes of a result, with what is said of its plan renewed."""
    old = checkpointing.notes_of_plan(result.config, before)
    new = checkpointing.notes_of_plan(config, after) if config.is_planned else []
    return (*new, *(note for note in result.notes if note not in old))
