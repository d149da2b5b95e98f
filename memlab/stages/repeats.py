"""Continue a recorded run: batches and tokens that were not recorded, from two that were.

The idea. Batches of an evaluation and tokens of a generation run the same operators, and what they
allocate is affine in their number. A cache of 100 tokens becomes one of 101, then one of 102. So
the last recorded token and the one before it give all later ones:

    token   recorded                        continued
      2     allocates 102, frees 101
      3     allocates 103, frees 102        4: allocates 104, frees 103    5: 105, frees 104   ...

A block that token 3 allocates is paired with the one that token 2 allocates at the same place.
Where token 3 frees a block of token 2, token 4 frees the paired block of token 3. What the last
recorded token leaves behind, each continued one leaves behind too, unless the next one frees it.

Left out: kernels whose own memory is not affine in the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab.errors import UnsupportedError
from memlab.trace import Interval

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import


# A row takes 48 bytes in `Rows` and 40 in a trace, of which there are up to five, and is copied
# while they are made: some GB in all.
MOST_ROWS = 10**7


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Allocations and frees of a run in order, and the size of each block.

    Attributes:
        columns: int64, (6, rows): block, whether it is allocated, index of the interval, operators
            so far, module, stream.
        sizes: int64, (blocks,), bytes.
        intervals: in order.
    """

    columns: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    intervals: tuple[Interval, ...]

    def of(self, step: int, number: int) -> tuple[slice, list[int]]:
        """Return the rows of a batch or token of a stage, and its intervals."""
        found = [
            index
            for index, interval in enumerate(self.intervals)
            if (interval.step, interval.micro_batch) == (step, number)
        ]
        begin, end = np.searchsorted(self.columns[2], (found[0], found[-1] + 1))
        return slice(int(begin), int(end)), found


def continued(rows: Rows, step: int, recorded: int, wanted: int, *, field: str) -> Rows:
    """Return a run in which a stage goes on to the wanted number of batches or tokens.

    Args:
        rows: of the recorded run.
        step: the number of the stage.
        recorded: batches or tokens that were recorded, at least two.
        wanted: how many there are to be.
        field: what says so, for a message.

    Raises:
        UnsupportedError: the last two do not do the same, or the run would have too many rows.
    """
    count = wanted - recorded
    if count <= 0:
        return rows
    before, _ = rows.of(step, recorded - 2)
    last, intervals = rows.of(step, recorded - 1)
    _check_length(rows, last, recorded, wanted, field)
    paired = _Paired(rows, before, last)
    copies = np.arange(1, count + 1)[:, None]

    # the rows of all copies, one after the other
    made = np.tile(rows.columns[:, last], count)
    made[0] = paired.blocks(copies).ravel()
    made[2] += len(intervals) * np.repeat(copies.ravel(), last.stop - last.start)
    tail = paired.tail(rows.columns[:, last.stop :], count)
    tail[2] += len(intervals) * count

    more = [
        replace(rows.intervals[index], micro_batch=recorded + copy)
        for copy in range(count)
        for index in intervals
    ]
    at = intervals[-1] + 1
    return Rows(
        columns=np.concatenate((rows.columns[:, : last.stop], made, tail), axis=1),
        sizes=np.concatenate((rows.sizes, paired.sizes(copies).ravel())),
        intervals=(*rows.intervals[:at], *more, *rows.intervals[at:]),
    )


def _check_length(rows: Rows, last: slice, recorded: int, wanted: int, field: str) -> None:
    """Raise UnsupportedError if the copies make more rows than this machine should hold."""
    given, each = rows.columns.shape[1], last.stop - last.start
    made = given + each * (wanted - recorded)
    if made > MOST_ROWS:
        most = recorded + max(MOST_ROWS - given, 0) // each
        raise UnsupportedError(
            f"{field}={wanted} makes a run of {made:,} allocations and frees, and a prediction "
            f"holds at most {MOST_ROWS:,}; allowed here is at most {most}; use that, or "
            "memlab.measure_run"
        )


class _Paired:
    """The blocks of the last recorded batch or token, paired with those of the one before."""

    def __init__(self, rows: Rows, before: slice, last: slice) -> None:
        blocks, is_birth = rows.columns[0], rows.columns[1].astype(bool)
        if not np.array_equal(is_birth[before], is_birth[last]):
            raise UnsupportedError(
                "the batches of the evaluation, or the tokens of the generation, do not all run "
                "the same operators, so that later ones do not follow from the first; use fewer "
                "of them, or memlab.measure_run"
            )
        self.num_blocks = len(rows.sizes)
        self.old, self.new = (blocks[part][is_birth[part]] for part in (before, last))
        place = {name: np.full(self.num_blocks, -1, np.int64) for name in ("old", "new")}
        place["old"][self.old] = place["new"][self.new] = np.arange(len(self.new))
        self.of_new = place["new"]
        self.rows_new = self.of_new[blocks[last]]
        self.rows_old = place["old"][blocks[last]]
        self.own_sizes = rows.sizes[self.new]
        self.slopes = self.own_sizes - rows.sizes[self.old]
        # positions of blocks that the next one frees
        is_freed_next = np.zeros(len(self.new), bool)
        is_freed_next[self.rows_old[(self.rows_new < 0) & (self.rows_old >= 0)]] = True
        self.is_freed_next = is_freed_next
        self.older = blocks[last][(self.rows_new < 0) & (self.rows_old < 0)]
        if rows.sizes[self.older].any():
            raise UnsupportedError(
                "a batch of the evaluation, or a token of the generation, frees what was allocated "
                "long before it, so that later ones do not follow from it; use fewer of them, or "
                "memlab.measure_run"
            )

    def blocks(self, copies: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the block of each row of each copy, (copies, rows)."""
        is_new = self.rows_new >= 0
        place = np.where(is_new, self.rows_new, self.rows_old)
        copy = np.where(is_new, copies, copies - 1)
        named = np.where(copy > 0, self._name(copy, place), self.new[place])
        found: npt.NDArray[np.int64] = np.where(place >= 0, named, 0)  # 0: of no bytes
        return found

    def sizes(self, copies: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the bytes of the blocks of each copy, (copies, blocks)."""
        found: npt.NDArray[np.int64] = np.maximum(self.own_sizes + copies * self.slopes, 0)
        return found

    def tail(self, columns: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """Return what comes after the last recorded one, for the last copy in its place."""
        place = self.of_new[columns[0]]
        is_last_only = (place >= 0) & self.is_freed_next[place]
        found = columns.copy()
        found[0] = np.where(is_last_only, self._name(np.int64(count), place), found[0])

        # what no copy frees, all of them leave behind
        is_of_each = (place >= 0) & ~is_last_only
        times = np.where(is_of_each, count + 1, 1)
        repeated = np.repeat(found, times, axis=1)
        first = np.cumsum(times) - times
        copy = np.arange(repeated.shape[1]) - np.repeat(first, times)
        return np.concatenate(
            (
                np.where(copy > 0, self._name(copy, np.repeat(place, times)), repeated[0])[None],
                repeated[1:],
            )
        )

    def _name(self, copy: npt.NDArray[np.int64] | np.int64, place: npt.NDArray[np.int64]) -> Any:
        return self.num_blocks + (copy - 1) * len(self.new) + place
