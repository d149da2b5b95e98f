"""Turn a model that was built of ordinary tensors into a model of fake ones.

Some models cannot be built of fake tensors. Parameter classes with formats of their own, such as
the 4-bit weights of bitsandbytes, manage their memory themselves and quantize it when they are
moved to a device. Left out: a module's own tensors that are sparse, quantized or nested, and those
in an object of another class that is itself an attribute.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    buffers_of,
    is_wrapper,
    parameters_of,
    schema_of,
    storage_key,
    unset_fake_temporarily,
    with_parts,
    without_modes,
)
from memlab._util.units import KIB
from memlab.errors import UnsupportedError

# TorchScript inside a model, whose executor runs the first calls of a function differently.
#
# The executor profiles the first call and runs it like plain PyTorch. The second call runs a
# graph
# with its own backward, which keeps other tensors than autograd would and is profiled too. The
# third
# call frees the gradients of that backward later. From then on all calls are alike, so such a
# model
# is measured in its third step or later. Left out: kernels that the executor fuses on a card.

NUM_STEPS = 3  # of one micro-batch, until a step runs like all later ones
SETTLED = (
    "The model has TorchScript parts, whose executor runs the first two steps differently from all "
    "later ones. These are the numbers of the third step."
)


def is_scripted(model: torch.nn.Module) -> bool:
    """Return whether any module was made by `torch.jit.script` or `torch.jit.trace`."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())


@contextlib.contextmanager
def noticed_script_functions(notice: Callable[[], None]) -> Iterator[None]:
    """Call `notice` before each function that was made by `torch.jit.script` or `trace` runs."""
    kind: Any = torch.jit.ScriptFunction
    call = kind.__call__

    def new_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        notice()
        return call(self, *args, **kwargs)

    kind.__call__ = new_call
    try:
        yield
    finally:
        kind.__call__ = call


Changed = dict[int, tuple[Any, Any]]
"""By the id of a changed object: the object itself, so that the id stays valid, and its result."""

Learn = Callable[[torch.Tensor, torch.Tensor], None]
"""Is told a fake tensor, and the real one whose values it has."""


class OwnFormat(FakeTensor):
    """A fake parameter that says it is of the class of the real one: libraries ask for its name."""

    __class__ = property(lambda self: vars(self)["_kind"])


def as_own_format(parameter: Any, kind: type) -> None:
    """Make a fake parameter say that it is of a class of parameters."""
    vars(parameter)["_kind"] = kind
    if kind is not torch.nn.Parameter:
        parameter.__class__ = OwnFormat


def kind_of(parameter: Any) -> type:
    """Return the class of parameters that a fake one says that it is of."""
    kind: type = vars(parameter).get("_kind", torch.nn.Parameter)
    return kind


def own_formats(model: torch.nn.Module) -> list[str]:
    """Return the names of parameter classes that define their own `to`, such as quantized ones."""
    kinds = {type(parameter) for parameter in model.parameters()}
    return sorted(kind.__name__ for kind in kinds if kind.to is not torch.Tensor.to)


def made_fake(model: torch.nn.Module, mode: FakeTensorMode, learn: Learn) -> torch.nn.Module:
    """Replace the tensors of a model that was built for real by fake ones, tied in the same way.

    Attributes of a parameter, such as the scales of a quantized one, are set on the fake parameter,
    with fake tensors in them.

    Args:
        model: built for real; it is changed.
        mode: makes the fake tensors.
        learn: is called for tensors that are neither parameters nor buffers, since models index
            with these, and branch on them.
    """
    if is_scripted(model):
        raise UnsupportedError(
            "a model with TorchScript modules that cannot be built of fake tensors (a traced one, "
            "for instance) cannot be predicted; use memlab.measure, or the module before tracing"
        )

    for path, own in (*model.named_parameters(), *model.named_buffers()):
        check_dense([own], f"the model's {path}")
    for kind, tensor in ((type(t), t) for t in (*model.parameters(), *model.buffers())):
        if hasattr(kind, "__tensor_flatten__") and not is_wrapper(kind):
            raise UnsupportedError(
                f"a tensor of {kind.__module__}.{kind.__qualname__} (shape {tuple(tensor.shape)}) "
                "is a tensor subclass that consists of other tensors, which a prediction cannot "
                "follow; use memlab.measure"
            )

    memory: dict[tuple[Any, ...], torch.Tensor] = {}
    changed: Changed = {}

    def fake(real: torch.Tensor) -> torch.Tensor:
        if is_wrapper(type(real)):
            wrapped = with_parts(real.detach(), fake)
            if not isinstance(real, torch.nn.Parameter):
                return wrapped
            whole = torch.nn.Parameter(wrapped, real.requires_grad)
            changed[id(real)] = (real, whole)
            return whole

        # a parameter and a tensor among its attributes may share memory
        key = place_in_memory(real)
        if key not in memory:
            memory[key] = mode.from_tensor(real.detach().as_subclass(torch.Tensor)).clone()

        made = memory[key]
        if not isinstance(real, torch.nn.Parameter):
            return made

        parameter = torch.nn.Parameter(made, real.requires_grad)
        as_own_format(parameter, type(real))
        changed[id(real)] = (real, parameter)  # before its attributes, which may refer to it
        vars(parameter).update(carried(vars(real), fake, changed))
        return parameter

    for module in model.modules():
        for tensors in (parameters_of(module), buffers_of(module)):
            tensors.update({name: carried(t, fake, changed) for name, t in tensors.items()})

    _carry_plain_tensors(model, fake, changed, learn)
    follow(model, changed)
    return model


