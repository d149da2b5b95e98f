"""`Snapshot`: what a memory snapshot of PyTorch shows, in memlab's words.

Allocated bytes are what `torch.cuda.memory_allocated` counts, reserved bytes those of all segments.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memlab._util.checks import checked
from memlab._util.tables import columns_table, facts_table
from memlab._util.units import format_bytes, shown
from memlab.config import StepConfig
from memlab.errors import ConfigError, MemlabError
from memlab.integrations.snapshot_blocks import (
    COLUMNS,
    LEAST_GROWTHS,
    SKIPPED_STEPS,
    UNKNOWN,
    BlockLives,
    Leak,
    Phases,
    RecentBlocks,
    RunPhase,
    StackHolding,
    block_lives,
    columns_of,
    holders,
    leaks,
    phases,
    recent_blocks,
    reserved_bytes,
)
from memlab.integrations.snapshot_file import (
    ALLOC,
    NOT_RECORDED,
    RECORD,
    WRITE,
    CardRecord,
    SnapshotFile,
    read_file,
)
from memlab.integrations.snapshot_fragmentation import Fragmentation, at_end, out_of_memory_moments
from memlab.trace import bytes_at_peak
from memlab.workload import Workload

if TYPE_CHECKING:
    import torch

    from memlab.integrations.snapshot_comparison import SnapshotComparison

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
        from memlab.integrations.snapshot_comparison import compare

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


# `open_snapshot`: from a file to a `Snapshot`.
#
# The file is read as plain data (`reading.py`); nothing in it is run.

MOST_INSTANTS = 2**18  # of a timeline; more are thinned to the highest of equal runs


def _path(name: str, value: Any) -> str:
    """Return a path as a text, with "~" for the person's home."""
    try:
        return os.path.expanduser(str.__str__(os.fsdecode(value)))
    except Exception:  # a person's own class may raise anything
        raise ConfigError(
            f"{name}={shown(value)} is no path; pass the path of a file that "
            "torch.cuda.memory._dump_snapshot wrote"
        ) from None


@checked(path=_path)
def open_snapshot(path: str | os.PathLike[str], *, device: int | None = None) -> Snapshot:
    """Return what a memory snapshot shows: timeline, who holds the peak, fragmentation, leaks.

    Args:
        path: a file that `torch.cuda.memory._dump_snapshot` wrote, after
            `torch.cuda.memory._record_memory_history()`. It is read as plain data: a file that
            would call something is refused and nothing of it is run.
        device: index of the card to show; by default that with most events.

    Raises:
        MemlabError: there is no such file, it is no snapshot, it is empty, or it holds nothing of
            this device. The message names the file and a remedy.

    >>> import pickle, tempfile, memlab
    >>> frame = {"filename": "/torch/nn/functional.py", "line": 7, "name": "linear"}
    >>> event = {"action": "alloc", "addr": 4096, "size": 1000, "stream": 0, "frames": [frame]}
    >>> file = tempfile.NamedTemporaryFile(suffix=".pickle")
    >>> pickle.dump({"segments": [], "device_traces": [[event]]}, file, protocol=4)
    >>> file.flush()
    >>> snapshot = memlab.open_snapshot(file.name)
    >>> snapshot.peak_allocated_bytes, snapshot.peak_by_category["activations"]
    (1024, 1024)
    """
    content = read_file(Path(path))
    record = _chosen(content, path, device)
    lives, phased = block_lives(record), phases(record, content.stacks)
    columns = columns_of(lives, phased)
    total, reserved = lives.live_bytes(len(record.events)), reserved_bytes(record)
    peak = int(total.argmax())
    timeline = _timeline(record, lives, columns, phased, total, reserved)
    return Snapshot(
        path=str(path),
        device=record.device,
        other_devices=tuple(d.device for d in content.devices if d is not record),
        num_events=len(record.events),
        num_steps=len(phased.step_ends),
        steps_by=phased.steps_by,
        peak_allocated_bytes=int(total[peak]),
        peak_reserved_bytes=None if reserved is None else int(reserved.max()),
        end_allocated_bytes=int(total[-1]),
        peak_by_category=timeline.peak_by_category,
        peak_holdings=holders(lives, columns, content.stacks, lives.live_at(peak)),
        timeline=timeline,
        leaks=leaks(lives, phased.step_ends, content.stacks),
        out_of_memory=out_of_memory_moments(record, lives),
        fragmentation=at_end(record, lives),
        recent=recent_blocks(record, lives, phased, columns, content.stacks),
        settings=content.settings,
        notes=(*content.notes, *_notes(content, record, lives, phased, timeline)),
    )


