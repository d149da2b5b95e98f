"""`record_fake`: every allocation and free that a step would make, found without making one.

The idea. The step runs over fake tensors: they have a shape and no memory. PyTorch's dispatcher,
autograd and the model's own Python do what they always do; only the kernels are left out. `Tracker`
is a mode of the dispatcher, so it sees each operator that would reach a kernel. It gives the
operator's outputs (`fake_outputs.py`), notes which memory is born and dies (`LiveBlocks`), and
with both where the step is. What comes out is a `OpTrace`.

For `y = torch.relu(fc(x))` of a model whose `fc` is a linear layer without bias:

    what the run does                 what is noted
    mark(0, FORWARD, 0)               an interval begins
    calls the module `fc`             a call of `fc` begins with operator 0
    aten::t over the weight           operator 0: a view, so no signature and no block
    aten::mm                          operator 1, in `fc`; block 0 is born
    leaves `fc`                       the call ends before operator 2
    aten::relu                        operator 2, in the model; block 1 is born, block 0 dies

Left out: what kernels allocate inside themselves, which `memlab.cost_model` knows.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab._util.torch_private.compiler import DYNAMO, compiled_calls_noted
from memlab._util.torch_private.ranks import group_in
from memlab._util.torch_private.tensors import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    UnguardedMode,
    current_node,
    is_composed,
    is_wrapper,
    next_sequence_number,
    parts_of,
    schema_of,
    sequence_number_of,
    storage_key,
)
from memlab.devices.operators import NAMESPACES, Signature, TensorSpec, signature_of
from memlab.errors import MemlabError, UnsupportedError
from memlab.memory import meter
from memlab.memory.garbage import older_objects_frozen
from memlab.techniques.checkpointing.blocks import find_blocks
from memlab.techniques.checkpointing.recompute import recomputed
from memlab.techniques.deferred import OneMode
from memlab.techniques.loss.logits import logits_of
from memlab.techniques.offload.offloading import copy_on
from memlab.techniques.optimizers.optimizers import states_of
from memlab.techniques.sharding.ranks import local
from memlab.trace import Interval, Phase, Place
from memlab.tracing import fake_outputs, triton_launches
from memlab.tracing.assembly import LiveBlocks
from memlab.tracing.attention_kernels import AttentionCall, noted_by
from memlab.tracing.bitsandbytes_layers import kernel_of, unquantized_notes
from memlab.tracing.data_dependent import Draws, Guesses, lengths_known
from memlab.tracing.fake_outputs import FakeOutputs
from memlab.tracing.fakify import is_scripted, noticed_script_functions
from memlab.tracing.faking import MAKES as MAKES_SPARSE
from memlab.tracing.faking import (
    SavedNumbers,
    as_for_real,
    copied_as_fakes,
    read_as,
    replaced_parameters,
    unnoticed,
    uses_of_own_gradient,
)
from memlab.tracing.recording import (
    CompiledCall,
    ModuleCall,
    Operator,
    OpTrace,
    StreamEvent,
    Streams,
)
from memlab.tracing.values import tensors_in

# Where a collective of a recorded step runs on a card, among which ranks, and who waits for
# it.
#
# A collective that the host waits for (`async_op=False`) runs on the current stream. Any
# other runs on a stream of its process group, which first waits for the current stream
# (`collective` in ProcessGroupNCCL.cpp). Functions of `torch.distributed` that return at
# once are of the second kind, and so is all that DistributedDataParallel asks for in C++.
#
# How a step waits for these cannot be seen in general: it may be in C++. But it must wait
# before it uses the tensors again. So the first operator that is given one of them waits,
# on its stream, and whatever is left when the update is over is waited for then.

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


aten = torch.ops.aten
COPIES = frozenset((aten.copy_.default, aten._to_copy.default))
SCRIPTED = (
    "The model has TorchScript parts, whose executor may free tensors earlier than it does over "
    "fake ones, and on a card may fuse kernels."
)
DEVICE_OF = torch.ops.prim.device.default
NO_OPERATORS = ("prim", "profiler")  # questions about a tensor, annotations
OPERATORS_A_BEAT = 500  # a tenth of a second or more


class Tracker(UnguardedMode):
    """Sees every operator of a fake run; phases and modules are marked as for a `Meter`.

    Attributes:
        beat: called now and then while it sees operators, or while they are compiled, with what is
            being done then or ""; what it raises ends the run.
        lets_compile: whether `torch.compile` compiles what it is given; else that runs as written.
    """

    lets_compile = False

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.beat: Callable[[str], None] = lambda doing: None
        self.guesses = Guesses()
        self.draws = Draws()
        self.streams = Streams()
        self.collectives = Collectives(self.streams)
        self.blocks = LiveBlocks(device_type, self.streams)
        self.restart()

    def restart(self) -> None:
        """Forget what was seen, for another attempt; what was learned of guesses stays."""
        self.recording = OpTrace()
        self.blocks.restart(self.recording)
        operators = self.recording.operators
        self.streams.restart(self.recording.marks.append, operators.__len__)
        self.collectives.restart()
        self._calls: list[ModuleCall] = []
        self._compiled: list[CompiledCall] = []  # those that run now
        self.restoring = contextlib.ExitStack()  # what is replaced during this attempt
        self._notes_compiled = False
        self._forward_of_sequence: dict[int, int] = {}
        self._notes_arguments = False
        self.outputs = FakeOutputs(
            self.device_type, self.recording, self.draws, self.guesses, self._assume, self.place
        )
        self.numbers = SavedNumbers(self.blocks.born, self.blocks.freed)
        self.draws.restart()
        self.guesses.read = []

    def mark(self, step: int, phase: Phase, micro_batch: int) -> None:
        """Begin an interval: what is allocated from now on belongs to it."""
        triton_launches.look()
        if DYNAMO in sys.modules and not self._notes_compiled and not self.lets_compile:
            self._notes_compiled = True
            noted = compiled_calls_noted(self._begin_compiled, self._end_compiled)
            self.restoring.enter_context(noted)
        interval = Interval(step=step, phase=phase, micro_batch=micro_batch)
        if not self.recording.intervals or self.recording.intervals[-1].step != step:
            self.numbers.end_step()
            self.collectives.wait_for_all()
            self.draws.begin_step()
        self.recording.intervals.append(interval)
        self._notes_arguments = phase in (Phase.FORWARD, Phase.BACKWARD)

    def _begin_compiled(self, name: str) -> None:
        here = len(self.recording.operators)
        self._compiled.append(CompiledCall(name, here, here))
        self.recording.compiled.append(self._compiled[-1])

    def _end_compiled(self) -> None:
        self._compiled.pop().end = len(self.recording.operators)

    def know(self, model: torch.nn.Module, with_loss: torch.nn.Module) -> None:
        """Remember which blocks are parameters, of the model and its loss, and the model's modules.

        Of its modules those that are repeated and recomputed.
        """
        self.recording.root = meter.name_of_class(model)
        self.recording.repeated = tuple(find_blocks(model))
        self.recording.recomputed = recomputed(model)
        self.recording.logits = logits_of(model)
        self.recording.notes += unquantized_notes(model)
        if is_scripted(model):
            self.know_of_script()
        self._know_parameters(with_loss)

    def _know_parameters(self, model: torch.nn.Module) -> None:
        with torch.no_grad():  # a part of a parameter is then no operator's output
            weights = [
                (path, part)
                for path, weight in model.named_parameters()
                for part in parts_of(local(weight))
            ]
        for path, weight in weights:
            if (block := self.blocks.block_of(weight)) is not None:
                self.recording.parameters.setdefault(block, path)

    def know_of_script(self) -> None:
        """Remember that TorchScript runs a part of the model."""
        if not self.recording.is_scripted:
            self.recording.is_scripted = True
            self.recording.assumptions.append(SCRIPTED)

    def know_states(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remember which blocks are the optimizer's state, and of which parameter."""
        with torch.no_grad():
            states = list(states_of(model, optimizer))
        for path, state in states:
            for part in parts_of(state):
                if (block := self.blocks.block_of(part)) is not None:
                    self.recording.states.setdefault(block, path)
        # in the first forward `fully_shard` copies parts that are smaller than those of other ranks
        if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            self._know_parameters(model)

    def place(self) -> Place:
        """Return where the run is now."""
        interval = self.recording.intervals[-1]
        paths = list(self.recording.modules)
        module = paths[self._calls[-1].module] if self._calls else ""
        return Place(phase=interval.phase, micro_batch=interval.micro_batch, module=module)

    def note_attention(self, call: AttentionCall) -> None:
        """Note a call of `scaled_dot_product_attention` on a card."""
        self.recording.attention.append((call, len(self.recording.intervals) - 1))

    @contextlib.contextmanager
    def modules(self, model: torch.nn.Module) -> Iterator[None]:
        """Record which module is running, by hooks on forward calls."""
        with meter.reported(model, self.begin_module, self.end_module):
            yield

    def begin_module(self, path: str) -> None:
        """Note that a module begins to run."""
        here, index = len(self.recording.operators), self.recording.modules
        self._calls.append(ModuleCall(index.setdefault(path, len(index)), here, here))
        self.recording.calls.append(self._calls[-1])

    def end_module(self) -> None:
        """Note that the module which began last has run."""
        self._calls.pop().end = len(self.recording.operators)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on fake tensors and note what it brought into being."""
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):  # asked for all the time
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented  # the operators on the parts of these tensors come here
        if func.namespace in NO_OPERATORS:
            return func(*args, **kwargs)
        if is_composed(func):
            with self:  # what it calls is seen
                return func.decompose(*args, **kwargs)
        kernel = kernel_of(func) if self.device_type != "cpu" else None
        if kernel is not None:
            with self:  # what it allocates is seen
                return self._carried_out(*kernel, args, kwargs)
        sparse = self.outputs.sparse
        if func is MAKES_SPARSE:
            return sparse.made(args, kwargs)
        if sparse.concerns(func, args):
            with self:  # what is called in its place is seen
                return sparse.run(func, args, kwargs)

        func, args = as_for_real(func, args)
        signature = None if is_view(func) else signature_of(func, args, kwargs)
        out = self.outputs.of(func, signature, args, kwargs)
        if func is aten.add.Tensor and out is args[0]:  # autograd has summed two gradients in place
            func = aten.add_.Tensor
            signature = signature_of(func, args, kwargs)
        self._note(func, signature, args, out)
        return out

    def _note(self, func: Any, signature: Signature | None, args: Any, out: Any) -> None:
        """Note an operator that has run, and the memory that it brought into being."""
        if func is aten.detach.default:  # no meter counts it: a recompute calls it inside others
            return
        recording = self.recording
        number = len(recording.operators)
        if number % OPERATORS_A_BEAT == 0:
            self.beat("")
        interval = len(recording.intervals) - 1
        module, forward = self._origin(number)
        if self.device_type == "cpu":  # where a number's tensor lies
            self.numbers.move_on(forward)
        operator = Operator(_profiler_name(func), signature, (), module, interval, forward=forward)
        operator.by_values = self.outputs.is_by_values
        if signature is not None:
            self._place(operator, func, args)
        recording.operators.append(operator)
        self.blocks.note_arguments(args)
        if signature is None and not is_of_list(func, args):
            return

        if self._notes_arguments:
            operator.reads = self.blocks.of(args)
            operator.writes = self.blocks.of([args[i] for i in written_by(func) if i < len(args)])
        tensors = tensors_in(out)
        operator.crosses = func in COPIES and len({t.device for t in tensors_in([out, *args])}) > 1
        operator.beside = operator.crosses and _is_called_by(copy_on)
        operator.outputs = tuple([TensorSpec(t.dtype, tuple(t.shape), t.stride()) for t in tensors])
        if operator.ranks:
            self.collectives.end(operator.stream, args, out)
        self.blocks.note_outputs(tensors)
        if self.device_type == "cpu":
            self.numbers.note(number, func, args)

    def _place(self, operator: Operator, func: Any, args: Any) -> None:
        """Note the stream that an operator runs on, and the ranks that take part in it."""
        self.collectives.wait_for(args)
        operator.stream = self.streams.current.number
        if func.namespace in NAMESPACES and func.overloadpacket.__name__ != WAITS:
            operator.stream, operator.ranks = self.collectives.begin(func, args)

    def _origin(self, number: int) -> tuple[int, int]:
        """Return the running module, and of a backward operator the forward one.

        Outside of modules a backward operator belongs to the module of the forward one.
        """
        here = self._calls[-1].module if self._calls else -1
        node = current_node()
        if node is None:
            # autograd has numbered this operator already, if it has a gradient
            sequence = next_sequence_number() - 1
            self._forward_of_sequence.setdefault(sequence, number)
            return here, -1
        forward = self.forward_of(node)
        if here < 0 <= forward:
            here = self.recording.operators[forward].module
        return here, forward

    def forward_of(self, node: Any) -> int:
        """Return the operator that a node of autograd's graph belongs to, -1 if there is none."""
        return self._forward_of_sequence.get(sequence_number_of(node), -1)

    def _carried_out(
        self, kernel: Callable[..., Any], assumed: str | None, args: Any, kwargs: Any
    ) -> Any:
        """Run what a card runs in place of an operator."""
        if assumed is not None and assumed not in self.recording.assumptions:
            self.recording.assumptions.append(assumed)
        return kernel(*args, **kwargs)

    def note_launch(self, kernel: str) -> None:
        """Note a launch of a Triton kernel, which was left out."""
        if self.recording.intervals[-1].step == 0:
            self.recording.launches[kernel] = self.recording.launches.get(kernel, 0) + 1

    def _assume(self, what: str, assumed: str, doubt: str) -> None:
        if doubt != "spread":
            self.draws.note_assumed()
        self.recording.branched |= doubt == "branch"
        self.recording.spread |= doubt == "spread"
        module = self.place().module
        said = f"{module or self.recording.intervals[-1].phase}: {what}; {assumed}."
        if said not in self.recording.assumptions:
            self.recording.assumptions.append(said)


