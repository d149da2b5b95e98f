"""`Snapshot`: what a memory snapshot of PyTorch shows, in memlab's words.

Allocated bytes are what `torch.cuda.memory_allocated` counts, reserved bytes those of all segments.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from memlab._util.checks import checked
from memlab._util.tables import columns_table, facts_table
from memlab._util.units import format_bytes, shown
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.integrations.snapshot_blocks import (
    COLUMNS,
    GROWS,
    LEAST_GROWTHS,
    SHRINKS,
    SKIPPED_STEPS,
    UNKNOWN,
    Leak,
    Phases,
    RecentBlocks,
    RunPhase,
    StackHolding,
    block_lives,
    categorize,
    holders,
    leaks,
    live_at,
    live_bytes,
    phases,
    recent_blocks,
    reserved_bytes,
)
from memlab.integrations.snapshot_file import (
    ALLOC,
    NOT_RECORDED,
    OOM,
    RECORD,
    SEGMENT_UNMAP,
    CardRecord,
    Segment,
    Table,
    read_file,
)
from memlab.memory.replay import BLOCK_BYTES, SMALL_REQUEST
from memlab.trace import LiveBytes, highest_of_each
from memlab.workload import Workload

if TYPE_CHECKING:
    import torch

    from memlab.integrations.snapshot_comparison import SnapshotComparison

# What was free and could not be used, at the moment of an out-of-memory or at the end.
#
# The state at the end is the fixed point: segments are followed backwards to the moment, page by
# page where they are expandable. A hole is a range of a segment without a block in use. A request
# needs a hole that is large enough, in a segment of its stream and of its pool; memory that lies
# in smaller holes is lost to fragmentation.
#
# Left out: private pools (CUDA graphs), whose holes count as any other; and a block that was
# freed before the end may have been up to 1 MiB larger than its request, so holes may be given
# that much too large.

LARGE = "large"
MOST_MOMENTS = 100  # out-of-memory errors that are looked at; a loop that retries has thousands


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentUse:
    """One segment at a moment.

    Attributes:
        nbytes: that it takes of the card.
        kind: "small" for requests of at most 1 MiB, "large" for others.
        stream: that its blocks serve.
        used: (offset, bytes) of what is in use, ascending; neighbours are joined.
    """

    nbytes: int
    kind: str
    stream: int
    used: tuple[tuple[int, int], ...]

    @property
    def holes(self) -> tuple[int, ...]:
        """Bytes of each range that is not in use."""
        found, at = [], 0
        for offset, size in (*self.used, (self.nbytes, 0)):
            if offset > at:
                found.append(offset - at)
            at = max(at, offset + size)
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragmentation:
    """What the caching allocator held and could use at a moment; names as in `Moment`.

    Attributes:
        allocated_bytes: in use by tensors.
        reserved_bytes: of all segments.
        releasable_bytes: of segments without a block in use, which `empty_cache()` releases.
        non_releasable_bytes: free in segments that also have a block in use.
        largest_hole_bytes: the largest free range.
        num_holes: number of free ranges.
        segments: every segment, the largest first.
        requested_bytes: that failed; None if this is no out-of-memory.
        usable_free_bytes: free in segments of the request's stream and pool; None likewise.
        usable_hole_bytes: the largest hole among them; None likewise.
        device_free_bytes: that the card still had; None likewise, or if the file does not say.
    """

    allocated_bytes: int
    reserved_bytes: int
    releasable_bytes: int
    non_releasable_bytes: int
    largest_hole_bytes: int
    num_holes: int
    segments: tuple[SegmentUse, ...]
    requested_bytes: int | None = None
    usable_free_bytes: int | None = None
    usable_hole_bytes: int | None = None
    device_free_bytes: int | None = None

    @property
    def free_bytes(self) -> int:
        """Reserved bytes that are not in use."""
        return self.releasable_bytes + self.non_releasable_bytes

    @property
    def is_cause(self) -> bool:
        """Whether fragmentation is why the request failed: in one piece there was enough free."""
        if self.requested_bytes is None or self.card_had_room:
            return False
        return self.requested_bytes <= (self.usable_free_bytes or 0) + (self.device_free_bytes or 0)

    @property
    def card_had_room(self) -> bool:
        """Whether the card had enough free, so that a limit on the process made it fail."""
        return (self.device_free_bytes or 0) >= (self.requested_bytes or 0) > 0

    def __str__(self) -> str:
        """Return one or two sentences: what was free, and whether fragmentation is the cause."""
        held = (
            f"{format_bytes(self.allocated_bytes)} allocated of {format_bytes(self.reserved_bytes)}"
            f" reserved; {format_bytes(self.free_bytes)} free in {self.num_holes} holes, the "
            f"largest {format_bytes(self.largest_hole_bytes)}"
        )
        if self.requested_bytes is None:
            return f"{held}."
        asked = f"{format_bytes(self.requested_bytes)} requested: {held}"
        if self.device_free_bytes is not None:
            asked += f"; {format_bytes(self.device_free_bytes)} free on the card"
        if self.card_had_room:
            return f"{asked}. The card had room: a limit on this process made the request fail."
        if self.is_cause:
            return (
                f"{asked}. Fragmentation is the cause: in one piece the free memory would have "
                "served it. PYTORCH_ALLOC_CONF=expandable_segments:True lets segments grow instead."
            )
        return f"{asked}. Fragmentation is not the cause: even in one piece it is too little."


def out_of_memory_moments(record: CardRecord, lives: Table) -> tuple[Fragmentation, ...]:
    """Return the state at each out-of-memory of the trace in order, at most the last 100."""
    if record.segments is None:
        return ()
    found, held, later = [], list(record.segments), len(record.events)
    moments = np.flatnonzero(record.events.action == OOM)[-MOST_MOMENTS:]
    for moment in reversed(moments.tolist()):  # backwards, so that each event is undone once
        held = _undone(held, record, moment, later)
        later = moment
        event = record.events[moment]
        size, free = int(event.size_bytes), int(event.address)
        pool = int(event.stream), "small" if size <= SMALL_REQUEST * BLOCK_BYTES else LARGE
        state = _fragmentation(held, lives, moment)
        holes = [hole for segment in state.segments if (segment.stream, segment.kind) == pool
                 for hole in segment.holes]  # fmt: skip
        found.append(
            replace(
                state,
                requested_bytes=size,
                usable_free_bytes=sum(holes),
                usable_hole_bytes=max(holes, default=0),
                device_free_bytes=free if free >= 0 else None,
            )
        )
    return tuple(reversed(found))


def _fragmentation(held: Iterable[Segment], lives: Table, instant: int) -> Fragmentation:
    """Return the state of these segments after so many events."""
    ordered = sorted(held)
    uses = [
        SegmentUse(nbytes=segment.size, kind=segment.kind, stream=segment.stream, used=used)
        for segment, used in zip(ordered, _used(ordered, lives, instant), strict=True)
    ]
    holes = [hole for use in uses for hole in use.holes]
    releasable = sum(use.nbytes for use in uses if not use.used)
    return Fragmentation(
        allocated_bytes=int(lives.size_bytes[live_at(lives, instant)].sum()),
        reserved_bytes=sum(use.nbytes for use in uses),
        releasable_bytes=releasable,
        non_releasable_bytes=sum(holes) - releasable,
        largest_hole_bytes=max(holes, default=0),
        num_holes=len(holes),
        segments=tuple(sorted(uses, key=lambda use: -use.nbytes)),
    )


def _used(
    ordered: Sequence[Segment], lives: Table, instant: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield what is in use of each segment: offset and bytes; neighbours are joined."""
    in_use = lives[(lives.birth < instant) & (lives.released >= instant)]
    in_use = in_use[np.argsort(in_use.address)]
    for segment in ordered:
        first, after = np.searchsorted(in_use.address, (segment.start, segment.end))
        used: list[tuple[int, int]] = []
        for address, size in in_use[["address", "size_bytes"]][first:after].tolist():
            offset = address - segment.start
            size = min(size, segment.size - offset)
            if used and sum(used[-1]) == offset:
                used[-1] = used[-1][0], used[-1][1] + size
            else:
                used.append((offset, size))
        yield tuple(used)


