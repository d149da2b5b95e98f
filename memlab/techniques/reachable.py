"""What a module's forward can reach in Python beside its inputs, so that a recompute can undo it.

A forward may write to more than tensors: it registers hooks, fills a cache that an attribute holds,
counts in a global or in a class, appends to a list that a hook was given. `Reachable` walks from a
module to every such place, by attributes, items of containers, closures, default arguments, and
those names of classes and globals that the code which is reached uses. It notes what each place
holds, and afterwards says which places hold something else and puts back what they held.

Left out: what Python cannot look into (C extensions, files, iterators), what torch, memlab and the
standard library keep for themselves, and tensors, of which only the version is compared. A walk
takes about a millisecond for a block, so a module is walked in its first calls alone.
"""

import contextvars
import dataclasses
import dis
import functools
import random
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

MOST_PLACES = 20_000  # a walk ends there: what a forward reaches is rarely more than a thousand
FOREIGN = (sys.stdlib_module_names | {"torch", "memlab", "numpy"}) - {"__main__"}
ATOMS = frozenset(
    (int, float, complex, bool, str, bytes, type(None), type(...), range, slice, np.dtype)
) | {torch.dtype, torch.device, torch.Size, types.BuiltinFunctionType}
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
CALLED = frozenset(("forward", "__call__", "__getattr__", "__getitem__", "__enter__", "__exit__"))
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of torch itself: its registries of parameters, buffers, modules and hooks."""
MISSING = object()  # in place of the value of a name that a namespace lacks


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Something whose contents can be read and put back.

    Attributes:
        holder: a container, a class, the cell of a closure, an object with slots, a generator.
        where: how the walk came to it.
        names: of a namespace, those that are looked at; None is all.
        is_local: whether it belongs to one thread.
    """

    holder: Any
    where: str
    names: tuple[str, ...] | None = None
    is_local: bool = False

    def read(self) -> tuple[Any, ...]:
        """Return what it holds, one level deep, to be compared by identity."""
        holder = self.holder
        if isinstance(holder, type):
            return tuple(item for item in vars(holder).items() if not _is_of_python(item[0]))
        if self.names is not None and isinstance(holder, dict):
            return tuple(holder.get(name, MISSING) for name in self.names)
        if self.names is not None:
            return tuple(getattr(holder, name, MISSING) for name in self.names)
        if isinstance(holder, dict):
            own = holder if isinstance(holder, OrderedDict) else dict.items(holder)
            return tuple(own.items() if isinstance(own, OrderedDict) else own)
        if isinstance(holder, types.CellType):
            return _cell(holder)
        if isinstance(holder, np.ndarray):
            return (holder.tobytes(),) if holder.dtype != object else tuple(holder.flat)
        if isinstance(holder, GENERATORS):
            return (repr(_state_of(holder)), _state_of(holder))
        return tuple(holder)

    def write(self, contents: tuple[Any, ...]) -> None:
        """Put back what `read` returned."""
        holder = self.holder
        if self.names is not None:
            for name, value in zip(self.names, contents, strict=True):
                _set(holder, name, value)
        elif isinstance(holder, type):
            held, wanted = dict(self.read()), dict(contents)
            for name in held.keys() | wanted.keys():
                if held.get(name, MISSING) is not wanted.get(name, MISSING):
                    _set(holder, name, wanted.get(name, MISSING))
        elif isinstance(holder, dict):
            kind = OrderedDict if isinstance(holder, OrderedDict) else dict
            kind.clear(holder)
            for key, value in contents:
                kind.__setitem__(holder, key, value)
        elif isinstance(holder, types.CellType):
            if contents:
                holder.cell_contents = contents[0]
            else:
                del holder.cell_contents
        elif isinstance(holder, np.ndarray):
            is_bytes = holder.dtype != object
            values: Any = np.frombuffer(contents[0], holder.dtype) if is_bytes else contents
            holder.flat[:] = values
        elif isinstance(holder, GENERATORS):
            _set_state_of(holder, contents[1])
        elif isinstance(holder, list):
            list.__setitem__(holder, slice(None), contents)
        else:
            holder.clear()
            holder.update(contents) if isinstance(holder, set) else holder.extend(contents)


