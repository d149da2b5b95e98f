"""`record`: every allocation of a run as the real allocator reports it, on a CPU or a CUDA card.

Both allocators report each block to PyTorch's profiler. One profile is opened before the model is
built and closed after model, optimizer and batch are deleted. Allocations and frees are matched by
address. A free of a block that was allocated before the profile is ignored, because a profile can
report a stale size for it. The workspace of kernels is counted. On CUDA, sizes are rounded as by
its caching allocator. Not seen: memory that libraries allocate without the allocator (MKL, code
that Inductor generates), and what a model does on threads of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules import module as nn_module
from torch.profiler import ProfilerActivity, profile, record_function

from memlab._util.torch_private.tensors import (
    EventType,
    OpOverloadPacket,
    has_kernel_for,
    is_registered,
    parts_of,
)
from memlab.memory.garbage import older_objects_frozen
from memlab.techniques.loss.logits import logits_of
from memlab.techniques.sharding.ranks import local
from memlab.trace import Interval, Phase, Place, Trace

if TYPE_CHECKING:
    import numpy.typing as npt

# Report which module is running, by hooks on forward calls; not for compiled models.


@contextlib.contextmanager
def reported(
    model: torch.nn.Module, begin: Callable[[str], None], end: Callable[[], None]
) -> Iterator[None]:
    """Call `begin` with a module's path before each of its forward calls, and `end` after it.

    Modules of other models are ignored. The path of the model itself is the name of its class.
    """
    paths = {module: path or name_of_class(module) for path, module in model.named_modules()}

    # a part that a person has compiled would be cut at each hook
    def enter(module: torch.nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and module in paths:
            begin(paths[module])

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        if not torch.compiler.is_compiling() and module in paths:
            end()

    # global hooks leave the modules of the model themselves unchanged
    hooks = (
        nn_module.register_module_forward_pre_hook(enter),
        nn_module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def name_of_class(model: torch.nn.Module) -> str:
    """Return the name of a model's class; `fully_shard` puts one of its own before it."""
    kind, fsdp = type(model), sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and kind.__bases__[0] is fsdp.FSDPModule:
        kind = kind.__bases__[-1]
    return kind.__name__


MARK, MODULE = "memlab.mark:", "memlab.module:"
OUTSIDE = Interval(step=-1, phase=Phase.BUILD)


