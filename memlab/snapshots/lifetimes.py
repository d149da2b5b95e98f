"""From events to blocks: when each was allocated and freed, and what was live in between.

The trace may begin late, for PyTorch keeps the last `max_entries` events alone. So the state at the
end is the fixed point, and blocks are reconstructed backwards from it: what is live at the end or
freed in the trace, and not allocated in it, was there before the trace began.

An event has the bytes that were requested. The allocator gives blocks of 512 B, and sometimes more,
so a block has the size that the file lists for it if it is live at the end, and else its request
rounded up to 512 B. An instant is the state after an event; instant 0 is before the first one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memlab.allocator.replay import round_block
from memlab.snapshots.columns import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    NOT_RECORDED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    CardRecord,
    Events,
)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockLives:
    """Every block of a device, as columns (blocks,).

    Attributes:
        birth: the event that allocated it; -1 if it was there before the trace began.
        death: the event that freed it; the number of events if none did; -1 if it was freed
            before the trace began and another stream was not done with it.
        released: the event from which on its memory could be used again; later than `death` if
            another stream was not done with it.
        address: of its first byte.
        size: bytes that it takes.
        stack: that allocated it; -1 if it was not recorded.
        num_before: blocks that were there before the trace began.
        num_contradicting: blocks that the trace leaves live and the state at the end does not have.
    """

    birth: Ints
    death: Ints
    released: Ints
    address: Ints
    size: Ints
    stack: Ints
    num_before: int
    num_contradicting: int

    def __len__(self) -> int:
        return len(self.birth)

    def live_at(self, instant: int) -> Ints:
        """Return the blocks that are live after so many events."""
        return np.flatnonzero((self.birth < instant) & (self.death >= instant))

    def live_bytes(self, num_events: int, chosen: Ints | None = None) -> Ints:
        """Return the bytes of the chosen blocks, by default of all, at each instant."""
        which = slice(None) if chosen is None else chosen
        change = np.zeros(num_events + 2, np.int64)
        np.add.at(change, self.birth[which] + 1, self.size[which])
        np.subtract.at(change, self.death[which] + 1, self.size[which])
        return np.cumsum(change[: num_events + 1])


def block_lives(record: CardRecord) -> BlockLives:
    """Return every block of a device with its first and last event."""
    events, final = record.events, record.blocks
    end = len(events)
    order = _by_address(events, np.array([ALLOC, FREE_REQUESTED, FREE_COMPLETED]))
    action, address = events.action[order], events.address[order]
    is_alloc = action == ALLOC
    same = np.r_[address[1:] == address[:-1], False] if len(order) else np.zeros(0, bool)
    first_of_address = np.r_[True, ~same[:-1]] if len(order) else np.zeros(0, bool)
    # Without events for requests, a block is freed when its free is completed. If that is the very
    # first event, then its request has only been cut off.
    is_free = action == FREE_REQUESTED
    if not is_free.any() and (events.action[1:] == FREE_COMPLETED).any():
        is_free = action == FREE_COMPLETED

    (born,) = np.nonzero(is_alloc)
    (before,) = np.nonzero(first_of_address & is_free)
    freed_at = _next(born, same, order, end)
    awaiting = final.address[~final.is_allocated]
    freed_now = np.r_[born + 1, before]
    done = _completed(freed_now, np.r_[freed_at, order[before]], action, order, address, awaiting,
                      end)  # fmt: skip
    never = np.flatnonzero(np.r_[freed_at, order[before]] == end)

    birth = np.r_[order[born], np.full(len(before), -1)]
    death = np.r_[freed_at, order[before]]
    at = np.r_[address[born], address[before]]
    size = rounded(np.r_[events.size[order[born]], events.size[order[before]]])
    stack = np.r_[events.stack[order[born]], np.full(len(before), NOT_RECORDED)]

    # what is live at the end: its size is known, and it may be older than the trace
    kept = np.flatnonzero(final.is_allocated)
    _, here, there = np.intersect1d(at[never], final.address[kept], return_indices=True)
    size[never[here]] = final.size[kept[there]]
    older = np.delete(kept, there)
    # what waited before the trace began is not live, but its memory could not be used
    waited = np.flatnonzero(~final.is_allocated & ~np.isin(final.address, at))
    contradicting = len(never) - len(here) if record.segments is not None else 0

    return BlockLives(
        birth=np.r_[birth, np.full(len(older) + len(waited), -1)].astype(np.int64),
        death=np.r_[death, np.full(len(older), end), np.full(len(waited), -1)].astype(np.int64),
        released=np.r_[done, np.full(len(older) + len(waited), end)].astype(np.int64),
        address=np.r_[at, final.address[older], final.address[waited]],
        size=np.r_[size, final.size[older], final.size[waited]],
        stack=np.r_[stack, final.stack[older], final.stack[waited]].astype(np.int64),
        num_before=len(before) + len(older),
        num_contradicting=contradicting,
    )


def reserved_bytes(record: CardRecord) -> Ints | None:
    """Return the bytes of all segments at each instant; None if the state at the end is unknown."""
    if record.segments is None:
        return None
    action, size = record.events.action, record.events.size
    change = np.where(np.isin(action, (SEGMENT_ALLOC, SEGMENT_MAP)), size, 0)
    change -= np.where(np.isin(action, (SEGMENT_FREE, SEGMENT_UNMAP)), size, 0)
    after = np.r_[0, np.cumsum(change)]
    at_end = sum(segment.size for segment in record.segments)
    found: Ints = after + (at_end - after[-1])
    return found


def _by_address(events: Events, actions: npt.NDArray[np.int64]) -> Ints:
    """Return the events of these actions by address, and by time within one address."""
    chosen = np.flatnonzero(np.isin(events.action, actions))
    return chosen[np.argsort(events.address[chosen], kind="stable")]


def _next(at: Ints, same: npt.NDArray[np.bool_], order: Ints, end: int) -> Ints:
    """Return the next event at the same address; `end` if there is none.

    After an allocation that is its free, or the next allocation if the free was not recorded.
    """
    following = np.minimum(at + 1, max(len(order) - 1, 0))
    return np.where(same[at], order[following], end) if len(at) else at


def _completed(
    at: Ints,
    freed: Ints,
    action: npt.NDArray[np.int8],
    order: Ints,
    address: Ints,
    awaiting: Ints,
    end: int,
) -> Ints:
    """Return when frees were completed, or were known to be; `end` for those that still wait."""
    if not len(at):
        return freed
    at = np.minimum(at, len(order) - 1)
    following = np.minimum(at + 1, len(order) - 1)
    is_request = (freed < end) & (action[at] == FREE_REQUESTED)
    is_next = (address[following] == address[at]) & (following > at)
    is_completed = is_next & (action[following] == FREE_COMPLETED)
    waits = ~is_next & np.isin(address[at], awaiting)
    done = np.where(is_completed, order[following], np.where(waits, end, freed))
    return np.where(is_request, done, freed)


def rounded(size: Ints) -> Ints:
    """Return requests in bytes, rounded up to whole blocks of the allocator."""
    found: Ints = round_block(size)
    return found
