"""The two kinds of pool in PyTorch's CUDA caching allocator: free blocks, segments, pages.

A pool holds segments of device memory and cuts requests from their free blocks. Here one segment of
20 MiB serves requests of 8 and 4 MiB, and the first of them is freed again:

    grow      |.................... 20 MiB free ...................|
    take 8    |######## 8 ########|........... 12 free ............|
    take 4    |######## 8 ########|#### 4 ####|...... 8 free ......|
    give 8    |...... 8 free .....|#### 4 ####|...... 8 free ......|

The free blocks are not neighbours, so a request of 9 MiB now needs a new segment, although 16 MiB
are free. `flush` (`empty_cache()`) releases only segments without a block in use, so not this one.

Sizes and addresses count blocks of 512 B. Left out: the same as in `replay.py`.
"""

from bisect import bisect_left, insort

from memlab.arguments.units import MIB

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


def round_up(size: int, granule: int) -> int:
    """Return the smallest multiple of the granule that is not below the size."""
    return -(-size // granule) * granule


def _joined(ranges: dict[int, int]) -> dict[int, int]:
    """Return the ranges (start -> end) in ascending order; ranges that touch are joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges.items()):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return dict(joined)
