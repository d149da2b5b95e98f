"""Turn a model that was built of ordinary tensors into a model of fake ones.

Some models cannot be built of fake tensors. Parameter classes with formats of their own, such as
the 4-bit weights of bitsandbytes, manage their memory themselves and quantize it when they are
moved to a device. Left out: a module's own tensors that are sparse, quantized or nested, and those
in an object of another class that is itself an attribute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from memlab.errors import UnsupportedError
from memlab.recording.scripted import is_scripted
from memlab.torch_private.fakes import FakeTensor, FakeTensorMode
from memlab.torch_private.modules import buffers_of, parameters_of
from memlab.torch_private.tensors import is_wrapper, storage_key, with_parts

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
