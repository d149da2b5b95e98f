"""`OpTrace`: the operators of a run over fake tensors, and every allocation and free."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab.devices.operators import Signature, TensorSpec
from memlab.techniques.checkpoint_contents import SavedTensor
from memlab.techniques.offload.offload import HostMemory
from memlab.trace import Interval, Phase
from memlab.tracing.attention_kernels import AttentionCall

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

OBJECTS = ("operators", "blocks", "events", "marks", "calls", "compiled", "attention")
OUTSIDE = Interval(step=-1, phase=Phase.BUILD)


@dataclass(slots=True, eq=False)
class Operator:
    """One dispatched operator.

    Attributes:
        name: as the profiler names it, for instance "aten::addmm".
        signature: None if no kernel runs (a view).
        outputs: the tensors that it returned; empty for a view.
        module: index of the module that was running, -1 if it is not known.
        interval: index of the interval that it ran in.
        reads: blocks of its arguments; empty for a view.
        writes: those among them that it changes in place.
        forward: for a backward operator, the number of its forward operator; otherwise -1.
        crosses: whether it copies between the device and the host.
        beside: whether that copy runs on a stream of its own, as in offloading.
        by_values: whether the sizes of its outputs depend on values and not only on its signature.
        stream: the number of the card's stream that it runs on.
        ranks: of a collective, those that take part.
    """

    name: str
    signature: Signature | None
    outputs: tuple[TensorSpec, ...]
    module: int
    interval: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    forward: int = -1
    crosses: bool = False
    beside: bool = False
    by_values: bool = False
    stream: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamMark:
    """An event on a stream: it is recorded there, or the stream waits for it.

    Attributes:
        stream: the number of the stream.
        event: the number of the event.
        operator: how many operators had been issued before.
        waits: whether the stream waits for the event, which was recorded earlier.
    """

    stream: int
    event: int
    operator: int
    waits: bool


@dataclass(slots=True)
class ModuleCall:
    """One call of a module's forward: the operators from `first` up to `end`."""

    module: int
    first: int
    end: int


@dataclass(slots=True)
class CompiledCall:
    """One call of what a person has compiled: the operators from `first` up to `end`."""

    name: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """A storage: the operator that allocated it, the index of the output, and its bytes.

    `stream` is the number of the card's stream for which it was allocated.
    """

    operator: int
    output: int
    nbytes: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """The allocation (birth) or the free of a block, after `operator` operators."""

    block: int
    is_birth: bool
    operator: int
    interval: int


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """Which operators ran, in order, and where.

    Attributes:
        names: as in `Operator`.
        module: int32, (operators,), as in `Operator`.
        interval: int32, (operators,), as in `Operator`.
    """

    names: tuple[str, ...]
    module: npt.NDArray[np.int32]
    interval: npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class OpTrace:
    """What a run would do, in order.

    Attributes:
        operators: every dispatched operator.
        blocks: every storage on the device.
        events: allocations and frees.
        intervals: in the order in which they ran.
        marks: events on the card's streams, in the order in which the host set them.
        modules: index by path.
        calls: of modules, in the order in which they began.
        compiled: calls of what `torch.compile` has made inside the model, run as it was written.
        root: the name of the model itself among the modules.
        repeated: paths of the model's repeated blocks.
        recomputed: for the path of each recomputed module, whether it keeps outputs.
        parameters: path by block.
        states: for a block of optimizer state, the path of its parameter.
        gradients: blocks that were the gradient of a parameter at an update of a script.
        logits: over how many words or classes the last layer decides, as `logits_of` says.
        parameter_formats: of the model's parameters, by torch's names.
        padded_bytes: that the largest product of odd sizes would take if a compiler pads it.
        attention: calls of `scaled_dot_product_attention` on a card, each with its interval.
        notes: sentences about how the step was built.
        assumptions: sentences that say what was assumed about unknown values.
        host_memory: the most that offloading holds in host memory.
        saved: what a checkpoint of the step holds; None if it cannot be saved.
        is_ragged: whether batches, or micro-batches, differ in more than the number of samples.
        is_scripted: whether TorchScript runs a part of the model.
        branched: whether an assumed value decides which operators run.
        spread: whether an assumed value decides how work is divided between parts of the model.
        launches: how often each Triton kernel was launched in one step, by its file and name.
    """

    operators: list[Operator] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=lambda: [OUTSIDE])
    marks: list[StreamMark] = field(default_factory=list)
    modules: dict[str, int] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    compiled: list[CompiledCall] = field(default_factory=list)
    root: str = ""
    repeated: tuple[str, ...] = ()
    recomputed: dict[str, bool] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    gradients: set[int] = field(default_factory=set)
    logits: tuple[int, str] = (0, "")
    parameter_formats: tuple[str, ...] = ()
    padded_bytes: int = 0
    attention: list[tuple[AttentionCall, int]] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    assumptions: list[str] = field(default_factory=list)
    host_memory: HostMemory = field(default_factory=HostMemory)
    saved: tuple[SavedTensor, ...] | None = None
    is_ragged: bool = False
    is_scripted: bool = False
    branched: bool = False
    spread: bool = False
    launches: dict[str, int] = field(default_factory=dict)

    def ran(self) -> Ran:
        """Return which operators ran."""
        return Ran(
            names=tuple(operator.name for operator in self.operators),
            module=np.array([operator.module for operator in self.operators], np.int32),
            interval=np.array([operator.interval for operator in self.operators], np.int32),
        )

    def without_objects(self) -> OpTrace:
        """Return the recording without operators, blocks, events and calls: with its facts.

        Those are thousands of objects. A kernel that kept them for every prediction of a panel
        would stop for a third of a second whenever Python looks for garbage among them.
        """
        nothing: dict[str, Any] = {name: [] for name in OBJECTS}
        return replace(self, **nothing)


# Streams of a card while a step is recorded: what runs on which one, and who waits for whom.
#
# The idea. A card runs the operators of one stream in the order in which they were issued,
# and those of different streams beside each other, unless one waits for an event of
# another. What that makes of a step's time is arithmetic (`cost_model/overlap.py`). All that a
# recording needs is the number of the stream of each operator, and the marks, in the order
# in which the host set them:
#
#     host                            what is noted
#     a.record_event() as e           mark: e is recorded on a, after 7 operators
#     b.wait_event(e)                 mark: b waits for e, after 7 operators
#     with stream(b): copy            operator 7 runs on b
#
# Memory belongs to the stream on which it was allocated: the caching allocator uses a freed
# block again for that stream only. Stream 0 is the default one. The classes have the
# methods and numbers of `torch.cuda.Stream` and `torch.cuda.Event` that `fully_shard` uses. Left
# out: priorities, and `Tensor.record_stream`, which no collective calls (since torch 2.8
# ProcessGroupNCCL keeps references instead: `stashed_for_allocator_safety_` in
# ProcessGroupNCCL.hpp).


CUDA = 1  # as c10/core/DeviceType.h numbers it


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

    device_index, device_type = 0, CUDA

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams = streams
        self.number = self.stream_id = number

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
