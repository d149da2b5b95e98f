"""Compare a step of a snapshot with the same step as predicted, allocation by allocation.

The step is predicted for the card that a person names, for a snapshot does not say what it was
recorded on. Then the allocations of both sides are aligned, and what is live is compared at the
higher of the two peaks, at the same place in the step.

Left out: reserved bytes, which depend on everything that the process did before.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from memlab._util.checks import checked, seconds
from memlab._util.tables import columns_table, facts_table
from memlab._util.units import format_bytes, shown
from memlab.api import predict_with_forecast
from memlab.config import StepConfig
from memlab.devices.cards import resolve
from memlab.errors import DeviceError, MemlabError
from memlab.integrations.snapshot import Snapshot
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
from memlab.workload import Workload

# Which block of one side is which block of the other.
#
# Both sides are blocks in the order in which they were allocated, with size and phase. Three steps:
#
# 1. The longest common subsequence by size. A pair weighs as many points as its size has digits in
#    base two, and twice as many within one phase, so that large blocks and phases stay together.
#    Hirschberg's method (CACM 18, 1975) needs memory for one row alone.
# 2. What is left on both sides with one size and phase is one block that was allocated elsewhere in
#    the order: "moved".
# 3. What is left between the same two neighbours, in one phase and within a factor of four, is one
#    block of another size: "resized".
#
#     measured    4  8  8  2  16
#     predicted   4  8  2  8     1       pairs 4-4, 8-8, 2-2; moved 8-8; left 16 and 1

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


# `SnapshotComparison`: a step as a snapshot shows it beside the same step as predicted.

BEFORE = "before the step"
MOST_ROWS = 8  # of a table, in print


class Difference(StrEnum):
    """In what the blocks of a row differ; of several, the first one of this list."""

    NOT_PREDICTED = "not predicted"
    NOT_MEASURED = "not in the snapshot"
    RESIZED = "another size"
    MOVED = "elsewhere in the order"
    FREED_LATER = "freed later than predicted"
    FREED_EARLIER = "freed earlier than predicted"
    NONE = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedBlocks:
    """Blocks of one operator in one module, measured beside predicted.

    Attributes:
        phase: in which they are allocated, or "before the step"; empty if it is not known.
        operator: that allocates them, as predicted; empty where only the snapshot has them.
        module: the path of the module, or of the parameter; empty if it is not known.
        category: as predicted, or else as the stack says.
        place: the line that allocates them, or what they lie beside, where only the snapshot has
            them.
        difference: in what they differ.
        num_measured: blocks in the snapshot.
        num_predicted: blocks in the prediction.
        measured_bytes: of those in the snapshot.
        predicted_bytes: of those in the prediction.
        measured_at_peak_bytes: of those that are live at the higher peak of the two.
        predicted_at_peak_bytes: the same of the prediction, at the same place in the step.
    """

    phase: str
    operator: str
    module: str
    category: str
    place: str
    difference: Difference
    num_measured: int
    num_predicted: int
    measured_bytes: int
    predicted_bytes: int
    measured_at_peak_bytes: int
    predicted_at_peak_bytes: int

    @property
    def more_at_peak_bytes(self) -> int:
        """By how much more is live than predicted at the higher peak; below 0 if less."""
        return self.measured_at_peak_bytes - self.predicted_at_peak_bytes

    @property
    def name(self) -> str:
        """What the blocks are, in words, such as "aten::mm in backward of layers.3"."""
        if self.phase == BEFORE:
            what = self.category.replace("_", " ")
            where = f" of {self.module}" if self.module else f", {self.place}" if self.place else ""
            return f"{what} from before the step{where}"
        what = self.operator or self.place or "an allocation"
        return (
            what
            + (f" in {self.phase}" if self.phase else "")
            + (f" of {self.module}" if self.module else "")
        )


ALL_OF_IT = 0.95  # of a difference, which one line is then said to explain alone
FEW = 0.5  # of the allocations; if fewer agree, it is probably not the same step
MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SnapshotComparison:
    """What a step of a snapshot held, beside what was predicted.

    Both sides count what was requested, rounded up to 512 B. What the two curves and the columns
    "at peak" compare is the same place in the step.

    Attributes:
        path: of the snapshot.
        device: that was predicted.
        workload_name: of the workload that was predicted.
        config: of the prediction.
        rows: blocks by phase, operator and module, those that differ most at the peak first. Their
            bytes at the peak sum to `measured_at_peak_bytes` and `predicted_at_peak_bytes`.
        measured_peak_bytes: most bytes of the step in the snapshot.
        predicted_peak_bytes: most bytes of the predicted step.
        measured_peak_phase: the phase of the peak, such as "backward".
        predicted_peak_phase: the same of the prediction.
        measured_at_peak_bytes: live at the higher peak of the two.
        predicted_at_peak_bytes: the same of the prediction, at the same place in the step.
        matched_fraction: of the allocations of both sides, the share that is on both.
        found_by: what marks the beginning and the end of the step in the snapshot, in words.
        measured: int64, (places,), live bytes after each allocation of both sides, in order.
        predicted: the same of the prediction.
        phase: the phase of each place, as an index into `memlab.trace.PHASES`.
        notes: sentences that a reader of the numbers must know.
    """

    path: str
    device: str
    workload_name: str
    config: StepConfig
    rows: tuple[ComparedBlocks, ...]
    measured_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_phase: str
    predicted_peak_phase: str
    measured_at_peak_bytes: int
    predicted_at_peak_bytes: int
    matched_fraction: float
    found_by: str
    measured: Ints
    predicted: Ints
    phase: npt.NDArray[np.int8]
    notes: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[ComparedBlocks, ...]:
        """The rows whose blocks differ."""
        return tuple(row for row in self.rows if row.difference)

    @property
    def operators(self) -> tuple[ComparedBlocks, ...]:
        """The rows summed over modules, categories and differences: one for each operator."""
        return merged(
            ((row.phase, row.operator, "", "", row.place, Difference.NONE),
             tuple(getattr(row, name) for name in COUNTED)) for row in self.rows
        )  # fmt: skip

    @property
    def summary(self) -> str:
        """The answer, in one or two sentences."""
        peak = f"{format_bytes(self.measured_peak_bytes)}, in {self.measured_peak_phase}"
        more = self.measured_peak_bytes - self.predicted_peak_bytes
        if more:
            text = (
                f"The step held {format_bytes(abs(more))} {'more' if more > 0 else 'less'} than "
                f"predicted at its peak ({peak}; predicted "
                f"{format_bytes(self.predicted_peak_bytes)}, in {self.predicted_peak_phase})"
                f"{self._why()}."
            )
        else:
            text = f"The step held what was predicted, to the byte: at its peak {peak}."
            text += self._elsewhere()
        if self.matched_fraction < FEW:
            text += (
                f" But only {self.matched_fraction:.0%} of the allocations have the size of a "
                "predicted one. Check that the workload, the batch size, the precision and the "
                "optimizer are those of the snapshot."
            )
        return text

    def _elsewhere(self) -> str:
        """Say what differs, although the peaks are equal."""
        if not self.differences:
            return " Every allocation is as predicted."
        blocks = sum(max(row.num_measured, row.num_predicted) for row in self.differences)
        largest = max(
            self.differences, key=lambda row: max(row.measured_bytes, row.predicted_bytes)
        )
        verb = "allocations differ" if blocks > 1 else "allocation differs"
        return f" {blocks:,} {verb}, the largest: {largest.name}, {largest.difference}."

    def _why(self) -> str:
        """Say which blocks explain the difference at the higher peak."""
        total = self.measured_at_peak_bytes - self.predicted_at_peak_bytes
        sign = 1 if total > 0 else -1
        named = [row for row in self.differences if sign * row.more_at_peak_bytes > 0][:MOST_NAMED]
        if not total or not named:
            return ""
        # the lower peak may be elsewhere, and then more differs here than the peaks do
        differs_more = total != self.measured_peak_bytes - self.predicted_peak_bytes
        there = f"; at that place {format_bytes(abs(total))} differ" if differs_more else ""
        said = [f"{row.name} ({row.difference})" for row in named]
        if sign * named[0].more_at_peak_bytes >= ALL_OF_IT * abs(total):
            return f"{there}, all of it in {said[0]}"
        shares = [f"{format_bytes(abs(row.more_at_peak_bytes))} in {text}"
                  for row, text in zip(named, said, strict=True)]  # fmt: skip
        return f"{there}: " + ", ".join(shares)

    def __str__(self) -> str:
        """Return a page of plain text: the answer, and what differs."""
        lines = [self.summary, ""]
        lines += [f"  {'  '.join(cells)}" for cells in self._differing()]
        return "\n".join([*lines, *self.notes]).rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return small tables for notebooks."""
        facts = {
            "step": f"{self.workload_name}, predicted for {self.device}",
            "answer": self.summary,
            "peak in the snapshot": f"{format_bytes(self.measured_peak_bytes)} in "
            f"{self.measured_peak_phase}",
            "predicted peak": f"{format_bytes(self.predicted_peak_bytes)} in "
            f"{self.predicted_peak_phase}",
            "notes": " ".join(self.notes),
        }
        heads = ("more at the peak", "snapshot", "predicted", "what", "difference")
        return facts_table("snapshot and prediction", facts) + columns_table(
            heads, self._differing()
        )

    def _differing(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (signed(row.more_at_peak_bytes), format_bytes(row.measured_bytes),
             format_bytes(row.predicted_bytes), row.name, str(row.difference))
            for row in self.differences[:MOST_ROWS]
        ]  # fmt: skip
        more = len(self.differences) - MOST_ROWS
        return [*rows, ("", "", "", f"{more} more", "")] if more > 0 else rows


