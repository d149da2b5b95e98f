"""Combine a recording with the memory of its kernels into the trace that a meter would see.

`Layout` is the order of all allocations and frees, without sizes. A run with another batch size has
the same layout as long as its operators are the same, so one layout serves for many sizes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memlab._util.torch_private.tensors import storage_key
from memlab.trace import Trace
from memlab.tracing.recording import Block, Event, OpTrace, Streams
from memlab.tracing.values import tensors_in

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

# `LiveBlocks`: which storages are alive in a run over fake tensors; their births and deaths.
#
# The idea. A fake tensor has no memory, but it has a storage object, which views share and
# which lives exactly as long as a real one would. So memory is followed by these objects
# alone:
#
# - if the storage of an operator's output is new, a block is born in this operator;
# - a weak reference to that storage tells when the last tensor that uses it is gone: there
#   the block dies.
#
# For `y = torch.relu(x @ w)` over x of (4, 8) and w of (8, 16) in fp32:
#
#     operator        block             event aten::mm        0, 256 bytes      born
# 4 * 16 numbers of 4 bytes aten::relu      1, 256 bytes      born 0                 dies
# here if nothing keeps it: relu saves its output
#
# An output whose storage is known and as large as its block is a view or was written in
# place: no block is born. If its size has changed, it was resized: the old block dies, and
# another is born.
#
# A run that fails is tried again, and what its model has cached is still there then. Such a
# storage is born anew when an operator of the next run uses it.

BESIDE = 1 << 16  # in place of an output's number, for memory that is none
AFTER = BESIDE + 1  # likewise, for memory that is allocated once the operator is done


class _Death(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows which block it is."""

    __slots__ = ("block", "key")
    block: int
    key: int


class LiveBlocks:
    """The live blocks of one attempt after the other.

    Args:
        device_type: of the tensors whose memory is followed.
        streams: for the current one of which the card's memory is allocated.
    """

    def __init__(self, device_type: str, streams: Streams) -> None:
        self._device_type, self.streams = device_type, streams
        self._live: dict[int, _Death] = {}  # by the address of the storage
        self._left: dict[int, weakref.ref[Any]] = {}  # by earlier attempts, in caches of modules

    def restart(self, recording: OpTrace) -> None:
        """Write into another recording from now on, in which no block is live yet."""
        self.recording = recording
        self._left |= self.left()
        self._live = {}

    def left(self) -> dict[int, weakref.ref[Any]]:
        """Return the storages that outlive an attempt: something beside the step holds them."""
        standing = {key: death() for key, death in self._live.items()}
        return {key: weakref.ref(found) for key, found in standing.items() if found is not None}

    def adopt(self, left: dict[int, weakref.ref[Any]]) -> None:
        """Count these, which another tracker has left, as memory once the run uses them."""
        self._left |= left

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Return the block that holds a tensor; None if it was not born here, or is sparse."""
        if tensor.layout is not torch.strided:
            return None
        known = self._live.get(storage_key(tensor.untyped_storage()))
        return None if known is None else known.block

    def live(self) -> list[int]:
        """Return the blocks that are live now."""
        return [death.block for death in self._live.values()]

    def of(self, args: Any) -> tuple[int, ...]:
        """Return the blocks that hold the tensors in these arguments."""
        blocks = (self.block_of(tensor) for tensor in tensors_in(args))
        return tuple([block for block in blocks if block is not None])

    def note_arguments(self, args: Any) -> None:
        """Begin to count what an earlier attempt has left and the last operator uses."""
        if not self._left:
            return
        for tensor in tensors_in(args):
            storage = tensor.untyped_storage()
            reference = self._left.pop(storage_key(storage), None)
            if reference is not None and reference() is storage:
                self._hold(storage, self.born(storage.nbytes()))

    def note_outputs(self, tensors: list[torch.Tensor]) -> None:
        """Note the blocks that the last operator brings into being by returning these tensors."""
        blocks = self.recording.blocks
        for index, tensor in enumerate(tensors):
            if tensor.device.type != self._device_type:
                continue
            storage = tensor.untyped_storage()
            known = self._live.get(storage_key(storage))
            if known is not None:
                if storage.nbytes() == blocks[known.block].nbytes:
                    continue
                self._died(known)  # it was resized
            self._hold(storage, self.born(storage.nbytes(), index))

    def resize(self, own: Callable[..., Any], storage: Any, size: int) -> Any:
        """Resize a storage by PyTorch's own method, and note that its memory is another."""
        out = own(storage, size)
        known = self._live.get(storage_key(storage))
        if known is None or known() is not storage:
            return out
        if size != self.recording.blocks[known.block].nbytes:
            self._died(known)
            self._hold(storage, self.born(size, AFTER))
        return out

    def born(self, nbytes: int, output: int = BESIDE) -> int:
        """Note memory that the last operator brings into being, as an output or beside them."""
        recording = self.recording
        number, block = len(recording.operators) - 1, len(recording.blocks)
        recording.blocks.append(Block(number, output, nbytes, self.streams.current.number))
        recording.events.append(Event(block, True, number, len(recording.intervals) - 1))
        return block

    def freed(self, block: int) -> None:
        """Note that memory is freed after the last operator."""
        recording = self.recording
        recording.events.append(
            Event(block, False, len(recording.operators) - 1, len(recording.intervals) - 1)
        )

    def _hold(self, storage: Any, block: int) -> None:
        """Free a block once its storage dies."""
        death = _Death(storage, self._died)
        death.block, death.key = block, storage_key(storage)
        self._live[death.key] = death

    def _died(self, death: _Death) -> None:
        if self._live.get(death.key) is death:
            del self._live[death.key]
            self.freed(death.block)


@dataclass(frozen=True, slots=True)
class KernelMemory:
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


def layout_of(recording: OpTrace) -> Layout:
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
    recording: OpTrace, layout: Layout, effects: Sequence[KernelMemory | None]
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


def trace_of(recording: OpTrace, effects: Sequence[KernelMemory | None]) -> Trace:
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
