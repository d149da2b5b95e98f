"""The training step that a person's script takes, seen while it runs over fake tensors.

    what the script does             what is noted
    a call of a model, with          what it is called with and what it returns; the tensors among
    gradients                        the former are the batch
    a function of PyTorch after it   the function, and which of these values it is called with
    `backward`                       of all these calls those that the loss was made by
    an optimizer's `step`            how many backward passes there were, and what was clipped

With the second update of an optimizer the script ends. Its loss is then computed for another batch
size: numbers in the calls that are multiples of the batch size are found in this way. No tensor is
held meanwhile, so that what lives at a backward is what the script itself holds.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from memlab._util.functions import replaced
from memlab._util.torch_private.tensors import FakeTensor
from memlab.devices.cards import Card
from memlab.errors import UnsupportedError
from memlab.memory.replay import round_block
from memlab.techniques.precision import number_formats
from memlab.tracing.person_script import Script, ScriptTracker, record_script
from memlab.tracing.script_card import LiveAllocator
from memlab.tracing.script_facts import Line
from memlab.tracing.script_stages import Enough
from memlab.tracing.script_workload import (
    LossCall,
    Of,
    Outline,
    Ref,
    ScriptBatch,
    ScriptLoss,
    TensorForm,
    is_compiled,
    mapped,
    members,
    name_of,
    outline_of_model,
    own_model,
    refs_in,
    undivided,
    variants,
)
from memlab.tracing.values import for_real

WRITE = "write a memlab.Workload with its model, a batch and its loss"
MOST_FIXED = 2**20  # numbers of a tensor that is the same for each batch
MOST_READ = 2**26  # numbers of a tensor whose least and largest are looked for
PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format,
         type(...))  # fmt: skip
SAME = ("to", "cuda", "cpu", "long", "int", "float", "view", "reshape", "flatten", "contiguous",
        "getitem", "clone", "detach", "squeeze", "unsqueeze", "transpose", "permute", "t", "expand",
        "pin_memory")  # fmt: skip
OF_LIBRARIES = ("torch", "bitsandbytes", "transformers")


Held = tuple[tuple[Line, int], ...]
"""Bytes on the device, by the line that made them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenStep:
    """The step that a script takes.

    Attributes:
        outline: of its model.
        formats: the number formats of the model's parameters.
        num_trainable: of the model's parameters.
        in_evaluation: names of modules that train in evaluation mode.
        batch: makes batches like that of the script.
        fixed: tensors of the step that are the same for each batch, such as weights of classes.
        batch_size: samples of one backward.
        loss: how it is computed.
        backwards: in one update.
        is_mean: whether the losses of several backwards are divided by their number.
        optimizer: a copy without parameters; None if its class is the script's own.
        optimizer_name: of its class.
        max_norms: of the norms that gradients were clipped to, with the kind of norm.
        is_clipped_by_value: whether gradients were clipped in another way.
        autocast: the format of autocast, None if it was off.
        is_scaled: whether a `GradScaler` scales the loss.
        is_tf32: whether products of fp32 may be taken in TF32.
        is_compiled: whether the script compiles its model.
        is_recomputed: whether modules run again in a backward.
        has_schedule: whether the learning rate has a schedule.
        has_old_gradients: whether the gradients of the update before live in a forward pass.
        beside: what else lives on the device when a backward begins.
        in_update: what else lives on it when weights are updated.
    """

    outline: Outline
    formats: tuple[str, ...]
    num_trainable: int
    in_evaluation: tuple[str, ...]
    batch: ScriptBatch
    fixed: tuple[torch.Tensor, ...]
    batch_size: int
    loss: ScriptLoss
    backwards: int
    is_mean: bool
    optimizer: Any
    optimizer_name: str
    max_norms: tuple[tuple[float, float], ...]
    is_clipped_by_value: bool
    autocast: torch.dtype | None
    is_scaled: bool
    is_tf32: bool
    is_compiled: bool
    is_recomputed: bool
    has_schedule: bool
    has_old_gradients: bool
    beside: Held
    in_update: Held