FIELDS = tuple(field.name for field in fields(ComparedBlocks))  # six texts, and what is counted
COUNTED = FIELDS[6:]
Texts = tuple[str, str, str, str, str, Difference]


def merged(blocks: Iterable[tuple[Texts, tuple[int, ...]]]) -> tuple[ComparedBlocks, ...]:
    """Return one row for each set of equal texts, the largest differences first.

    Args:
        blocks: their phase, operator, module, category, place and difference, and their numbers in
            the order of `COUNTED`.
    """
    sums: dict[Texts, tuple[int, ...]] = {}
    for texts, counts in blocks:
        sums[texts] = tuple(map(add, sums.get(texts, (0,) * len(counts)), counts))
    rows = []
    for texts, counts in sums.items():
        values: tuple[Any, ...] = (*texts, *counts)
        rows.append(ComparedBlocks(**dict(zip(FIELDS, values, strict=True))))

    def rank(row: ComparedBlocks) -> tuple[int, bool, int]:
        largest = max(row.measured_bytes, row.predicted_bytes)
        return -abs(row.more_at_peak_bytes), not row.difference, -largest

    return tuple(sorted(rows, key=rank))


def signed(nbytes: int) -> str:
    """Return bytes with their sign, such as "+12.0 MiB"."""
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}" if nbytes else "0"


