"""What grows from step to step: a leak, named by the stack that allocates it.

At the end of each step the live bytes of each stack are summed. The first step is left out, since
the optimizer makes its state in it. A stack leaks if its bytes never shrink from one step to the
next and grow in at least three steps. Left out: what grows and shrinks, such as a cache or batches
of different lengths; and a leak in blocks whose stack was not recorded is one row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memlab.snapshots.columns import (
    Stack,
)
from memlab.snapshots.holders import place_of, stack_of
from memlab.snapshots.lifetimes import BlockLives

LEAST_GROWTHS = 3  # steps in which a leak grows; one or two may be a cache that fills
SKIPPED_STEPS = 1  # the first, in which the optimizer makes its state
MOST_CELLS = 2 * 10**7  # stacks times steps that are looked at, the largest growth first


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Memory of one stack that grows from step to step and never shrinks.

    Attributes:
        stack: that allocates it, the innermost frame first; None if it was not recorded.
        bytes_at_step_ends: its live bytes at the end of each step after the first.
        num_blocks: blocks that the growth consists of.
    """

    stack: Stack | None
    bytes_at_step_ends: tuple[int, ...]
    num_blocks: int

    @property
    def growth_bytes(self) -> int:
        """By how much it has grown from the end of the second step to that of the last."""
        return self.bytes_at_step_ends[-1] - self.bytes_at_step_ends[0]

    @property
    def bytes_per_step(self) -> float:
        """Its growth in a step, on average."""
        return self.growth_bytes / (len(self.bytes_at_step_ends) - 1)

    @property
    def place(self) -> str:
        """The line that allocates it, in short."""
        return place_of(self.stack)


def leaks(
    lives: BlockLives, step_ends: npt.NDArray[np.int64], stacks: Sequence[Stack]
) -> tuple[Leak, ...]:
    """Return what grows from step to step, the largest growth first."""
    ends = step_ends[SKIPPED_STEPS:]
    if len(ends) <= LEAST_GROWTHS:
        return ()

    # the step ends at which a block is live are those from `first` to before `after`
    first = np.searchsorted(ends, lives.birth, side="right")
    after = np.searchsorted(ends, lives.death, side="right")
    spans = np.flatnonzero(after > first)
    numbers, group = np.unique(lives.stack[spans], return_inverse=True)
    at_begin, at_end = np.zeros((2, len(numbers)), np.int64)
    num_first, num_last = np.zeros((2, len(numbers)), np.int64)
    is_first, is_last = first[spans] == 0, after[spans] == len(ends)
    np.add.at(at_begin, group[is_first], lives.size[spans[is_first]])
    np.add.at(at_end, group[is_last], lives.size[spans[is_last]])
    np.add.at(num_first, group[is_first], 1)
    np.add.at(num_last, group[is_last], 1)

    growth = at_end - at_begin
    largest = np.argsort(-growth, kind="stable")[: max(1, MOST_CELLS // len(ends))]
    chosen = largest[growth[largest] > 0]
    row = np.full(len(numbers), -1)
    row[chosen] = np.arange(len(chosen))
    change = np.zeros((len(chosen), len(ends) + 1), np.int64)
    mine = row[group] >= 0
    rows, sizes = row[group[mine]], lives.size[spans[mine]]
    np.add.at(change, (rows, first[spans[mine]]), sizes)
    np.subtract.at(change, (rows, after[spans[mine]]), sizes)
    series = np.cumsum(change, axis=1)[:, :-1]

    found = []
    for index, line in zip(chosen.tolist(), series, strict=True):
        steps = np.diff(line)
        if (steps >= 0).all() and (steps > 0).sum() >= LEAST_GROWTHS:
            found.append(
                Leak(
                    stack=stack_of(stacks, int(numbers[index])),
                    bytes_at_step_ends=tuple(line.tolist()),
                    num_blocks=int(num_last[index] - num_first[index]),
                )
            )
    return tuple(found)
