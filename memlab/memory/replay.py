"""A replay of PyTorch's CUDA caching allocator: allocations and frees in, reserved bytes out.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp`, read in sources from torch 2.6 on and in
the headers of 2.11 and 2.13. With default settings all of these have the same rules. The replay
counts the bytes that `torch.cuda.memory_reserved` and `torch.cuda.memory_allocated` would show. The
panel replays by the same rules in `_panel/page/allocator.js`.

In short: a request is rounded up to 512 B. Requests of at most 1 MiB go to the small pool, all
others to the large pool. A pool takes the smallest free block that fits and splits off the rest. If
none fits, it allocates a new segment: 2 MiB in the small pool, 20 MiB for requests below 10 MiB,
otherwise the request rounded up to 2 MiB. At the limit all free segments are released first.

Each stream has pools of its own: a free block serves requests of the stream for which it was
allocated. Left out: `Tensor.record_stream` (here a freed block can be used again at once); private
pools (CUDA graphs, `MemPool`); and settings that are off by default: `max_split_size_mb` (without
it, PyTorch's first measure at the limit, releasing large segments one by one, does nothing),
`garbage_collection_threshold`, `roundup_power2_divisions`, and `large_segment_size_mb`, which in
newer versions changes the 20 MiB. The driver does not document at which addresses it puts segments,
which decides between free blocks of one size. Here each segment lies below all earlier ones, as
memory maps grow on Linux; the public peaks of `benchmarks/gpu_peaks.py` agree with this.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from memlab._util.units import MIB, round_up
from memlab.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

# The two kinds of pool in PyTorch's CUDA caching allocator: free blocks, segments, pages.
#
# A pool holds segments of device memory and cuts requests from their free blocks. Here one
# segment of 20 MiB serves requests of 8 and 4 MiB, and the first of them is freed again:
#
#     grow      |.................... 20 MiB free ...................|
#     take 8    |######## 8 ########|........... 12 free ............|
#     take 4    |######## 8 ########|#### 4 ####|...... 8 free ......|
#     give 8    |...... 8 free .....|#### 4 ####|...... 8 free ......|
#
# The free blocks are not neighbours, so a request of 9 MiB now needs a new segment,
# although 16 MiB are free. `flush` (`empty_cache()`) releases only segments without a block
# in use, so not this one.
#
# Sizes and addresses count blocks of 512 B.

# From c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc,
# large_segment_size, kRoundLarge; all but the first in blocks.
BLOCK_BYTES = 512
SMALL_REQUEST = MIB // BLOCK_BYTES  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB // BLOCK_BYTES
LARGE_REQUEST = 10 * MIB // BLOCK_BYTES  # a request of this size or more gets its own segment
LARGE_SEGMENT = 20 * MIB // BLOCK_BYTES
SEGMENT_GRANULE = 2 * MIB // BLOCK_BYTES

# A free block is stored as one int, with its size in the upper bits and its address in the lower.
# So their order is the order of best fit, and bisect compares plain ints.
ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
UNLIMITED = 1 << 40


class SegmentPool:
    """A pool whose segments are allocated and freed as a whole (cudaMalloc, cudaFree).

    Attributes:
        reserved: number of 512 B blocks in all its segments.
    """

    __slots__ = ("_bottom", "_end", "_free", "_segments", "_size", "_smallest_rest", "reserved")

    def __init__(self, smallest_rest: int) -> None:
        """Make an empty pool, which splits a free block if at least `smallest_rest` remains."""
        self.reserved = 0
        self._smallest_rest = smallest_rest
        self._free: list[int] = []  # size << ADDRESS_BITS | start, ascending
        self._size: dict[int, int] = {}  # start of a free block -> its size
        self._end: dict[int, int] = {}  # end of a free block -> its start
        self._segments: dict[int, int] = {}  # start -> size
        self._bottom = 1 << ADDRESS_BITS - 1  # the lowest address of all segments so far

    def take(self, size: int) -> tuple[int, int] | None:
        """Cut a block from the smallest free block that fits; return start and size, or None."""
        index = bisect_left(self._free, size << ADDRESS_BITS)
        return self._cut(index, size) if index < len(self._free) else None

    def _cut(self, index: int, size: int) -> tuple[int, int]:
        key = self._free.pop(index)
        start, whole = key & ADDRESS_MASK, key >> ADDRESS_BITS
        del self._size[start]
        rest = whole - size
        if rest < self._smallest_rest:
            del self._end[start + whole]
            return start, whole

        self._size[start + size] = rest
        self._end[start + whole] = start + size
        insort(self._free, rest << ADDRESS_BITS | start + size)
        return start, size

    def give(self, start: int, size: int) -> None:
        """Add a free block and join it with free neighbours."""
        free = self._free
        after = self._size.pop(start + size, 0)
        if after:
            del free[bisect_left(free, after << ADDRESS_BITS | start + size)]
            size += after

        before = self._end.pop(start, None)
        if before is not None:
            del free[bisect_left(free, start - before << ADDRESS_BITS | before)]
            size += start - before
            start = before

        self._size[start] = size
        self._end[start + size] = start
        insort(free, size << ADDRESS_BITS | start)

    def _withdraw(self, key: int) -> None:
        del self._free[bisect_left(self._free, key)]
        start = key & ADDRESS_MASK
        del self._end[start + self._size.pop(start)]

    def grow(self, size: int, room: int) -> bool:
        """Allocate a segment for a block of this size; False if it needs more than `room`."""
        if size <= SMALL_REQUEST:
            whole = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            whole = LARGE_SEGMENT
        else:
            whole = round_up(size, SEGMENT_GRANULE)

        if whole > room:
            return False

        self._bottom -= whole + 1  # the gap prevents joining blocks of two segments
        start = self._bottom
        self._segments[start] = whole
        self.reserved += whole
        self.give(start, whole)
        return True

    def flush(self) -> None:
        """Free every segment without a block in use."""
        for key in list(self._free):
            start = key & ADDRESS_MASK
            if self._segments.get(start) == key >> ADDRESS_BITS:
                self._withdraw(key)
                self.reserved -= self._segments.pop(start)


class ExpandablePool(SegmentPool):
    """A pool of one endless segment, of which whole pages are mapped and unmapped.

    PyTorch's segment ends after 9/8 of the device's memory, and then PyTorch begins another one.
    """

    __slots__ = ("_page", "_unmapped")

    def __init__(self, page: int) -> None:
        """Make a pool without memory, which maps pages of this size."""
        super().__init__(smallest_rest=1)
        self._page = page
        self._unmapped = {0: UNLIMITED}  # start -> end of a range without memory, ascending

    def take(self, size: int) -> tuple[int, int] | None:
        """Cut a block from the free block that fits best; return start and size, or None.

        A free block before an unmapped range counts as large as both together, so other blocks
        are preferred.
        """
        index, last = bisect_left(self._free, size << ADDRESS_BITS), len(self._free) - 1
        if index > last:
            return None
        while index < last and self._reach(index + 1) < self._reach(index):
            index += 1
        return self._cut(index, size)

    def _reach(self, index: int) -> int:
        start = self._free[index] & ADDRESS_MASK
        end = start + (self._free[index] >> ADDRESS_BITS)
        return self._unmapped.get(end, end) - start

    def grow(self, size: int, room: int) -> bool:
        """Map pages at the lowest address where the block then fits; False if `room` runs out.

        Pages that were mapped until then stay mapped, as in PyTorch.
        """
        start = next(start for start in self._starts() if self._can_hold(start, size))
        have = self._size.get(start, 0)
        while have < size:
            gap = start + have
            end = self._unmapped[gap]
            pages = min(round_up(size - have, self._page), end - gap)
            if pages > room:
                return False

            room -= pages
            self._map(gap, pages)
            have = self._size[start]

        return True

    def _starts(self) -> list[int]:
        """Return the start of each unmapped range, or of the free block just before it."""
        return [self._end.get(gap, gap) for gap in self._unmapped]

    def _can_hold(self, start: int, size: int) -> bool:
        end = start
        while end - start < size:
            if end in self._size:
                end += self._size[end]
            elif end in self._unmapped:
                end = self._unmapped[end]
            else:
                return False

        return True

    def _map(self, start: int, pages: int) -> None:
        end = self._unmapped.pop(start)
        if start + pages < end:
            self._unmapped[start + pages] = end
            self._unmapped = dict(sorted(self._unmapped.items()))
        self.reserved += pages
        self.give(start, pages)

    def flush(self) -> None:
        """Unmap every page without a block in use."""
        for key in list(self._free):
            start = key & ADDRESS_MASK
            end = start + (key >> ADDRESS_BITS)
            first, last = round_up(start, self._page), end // self._page * self._page
            if first >= last:
                continue

            self._withdraw(key)
            if start < first:
                self.give(start, first - start)
            if last < end:
                self.give(last, end - last)

            self.reserved -= last - first
            self._unmapped[first] = last

        self._unmapped = _joined(self._unmapped)


def _joined(ranges: dict[int, int]) -> dict[int, int]:
    """Return the ranges (start -> end) in ascending order; ranges that touch are joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges.items()):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return dict(joined)


