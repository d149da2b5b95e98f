"""Ways to make batches of samples that differ in length, and how much of a batch is padding.

- *padding*: the data set is shuffled, and each micro-batch is padded to its longest sample.
- *grouping by length*: samples are sorted first, so that those of a batch are about equally long,
  beginning with the longest.
  The batches are shuffled afterwards, so a step may be of any length. Trainers that sort only a
  part of the data set at a time are between this and padding.
- *packing*: samples are put one after the other into rows that are as long as the longest sample.
  A sample goes into the row with the least room that is enough, the longest samples first (best fit
  decreasing). No sample is cut.

In each of them some batch is as long as the longest sample, so the worst batch costs the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memlab.lengths.distribution import Distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """What batches of one kind are like.

    Attributes:
        name: "padding", "grouping by length" or "packing".
        num_batches: optimizer updates in which each sample occurs once.
        tokens_per_batch: mean of an update, padding included.
        padding_fraction: how much of them is padding, 0..1.
        typical_longest: half of the batches are no longer.
        chance_above: the share of the batches that are longer than the longest that fits a limit;
            None without a limit.
    """

    name: str
    num_batches: int
    tokens_per_batch: float
    padding_fraction: float
    typical_longest: int
    chance_above: float | None


def batchings(
    data: Distribution, micro_batch_sizes: Sequence[int], fitting: int | None
) -> tuple[Batching, ...]:
    """Return the three ways to make batches.

    Args:
        data: the lengths of all samples.
        micro_batch_sizes: samples of each micro-batch of an update.
        fitting: the longest sample that fits a limit; 0 if none does, None without a limit.
    """
    return (
        _padded(data, micro_batch_sizes, fitting),
        _grouped(data, micro_batch_sizes, fitting),
        _packed(data, sum(micro_batch_sizes), fitting),
    )


def _padded(data: Distribution, sizes: Sequence[int], fitting: int | None) -> Batching:
    batch = sum(sizes)
    tokens = sum(size * data.expected_longest(size) for size in sizes)
    return Batching(
        name="padding",
        num_batches=-(-len(data) // batch),
        tokens_per_batch=tokens,
        padding_fraction=1.0 - batch * data.total / len(data) / tokens,
        typical_longest=data.median_longest(batch),
        chance_above=None if fitting is None else data.chance_above(fitting, batch),
    )


def _grouped(data: Distribution, sizes: Sequence[int], fitting: int | None) -> Batching:
    batch, count = sum(sizes), len(data)
    lengths = data.lengths[::-1]  # from the longest on: the batch that is not full has the shortest
    starts = np.arange(0, count, batch)
    begins = starts[:, None] + np.cumsum([0, *sizes[:-1]])  # (batches, micro-batches)
    num_samples = np.clip(count - begins, 0, sizes)
    tokens = int((num_samples * lengths[np.minimum(begins, count - 1)]).sum())
    longest = lengths[starts]
    return Batching(
        name="grouping by length",
        num_batches=len(starts),
        tokens_per_batch=tokens / len(starts),
        padding_fraction=1.0 - data.total / tokens,
        typical_longest=int(longest[len(longest) // 2]),
        chance_above=None if fitting is None else float((longest > fitting).mean()),
    )


def _packed(data: Distribution, batch: int, fitting: int | None) -> Batching:
    rows, longest = packed_rows(data), data.longest
    num_batches = -(-rows // batch)
    return Batching(
        name="packing",
        num_batches=num_batches,
        tokens_per_batch=rows * longest / num_batches,
        padding_fraction=1.0 - data.total / (rows * longest),
        typical_longest=longest,
        chance_above=None if fitting is None else float(longest > fitting),
    )


def packed_rows(data: Distribution) -> int:
    """Return into how many rows, as long as the longest sample, all samples are packed.

    Samples of one length are packed together, since rows with the same room are alike.

    >>> packed_rows(Distribution.of([8, 5, 4, 3, 2, 2]))  # 8, 5 + 3, 4 + 2 + 2
    3
    """
    longest, rows = data.longest, 0
    with_room: dict[int, int] = defaultdict(int)  # rows by their room
    rooms: list[int] = []  # the keys, ascending
    counts = np.diff(data.num_up_to, prepend=0)
    for length, count in zip(data.values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else longest
            each = room // length  # samples until the room of such a row is used up
            taken = max(left // each, 1)
            if at < len(rooms):
                taken = min(taken, with_room[room])
                with_room[room] -= taken
                if not with_room[room]:
                    rooms.pop(at)
            else:
                rows += taken
            each = min(each, left)
            left -= taken * each
            rest = room - each * length
            if rest and not with_room[rest]:
                insort(rooms, rest)
            with_room[rest] += taken
    return rows
