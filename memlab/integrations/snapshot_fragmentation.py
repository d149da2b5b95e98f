"""What was free and could not be used, at the moment of an out-of-memory or at the end.

The state at the end is the fixed point: segments are followed backwards to the moment, page by page
where they are expandable. A hole is a range of a segment without a block in use. A request needs a
hole that is large enough, in a segment of its stream and of its pool; memory that lies in smaller
holes is lost to fragmentation.

Left out: private pools (CUDA graphs), whose holes count as any other; and a block that was freed
before the end may have been up to 1 MiB larger than its request, so holes may be given that much
too large.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memlab._util.units import format_bytes
from memlab.integrations.snapshot_blocks import BlockLives
from memlab.integrations.snapshot_file import (
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    CardRecord,
    Segment,
)
from memlab.memory.replay import BLOCK_BYTES, SMALL_REQUEST

LARGE = "large"
GROWS = (SEGMENT_ALLOC, SEGMENT_MAP)
SHRINKS = (SEGMENT_FREE, SEGMENT_UNMAP)
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
    def used_bytes(self) -> int:
        """Bytes in use."""
        return sum(size for _, size in self.used)

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


def out_of_memory_moments(record: CardRecord, lives: BlockLives) -> tuple[Fragmentation, ...]:
    """Return the state at each out-of-memory of the trace in order, at most the last 100."""
    at = np.flatnonzero(record.events.action == OOM)[-MOST_MOMENTS:]
    if record.segments is None or not len(at):
        return ()
    found = []
    held = list(record.segments)
    later = len(record.events)
    for moment in reversed(at.tolist()):  # backwards, so that each event is undone once
        held = _undone(held, record, moment, later)
        later = moment
        stream, free = int(record.events.stream[moment]), int(record.events.address[moment])
        state = _state(held, lives, moment)
        size = int(record.events.size[moment])
        kind = "small" if size <= SMALL_REQUEST * BLOCK_BYTES else LARGE
        holes = [hole for segment in state if (segment.stream, segment.kind) == (stream, kind)
                 for hole in segment.holes]  # fmt: skip
        found.append(
            replace(
                _summary(state, _allocated(lives, moment)),
                requested_bytes=size,
                usable_free_bytes=sum(holes),
                usable_hole_bytes=max(holes, default=0),
                device_free_bytes=free if free >= 0 else None,
            )
        )
    return tuple(reversed(found))


def at_end(record: CardRecord, lives: BlockLives) -> Fragmentation | None:
    """Return the state when the file was written; None if the file does not say."""
    if record.segments is None:
        return None
    state = _state(record.segments, lives, len(record.events))
    return _summary(state, _allocated(lives, len(record.events)))


def _allocated(lives: BlockLives, instant: int) -> int:
    return int(lives.size[lives.live_at(instant)].sum())


def _summary(state: Sequence[SegmentUse], allocated: int) -> Fragmentation:
    holes = [hole for segment in state for hole in segment.holes]
    releasable = sum(segment.nbytes for segment in state if not segment.used)
    return Fragmentation(
        allocated_bytes=allocated,
        reserved_bytes=sum(segment.nbytes for segment in state),
        releasable_bytes=releasable,
        non_releasable_bytes=sum(holes) - releasable,
        largest_hole_bytes=max(holes, default=0),
        num_holes=len(holes),
        segments=tuple(sorted(state, key=lambda segment: -segment.nbytes)),
    )


def _state(held: Iterable[Segment], lives: BlockLives, instant: int) -> list[SegmentUse]:
    """Return the segments with what is in use after so many events."""
    ordered = sorted(held)
    starts = [segment.start for segment in ordered]
    used: list[list[tuple[int, int]]] = [[] for _ in ordered]
    in_use = np.flatnonzero((lives.birth < instant) & (lives.released >= instant))
    in_use = in_use[np.argsort(lives.address[in_use])]
    sizes = lives.size[in_use].tolist()
    for address, size in zip(lives.address[in_use].tolist(), sizes, strict=True):
        index = bisect_right(starts, address) - 1
        if index < 0 or address >= ordered[index].end:
            continue  # of a segment that the file does not list
        offset = address - ordered[index].start
        size = min(size, ordered[index].size - offset)
        mine = used[index]
        if mine and sum(mine[-1]) == offset:
            mine[-1] = mine[-1][0], mine[-1][1] + size
        else:
            mine.append((offset, size))
    return [
        SegmentUse(nbytes=segment.size, kind=segment.kind, stream=segment.stream, used=tuple(mine))
        for segment, mine in zip(ordered, used, strict=True)
    ]


def _undone(held: list[Segment], record: CardRecord, begin: int, end: int) -> list[Segment]:
    """Return the segments as they were before the events from `begin` to before `end`."""
    action = record.events.action[begin:end]
    for index in (np.flatnonzero(np.isin(action, (*GROWS, *SHRINKS)))[::-1] + begin).tolist():
        code = int(record.events.action[index])
        start, size = int(record.events.address[index]), int(record.events.size[index])
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
