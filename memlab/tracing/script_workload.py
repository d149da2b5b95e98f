"""The parts of a workload that are taken from a person's script: its model, its batch, its loss.

    part            what it is
    `ScriptModel`   runs the script until it calls its model, and returns that model
    `ScriptBatch`   makes tensors of the form of those that the script was seen to use
    `ScriptLoss`    calls the model as the script did, and then the functions between what it
                    returned and the loss

`script_step.py` sees them in a run over fake tensors. Numbers in a batch are random, between the
least and the largest that were seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any

import torch

from memlab._util.functions import replaced
from memlab._util.torch_private import pytree
from memlab._util.torch_private.compiler import DYNAMO
from memlab._util.torch_private.tensors import (
    FakeTensor,
    TorchDispatchMode,
    buffers_of,
    converted_by,
    detect_fake_mode,
    parameters_made_of,
    sequence_number_of,
)
from memlab.devices.cards import Card
from memlab.errors import MemlabError, WorkloadError
from memlab.techniques.checkpointing.mutable_state import names_in
from memlab.tracing.person_script import MOST_OF_DATA, Script, converted, is_of_data, start
from memlab.tracing.recording import OpTrace, Streams
from memlab.tracing.script_card import LiveAllocator, found_by_script
from memlab.tracing.script_sandbox import around_script
from memlab.tracing.script_stages import GENERATION, kind_without_gradients
from memlab.tracing.values import for_real

MADE = ("zeros", "ones", "full", "arange", "expand", "repeat", "rand", "randn", "empty",
        "new_zeros", "new_ones", "new_full", "new_empty")  # fmt: skip
DIVIDES = ("div", "truediv", "true_divide", "itruediv")
CLOSE = 1e-6
MOST_DEPTH = 4  # of what a model returns, in which tensors are looked for
KEPT = "memlab: what the script holds until its backward is over"


class Of(StrEnum):
    """Where a value of the step comes from."""

    BATCH = "batch"
    FIXED = "fixed"
    PARAMETER = "parameter"
    OUTPUT = "output"
    CALL = "call"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the step, in place of the value itself.

    Attributes:
        of: what it is.
        number: which tensor of the batch or call, or which multiple of the batch size.
        path: to it, in what the model or a function has returned; the name of a parameter.
    """

    of: Of
    number: int = 0
    path: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Samples:
    """A number in a call that is a multiple of the batch size."""

    each: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorForm:
    """A tensor of a batch: its shape without the samples, its format, and its range of values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float
    high: float
    is_channels_last: bool

    def made(self, n: int) -> torch.Tensor:
        """Return n samples: random, or all the largest where there are only 0 and 1."""
        size = (n, *self.shape)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            found = torch.rand(size, dtype=self.dtype) * (self.high - self.low) + self.low
        elif self.high <= 1:  # a mask with holes may leave a sample without any token
            found = torch.full(size, int(self.high), dtype=self.dtype)
        else:
            found = torch.randint(max(int(self.low), 0), int(self.high) + 1, size, dtype=self.dtype)
        if self.is_channels_last:
            found = found.contiguous(memory_format=torch.channels_last)
        return found

    def __str__(self) -> str:
        """Return the format, the shape and the range."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} (n, {', '.join(map(str, self.shape))})".replace(", )", ",)")