@dataclass(slots=True, eq=False)
class Meter:
    """What a run reports about itself while it is recorded.

    Attributes:
        intervals: the intervals begun so far, in order.
        parameters: the path of each parameter by the address of its storage; known once the model
            is built.
        states: for the address of a tensor of optimizer state, the path of its parameter.
        logits: over how many words or classes the last layer decides, as `logits_of` says.
    """

    intervals: list[Interval] = field(default_factory=lambda: [OUTSIDE])
    parameters: dict[int, str] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    logits: tuple[int, str] = (0, "")
    _paths: dict[int, str] = field(default_factory=dict)  # by id: it keeps no module alive

    def mark(self, step: int, phase: Phase, micro_batch: int) -> None:
        """Begin an interval: everything that is allocated from now on belongs to it."""
        with record_function(f"{MARK}{len(self.intervals)}"):
            self.intervals.append(Interval(step=step, phase=phase, micro_batch=micro_batch))

    def know(self, model: torch.nn.Module) -> None:
        """Remember which storages are parameters. A tied parameter goes by its first path."""
        self.parameters, self.logits = {}, logits_of(model)
        for path, parameter in model.named_parameters():
            for part in parts_of(local(parameter)):
                self.parameters.setdefault(_address(part), path)

    def know_states(
        self, model: torch.nn.Module, states: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Remember which storages hold optimizer state; call it once an update has made them.

        Args:
            model: whose parameters they belong to.
            states: with the path of the parameter of each, as `states_of` yields them.
        """
        self.states = {_address(part): path for path, state in states for part in parts_of(state)}
        # in the first forward `fully_shard` copies parts that are smaller than those of other ranks
        if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            self.know(model)

    def place_of(self, error: BaseException) -> Place:
        """Return where the run is, with the innermost module that raised this error."""
        module, trace = "", error.__traceback__
        while trace is not None:
            module = self._paths.get(id(trace.tb_frame.f_locals.get("self")), module)
            trace = trace.tb_next
        now = self.intervals[-1]
        return Place(phase=now.phase, micro_batch=now.micro_batch, module=module)

    @contextmanager
    def modules(self, model: torch.nn.Module) -> Iterator[None]:
        """Record which module is running, by hooks on forward calls; not for compiled models."""
        self._paths = {
            id(module): path or name_of_class(module) for path, module in model.named_modules()
        }
        stack: list[Any] = []

        def begin(path: str) -> None:
            stack.append(record_function(f"{MODULE}{path}"))
            stack[-1].__enter__()

        with reported(model, begin, lambda: stack.pop().__exit__(None, None, None)):
            yield


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def record(run: Callable[[], None], meter: Meter, device: torch.device) -> Trace:
    """Call `run` and return every allocation on the device while it ran.

    `run` builds the model, runs its steps and drops everything before it returns. Meanwhile it
    calls the meter. If it raises, the profile is closed and the exception is passed on.
    """
    gc.collect()
    with warnings.catch_warnings():
        # torch 2.11 warns that a profile of several cycles would keep only the last one
        warnings.filterwarnings("ignore", message="Profiler clears events")
        prof: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    with older_objects_frozen(), prof:
        run()
        gc.collect()

    return _trace(prof.profiler.kineto_results.experimental_event_tree(), meter, device)


def _trace(roots: list[Any], meter: Meter, device: torch.device) -> Trace:
    """Return the trace that the profiler's event tree holds."""
    seen = _walk(roots, device)
    allocations, leftover = _matched(seen.allocations)
    time, address, nbytes, inside, module, sequence = _columns(allocations, 6)
    mark_time, mark_index = _columns(sorted(seen.marks), 2)
    starts = np.array([start for start, _ in seen.operators], np.int64)
    order = np.argsort(starts, kind="stable")  # backward runs on a thread of its own on CUDA
    rank = np.empty(len(order) + 1, np.int64)
    rank[order], rank[-1] = np.arange(1, len(order) + 1), 0
    by_sequence = np.array(
        [seen.module_of_sequence.get(s, -1) for s in sequence.tolist()], np.int64
    )
    before = np.searchsorted(starts[order], time, "right")
    interval = np.concatenate([[0], mark_index])[np.searchsorted(mark_time, time, "right")]

    return Trace(
        address=address,
        nbytes=nbytes,
        interval=interval.astype(np.int32),
        operator=np.where(inside >= 0, rank[inside], before).astype(np.int32),
        in_operator=inside >= 0,
        module=np.where(module >= 0, module, by_sequence).astype(np.int32),
        intervals=tuple(meter.intervals),
        operators=tuple(seen.operators[i][1] for i in order),
        modules=tuple(seen.modules),
        parameters=meter.parameters,
        leftover_bytes=leftover,
        states=meter.states,
        logits=meter.logits,
    )


Allocation = tuple[int, int, int, int, int, int]


def _matched(allocations: list[Allocation]) -> tuple[list[Allocation], int]:
    """Return the events in order and the bytes that are never freed.

    Each free gets the size of its own block. A free of a block that was allocated before the
    profile was opened is left out.
    """
    live: dict[int, int] = {}
    matched: list[Allocation] = []
    for event in sorted(allocations, key=lambda event: event[0]):
        time, address, nbytes, inside, module, sequence = event
        if nbytes > 0:
            live[address] = nbytes
        elif address in live:
            nbytes = -live.pop(address)
        else:
            continue

        matched.append((time, address, nbytes, inside, module, sequence))

    return matched, sum(live.values())


def _columns(rows: list[Any], count: int) -> list[npt.NDArray[np.int64]]:
    return list(np.array(rows, np.int64).reshape(-1, count).T)


@dataclass(slots=True, eq=False)
class _Seen:
    """What an event tree holds, in the order of the walk.

    Attributes:
        marks: (time, index into the meter's intervals).
        operators: (time, name) of operators that reach a kernel under their name.
        allocations: (time, address, bytes, operator, module, sequence number), -1 for none. A
            backward operator has the sequence number of its forward operator.
        modules: index by path.
        module_of_sequence: index of the module in which a forward operator ran.
    """

    marks: list[tuple[int, int]] = field(default_factory=list)
    operators: list[tuple[int, str]] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    modules: dict[str, int] = field(default_factory=dict)
    module_of_sequence: dict[int, int] = field(default_factory=dict)


def _walk(roots: list[Any], device: torch.device) -> _Seen:
    """Return what the tree holds for this device. Each event is read once, since reads are slow."""
    seen = _Seen()
    todo: list[tuple[Any, int, int, int]] = [(event, -1, -1, -1) for event in reversed(roots)]
    while todo:
        event, inside, module, sequence = todo.pop()
        if event.tag == EventType.Allocation:
            block = event.extra_fields
            if block.device.type == device.type:
                at = (event.start_time_ns, block.ptr, block.alloc_size)
                seen.allocations.append((*at, inside, module, sequence))
            continue

        name = event.name
        if name.startswith(MARK):
            seen.marks.append((event.start_time_ns, int(name.removeprefix(MARK))))
        elif name.startswith(MODULE):
            module = seen.modules.setdefault(name.removeprefix(MODULE), len(seen.modules))
        elif event.tag == EventType.TorchOp:
            # autograd gives an operator and its backward the same number, by which the memory of
            # backward is attributed to a module
            number = event.extra_fields.sequence_number
            if number >= 0:
                sequence = number
                if module >= 0:
                    seen.module_of_sequence[number] = module

            # only the outermost operator counts; those that it calls belong to it
            if inside < 0 and _is_dispatched(name):
                inside = len(seen.operators)
                seen.operators.append((event.start_time_ns, name))

        todo += [(child, inside, module, sequence) for child in reversed(event.children)]

    return seen


@functools.cache
def _is_dispatched(name: str) -> bool:
    """Return whether an operator has a kernel of its own and is not composed of others."""
    namespace, colons, packet_name = name.partition("::")
    if not colons or name == "aten::detach":  # a recompute calls it inside others
        return False

    packet = getattr(getattr(torch.ops, namespace, None), packet_name, None)
    if not isinstance(packet, OpOverloadPacket):
        return False  # autograd's own nodes and annotations

    full_names = [f"{name}.{overload}".removesuffix(".default") for overload in packet.overloads()]
    return not any(
        is_registered(full_name)  # some overloads are TorchScript's alone
        and has_kernel_for(full_name, "CompositeImplicitAutograd")
        for full_name in full_names
    )