def check_dense(tensors: Iterable[torch.Tensor], where: str) -> None:
    """Raise UnsupportedError for a sparse tensor, whose parts fake tensors do not hold."""
    for tensor in tensors:
        if tensor.layout not in (torch.strided, torch.jagged):
            layout = str(tensor.layout).removeprefix("torch.")
            raise UnsupportedError(
                f"{where} has a tensor of layout {layout} and shape {tuple(tensor.shape)}, and a "
                "prediction does not know what operators on sparse tensors take; use "
                "memlab.measure, or gather and index_add over the indices (edges) as dense tensors"
            )


def _carry_plain_tensors(
    model: torch.nn.Module,
    fake: Callable[[torch.Tensor], torch.Tensor],
    changed: Changed,
    learn: Learn,
) -> None:
    """Replace tensors that modules hold themselves, or in lists, tuples and dictionaries.

    What shares memory with a parameter or a buffer stays as it is. A model may read the others
    through numpy: that gives their values as they were built.
    """
    counted = {
        storage_key(old.untyped_storage())
        for old, _ in changed.values()
        if isinstance(old, torch.Tensor)
    }

    def learned(real: torch.Tensor) -> torch.Tensor:
        if not _is_plain(real) or storage_key(real.untyped_storage()) in counted:
            return real
        made = fake(real)
        learn(made, real)
        if real.is_leaf and real.requires_grad:
            made.requires_grad_()
        made.numpy = real.numpy  # type: ignore[method-assign]
        return made

    theirs = vars(torch.nn.Module())  # parameters, buffers, hooks
    for module in model.modules():
        for name, value in vars(module).items():
            is_plain = isinstance(value, torch.Tensor) or type(value) in (list, tuple, dict)
            if is_plain and name not in theirs:
                vars(module)[name] = carried(value, learned, changed)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_usual = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return (
        is_usual and tensor.device.type == "cpu" and not (tensor.is_quantized or tensor.is_nested)
    )


