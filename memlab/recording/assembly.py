"""Combine a recording with the memory of its kernels into the trace that a meter would see.

`Layout` is the order of all allocations and frees, without sizes. A run with another batch size has
the same layout as long as its operators are the same, so one layout serves for many sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memlab.recording.live_blocks import AFTER
from memlab.recording.recording import Recording
from memlab.trace import Trace

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import


@dataclass(frozen=True, slots=True)
class Effect:
    """The memory of one operator's kernel that fake tensors do not show.

    Attributes:
        output_bytes: the real size of each output tensor in order, if fake tensors are wrong about
            it; 0 for an output without a block of its own.
        workspace_bytes: the most bytes held inside the operator in addition to its outputs.
        kept_bytes: bytes that a library holds from this operator on.
    """

    output_bytes: tuple[int, ...] | None = None
    workspace_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """Every allocation and free of a run, in order, without sizes.

    Blocks of the recording keep their numbers. After them come two blocks for each operator with a
    kernel: the memory that it keeps (never freed) and its workspace.

    Attributes:
        block: int64, (rows,).
        is_birth: bool, (rows,).
        interval: int32, (rows,).
        operator: int32, (rows,), number of operators dispatched so far.
        module: int32, (rows,).
        stream: int32, (rows,), number of the card's stream for which the block is allocated; None
            if all are for one.
        kernels: int64, (kernels,), the operators that have a kernel, in order.
        num_blocks: number of blocks of the recording itself.
    """

    block: npt.NDArray[np.int64]
    is_birth: npt.NDArray[np.bool_]
    interval: npt.NDArray[np.int32]
    operator: npt.NDArray[np.int32]
    module: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int32] | None
    kernels: npt.NDArray[np.int64]
    num_blocks: int


def layout_of(recording: Recording) -> Layout:
    """Return the order of everything that the run allocates and frees."""
    rows: list[tuple[int, bool, int, int, int, int]] = []
    kernels: list[int] = []
    num_blocks = len(recording.blocks)
    events = recording.events
    at, count = 0, len(events)

    for number, operator in enumerate(recording.operators):
        while at < count and events[at].operator == number and events[at].is_birth:
            event = events[at]
            if recording.blocks[event.block].output == AFTER:
                break
            stream = recording.blocks[event.block].stream
            rows.append((event.block, True, event.interval, number + 1, operator.module, stream))
            at += 1

        # two more blocks for each kernel: bytes that it keeps, and bytes that it frees at its end
        if operator.signature is not None:
            kept = num_blocks + 2 * len(kernels)
            where = (operator.interval, number + 1, operator.module, operator.stream)
            rows += [(kept, True, *where), (kept + 1, True, *where), (kept + 1, False, *where)]
            kernels.append(number)

        while at < count and events[at].operator == number:
            event = events[at]
            module = operator.module if event.is_birth else -1
            stream = recording.blocks[event.block].stream
            where = (event.interval, number + 1, module, stream)
            rows.append((event.block, event.is_birth, *where))
            at += 1

    columns = np.array(rows, np.int64).reshape(-1, 6).T
    return Layout(
        block=columns[0],
        is_birth=columns[1].astype(bool),
        interval=columns[2].astype(np.int32),
        operator=columns[3].astype(np.int32),
        module=columns[4].astype(np.int32),
        stream=columns[5].astype(np.int32) if columns[5].any() else None,
        kernels=np.array(kernels, np.int64),
        num_blocks=num_blocks,
    )


def sizes_of(
    recording: Recording, layout: Layout, effects: Sequence[Effect | None]
) -> npt.NDArray[np.int64]:
    """Return the bytes of every block of the layout.

    Args:
        recording: of the run.
        layout: of the same.
        effects: of each of its operators, in order; None if fake tensors show everything.
    """
    sizes = np.zeros(layout.num_blocks + 2 * len(layout.kernels), np.int64)
    for number, block in enumerate(recording.blocks):
        effect = effects[block.operator]
        known = None if effect is None else effect.output_bytes
        is_known = known is not None and block.output < len(known)
        sizes[number] = known[block.output] if known is not None and is_known else block.nbytes

    for number, operator in enumerate(layout.kernels.tolist(), start=0):
        if (effect := effects[operator]) is not None:
            at = layout.num_blocks + 2 * number
            sizes[at : at + 2] = effect.kept_bytes, effect.workspace_bytes

    return sizes


def trace_of(recording: Recording, effects: Sequence[Effect | None]) -> Trace:
    """Return every allocation and free of the run, including those of kernels."""
    layout = layout_of(recording)
    sizes = sizes_of(recording, layout, effects)[layout.block]
    nbytes = np.where(layout.is_birth, sizes, -sizes)
    real = nbytes != 0

    return Trace(
        address=layout.block[real],
        nbytes=nbytes[real],
        interval=layout.interval[real],
        operator=layout.operator[real],
        in_operator=layout.is_birth[real],
        module=layout.module[real],
        intervals=tuple(recording.intervals),
        operators=tuple(operator.name for operator in recording.operators),
        modules=tuple(recording.modules),
        parameters=dict(recording.parameters),
        states=dict(recording.states),
        logits=recording.logits,
        leftover_bytes=0,
        stream=None if layout.stream is None else layout.stream[real],
    )
