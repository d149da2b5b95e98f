"""`record_fake`: every allocation and free that a run would make, found without making one.

The run goes over fake tensors: PyTorch's dispatcher, autograd and the model's own Python run as
they do for real, kernels do not. A mode sees every operator that would reach a kernel; a storage
is born in the operator that first returns it and dies when its last reference does. Left out: what
kernels allocate inside themselves, which `calibration` knows, and most values, so that a run which
reads one is told an assumed one, and says so.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.errors import UnsupportedError
from memlab.memory import module_calls
from memlab.memory.faking import (
    accumulates_in_place,
    copied_as_fakes,
    replaced_parameters,
    unnoticed,
    uses_of_own_gradient,
)
from memlab.memory.operators import Signature, TensorSpec, signature_of
from memlab.memory.recording import Block, Call, Event, Operator, Recording
from memlab.memory.repeats import Repeats
from memlab.memory.values import MOST_ELEMENTS, Values, for_real
from memlab.techniques.blocks import find_blocks
from memlab.techniques.deferred import OneMode
from memlab.techniques.offloading import copy_on
from memlab.techniques.optimizers import states_of
from memlab.techniques.recompute import recomputed
from memlab.trace import Interval, Phase, Place

aten = torch.ops.aten
# what they return depends on more than their signatures
NEVER_REPEATED = frozenset(
    (aten.add.Tensor, aten.index.Tensor, aten._to_copy.default, aten.all.default, aten.all.dim)
)
COPIES = frozenset((aten.copy_.default, aten._to_copy.default))
NO_OPERATORS = ("prim", "profiler")  # questions about a tensor, annotations


class _Death(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows which block it is."""

    __slots__ = ("block", "key")
    block: int
    key: int


