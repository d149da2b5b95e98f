"""`LiveBlocks`: which storages are alive in a run over fake tensors; their births and deaths.

The idea. A fake tensor has no memory, but it has a storage object, which views share and which
lives exactly as long as a real one would. So memory is followed by these objects alone:

- if the storage of an operator's output is new, a block is born in this operator;
- a weak reference to that storage tells when the last tensor that uses it is gone: there the block
  dies.

For `y = torch.relu(x @ w)` over x of (4, 8) and w of (8, 16) in fp32:

    operator        block             event
    aten::mm        0, 256 bytes      born        4 * 16 numbers of 4 bytes
    aten::relu      1, 256 bytes      born
                    0                 dies        here if nothing keeps it: relu saves its output

An output whose storage is known and as large as its block is a view or was written in place: no
block is born. If its size has changed, it was resized: the old block dies, and another is born.

A run that fails is tried again, and what its model has cached is still there then. Such a storage
is born anew when an operator of the next run uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memlab.recording.recording import Block, Event, Recording
from memlab.recording.streams import Streams
from memlab.recording.values import tensors_in
from memlab.torch_private.tensors import storage_key

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
        self._device_type, self._streams = device_type, streams
        self._live: dict[int, _Death] = {}  # by the address of the storage
        self._left: dict[int, weakref.ref[Any]] = {}  # by earlier attempts, in caches of modules

    def restart(self, recording: Recording) -> None:
        """Write into another recording from now on, in which no block is live yet."""
        self._recording = recording
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
        """Return the block that holds a tensor, None if it was not born in this run."""
        known = self._live.get(storage_key(tensor.untyped_storage()))
        return None if known is None else known.block

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
        blocks = self._recording.blocks
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
        if size != self._recording.blocks[known.block].nbytes:
            self._died(known)
            self._hold(storage, self.born(size, AFTER))
        return out

    def born(self, nbytes: int, output: int = BESIDE) -> int:
        """Note memory that the last operator brings into being, as an output or beside them."""
        recording = self._recording
        number, block = len(recording.operators) - 1, len(recording.blocks)
        recording.blocks.append(Block(number, output, nbytes, self._streams.current.number))
        recording.events.append(Event(block, True, number, len(recording.intervals) - 1))
        return block

    def freed(self, block: int) -> None:
        """Note that memory is freed after the last operator."""
        recording = self._recording
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
