"""Oracles: sizes worked by hand, and a slow replay that walks plain lists of blocks."""

import numpy as np
import pytest

from memlab._util.units import GIB, MIB
from memlab.errors import ConfigError
from memlab.memory.replay import AllocatorSettings, least_limit, replay, round_block

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
    # an event of no bytes does nothing
    nothing = run(("a", 0), ("b", 1), ("a", 0), ("b",))
    assert nothing.reserved_bytes.tolist() == [0, 2 * MIB, 2 * MIB, 2 * MIB]
    assert nothing.allocated_bytes.tolist() == [0, 512, 512, 0]
    assert (len(run().reserved_bytes), run().peak_reserved_bytes) == (0, 0)


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
    assert result.reserved_bytes[3:].max() == 20 * MIB
    assert result.peak_allocated_bytes == 34 * MIB
    assert result.allocated_bytes[3:].max() == 6 * MIB


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
    with pytest.raises(ConfigError, match="limit_bytes=0"):
        AllocatorSettings(limit_bytes=0)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_stream_serves_itself_alone(expandable):
    # 40 MiB on stream 1, freed; then as much on stream 0, and once more on stream 1
    address = np.array([1, 1, 2, 3])
    nbytes = np.array([40, -40, 40, 40]) * MIB
    settings = AllocatorSettings(expandable_segments=expandable)
    one = replay(address, nbytes, settings)
    two = replay(address, nbytes, settings, stream=np.array([1, 1, 0, 1], np.int32))
    assert reserved_mib(one) == [40, 40, 40, 80]
    assert reserved_mib(two) == [40, 40, 80, 80]


def test_at_the_limit_the_cached_memory_of_all_streams_is_released():
    address, nbytes = np.array([1, 1, 2]), np.array([40, -40, 40]) * MIB
    stream = np.array([1, 1, 0], np.int32)
    limited = replay(address, nbytes, AllocatorSettings(limit_bytes=60 * MIB), stream=stream)
    assert reserved_mib(limited) == [40, 40, 40]
    assert limited.num_flushes == 1
    assert least_limit(address, nbytes, AllocatorSettings(), stream=stream) <= 41 * MIB