class Tracker(TorchDispatchMode):
    """Sees every operator of a fake run; told of phases and modules like a `Meter`."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.device_type = device_type
        self._live: dict[int, _Death] = {}
        self._calls: list[Call] = []
        self._forward_of_sequence: dict[int, int] = {}
        self._notes_arguments = False
        self.values = Values()
        self.repeats = Repeats(device_type)
        self._checks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def mark(self, step: int, phase: Phase, micro_batch: int) -> None:
        """Begin an interval: what is allocated from now on belongs to it."""
        interval = Interval(step=step, phase=phase, micro_batch=micro_batch)
        self.recording.intervals.append(interval)
        self._notes_arguments = phase in (Phase.FORWARD, Phase.BACKWARD)

    def know(self, model: torch.nn.Module) -> None:
        """Remember which blocks are the model's parameters, its repeated and recomputed modules."""
        self.recording.root = type(model).__name__
        self.recording.repeated = tuple(find_blocks(model))
        self.recording.recomputed = recomputed(model)
        for path, parameter in model.named_parameters():
            if (block := self.block_of(parameter)) is not None:
                self.recording.parameters.setdefault(block, path)

    def know_states(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remember which blocks are the optimizer's state, and of which parameter."""
        for path, state in states_of(model, optimizer):
            if (block := self.block_of(state)) is not None:
                self.recording.states.setdefault(block, path)

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Return the block that holds a tensor, None if it was not born in this run."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return None if known is None else known.block

    def place(self) -> Place:
        """Return where the run is now."""
        interval = self.recording.intervals[-1]
        paths = list(self.recording.modules)
        module = paths[self._calls[-1].module] if self._calls else ""
        return Place(phase=interval.phase, micro_batch=interval.micro_batch, module=module)

    @contextlib.contextmanager
    def modules(self, model: torch.nn.Module) -> Iterator[None]:
        """Record which module is at work, by hooks on forward calls."""
        index = self.recording.modules

        def begin(path: str) -> None:
            here = len(self.recording.operators)
            self._calls.append(Call(index.setdefault(path, len(index)), here, here))
            self.recording.calls.append(self._calls[-1])

        def end() -> None:
            self._calls.pop().end = len(self.recording.operators)

        with module_calls.told(model, begin, end):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on fake tensors and note what it brought into being."""
        kwargs = kwargs or {}
        if func.namespace in NO_OPERATORS:
            return func(*args, **kwargs)
        signature = None if _is_view(func) else signature_of(func, args, kwargs)
        again = self.repeats.outputs_of(signature, args, kwargs, self.values)
        if again is not None:
            self._note(func, signature, args, again)
            return again
        out = self._run(func, args, kwargs)
        if any(tensor.layout is not torch.strided for tensor in _tensors(out)):
            raise UnsupportedError(
                f"{self.place()}: {func} returns a sparse tensor, whose bytes a prediction does "
                "not know: how many elements it has depends on values; use dense gradients "
                "(nn.Embedding and nn.EmbeddingBag with sparse=False), or memlab.measure"
            )
        real = self._real(func, args, kwargs, out)
        if signature is not None and real is None and func not in NEVER_REPEATED:
            self.repeats.learn(signature, func, args, kwargs, out)
        if real is not None:
            for fake, value in zip(_tensors(out), _tensors(real), strict=True):
                self.values.learn(fake, value)
        elif func._schema.name == "aten::all":
            self._checks[id(out)] = out
        if func is aten.add.Tensor and out is args[0]:
            func = aten.add_.Tensor
            signature = signature_of(func, args, kwargs)
        self._note(func, signature, args, out)
        return out

    def _real(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Return what the operator gives on values, None if they are not known or many."""
        if any(tensor.numel() > MOST_ELEMENTS for tensor in _tensors(out)):
            self.values.forget_written(func, args, kwargs)
            return None
        return self.values.run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the operator's fake output."""
        try:
            if func is aten.add.Tensor and accumulates_in_place(args):
                return aten.add_.Tensor(*args)
            if func is aten.index.Tensor and any(_is_mask(index) for index in args[1]):
                return self._select(args)
            if func is aten._to_copy.default and kwargs.get("device") is not None:
                args[0].constant = None  # a real value cannot follow to a fake device
            return func(*args, **kwargs)
        except DataDependentOutputException as error:
            return self._value(func, args, self.values.run(func, args, kwargs), error)
        except DynamicOutputShapeException:
            real = self.values.run(func, args, kwargs)
            if isinstance(real, torch.Tensor):
                return args[0].new_empty(real.shape, dtype=real.dtype)
            return self._largest(func, args)
        except UnsupportedOperatorException as error:
            raise UnsupportedError(
                f"{self.place()}: operator {func} has no fake kernel, so that its outputs cannot "
                "be known without running it; register one with torch.library.register_fake"
            ) from error

    def _note(self, func: Any, signature: Signature | None, args: Any, out: Any) -> None:
        if func is aten.detach.default:  # no meter counts it: a recompute calls it inside others
            return
        recording = self.recording
        number = len(recording.operators)
        interval = len(recording.intervals) - 1
        module, forward = self._origin(number)
        operator = Operator(_profiler_name(func), signature, (), module, interval, forward=forward)
        recording.operators.append(operator)
        if signature is None and func is not aten.lift_fresh.default:  # what torch.tensor makes
            return
        if self._notes_arguments:
            operator.reads = self._blocks_in(args)
            operator.writes = self._blocks_in([args[i] for i in _written(func) if i < len(args)])
        tensors = _tensors(out)
        operator.crosses = func in COPIES and len({t.device for t in _tensors([out, *args])}) > 1
        operator.beside = operator.crosses and _is_called_by(copy_on)
        operator.outputs = tuple([TensorSpec(t.dtype, tuple(t.shape), t.stride()) for t in tensors])
        for index, tensor in enumerate(tensors):
            if tensor.device.type != self.device_type:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self._live.get(key)
            if known is not None:
                if storage.nbytes() == recording.blocks[known.block].nbytes:
                    continue
                self._died(known)  # it was resized
            block = len(recording.blocks)
            recording.blocks.append(Block(number, index, storage.nbytes()))
            recording.events.append(Event(block, True, number, interval))
            death = _Death(storage, self._died)
            death.block, death.key = block, key
            self._live[key] = death

    def _died(self, death: _Death) -> None:
        if self._live.get(death.key) is not death:
            return
        del self._live[death.key]
        recording = self.recording
        recording.events.append(
            Event(death.block, False, len(recording.operators) - 1, len(recording.intervals) - 1)
        )

    def _blocks_in(self, args: Any) -> tuple[int, ...]:
        blocks = (self.block_of(tensor) for tensor in _tensors(args))
        return tuple([block for block in blocks if block is not None])

    def _origin(self, number: int) -> tuple[int, int]:
        """Return the module at work, and of a backward operator the forward one.

        Outside of modules a backward operator belongs to the module of the forward one.
        """
        here = self._calls[-1].module if self._calls else -1
        node = torch._C._current_autograd_node()
        if node is None:
            # autograd has numbered this operator already, if it has a gradient
            sequence = torch._C._autograd._get_sequence_nr() - 1
            self._forward_of_sequence.setdefault(sequence, number)
            return here, -1
        forward = self._forward_of_sequence.get(node._sequence_nr(), -1)
        if here < 0 <= forward:
            here = self.recording.operators[forward].module
        return here, forward

    def _value(self, func: Any, args: Any, real: Any, error: Exception) -> Any:
        """Return the value that the run reads, an assumed one where it is not known."""
        if real is not None:
            return real
        if func in (aten.allclose.default, aten.equal.default):
            return True
        if func is not aten._local_scalar_dense.default:
            raise self._unknown(func, "depends on values") from error
        origin, line = _caller()
        dtype = args[0].dtype
        is_flag = dtype is torch.bool
        # a check that all is well, and else no special case; no overflow
        value: Any = id(args[0]) in self._checks if is_flag else int(origin[:9] != "torch.amp")
        value = float(value) if dtype.is_floating_point else value
        if not origin.startswith(("torch.", "memlab.")):  # their own: a loss, a scale, a NaN check
            self._assume(f"{line} reads a value", f"assumed {value!r}")
            self.recording.branched |= not dtype.is_floating_point
        return value

    def _largest(self, func: Any, args: Any) -> Any:
        """Return the largest output that an operator whose shape depends on values can have."""
        does = f"{_caller()[1]} calls {func}, whose shape depends on values"
        if func is aten.nonzero.default:
            self._assume(does, "assumed that no element is zero")
            self.recording.branched = True
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is aten.masked_select.default:
            self._assume(does, "assumed that the mask is full")
            self.recording.branched = True
            return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
        if func is aten._pack_padded_sequence.default:
            data, lengths, batch_first = args
            steps, samples = data.shape[int(batch_first)], data.shape[1 - int(batch_first)]
            counts = self.values.of(lengths)
            with for_real():  # an RNN's kernel reads how many sequences each time step has
                if counts is None:
                    counts = torch.full((samples,), steps)
                    self._assume(does, "assumed that every sequence is of full length")
                batch_sizes = (counts[:, None] > torch.arange(int(counts.max()))).sum(0)
                rows = int(counts.sum())
            return data.new_empty((rows, *data.shape[2:])), batch_sizes
        raise self._unknown(func, "has a shape that depends on values")

    def _select(self, args: Any) -> Any:
        """Return what a mask selects, all where the mask is not known."""
        if any(_is_mask(index) and self.values.of(index) is None for index in args[1]):
            self._assume(f"{_caller()[1]} selects by a mask", "assumed that the mask is full")
            self.recording.branched = True
        return aten.index.Tensor(args[0], [t for index in args[1] for t in self._as_indices(index)])

    def _as_indices(self, index: Any) -> list[Any]:
        if not _is_mask(index):
            return [index]
        known = self.values.sum_of(index)
        count = index.numel() if known is None else known
        return [index.new_empty(count, dtype=torch.int64)] * index.dim()

    def _unknown(self, func: Any, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.place()}: {func} {why}, which a prediction does not have; use memlab.measure"
        )

    def _assume(self, what: str, assumed: str) -> None:
        module = self.place().module
        said = f"{module or self.recording.intervals[-1].phase}: {what}; {assumed}."
        if said not in self.recording.assumptions:
            self.recording.assumptions.append(said)


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype is torch.bool


