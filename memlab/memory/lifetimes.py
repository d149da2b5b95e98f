"""From a `Trace` to a `Timeline`: decide what each block is for, by its lifetime.

A block that exists before the first step is a parameter if the model says so, optimizer state if
the optimizer keeps it from then on, otherwise a buffer. A block that is made in the data phase is
an input. The category of a block that a step allocates
follows from when it is allocated and freed:

    allocated in   freed in the same phase   freed later
    forward        temporary                 activation
    backward       temporary                 gradient
    optimizer      temporary                 optimizer state

A block that an earlier forward or backward left behind for good (a loss scaler's scale, a cache) is
a buffer. So is one that a forward of this step leaves behind: DistributedDataParallel makes its
buckets of gradients anew in the second one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from memlab._util.units import format_bytes
from memlab.trace import CATEGORIES, PHASES, Category, Holding, Phase, Place, Timeline, Trace

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

LOG_SOFTMAX = "aten::_log_softmax"
OF_LOSS = ("log_softmax", "nll_loss")  # in the names of the operators of a cross entropy
LEAST_GROWTH = 1e-3  # of the peak
ROUNDING = 512  # bytes, to which the allocator of a card rounds blocks up
COLUMN = {category: i for i, category in enumerate(CATEGORIES)}
BORN_AS = {
    Phase.DATA: Category.INPUTS,
    Phase.FORWARD: Category.ACTIVATIONS,
    Phase.BACKWARD: Category.GRADIENTS,
    Phase.OPTIMIZER: Category.OPTIMIZER_STATE,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """Every block of a trace: its first and last event, and its category as an index."""

    births: npt.NDArray[np.int64]  # (blocks,)
    deaths: npt.NDArray[np.int64]  # (blocks,), len(events) for a block that is never freed
    columns: npt.NDArray[np.int64]  # (blocks,), index into `CATEGORIES`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepMemory:
    """The timeline of one step and the events of the trace that it shows."""

    timeline: Timeline
    events: npt.NDArray[np.int64]  # (instants,), the first is the state in which the step begins
    trace: Trace
    blocks: Blocks

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are allocated at once."""
        return int(self.timeline.total_bytes.max())

    @property
    def peak_place(self) -> Place:
        """The place in the step where the most bytes are allocated; a loss is named as such."""
        place = self.trace.place(int(self.events[self.timeline.peak_index]))
        return replace(place, loss=self._loss_at(place))

    def _loss_at(self, place: Place) -> str:
        """Return what a cross entropy computes at the peak, if that is where the peak is.

        Its own operators count, and what is about as large as a log-softmax that is live and was
        allocated in the same module, such as a copy of the logits.
        """
        if place.module and not any("nll_loss" in name for name in self.trace.operators):
            return ""
        held, at = self.holdings(), (place.module, place.operator, place.phase)
        softmaxes = [h for h in held if h.operator == LOG_SOFTMAX]
        sizes = [h.nbytes // h.num_blocks for h in softmaxes]
        newest = [h.nbytes // h.num_blocks for h in held if (h.module, h.operator, h.phase) == at]
        is_copy = any(h.module == place.module for h in softmaxes) and any(
            2 * size >= min(sizes) for size in newest
        )
        if not is_copy and not any(name in place.operator for name in OF_LOSS):
            return ""
        number, noun = self.trace.logits
        is_over_them = any(_is_multiple(size, number) for size in sizes or newest)
        return f"log-softmax over {number:,} {noun}" if is_over_them else "log-softmax"

    def holdings(self, instant: int | None = None) -> tuple[Holding, ...]:
        """Return what is live at this instant of the timeline, by default at its peak.

        The largest holding comes first; the bytes sum to what is allocated at that instant.
        """
        at = int(self.events[self.timeline.peak_index if instant is None else instant])
        live = np.flatnonzero((self.blocks.births <= at) & (at < self.blocks.deaths))
        found: dict[tuple[Category, str, str, Phase], list[int]] = {}

        for category, birth in zip(
            self.blocks.columns[live].tolist(), self.blocks.births[live].tolist(), strict=True
        ):
            key = alike(self.trace, CATEGORIES[category], birth)
            group = found.setdefault(key, [0, 0])
            group[0] += 1
            group[1] += int(self.trace.nbytes[birth])

        holdings = [
            Holding(category=category, module=module, operator=operator, phase=phase,
                    num_blocks=count, nbytes=nbytes)
            for (category, module, operator, phase), (count, nbytes) in found.items()
        ]  # fmt: skip
        return tuple(sorted(holdings, key=lambda holding: -holding.nbytes))


def step_memory(trace: Trace, step: int) -> StepMemory:
    """Return the live bytes over one step of the trace; its first row is what existed before."""
    steps, phases, micro_batches = trace.where()
    step = _next_of(steps, step)
    blocks = blocks_of_step(trace, step)
    change = np.zeros((len(trace.nbytes), len(CATEGORIES)), np.int64)
    freed = blocks.deaths < len(change)
    change[blocks.births, blocks.columns] = trace.nbytes[blocks.births]
    change[blocks.deaths[freed], blocks.columns[freed]] = trace.nbytes[blocks.deaths[freed]]
    first, last = np.flatnonzero(steps == step)[[0, -1]]
    events = np.arange(first - 1, last + 1)
    shown = np.maximum(events, first)  # what existed before belongs to the first phase
    operator = trace.operator[events] - trace.operator[events[0]]
    timeline = Timeline(
        bytes_by_category=np.cumsum(change, axis=0)[events],
        phase=phases[shown].astype(np.int8),
        micro_batch=micro_batches[shown].astype(np.int32),
        operator=operator.astype(np.int32),
    )
    return StepMemory(timeline=timeline, events=events, trace=trace, blocks=blocks)


def _next_of(steps: npt.NDArray[np.int64], step: int) -> int:
    """Return a step, or the next one if nothing is allocated or freed in it."""
    return int(steps[np.flatnonzero(steps >= step)[0]])


def growth_notes(trace: Trace, step: int) -> list[str]:
    """Say if more is held after a step than after the one before: later ones then hold still more.

    That is so of a memory of earlier batches that is not full yet, and of every leak.
    """
    held = np.cumsum(trace.nbytes)
    steps, _, _ = trace.where()
    before, after = (int(held[np.flatnonzero(steps == s)[-1]]) for s in (step - 1, step))
    if after - before < LEAST_GROWTH * held[steps == step].max():
        return []
    return [
        f"After this step {format_bytes(after - before)} more are held than after the one before: "
        "the workload keeps tensors from step to step, and later steps may hold still more."
    ]


def build_peak_bytes(trace: Trace) -> int:
    """Return the most bytes that were allocated while the model was built."""
    steps, phases, _ = trace.where()
    of_build = (steps < 0) & (phases == PHASES.index(Phase.BUILD))
    of_build[np.flatnonzero(steps >= 0)[0] :] = False
    return int(np.cumsum(trace.nbytes)[of_build].max(initial=0))


def first_crossing(trace: Trace, limit_bytes: int) -> Place | None:
    """Return where allocated bytes first exceed the limit, or None if they never do."""
    above = np.flatnonzero(np.cumsum(trace.nbytes) > limit_bytes)
    return trace.place(int(above[0])) if len(above) else None


def _is_multiple(nbytes: int, count: int) -> bool:
    """Return whether a block, rounded up as a card does it, holds rows of so many numbers."""
    rows = [count * itemsize for itemsize in (4, 2, 8)] if count else []
    return any(nbytes >= row and nbytes % row < ROUNDING for row in rows)


def alike(trace: Trace, category: Category, birth: int) -> tuple[Category, str, str, Phase]:
    """Return the key by which blocks are grouped into one `Holding`."""
    place, address = trace.place(birth), int(trace.address[birth])
    module = place.module
    if category is Category.PARAMETERS:
        module = trace.parameters[address]
    elif category is Category.OPTIMIZER_STATE:
        module = trace.states.get(address, module)

    return category, module, place.operator, place.phase


def blocks_of_step(trace: Trace, step: int) -> Blocks:
    """Return every block with its category, as seen in this step."""
    births, deaths = _births_and_deaths(trace)
    where = steps, phases, _ = trace.where()
    step = _next_of(steps, step)
    born, born_phase = steps[births], phases[births]
    freed = deaths < len(trace.nbytes)
    died = np.where(freed, deaths, births)
    in_one_interval = (where[:, died] == where[:, births]).all(axis=0)

    optimizer, forward = (born_phase == PHASES.index(p) for p in (Phase.OPTIMIZER, Phase.FORWARD))
    has_ended = ((steps == step) & (phases == PHASES.index(Phase.OPTIMIZER))).any()
    is_earlier = (born < step) | (has_ended & forward & (born == step))
    left_behind = is_earlier & (~freed | (steps[died] != born)) & ~optimizer
    first, last = np.flatnonzero(steps == step)[0], np.flatnonzero(steps >= 0)[-1]
    existed_before = (births < first) & (deaths >= first)
    is_kept = existed_before & (deaths > last) & np.isin(trace.address[births], list(trace.states))
    is_parameter = existed_before & np.isin(trace.address[births], list(trace.parameters))

    born_as = np.array([COLUMN[BORN_AS.get(phase, Category.BUFFERS)] for phase in PHASES])
    columns = born_as[born_phase]
    # a script frees gradients when it likes: those of an earlier step are gradients still
    is_gradient = np.isin(trace.address[births], list(trace.gradients))
    is_gradient &= columns == COLUMN[Category.GRADIENTS]
    is_input = columns == COLUMN[Category.INPUTS]
    columns[left_behind & ~is_input & ~is_gradient] = COLUMN[Category.BUFFERS]
    columns[freed & in_one_interval] = COLUMN[Category.TEMPORARIES]
    columns[is_kept] = COLUMN[Category.OPTIMIZER_STATE]
    columns[is_parameter] = COLUMN[Category.PARAMETERS]
    return Blocks(births=births, deaths=deaths, columns=columns)


def _births_and_deaths(
    trace: Trace,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the events of each block's allocation and free, in the order of the allocations.

    The free of a block that is never freed is the number of events.
    """
    order = np.argsort(trace.address, kind="stable")  # stable: by time within one address
    is_birth = trace.nbytes[order] > 0
    (at,) = np.nonzero(is_birth)
    after = np.minimum(at + 1, len(order) - 1)
    freed = ~is_birth[after] & (trace.address[order[after]] == trace.address[order[at]])
    births, deaths = order[at], np.where(freed, order[after], len(order))
    in_time = np.argsort(births)
    return births[in_time], deaths[in_time]