# The comparison.

NOBODY = -1  # a block that the other side does not have


@checked(timeout_seconds=seconds)
def compare(
    snapshot: Snapshot,
    workload: Workload,
    config: StepConfig,
    device: str | torch.device,
    *,
    seed: int = 0,
    timeout_seconds: float = 120,
) -> SnapshotComparison:
    """Return the last whole step of a snapshot beside the predicted one; see `Snapshot.compare`."""
    if resolve(device).kind != "cuda":
        raise DeviceError(
            f"device={shown(str(device))} is no card, and a snapshot is written on one; pass the "
            'card that it was recorded on, such as "rtx-4090" or "24GiB"'
        )
    if not snapshot.recent.num_events:
        raise MemlabError(f"the snapshot holds no events to compare; {REMEDY}")
    found = predict_with_forecast(
        workload, config, device, seed=seed, timeout_seconds=timeout_seconds
    )
    if found.forecast is None:
        raise MemlabError(
            "the step cannot be predicted, so there is nothing to compare the snapshot with: "
            f"{found.result.message}"
        )
    # what kernels take only where there is room is a guess: as "not predicted" it is seen better
    trace = found.forecast.program.trace(found.forecast.least, config.micro_batch_sizes)
    return compare_with_trace(snapshot, trace, config, found.result.device, workload.name)