LIMIT_STEP = 0.005  # of the peak: how finely the least limit is searched for

_Block = tuple[SegmentPool, int, int]
"""The pool of a block, its start and its size."""

Bytes = TypeVar("Bytes", int, "npt.NDArray[np.int64]")


def round_block(nbytes: Bytes) -> Bytes:
    """Return a request rounded up to the next 512 B, as the allocator does; arrays work too.

    A block of the large pool can be larger by up to 1 MiB, if the rest of the free block is too
    small to be split off. `Reserved.allocated_bytes` counts that as well.

    >>> round_block(1), round_block(512), round_block(0)
    (512, 512, 0)
    """
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """The settings of the caching allocator; the defaults are PyTorch's.

    Attributes:
        expandable_segments: each pool has one segment that grows by pages (2 MiB small, 20 MiB
            large), as with `PYTORCH_ALLOC_CONF=expandable_segments:True`.
        limit_bytes: device memory that it may reserve; None for no limit. If the next segment or
            page would exceed it, all cached segments are released and the request is tried again;
            if that fails, it is out of memory. (`torch.cuda.set_per_process_memory_fraction` is a
            little stricter with expandable segments, because it asks for a whole segment.)
    """

    expandable_segments: bool = False
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ConfigError(
                f"limit_bytes={self.limit_bytes} is below one byte; allowed is a positive number "
                "of bytes, or None for no limit"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reserved:
    """What the caching allocator held after each event of a replay.

    The replay stops at an event that cannot be served; later entries repeat that state.

    Attributes:
        reserved_bytes: int64, (events,), bytes of all segments, a multiple of 2 MiB.
        allocated_bytes: int64, (events,), bytes of blocks in use as
            `torch.cuda.memory_allocated` counts them: rounded to 512 B, with rests that were too
            small to be split off.
        out_of_memory_at: index of the first event that could not be served, or None.
        num_flushes: how often the limit made it release cached segments (`num_alloc_retries` of
            `torch.cuda.memory_stats`).
    """

    reserved_bytes: npt.NDArray[np.int64]
    allocated_bytes: npt.NDArray[np.int64]
    out_of_memory_at: int | None
    num_flushes: int

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes reserved in the whole replay."""
        return int(self.reserved_bytes.max(initial=0))

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes allocated in the whole replay."""
        return int(self.allocated_bytes.max(initial=0))


class Piece(NamedTuple):
    """Some of the allocations and frees of a run; the fields are arguments of `replay`."""

    address: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int32] | None = None


