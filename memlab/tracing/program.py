"""`Program`: the trace of a recorded run for any batch size and accumulation.

The idea. A step runs the same operators for every batch size, and the size of each block of memory
is affine in the number of samples. An activation that takes 3 MiB for 2 samples and 6 MiB for 4
samples takes 9 MiB for 6; a weight always has the same size. So two recorded sizes give every other
one. Two steps are recorded with different micro-batch sizes, and each block of one step is paired
with a block of the other:

    step 0, micro-batches of 4      step 1, micro-batches of 2      wanted: micro-batches of 6
    x   6 MiB                       x   3 MiB                       x   3 + (6 - 2) * 3 / 2 = 9 MiB
    w   1 MiB                       w   1 MiB                       w   1 MiB

At most three micro-batches are recorded. The first one allocates the gradients and the last one is
followed by the update, so these two are different. All others do the same as the second one:

    recorded        0   1   2   update
    five wanted     0   1   1'  1"  2   update      1' and 1" are copies of 1

A `Part` says for each interval of the wanted run which recorded interval it repeats. The blocks of
a copy get new numbers. If the recorded micro-batch frees a block of the one before it, then a copy
frees the matching block of the copy before it (`successors`).

If the two steps do not run the same operators (`differs` says where), sizes are known for the
recorded size only. Left out: runs that mix single samples with larger micro-batches, whose
operators differ.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from memlab._util.collectives import Communication, communication_of
from memlab.devices.operators import call_of_collective
from memlab.trace import Interval, Phase, Trace
from memlab.tracing.assembly import Layout, layout_of
from memlab.tracing.recording import OpTrace, Ran

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

MOST_RECORDED = 3  # micro-batches


@dataclass(frozen=True, slots=True)
class Part:
    """An interval of a run: the recorded interval that it repeats, and the number of the copy."""

    recorded: int
    copy: int
    interval: Interval


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A recorded run of two steps.

    Attributes:
        recording: of the run.
        ran: its operators.
        layout: its rows.
        partners: for each interval of step 1 the interval of step 0 that does the same.
        sizes: micro-batch sizes of step 1.
        other_size: size of the first micro-batch of step 0.
        differs: where the two steps differ, as a clause; empty if they run the same operators.
        ranks: that do this, of the ranks of a sharded step.
        other_ranks: the programs of ranks that hold something else, as far as they were recorded.
    """

    recording: OpTrace
    ran: Ran
    layout: Layout
    partners: dict[int, int]
    sizes: tuple[int, ...]
    other_size: int
    differs: str
    ranks: tuple[int, ...] = ()
    other_ranks: tuple[Program, ...] = ()

    @property
    def size(self) -> int:
        """Samples in the first micro-batch of step 1."""
        return self.sizes[0]

    @property
    def num_recorded(self) -> int:
        """Micro-batches in each step."""
        return len(self.sizes)

    @property
    def repeats(self) -> bool:
        """Whether the second and the third micro-batch of each step do the same."""
        names, births = _by_interval(self.recording), self._births()
        intervals = self.recording.intervals
        return self.num_recorded < MOST_RECORDED or all(
            names[at] == names[other] and len(births[at]) == len(births[other])
            for at, interval in enumerate(intervals)
            if _is_middle(interval)
            for other in [intervals.index(replace(interval, micro_batch=2))]
        )

    def steps_of(self, micro_batch_sizes: Sequence[int]) -> set[int]:
        """Return the recorded steps that run operators of these micro-batches."""
        recorded = {interval.step for interval in self.recording.intervals if interval.step >= 0}
        return recorded if self.other_size in micro_batch_sizes else {1}

    def without_objects(self) -> Program:
        """Return the program for sending, without what only kernels and plans need."""
        return replace(self, recording=self.recording.without_objects(), other_ranks=())

    def parts(self, num_micro_batches: int) -> list[Part]:
        """Return the intervals of a run with this many micro-batches, in order."""
        intervals, parts = self.recording.intervals, []
        extra, at = num_micro_batches - self.num_recorded, 0
        while at < len(intervals):
            end = at + 1
            if extra and _is_middle(intervals[at]):
                while _is_middle(intervals[end]):
                    end += 1

            for copy in range(extra + 1 if end > at + 1 else 1):
                for recorded in range(at, end):
                    interval = intervals[recorded]
                    shift = copy if _is_middle(interval) else extra * (interval.micro_batch == 2)
                    moved = replace(interval, micro_batch=interval.micro_batch + shift)
                    parts.append(Part(recorded, copy, moved))

            at = end

        return parts

    def sizes_over_batch(
        self, own: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the bytes of every block at `size` and at `other_size`.

        A block was recorded at one of the two sizes; its partner gives the other one.
        """
        at_size, at_other = own.copy(), own.copy()
        if self.differs:
            return at_size, at_other

        births = self._births()
        for one, zero in self.partners.items():
            in_one, in_zero = births[one], births[zero]
            at_size[in_zero] = own[in_one]
            at_other[in_one] = own[in_zero]

        return at_size, at_other

    def trace(self, own: npt.NDArray[np.int64], micro_batch_sizes: Sequence[int]) -> Trace:
        """Return the trace of a run with these micro-batches.

        Args:
            own: int64, (blocks,), bytes of every block as recorded.
            micro_batch_sizes: samples in each.
        """
        parts = self.parts(len(micro_batch_sizes))
        order, part_of = self.rows_of(parts)
        block = self._blocks(order, np.array([p.copy for p in parts])[part_of])
        is_birth = self.layout.is_birth[order]
        sizes = np.zeros(int(block.max()) + 1, np.int64)
        born = self.bytes_of(own, order, part_of, parts, micro_batch_sizes)[is_birth]
        sizes[block[is_birth]] = born
        # a free has the size of its block's birth; blocks of 0 bytes are not requested at all
        nbytes = np.where(is_birth, sizes[block], -sizes[block])
        real = (nbytes != 0) & (block >= 0)

        return Trace(
            address=block[real],
            nbytes=nbytes[real],
            interval=part_of[real].astype(np.int32),
            operator=self.operator_counts(order, part_of, parts)[real],
            in_operator=is_birth[real],
            module=self.layout.module[order][real],
            intervals=tuple(part.interval for part in parts),
            operators=tuple(self.names_of(parts)),
            modules=tuple(self.recording.modules),
            parameters=dict(self.recording.parameters),
            states=dict(self.recording.states),
            logits=self.recording.logits,
            leftover_bytes=0,
            stream=None if self.layout.stream is None else self.layout.stream[order][real],
        )

    def rows_of(self, parts: Sequence[Part]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the rows of these intervals in order, and the index of each row's part."""
        slices = _slices(self.layout.interval, len(self.recording.intervals))
        rows = [np.arange(*slices[part.recorded]) for part in parts]
        return np.concatenate(rows), np.repeat(np.arange(len(parts)), [len(r) for r in rows])

    def bytes_of(
        self,
        own: npt.NDArray[np.int64],
        order: npt.NDArray[np.int64],
        part_of: npt.NDArray[np.int64],
        parts: Sequence[Part],
        micro_batch_sizes: Sequence[int],
    ) -> npt.NDArray[np.int64]:
        """Return for each row the bytes of its block, assuming that it is allocated there."""
        at_size, at_other = self.sizes_over_batch(own)
        if self.size == self.other_size:
            return at_size[self.layout.block[order]]

        mean = sum(micro_batch_sizes) / len(micro_batch_sizes)
        samples = np.array(
            [
                mean if part.interval.step < 0 else micro_batch_sizes[part.interval.micro_batch]
                for part in parts
            ]
        )
        # a whole batch has the samples of all micro-batches, of which only some were recorded
        whole = len(micro_batch_sizes) / self.num_recorded
        samples = np.where([p.interval.step < 0 for p in parts], samples * whole, samples)
        share = (samples - self.size) / (self.other_size - self.size)
        block = self.layout.block[order]
        slope = (at_other - at_size)[block]
        sizes = np.rint(at_size[block] + slope * share[part_of]).astype(np.int64)
        return np.maximum(sizes, 0)  # workspace is not affine: drawn out, it may cross zero

    def _blocks(
        self, order: npt.NDArray[np.int64], copy: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the block of each row, with new numbers for the blocks of each copy.

        The number is -1 if a copy would free a block that the first copy has already freed.
        """
        block = self.layout.block[order]
        extra = int(copy.max(initial=0))
        if not extra:
            return block

        count = int(self.layout.block.max()) + 1
        is_middle = np.array([_is_middle(i) for i in self.recording.intervals])
        birth_interval = np.zeros(count, np.int64)
        births = self.layout.is_birth
        birth_interval[self.layout.block[births]] = self.layout.interval[births]
        born_in_middle = is_middle[birth_interval][block]
        in_middle = is_middle[self.layout.interval[order]]
        successor = self.successors(count)
        moved = np.where(born_in_middle, block + count * np.where(in_middle, copy, extra), block)

        # a copy that frees a block of the micro-batch before it means the copy before it
        foreign = in_middle & ~born_in_middle & ~self.layout.is_birth[order] & (copy > 0)
        earlier = successor[block]
        return np.where(foreign, np.where(earlier >= 0, earlier + count * (copy - 1), -1), moved)

    def successors(self, count: int) -> npt.NDArray[np.int64]:
        """Return for each block that the second micro-batch frees the one that the third frees."""
        successor = np.full(count, -1, np.int64)
        row_of = _slices(self.layout.interval, len(self.recording.intervals))
        for index, interval in enumerate(self.recording.intervals):
            if not _is_middle(interval):
                continue
            following = self.recording.intervals.index(replace(interval, micro_batch=2))
            rows, next_rows = slice(*row_of[index]), slice(*row_of[following])
            freed = ~self.layout.is_birth[rows]
            successor[self.layout.block[rows][freed]] = self.layout.block[next_rows][freed]

        return successor

    def names_of(self, parts: Sequence[Part]) -> list[str]:
        """Return the names of the operators of these intervals, in order."""
        names, slices = self.ran.names, self.operator_slices()
        return [name for part in parts for name in names[slice(*slices[part.recorded])]]

    def operator_counts(
        self, order: npt.NDArray[np.int64], part_of: npt.NDArray[np.int64], parts: Sequence[Part]
    ) -> npt.NDArray[np.int32]:
        """Return how many operators have run at each row."""
        starts, ends = np.array(self.operator_slices()).T
        recorded = np.array([part.recorded for part in parts])
        before = np.concatenate([[0], np.cumsum((ends - starts)[recorded])[:-1]])
        shift = (before - starts[recorded])[part_of]
        counts: npt.NDArray[np.int32] = (self.layout.operator[order] + shift).astype(np.int32)
        return counts

    def communication(self, micro_batch_sizes: Sequence[int]) -> tuple[Communication, ...]:
        """Return the collectives of the second step of a run with these micro-batches."""
        slices = self.operator_slices()
        calls = []
        for part in self.parts(len(micro_batch_sizes)):
            if part.interval.step != 1:
                continue
            for operator in self.recording.operators[slice(*slices[part.recorded])]:
                if operator.ranks and operator.signature is not None:
                    calls.append(call_of_collective(operator.signature, len(operator.ranks)))
        return communication_of(call for call in calls if call is not None)

    def operator_slices(self) -> list[tuple[int, int]]:
        """Return where each recorded interval's operators begin and end."""
        return _slices(self.ran.interval, len(self.recording.intervals))

    def _births(self) -> list[npt.NDArray[np.int64]]:
        """Return the blocks that each recorded interval allocates, in order."""
        rows = _slices(self.layout.interval, len(self.recording.intervals))
        block, is_birth = self.layout.block, self.layout.is_birth
        # memory that a library keeps from its first use on does not belong to a step
        is_kept = (block >= self.layout.num_blocks) & ((block - self.layout.num_blocks) % 2 == 0)
        counted = is_birth & ~is_kept
        return [block[start:end][counted[start:end]] for start, end in rows]


def program_of(recording: OpTrace, sizes: tuple[int, ...], other_size: int) -> Program:
    """Return the program of a run of two steps, recorded over these micro-batch sizes."""
    layout = layout_of(recording)
    partners = _partners(recording.intervals)
    program = Program(
        recording=recording,
        ran=recording.ran(),
        layout=layout,
        partners=partners,
        sizes=sizes,
        other_size=other_size,
        differs="",
    )

    return replace(program, differs=_difference(program))


def _difference(program: Program) -> str:
    """Return where two intervals that should be alike differ; empty if none does."""
    recording, layout = program.recording, program.layout
    if recording.is_ragged:
        return "the batch has another shape"

    names = _by_interval(recording)
    births = program._births()
    rows = _slices(layout.interval, len(recording.intervals))
    pairs = list(program.partners.items())

    if program.num_recorded == MOST_RECORDED:
        pairs += [
            (recording.intervals.index(replace(i, micro_batch=2)), at)
            for at, i in enumerate(recording.intervals)
            if _is_middle(i)
        ]

    for one, zero in pairs:
        same_rows = np.array_equal(
            layout.is_birth[slice(*rows[one])], layout.is_birth[slice(*rows[zero])]
        )
        is_data = recording.intervals[one].step < 0
        if names[one] != names[zero] or len(births[one]) != len(births[zero]):
            return _first_difference(names[one], names[zero], recording.intervals[one])
        if not same_rows and not is_data:
            return f"{recording.intervals[one].phase} frees in another order"

    return ""


def _first_difference(one: list[str], zero: list[str], interval: Interval) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, zero, strict=False)) if a != b), -1)
    if at < 0:
        return f"{interval.phase} runs {len(one)} operators instead of {len(zero)}"
    return f"{interval.phase} runs {one[at]} instead of {zero[at]}"


