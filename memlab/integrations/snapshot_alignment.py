"""The blocks of a step on both sides, and which block of one side is which block of the other.

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

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memlab.errors import MemlabError
from memlab.integrations.snapshot_blocks import (
    BACKWARD_PASSES,
    BLOCK,
    COLUMNS,
    Bools,
    Ints,
    RecentBlocks,
    RunPhase,
    live_bytes,
    place_of,
)
from memlab.integrations.snapshot_file import Table
from memlab.memory.lifetimes import step_memory
from memlab.memory.replay import BLOCK_BYTES, round_block
from memlab.trace import CATEGORIES, PHASES, Phase, Trace

UNKNOWN_PHASE = -1  # goes with every phase
LIKE_SIZE = 4  # a block of another size is taken for the same one within this factor
DIRECT_CELLS = 2**20  # up to here the whole table is kept
MOST_POINTS = 2**24  # that are kept
MOST_CELLS = 2_000_000_000  # half a minute; equal beginnings and ends do not count


class Pairs(NamedTuple):
    """Which blocks are one. Each array is int64, (pairs, 2): index of the first, of the second."""

    same: Ints  # in both orders, with one size
    moved: Ints  # with one size, elsewhere in the order
    resized: Ints  # at one place in the order, with two sizes


def align(a: Table, b: Table) -> Pairs:
    """Return which blocks of two sequences are one.

    Args:
        a: the blocks of one side in the order of allocation, with the columns `size_bytes` and
            `phase`, which is -1 where it is not known.
        b: those of the other side.

    Raises:
        MemlabError: the sequences are too long and too different.
    """
    same = _common(a, b)
    left = [np.setdiff1d(np.arange(len(side)), same[:, k]) for k, side in enumerate((a, b))]
    keys = (list(zip(a.size_bytes.tolist(), filled(a, b, same).tolist(), strict=True)),
            list(zip(b.size_bytes.tolist(), b.phase.tolist(), strict=True)))  # fmt: skip
    moved = _as_pairs(paired(keys, (left[0].tolist(), left[1].tolist()))[0])
    left = [np.setdiff1d(rest, moved[:, side]) for side, rest in enumerate(left)]
    return Pairs(same, moved, _resized((a, b), left, same))


def _as_pairs(pairs: list[tuple[int, int]]) -> Ints:
    return np.array(pairs, np.int64).reshape(-1, 2)


def _common(a: Table, b: Table) -> Ints:
    """Return the pairs of the heaviest common subsequence; equal ends are stripped first."""
    begin = _num_equal(a, b)
    end = _num_equal(a[begin:][::-1], b[begin:][::-1])
    if (len(a) - begin - end) * (len(b) - begin - end) > MOST_CELLS:
        raise MemlabError(
            f"the step of the snapshot has {len(a):,} allocations and the predicted one "
            f"{len(b):,}, and they are too different to be aligned; pass the workload and the "
            "config that the snapshot was recorded with"
        )
    same = [(i, i) for i in range(begin)]
    _heaviest(a[begin : len(a) - end], b[begin : len(b) - end], (begin, begin), same)
    same += [(len(a) - k, len(b) - k) for k in range(end, 0, -1)]
    return _as_pairs(same)


def _num_equal(a: Table, b: Table) -> int:
    """Return how many blocks at the beginnings may be the same."""
    a, b = a[: len(b)], b[: len(a)]
    one_phase = (a.phase == b.phase) | (a.phase == UNKNOWN_PHASE) | (b.phase == UNKNOWN_PHASE)
    return int(np.append((a.size_bytes != b.size_bytes) | ~one_phase, True).argmax())


def _heaviest(a: Table, b: Table, at: tuple[int, int], pairs: list[tuple[int, int]]) -> None:
    """Add the pairs of the heaviest common subsequence, in order, by Hirschberg's method."""
    if not len(a) or not len(b):
        return
    if len(a) == 1 or len(a) * len(b) <= DIRECT_CELLS:
        pairs += [(i + at[0], j + at[1]) for i, j in _direct(a, b)]
        return
    half = len(a) // 2
    before, after = _last_row(a[:half], b), _last_row(a[half:][::-1], b[::-1])[::-1]
    split = int((before + after).argmax())
    _heaviest(a[:half], b[:split], at, pairs)
    _heaviest(a[half:], b[split:], (at[0] + half, at[1] + split), pairs)


