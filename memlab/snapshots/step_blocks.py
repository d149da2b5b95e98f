"""`StepBlocks`: the blocks of one step, as a snapshot shows them and as a prediction has them.

A snapshot may begin late, end late, and hold many steps. Its last whole step is taken. Where
something marks the ends of steps (`phases.py`), it lies between two of them. Without stacks nothing
does. Then the sizes of the prediction mark them: three sizes in a row that occur once in the
predicted step say where in the snapshot their step begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memlab.allocator.replay import round_block
from memlab.errors import MemlabError
from memlab.meters.lifetimes import step_memory
from memlab.snapshots.alignment import UNKNOWN_PHASE
from memlab.snapshots.holders import place_of
from memlab.snapshots.phases import BACKWARD_PASSES, COLUMNS, RunPhase
from memlab.snapshots.recent import RecentBlocks
from memlab.trace import CATEGORIES, PHASES, Phase, Trace

Ints = npt.NDArray[np.int64]
Phases = npt.NDArray[np.int8]

NUMBER = {phase: number for number, phase in enumerate(PHASES)}
NUMBER_OF = {
    RunPhase.DATA: NUMBER[Phase.DATA],
    RunPhase.FORWARD: NUMBER[Phase.FORWARD],
    RunPhase.BACKWARD: NUMBER[Phase.BACKWARD],
    RunPhase.OPTIMIZER: NUMBER[Phase.OPTIMIZER],
}
NUMBERS = np.array([NUMBER_OF.get(phase, UNKNOWN_PHASE) for phase in RunPhase], np.int8)
IN_A_ROW = 3  # sizes that are looked for together
SIZES_ALONE = "sizes alone"
REMEDY = (
    "record three steps or more with their stacks, which "
    "torch.cuda.memory._record_memory_history(max_entries=1_000_000) does"
)
NO_WHOLE_STEP = f"the snapshot holds no whole training step to compare; {REMEDY}"
NOTHING_IN_COMMON = (
    "nothing in the snapshot marks where a step ends, and no three allocations in a row have the "
    "sizes of three in the predicted step, which could show it; pass the workload, the batch size "
    f"and the precision that it was recorded with, or {REMEDY}"
)


class Name(NamedTuple):
    """What is known of a block: the operator and module of a prediction, or a place in code."""

    category: str
    operator: str = ""
    module: str = ""
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBlocks:
    """The blocks of one step, in the order of allocation; columns are (blocks,).

    Attributes:
        birth: the event that allocated it, counted within the step; -1 if it was there before.
        death: the event that freed it; `num_events` if none did.
        size: bytes, rounded up to 512 B.
        phase: int8, index into `PHASES`; -1 where it is not known.
        names: of each block.
        num_events: of the step.
        number: 0 for the first step of a training, 1 for a later one.
        found_by: what marks where the step begins and ends, in words.
    """

    birth: Ints
    death: Ints
    size: Ints
    phase: Phases
    names: tuple[Name, ...]
    num_events: int
    number: int
    found_by: str

    @property
    def born(self) -> Ints:
        """The blocks that the step allocates."""
        return np.flatnonzero(self.birth >= 0)

    @property
    def standing(self) -> Ints:
        """The blocks that were there before the step."""
        return np.flatnonzero(self.birth < 0)

    def live_after_births(self) -> Ints:
        """Return the live bytes before the step, and after each of its allocations."""
        change = np.zeros(self.num_events + 2, np.int64)
        np.add.at(change, self.birth + 1, self.size)
        np.subtract.at(change, self.death + 1, self.size)
        live: Ints = np.cumsum(change)[np.r_[0, self.birth[self.born] + 1]]
        return live

    def is_live(self, num_born: int) -> npt.NDArray[np.bool_]:
        """Return which blocks are live after so many of the step's allocations."""
        at = int(self.birth[self.born[num_born - 1]]) if num_born else -1
        found: npt.NDArray[np.bool_] = (self.birth <= at) & (self.death > at)
        return found


def predicted_step(trace: Trace, number: int) -> StepBlocks:
    """Return the blocks of a step of a predicted trace, whose sizes are requests."""
    memory = step_memory(trace, number)
    first, end = int(memory.events[1]), int(memory.events[-1]) + 1
    births, deaths = memory.blocks.births, memory.blocks.deaths
    chosen = np.flatnonzero((births < end) & (deaths >= first))
    names = []
    for birth, column in zip(births[chosen].tolist(), memory.blocks.columns[chosen].tolist(),
                             strict=True):  # fmt: skip
        place, address = trace.place(birth), int(trace.address[birth])
        module = trace.parameters.get(address, trace.states.get(address, place.module))
        names.append(Name(str(CATEGORIES[column]), place.operator, module))
    phase_of = np.array([NUMBER[interval.phase] for interval in trace.intervals], np.int8)
    return StepBlocks(
        birth=np.maximum(births[chosen] - first, -1),
        death=np.minimum(deaths[chosen], end) - first,
        size=round_block(trace.nbytes[births[chosen]]),
        phase=phase_of[trace.interval[births[chosen]]],
        names=tuple(names),
        num_events=end - first,
        number=number,
        found_by="",
    )


