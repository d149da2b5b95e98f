"""What a loss brings along: a teacher, class weights, prototypes, a learnable temperature.

A loss may hold modules and tensors in a closure, a default argument, a `functools.partial`, an
object, a loss module such as `CrossEntropyLoss(weight=...)`, a global, or what a function with
`functools.cache` has returned. Each step has copies of them on its own device, which stand in their
places while the step runs, and it alone trains them. So they are counted with the step, and the
person's own objects are neither moved nor changed.

    the loss holds              the step has
    a parameter                 a parameter "loss.<path>", which the optimizer gets if it requires
                                a gradient
    a buffer, a plain tensor    a buffer

They keep their number format and the module's `train` or `eval`. Left out: attributes and globals
that no code of the loss names, NumPy arrays, TorchScript modules, and objects of C extensions.
"""

import copy
import dis
import functools
import gc
import re
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import nn

from memlab._util.torch_private.tensors import MODULES, buffers_of, parameters_of, storage_key
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing.mutable_state import (
    HOLDERS,
    MAPPINGS,
    OF_TORCH,
    Cell,
    Items,
    NamesPlace,
    PythonPlace,
    Reachable,
    contents_of,
    is_foreign,
    names_in,
    slots_of,
)

IMMUTABLE = (torch.Tensor, tuple, functools.partial, types.MethodType)
"""What is replaced in the place that holds it; all else is changed in its own places."""


Copy = Callable[[torch.Tensor, torch.device], torch.Tensor]
"""Returns a copy of a tensor on a device."""


@dataclass(frozen=True, slots=True)
class CopiedLoss:
    """A loss whose own tensors a step copies in another way."""

    function: Callable[[nn.Module, Any], torch.Tensor]
    copy: Copy

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss, by its own tensors as they are."""
        return self.function(model, batch)


class LossTensors:
    """A loss with copies of the tensors that it brings along.

    Attributes:
        parameters: those that require a gradient or are parameters of a module, by name.
        trains: whether the step's optimizer has those of them that require a gradient.

    Args:
        compute_loss: of a workload.
        model: on the device; what the loss shares with it belongs to the model.
        device: of the step.
    """

    def __init__(
        self, compute_loss: Callable[..., torch.Tensor], model: nn.Module, device: torch.device
    ) -> None:
        copy_of: Copy = _copy
        if isinstance(compute_loss, CopiedLoss):
            copy_of, compute_loss = compute_loss.copy, compute_loss.function

        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        self._root, self._model = "loss", model
        while any(name.startswith(f"{self._root}.") for name in names):
            self._root += "_"

        found = _UsedByLoss(self._root, compute_loss, model)
        copies: dict[int, torch.Tensor] = {}
        in_memory: dict[Any, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.trains = True
        self._buffer_names = set[str]()
        for name, tensor in _named(found, model):
            copied = copies[id(tensor)] = _copied(tensor, copy_of, device, in_memory)
            if isinstance(copied, nn.Parameter) or copied.requires_grad:
                self.parameters[name] = copied
            else:
                self._buffer_names.add(name)

        self._places, self._ours = list[PythonPlace](), list[tuple[Any, ...]]()
        for place in found.places:
            contents = () if place.fixed or place.is_large else place.read()
            ours = tuple([_with(copies, item) for item in contents])
            if any(new is not old for new, old in zip(ours, contents, strict=True)):
                self._places.append(place)
                self._ours.append(ours)
        self._theirs: list[tuple[Any, ...]] = []
        self._sizes: list[int] = []
        self._depth = 0
        self._compute_loss = _with(copies, compute_loss)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """All other dense tensors, by name, as the loss holds them now; it may put others there."""
        with self:
            found = dict(
                _named(_UsedByLoss(self._root, self._compute_loss, self._model), self._model)
            )
        dense = {name: t for name, t in found.items() if t.layout is torch.strided}
        return {name: t for name, t in dense.items() if name in self._buffer_names}

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss, by the copies."""
        with self:
            loss: torch.Tensor = self._compute_loss(model, batch)
            return loss

    def __enter__(self) -> None:
        """Put the copies in their places; also for a backward, which may run the loss again."""
        self._depth += 1
        if self._depth == 1:
            self._theirs = [place.read() for place in self._places]
            self._write(self._ours)
            self._sizes = [len(held) for held in self._ours]
            self._ours = []  # else what the loss lets go of would live on

    def __exit__(self, *_: object) -> None:
        """Keep what stands in these places now, and put back what stood there.

        What the loss has appended to a list stays there, as in a training loop of the person's.
        """
        self._depth -= 1
        if self._depth == 0:
            self._ours = [place.read() for place in self._places]
            now = zip(self._places, self._theirs, self._sizes, self._ours, strict=True)
            self._write([
                (*theirs, *ours[size:]) if isinstance(place.holder, list) else theirs
                for place, theirs, size, ours in now
            ])  # fmt: skip

    def check_trained(self) -> None:
        """Check after a backward that the optimizer has each parameter that has a gradient.

        Raises:
            UnsupportedError: ranks would have to average it, or a person makes the optimizer.
        """
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not self.trains:
                raise UnsupportedError(
                    f"{name} is a parameter of the loss that trains, and neither ranks nor "
                    "make_optimizer train one; make it a part of the model, or use sharding='none' "
                    "and StepConfig(optimizer=...)"
                )

    def _write(self, contents: list[tuple[Any, ...]]) -> None:
        for place, held in zip(self._places, contents, strict=True):
            place.write(held)


