"""`record`: every allocation of a run as the real allocator reports it, on a CPU or a CUDA card.

Both allocators report each block to PyTorch's profiler. One profile is opened before the model is
built and closed after model, optimizer and batch are gone; events are matched by address, and a
free of a block that was not allocated inside is ignored, since a profile can report stale sizes for
it. Kernel workspace counts. What libraries allocate behind the allocator's back is not seen (MKL,
code that Inductor generates). On CUDA sizes are as its caching allocator rounds them.
"""

import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._C._profiler import _EventType
from torch.nn.modules import module as nn_module
from torch.profiler import ProfilerActivity, profile, record_function

from memlab.trace import Interval, Phase, Place, Trace

MARK, MODULE = "memlab.mark:", "memlab.module:"
OUTSIDE = Interval(step=-1, phase=Phase.BUILD)


@dataclass(slots=True, eq=False)
class Meter:
    """What a run tells about itself while it is recorded.

    Attributes:
        intervals: begun so far, in order.
        failed_in: path of the innermost module that an exception left, or "".
        parameters: addresses of the parameters' storages, told once the model is built.
    """

    intervals: list[Interval] = field(default_factory=lambda: [OUTSIDE])
    failed_in: str = ""
    parameters: frozenset[int] = frozenset()
    _error_id: int = 0  # an id, since the error itself would keep its frames' tensors alive

    def mark(self, step: int, phase: Phase, micro_batch: int) -> None:
        """Begin an interval: what is allocated from now on belongs to it."""
        with record_function(f"{MARK}{len(self.intervals)}"):
            self.intervals.append(Interval(step=step, phase=phase, micro_batch=micro_batch))

    def know(self, model: torch.nn.Module) -> None:
        """Remember which storages are the model's parameters."""
        self.parameters = frozenset(p.untyped_storage().data_ptr() for p in model.parameters())

    @property
    def place(self) -> Place:
        """Where the run is, or where it failed."""
        now = self.intervals[-1]
        return Place(phase=now.phase, micro_batch=now.micro_batch, module=self.failed_in)

    @contextmanager
    def modules(self, model: torch.nn.Module) -> Iterator[None]:
        """Record which module is at work, by hooks on forward calls; not for compiled models."""
        paths = {module: path or type(module).__name__ for path, module in model.named_modules()}
        stack: list[Any] = []

        def enter(module: torch.nn.Module, _: Any) -> None:
            if module in paths:
                stack.append(record_function(f"{MODULE}{paths[module]}"))
                stack[-1].__enter__()

        def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
            if module in paths:
                stack.pop().__exit__(None, None, None)
                error = sys.exc_info()[1]
                if error is not None and id(error) != self._error_id:
                    self._error_id, self.failed_in = id(error), paths[module]

        hooks = (
            nn_module.register_module_forward_pre_hook(enter),
            nn_module.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def record(run: Callable[[], None], meter: Meter, device: torch.device) -> Trace:
    """Call `run` and return every allocation on the device while it ran.

    `run` builds the model, runs its steps and drops everything before it returns, and tells the
    meter as it goes. An exception leaves through here after the profile is closed.
    """
    gc.collect()
    with warnings.catch_warnings():
        # torch 2.11 warns that a profile of several cycles would keep only the last one
        warnings.filterwarnings("ignore", message="Profiler clears events")
        prof: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with prof:
        run()
        gc.collect()
    return _trace(prof.profiler.kineto_results.experimental_event_tree(), meter, device)


def _trace(roots: list[Any], meter: Meter, device: torch.device) -> Trace:
    """Return the trace that the profiler's event tree holds."""
    marks, operators, allocations, module_of_sequence = _walk(roots, device)
    allocations.sort(key=lambda a: a[0].start_time_ns)
    operators.sort(key=lambda event: event.start_time_ns)
    order = {event.id: i + 1 for i, event in enumerate(operators)}
    operator_starts = np.array([event.start_time_ns for event in operators], np.int64)
    marks.sort()
    mark_times = np.array([time for time, _ in marks], np.int64)
    modules: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, bool, int]] = []
    live: dict[int, int] = {}
    for event, inside, module, sequence in allocations:
        address, nbytes = event.extra_fields.ptr, event.extra_fields.alloc_size
        if nbytes > 0:
            live[address] = nbytes
        elif address in live:
            nbytes = -live.pop(address)
        else:
            continue  # allocated before the profile was opened
        time = event.start_time_ns
        interval = int(np.searchsorted(mark_times, time, "right"))
        count = order.get(inside.id) if inside else None
        name = module or module_of_sequence.get(sequence, "")
        index = modules.setdefault(name, len(modules)) if name else -1
        seen = int(np.searchsorted(operator_starts, time, "right"))
        rows.append((address, nbytes, interval, count or seen, count is not None, index))
    columns = list(zip(*rows, strict=True)) or [()] * 6
    return Trace(
        address=np.array(columns[0], np.int64),
        nbytes=np.array(columns[1], np.int64),
        interval=np.array(columns[2], np.int32),
        operator=np.array(columns[3], np.int32),
        in_operator=np.array(columns[4], np.bool_),
        module=np.array(columns[5], np.int32),
        intervals=tuple(meter.intervals),
        operators=tuple(event.name for event in operators),
        modules=tuple(modules),
        parameters=meter.parameters,
        leftover_bytes=sum(live.values()),
    )


def _walk(
    roots: list[Any], device: torch.device
) -> tuple[list[tuple[int, int]], list[Any], list[tuple[Any, Any, str, int]], dict[int, str]]:
    """Return marks (time, index), operators, allocations and modules by sequence number.

    An allocation comes with the operator and the module that it happened in, and the sequence
    number that a backward operator shares with its forward one.
    """
    marks: list[tuple[int, int]] = []
    operators: list[Any] = []
    module_of_sequence: dict[int, str] = {}
    allocations: list[tuple[Any, Any, str, int]] = []
    todo: list[tuple[Any, Any, str, int]] = [(event, None, "", -1) for event in reversed(roots)]
    while todo:
        event, inside, module, sequence = todo.pop()
        if event.tag == _EventType.Allocation:
            if event.extra_fields.device.type == device.type:
                allocations.append((event, inside, module, sequence))
            continue
        name = event.name
        if name.startswith(MARK):
            marks.append((event.start_time_ns, int(name.removeprefix(MARK))))
        elif name.startswith(MODULE):
            module = name.removeprefix(MODULE)
        elif event.tag == _EventType.TorchOp:
            if event.extra_fields.sequence_number >= 0:
                sequence = event.extra_fields.sequence_number
                if module:
                    module_of_sequence[sequence] = module
            if inside is None and "::" in name and _is_dispatched(name):
                inside = event
                operators.append(event)
        todo += [(child, inside, module, sequence) for child in reversed(event.children)]
    return marks, operators, allocations, module_of_sequence


@functools.cache
def _is_dispatched(name: str) -> bool:
    """Return whether an operator reaches a kernel under this name, and is not made of others."""
    namespace, _, packet_name = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), packet_name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False  # autograd's own nodes and annotations
    full_names = [f"{name}.{overload}".removesuffix(".default") for overload in packet.overloads()]
    return not any(
        torch._C._dispatch_has_kernel(full_name)  # some overloads are TorchScript's alone
        and torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CompositeImplicitAutograd")
        for full_name in full_names
    )