def see_step(script: Script, device: torch.device, card: Card | None) -> SeenStep:
    """Return the training step that a script takes.

    Args:
        script: how it is run.
        device: of its tensors: a CPU, or the stand-in for a card.
        card: that it finds.

    Raises:
        UnsupportedError: it takes none, or one that no workload can have; the message says what.
        BaseException: whatever the script raises and does not catch.
    """
    found: list[_StepWatch] = []

    @contextlib.contextmanager
    def around(tracker: ScriptTracker) -> Iterator[None]:
        watch, is_stopped = _StepWatch(tracker, device, Path(script.path).name), False
        found.append(watch)
        with watch.on():
            try:
                yield
            except (Enough, SystemExit):
                is_stopped = True
        watch.finish()
        if is_stopped:
            raise Enough

    allocator = None if device.type == "cpu" else LiveAllocator(None)
    recorded = record_script(script, device, card, allocator, around=around)
    if recorded.ended:
        raise UnsupportedError(recorded.ended)
    if found[-1].seen is None:
        raise UnsupportedError(
            f"{Path(script.path).name} was not seen to update weights, so it has no training step"
        )
    return found[-1].seen


@dataclass(slots=True)
class _SeenCall:
    """A call of a model with gradients."""

    model: torch.nn.Module
    given: tuple[Any, Any] | str
    is_compiled: bool
    autocast: torch.dtype | None
    first_block: int
    has_old_gradients: bool


@dataclass(slots=True)
class _Backward:
    """A backward, with what it was computed from."""

    call: _SeenCall
    loss: ScriptLoss
    forms: tuple[TensorForm, ...]
    fixed: tuple[torch.Tensor, ...]
    held_too: list[weakref.ref[torch.Tensor]]
    size: int
    made: Ref
    beside: Held
    values: list[tuple[weakref.ref[torch.Tensor], Ref]]


@dataclass(slots=True)
class _Slot:
    """A tensor that the step uses and did not make."""

    form: TensorForm
    size: int
    values: torch.Tensor | None
    tensor: weakref.ref[torch.Tensor]


@dataclass(slots=True)
class _SeenUpdate:
    """What there was since the last update."""

    backwards: list[_Backward] = field(default_factory=list)
    max_norms: list[tuple[float, float]] = field(default_factory=list)
    is_clipped_by_value: bool = False
    optimizer: Any = None
    beside: Held = ()