def _caller() -> tuple[str, str]:
    """Return the module and the line of code that asked for a value, outside of torch's core."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        core = ("torch._", "torch.utils", __name__)
        if not name.startswith(core) or name.startswith("torch.optim"):
            return name, f"line {frame.f_lineno} of {name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "", "a line"


def _is_called_by(function: Callable[..., Any]) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def _tensors(out: Any) -> list[Any]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, tuple | list):
        return [t for item in out for t in _tensors(item)]
    return []


@functools.cache
def _is_view(func: Any) -> bool:
    """Return whether an operator only looks at memory in another way, so that no kernel runs."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


@functools.cache
def _written(func: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator changes in place."""
    return tuple(
        position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def _profiler_name(func: Any) -> str:
    return str(func._schema.name)


def record_fake(run: Callable[[FakeTensorMode], None], tracker: Tracker) -> Recording:
    """Call `run` over fake tensors and return what it would do; `run` drops everything it makes."""
    mode = OneMode(allow_non_fake_inputs=True)
    uses_of_own_gradient()
    gc.freeze()  # what stands need not be walked through again to free what the run leaves behind
    try:
        with unnoticed(), copied_as_fakes(), replaced_parameters(mode), mode, tracker:
            run(mode)
            gc.collect()
    finally:
        gc.unfreeze()
    return tracker.recording
