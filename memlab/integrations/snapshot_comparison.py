"""Compare a step of a snapshot with the same step as predicted, allocation by allocation.

The step is predicted for the card that a person names, for a snapshot does not say what it was
recorded on. Then the allocations of both sides are aligned (`snapshot_alignment.py`), and what is
live is compared at the higher of the two peaks, at the same place in the step.

Left out: reserved bytes, which depend on everything that the process did before.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memlab._util.checks import checked, seconds
from memlab._util.tables import columns_table, facts_table
from memlab._util.units import format_bytes, shown
from memlab.api import predict_with_size_model
from memlab.config import StepConfig
from memlab.devices.cards import resolve
from memlab.errors import DeviceError, MemlabError
from memlab.integrations.snapshot import Snapshot
from memlab.integrations.snapshot_alignment import (
    REMEDY,
    SIZES_ALONE,
    UNKNOWN_PHASE,
    StepBlocks,
    align,
    filled,
    measured_step,
    paired,
    predicted_step,
)
from memlab.integrations.snapshot_blocks import Ints
from memlab.trace import PHASES, Trace
from memlab.workload import Workload

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
    found = predict_with_size_model(
        workload, config, device, seed=seed, timeout_seconds=timeout_seconds
    )
    if found.size_model is None:
        raise MemlabError(
            "the step cannot be predicted, so there is nothing to compare the snapshot with: "
            f"{found.result.message}"
        )
    # what kernels take only where there is room is a guess: as "not predicted" it is seen better
    trace = found.size_model.program.trace(found.size_model.least, config.micro_batch_sizes)
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