class WithLoss(nn.Module):
    """The parameters and buffers of a model and of its loss, by name."""

    def __init__(self, model: nn.Module, tensors: LossTensors) -> None:
        super().__init__()
        self.model = model
        self._tensors = tensors

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield those of the model, then those of the loss."""
        yield from self.model.named_parameters(*args, **kwargs)
        yield from self._tensors.parameters.items()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those of the model, then those of the loss."""
        yield from self.model.named_buffers(*args, **kwargs)
        yield from self._tensors.buffers.items()


class _UsedByLoss(Reachable):
    """The tensors that the code of a loss refers to, and the places that hold them.

    Of a module that is every tensor; of any other object and of a namespace what code names.
    """

    only_named = True

    def __init__(self, root: str, compute_loss: Any, model: nn.Module) -> None:
        self._of_model = {id(module) for module in model.modules()}
        super().__init__([(root, compute_loss)])

    def _look_into(self, where: str, value: Any) -> None:
        if isinstance(value, functools.partial):
            given = [(f"{where}.{at}", item) for at, item in enumerate(value.args)]
            self._ahead += [(where, value.func), *given, (where, value.keywords)]
        elif isinstance(value, nn.Module):
            self._look_into_module(where, value)
        else:
            super()._look_into(where, value)

    def _look_into_module(self, where: str, module: nn.Module) -> None:
        if id(module) in self._of_model:
            return
        own = vars(module)
        for tensors in (parameters_of(module), buffers_of(module), own):
            self.places.append(Items(tensors, where))
        for held in (own, own[MODULES], buffers_of(module), parameters_of(module)):
            items = tuple(held.items())
            self._ahead += [(f"{where}.{name}", x) for name, x in items if name not in OF_TORCH]
        hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        self._ahead += [(where, hook) for hook in (*hooks, type(module))]

    def _look_into_function(self, where: str, function: types.FunctionType) -> None:
        """Look into what a function holds, also if a library has wrapped it around another."""
        code, namespace = function.__code__, function.__globals__
        is_of_library = is_foreign(namespace.get("__name__", ""))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self.places.append(Cell(cell, where))
            path = where if is_of_library else f"{where}.{name}"
            self._ahead += [(path, item) for item in contents_of(cell)]

        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        self.places.append(NamesPlace(function, where, ("__defaults__",)))
        self._ahead += [(f"{where}.{n}", item) for n, item in zip(names, defaults, strict=True)]
        self._ahead += [(where, function.__kwdefaults__), (where, vars(function))]

        if not is_of_library:
            used = names_in(code)
            self._look_into_namespace(where, namespace, _globals_in(code), used)
            for name in used - self.names:
                self.names.add(name)
                self._ahead += self.waiting.pop(name, [])

    def _look_into_namespace(
        self, where: str, namespace: dict[str, Any], read: frozenset[str], used: frozenset[str]
    ) -> None:
        for name in read & namespace.keys():
            value = namespace[name]
            if not isinstance(value, types.ModuleType):
                if isinstance(value, IMMUTABLE):
                    self.places.append(NamesPlace(namespace, where, (name,)))
                self._ahead.append((f"{where}.{name}", value))
            elif not is_foreign(value.__name__) and id(value) not in self.reached:
                self.reached[id(value)] = value
                self._look_into_namespace(where, vars(value), used - {name}, used)

    def _look_into_object(self, where: str, value: Any) -> None:
        kind = type(value)
        if kind in MAPPINGS or kind in (list, set, tuple, deque, frozenset):
            return
        is_whole = isinstance(value, torch.distributions.Distribution) or (
            is_dataclass(value) and kind.__module__.startswith("memlab.")
        )
        if is_foreign(kind.__module__) and not is_whole and kind not in HOLDERS:
            self._ahead.append((where, getattr(value, "__wrapped__", None)))
            if isinstance(value, functools._lru_cache_wrapper):  # a teacher that is loaded once
                cached = [one for one in gc.get_referents(value) if not isinstance(one, type)]
                self._ahead += [(where, one) for one in cached if not torch.is_tensor(one)]
            return

        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.places.append(Items(own, where))
        slots = tuple(slots_of(kind))
        if slots:
            self.places.append(NamesPlace(value, where, slots))
        held = dict(own or {}) | {name: getattr(value, name, None) for name in slots}
        for name, item in held.items():
            needed = is_whole or name in self.names
            (self._ahead if needed else self.waiting[name]).append((f"{where}.{name}", item))
        self._ahead.append((where, kind))


