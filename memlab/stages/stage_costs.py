"""What each stage of a run holds, from the trace of a run: measured and predicted alike.

What stands at the peak of a stage is named by the rule of `meters/lifetimes.py`, and further:

    made with the averaged weights                              EMA weights
    allocated in an evaluation, kept beyond its batch           kept outputs
    allocated in a generation, kept beyond its token            KV cache
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from memlab.meters.lifetimes import StepMemory, step_memory
from memlab.stages.course import EMA_COPY, StageName
from memlab.stages.run_result import StageCost
from memlab.trace import CATEGORIES, Category, Phase, Trace

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

KEPT = {StageName.EVALUATION: "kept outputs", StageName.GENERATION: "KV cache"}
EMA = "EMA weights"


def rows_of_stages(trace: Trace, names: Sequence[StageName]) -> list[tuple[StageName, slice]]:
    """Return the rows of each stage; the build comes first, and of equal names both."""
    step = np.array([interval.step for interval in trace.intervals])[trace.interval]
    found = []
    for number, name in enumerate(names):
        rows = np.flatnonzero(step == number)
        if len(rows):
            found.append((name, slice(int(rows[0]), int(rows[-1]) + 1)))
    return [(StageName.BUILD, slice(0, found[0][1].start)), *found]


def stage_costs(
    trace: Trace, names: Sequence[StageName], reserved: npt.NDArray[np.int64] | None
) -> tuple[StageCost, ...]:
    """Return what each stage holds. Of stages with one name the one that reaches highest counts.

    Args:
        trace: of the whole run, whose stages are its steps.
        names: of the stages after the build, by number.
        reserved: int64, (rows,), what the caching allocator holds; None where there is none.
    """
    live, is_counted = np.cumsum(trace.nbytes), ~_is_in_the_making(trace)
    numbers = {name: number for number, name in enumerate(names)}
    found: dict[StageName, StageCost] = {}
    for name, rows in rows_of_stages(trace, names):
        peak = rows.start + int(np.argmax(np.where(is_counted[rows], live[rows], -1)))
        # where a stage only frees, it begins with the most
        before = int(live[rows.start - 1]) if rows.start else 0
        peak = rows.start - 1 if before > live[peak] else peak
        held = int(live[peak])
        if name in found and found[name].peak_allocated_bytes >= held:
            continue
        memory = step_memory(trace, max(numbers.get(name, 0), 0))
        found[name] = StageCost(
            name=str(name),
            peak_allocated_bytes=held,
            peak_reserved_bytes=None if reserved is None else int(reserved[rows].max()),
            bytes_by_category=_standing(memory, name, peak),
            module=_module(trace, peak),
        )
    return tuple(found.values())


def _is_in_the_making(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return in which rows a batch is not complete yet.

    How a loader makes it is its own affair: it may have processes for that. Here a workload makes
    it, and on a CPU memlab copies it.
    """
    is_data = np.array([interval.phase is Phase.DATA for interval in trace.intervals])
    goes_on = np.append(trace.interval[1:] == trace.interval[:-1], False)
    found: npt.NDArray[np.bool_] = is_data[trace.interval] & goes_on
    return found


def _standing(memory: StepMemory, name: StageName, peak: int) -> dict[str, int]:
    """Return what is live at an event by what it is for; the largest first, nothing empty."""
    blocks, trace = memory.blocks, memory.trace
    alive = np.flatnonzero((blocks.births <= peak) & (peak < blocks.deaths))
    births = blocks.births[alive]
    of_interval = trace.interval[births]
    is_average = np.array([
        interval.step < 0 and interval.phase is Phase.BUILD and interval.micro_batch == EMA_COPY
        for interval in trace.intervals
    ])[of_interval]  # fmt: skip
    labels = np.array([str(category) for category in CATEGORIES], object)[blocks.columns[alive]]
    if name in KEPT:
        labels[labels == str(Category.ACTIVATIONS)] = KEPT[name]
    labels[is_average & (labels != str(Category.TEMPORARIES))] = EMA
    sums = {
        str(label): int(trace.nbytes[births[labels == label]].sum())
        for label in sorted(set(labels))
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _module(trace: Trace, event: int) -> str:
    """Return the module that ran at an event; empty if none did."""
    index = int(trace.module[event])
    return trace.modules[index] if index >= 0 else ""
