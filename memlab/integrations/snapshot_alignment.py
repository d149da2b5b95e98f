"""Align two sequences of allocations: which block of one side is which block of the other.

Both sides are blocks in the order in which they were allocated, with size and phase. Three steps:

1. The longest common subsequence by size. A pair weighs as many points as its size has digits in
   base two, and twice as many within one phase, so that large blocks and phases stay together.
   Hirschberg's method (CACM 18, 1975) needs memory for one row alone.
2. What is left on both sides with one size and phase is one block that was allocated elsewhere in
   the order: "moved".
3. What is left between the same two neighbours, in one phase and within a factor of four, is one
   block of another size: "resized".

    measured    4  8  8  2  16
    predicted   4  8  2  8     1       pairs 4-4, 8-8, 2-2; moved 8-8; left 16 and 1
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memlab.errors import MemlabError
from memlab.integrations.snapshot_blocks import (
    BACKWARD_PASSES,
    COLUMNS,
    RecentBlocks,
    RunPhase,
    place_of,
)
from memlab.memory.lifetimes import step_memory
from memlab.memory.replay import BLOCK_BYTES, round_block
from memlab.trace import CATEGORIES, PHASES, Phase, Trace

Ints = npt.NDArray[np.int64]
Phases = npt.NDArray[np.int8]

UNKNOWN_PHASE = -1  # goes with every phase
LIKE_SIZE = 4  # a block of another size is taken for the same one within this factor
DIRECT_CELLS = 2**20  # up to here the whole table is kept
MOST_POINTS = 2**24  # that are kept
MOST_CELLS = 2_000_000_000  # half a minute; equal beginnings and ends do not count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pairs:
    """Which blocks are one. Each array is int64, (pairs, 2): index of the first, of the second.

    Attributes:
        same: in both orders, with one size.
        moved: with one size, elsewhere in the order.
        resized: at one place in the order, with two sizes.
    """

    same: Ints
    moved: Ints
    resized: Ints


def align(sizes: tuple[Ints, Ints], phases: tuple[Phases, Phases]) -> Pairs:
    """Return which blocks of two sequences are one.

    Args:
        sizes: bytes of the blocks of each side, (blocks,), in the order of allocation.
        phases: their phases; -1 where it is not known.

    Raises:
        MemlabError: the sequences are too long and too different.

    >>> none = (np.full(3, -1, np.int8), np.full(2, -1, np.int8))
    >>> align((np.array([512, 1024, 4096]), np.array([512, 4096])), none).same.tolist()
    [[0, 0], [2, 1]]
    """
    same = _common(sizes, phases)
    left = [np.setdiff1d(np.arange(len(size)), same[:, side]) for side, size in enumerate(sizes)]
    moved = _moved(sizes, (filled(phases, same), phases[1]), left)
    left = [np.setdiff1d(rest, moved[:, side]) for side, rest in enumerate(left)]
    return Pairs(same=same, moved=moved, resized=_resized(sizes, phases, left, same))


def _common(sizes: tuple[Ints, Ints], phases: tuple[Phases, Phases]) -> Ints:
    """Return the pairs of the heaviest common subsequence; equal ends are stripped first."""
    (a, b), (in_a, in_b) = sizes, phases
    shorter = min(len(a), len(b))
    agree = (a[:shorter] == b[:shorter]) & _together(in_a[:shorter], in_b[:shorter])
    begin = shorter if agree.all() else int(agree.argmin())
    rest = shorter - begin
    agree = (a[::-1][:rest] == b[::-1][:rest]) & _together(in_a[::-1][:rest], in_b[::-1][:rest])
    end = rest if agree.all() else int(agree.argmin())
    middle_a, middle_b = slice(begin, len(a) - end), slice(begin, len(b) - end)
    if (len(a) - begin - end) * (len(b) - begin - end) > MOST_CELLS:
        raise MemlabError(
            f"the step of the snapshot has {len(a):,} allocations and the predicted one "
            f"{len(b):,}, and they are too different to be aligned; pass the workload and the "
            "config that the snapshot was recorded with"
        )
    pairs: list[tuple[int, int]] = []
    _heaviest(_Side(a[middle_a], in_a[middle_a]), _Side(b[middle_b], in_b[middle_b]),
              (begin, begin), pairs)  # fmt: skip
    same = [(i, i) for i in range(begin)] + pairs
    same += [(len(a) - k, len(b) - k) for k in range(end, 0, -1)]
    return np.array(same, np.int64).reshape(-1, 2)


class _Side:
    """Sizes and phases of one side, (blocks,)."""

    __slots__ = ("phase", "size")

    def __init__(self, size: Ints, phase: Phases) -> None:
        self.size, self.phase = size, phase

    def __len__(self) -> int:
        return len(self.size)

    def part(self, which: slice) -> "_Side":
        return _Side(self.size[which], self.phase[which])


def _heaviest(a: _Side, b: _Side, at: tuple[int, int], pairs: list[tuple[int, int]]) -> None:
    """Add the pairs of the heaviest common subsequence, in order, by Hirschberg's method."""
    if not len(a) or not len(b):
        return
    if len(a) == 1 or len(a) * len(b) <= DIRECT_CELLS:
        pairs += [(i + at[0], j + at[1]) for i, j in _direct(a, b)]
        return
    half = len(a) // 2
    before = _last_row(a.part(slice(half)), b)
    after = _last_row(a.part(slice(None, half - 1, -1)), b.part(slice(None, None, -1)))[::-1]
    split = int((before + after).argmax())
    _heaviest(a.part(slice(half)), b.part(slice(split)), at, pairs)
    _heaviest(a.part(slice(half, None)), b.part(slice(split, None)),
              (at[0] + half, at[1] + split), pairs)  # fmt: skip