def compare_with_trace(
    snapshot: Snapshot, trace: Trace, config: StepConfig, device: str, workload_name: str
) -> SnapshotComparison:
    """Return the last whole step of a snapshot beside that of a predicted run.

    Args:
        snapshot: of a training.
        trace: of the predicted run, with the requests of blocks in bytes.
        config: of the prediction.
        device: that it was made for.
        workload_name: of the workload that was predicted.

    Raises:
        MemlabError: the snapshot has no whole step, or has nothing in common with the prediction.
    """
    later = predicted_step(trace, 1)
    measured = measured_step(snapshot.recent, config.accumulation_steps, later)
    predicted = predicted_step(trace, 0) if measured.is_first else later
    both = _Both(measured, predicted)
    live = [side.live_after_births() for side in both.sides]
    peaks = [int(each.max()) for each in live]
    higher = 0 if peaks[0] >= peaks[1] else 1
    at = int(np.searchsorted(both.num_born[higher], int(live[higher].argmax())))
    curves = [each[num] for each, num in zip(live, both.num_born, strict=True)]
    num_agreeing = 2 * (len(both.pairs.same) + len(both.pairs.moved))
    count = len(measured.born) + len(predicted.born)
    return SnapshotComparison(
        path=snapshot.path,
        device=device,
        workload_name=workload_name,
        config=config,
        rows=both.rows(at),
        measured_peak_bytes=peaks[0],
        predicted_peak_bytes=peaks[1],
        measured_peak_phase=both.phase_after(0, int(live[0].argmax())),
        predicted_peak_phase=both.phase_after(1, int(live[1].argmax())),
        measured_at_peak_bytes=int(curves[0][at]),
        predicted_at_peak_bytes=int(curves[1][at]),
        matched_fraction=num_agreeing / count if count else 1.0,
        found_by=measured.found_by,
        measured=curves[0],
        predicted=curves[1],
        phase=both.phase_of_places(),
        notes=tuple(_notes(measured)),
    )


def _notes(measured: StepBlocks) -> Iterator[str]:
    if measured.found_by == SIZES_ALONE:
        yield ("Nothing in the snapshot marks the steps, so the last whole step was found by the "
               "sizes of its allocations.")  # fmt: skip
    if (measured.blocks.phase == UNKNOWN_PHASE).all():
        yield ("No stack was recorded, so allocations are aligned by size and order alone. "
               'Recorded with context="all", their lines and phases count too.')  # fmt: skip
    if measured.is_first:
        yield ("The only whole step is the first one of the training, which makes the state of "
               "the optimizer; it is compared with the predicted first step.")  # fmt: skip


