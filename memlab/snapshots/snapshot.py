"""`Snapshot`: what a memory snapshot of PyTorch shows, in memlab's words.

Allocated bytes are what `torch.cuda.memory_allocated` counts, reserved bytes those of all segments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from memlab.arguments.tables import columns_table, facts_table
from memlab.arguments.units import format_bytes
from memlab.config import StepConfig
from memlab.snapshots.fragmentation import Fragmentation
from memlab.snapshots.growth import Leak
from memlab.snapshots.holders import StackHolding
from memlab.snapshots.phases import COLUMNS, UNKNOWN
from memlab.snapshots.recent import RecentBlocks
from memlab.trace import bytes_at_peak
from memlab.workload import Workload

if TYPE_CHECKING:
    import torch

    from memlab.snapshots.comparison import SnapshotComparison

MOST_ROWS = 8  # of a table, in print


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SnapshotTimeline:
    """Live bytes over the trace of a snapshot, one row after each event.

    Attributes:
        bytes_by_category: int64, (instants, len(categories)); the row sum is what is allocated.
        events: int64, (instants,), how many events lie before each row.
        phase: int8, (instants,), the value of a `RunPhase`.
        reserved_bytes: int64, (instants,); None if the file does not list segments.
        step_ends: int64, (steps,), after how many events each step ends.
        num_events: of the trace.
    """

    bytes_by_category: npt.NDArray[np.int64]
    events: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int8]
    reserved_bytes: npt.NDArray[np.int64] | None
    step_ends: npt.NDArray[np.int64]
    num_events: int

    def __len__(self) -> int:
        return len(self.events)

    @property
    def categories(self) -> tuple[str, ...]:
        """The names of the columns: memlab's categories and "unknown"."""
        return COLUMNS

    @property
    def total_bytes(self) -> npt.NDArray[np.int64]:
        """Allocated bytes at each instant, (instants,)."""
        total: npt.NDArray[np.int64] = self.bytes_by_category.sum(axis=1)
        return total

    @property
    def peak_index(self) -> int:
        """The first instant at which most bytes are allocated."""
        return int(self.total_bytes.argmax())

    @property
    def peak_by_category(self) -> dict[str, int]:
        """Bytes at the peak for every category; they sum to the peak."""
        return bytes_at_peak(self.bytes_by_category, COLUMNS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot:
    """What a memory snapshot of PyTorch shows of one device.

    Attributes:
        path: of the file.
        device: index of the card.
        other_devices: those that the file also holds; pass `device=` to see one of them.
        num_events: events of the trace; 0 if no history was recorded.
        num_steps: steps that were recognised; 0 if none.
        steps_by: what marks the end of a step, such as "updates of the optimizer".
        peak_allocated_bytes: most bytes in live blocks over the trace, or at the end without one.
        peak_reserved_bytes: most bytes of all segments; None if the file lists no segments.
        end_allocated_bytes: bytes in live blocks when the file was written.
        peak_by_category: bytes of each category at the peak; they sum to it. "unknown" is what
            no rule decides.
        peak_holdings: what holds the peak by category and stack, the largest first; the bytes sum
            to the peak.
        timeline: live bytes by category over the trace.
        leaks: stacks whose memory grows from step to step, the largest growth first.
        out_of_memory: the state of the allocator at each out-of-memory, in order.
        fragmentation: the same when the file was written; None if it lists no segments.
        settings: of the allocator, as the file says.
        notes: sentences that a reader of the numbers must know.
        recent: the blocks of the newest events, which `compare` reads.
    """

    path: str
    device: int
    other_devices: tuple[int, ...] = ()
    num_events: int
    num_steps: int
    steps_by: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    end_allocated_bytes: int
    peak_by_category: Mapping[str, int]
    peak_holdings: tuple[StackHolding, ...]
    timeline: SnapshotTimeline
    leaks: tuple[Leak, ...]
    out_of_memory: tuple[Fragmentation, ...]
    fragmentation: Fragmentation | None
    recent: RecentBlocks
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def compare(
        self,
        workload: Workload,
        config: StepConfig,
        device: "str | torch.device",
        *,
        seed: int = 0,
        timeout_seconds: float = 120,
    ) -> "SnapshotComparison":
        """Compare the last whole step with its prediction, operator by operator.

        Args:
            workload: what was trained.
            config: how it was trained.
            device: the card that it was trained on, as `memlab.predict` takes it; a snapshot does
                not say which it was.
            seed: of the prediction.
            timeout_seconds: after which the prediction is given up.

        Raises:
            MemlabError: the snapshot holds no whole step, the step cannot be predicted, the sizes
                have nothing in common, or an argument is not allowed. The message says what to do.
        """
        from memlab.snapshots.comparing import compare  # late: a prediction needs the worker

        return compare(self, workload, config, device, seed=seed, timeout_seconds=timeout_seconds)

    @property
    def told_fraction(self) -> float:
        """The share of the peak whose category is known."""
        unknown = self.peak_by_category[UNKNOWN]
        return 1 - unknown / self.peak_allocated_bytes if self.peak_allocated_bytes else 1.0

    def __str__(self) -> str:
        """Return a page of plain text: the facts, who holds the peak, what grows."""
        lines = [f"{name}: {text}" for name, text in self._facts().items() if text]
        held = [f"  {'  '.join(cells)}" for cells in self._held()]
        grown = [f"  {'  '.join(cells)}" for cells in self._grown()]
        lines += ["", "who holds the peak", *held] if held else []
        lines += ["", "what grows from step to step", *grown] if grown else []
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return small tables for notebooks: the facts, who holds the peak, what grows."""
        from html import escape  # not before a table is shown

        held = columns_table(("bytes", "blocks", "category", "allocated by"), self._held())
        grown = columns_table(("growth", "each step", "what grows, allocated by"), self._grown())
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        title = f"snapshot {Path(self.path).name}, device {self.device}"
        return f"{facts_table(title, self._facts())}{held}{grown}{notes}"

    def _facts(self) -> dict[str, str]:
        shares = [f"{name.replace('_', ' ')} {format_bytes(size)}"
                  for name, size in sorted(self.peak_by_category.items(), key=lambda item: -item[1])
                  if size]  # fmt: skip
        reserved = self.peak_reserved_bytes
        last = self.out_of_memory[-1] if self.out_of_memory else None
        return {
            "file": self.path,
            "trace": f"{self.num_events:,} events, " + (
                f"{self.num_steps} steps ({self.steps_by})" if self.num_steps else "steps unknown"),
            "peak": f"{format_bytes(self.peak_allocated_bytes)} allocated"
            + (f", {format_bytes(reserved)} reserved" if reserved is not None else ""),
            "at the peak": ", ".join(shares),
            "at the end": "" if self.fragmentation is None else str(self.fragmentation),
            "out of memory": "" if last is None else
            (f"{len(self.out_of_memory)} times, the last: " if len(self.out_of_memory) > 1 else "")
            + str(last),
        }  # fmt: skip

    def _held(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (format_bytes(h.nbytes), str(h.num_blocks), h.category.replace("_", " "), h.place)
            for h in self.peak_holdings[:MOST_ROWS]
        ]
        rest = self.peak_holdings[MOST_ROWS:]
        if rest:
            blocks = sum(h.num_blocks for h in rest)
            size = format_bytes(sum(h.nbytes for h in rest))
            rows.append((size, str(blocks), "", f"{len(rest)} smaller ones"))
        return rows

    def _grown(self) -> list[tuple[str, ...]]:
        return [
            (format_bytes(leak.growth_bytes), format_bytes(leak.bytes_per_step), leak.place)
            for leak in self.leaks[:MOST_ROWS]
        ]