@dataclass(frozen=True, slots=True)
class ScriptBatch:
    """`make_batch` of a workload: tensors of these forms."""

    forms: tuple[TensorForm, ...]

    def __call__(self, n: int) -> tuple[torch.Tensor, ...]:
        """Return n samples."""
        return tuple(form.made(n) for form in self.forms)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCall:
    """A function of PyTorch that the script calls between its model and its loss.

    Attributes:
        function: itself.
        args: with a `Ref` for each tensor.
        kwargs: likewise.
        is_autocast: whether autocast was on.
        has_grad: whether gradients were on.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    is_autocast: bool
    has_grad: bool

    def run(self, fill: Callable[[Any], Any], device: str) -> Any:
        """Return what the function returns, called with what `fill` puts in place of refs."""
        off: Any = contextlib.nullcontext()
        if not self.is_autocast and torch.is_autocast_enabled(device):
            off = torch.autocast(device, enabled=False)
        with off, torch.set_grad_enabled(self.has_grad):
            return self.function(*filled(self.args, fill), **filled(self.kwargs, fill))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScriptLoss:
    """`compute_loss` of a workload: what a script does from its batch to its loss.

    Attributes:
        args: that the model is called with.
        kwargs: likewise.
        calls: of functions, in order.
        loss: which value it is.
        kept: values that the script holds until its backward is over.
    """

    args: Any
    kwargs: Any
    calls: tuple[LossCall, ...]
    loss: Ref
    kept: tuple[Ref, ...]

    def __call__(
        self, model: torch.nn.Module, batch: Any, fixed: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Return the loss of a batch; `fixed` are tensors that are the same for each batch."""
        return self.run(model, batch, fixed, lambda call, run: (call, run(call)))[0]

    def run(
        self, model: torch.nn.Module, batch: Any, fixed: Sequence[torch.Tensor], choose: Any
    ) -> tuple[torch.Tensor, Any]:
        """Return the loss, and the calls as `choose` has chosen them.

        Args:
            model: as the workload builds it.
            batch: as it makes it.
            fixed: tensors that are the same for each batch, on the same device.
            choose: (call, run) -> the call to take instead, and what `run` returns for it.
        """
        known = {Ref(Of.BATCH, number): each for number, each in enumerate(batch)}
        known |= {Ref(Of.FIXED, number): each for number, each in enumerate(fixed)}
        uses = [refs_in((call.args, call.kwargs)) for call in self.calls]
        last = {ref: number for number, refs in enumerate(uses) for ref in refs}
        wanted = {*last, *self.kept, self.loss}

        def fill(value: Ref | Samples) -> Any:
            if isinstance(value, Samples):
                return value.each * len(batch[0])
            if value.of is Of.DEVICE:
                return batch[0].device
            return model.get_parameter(value.path[0]) if value.of is Of.PARAMETER else known[value]

        def learn(of: Of, number: int, out: Any) -> None:
            refs = ((Ref(of, number, path), each) for path, each in members(out))
            known.update((ref, each) for ref, each in refs if ref in wanted)

        learn(Of.OUTPUT, 0, model(*filled(self.args, fill), **filled(self.kwargs, fill)))
        chosen, device = [], batch[0].device.type
        for number, call in enumerate(self.calls):
            call, out = choose(call, lambda each: each.run(fill, device))
            chosen.append(call)
            learn(Of.CALL, number, out)
            del out
            for ref in uses[number]:
                if last[ref] == number and ref not in self.kept and ref != self.loss:
                    known.pop(ref, None)
        loss: torch.Tensor = known[self.loss]
        below = [known[ref] for ref in self.kept if ref in known and _is_below(known[ref], loss)]
        if loss.grad_fn is not None and below:
            metadata: Any = loss.grad_fn.metadata  # a dict, whatever its stub says
            metadata[KEPT] = below
        return loss, tuple(chosen)

    def __repr__(self) -> str:
        """Return the names of the functions."""
        return f"ScriptLoss({', '.join(map(name_of, self.calls)) or 'of the model'})"


def _load(_: Any, __: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()  # nothing is noted of a batch


def name_of(call: LossCall) -> str:
    """Return the name of the function that is called."""
    return str(getattr(call.function, "__name__", call.function)).strip("_")


def _is_below(tensor: torch.Tensor, loss: torch.Tensor) -> bool:
    """Return whether the graph of a loss may hold a tensor, which then does not hold that graph."""
    if tensor.grad_fn is None or loss.grad_fn is None:
        return not tensor.requires_grad
    return sequence_number_of(tensor.grad_fn) < sequence_number_of(loss.grad_fn)


def members(value: Any, depth: int = MOST_DEPTH) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield the tensors of what a function returns, with the path to each."""
    if isinstance(value, torch.Tensor):
        yield (), value
    elif isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value):
        if isinstance(value, list | tuple):
            inside: Any = enumerate(value)
        else:
            inside = value.items() if isinstance(value, Mapping) else vars(value).items()
        for key, each in inside if depth else ():
            yield from (((key, *path), found) for path, found in members(each, depth - 1))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments of a call with each value in them changed."""
    if isinstance(value, Mapping):
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(each, change) for each in (value.start, value.stop, value.step)))
    if type(value) is list:
        return [mapped(each, change) for each in value]
    if type(value) in (tuple, torch.Size):
        return tuple([mapped(each, change) for each in value])
    return change(value)


