"""`record_fake`: every allocation and free that a step would make, found without making one.

The idea. The step runs over fake tensors: they have a shape and no memory. PyTorch's dispatcher,
autograd and the model's own Python do what they always do; only the kernels are left out. `Tracker`
is a mode of the dispatcher, so it sees each operator that would reach a kernel, and for each tensor
that comes out of one:

- if its storage is new, a block is born in this operator;
- a weak reference to that storage tells when the last tensor that uses it is gone: there the block
  dies.

For `y = torch.relu(x @ w)` over x of (4, 8) and w of (8, 16) in fp32:

    operator        block             event
    aten::mm        0, 256 bytes      born        4 * 16 numbers of 4 bytes
    aten::relu      1, 256 bytes      born
                    0                 dies        here if nothing keeps it: relu saves its output

What comes out is a `Recording`: operators with their signatures, blocks, births and deaths, each
with the module at work and the phase of the step.

Fake tensors have no values. A step that reads some (`if loss > 1`, `mask.nonzero()`) is answered
from what is known (`values.py`), from random numbers drawn for real (`draws.py`), or by an
assumption that the result names (`unknown.py`). Left out: what kernels allocate inside themselves,
which `memlab.costs` knows.
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

from memlab.errors import MemlabError, UnsupportedError
from memlab.meters import module_calls
from memlab.operators.signatures import Signature, TensorSpec, signature_of
from memlab.recording import fake_kernels, real_strides
from memlab.recording.draws import Draws
from memlab.recording.faking import (
    accumulates_in_place,
    copied_as_fakes,
    replaced_parameters,
    unnoticed,
    uses_of_own_gradient,
    written_as,
)
from memlab.recording.number_formats import check_formats
from memlab.recording.packed import lengths_known
from memlab.recording.recording import Block, Event, ModuleCall, Operator, Recording
from memlab.recording.repeats import Repeats
from memlab.recording.saved_numbers import SavedNumbers
from memlab.recording.scripted import is_scripted, noticed_script_functions
from memlab.recording.sparse import MAKES as MAKES_SPARSE
from memlab.recording.sparse import Sparse, are_sparse
from memlab.recording.unknown import Guesses, UnknownValues, is_mask
from memlab.recording.values import PICKS, Values, tensors_in
from memlab.techniques.building.deferred import OneMode
from memlab.techniques.offload.offloading import copy_on
from memlab.techniques.optimizers.optimizers import states_of
from memlab.techniques.recompute.recompute import recomputed
from memlab.techniques.recompute.repeated_blocks import find_blocks
from memlab.trace import Interval, Phase, Place

aten = torch.ops.aten
# what they return depends on more than their signatures
NEVER_REPEATED = frozenset(
    (
        aten.add.Tensor, aten.index.Tensor, aten._to_copy.default, aten.all.default, aten.all.dim,
        aten._is_all_true.default, aten.eq.Tensor, aten.ne.Tensor,
    )
)  # fmt: skip
COPIES = frozenset((aten.copy_.default, aten._to_copy.default))
SCRIPTED = (
    "The model has TorchScript parts, whose executor may free tensors earlier than it does over "
    "fake ones, and on a card may fuse kernels."
)
BESIDE = 1 << 16  # in place of an output's number, for memory that is none
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
        self.device_type = device_type
        self.guesses = Guesses()
        self.draws = Draws()
        self._live: dict[int, _Death] = {}
        self._left: dict[int, weakref.ref[Any]] = {}  # by earlier attempts, in caches of modules
        self.restart()

    def restart(self) -> None:
        """Forget what was seen, for another attempt; what was learned of guesses stays."""
        self.recording = Recording()
        self._left |= self.left()
        self._live = {}
        self._calls: list[ModuleCall] = []
        self._forward_of_sequence: dict[int, int] = {}
        self._notes_arguments = False
        self._is_by_values = False
        self.values = Values()
        self.unknown = UnknownValues(self.values, self.guesses, self._assume, self.place)
        self.repeats = Repeats(self.device_type)
        self.numbers = SavedNumbers(self._born, self._freed)
        self.draws.restart()
        self.guesses.read = []
        self.sparse = Sparse(self.values, self.device_type, self._assume, self.place)

    def left(self) -> dict[int, weakref.ref[Any]]:
        """Return the storages that stand after an attempt: something beside the step holds them."""
        standing = {key: death() for key, death in self._live.items()}
        return {key: weakref.ref(found) for key, found in standing.items() if found is not None}

    def adopt(self, left: dict[int, weakref.ref[Any]]) -> None:
        """Count these, which another tracker has left, as memory once the run uses them."""
        self._left |= left

    def mark(self, step: int, phase: Phase, micro_batch: int) -> None:
        """Begin an interval: what is allocated from now on belongs to it."""
        interval = Interval(step=step, phase=phase, micro_batch=micro_batch)
        if not self.recording.intervals or self.recording.intervals[-1].step != step:
            self.numbers.end_step()
            self.draws.begin_step()
        self.recording.intervals.append(interval)
        self._notes_arguments = phase in (Phase.FORWARD, Phase.BACKWARD)

    def know(self, model: torch.nn.Module) -> None:
        """Remember which blocks are the model's parameters, its repeated and recomputed modules."""
        self.recording.root = type(model).__name__
        self.recording.repeated = tuple(find_blocks(model))
        self.recording.recomputed = recomputed(model)
        if is_scripted(model):
            self.know_of_script()
        for path, parameter in model.named_parameters():
            if (block := self.block_of(parameter)) is not None:
                self.recording.parameters.setdefault(block, path)

    def know_of_script(self) -> None:
        """Remember that TorchScript runs a part of the model."""
        if not self.recording.is_scripted:
            self.recording.is_scripted = True
            self.recording.assumptions.append(SCRIPTED)

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
            self._calls.append(ModuleCall(index.setdefault(path, len(index)), here, here))
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
        if func is MAKES_SPARSE:
            return self.sparse.made(args, kwargs)
        if self.sparse.concerns(func, args):
            with self:  # what is called in its place is seen
                return self.sparse.run(func, args, kwargs)
        signature = None if _is_view(func) else signature_of(func, args, kwargs)
        again = self.repeats.outputs_of(signature, args, kwargs, self.values)
        if again is not None:
            self._is_by_values = False
            self._note(func, signature, args, again)
            return again
        self._is_by_values = False
        out = self._run(func, args, kwargs)
        if are_sparse(out):
            raise self.sparse.refusal(func)
        if signature is not None and self.device_type == "cpu":
            out = real_strides.as_on_cpu(func, signature, out)
        self._learn(func, signature, args, kwargs, out)
        if func is aten.add.Tensor and out is args[0]:
            func = aten.add_.Tensor
            signature = signature_of(func, args, kwargs)
        self._note(func, signature, args, out)
        return out

    def _learn(
        self, func: Any, signature: Signature | None, args: Any, kwargs: Any, out: Any
    ) -> None:
        """Remember what is known, or assumed, of the outputs' values; else their shapes alone."""
        real = self.values.run(func, args, kwargs, out)
        if real is None and torch.Tag.nondeterministic_seeded in func.tags:
            real = self._drawn(func, args, kwargs, out)
        if real is not None:
            is_assumed = self.values.are_assumed(args)
            for fake, value in zip(tensors_in(out), tensors_in(real), strict=True):
                self.values.learn(fake, value, is_assumed=is_assumed)
            return
        assumed = self.values.assumed(func, args, out)
        for place, value in assumed.items():
            self.values.learn(tensors_in(out)[place], value, is_assumed=func in PICKS)
        self.unknown.note_check(func, out)
        if signature is not None and not assumed and not self._is_special(func):
            self.repeats.learn(signature, func, args, kwargs, out)

    def _is_special(self, func: Any) -> bool:
        """Return whether each call of an operator has to be looked at, even if it is repeated."""
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        return func in NEVER_REPEATED or (is_random and self.draws.are_followed)

    def _drawn(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Return what a random operator drew, in a step: None if that is not known."""
        if self.recording.intervals[-1].step < 0:
            return None
        return self.draws.drawn(func, args, kwargs, out, self.values)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the operator's fake output."""
        check_formats(func, args)
        try:
            if func is aten.add.Tensor and accumulates_in_place(args):
                return aten.add_.Tensor(*args)
            if func is aten.index.Tensor and any(is_mask(index) for index in args[1]):
                return self._by_values(self.unknown.select(args))
            if func in fake_kernels.OWN:
                return fake_kernels.OWN[func](*args, **kwargs)
            if func is aten._to_copy.default and kwargs.get("device") is not None:
                args[0].constant = None  # a real value cannot follow to a fake device
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return self.unknown.value(func, args, self.values.run(func, args, kwargs))
        except DynamicOutputShapeException:
            real = self.values.run(func, args, kwargs)
            if real is None:
                return self._by_values(self.unknown.largest(func, args))
            return self._by_values(self.unknown.shaped(args, real))
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
        if self.device_type == "cpu":  # where a number's tensor lies
            self.numbers.move_on(forward)
        operator = Operator(_profiler_name(func), signature, (), module, interval, forward=forward)
        operator.by_values = self._is_by_values
        recording.operators.append(operator)
        if self._left:
            self._adopt_used(args)
        if signature is None and func is not aten.lift_fresh.default:  # what torch.tensor makes
            return
        if self._notes_arguments:
            operator.reads = self._blocks_in(args)
            operator.writes = self._blocks_in([args[i] for i in _written(func) if i < len(args)])
        tensors = tensors_in(out)
        operator.crosses = func in COPIES and len({t.device for t in tensors_in([out, *args])}) > 1
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
            self._hold(storage, self._born(storage.nbytes(), index))
        if self.device_type == "cpu":
            self.numbers.note(number, func, args)

    def _hold(self, storage: Any, block: int) -> None:
        """Free a block once its storage dies."""
        death = _Death(storage, self._died)
        death.block, death.key = block, storage._cdata
        self._live[death.key] = death

    def _adopt_used(self, args: Any) -> None:
        """Begin to count what an earlier attempt has left and the last operator uses."""
        for tensor in tensors_in(args):
            storage = tensor.untyped_storage()
            reference = self._left.pop(storage._cdata, None)
            if reference is not None and reference() is storage:
                self._hold(storage, self._born(storage.nbytes()))

    def _born(self, nbytes: int, output: int = BESIDE) -> int:
        """Note memory that the last operator brings into being, as an output or beside them."""
        recording = self.recording
        number, block = len(recording.operators) - 1, len(recording.blocks)
        recording.blocks.append(Block(number, output, nbytes))
        recording.events.append(Event(block, True, number, len(recording.intervals) - 1))
        return block

    def _freed(self, block: int) -> None:
        """Note that memory is freed after the last operator."""
        recording = self.recording
        recording.events.append(
            Event(block, False, len(recording.operators) - 1, len(recording.intervals) - 1)
        )

    def _died(self, death: _Death) -> None:
        if self._live.get(death.key) is death:
            del self._live[death.key]
            self._freed(death.block)

    def _blocks_in(self, args: Any) -> tuple[int, ...]:
        blocks = (self.block_of(tensor) for tensor in tensors_in(args))
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

    def _by_values(self, out: Any) -> Any:
        """Remember that the operator at work returns as much as values say."""
        self._is_by_values = True
        return out

    def _assume(self, what: str, assumed: str, doubt: str) -> None:
        if doubt != "spread":
            self.draws.note_assumed()
        self.recording.branched |= doubt == "branch"
        self.recording.spread |= doubt == "spread"
        module = self.place().module
        said = f"{module or self.recording.intervals[-1].phase}: {what}; {assumed}."
        if said not in self.recording.assumptions:
            self.recording.assumptions.append(said)


def _is_called_by(function: Callable[..., Any]) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


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
    """Call `run` over fake tensors and return what it would do; `run` drops everything it makes.

    Where random numbers may have decided a value that was assumed, it is called again with these;
    where a check of the model's own fails by such a value, with another value.
    """
    first_error: Exception | None = None
    while True:
        try:
            recording = _attempt(run, tracker)
            if not tracker.draws.turn():
                return recording
        except MemlabError:
            if not tracker.draws.turn():
                raise
        except Exception as error:  # whatever a check raises
            if not tracker.draws.turn():
                first_error = first_error or error
                if not tracker.guesses.turn(len(tracker.recording.operators)):
                    raise first_error from None
        tracker.restart()


def _attempt(run: Callable[[FakeTensorMode], None], tracker: Tracker) -> Recording:
    mode = OneMode(allow_non_fake_inputs=True)
    uses_of_own_gradient()
    gc.freeze()  # what stands need not be walked through again to free what the run leaves behind
    try:
        written = written_as(tracker.unknown.text)
        missing = fake_kernels.missing_ones_run_on_cpu()
        replaced = replaced_parameters(mode)
        known = lengths_known(tracker.values)
        scripted = noticed_script_functions(tracker.know_of_script)
        fakes = unnoticed(), copied_as_fakes(), replaced, written, missing, known, scripted
        with contextlib.ExitStack() as stack:
            for context in (*fakes, mode, tracker):
                stack.enter_context(context)
            run(mode)
            gc.collect()
        tracker.recording.is_ragged |= tracker.sparse.has_sums
    finally:
        gc.unfreeze()
    return tracker.recording
