"""Who holds memory at an instant: blocks by category and by the stack that allocated them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memlab.snapshots.columns import (
    NOT_RECORDED,
    Frame,
    Stack,
)
from memlab.snapshots.lifetimes import BlockLives
from memlab.snapshots.phases import COLUMNS

BELOW = " > "  # between a person's line and the line of a library that it called
# Folders of libraries: the first frame outside of them is a person's own line.
LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "/lib/python3")


@dataclass(frozen=True, kw_only=True, slots=True)
class StackHolding:
    """Blocks that are live at one instant and were allocated by one stack.

    Attributes:
        category: one of the categories of a timeline, or "unknown".
        stack: the frames, the innermost first; empty if there are none, as on the threads of
            autograd. None if no stack was recorded.
        num_blocks: number of blocks.
        nbytes: their bytes together.
    """

    category: str
    stack: Stack | None
    num_blocks: int
    nbytes: int

    @property
    def place(self) -> str:
        """The person's own line and the line of a library that it called, in short."""
        return place_of(self.stack)


def place_of(stack: Stack | None) -> str:
    """Return the innermost line outside of libraries and the function that allocated under it.

    >>> place_of((Frame("/site-packages/torch/nn/functional.py", 9, "gelu"),
    ...           Frame("/home/me/model.py", 42, "forward")))
    'model.py:42 forward > functional.py:9 gelu'
    """
    if stack is None:
        return "stack not recorded"
    if not stack:
        return "no Python frame"
    python = [frame for frame in stack if _is_python(frame)] or list(stack)
    own = next((frame for frame in python if not _is_library(frame)), python[-1])
    inner = python[0]
    return str(own) if own == inner else f"{own}{BELOW}{inner}"


def holders(
    lives: BlockLives,
    columns: npt.NDArray[np.int8],
    stacks: Sequence[Stack],
    live: npt.NDArray[np.int64],
) -> tuple[StackHolding, ...]:
    """Return what these blocks hold by category and stack, the largest first."""
    keys = lives.stack[live] * len(COLUMNS) + columns[live]
    found, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sizes = np.zeros(len(found), np.int64)
    np.add.at(sizes, group, lives.size[live])
    made = [
        StackHolding(
            category=COLUMNS[key % len(COLUMNS)],
            stack=stack_of(stacks, key // len(COLUMNS)),
            num_blocks=count,
            nbytes=size,
        )
        for key, count, size in zip(found.tolist(), counts.tolist(), sizes.tolist(), strict=True)
    ]
    return tuple(sorted(made, key=lambda holding: -holding.nbytes))


def stack_of(stacks: Sequence[Stack], number: int) -> Stack | None:
    """Return the stack of this number; None if none was recorded."""
    return None if number == NOT_RECORDED else stacks[number]


def _is_library(frame: Frame) -> bool:
    path = frame.filename.replace("\\", "/")
    return any(folder in path for folder in LIBRARIES) or path.startswith("<frozen")


def _is_python(frame: Frame) -> bool:
    return frame.filename.endswith(".py") or frame.filename.startswith("<")