def _rows(a: Table, b: Table) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the most points of the first blocks of `a` with the first of `b`, a row for each."""
    known: dict[tuple[int, int], npt.NDArray[np.int32]] = {}
    row = np.zeros(len(b) + 1, np.int32)
    for size, phase in zip(a.size_bytes.tolist(), a.phase.tolist(), strict=True):
        points = known.get((size, phase))
        if points is None:
            weight = np.int32((size // BLOCK_BYTES).bit_length())
            one_phase = (b.phase == phase) & (b.phase != UNKNOWN_PHASE)
            points = (b.size_bytes == size) * (weight * (one_phase + np.int32(1)))
            if len(known) * len(b) < MOST_POINTS:
                known[size, phase] = points
        np.maximum(row[1:], row[:-1] + points, out=row[1:])
        np.maximum.accumulate(row, out=row)
        yield row


def _last_row(a: Table, b: Table) -> npt.NDArray[np.int32]:
    (row,) = deque(_rows(a, b), maxlen=1)
    return row


def _direct(a: Table, b: Table) -> list[tuple[int, int]]:
    table = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    for i, row in enumerate(_rows(a, b), start=1):
        table[i] = row
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


def filled(a: Table, b: Table, same: Ints) -> npt.NDArray[np.int8]:
    """Return the phases of the first side, where unknown that of the last block that was paired."""
    found: npt.NDArray[np.int8] = a.phase
    if len(same):
        last = np.searchsorted(same[:, 0], np.arange(len(a)), side="right") - 1
        near = b.phase[same[np.maximum(last, 0), 1]]
        found = np.where(found == UNKNOWN_PHASE, near, found)
    return found


def paired(
    keys: tuple[Sequence[Any], Sequence[Any]], left: tuple[list[int], list[int]]
) -> tuple[list[tuple[int, int]], tuple[list[int], list[int]]]:
    """Pair what is left of both sides and has equal keys, in order; return it and the rest."""
    waiting: dict[Any, deque[int]] = {}
    for j in left[1]:
        waiting.setdefault(keys[1][j], deque()).append(j)
    found, rest = [], []
    for i in left[0]:
        others = waiting.get(keys[0][i])
        if others:
            found.append((i, others.popleft()))
        else:
            rest.append(i)
    return found, (rest, [j for others in waiting.values() for j in others])


def _resized(sides: tuple[Table, Table], left: list[Ints], same: Ints) -> Ints:
    """Pair what is left between the same neighbours, the largest with the largest."""
    gaps: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    gap_of = [np.searchsorted(same[:, side], left[side]) for side in (0, 1)]
    vague = set(gap_of[0][sides[0].phase[left[0]] == UNKNOWN_PHASE].tolist())
    for side, blocks in enumerate(sides):
        phases = blocks.phase[left[side]].tolist()
        for index, gap, phase in zip(left[side].tolist(), gap_of[side].tolist(), phases,
                                     strict=True):  # fmt: skip
            key = gap, UNKNOWN_PHASE if gap in vague else phase
            gaps.setdefault(key, ([], []))[side].append(index)
    sizes = [blocks.size_bytes.tolist() for blocks in sides]
    found: list[tuple[int, int]] = []
    for ours, theirs in gaps.values():
        ours.sort(key=lambda i: -sizes[0][i])
        theirs.sort(key=lambda j: -sizes[1][j])
        while ours and theirs:
            one, other = sizes[0][ours[0]], sizes[1][theirs[0]]
            if max(one, other) <= LIKE_SIZE * min(one, other):
                found.append((ours.pop(0), theirs.pop(0)))
            else:
                (ours if one > other else theirs).pop(0)
    return _as_pairs(sorted(found))


# The blocks of one step, as a snapshot shows them and as a prediction has them.
#
# A snapshot may begin late, end late, and hold many steps. Its last whole step is taken.
# Where something marks the ends of steps (`snapshot_blocks.py`), it lies between two of them.
# Without stacks nothing does. Then the sizes of the prediction mark them: three sizes in a
# row that occur once in the predicted step say where in the snapshot their step begins.

NUMBER = {phase: number for number, phase in enumerate(PHASES)}
NUMBERS = np.full(len(RunPhase), UNKNOWN_PHASE, np.int8)  # of each `RunPhase`, in `PHASES`
for _phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
    NUMBERS[RunPhase[_phase.name]] = NUMBER[_phase]
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
    """The blocks of one step, in the order of allocation: first those that were there before.

    Attributes:
        blocks: with the columns of `BLOCK`; instants count events within the step, and the phase is
            an index into `PHASES`, -1 where it is not known.
        names: of each block.
        num_events: of the step.
        is_first: whether it is the first step of a training.
        found_by: what marks where the step begins and ends, in words.
    """

    blocks: Table
    names: tuple[Name, ...]
    num_events: int
    is_first: bool
    found_by: str = ""

    @property
    def num_old(self) -> int:
        """How many blocks were there before the step."""
        return int(np.searchsorted(self.blocks.birth, 0))

    @property
    def born(self) -> Table:
        """The blocks that the step allocates."""
        return self.blocks[self.num_old :]

    def live_after_births(self) -> Ints:
        """Return the live bytes before the step, and after each of its allocations."""
        live: Ints = live_bytes(self.blocks, self.num_events)[np.append(0, self.born.birth + 1)]
        return live

    def is_live(self, num_born: int) -> Bools:
        """Return which blocks are live after so many of the step's allocations."""
        at = int(self.born.birth[num_born - 1]) if num_born else -1
        found: Bools = (self.blocks.birth <= at) & (self.blocks.death > at)
        return found


