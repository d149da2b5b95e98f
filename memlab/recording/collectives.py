"""Where a collective of a recorded step runs on a card, among which ranks, and who waits for it.

A collective that the host waits for (`async_op=False`) runs on the current stream. Any other runs
on a stream of its process group, which first waits for the current stream (`collective` in
ProcessGroupNCCL.cpp). Functions of `torch.distributed` that return at once are of the second kind,
and so is all that DistributedDataParallel asks for in C++.

How a step waits for these cannot be seen in general: it may be in C++. But it must wait before it
uses the tensors again. So the first operator that is given one of them waits, on its stream, and
whatever is left when the update is over is waited for then.
"""

from __future__ import annotations

from typing import Any

from memlab.recording.streams import StreamEvent, Streams
from memlab.recording.values import tensors_in
from memlab.torch_private.operators import schema_of
from memlab.torch_private.ranks import group_in
from memlab.torch_private.tensors import storage_key

WAITS = "wait_tensor"  # the functional collectives' name for waiting, which takes no time itself
ASYNC = ("async_op", "asyncOp")  # an argument that is True where it is left out


class Collectives:
    """The collectives of one recording that its streams have not waited for.

    Args:
        streams: of the recording.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._pending: dict[int, StreamEvent] = {}  # by the storage of a tensor that it works on

    def restart(self) -> None:
        """Forget all collectives of an attempt."""
        self._pending = {}
        self._ranks = {}

    def wait_for(self, args: Any) -> None:
        """Let the current stream wait for the collectives that work on tensors in arguments."""
        if not self._pending:
            return
        for tensor in tensors_in(args):
            event = self._pending.pop(storage_key(tensor.untyped_storage()), None)
            if event is not None:
                self._streams.current.wait_event(event)

    def wait_for_all(self) -> None:
        """Let the current stream wait for what is left."""
        for event in self._pending.values():
            self._streams.current.wait_event(event)
        self._pending = {}

    def begin(self, func: Any, args: Any) -> tuple[int, tuple[int, ...]]:
        """Return the number of the stream that a collective runs on, and its ranks."""
        name, ranks = group_in(args)
        ranks = self._ranks.setdefault(name, ranks)  # thousands of numbers, kept once
        current = self._streams.current
        if not _is_beside(func, args):
            return current.number, ranks
        stream = self._streams.of_group(name)
        stream.wait_stream(current)
        return stream.number, ranks

    def end(self, stream: int, args: Any, out: Any) -> None:
        """Remember what must be waited for, if a collective runs beside the current stream."""
        if stream == self._streams.current.number:
            return
        event = self._streams.numbered(stream).record_event()
        for tensor in tensors_in([args, out]):
            self._pending[storage_key(tensor.untyped_storage())] = event


def _is_beside(func: Any, args: Any) -> bool:
    """Return whether a collective runs on a stream of its group."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name in ASYNC:
            return bool(args[position]) if position < len(args) else True
    return True  # functional collectives always do
