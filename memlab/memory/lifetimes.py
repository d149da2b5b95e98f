"""From a `Trace` to a `Timeline`: what each block is for, by one rule of lifetimes.

A block is a parameter if it is one when the first step begins, a buffer if it lives then and is
none, an input if it was made as data. Born in a step, it is optimizer state if born in the
optimizer phase and kept, a gradient if born in backward and kept beyond it, an activation if born
in forward and kept beyond it; a temporary if it is freed in the phase that it was born in. What an
earlier forward or backward left behind for good (a scaler's scale, a cache) is a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memlab.trace import CATEGORIES, PHASES, Category, Interval, Phase, Place, Timeline, Trace

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

COLUMN = {category: i for i, category in enumerate(CATEGORIES)}
KEPT_AS = {
    Phase.FORWARD: Category.ACTIVATIONS,
    Phase.BACKWARD: Category.GRADIENTS,
    Phase.OPTIMIZER: Category.OPTIMIZER_STATE,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepMemory:
    """The timeline of one step and the events of the trace that it shows."""

    timeline: Timeline
    events: npt.NDArray[np.int64]  # (instants,), the first is the state in which the step begins
    trace: Trace

    @property
    def peak_bytes(self) -> int:
        """Most bytes that are allocated at once."""
        return int(self.timeline.total_bytes.max())

    @property
    def peak_place(self) -> Place:
        """Where in the step most bytes are allocated."""
        return self.trace.place(int(self.events[self.timeline.peak_index]))


def step_memory(trace: Trace, step: int) -> StepMemory:
    """Return the live bytes over one step of the trace; its first row is what stood before it."""
    column = _columns(trace, step)
    in_step = np.array([i.step == step for i in trace.intervals])[trace.interval]
    first, last = np.flatnonzero(in_step)[[0, -1]]
    change = np.zeros((len(trace.nbytes), len(CATEGORIES)), np.int64)
    change[np.arange(len(change)), column] = trace.nbytes
    live = np.cumsum(change, axis=0)
    events = np.arange(first - 1, last + 1)
    phases = np.array([PHASES.index(i.phase) for i in trace.intervals], np.int8)
    micro_batches = np.array([i.micro_batch for i in trace.intervals], np.int32)
    interval = trace.interval[events].copy()
    interval[0] = interval[1]  # the row of what stood before belongs to the phase that begins
    operator = trace.operator[events] - trace.operator[events[0]]
    return StepMemory(
        timeline=Timeline(
            bytes_by_category=live[events],
            phase=phases[interval],
            micro_batch=micro_batches[interval],
            operator=operator.astype(np.int32),
        ),
        events=events,
        trace=trace,
    )


def first_crossing(trace: Trace, limit_bytes: int) -> Place | None:
    """Return where allocated bytes first exceed the limit, or None if they never do."""
    above = np.flatnonzero(np.cumsum(trace.nbytes) > limit_bytes)
    return trace.place(int(above[0])) if len(above) else None


def _columns(trace: Trace, step: int) -> npt.NDArray[np.int64]:
    """Return for every event the column of its block's category, as seen in this step."""
    births, deaths = _births_and_deaths(trace)
    start = _first_event_of_steps(trace)
    column = np.zeros(len(trace.nbytes), np.int64)
    never = len(trace.nbytes)
    for birth, death in zip(births.tolist(), deaths.tolist(), strict=True):
        born = trace.intervals[trace.interval[birth]]
        died = trace.intervals[trace.interval[death]] if death < never else None
        stood = birth < start <= death
        is_parameter = stood and int(trace.address[birth]) in trace.parameters
        category = Category.PARAMETERS if is_parameter else _category(born, died, step)
        column[birth] = COLUMN[category]
        if death < never:
            column[death] = COLUMN[category]
    return column


def _category(born: Interval, died: Interval | None, step: int) -> Category:
    if died == born:
        return Category.TEMPORARIES
    if born.phase is Phase.DATA:
        return Category.INPUTS
    outlived_its_step = died is None or died.step != born.step
    left_behind = born.step < step and outlived_its_step and born.phase is not Phase.OPTIMIZER
    if born.phase not in KEPT_AS or left_behind:
        return Category.BUFFERS
    return KEPT_AS[born.phase]


def _births_and_deaths(
    trace: Trace,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the events of each block's allocation and free; one never freed ends after all."""
    live: dict[int, int] = {}
    births, deaths = [], []
    for event, (address, nbytes) in enumerate(
        zip(trace.address.tolist(), trace.nbytes.tolist(), strict=True)
    ):
        if nbytes > 0:
            live[address] = event
        else:
            births.append(live.pop(address))
            deaths.append(event)
    births += live.values()
    deaths += [len(trace.nbytes)] * len(live)
    return np.array(births, np.int64), np.array(deaths, np.int64)


def _first_event_of_steps(trace: Trace) -> int:
    is_step = np.array([i.step >= 0 for i in trace.intervals])[trace.interval]
    return int(np.flatnonzero(is_step)[0])