def _points(a: _Side, b: _Side) -> Iterator[npt.NDArray[np.int32]]:
    """Yield for each block of `a` the points of pairing it with each of `b`; 0 for another size."""
    known: dict[tuple[int, int], npt.NDArray[np.int32]] = {}
    for size, phase in zip(a.size.tolist(), a.phase.tolist(), strict=True):
        points = known.get((size, phase))
        if points is None:
            weight = np.int32((size // BLOCK_BYTES).bit_length())
            one_phase = (b.phase == phase) & (b.phase != UNKNOWN_PHASE)
            points = (b.size == size) * (weight * (one_phase + np.int32(1)))
            if len(known) * len(b) < MOST_POINTS:
                known[size, phase] = points
        yield points


def _next_row(row: npt.NDArray[np.int32], points: npt.NDArray[np.int32]) -> None:
    np.maximum(row[1:], row[:-1] + points, out=row[1:])
    np.maximum.accumulate(row, out=row)


def _last_row(a: _Side, b: _Side) -> npt.NDArray[np.int32]:
    row = np.zeros(len(b) + 1, np.int32)
    for points in _points(a, b):
        _next_row(row, points)
    return row


def _direct(a: _Side, b: _Side) -> list[tuple[int, int]]:
    table = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    for i, points in enumerate(_points(a, b)):
        table[i + 1] = table[i]
        _next_row(table[i + 1], points)
    found = []
    i, j = len(a), len(b)
    while table[i, j]:
        if table[i - 1, j] == table[i, j]:
            i -= 1
        elif table[i, j - 1] == table[i, j]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            found.append((i, j))
    return found[::-1]


def _together(one: Phases, other: Phases) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (
        (one == other) | (one == UNKNOWN_PHASE) | (other == UNKNOWN_PHASE)
    )
    return found


def filled(phases: tuple[Phases, Phases], same: Ints) -> Phases:
    """Return the phases of the first side, where unknown that of the last block that was paired."""
    known = phases[0].copy()
    if len(same):
        last = np.searchsorted(same[:, 0], np.arange(len(known)), side="right") - 1
        near = phases[1][same[np.maximum(last, 0), 1]]
        known = np.where(known == UNKNOWN_PHASE, near, known)
    return known


def _moved(sizes: tuple[Ints, Ints], phases: tuple[Phases, Phases], left: list[Ints]) -> Ints:
    """Pair what is left of one size and phase, in order."""
    waiting: dict[tuple[int, int], deque[int]] = {}
    for j in left[1].tolist():
        waiting.setdefault((int(sizes[1][j]), int(phases[1][j])), deque()).append(j)
    found = []
    for i in left[0].tolist():
        others = waiting.get((int(sizes[0][i]), int(phases[0][i])))
        if others:
            found.append((i, others.popleft()))
    return np.array(found, np.int64).reshape(-1, 2)


def _resized(
    sizes: tuple[Ints, Ints], phases: tuple[Phases, Phases], left: list[Ints], same: Ints
) -> Ints:
    """Pair what is left between the same neighbours, the largest with the largest."""
    gaps: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    gap_of = [np.searchsorted(same[:, side], left[side]) for side in (0, 1)]
    vague = set(gap_of[0][phases[0][left[0]] == UNKNOWN_PHASE].tolist())
    for side in (0, 1):
        for index, gap in zip(left[side].tolist(), gap_of[side].tolist(), strict=True):
            phase = UNKNOWN_PHASE if gap in vague else int(phases[side][index])
            gaps.setdefault((gap, phase), ([], []))[side].append(index)
    found: list[tuple[int, int]] = []
    for ours, theirs in gaps.values():
        found += _like_pairs(sizes, ours, theirs)
    return np.array(sorted(found), np.int64).reshape(-1, 2)


def _like_pairs(
    sizes: tuple[Ints, Ints], ours: list[int], theirs: list[int]
) -> list[tuple[int, int]]:
    """Return pairs within a factor of `LIKE_SIZE`, from the largest down."""
    ours = sorted(ours, key=lambda i: -int(sizes[0][i]))
    theirs = sorted(theirs, key=lambda j: -int(sizes[1][j]))
    found = []
    while ours and theirs:
        one, other = int(sizes[0][ours[0]]), int(sizes[1][theirs[0]])
        if max(one, other) <= LIKE_SIZE * min(one, other):
            found.append((ours.pop(0), theirs.pop(0)))
        elif one > other:
            ours.pop(0)
        else:
            theirs.pop(0)
    return found


# `StepBlocks`: the blocks of one step, as a snapshot shows them and as a prediction has them.
#
# A snapshot may begin late, end late, and hold many steps. Its last whole step is taken.
# Where something marks the ends of steps (`snapshot_blocks.py`), it lies between two of them.
# Without stacks nothing does. Then the sizes of the prediction mark them: three sizes in a
# row that occur once in the predicted step say where in the snapshot their step begins.

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