class _Both:
    """Two steps that are aligned.

    Attributes:
        sides: the step of the snapshot, and that of the prediction.
        num_old: how many blocks each side has from before the step.
        pairs: which of the blocks that the sides allocate are one.
        num_born: int64, (2, places), allocations of each side up to each place in the step.
    """

    def __init__(self, measured: StepBlocks, predicted: StepBlocks) -> None:
        self.sides = measured, predicted
        self.num_old = measured.num_old, predicted.num_old
        a, b = measured.born, predicted.born
        self.pairs = align(a, b)
        same = self.pairs.same
        self._phases = filled(a, b, same), b.phase
        # of each block, how many of the common allocations come before it is freed
        self._ends = [np.searchsorted(side.born.birth[same[:, k]], side.blocks.death)
                      for k, side in enumerate(self.sides)]  # fmt: skip
        self.num_born = _places(same, len(a), len(b))

    def rows(self, at: int) -> tuple[ComparedBlocks, ...]:
        """Return what differs, with the bytes that are live at a place in the step."""
        live = [side.is_live(int(num[at]))
                for side, num in zip(self.sides, self.num_born, strict=True)]  # fmt: skip
        found = []
        for one, other, difference in (*self._of_step(), *self._standing()):
            counts = []
            for k, block in enumerate((one, other)):
                size = int(self.sides[k].blocks.size_bytes[block]) if block != NOBODY else 0
                is_live = block != NOBODY and bool(live[k][block])
                counts.append((int(block != NOBODY), size, size * is_live))
            texts = self._texts(one, other, difference)
            found.append((texts, tuple(chain.from_iterable(zip(*counts, strict=True)))))
        return merged(found)

    def _of_step(self) -> Iterator[tuple[int, int, Difference]]:
        """Yield the blocks that the step allocates: of each side the index, and the difference."""
        differences = None, Difference.MOVED, Difference.RESIZED
        for those, difference in zip(self.pairs, differences, strict=True):
            for one, other in (those + self.num_old).tolist():
                yield one, other, difference or self._freed(one, other)
        every = np.concatenate(self.pairs) + self.num_old
        left = [np.setdiff1d(np.arange(self.num_old[k], len(side.blocks)), every[:, k]).tolist()
                for k, side in enumerate(self.sides)]  # fmt: skip
        yield from _alone(left[0], left[1])

    def _standing(self) -> Iterator[tuple[int, int, Difference]]:
        """Yield the blocks that were there before the step, which have a size and no order."""
        facts: list[list[tuple[Any, ...]]] = []
        for side, ends in zip(self.sides, self._ends, strict=True):
            categories = [name.category for name in side.names]
            facts.append(list(zip(side.blocks.size_bytes.tolist(), ends.tolist(), categories,
                                  strict=True)))  # fmt: skip
        left = list(range(self.num_old[0])), list(range(self.num_old[1]))
        # of several blocks of one size, those that live as long and are of one category first
        for width in (3, 2, 1):
            keys = [[fact[:width] for fact in side] for side in facts]
            found, left = paired((keys[0], keys[1]), left)
            for one, other in found:
                yield one, other, self._freed(one, other)
        yield from _alone(*left)

    def _freed(self, measured: int, predicted: int) -> Difference:
        ends = self._ends[0][measured], self._ends[1][predicted]
        if ends[0] == ends[1]:
            return Difference.NONE
        return Difference.FREED_LATER if ends[0] > ends[1] else Difference.FREED_EARLIER

    def _texts(self, one: int, other: int, difference: Difference) -> Texts:
        """Return what a row says of a block: what is predicted, or else what the snapshot shows."""
        side, block = (0, one) if other == NOBODY else (1, other)
        name = self.sides[side].names[block]
        order = block - self.num_old[side]
        if order < 0:
            module = name.module if difference else ""
            return BEFORE, "", module, name.category, name.place, difference
        phase = _phase_name(int(self._phases[side][order]))
        place = name.place or (self._beside(order) if other == NOBODY else "")
        return phase, name.operator, name.module, name.category, place, difference

    def _beside(self, order: int) -> str:
        """Return the operator of the last common allocation before one of the snapshot."""
        same = self.pairs.same
        before = int(np.searchsorted(same[:, 0], order)) - 1
        if before < 0:
            return ""
        name = self.sides[1].names[same[before, 1] + self.num_old[1]]
        where = f" of {name.module}" if name.module else ""
        return f"an allocation beside {name.operator}{where}" if name.operator else ""

    def phase_after(self, side: int, num_born: int) -> str:
        """Return the phase of a side after so many allocations."""
        return _phase_name(int(self._phases[side][num_born - 1])) if num_born else BEFORE

    def phase_of_places(self) -> npt.NDArray[np.int8]:
        """Return the phase of each place, of the newest allocation of the prediction."""
        if not len(self._phases[1]):
            return np.zeros(self.num_born.shape[1], np.int8)
        found: npt.NDArray[np.int8] = self._phases[1][np.maximum(self.num_born[1] - 1, 0)]
        return found


def _alone(measured: list[int], predicted: list[int]) -> Iterator[tuple[int, int, Difference]]:
    """Yield blocks that one side alone has."""
    for one in measured:
        yield one, NOBODY, Difference.NOT_PREDICTED
    for other in predicted:
        yield NOBODY, other, Difference.NOT_MEASURED


def _phase_name(phase: int) -> str:
    return "" if phase == UNKNOWN_PHASE else str(PHASES[phase])


def _places(same: Ints, num_measured: int, num_predicted: int) -> Ints:
    """Return how many allocations of each side lie up to each place in the step, (2, places).

    Common allocations are one place. Between two of them, those that only one side has stand side
    by side.

    >>> _places(np.array([[1, 0], [2, 2]]), 3, 3).tolist()
    [[0, 1, 2, 2, 3], [0, 0, 1, 2, 3]]
    """
    counts: list[tuple[int, int]] = [(0, 0)]
    ends = [*same.tolist(), (num_measured, num_predicted)]
    for k, (i, j) in enumerate(ends):
        begin = counts[-1]
        for step in range(1, max(i - begin[0], j - begin[1]) + 1):
            counts.append((min(begin[0] + step, i), min(begin[1] + step, j)))
        if k < len(same):
            counts.append((i + 1, j + 1))
    return np.array(counts, np.int64).T