class CompilingTracker(Tracker):
    """One that sees the operators of compiled graphs, and is never compiled itself."""

    is_guarded = lets_compile = supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator as any tracker does.

        Raises:
            UnsupportedError: it is an operator of the compiler's own, which runs others.
        """
        if isinstance(func, HigherOrderOperator):
            name = func.name()
            of_dropout = ", or a dropout of 0 beside checkpointing" if "rng_state" in name else ""
            raise UnsupportedError(
                f"{self.place()}: torch.compile calls others in an operator of its own, {name}, "
                f"and what that holds is not known; use memlab.measure, compile=False{of_dropout}"
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_called_by(function: Callable[..., Any]) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@functools.cache
def is_view(func: Any) -> bool:
    """Return whether an operator only looks at memory in another way, so that no kernel runs."""
    returns = schema_of(func).returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def is_of_list(func: Any, args: Any) -> bool:
    """Return whether it is given what `torch.tensor` made of a list: an array keeps its memory."""
    made: bool = func is aten.lift_fresh.default and args[0].untyped_storage().resizable()
    return made


@functools.cache
def written_by(func: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator changes in place."""
    return tuple(
        position
        for position, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def _profiler_name(func: Any) -> str:
    return str(schema_of(func).name)


def record_fake(run: Callable[[FakeTensorMode], None], tracker: Tracker) -> OpTrace:
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
            # it is kept, and its frames hold a model, which must not stay beside the next one
            traceback.clear_frames(error.__traceback__)
        gc.collect()
        tracker.restart()


def _attempt(run: Callable[[FakeTensorMode], None], tracker: Tracker) -> OpTrace:
    mode = OneMode(allow_non_fake_inputs=True)
    uses_of_own_gradient()
    with older_objects_frozen():
        unknown = tracker.outputs.unknown
        read = read_as(unknown.text, unknown.whole)
        missing = fake_outputs.missing_ones_run_on_cpu()
        replaced = replaced_parameters(mode)
        known = lengths_known(tracker.outputs.values)
        scripted = noticed_script_functions(tracker.know_of_script)
        launches = triton_launches.noted(tracker.note_launch)
        fakes = unnoticed(), copied_as_fakes(), replaced, read, missing, known, scripted
        with tracker.restoring, contextlib.ExitStack() as stack:
            for context in (*fakes, noted_by(tracker.note_attention), launches, mode, tracker):
                stack.enter_context(context)
            run(mode)
            gc.collect()
        tracker.recording.is_ragged |= tracker.outputs.sparse.has_sums
    return tracker.recording