def is_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Return whether a place holds what it held: the same objects, or equal plain values."""
    return len(before) == len(after) and all(map(_is_same_value, before, after))


def _is_same_value(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is tuple and type(after) is tuple:  # a key and its value
        return is_same(before, after)
    return type(before) is type(after) and type(before) in ATOMS and bool(before == after)


class Reachable:
    """The places that a walk from these roots finds, and the tensors.

    Args:
        roots: what to begin with, each with how to name it.
        inside: modules whose own attributes are noted by someone else; what they hold is walked.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], inside: Iterable[nn.Module] = ()) -> None:
        self.places: list[Place] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._inside = {id(part) for part in inside}
        self._seen: dict[int, Any] = {}  # holds what it has seen, so that no number comes twice
        self._names = set(CALLED)  # used by the code that was reached
        self._waiting: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        self._ahead: list[tuple[str, Any]] = list(roots)

        while self._ahead and len(self.places) < MOST_PLACES:
            where, value = self._ahead.pop()
            if type(value) not in ATOMS and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._look_into(where, value)
        self._seen.clear()

    def _look_into(self, where: str, value: Any) -> None:
        """Note a value if it is a place, and go on with what it holds."""
        if isinstance(value, torch.Tensor):
            self._look_into_tensor(where, value)
        elif isinstance(value, dict):
            self.places.append(Place(value, where))
            self._ahead += [(f"{where}[{key!r:.40}]", item) for key, item in _items(value)]
            self._look_into_object(where, value)
        elif isinstance(value, list | deque | set | tuple | frozenset):
            if not isinstance(value, tuple | frozenset):
                self.places.append(Place(value, where))
            self._ahead += [(f"{where}[{at}]", item) for at, item in enumerate(tuple(value))]
            self._look_into_object(where, value)
        elif isinstance(value, types.FunctionType):
            self._look_into_function(where, value)
        elif isinstance(value, types.MethodType):
            self._ahead += [(where, value.__func__), (where, value.__self__)]
        elif isinstance(value, functools.partial):
            if _is_foreign(getattr(value.func, "__globals__", {}).get("__name__", "")):
                return
            self._ahead += [(where, value.func), (where, value.args), (where, value.keywords)]
        elif isinstance(value, staticmethod | classmethod):
            self._ahead.append((where, value.__func__))
        elif isinstance(value, property):
            self._ahead += [(where, value.fget), (where, value.fset)]
        elif isinstance(value, type):
            self._look_into_class(where, value)
        elif isinstance(value, contextvars.ContextVar):
            self._ahead.append((where, value.get(None)))
        elif isinstance(value, (np.ndarray, *GENERATORS)):
            self.places.append(Place(value, where))
        elif isinstance(value, threading.local):
            self.places.append(Place(vars(value), where, is_local=True))
            self._ahead += [(f"{where}.{name}", item) for name, item in vars(value).items()]
        else:
            self._look_into_object(where, value)

    def _look_into_tensor(self, where: str, tensor: torch.Tensor) -> None:
        self.tensors.append((where, tensor))
        if isinstance(tensor, nn.Parameter):  # hooks pile up on it, and libraries write notes on it
            attributes = {"_backward_hooks", "_post_accumulate_grad_hooks", *vars(tensor)}
            self.places.append(Place(tensor, where, tuple(attributes)))
            hooks = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
            self.places += [Place(found, f"the hooks of {where}") for found in hooks if found]

    def _look_into_function(self, where: str, function: types.FunctionType) -> None:
        namespace = function.__globals__
        if _is_foreign(namespace.get("__name__", "")):
            return
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            self.places.append(Place(cell, f"{name!r} of {function.__qualname__}"))
            self._ahead += [(f"{name!r} of {function.__qualname__}", item) for item in _cell(cell)]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._ahead += [(f"a default of {function.__qualname__}", item) for item in defaults]
        if vars(function):
            self._ahead.append((f"an attribute of {function.__qualname__}", vars(function)))

        used = _names_in(function.__code__)
        stored = _stored_in(function.__code__)
        self._look_into_names(namespace, used, stored, str(namespace.get("__name__")))
        for name in used - self._names:
            self._names.add(name)
            self._ahead += self._waiting.pop(name, [])

    def _look_into_names(
        self, namespace: dict[str, Any], used: frozenset[str], stored: frozenset[str], of: str
    ) -> None:
        """Note the names that code stores, and go on with the values of those that it uses."""
        for name in used & namespace.keys():
            value = namespace[name]
            if not isinstance(value, types.ModuleType):
                self._ahead.append((f"{name!r} of {of}", value))
            elif not _is_foreign(value.__name__) and id(value) not in self._seen:
                self._look_into_names(vars(value), used - {name}, stored, value.__name__)
        if stored:
            self.places.append(Place(namespace, f"the globals of {of}", tuple(stored)))

    def _look_into_class(self, where: str, kind: type) -> None:
        for base in kind.__mro__:
            if _is_foreign(base.__module__) or (base is not kind and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            self.places.append(Place(base, f"the class {base.__qualname__}"))
            for name, value in tuple(vars(base).items()):
                is_code = isinstance(
                    value, types.FunctionType | staticmethod | classmethod | property
                )
                own = (f"{base.__qualname__}.{name}", value)
                if is_code and name not in self._names:
                    self._waiting[name].append(own)
                else:
                    self._ahead.append(own)

    def _look_into_object(self, where: str, value: Any) -> None:
        kind = type(value)
        is_module = isinstance(value, nn.Module)
        if kind in MAPPINGS or kind in (list, set, tuple, deque, frozenset):
            return
        if _is_foreign(kind.__module__) and not is_module and kind is not types.SimpleNamespace:
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and id(value) in self._inside:
            for name, item in tuple(own.items()):
                is_registry = name in OF_TORCH and isinstance(item, dict)
                held = item.values() if is_registry else (item,)
                self._ahead += [(f"{where}.{name}", each) for each in tuple(held)]
        elif isinstance(own, dict):
            self.places.append(Place(own, where))
            self._ahead += [(f"{where}.{name}", item) for name, item in tuple(own.items())]
        slots = tuple(_slots(kind))
        if slots:
            self.places.append(Place(value, where, slots))
            self._ahead += [(f"{where}.{name}", getattr(value, name, None)) for name in slots]
        self._ahead.append((where, kind))


def _is_of_python(name: str) -> bool:
    return name.startswith("__") or name == "_abc_impl"


def _items(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return list(dict.items(mapping))


def _cell(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name that has no value yet
        return ()


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if not _is_foreign(base.__module__):
            slots = vars(base).get("__slots__", ())
            yield from (slots,) if isinstance(slots, str) else slots


def _set(holder: Any, name: str, value: Any) -> None:
    is_mapping = isinstance(holder, dict)
    if value is not MISSING:
        holder.__setitem__(name, value) if is_mapping else setattr(holder, name, value)
    elif is_mapping:
        holder.pop(name, None)
    elif name in vars(holder) if isinstance(holder, type) else hasattr(holder, name):
        delattr(holder, name)


def _is_foreign(module_name: Any) -> bool:
    return str(module_name).partition(".")[0] in FOREIGN


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code uses, functions within it too."""
    inner = [_names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _stored_in(code: types.CodeType) -> frozenset[str]:
    """Return the names that code sets or deletes, of globals, modules and other objects."""
    inner = [_stored_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    stores = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR")
    own = (step.argval for step in dis.get_instructions(code) if step.opname in stores)
    return frozenset(own).union(*inner)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state_of(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
