"""What a prediction of one memory budget says of another, once the plans are known: an estimate.

One recording of the plain step gives the plans of all budgets, and for each of them the peak and
the time of what is recomputed (`memlab.planning.chain`). So if a step is predicted with one plan,
that with another differs by the difference of their plans: no model runs and none is recorded.

Left out: when in the step the other activations are held. The timeline keeps its shape, and its
activations are scaled until its peak is the estimated one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from memlab.arguments.units import MIB
from memlab.config import Sharding, StepConfig
from memlab.predicting.estimates import estimated
from memlab.recording.program import MOST_RECORDED
from memlab.result import StepResult
from memlab.techniques import every
from memlab.techniques.recompute import checkpointing
from memlab.trace import CATEGORIES, Category, Timeline

if TYPE_CHECKING:
    from memlab.plan import Plan
    from memlab.planning.chain import Chain

# added to each uncertainty; see tests/system/test_panel_budgets.py
REPLANNED = 0.03
# and to that of reserved bytes the segment that the caching allocator may hold more or less
SEGMENT_BYTES = 20 * MIB
ACTIVATIONS = CATEGORIES.index(Category.ACTIVATIONS)


def plan_at(chain: Chain, config: StepConfig) -> Plan:
    """Return the plan with which a config is run; the plain one if it plans nothing."""
    return chain.pick(config.memory_budget) if config.is_planned else chain.plans[0]


def can_replan(config: StepConfig, kind: str) -> bool:
    """Return whether plans tell the memory of a config on a kind of device ("cpu", "cuda").

    They know nothing of offloading, which takes activations away that a plan counts, and nothing of
    parameters that are gathered to compute activations again.
    """
    offloads = config.offload_activations or config.offload_parameters
    is_alone = config.sharding is Sharding.NONE
    return is_alone and not offloads and not every.is_refused(config, kind)


def renamed(result: StepResult, config: StepConfig, chain: Chain) -> StepResult:
    """Return a result as that of a config that differs by its budget and has the same plan."""
    notes = _notes(result, config, plan_at(chain, result.config), plan_at(chain, config))
    return dataclasses.replace(result, config=config, notes=notes)


def replanned(
    result: StepResult, config: StepConfig, chain: Chain, planned: StepConfig
) -> StepResult:
    """Return what another memory budget would cost.

    Args:
        result: predicted or estimated for the same step with another budget.
        config: what is wanted.
        chain: the plans.
        planned: the config that they were made for, whose micro-batches may have another size.
    """
    before, after = plan_at(chain, result.config), plan_at(chain, config)
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
        uncertainty=_wider(result, reserved),
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


def _wider(result: StepResult, reserved: int | None) -> dict[str, float]:
    found = {name: width + REPLANNED for name, width in (result.uncertainty or {}).items()}
    if reserved and "peak_reserved_bytes" in found:
        found["peak_reserved_bytes"] += SEGMENT_BYTES / reserved
    return found


def _notes(result: StepResult, config: StepConfig, before: Plan, after: Plan) -> tuple[str, ...]:
    """Return the notes of a result, with what is said of its plan renewed."""
    old = checkpointing.notes_of_plan(result.config, before)
    new = checkpointing.notes_of_plan(config, after) if config.is_planned else []
    return (*new, *(note for note in result.notes if note not in old))