class Allocator:
    """The pools of all streams, two for each, under one limit, and the blocks that are in use."""

    __slots__ = ("_is_expandable", "_limit", "_live", "_pools", "num_flushes", "reserved")

    def __init__(self, settings: AllocatorSettings) -> None:
        self._is_expandable = settings.expandable_segments
        self._pools: dict[tuple[int, bool], SegmentPool] = {}  # by stream, and whether it is small
        self._live: dict[int, _Block] = {}  # by address
        limit = settings.limit_bytes
        self._limit = UNLIMITED if limit is None else limit // BLOCK_BYTES
        self.num_flushes = 0
        self.reserved = 0  # in all pools, in blocks of 512 B

    def run(
        self, piece: Piece, flush_before: frozenset[int] = frozenset()
    ) -> tuple[list[int], list[int], int | None]:
        """Return reserved and allocated after each event, and the event that was out of memory."""
        sizes = (np.sign(piece.nbytes) * round_block(np.abs(piece.nbytes)) // BLOCK_BYTES).tolist()
        streams = [0] * len(sizes) if piece.stream is None else piece.stream.tolist()
        live = self._live
        in_use = sum(block[2] for block in live.values())
        held = self.reserved
        reserved: list[int] = []
        allocated: list[int] = []

        for event, (address, size) in enumerate(zip(piece.address.tolist(), sizes, strict=True)):
            if event in flush_before:
                self.flush()
                held = self.reserved

            if size > 0:
                if address in live:
                    raise _misuse(
                        event, address, "allocated while it is in use", "free it before that"
                    )
                block = self._allocate(size, streams[event])
                held = self.reserved
                # the program would end here, so both counts keep their last values
                if block is None:
                    left = len(sizes) - event
                    return reserved + [held] * left, allocated + [in_use] * left, event

                # the block may be larger than the request, if the rest is too small to split off
                live[address] = block
                in_use += block[2]
            elif size < 0:
                if address not in live:
                    raise _misuse(
                        event, address, "freed while it is not in use", "allocate it before that"
                    )
                pool, start, whole = live.pop(address)
                pool.give(start, whole)
                in_use -= whole

            reserved.append(held)
            allocated.append(in_use)

        return reserved, allocated, None

    def take(self, address: int, nbytes: int, stream: int = 0) -> int | None:
        """Serve one request; return the bytes of its block, None if out of memory."""
        block = self._allocate(round_block(nbytes) // BLOCK_BYTES, stream)
        if block is None:
            return None
        self._live[address] = block
        return block[2] * BLOCK_BYTES

    def restrict(self, limit_bytes: int) -> None:
        """Reserve at most this much from now on."""
        self._limit = limit_bytes // BLOCK_BYTES

    def free(self, address: int) -> int:
        """Take a block back; return its bytes."""
        pool, start, whole = self._live.pop(address)
        pool.give(start, whole)
        return whole * BLOCK_BYTES

    def _allocate(self, size: int, stream: int) -> _Block | None:
        """Return pool, start and size of a new block; None if out of memory."""
        key = stream, size <= SMALL_REQUEST
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._pool(is_small=key[1])
        block = pool.take(size)
        if block is None:
            if not pool.grow(size, self._limit - self.reserved):
                self.flush()
                self.num_flushes += 1
                pool.grow(size, self._limit - self.reserved)
            self._count()
            block = pool.take(size)

        return None if block is None else (pool, *block)

    def flush(self) -> None:
        """Release all memory without a block in use, as `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            pool.flush()
        self._count()

    def _pool(self, *, is_small: bool) -> SegmentPool:
        if self._is_expandable:
            return ExpandablePool(SMALL_SEGMENT if is_small else LARGE_SEGMENT)
        return SegmentPool(1 if is_small else SMALL_REQUEST + 1)

    def _count(self) -> None:
        self.reserved = sum(pool.reserved for pool in self._pools.values())


def replay(
    address: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    settings: AllocatorSettings | None = None,
    *,
    flush_before: Collection[int] = (),
    stream: npt.NDArray[np.int32] | None = None,
) -> Reserved:
    """Return what the caching allocator would hold after each of these allocations and frees.

    Args:
        address: int64, (events,). It only identifies a block from its allocation to its free; the
            replay puts the block at an address of its own.
        nbytes: int64, (events,), positive for an allocation of that many bytes, negative for the
            free of the block at that address. An event of 0 bytes does nothing, since an empty
            tensor has no block.
        settings: None means PyTorch's defaults.
        flush_before: indices of events; `torch.cuda.empty_cache()` runs just before each of them.
        stream: int32, (events,), for which the block is allocated; None if there is one stream.

    Raises:
        ConfigError: the arrays differ in length, an address is allocated while it is in use or
            freed while it is not, or `flush_before` names no event.

    >>> replay(np.array([1, 2, 1]), np.array([5_000_000, 100, -1])).reserved_bytes
    array([20971520, 23068672, 23068672])
    """
    if np.shape(address) != np.shape(nbytes) or np.ndim(address) != 1:
        raise ConfigError(
            f"address has shape {np.shape(address)} and nbytes has shape {np.shape(nbytes)}; "
            "allowed are two arrays of one length, with one address and one size for each event"
        )

    strangers = sorted(event for event in flush_before if not 0 <= event < len(address))
    if strangers:
        raise ConfigError(
            f"flush_before={strangers} is outside of the events; allowed are indices from 0 to "
            f"{len(address) - 1}; leave out the others"
        )

    allocator = Allocator(AllocatorSettings() if settings is None else settings)
    reserved, allocated, failed = allocator.run(
        Piece(np.asarray(address), np.asarray(nbytes), stream), frozenset(flush_before)
    )
    return Reserved(
        reserved_bytes=np.array(reserved, np.int64) * BLOCK_BYTES,
        allocated_bytes=np.array(allocated, np.int64) * BLOCK_BYTES,
        out_of_memory_at=failed,
        num_flushes=allocator.num_flushes,
    )


def replay_in_turn(pieces: Iterable[Piece], settings: AllocatorSettings) -> list[int]:
    """Return the bytes reserved after each piece of a run, which one allocator serves in turn.

    A run of millions of events is never held at once.

    >>> pieces = [Piece(np.array([1, 1]), np.array([n, -n])) for n in (3 * 2**20, 30 * 2**20)]
    >>> replay_in_turn(pieces, AllocatorSettings())  # the cached 20 MiB are too small for 30
    [20971520, 52428800]
    """
    allocator, reserved = Allocator(settings), []
    for piece in pieces:
        allocator.run(piece)
        reserved.append(allocator.reserved * BLOCK_BYTES)
    return reserved


def serves(
    address: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    settings: AllocatorSettings,
    limit_bytes: int,
    *,
    flush_before: Collection[int] = (),
    stream: npt.NDArray[np.int32] | None = None,
) -> bool:
    """Return whether the caching allocator serves all of these allocations within a limit.

    The arguments are those of `replay`, and a limit in bytes instead of that of the settings.
    """
    if np.cumsum(nbytes).max(initial=0) > limit_bytes:  # what is live is never given back
        return False
    limited = replace(settings, limit_bytes=limit_bytes)
    held = replay(address, nbytes, limited, flush_before=flush_before, stream=stream)
    return held.out_of_memory_at is None


def least_limit(
    address: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    settings: AllocatorSettings,
    *,
    flush_before: Collection[int] = (),
    stream: npt.NDArray[np.int32] | None = None,
    peak_reserved_bytes: int | None = None,
) -> int:
    """Return the smallest limit, in bytes, within which the allocator serves these allocations.

    It is found by halving between the live bytes and the peak without a limit, to half a per cent
    of the peak; what is returned was tried. The arguments are those of `replay`, and that peak,
    where it is known already.

    >>> events = np.array([1, 2, 1, 3]), np.array([30, 20, -30, 40]) * 2**20
    >>> replay(*events).peak_reserved_bytes // 2**20  # the cached 30 MiB are too small for 40
    90
    >>> least_limit(*events, AllocatorSettings()) // 2**20  # at a limit they are given back
    60
    """
    if peak_reserved_bytes is None:
        held = replay(address, nbytes, settings, flush_before=flush_before, stream=stream)
        peak_reserved_bytes = held.peak_reserved_bytes

    low, high = int(np.cumsum(nbytes).max(initial=0)), max(peak_reserved_bytes, 1)
    step = max(int(LIMIT_STEP * high), 1)
    limit = high - step  # many steps need all that they take, so this is tried first
    while high - low > step:
        if serves(address, nbytes, settings, limit, flush_before=flush_before, stream=stream):
            high = limit
        else:
            low = limit
        limit = (low + high) // 2
    return high


def _misuse(event: int, address: int, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"address[{event}]={address} is {what}; {remedy}")