def measured_step(
    recent: RecentBlocks, accumulation_steps: int, predicted: StepBlocks
) -> StepBlocks:
    """Return the last whole step of a snapshot.

    Args:
        recent: its newest blocks.
        accumulation_steps: micro-batches of a step.
        predicted: a later step as predicted, whose sizes mark steps if nothing else does.

    Raises:
        MemlabError: there is none; the message says what to record or to pass.
    """
    if not len(recent.step_ends):
        return _by_sizes(recent, predicted)
    before = len(recent.step_ends) - 1 - _marks_a_step(recent, accumulation_steps)
    if before < -1 or (before < 0 and not recent.is_whole):
        raise MemlabError(NO_WHOLE_STEP)
    if before < 0:
        built = (recent.phase == RunPhase.BUILD) & (recent.birth >= 0)
        begin = int(recent.birth[built].max(initial=-1)) + 1
    else:
        begin = int(recent.step_ends[before])
    number = 0 if before < 0 else 1
    return _between(recent, (begin, int(recent.step_ends[-1])), number, recent.steps_by)


def _marks_a_step(recent: RecentBlocks, accumulation_steps: int) -> int:
    """Return how many marks a step has: if backward passes are the marks, each micro-batch one."""
    return accumulation_steps if recent.steps_by == BACKWARD_PASSES else 1


def _between(recent: RecentBlocks, events: tuple[int, int], number: int, by: str) -> StepBlocks:
    """Return the blocks of these events, and those that the step finds and does not drop at once.

    Gradients that `zero_grad` frees before the first forward belong to the step before.
    """
    begin, end = events
    in_step = (recent.birth >= begin) & (recent.birth < end)
    if not in_step.any():
        raise MemlabError(
            f"the last step of the snapshot allocates nothing, so there is nothing to compare; "
            f"{REMEDY}"
        )
    forward = recent.birth[in_step & (recent.phase == RunPhase.FORWARD)]
    first = int((forward if len(forward) else recent.birth[in_step]).min())
    chosen = np.flatnonzero(in_step | ((recent.birth < begin) & (recent.death > first)))
    return StepBlocks(
        birth=np.maximum(recent.birth[chosen] - begin, -1),
        death=np.minimum(recent.death[chosen], end) - begin,
        size=recent.size[chosen],
        phase=NUMBERS[recent.phase[chosen]],
        names=_names(recent, chosen),
        num_events=end - begin,
        number=number,
        found_by=by,
    )  # fmt: skip


def _names(recent: RecentBlocks, chosen: Ints) -> tuple[Name, ...]:
    """Return category and place of blocks; a stack without a Python frame is no place."""
    places = [place_of(stack) if stack else "" for stack in recent.stacks]
    streams, index = np.unique(recent.stream[chosen], return_inverse=True)
    usual = int(streams[np.bincount(index, recent.size[chosen]).argmax()])
    found = []
    for stack, stream, column in zip(recent.stack[chosen].tolist(), recent.stream[chosen].tolist(),
                                     recent.column[chosen].tolist(), strict=True):  # fmt: skip
        place = places[stack]
        if stream not in (0, usual):
            place = f"{place or 'an allocation'} on stream {stream}"
        found.append(Name(COLUMNS[column], place=place))
    return tuple(found)


def _by_sizes(recent: RecentBlocks, predicted: StepBlocks) -> StepBlocks:
    """Return the last whole step of a snapshot, found by the sizes of the prediction.

    Raises:
        MemlabError: the sizes have nothing in common, or there is no whole step.
    """
    born = np.flatnonzero(recent.birth >= 0)
    wanted = predicted.size[predicted.born].tolist()
    at, reached = _progress(recent.size[born].tolist(), wanted)
    if not at:
        raise MemlabError(NOTHING_IN_COMMON)
    starts = [i - j for i, j in zip(at, reached, strict=True)]
    jumps = [k for k in range(1, len(at)) if starts[k] - starts[k - 1] > len(wanted) // 2]
    begins = [max(0, starts[0]), *(max(starts[k], at[k - 1] + 1) for k in jumps)]
    last = starts[-1] + len(wanted)
    chosen = len(begins) - (1 if last <= len(born) else 2)
    if chosen < 0 or (chosen == 0 and starts[0] < 0):
        raise MemlabError(NO_WHOLE_STEP)
    births = np.append(recent.birth[born], recent.num_events)
    end = [*begins[1:], min(last, len(born))][chosen]
    number = 0 if chosen == 0 and recent.is_whole else 1
    return _between(recent, (int(births[begins[chosen]]), int(births[end])), number, SIZES_ALONE)


def _progress(sizes: Sequence[int], wanted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return where in the snapshot sizes stand that the prediction has once, and where it has them.

    >>> _progress([9, 5, 1, 2, 3, 4], [1, 2, 3, 4, 4, 4, 4, 4])
    ([2, 3], [0, 1])
    """
    width = min(IN_A_ROW, len(wanted))
    places: dict[tuple[int, ...], list[int]] = {}
    for j in range(len(wanted) - width + 1):
        places.setdefault(tuple(wanted[j : j + width]), []).append(j)
    once = {sizes: found[0] for sizes, found in places.items() if len(found) == 1}
    at, reached = [], []
    for i in range(len(sizes) - width + 1):
        row = tuple(sizes[i : i + width])
        if row in once:
            at.append(i)
            reached.append(once[row])
    return at, reached