def _undone(held: list[Segment], record: CardRecord, begin: int, end: int) -> list[Segment]:
    """Return the segments as they were before the events from `begin` to before `end`."""
    action = record.events.action[begin:end]
    for index in (np.flatnonzero(np.isin(action, (*GROWS, *SHRINKS)))[::-1] + begin).tolist():
        code = int(record.events.action[index])
        start, size = int(record.events.address[index]), int(record.events.size_bytes[index])
        if code in GROWS:
            held = _without(held, start, size)
        else:
            made = Segment(start, size, int(record.events.stream[index]), _kind(held, start, size),
                           code == SEGMENT_UNMAP)  # fmt: skip
            held = _joined([*held, made]) if made.is_expandable else [*held, made]
    return held


def _kind(held: Sequence[Segment], start: int, size: int) -> str:
    """Return the pool of a segment that is gone: that of its neighbour, or by its size."""
    near = next((s.kind for s in held if s.end == start or s.start == start + size), None)
    small = 2 * SMALL_REQUEST * BLOCK_BYTES  # kSmallBuffer of c10/core/AllocatorConfig.h
    return near or ("small" if size == small else LARGE)


def _without(held: Iterable[Segment], start: int, size: int) -> list[Segment]:
    left = []
    for segment in held:
        if segment.end <= start or segment.start >= start + size:
            left.append(segment)
            continue
        if segment.start < start:
            left.append(segment._replace(size=start - segment.start))
        if segment.end > start + size:
            left.append(segment._replace(start=start + size, size=segment.end - start - size))
    return left


