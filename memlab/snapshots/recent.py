"""The newest part of a trace, block by block: what a comparison with a prediction begins with.

A whole trace may have tens of millions of blocks, and a comparison needs those of one step. So an
opened snapshot keeps the blocks of its last `MOST_EVENTS` events, and those that were there before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memlab.snapshots.columns import NOT_RECORDED, CardRecord, Stack
from memlab.snapshots.holders import stack_of
from memlab.snapshots.lifetimes import BlockLives, rounded
from memlab.snapshots.phases import Phases

MOST_EVENTS = 2**18  # some 80,000 blocks; a step of a large language model has a tenth of them

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecentBlocks:
    """The blocks of the newest events of a trace, in the order in which they were allocated.

    Columns are (blocks,). Instants count events from the first of these.

    Attributes:
        birth: the event that allocated it; -1 if it was there before.
        death: the event that freed it; `num_events` if none did.
        size: bytes that were requested, rounded up to 512 B.
        phase: int8, the `RunPhase` of its stack.
        column: int8, its category, as an index into `COLUMNS`.
        stream: on which it was allocated; 0 if it was there before.
        stack: index into `stacks`.
        stacks: those of these blocks; None for one that was not recorded.
        num_events: how many there are.
        step_ends: the instants among them at which steps end, ascending.
        steps_by: what marks the end of a step, in words; empty if nothing does.
        is_whole: whether these are all events, and nothing was there before them.
    """

    birth: Ints
    death: Ints
    size: Ints
    phase: npt.NDArray[np.int8]
    column: npt.NDArray[np.int8]
    stream: Ints
    stack: Ints
    stacks: tuple[Stack | None, ...]
    num_events: int
    step_ends: Ints
    steps_by: str
    is_whole: bool

    def __len__(self) -> int:
        return len(self.birth)


def recent_blocks(
    record: CardRecord,
    lives: BlockLives,
    found: Phases,
    columns: npt.NDArray[np.int8],
    stacks: Sequence[Stack],
) -> RecentBlocks:
    """Return the blocks that were live during the newest events."""
    num_events = len(record.events)
    first = max(0, num_events - MOST_EVENTS)
    chosen = np.flatnonzero((lives.death >= first) & (lives.size > 0))
    chosen = chosen[np.argsort(lives.birth[chosen], kind="stable")]
    birth, numbers = lives.birth[chosen], lives.stack[chosen]
    stream = np.zeros(len(chosen), np.int64)
    if num_events:
        stream = np.where(birth >= 0, record.events.stream[np.maximum(birth, 0)], 0)
    kept, index = np.unique(numbers, return_inverse=True)
    ends = found.step_ends[found.step_ends > first] - first
    return RecentBlocks(
        birth=np.maximum(birth - first, -1),
        death=lives.death[chosen] - first,
        size=_requested(record, lives, chosen),
        phase=found.of_stack[np.where(numbers == NOT_RECORDED, -1, numbers)],
        column=columns[chosen],
        stream=stream,
        stack=index.astype(np.int64),
        stacks=tuple(stack_of(stacks, number) for number in kept.tolist()),
        num_events=num_events - first,
        step_ends=ends,
        steps_by=found.steps_by,
        is_whole=first == 0 and not (lives.birth < 0).any(),
    )


def _requested(record: CardRecord, lives: BlockLives, chosen: Ints) -> Ints:
    """Return the requests of blocks in bytes, rounded up; of a live block the file lists it."""
    size = lives.size[chosen].copy()
    final = record.blocks
    live = np.flatnonzero(lives.death[chosen] == len(record.events))
    _, here, there = np.intersect1d(lives.address[chosen[live]], final.address, return_indices=True)
    request = rounded(final.requested[there])
    is_known = (request > 0) & (request <= final.size[there])
    size[live[here[is_known]]] = request[is_known]
    return size