def _chosen(content: SnapshotFile, path: str | os.PathLike[str], device: int | None) -> CardRecord:
    """Return what the file holds of a device, by default of that with most events.

    Raises:
        MemlabError: it holds nothing of it, or nothing at all.
    """
    if not content.devices:
        raise MemlabError(
            f"the snapshot {shown(str(path))} holds no event and no segment: nothing had been "
            f"recorded or allocated when it was written; {WRITE}"
        )
    if device is None:
        return max(content.devices, key=lambda each: (len(each.events), len(each.blocks.size)))
    found = next((each for each in content.devices if each.device == device), None)
    if found is None:
        has = ", ".join(str(each.device) for each in content.devices)
        raise ConfigError(
            f"device={device} is not in the snapshot {shown(str(path))}; it holds device {has}"
        )
    return found


def _timeline(
    record: CardRecord,
    lives: BlockLives,
    columns: npt.NDArray[np.int8],
    phased: Phases,
    total: npt.NDArray[np.int64],
    reserved: npt.NDArray[np.int64] | None,
) -> SnapshotTimeline:
    """Return the timeline, a long one thinned to the first highest instant of equal runs."""
    width = -(-len(total) // MOST_INSTANTS)
    padded = np.full(-(-len(total) // width) * width, -1)
    padded[: len(total)] = total
    rows = np.arange(0, len(padded), width) + padded.reshape(-1, width).argmax(axis=1)
    num_events = len(record.events)
    by_category = np.zeros((len(rows), len(COLUMNS)), np.int64)
    for column in np.unique(columns).tolist():
        chosen = np.flatnonzero(columns == column)
        by_category[:, column] = lives.live_bytes(num_events, chosen)[rows]
    none = np.int8(RunPhase.NONE)
    phase = np.r_[phased.of_event[:1] if num_events else none, phased.of_event][rows]
    return SnapshotTimeline(
        bytes_by_category=by_category,
        events=rows,
        phase=phase.astype(np.int8),
        reserved_bytes=None if reserved is None else reserved[rows],
        step_ends=phased.step_ends,
        num_events=num_events,
    )


def _notes(
    content: SnapshotFile,
    record: CardRecord,
    lives: BlockLives,
    phased: Phases,
    timeline: SnapshotTimeline,
) -> list[str]:
    notes = []
    events, before = record.events, lives.birth < 0
    if not len(events):
        notes.append(f"No history was recorded: this is the state at the end alone. Call {RECORD} "
                     "before the training.")  # fmt: skip
    elif lives.num_before:
        size = format_bytes(int(lives.size[before].sum()))
        notes.append(f"The trace begins late: {lives.num_before:,} blocks ({size}) were there "
                     "before it, as frees and the state at the end show.")  # fmt: skip
    if lives.num_contradicting:
        notes.append(f"{lives.num_contradicting:,} blocks are live by the trace and not in the "
                     "state at the end; they count as live.")  # fmt: skip
    bare = int(((events.action == ALLOC) & (events.stack == NOT_RECORDED)).sum())
    if bare:
        notes.append(f"{bare:,} allocations have no stack, so their category is unknown; record "
                     "with context='all'.")  # fmt: skip
    if phased.num_inferred:
        notes.append(f"{phased.num_inferred:,} allocations have an empty stack, as those on the "
                     "threads of autograd have; they are taken for backward.")  # fmt: skip
    if _says_unknown(timeline):
        notes.append("Categories follow from the files and functions in stacks and from lifetimes; "
                     "what no rule names is unknown. Buffers count as parameters.")  # fmt: skip
    if len(events) and 0 < len(phased.step_ends) <= SKIPPED_STEPS + LEAST_GROWTHS:
        notes.append("Too few steps to recognise a leak: it takes "
                     f"{SKIPPED_STEPS + LEAST_GROWTHS + 1}, and the trace has "
                     f"{len(phased.step_ends)}.")  # fmt: skip
    if len(timeline) < len(events) + 1:
        notes.append(f"The timeline is thinned to {len(timeline):,} of {len(events) + 1:,} "
                     "instants, the highest of each run; peaks are exact.")  # fmt: skip
    others = [each.device for each in content.devices if each is not record]
    if others:
        notes.append(f"The file also holds device {', '.join(map(str, others))}; pass device= to "
                     "see another.")  # fmt: skip
    return notes


def _says_unknown(timeline: SnapshotTimeline) -> bool:
    return bool(timeline.bytes_by_category[:, COLUMNS.index(UNKNOWN)].any())