def _partners(intervals: Sequence[Interval]) -> dict[int, int]:
    """Return for each interval of step 1 the matching interval of step 0.

    The making of the second batch is matched with that of the first. An optimizer in backward
    divides a backward into several intervals, which are matched in order.
    """
    zero: dict[Interval, list[int]] = defaultdict(list)
    one: dict[Interval, list[int]] = defaultdict(list)
    for at, i in enumerate(intervals):
        if i.step in (0, 1) and i.phase is not Phase.OPTIMIZER:
            (one if i.step else zero)[replace(i, step=0)].append(at)

    partners = {
        mine: theirs
        for interval, places in one.items()
        for mine, theirs in zip(places, zero[interval], strict=True)
    }
    data = [at for at, i in enumerate(intervals) if i.step < 0 and i.phase is Phase.DATA]
    return partners | {data[1]: data[0]} if len(data) == 2 else partners


def _by_interval(recording: OpTrace) -> list[list[str]]:
    names: list[list[str]] = [[] for _ in recording.intervals]
    for operator in recording.operators:
        names[operator.interval].append(operator.name)
    return names


def _slices(interval: npt.NDArray[np.int32], count: int) -> list[tuple[int, int]]:
    """Return where each interval's rows begin and end."""
    bounds = np.searchsorted(interval, np.arange(count + 1)).tolist()
    return list(itertools.pairwise(bounds))


def _is_middle(interval: Interval) -> bool:
    is_update = interval.phase is Phase.OPTIMIZER
    return interval.step >= 0 and interval.micro_batch == 1 and not is_update