def place_in_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors share if they are the same numbers in the same memory."""
    sizes = tuple(tensor.shape), tuple(tensor.stride())
    return storage_key(tensor.untyped_storage()), tensor.storage_offset(), tensor.dtype, *sizes


def follow(model: torch.nn.Module, changed: Changed) -> None:
    """Replace references to changed objects in the attributes of modules."""
    for module in model.modules():
        for name, value in vars(module).items():
            known = changed.get(id(value))
            if known is not None and known[0] is value:
                vars(module)[name] = known[1]


def carried(value: Any, change: Callable[[torch.Tensor], torch.Tensor], changed: Changed) -> Any:
    """Return a value with all tensors in it changed: a copy, or itself if it holds no tensor.

    Modules, functions and classes that it refers to are not changed.
    """
    if id(value) in changed:
        return changed[id(value)][1]

    if isinstance(value, torch.Tensor):
        new: Any = change(value)
    elif type(value) in (list, tuple):
        new = type(value)(carried(item, change, changed) for item in value)
        new = value if all(a is b for a, b in zip(new, value, strict=True)) else new
    elif type(value) is dict:
        new = _fields(value, change, changed)
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, ModuleType):
        changed[id(value)] = (value, value)  # it may refer to itself
        fields = _fields(vars(value), change, changed)
        new = value if fields is vars(value) else copy.copy(value)
        vars(new).update(fields)
    else:
        new = value

    changed[id(value)] = (value, new)
    return new


def _fields(
    held: dict[Any, Any], change: Callable[[torch.Tensor], torch.Tensor], changed: Changed
) -> dict[Any, Any]:
    new = {name: carried(item, change, changed) for name, item in held.items()}
    return held if all(new[name] is item for name, item in held.items()) else new


def attributes_of(fake: FakeTensor) -> dict[str, Any]:
    """Return the attributes that were set on a fake tensor."""
    own = vars(fake.fake_mode.from_tensor(torch.empty(0)))
    return {name: value for name, value in vars(fake).items() if name not in own}


# Build a model whose large tensors take no memory.
#
# It is for models that cannot be built of fake tensors. A parameter class of its own, such
# as the 4-bit weights of bitsandbytes, needs an ordinary tensor on an ordinary device. So
# here large tensors are ordinary ones, over memory that is reserved but never touched, and
# operators on them only work out the shapes of their results. A base of seven billion
# parameters quantizes itself within seconds. Small tensors have values, since a library may
# read them: the table of a number format, for example. Left out: what numpy or a list shows
# of a large tensor is zeros.

MOST_WITH_VALUES = 64 * KIB
META = torch.device("meta")
SETS: Any = {torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.set_.source_Storage}
COPY: Any = torch.ops.aten.copy_.default


class _Outlines(TorchDispatchMode):
    """Runs operators that make a large tensor, or read one, for the shapes of their results.

    Attributes:
        storages: those without memory, by their key; held so that no key is used again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on shapes alone if it reads or makes a tensor without memory."""
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not tensors and kwargs.get("device") is not None:
            shape = operator(*args, **{**kwargs, "device": META})
            is_large = isinstance(shape, torch.Tensor) and shape.nbytes > MOST_WITH_VALUES
            return self._like(shape) if is_large else operator(*args, **kwargs)
        is_view = operator.is_view or operator in SETS
        if is_view or not any(self._is_outlined(t) for t in tensors):
            return operator(*args, **kwargs)
        return self._on_shapes(operator, args, kwargs)

    def _is_outlined(self, tensor: torch.Tensor) -> bool:
        has_memory = tensor.layout is torch.strided and not tensor.is_meta
        return has_memory and storage_key(tensor.untyped_storage()) in self.storages

    def _on_shapes(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for given, argument in zip(args, schema_of(operator).arguments, strict=False):
            is_changed = argument.is_write and isinstance(given, torch.Tensor)
            if is_changed and not self._is_outlined(given):
                storage = given.untyped_storage()
                if operator is not COPY or given.nbytes != storage.nbytes():
                    raise RuntimeError(f"{operator} would write unknown values among known ones")
                self.storages[storage_key(storage)] = storage  # a deep copy has no values either

        own: dict[int, torch.Tensor] = {}

        def shape_of(tensor: torch.Tensor) -> torch.Tensor:
            shape = tensor if tensor.is_meta else torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META
            )  # fmt: skip
            own[id(shape)] = tensor
            return shape

        def result(shape: torch.Tensor) -> torch.Tensor:
            return own[id(shape)] if id(shape) in own else self._like(shape)

        shapes = pytree.tree_map_only(torch.Tensor, shape_of, (args, kwargs))
        if kwargs.get("device") is not None:
            shapes[1]["device"] = META
        made = operator(*shapes[0], **shapes[1])
        return pytree.tree_map_only(torch.Tensor, result, made)

    def _like(self, shape: torch.Tensor) -> torch.Tensor:
        """Return an ordinary tensor of this shape, over memory that is never touched."""
        nbytes = max(shape.untyped_storage().nbytes(), shape.element_size())
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=shape.dtype)
        storage = memory.untyped_storage()
        self.storages[storage_key(storage)] = storage
        return memory.as_strided(shape.size(), shape.stride())


@contextlib.contextmanager
def outlines() -> Iterator[_Outlines]:
    """Make large tensors without memory, inside a run over fake ones."""
    with unset_fake_temporarily(), without_modes(), _Outlines() as made:
        yield made


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """What building a model without memory has shown.

    Attributes:
        quantized: the model, if its parameters have quantized themselves. Otherwise None: its build
            or its parameters read values, or it has no such parameters.
        nbytes: that the model takes if it is built for real; if the build failed, what its large
            tensors would have taken until then.
        error: that the build raised; None if it went well.
    """

    quantized: torch.nn.Module | None = None
    nbytes: int = 0
    error: Exception | None = None


def outline_of(build: Callable[[], torch.nn.Module]) -> Outline:
    """Build a model without memory, and let its parameters quantize themselves."""
    nbytes = 0
    with outlines() as made:
        try:
            model = build()
            if not isinstance(model, torch.nn.Module):
                return Outline()
            tensors = [*model.parameters(), *model.buffers()]
            storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
            nbytes = sum({storage_key(s): s.nbytes() for s in storages}.values())
            quantized = model.to("cpu") if own_formats(model) else None
            return Outline(quantized=quantized, nbytes=nbytes)
        except Exception as error:  # a library may do anything with a tensor that has no memory
            asked = sum(storage.nbytes() for storage in made.storages.values())
            # whose frames hold the model
            return Outline(nbytes=nbytes or asked, error=error.with_traceback(None))


def said_by(error: Exception) -> str:
    """Return the class and the first line of an error."""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