def predicted_step(trace: Trace, number: int) -> StepBlocks:
    """Return the blocks of a step of a predicted trace, whose sizes are requests."""
    memory = step_memory(trace, number)
    first, end = int(memory.events[1]), int(memory.events[-1]) + 1
    births, deaths = memory.blocks.births, memory.blocks.deaths
    chosen = np.flatnonzero((births < end) & (deaths >= first))
    births = births[chosen]
    blocks: Table = np.zeros(len(chosen), BLOCK).view(np.recarray)
    blocks.birth = np.maximum(births - first, -1)
    blocks.death = np.minimum(deaths[chosen], end) - first
    blocks.size_bytes = round_block(trace.nbytes[births])
    phase_of = np.array([NUMBER[interval.phase] for interval in trace.intervals], np.int8)
    blocks.phase = phase_of[trace.interval[births]]
    names = []
    for birth, column in zip(births.tolist(), memory.blocks.columns[chosen].tolist(), strict=True):
        place, address = trace.place(birth), int(trace.address[birth])
        module = trace.parameters.get(address, trace.states.get(address, place.module))
        names.append(Name(str(CATEGORIES[column]), place.operator, module))
    return StepBlocks(
        blocks=blocks, names=tuple(names), num_events=end - first, is_first=number == 0
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
    # if backward passes are the marks, each micro-batch has one
    marks = accumulation_steps if recent.steps_by == BACKWARD_PASSES else 1
    before = len(recent.step_ends) - 1 - marks
    if before < -1 or (before < 0 and not recent.is_whole):
        raise MemlabError(NO_WHOLE_STEP)
    if before < 0:
        built = recent.blocks.birth[recent.blocks.phase == RunPhase.BUILD]
        begin = int(built.max(initial=-1)) + 1
    else:
        begin = int(recent.step_ends[before])
    return _between(recent, begin, int(recent.step_ends[-1]), before < 0, recent.steps_by)


def _between(recent: RecentBlocks, begin: int, end: int, is_first: bool, by: str) -> StepBlocks:
    """Return the blocks of these events, and those that the step finds and does not drop at once.

    Gradients that `zero_grad` frees before the first forward belong to the step before.
    """
    blocks = recent.blocks
    in_step = (blocks.birth >= begin) & (blocks.birth < end)
    if not in_step.any():
        raise MemlabError(
            f"the last step of the snapshot allocates nothing, so there is nothing to compare; "
            f"{REMEDY}"
        )
    forward = blocks.birth[in_step & (blocks.phase == RunPhase.FORWARD)]
    first = int((forward if len(forward) else blocks.birth[in_step]).min())
    blocks = blocks[in_step | ((blocks.birth < begin) & (blocks.death > first))]
    blocks.birth = np.maximum(blocks.birth - begin, -1)
    blocks.death = np.minimum(blocks.death, end) - begin
    blocks.phase = NUMBERS[blocks.phase]
    return StepBlocks(blocks=blocks, names=_names(recent, blocks), num_events=end - begin,
                      is_first=is_first, found_by=by)  # fmt: skip


def _names(recent: RecentBlocks, blocks: Table) -> tuple[Name, ...]:
    """Return category and place of blocks; a stack without a Python frame is no place."""
    places = {number: place_of(stack) if stack else "" for number, stack in recent.stacks.items()}
    streams, index = np.unique(blocks.stream, return_inverse=True)
    usual = int(streams[np.bincount(index, blocks.size_bytes).argmax()])
    found = []
    for stack, stream, column in blocks[["stack", "stream", "column"]].tolist():
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
    born = recent.blocks[recent.blocks.birth >= 0]
    wanted = predicted.born.size_bytes.tolist()
    at, reached = _progress(born.size_bytes.tolist(), wanted)
    if not at:
        raise MemlabError(NOTHING_IN_COMMON)
    starts = [i - j for i, j in zip(at, reached, strict=True)]
    jumps = [k for k in range(1, len(at)) if starts[k] - starts[k - 1] > len(wanted) // 2]
    begins = [max(0, starts[0]), *(max(starts[k], at[k - 1] + 1) for k in jumps)]
    last = starts[-1] + len(wanted)
    chosen = len(begins) - (1 if last <= len(born) else 2)
    if chosen < 0 or (chosen == 0 and starts[0] < 0):
        raise MemlabError(NO_WHOLE_STEP)
    births = [*born.birth.tolist(), recent.num_events]
    end = [*begins[1:], min(last, len(born))][chosen]
    is_first = chosen == 0 and recent.is_whole
    return _between(recent, births[begins[chosen]], births[end], is_first, SIZES_ALONE)


def _progress(sizes: Sequence[int], wanted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return where in the snapshot sizes stand that the prediction has once, and where it has them.

    >>> _progress([9, 5, 1, 2, 3, 4], [1, 2, 3, 4, 4, 4, 4, 4])
    ([2, 3], [0, 1])
    """
    width = min(IN_A_ROW, len(wanted))
    rows = [tuple(wanted[j : j + width]) for j in range(len(wanted) - width + 1)]
    counts = Counter(rows)
    once = {row: j for j, row in enumerate(rows) if counts[row] == 1}
    at, reached = [], []
    for i in range(len(sizes) - width + 1):
        row = tuple(sizes[i : i + width])
        if row in once:
            at.append(i)
            reached.append(once[row])
    return at, reached
