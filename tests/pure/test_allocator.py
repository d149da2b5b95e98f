"""Oracles: sizes worked by hand, and a slow replay that walks plain lists of blocks."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.allocator.pools import LARGE_SEGMENT, ExpandablePool, SegmentPool
from memlab.allocator.replay import AllocatorSettings, Reserved, replay, round_block
from memlab.arguments.units import GIB, KIB, MIB
from memlab.errors import ConfigError

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def run(*events, limit=None, expandable=False, flush_before=()):
    """Replay events written as (name, bytes) for an allocation and (name,) for a free."""
    names = sorted({event[0] for event in events})
    return replay(
        np.array([names.index(event[0]) for event in events], np.int64),
        np.array([event[1] if len(event) == 2 else -1 for event in events], np.int64),
        AllocatorSettings(expandable_segments=expandable, limit_bytes=limit),
        flush_before=flush_before,
    )


def reserved_mib(result):
    return (result.reserved_bytes / MIB).tolist()


def test_a_request_is_rounded_to_512_bytes():
    sizes = np.array([0, 1, 511, 512, 513, 1536, 10**12])
    expected = [0, 512, 512, 512, 1024, 1536, 10**12]  # 10**12 = 512 * 1953125000
    assert round_block(sizes).tolist() == expected
    assert [round_block(int(size)) for size in sizes] == expected


@pytest.mark.parametrize(
    ("requested", "segment", "block"),
    [
        (1, 2 * MIB, 512),
        (MIB, 2 * MIB, MIB),  # the largest small request
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),  # the rest, 2 MiB - 512 B, is split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not
        (11 * MIB - 512, 12 * MIB, 11 * MIB - 512),  # a rest of 1 MiB + 512 B is
        (GIB + 1, GIB + 2 * MIB, GIB + 512),
    ],
)
def test_the_segment_and_the_block_of_a_single_request(requested, segment, block):
    result = run(("a", requested))
    assert result.reserved_bytes.tolist() == [segment]
    assert result.allocated_bytes.tolist() == [block]


def test_small_blocks_fill_a_segment_of_2_mib():
    half = run(("a", MIB), ("b", MIB), ("c", 1))
    assert reserved_mib(half) == [2, 2, 4]
    # 4095 blocks of 512 B leave one: it is split off and used; then the segment is full
    many = run(*((f"{i:04}", 1) for i in range(4097)))
    assert many.reserved_bytes[[4094, 4095, 4096]].tolist() == [2 * MIB, 2 * MIB, 4 * MIB]


def test_requests_below_10_mib_share_segments_of_20():
    result = run(*((name, 5 * MIB) for name in "abcde"))
    assert reserved_mib(result) == [20, 20, 20, 20, 40]
    # 9 + 9 leave 2 MiB, of which 1 MiB + 512 B would leave too little: all 2 MiB are the block
    tight = run(("a", 9 * MIB), ("b", 9 * MIB), ("c", MIB + 512))
    assert tight.reserved_bytes[-1] == tight.allocated_bytes[-1] == 20 * MIB


def test_the_smallest_free_block_that_fits_is_used():
    events = [("a", 30 * MIB), ("b", 24 * MIB), ("c", 40 * MIB), ("a",), ("b",), ("c",)]
    # 22 fits best in 24 and leaves 2, 28 in 30 and leaves 2, 40 in 40; 3 needs a new segment
    result = run(*events, ("d", 22 * MIB), ("e", 28 * MIB), ("f", 40 * MIB), ("g", 3 * MIB))
    assert reserved_mib(result) == [30, 54, 94, 94, 94, 94, 94, 94, 94, 114]


def test_a_freed_block_joins_its_free_neighbours_within_its_segment_only():
    blocks = [("a", 6 * MIB), ("b", 6 * MIB), ("c", 8 * MIB)]
    for order in ("abc", "acb", "cba", "bac"):
        result = run(*blocks, *((name,) for name in order), ("d", 20 * MIB))
        assert reserved_mib(result)[-1] == 20, order
    apart = run(("a", 10 * MIB), ("b", 10 * MIB), ("a",), ("b",), ("c", 20 * MIB))
    assert reserved_mib(apart) == [10, 20, 20, 20, 40]


def test_pools_do_not_lend_to_each_other():
    assert reserved_mib(run(("a", 30 * MIB), ("a",), ("b", 1))) == [30, 30, 32]
    assert reserved_mib(run(("a", 1), ("a",), ("b", 2 * MIB))) == [2, 2, 22]


def test_an_event_of_no_bytes_does_nothing():
    result = run(("a", 0), ("b", 1), ("a", 0), ("b",))
    assert result.reserved_bytes.tolist() == [0, 2 * MIB, 2 * MIB, 2 * MIB]
    assert result.allocated_bytes.tolist() == [0, 512, 512, 0]
    empty = run()
    assert (len(empty.reserved_bytes), empty.peak_reserved_bytes) == (0, 0)


def test_at_the_limit_free_segments_are_given_back_and_the_request_is_tried_again():
    # 30 and 20 are cached, 50 more would make 100 > 99: both go, 50 remains
    events = [("a", 30 * MIB), ("b", 20 * MIB), ("a",), ("b",), ("c", 50 * MIB)]
    assert reserved_mib(run(*events, limit=100 * MIB)) == [30, 50, 50, 50, 100]
    result = run(*events, limit=100 * MIB - 1)
    assert reserved_mib(result) == [30, 50, 50, 50, 50]
    assert (result.num_flushes, result.out_of_memory_at) == (1, None)


def test_a_segment_in_use_is_kept_and_then_it_is_out_of_memory():
    # 4 of 20 MiB are in use, so that the 16 MiB that are free in the segment cannot be given back
    events = [("a", 4 * MIB), ("b", 30 * MIB), ("b",), ("c", 32 * MIB), ("d", 1), ("a",)]
    result = run(*events, limit=51 * MIB)
    assert (result.out_of_memory_at, result.num_flushes) == (3, 1)
    assert reserved_mib(result) == [20, 50, 50, 20, 20, 20]  # as it was left, to the end
    assert (result.allocated_bytes / MIB).tolist() == [4, 34, 4, 4, 4, 4]
    assert run(*events, limit=52 * MIB).out_of_memory_at == 4  # 20 + 32; a small segment is 2 more
    assert run(*events, limit=54 * MIB).out_of_memory_at is None


def test_the_cache_can_be_emptied_before_an_event():
    events = [("a", 30 * MIB), ("b", 4 * MIB), ("a",), ("c", 2 * MIB), ("c",)]
    result = run(*events, flush_before=[3])
    assert reserved_mib(result) == [30, 50, 50, 20, 20]
    assert result.num_flushes == 0  # the limit forced none
    assert result.peak_reserved_bytes == 50 * MIB
    assert result.since(3).peak_reserved_bytes == 20 * MIB
    assert result.peak_allocated_bytes == 34 * MIB
    assert result.since(3).peak_allocated_bytes == 6 * MIB


def test_expandable_segments_map_pages_of_20_and_2_mib():
    result = run(("a", 25 * MIB), ("b", 16 * MIB), ("c", 1), ("d", 2 * MIB), expandable=True)
    # 25 -> 2 pages; 15 free at the end, 1 more needed -> 1 page; a small page; 19 free at the end
    assert reserved_mib(result) == [40, 60, 62, 62]
    assert result.allocated_bytes.tolist() == [
        25 * MIB,
        41 * MIB,
        41 * MIB + 512,
        43 * MIB + 512,
    ]


def test_expandable_segments_split_large_blocks_to_the_last_512_bytes():
    # 20 MiB - 512 B leave 512 B, which a segment of its own would not split off
    events = [("a", 20 * MIB - 512), ("b", 20 * MIB + 512)]
    result = run(*events, expandable=True)
    assert (reserved_mib(result), result.allocated_bytes[-1]) == ([20, 40], 40 * MIB)
    assert run(*events).reserved_bytes.tolist() == [20 * MIB, 42 * MIB]


def test_expandable_segments_unmap_whole_free_pages_and_fill_the_gap_first():
    # a: 0-30, b: 30-60, c: 60-65 of pages 0-20-40-60-80. Emptied while c is in use: a leaves page
    # 0-20, b joins it, so that 0-60 is free and unmapped; c keeps 60-80.
    events = [("a", 30 * MIB), ("b", 30 * MIB), ("c", 5 * MIB), ("a",), ("d", 2 * MIB), ("b",)]
    # d lies at 0-2: of the free 2-60 only pages 20-60 are unmapped
    result = run(*events, ("e", 20 * MIB), ("f", 58 * MIB), expandable=True, flush_before=[6])
    # e: 2-20 is free and page 20-40 is the gap after it; f does not fit before c: after it 65-80
    # are free, 43 MiB more take 3 pages
    assert reserved_mib(result) == [40, 60, 80, 80, 80, 80, 60, 120]


def test_pages_on_both_sides_of_a_free_block_count_against_the_limit_together():
    # emptied: 0-20 is unmapped, c holds page 20-40. Once c is free, 70 at 0 take page 0-20 and
    # two pages from 40: 80 in all
    events = [("a", 20 * MIB), ("c", 5 * MIB), ("a",), ("c",), ("f", 70 * MIB)]
    enough = run(*events, limit=80 * MIB, expandable=True, flush_before=[3])
    assert (reserved_mib(enough), enough.num_flushes) == ([20, 40, 40, 20, 80], 0)
    short = run(*events, limit=80 * MIB - 1, expandable=True, flush_before=[3])
    assert (reserved_mib(short), short.num_flushes) == ([20, 40, 40, 20, 0], 1)
    assert short.out_of_memory_at == 4


def test_a_block_that_can_grow_is_kept_for_last():
    # free are 0-19 and, up to the end of the second page, 24-40: 15 would fit best in the second,
    # but that can grow, so 15 is taken from the first, and 17 then needs a third page
    events = [("a", 19 * MIB), ("b", 5 * MIB), ("a",), ("d", 15 * MIB), ("e", 17 * MIB)]
    assert reserved_mib(run(*events, expandable=True)) == [20, 40, 40, 40, 60]


@pytest.mark.parametrize(
    ("address", "nbytes", "options", "names"),
    [
        ([1, 1], [5, 5], {}, "address[1]=1 is allocated while it is in use"),
        ([1, 2], [5, -5], {}, "address[1]=2 is freed while it is not in use"),
        ([1, 1, 1], [5, -5, -5], {}, "address[2]=1"),
        ([1, 2], [5], {}, "address has shape (2,) and nbytes has shape (1,)"),
        ([1], [5], {"flush_before": [1]}, "flush_before=[1]"),
    ],
)
def test_impossible_events_are_refused_by_name(address, nbytes, options, names):
    with pytest.raises(ConfigError) as error:
        replay(np.array(address), np.array(nbytes), **options)
    assert names in str(error.value)


def test_a_limit_is_at_least_one_byte():
    with pytest.raises(ConfigError, match="limit_bytes=0"):
        AllocatorSettings(limit_bytes=0)


class Slow:
    """The same allocator by other means: every segment a list of [state, size], walked in full."""

    def __init__(self, expandable, limit):
        self.expandable, self.limit, self.retries = expandable, limit, 0
        self.pools = {"small": [], "large": []}
        self.owner = {}
        if expandable:
            for pool in self.pools.values():
                pool.append([["void", 2**70]])

    def reserved(self):
        segments = [segment for pool in self.pools.values() for segment in pool]
        return sum(size for segment in segments for state, size in segment if state != "void")

    def allocated(self):
        return sum(block[1] for _, block in self.owner.values())

    def allocate(self, name, nbytes):
        size = -(-nbytes // 512) * 512
        pool = "small" if size <= MIB else "large"
        found = self.find(pool, size)
        if found is None:
            grow = self.map if self.expandable else self.segment
            if not grow(pool, size):
                self.retries += 1
                self.flush()
                if not grow(pool, size):
                    return False
            found = self.find(pool, size)
        segment, index = found
        rest = segment[index][1] - size
        split = rest >= 512 if pool == "small" or self.expandable else rest > MIB
        block = ["used", size if split else size + rest]
        segment[index : index + 1] = [block, ["free", rest]] if split else [block]
        self.owner[name] = segment, block
        return True

    def find(self, pool, size):
        fitting = []
        for number, segment in enumerate(self.pools[pool]):
            for index, (state, length) in enumerate(segment):
                if state == "free" and length >= size:
                    grown = length
                    if index + 1 < len(segment) and segment[index + 1][0] == "void":
                        grown += segment[index + 1][1]
                    fitting.append((length, number, index, grown))
        fitting.sort()
        if not fitting:
            return None
        while len(fitting) > 1 and fitting[1][3] < fitting[0][3]:
            fitting.pop(0)
        return self.pools[pool][fitting[0][1]], fitting[0][2]

    def segment(self, pool, size):
        step = 2 * MIB
        whole = step if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // step) * step
        if self.limit is not None and self.reserved() + whole > self.limit:
            return False
        self.pools[pool].append([["free", whole]])
        return True

    def map(self, pool, size):
        (segment,) = self.pools[pool]
        page = 2 * MIB if pool == "small" else 20 * MIB
        for index, (state, _) in enumerate(segment):
            if state != "void":
                continue
            first = index - 1 if index and segment[index - 1][0] == "free" else index
            last, room = first, 0
            while last < len(segment) and segment[last][0] != "used" and room < size:
                room += segment[last][1]
                last += 1
            if room >= size:
                break
        needed = size
        for block in segment[first:last]:
            if block[0] == "void":
                part = min(-(-needed // page) * page, block[1])
                if self.limit is not None and self.reserved() + part > self.limit:
                    self.join(segment)
                    return False
                if part < block[1]:
                    where = next(i for i, other in enumerate(segment) if other is block)
                    segment.insert(where + 1, ["void", block[1] - part])
                block[:] = ["free", part]
            needed -= block[1]
        self.join(segment)
        return True

    def free(self, name):
        segment, block = self.owner.pop(name)
        block[0] = "free"
        self.join(segment)

    def join(self, segment):
        index = 0
        while index + 1 < len(segment):
            if segment[index][0] == segment[index + 1][0] != "used":
                segment[index][1] += segment.pop(index + 1)[1]
            else:
                index += 1

    def flush(self):
        for pool, segments in self.pools.items():
            if not self.expandable:
                segments[:] = [s for s in segments if len(s) > 1 or s[0][0] == "used"]
                continue
            page = 2 * MIB if pool == "small" else 20 * MIB
            blocks, start = [], 0
            for block in segments[0]:
                end = start + block[1]
                first, last = -(-start // page) * page, end // page * page
                if block[0] == "free" and first < last:
                    parts = ("free", first - start), ("void", last - first), ("free", end - last)
                    blocks += [[state, length] for state, length in parts if length]
                else:
                    blocks.append(block)
                start = end
            segments[0][:] = blocks
            self.join(segments[0])


def slow_replay(address, nbytes, limit, expandable, flush_before):
    slow, failed, rows = Slow(expandable, limit), None, []
    for event, (name, size) in enumerate(zip(address.tolist(), nbytes.tolist(), strict=True)):
        if failed is None:
            if event in flush_before:
                slow.flush()
            if size < 0:
                slow.free(name)
            elif size and not slow.allocate(name, size):
                failed = event
        rows.append((slow.reserved(), slow.allocated()))
    return rows, failed, slow.retries


@st.composite
def event_lists(draw):
    """Return addresses, sizes and flushes: blocks of all classes, freed in any order, reused."""
    around = st.sampled_from([1, 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 40 * MIB])
    size = st.one_of(
        st.builds(lambda at, off: max(at + off, 0), around, st.integers(-1025, 1025)),
        st.integers(0, 45 * MIB),
        st.integers(MIB, 9 * MIB),
        st.integers(1, 700 * KIB),
    )
    live, free, address, nbytes = {}, list(range(60)), [], []
    for step in draw(st.lists(st.tuples(st.booleans(), st.integers(0, 99), size), max_size=60)):
        release, which, wanted = step
        if release and live:
            name = sorted(live)[which % len(live)]
            nbytes.append(-live.pop(name))
            free.append(name)
        else:
            name = free.pop(which % len(free))
            nbytes.append(wanted)
            if wanted:
                live[name] = wanted
            else:
                free.append(name)
        address.append(name)
    flushes = draw(st.sets(st.integers(0, max(len(address) - 1, 0)), max_size=3))
    return np.array(address, np.int64), np.array(nbytes, np.int64), flushes if address else set()


def assert_agrees(address, nbytes, limit, expandable, flushes):
    chosen = AllocatorSettings(expandable_segments=expandable, limit_bytes=limit)
    fast = replay(address, nbytes, chosen, flush_before=flushes)
    rows, failed, retries = slow_replay(address, nbytes, limit, expandable, flushes)
    assert list(zip(fast.reserved_bytes, fast.allocated_bytes, strict=True)) == rows
    assert (fast.out_of_memory_at, fast.num_flushes) == (failed, retries)
    return fast


LIMITS = st.one_of(st.none(), st.integers(1, 300 * MIB))


@settings(max_examples=200, deadline=None)
@given(event_lists(), LIMITS, st.booleans())
def test_it_agrees_with_the_slow_replay_event_by_event(events, limit, expandable):
    address, nbytes, flushes = events
    assert_agrees(address, nbytes, limit, expandable, flushes)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_it_agrees_with_the_slow_replay_on_long_crowded_runs(seed, expandable):
    rng, live, address, nbytes = random.Random(seed), {}, [], []
    for event in range(700):
        if live and rng.random() < 0.35 + 0.3 * (event // 100 % 2):
            name = rng.choice(list(live))
            nbytes.append(-live.pop(name))
        else:
            name = event
            live[name] = int(2 ** rng.uniform(8, 25.5))
            nbytes.append(live[name])
        address.append(name)
    flushes = {150, 420, 600}
    unlimited = assert_agrees(np.array(address), np.array(nbytes), None, expandable, flushes)
    limit = int(unlimited.peak_reserved_bytes * 0.93)
    limited = assert_agrees(np.array(address), np.array(nbytes), limit, expandable, flushes)
    assert limited.num_flushes > 0


@settings(deadline=None)
@given(event_lists(), LIMITS, st.booleans())
def test_what_is_reserved_holds_what_is_allocated_and_can_be_given_back(events, limit, expandable):
    address, nbytes, flushes = events
    chosen = AllocatorSettings(expandable_segments=expandable, limit_bytes=limit)
    result = replay(address, nbytes, chosen, flush_before=flushes)
    assert (result.reserved_bytes >= result.allocated_bytes).all()
    assert (result.reserved_bytes % (2 * MIB) == 0).all()
    assert limit is None or result.peak_reserved_bytes <= limit
    served = result.out_of_memory_at if result.out_of_memory_at is not None else len(address)
    requested = np.cumsum(np.sign(nbytes[:served]) * round_block(np.abs(nbytes[:served])))
    rests = result.allocated_bytes[:served] - requested
    assert (rests >= 0).all()
    assert not expandable or (rests == 0).all()  # all is split to 512 B there
    last = dict(zip(address.tolist(), nbytes.tolist(), strict=True))
    used = [name for name, size in last.items() if size > 0]
    end = replay(
        np.concatenate([address, used, [0]]).astype(np.int64),
        np.concatenate([nbytes, np.full(len(used), -1), [0]]).astype(np.int64),
        AllocatorSettings(expandable_segments=expandable),
        flush_before=[len(address) + len(used)],
    )
    assert (end.reserved_bytes[-1], end.allocated_bytes[-1]) == (0, 0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 90_000)), max_size=80),
    st.sampled_from([(SegmentPool, 1), (SegmentPool, 2049), (ExpandablePool, LARGE_SEGMENT)]),
)
def test_blocks_never_overlap_and_are_taken_from_what_was_reserved(steps, kind):
    pool, blocks = kind[0](kind[1]), []
    for action, size in steps:
        if action == 0:
            pool.flush()
        elif action == 1 and blocks:
            pool.give(*blocks.pop(size % len(blocks)))
        else:
            block = pool.take(size)
            if block is None:
                assert pool.grow(size, 2**40)
                block = pool.take(size)
            assert block[1] >= size
            blocks.append(block)
        ordered = sorted(blocks)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ordered))
        assert sum(n for _, n in blocks) <= pool.reserved
    for block in blocks:
        pool.give(*block)
    pool.flush()
    assert pool.reserved == 0


def test_the_part_after_an_event_keeps_its_own_peaks_and_failure():
    whole = Reserved(
        reserved_bytes=np.array([8, 8, 2, 4]),
        allocated_bytes=np.array([5, 7, 1, 3]),
        out_of_memory_at=3,
        num_flushes=2,
    )
    part = whole.since(2)
    assert (part.peak_reserved_bytes, part.peak_allocated_bytes) == (4, 3)
    assert part.out_of_memory_at == 1