def _joined(held: Iterable[Segment]) -> list[Segment]:
    """Return the segments; pages of expandable ones that touch are joined."""
    joined: list[Segment] = []
    for segment in sorted(held):
        last = joined[-1] if joined else None
        if last and last.is_expandable and segment.is_expandable and last.end == segment.start \
                and last.stream == segment.stream:  # fmt: skip
            joined[-1] = last._replace(size=last.size + segment.size)
        else:
            joined.append(segment)
    return joined


# `Snapshot`, and the timeline that it holds.

MOST_ROWS = 8  # of a table, in print


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SnapshotTimeline(LiveBytes):
    """Live bytes over the trace of a snapshot, one row after each event.

    Attributes:
        bytes_by_category: int64, (instants, len(categories)); the row sum is what is allocated.
        events: int64, (instants,), how many events lie before each row.
        phase: int8, (instants,), the value of a `RunPhase`.
        reserved_bytes: int64, (instants,); None if the file does not list segments.
        step_ends: int64, (steps,), after how many events each step ends.
        num_events: of the trace.
        categories: the names of the columns: memlab's categories and "unknown".
    """

    categories: ClassVar[tuple[str, ...]] = COLUMNS

    bytes_by_category: npt.NDArray[np.int64]
    events: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int8]
    reserved_bytes: npt.NDArray[np.int64] | None
    step_ends: npt.NDArray[np.int64]
    num_events: int


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
# The file is read as plain data (`snapshot_file.py`); nothing in it is run.

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
    record = read_file(Path(path), device)
    lives, phased = block_lives(record), phases(record)
    categorize(lives, phased)
    total, reserved = live_bytes(lives, len(record.events)), reserved_bytes(record)
    peak = int(total.argmax())
    timeline = _timeline(lives, phased, total, reserved)
    return Snapshot(
        path=str(path),
        device=record.device,
        other_devices=record.other_devices,
        num_events=len(record.events),
        num_steps=len(phased.step_ends),
        steps_by=phased.steps_by,
        peak_allocated_bytes=int(total[peak]),
        peak_reserved_bytes=None if reserved is None else int(reserved.max()),
        end_allocated_bytes=int(total[-1]),
        peak_by_category=timeline.peak_by_category,
        peak_holdings=holders(lives[live_at(lives, peak)], record.stacks),
        timeline=timeline,
        leaks=leaks(lives, phased.step_ends, record.stacks),
        out_of_memory=out_of_memory_moments(record, lives),
        fragmentation=None
        if record.segments is None
        else _fragmentation(record.segments, lives, len(record.events)),
        recent=recent_blocks(record, lives, phased),
        settings=record.settings,
        notes=(*record.notes, *_notes(record, lives, phased, timeline)),
    )


