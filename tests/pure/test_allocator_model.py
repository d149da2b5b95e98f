"""The replay of the allocator against a slow one that is written for clarity, on drawn events."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab._util.units import KIB, MIB
from memlab.memory.replay import (
    AllocatorSettings,
    replay,
)


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