@functools.cache
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals that code reads, with those of inner functions."""
    inner = [_globals_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    reads = ("LOAD_GLOBAL", "LOAD_NAME")
    own = (step.argval for step in dis.get_instructions(code) if step.opname in reads)
    return frozenset(own).union(*inner)


def tensors_of_loss(compute_loss: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a loss brings along, by name; none of them is copied."""
    model = nn.Module()
    return _named(_UsedByLoss("loss", compute_loss, model), model)


def _named(found: "_UsedByLoss", model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the loss, except those of the model and results of operators."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    names = set[str]()
    for where, tensor in reversed(found.tensors):
        if id(tensor) in own or not tensor.is_leaf or tensor.is_meta:
            continue
        name = _name(where)
        while name in names:
            name += "_"
        names.add(name)
        yield name, tensor


def _name(where: str) -> str:
    """Return the path of a tensor: keys of dicts and positions in lists are names in it.

    >>> _name("loss.heads['a'][0].weight")
    'loss.heads.a.0.weight'
    """
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", where)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, copy=True)


def _copied(
    tensor: torch.Tensor, copy_of: Copy, device: torch.device, in_memory: dict[Any, torch.Tensor]
) -> torch.Tensor:
    """Return a copy with the same attributes. Two tensors that are the same memory become one."""
    if type(tensor).to is not torch.Tensor.to:  # a quantized parameter knows how it is copied
        return copy.deepcopy(tensor).to(device)

    key: Any = id(tensor)
    if tensor.layout is torch.strided:
        place = storage_key(tensor.untyped_storage()), tensor.storage_offset()
        key = *place, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
    if key not in in_memory:
        with torch.no_grad():
            in_memory[key] = copy_of(tensor, device)

    made = in_memory[key]
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    elif tensor.requires_grad:
        made = made.detach().requires_grad_()
    vars(made).update(vars(tensor))
    return made


def _with(copies: dict[int, torch.Tensor], value: Any) -> Any:
    """Return a value with copies in place of its tensors; itself if it holds none."""
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if not isinstance(value, IMMUTABLE):
        return value

    if isinstance(value, types.MethodType):
        owner = _with(copies, value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if isinstance(value, functools.partial):
        held = (value.func, *value.args, *value.keywords.values())
        new = [_with(copies, item) for item in held]
        if all(map(lambda a, b: a is b, new, held)):
            return value
        first = 1 + len(value.args)
        named = dict(zip(value.keywords, new[first:], strict=True))
        return functools.partial(new[0], *new[1:first], **named)

    new = [_with(copies, item) for item in value]
    if all(map(lambda a, b: a is b, new, value)):
        return value
    return type(value)._make(new) if hasattr(value, "_make") else type(value)(new)
