"""`SnapshotComparison`: a step as a snapshot shows it beside the same step as predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from memlab.arguments.tables import columns_table, facts_table
from memlab.arguments.units import format_bytes
from memlab.config import StepConfig

Ints = npt.NDArray[np.int64]

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SnapshotComparison:
    """What a step of a snapshot held, beside what was predicted.

    Both sides count what was requested, rounded up to 512 B. What the two curves and the columns
    "at peak" compare is the same place in the step.

    Attributes:
        summary: the answer, in one or two sentences.
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

    summary: str
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
            [replace(row, module="", category="", difference=Difference.NONE) for row in self.rows]
        )

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


def merged(rows: Sequence[ComparedBlocks]) -> tuple[ComparedBlocks, ...]:
    """Return rows with one row for each set of equal texts, the largest differences first."""
    sums: dict[tuple[str, ...], ComparedBlocks] = {}
    for row in rows:
        key = (row.phase, row.operator, row.module, row.category, row.place, row.difference)
        before = sums.get(key)
        if before is not None:
            row = replace(row, **{name: getattr(row, name) + getattr(before, name)
                                  for name in _COUNTED})  # fmt: skip
        sums[key] = row
    return tuple(
        sorted(
            sums.values(),
            key=lambda row: (
                -abs(row.more_at_peak_bytes),
                not row.difference,
                -max(row.measured_bytes, row.predicted_bytes),
            ),
        )
    )


_COUNTED = ("num_measured", "num_predicted", "measured_bytes", "predicted_bytes",
            "measured_at_peak_bytes", "predicted_at_peak_bytes")  # fmt: skip


def signed(nbytes: int) -> str:
    """Return bytes with their sign, such as "+12.0 MiB"."""
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}" if nbytes else "0"
