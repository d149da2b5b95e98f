"""Streams of a card while a step is recorded: what runs on which one, and who waits for whom.

The idea. A card runs the operators of one stream in the order in which they were issued, and those
of different streams beside each other, unless one waits for an event of another. What that makes
of a step's time is arithmetic (`costs/overlap.py`). All that a recording needs is the number of the
stream of each operator, and the marks, in the order in which the host set them:

    host                            what is noted
    a.record_event() as e           mark: e is recorded on a, after 7 operators
    b.wait_event(e)                 mark: b waits for e, after 7 operators
    with stream(b): copy            operator 7 runs on b

Memory belongs to the stream on which it was allocated: the caching allocator uses a freed block
again for that stream only. Stream 0 is the default one. The classes have the methods of
`torch.cuda.Stream` and `torch.cuda.Event` that `fully_shard` calls. Left out: priorities, and
`Tensor.record_stream`, which no collective calls (since torch 2.8 ProcessGroupNCCL keeps references
instead: `stashed_for_allocator_safety_` in ProcessGroupNCCL.hpp).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from memlab.recording.recording import StreamMark


class StreamEvent:
    """A point on a stream, known by a number once it is recorded."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.number = -1  # nothing waits for an event that was never recorded

    def record(self, stream: Stream | None = None) -> None:
        """Set the event behind all that the stream has been given so far."""
        self.number = self._streams.mark_event(stream or self._streams.current)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait until the event is reached."""
        (stream or self._streams.current).wait_event(self)

    def synchronize(self) -> None:
        """Do nothing: the host has no time of its own to wait in."""


class Stream:
    """One stream. They are made by `Streams`."""

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams = streams
        self.number = number

    def record_event(self, event: StreamEvent | None = None) -> StreamEvent:
        """Return an event behind all that the stream has been given so far."""
        event = event or StreamEvent(self._streams)
        event.record(self)
        return event

    def wait_event(self, event: StreamEvent) -> None:
        """Run what comes next only after the event."""
        self._streams.mark_wait(self, event)

    def wait_stream(self, other: Stream) -> None:
        """Run what comes next only after all that the other stream has been given so far."""
        if other is not self:
            self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Do nothing: the host has no time of its own to wait in."""


class Streams:
    """The streams of one recording.

    Attributes:
        current: the stream that operators run on.
    """

    def __init__(self) -> None:
        self._events = itertools.count()
        self._made: list[Stream] = []
        self._of_groups: dict[Any, Stream] = {}
        self.current = self.made()
        self.restart(lambda mark: None, lambda: 0)

    def restart(self, note: Callable[[StreamMark], None], num_operators: Callable[[], int]) -> None:
        """Note marks elsewhere from now on.

        Args:
            note: called with each mark.
            num_operators: returns how many operators were issued so far.
        """
        self._note, self._num_operators = note, num_operators
        self.current = self._made[0]

    def made(self) -> Stream:
        """Return a new stream."""
        stream = Stream(self, len(self._made))
        self._made.append(stream)
        return stream

    def numbered(self, number: int) -> Stream:
        """Return the stream of a number."""
        return self._made[number]

    def of_group(self, group: Any) -> Stream:
        """Return the stream on which NCCL runs what a process group is asked to do beside others.

        Each group has one of its own for a device (`ncclStreams_` of ProcessGroupNCCL).
        """
        if group not in self._of_groups:
            self._of_groups[group] = self.made()
        return self._of_groups[group]

    @contextlib.contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        """Run operators on a stream; None changes nothing, as in PyTorch."""
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before

    def mark_event(self, stream: Stream) -> int:
        """Note that an event is recorded on a stream, and return its number."""
        number = next(self._events)
        self._mark(stream, number, waits=False)
        return number

    def mark_wait(self, stream: Stream, event: StreamEvent) -> None:
        """Note that a stream waits for an event."""
        if event.number >= 0:
            self._mark(stream, event.number, waits=True)

    def _mark(self, stream: Stream, event: int, *, waits: bool) -> None:
        self._note(
            StreamMark(
                stream=stream.number, event=event, operator=self._num_operators(), waits=waits
            )
        )