def filled(value: Any, fill: Callable[[Any], Any]) -> Any:
    """Return arguments with values in place of refs."""
    return mapped(value, lambda each: fill(each) if isinstance(each, Ref | Samples) else each)


def refs_in(value: Any) -> set[Ref]:
    """Return the refs in arguments."""
    found: set[Ref] = set()
    mapped(value, lambda each: found.add(each) if isinstance(each, Ref) else None)
    return found


def undivided(loss: ScriptLoss, count: int) -> tuple[ScriptLoss, bool]:
    """Return a loss before its division by the number of backwards, and whether there was one."""
    call = loss.calls[-1] if loss.calls and loss.loss.of is Of.CALL else None
    if count == 1 or call is None or len(call.args) != 2 or not isinstance(call.args[0], Ref):
        return loss, count == 1
    number, name = call.args[1], name_of(call)
    by = 0.0
    if isinstance(number, int | float) and number:
        by = number if name in DIVIDES else 1 / number if name == "mul" else 0.0
    if abs(by / count - 1) > CLOSE:
        return loss, False
    return dataclasses.replace(loss, calls=loss.calls[:-1], loss=call.args[0]), True


def variants(call: LossCall, size: int) -> Iterator[LossCall]:
    """Yield a call with numbers in it replaced that may be multiples of the batch size."""
    numbers: list[int] = []
    mapped((call.args, call.kwargs), lambda each: numbers.append(each) if _is_whole(each) else None)
    multiples = [at for at, each in enumerate(numbers) if each > 0 and each % size == 0]
    equal = [at for at in multiples if numbers[at] == size]
    name = name_of(call)
    if equal and (name in MADE or (name in DIVIDES and size > 1)):
        yield _with_samples(call, equal, size)
    yield call
    for chosen in (*([each] for each in multiples), multiples):
        yield _with_samples(call, chosen, size)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _with_samples(call: LossCall, chosen: list[int], size: int) -> LossCall:
    """Return a call in which the whole numbers of these places are multiples of the batch size."""
    places = itertools.count()

    def change(value: Any) -> Any:
        is_chosen = _is_whole(value) and next(places) in chosen
        return Samples(value // size) if is_chosen else value

    args, kwargs = mapped((call.args, call.kwargs), change)
    return dataclasses.replace(call, args=args, kwargs=kwargs)


class _ModelFound(BaseException):
    """Ends a script that has called its model; no `Exception`, which it might catch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


Outline = tuple[str, int, int]


def outline_of_model(model: torch.nn.Module) -> Outline:
    """Return by what a model is known again: its class, and how many parameters it has."""
    parameters = list(model.parameters())
    return type(model).__qualname__, len(parameters), sum(each.numel() for each in parameters)


def is_compiled(module: Any) -> bool:
    """Return whether `torch.compile` has made a module."""
    return type(module).__name__ == "OptimizedModule"


def own_model(module: Any) -> Any:
    """Return the module inside of what `torch.compile` or `DataParallel` has made of it."""
    inside = next(module.children()) if is_compiled(module) else module
    return inside.module if isinstance(inside, torch.nn.DataParallel) else inside


def digest_of(path: str) -> str:
    """Return what a file holds, in short."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptModel:
    """`build_model` of a workload: runs a script until it calls its model, and returns that.

    What the script does before that call is done each time; its files are kept apart, as when it
    is run whole. It finds the card that it was seen on, whose tensors lie on the host. Where the
    caller's tensors are fake, its parameters are.

    Attributes:
        script: how it is run.
        digest: of its file, when it was seen.
        folder: in which it was started.
        card: that it finds; None without one.
        has_card: whether it finds a card, which need not be a known one.
        outline: of its model.
    """

    script: Script
    digest: str
    folder: str
    card: Card | None
    has_card: bool
    outline: Outline

    def __call__(self) -> torch.nn.Module:
        """Return the model as it was before its first call with gradients.

        Raises:
            WorkloadError: the script has changed, or does not come to this call.
        """
        name = Path(self.script.path).name
        if not os.path.isfile(self.script.path) or digest_of(self.script.path) != self.digest:
            raise WorkloadError(f"{name} has changed; call memlab.from_script again")
        before = os.getcwd()
        try:
            os.chdir(self.folder)
            self._run()
        except _ModelFound as found:
            model = found.model
            _forget(found.__traceback__, model)
        except MemlabError:
            raise
        except (Exception, SystemExit) as error:  # whatever a person's script raises
            raise WorkloadError(
                f"{name} raised {type(error).__name__} before it called its model: {error}"
            ) from error
        else:
            raise WorkloadError(f"{name} ended before it called its model; call from_script again")
        finally:
            os.chdir(before)
        model = model.to("cpu")
        model.zero_grad(set_to_none=True)
        if detect_fake_mode() is not None:
            _make_buffers_fake(model)
        return model

    def _run(self) -> None:
        """Run the script.

        Raises:
            BaseException: the model is found, or whatever the script raises.
        """
        importlib.import_module(DYNAMO)  # which an optimizer imports, and finds no card here
        mode, host = detect_fake_mode(), torch.device("cpu")
        with contextlib.ExitStack() as stack:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="memlab-run-"))
            if mode is not None:
                stack.enter_context(parameters_made_of(lambda real: mode.from_tensor(real).clone()))
                stack.enter_context(converted_by(functools.partial(converted, mode)))
                stack.enter_context(_DataIsReal())
            stack.enter_context(around_script(_load, OpTrace(), home, writes=False))
            if self.has_card:
                found = found_by_script(host, self.card, LiveAllocator(None), Streams())
                stack.enter_context(found)
            own: Any = torch.nn.Module.__call__
            stack.enter_context(replaced([(torch.nn.Module, "__call__", self._watched(own))]))
            start(self.script)

    def _watched(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of modules, which ends the script where it first calls its model.

        An evaluation before that runs once, and then returns the same again. Its outputs are ones
        where tensors are fake: the script may read them, and the step does not depend on it.
        """
        seen: dict[Any, Any] = {}
        depth = [0]

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                model = own_model(module)
                if outline_of_model(model) == self.outline:
                    raise _ModelFound(model)
                return own(module, *args, **kwargs)
            if depth[0] or kind_without_gradients() == GENERATION:
                return own(module, *args, **kwargs)
            shapes = [each.shape if isinstance(each, torch.Tensor) else each
                      for each in pytree.tree_leaves((args, kwargs))]  # fmt: skip
            key = (id(module), module.training, repr(shapes))
            if key not in seen:
                depth[0] += 1
                try:
                    out = own(module, *args, **kwargs)
                finally:
                    depth[0] -= 1
                seen[key] = pytree.tree_map_only(FakeTensor, _with_values, out)
            return seen[key]

        return call

    def __repr__(self) -> str:
        """Return the class of the model and the name of the script."""
        return f"ScriptModel({self.outline[0]} of {Path(self.script.path).name})"


class _DataIsReal(TorchDispatchMode):
    """Runs for real what a script does on the host without its parameters, as `person_script`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if all(kind is torch.Tensor for kind in types) and is_of_data(func, args, kwargs):
            with for_real():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _with_values(fake: Any) -> Any:
    """Return a tensor of the host like a small fake one, which has values that can be read."""
    return torch.ones(fake.shape, dtype=fake.dtype) if fake.numel() <= MOST_OF_DATA else fake


def _make_buffers_fake(model: torch.nn.Module) -> None:
    """Make fake tensors of the buffers that were made for real, tied in the same way."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None and not isinstance(buffer, FakeTensor):
                buffers_of(module)[name] = made.setdefault(id(buffer), buffer.clone())


PLAIN = (ModuleType, FunctionType, type, int, float, str, type(None))


def _forget(trace: TracebackType | None, model: torch.nn.Module) -> None:
    """Free what a stopped script holds and its model does not use: data, batches, an optimizer."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    traceback.clear_frames(trace)
    held = [value for module in model.modules() for value in vars(module).values()]
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for names in {id(frame.f_globals): frame.f_globals for frame in frames}.values():
        if names.get("__name__") != "__main__":
            continue
        used, ahead = set[str](), [*held, *kinds]
        while ahead:
            value = ahead.pop()
            if isinstance(value, type):
                ahead += vars(value).values() if value.__module__ == "__main__" else ()
            elif isinstance(value, FunctionType) and value.__globals__ is names:
                new = names_in(value.__code__) & names.keys() - used
                used |= new
                ahead += [names[name] for name in new]
            else:
                parts = (getattr(value, name, None) for name in ("fget", "__func__", "__wrapped__"))
                ahead += [part for part in parts if isinstance(part, FunctionType)]
        for name in names.keys() - used:
            if not name.startswith("__") and not isinstance(names[name], PLAIN):
                del names[name]