def _timeline(
    lives: Table,
    phased: Phases,
    total: npt.NDArray[np.int64],
    reserved: npt.NDArray[np.int64] | None,
) -> SnapshotTimeline:
    """Return the timeline, a long one thinned to the first highest instant of equal runs."""
    num_events = len(total) - 1
    rows = highest_of_each(total, MOST_INSTANTS)
    by_category = np.zeros((len(rows), len(COLUMNS)), np.int64)
    for column in np.unique(lives.column).tolist():
        by_category[:, column] = live_bytes(lives[lives.column == column], num_events)[rows]
    # the state before the first event has its phase
    first = phased.of_event[:1] if num_events else np.array([RunPhase.NONE], np.int8)
    return SnapshotTimeline(
        bytes_by_category=by_category,
        events=rows,
        phase=np.append(first, phased.of_event)[rows],
        reserved_bytes=None if reserved is None else reserved[rows],
        step_ends=phased.step_ends,
        num_events=num_events,
    )


def _notes(
    record: CardRecord,
    lives: Table,
    phased: Phases,
    timeline: SnapshotTimeline,
) -> list[str]:
    notes = []
    events, before = record.events, lives[lives.birth < 0]
    num_before = int((before.death >= 0).sum())
    if not len(events):
        notes.append(f"No history was recorded: this is the state at the end alone. Call {RECORD} "
                     "before the training.")  # fmt: skip
    elif num_before:
        size = format_bytes(int(before.size_bytes.sum()))
        notes.append(f"The trace begins late: {num_before:,} blocks ({size}) were there "
                     "before it, as frees and the state at the end show.")  # fmt: skip
    listed = record.blocks.address[record.blocks.is_allocated]
    live = lives.address[lives.death == len(events)]
    num_contradicting = int((~np.isin(live, listed)).sum())
    if num_contradicting and record.segments is not None:
        notes.append(f"{num_contradicting:,} blocks are live by the trace and not in the "
                     "state at the end; they count as live.")  # fmt: skip
    bare = int(((events.action == ALLOC) & (events.stack == NOT_RECORDED)).sum())
    if bare:
        notes.append(f"{bare:,} allocations have no stack, so their category is unknown; record "
                     "with context='all'.")  # fmt: skip
    if phased.num_inferred:
        notes.append(f"{phased.num_inferred:,} allocations have an empty stack, as those on the "
                     "threads of autograd have; they are taken for backward.")  # fmt: skip
    if timeline.bytes_by_category[:, COLUMNS.index(UNKNOWN)].any():
        notes.append("Categories follow from the files and functions in stacks and from lifetimes; "
                     "what no rule names is unknown. Buffers count as parameters.")  # fmt: skip
    if len(events) and 0 < len(phased.step_ends) <= SKIPPED_STEPS + LEAST_GROWTHS:
        notes.append("Too few steps to recognise a leak: it takes "
                     f"{SKIPPED_STEPS + LEAST_GROWTHS + 1}, and the trace has "
                     f"{len(phased.step_ends)}.")  # fmt: skip
    if len(timeline) < len(events) + 1:
        notes.append(f"The timeline is thinned to {len(timeline):,} of {len(events) + 1:,} "
                     "instants, the highest of each run; peaks are exact.")  # fmt: skip
    if record.other_devices:
        others = ", ".join(map(str, record.other_devices))
        notes.append(f"The file also holds device {others}; pass device= to "
                     "see another.")  # fmt: skip
    return notes