class _StepWatch(TorchFunctionMode):
    """Sees the step of a script.

    Args:
        tracker: of the run.
        device: of its tensors.
        name: of the script.

    Attributes:
        seen: the step; None so far.
    """

    def __init__(self, tracker: ScriptTracker, device: torch.device, name: str) -> None:
        super().__init__()
        self._tracker, self._device, self._name = tracker, device, name
        self.seen: SeenStep | None = None
        self._why_not = ""
        self._updates: list[_SeenUpdate] = []
        self._update = _SeenUpdate()
        self._depth = 0
        self._scaler_blocks: set[int | None] = set()
        self._is_watching = self._in_backward = self._is_scaled = self._is_recomputed = False
        self._ranges: dict[int, tuple[weakref.ref[torch.Tensor], float, float]] = {}
        self._begin()

    def _begin(self) -> None:
        """Forget the values of the last forward pass."""
        self._refs: dict[int, tuple[weakref.ref[torch.Tensor], Ref]] = {}
        self._models: list[_SeenCall] = []
        self._calls: list[LossCall | str] = []
        self._slots: list[_Slot] = []
        self._is_used = False

    def _refused(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"{self._name} {why}; {WRITE}")

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watch what happens inside this context."""
        utils: Any = torch.nn.utils
        watched = [
            (torch.nn.Module, "__call__", self._called),
            (torch.autograd, "backward", self._goes_back),
            (torch.amp.GradScaler, "scale", self._scales),
            (torch.amp.GradScaler, "unscale_", self._of_scaler),
            (utils, "clip_grad_norm_", self._clips),
            (utils, "clip_grad_value_", self._clips_by_value),
        ]
        parts = ((holder, name, make(getattr(holder, name))) for holder, name, make in watched)
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(parts))
            stack.callback(register_optimizer_step_pre_hook(self._updates_by).remove)
            stack.enter_context(self)
            yield

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """Do not see what is called inside this context."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    # What the script calls.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_outside = not self._depth and not self._in_backward
        given: Any = None
        if self._is_watching and is_outside and not self._is_used:
            given = self._refs_of(args, kwargs)
        out = func(*args, **kwargs)
        if is_outside:
            with self._unseen():
                self._note_range(func, args, kwargs, out)
        if given is None or func is torch.Tensor.backward:
            return out
        number, found = len(self._calls), list(members(out))
        if func is torch.Tensor.__setitem__:
            found, given = [((), args[0])], str(self._refused("writes into what makes its loss"))
        if found:
            on = torch.is_autocast_enabled(self._device.type)
            self._calls.append(
                given if isinstance(given, str)
                else LossCall(function=func, args=given[0], kwargs=given[1], is_autocast=on,
                          has_grad=torch.is_grad_enabled())
            )  # fmt: skip
            self._learn(Of.CALL, number, found)
        return out

    def _refs_of(self, args: Any, kwargs: Any) -> tuple[Any, Any] | str:
        """Return the arguments of a call with refs; a sentence if it cannot be repeated."""
        try:
            with self._unseen():
                return mapped(args, self._ref), mapped(kwargs, self._ref)
        except UnsupportedError as error:  # it matters only if the loss is made of it
            return str(error)

    def _called(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._is_recomputed |= self._in_backward
            model = own_model(module)
            is_of_step = not (self._depth or self._in_backward) and torch.is_grad_enabled()
            if not is_of_step or not any(each.requires_grad for each in model.parameters()):
                is_loss = next(module.parameters(), None) is None  # which is seen from inside
                with contextlib.nullcontext() if is_loss else self._unseen():
                    return own(module, *args, **kwargs)
            if self._is_used or not self._is_watching:
                self._begin()
            self._is_watching = True
            with self._unseen():
                self._models.append(self._model_call(model, module, args, kwargs))
                out = own(module, *args, **kwargs)
            self._learn(Of.OUTPUT, len(self._models) - 1, members(out))
            return out

        return call

    def _model_call(self, model: Any, module: Any, args: Any, kwargs: Any) -> _SeenCall:
        kind = self._device.type
        is_first = not self._update.backwards
        return _SeenCall(
            model=model,
            given=self._refs_of(args, kwargs),
            is_compiled=is_compiled(module),
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            first_block=len(self._tracker.recording.blocks),
            has_old_gradients=is_first and any(p.grad is not None for p in model.parameters()),
        )

    def _goes_back(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            found = None
            if self._is_watching and not self._in_backward:
                try:
                    with self._unseen():
                        found = self._backward(tensors)
                        self._update.backwards.append(found)
                except UnsupportedError as error:
                    self._why_not = str(error)
                    raise Enough from None
            was_in, self._in_backward = self._in_backward, True
            try:
                out = own(tensors, *args, **kwargs)
            finally:
                self._in_backward = was_in
            if found is not None:  # its graph is freed: what lives now is held by the script
                kept = tuple(ref for value, ref in found.values if value() is not None)
                found.loss = dataclasses.replace(found.loss, kept=kept)
            return out

        return backward

    def _scales(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            out = self._of_scaler(own)(scaler, outputs)
            if scaler.is_enabled() and isinstance(out, torch.Tensor):
                self._is_scaled = True
                known = self._known(outputs)
                if known is not None:
                    self._refs[id(out)] = weakref.ref(out), known
            return out

        return scale

    def _of_scaler(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            blocks = self._tracker.recording.blocks
            first = len(blocks)
            with self._unseen():
                out = own(*args, **kwargs)
            self._scaler_blocks |= set(range(first, len(blocks)))
            return out

        return call

    def _clips(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any,
                 **kwargs: Any) -> Any:  # fmt: skip
            self._update.max_norms.append((float(max_norm), float(norm_type)))
            return own(parameters, max_norm, norm_type, *args, **kwargs)

        return clip

    def _clips_by_value(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            self._update.is_clipped_by_value = True
            return own(*args, **kwargs)

        return clip

    def _updates_by(self, optimizer: Any, *_: Any) -> None:
        self._update.optimizer = optimizer
        if self._update.backwards:
            backward, most = self._update.backwards[-1], len(self._tracker.recording.blocks)
            with self._unseen():
                own = [self._made_by(backward.made), *(each() for each in backward.held_too)]
                self._update.beside = self._beside(backward.call.model, own, most)
        is_second = any(each.optimizer is optimizer for each in self._updates)
        self._updates.append(self._update)
        self._update = _SeenUpdate()
        if is_second:
            raise Enough

    # Where a value comes from.

    def _known(self, tensor: torch.Tensor) -> Ref | None:
        reference, ref = self._refs.get(id(tensor), (lambda: None, None))
        return ref if reference() is tensor else None

    def _made_by(self, ref: Ref) -> torch.Tensor | None:
        """Return a value; None if it does not live any more."""
        found = (reference() for reference, known in self._refs.values() if known == ref)
        return next((each for each in found if each is not None), None)

    def _learn(self, of: Of, number: int, found: Any) -> None:
        for path, tensor in found:
            self._refs[id(tensor)] = weakref.ref(tensor), Ref(of, number, path)

    def _ref(self, value: Any) -> Any:
        """Return what stands for a value in a call.

        Raises:
            UnsupportedError: a call with it cannot be repeated.
        """
        if isinstance(value, torch.device):
            return Ref(Of.DEVICE)
        if not isinstance(value, torch.Tensor):
            is_function = callable(value) and hasattr(value, "__qualname__")
            if isinstance(value, PLAIN):
                is_word = isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu")
                return Ref(Of.DEVICE) if is_word else value
            if is_function and getattr(value, "__module__", "").startswith("torch"):
                return value
            raise self._refused(
                f"calls its model, or makes its loss, with a {type(value).__name__}"
            )
        if (known := self._known(value)) is not None:
            return known
        for call in self._models:
            for name, parameter in call.model.named_parameters():
                if parameter is value:
                    return Ref(Of.PARAMETER, 0, (name,))
        if value.requires_grad:
            raise self._refused(
                f"makes its loss of a tensor of shape {tuple(value.shape)} with gradients, which "
                "comes neither from its model nor from functions of PyTorch that can be seen"
            )
        ref = Ref(Of.BATCH, len(self._slots))
        self._slots.append(self._slot(value))
        self._refs[id(value)] = weakref.ref(value), ref
        return ref

    def _slot(self, tensor: torch.Tensor) -> _Slot:
        low, high = self._range_of(tensor) or ((0.0, 1.0) if tensor.is_floating_point() else (0, 0))
        is_channels_last = (
            tensor.ndim == 4
            and not tensor.is_contiguous()
            and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        form = TensorForm(
            shape=tuple(tensor.shape[1:]), dtype=tensor.dtype, low=low, high=high,
            is_channels_last=is_channels_last,
        )  # fmt: skip
        values = None
        if tensor.numel() <= MOST_FIXED:
            known = tensor if not isinstance(tensor, FakeTensor) else (
                self._tracker.outputs.values.of(tensor)
            )  # fmt: skip
            with for_real():
                fill = torch.ones if tensor.is_floating_point() else torch.zeros
                values = (
                    fill(tuple(tensor.shape), dtype=tensor.dtype) if known is None
                    else known.detach().clone()
                )  # fmt: skip
        return _Slot(form, tensor.shape[0] if tensor.ndim else 0, values, weakref.ref(tensor))

    def _note_range(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember between which values the numbers of a new fake tensor lie."""
        if not isinstance(out, FakeTensor):
            return
        name = getattr(func, "__name__", "")
        if name == "randint":
            whole = [each for each in args if isinstance(each, int)]
            bounds = [kwargs.get("low", whole[0] if len(whole) > 1 else 0),
                      kwargs.get("high", whole[-1] if whole else 1)]  # fmt: skip
            found: Any = (float(bounds[0]), float(bounds[1]) - 1)
        else:
            is_same = name.strip("_") in SAME and isinstance(args[0], torch.Tensor)
            found = self._range_of(args[0]) if is_same else None
        if found is not None:
            self._ranges[id(out)] = weakref.ref(out), *found

    def _range_of(self, tensor: torch.Tensor) -> tuple[float, float] | None:
        """Return the least and the largest of a tensor; None if they are not known."""
        reference, low, high = self._ranges.get(id(tensor), (lambda: None, 0.0, 0.0))
        if reference() is tensor:
            return low, high
        if isinstance(tensor, FakeTensor) or not 0 < tensor.numel() <= MOST_READ:
            return None
        with for_real():
            low, high = (float(each) for each in torch.aminmax(tensor.detach().to(torch.float64)))
        return low, high

    # What a backward, and an update, are made of.

    def _backward(self, tensors: Any) -> _Backward:
        """Return what a loss was made by.

        Raises:
            UnsupportedError: it cannot be made again.
        """
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if self._is_used or len(given) > 1:
            raise self._refused("calls backward more than once for a forward pass")
        loss = self._known(given[0])
        if loss is None or loss.of not in (Of.OUTPUT, Of.CALL):
            raise self._refused("calls backward for a loss that was not seen to be made")
        self._is_used = True
        needed, ahead = set[int](), {loss}
        refs: set[Ref] = set()
        while ahead:
            ref = ahead.pop()
            if ref in refs:
                continue
            refs.add(ref)
            if ref.of is Of.CALL and ref.number not in needed:
                needed.add(ref.number)
                call = self._calls[ref.number]
                if isinstance(call, str):
                    raise UnsupportedError(call)
                ahead |= refs_in((call.args, call.kwargs))
        used = {ref.number for ref in refs if ref.of is Of.OUTPUT}
        if len(used) != 1:
            kinds = ", ".join(sorted({type(each.model).__name__ for each in self._models}))
            raise self._refused(
                f"makes a loss of {len(used)} calls of models ({kinds}), and a workload calls one"
            )
        model_call = self._models[used.pop()]
        if isinstance(model_call.given, str):
            raise UnsupportedError(model_call.given)
        return self._program(model_call, model_call.given, loss, sorted(needed))

    def _program(
        self, call: _SeenCall, given: tuple[Any, Any], loss: Ref, needed: list[int]
    ) -> _Backward:
        """Return a backward with its values numbered anew."""
        renamed = {Ref(Of.CALL, old): new for new, old in enumerate(needed)}
        calls = [self._calls[number] for number in needed]
        used = {ref.number for each in calls if isinstance(each, LossCall)
                for ref in refs_in((each.args, each.kwargs)) if ref.of is Of.BATCH}  # fmt: skip
        of_batch = sorted(ref.number for ref in refs_in(given) if ref.of is Of.BATCH)
        used |= set(of_batch)
        size = self._slots[of_batch[0]].size if of_batch else 0
        if not size:
            raise self._refused("calls its model with no tensor that has samples along dim 0")
        forms, fixed = list[TensorForm](), list[torch.Tensor]()
        held_too: list[weakref.ref[torch.Tensor]] = []
        for number in sorted(used):
            slot = self._slots[number]
            if slot.size == size:
                renamed[Ref(Of.BATCH, number)] = len(forms)
                forms.append(slot.form)
            elif slot.values is not None:
                renamed[Ref(Of.BATCH, number)] = -1 - len(fixed)
                fixed.append(slot.values)
                held_too.append(slot.tensor)
            else:
                raise self._refused(
                    f"uses a tensor of shape {(slot.size, *slot.form.shape)} beside {size} samples"
                )

        def anew(value: Any) -> Any:
            if not isinstance(value, Ref) or value.of in (Of.PARAMETER, Of.DEVICE):
                return value
            if value.of is Of.OUTPUT:
                return dataclasses.replace(value, number=0)
            new = renamed[Ref(value.of, value.number)]
            if value.of is Of.BATCH and new < 0:
                return Ref(Of.FIXED, -1 - new)
            return dataclasses.replace(value, number=new)

        number_of_call = self._models.index(call)
        values = [
            (reference, anew(ref))
            for reference, ref in self._refs.values()
            if ref != loss
            and (ref.of is Of.OUTPUT and ref.number == number_of_call)
            | (ref.of is Of.CALL and ref.number in needed)
        ]
        program = ScriptLoss(
            args=mapped(given[0], anew), kwargs=mapped(given[1], anew),
            calls=tuple(
                dataclasses.replace(each, args=mapped(each.args, anew),
                                    kwargs=mapped(each.kwargs, anew))
                for each in calls if isinstance(each, LossCall)
            ),
            loss=anew(loss), kept=(),
        )  # fmt: skip
        batch = [self._slots[number].tensor() for number in used]
        if self._device.type == "cpu":  # where memlab holds the batch during the update too
            held_too += [self._slots[number].tensor for number in used]
        loaded = {
            self._tracker.blocks.block_of(tensor)
            for reference, ref in self._refs.values()
            if ref.of is Of.CALL and ref.number not in needed
            and (tensor := reference()) is not None and tensor.grad_fn is None
        }  # fmt: skip
        beside = self._beside(call.model, batch, call.first_block, loaded)
        return _Backward(
            call, program, tuple(forms), tuple(fixed), held_too, size, loss, beside, values
        )

    def _beside(
        self, model: torch.nn.Module, values: Iterable[torch.Tensor | None], most: int,
        others: Container[int | None] = (),
    ) -> Held:  # fmt: skip
        """Return what lives beside the step: bytes by the line that made it.

        Args:
            model: whose parameters, gradients and states belong to the step.
            values: that belong to it too.
            most: the first block that an operator of the step may have made.
            others: blocks after it that do not belong to the step.
        """
        blocks, sizes = self._tracker.blocks, self._tracker.recording.blocks
        own = [*model.parameters(), *model.buffers(), *values]
        own += [each.grad for each in model.parameters()]
        for update in self._updates:
            for state in update.optimizer.state.values():
                own += [each for each in state.values() if isinstance(each, torch.Tensor)]
        known = {blocks.block_of(each) for each in own if each is not None} | self._scaler_blocks
        found: dict[Line, int] = {}
        for block in blocks.live():
            if block not in known and (block < most or block in others):
                nbytes, line = sizes[block].nbytes, blocks.lines[block]
                if self._device.type != "cpu":
                    nbytes = round_block(nbytes)
                found[line] = found.get(line, 0) + nbytes
        return tuple(sorted(found.items(), key=lambda each: -each[1]))

    def finish(self) -> None:
        """Find the step in what was seen.

        Raises:
            UnsupportedError: it is none that a workload can have.
        """
        if self._why_not:
            raise UnsupportedError(self._why_not)
        if not self._updates:
            return
        update = self._updates[-1]
        optimizers = {id(each.optimizer): each.optimizer for each in self._updates}
        if len(optimizers) > 1:
            kinds = ", ".join(type(each).__name__ for each in optimizers.values())
            raise self._refused(f"updates with {len(optimizers)} optimizers ({kinds})")
        if not update.backwards:
            raise self._refused("updates weights without a backward of its own before")
        first, count = update.backwards[0], len(update.backwards)
        model, optimizer = first.call.model, update.optimizer
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if not trained & {id(each) for each in model.parameters()}:
            raise self._refused(f"has an optimizer without parameters of {type(model).__name__}")
        loss, is_mean = undivided(first.loss, count)
        self.seen = SeenStep(
            outline=outline_of_model(model),
            formats=tuple(number_formats(model)),
            num_trainable=sum(each.requires_grad for each in model.parameters()),
            in_evaluation=tuple(path for path, each in model.named_modules() if not each.training),
            batch=ScriptBatch(first.forms),
            fixed=first.fixed,
            batch_size=first.size,
            loss=self._resized(dataclasses.replace(first, loss=loss)),
            backwards=count,
            is_mean=is_mean,
            optimizer=_without_parameters(optimizer),
            optimizer_name=type(optimizer).__name__,
            max_norms=tuple(update.max_norms),
            is_clipped_by_value=update.is_clipped_by_value,
            autocast=first.call.autocast,
            is_scaled=self._is_scaled,
            is_tf32=torch.get_float32_matmul_precision() != "highest",
            is_compiled=first.call.is_compiled,
            is_recomputed=self._is_recomputed,
            has_schedule=any("initial_lr" in group for group in optimizer.param_groups),
            has_old_gradients=first.call.has_old_gradients,
            beside=first.beside,
            in_update=update.beside,
        )

    def _resized(self, backward: _Backward) -> ScriptLoss:
        """Return a loss that can be computed for other batch sizes too; one of them is tried.

        Raises:
            UnsupportedError: it cannot.
        """
        kind, size = self._device.type, backward.size
        on: Any = contextlib.nullcontext()
        if backward.call.autocast is not None:
            on = torch.autocast(kind, dtype=backward.call.autocast)
        batch = tuple(form.made(size + 1).to(self._device) for form in backward.forms)

        def choose(call: LossCall, run: Callable[[LossCall], Any]) -> tuple[LossCall, Any]:
            for variant in variants(call, size):
                with contextlib.suppress(Exception):  # whatever a function raises for such sizes
                    return variant, run(variant)
            raise self._refused(
                f"computes its loss for {size} samples only: {name_of(call)} fails for {size + 1}"
            )

        try:
            with on, torch.enable_grad():
                fixed = [each.to(self._device) for each in backward.fixed]
                loss, calls = backward.loss.run(backward.call.model, batch, fixed, choose)
        except UnsupportedError:
            raise
        except Exception as error:  # whatever a model raises for another batch size
            raise self._refused(
                f"calls a model that fails for {size + 1} samples in place of {size} "
                f"({type(error).__name__}: {error})"
            ) from None
        if loss.numel() != 1:
            raise self._refused(f"makes {loss.numel()} losses of {size + 1} samples, not one")
        return dataclasses.replace(backward.loss, calls=calls)


def _without_parameters(optimizer: Any) -> Any:
    """Return a copy of an optimizer that holds no tensors; None if its class is the script's."""
    if type(optimizer).__module__.partition(".")[0] not in OF_LIBRARIES:
        return None
    made = copy.copy(optimizer)
    made.defaults = {name: float(value) if isinstance(value, torch.Tensor) else value
                     for name, value in optimizer.defaults.items()}  # fmt: skip
    made.state = {}
    made.param_groups = [{"params": [0] * len(group["params"])} for group in optimizer.param_groups]
    return made
