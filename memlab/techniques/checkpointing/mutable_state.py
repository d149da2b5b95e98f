"""Places in Python that a forward may write to: read, compare and restore what they hold.

A place is, for instance, a list, the attributes of an object or the variable of a closure. It is
read one level deep. Its contents are compared by identity, and plain values by value. Iterators
cannot be restored, since they only move forward, and neither can data of one thread. These are read
too, so that a change can be refused by name.
"""

import _ctypes
import array
import collections
import contextvars
import ctypes
import dis
import functools
import inspect
import itertools
import operator
import pickle
import random
import sys
import threading
import types
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from memlab._util.torch_private.tensors import HOOKS, hooks_of
from memlab._util.units import MIB
from memlab.devices.generators import bytes_of

ATOMS = frozenset(
    (int, float, complex, bool, str, bytes, type(None), type(...), range, slice, np.dtype)
) | {torch.dtype, torch.device, torch.Size, types.BuiltinFunctionType}
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
BYTES: tuple[Any, ...] = (bytearray, array.array, _ctypes._SimpleCData.__base__)
MISSING = object()  # stands for the value of a name that a namespace does not have
LARGE_BYTES = MIB  # reading an array of this size takes as long as running a small block
OF_A_THREAD = "which belongs to its thread"
MOVES_ON = "which cannot be moved back; use a number or a list instead"


class PythonPlace:
    """Something whose contents can be read and, unless `fixed` says why not, restored.

    Attributes:
        holder: a container, a class, the cell of a closure, an object with slots, a generator.
        where: the path by which it was found, for messages.
        fixed: why its contents cannot be restored; "" if they can.
    """

    __slots__ = ("fixed", "holder", "where")

    def __init__(self, holder: Any, where: str, fixed: str = "") -> None:
        self.holder, self.where, self.fixed = holder, where, fixed

    @property
    def key(self) -> Any:
        """Which place this is; two places of one holder, some names each, are two."""
        return id(self.holder)

    @property
    def is_large(self) -> bool:
        """Whether reading it takes long."""
        return False

    def read(self) -> tuple[Any, ...]:
        """Return what it holds, to be compared by `is_same`."""
        return tuple(self.holder)

    def write(self, contents: tuple[Any, ...]) -> None:
        """Put back what `read` returned."""
        holder = self.holder
        if isinstance(holder, list):
            list.__setitem__(holder, slice(None), contents)
        else:
            holder.clear()
            holder.update(contents) if isinstance(holder, set) else holder.extend(contents)


class Items(PythonPlace):
    """The keys of a dict, and then their values."""

    __slots__ = ()

    def read(self) -> tuple[Any, ...]:
        """Return what it holds."""
        holder = self.holder
        kind = OrderedDict if isinstance(holder, OrderedDict) else dict
        return (*kind.keys(holder), *kind.values(holder))

    def write(self, contents: tuple[Any, ...]) -> None:
        """Put back what `read` returned."""
        kind = OrderedDict if isinstance(self.holder, OrderedDict) else dict
        kind.clear(self.holder)
        half = len(contents) // 2
        for key, value in zip(contents[:half], contents[half:], strict=True):
            kind.__setitem__(self.holder, key, value)


class OfClass(PythonPlace):
    """The attributes of a class, except those that Python itself sets."""

    __slots__ = ()

    def read(self) -> tuple[Any, ...]:
        """Return the names and values."""
        own = vars(self.holder)
        return (*own, *own.values())

    def write(self, contents: tuple[Any, ...]) -> None:
        """Put back what `read` returned."""
        half = len(contents) // 2
        wanted = dict(zip(contents[:half], contents[half:], strict=True))
        held = dict(vars(self.holder))

        for name in held.keys() | wanted.keys():
            value = wanted.get(name, MISSING)
            is_of_python = name.startswith("__") or name == "_abc_impl"
            if is_of_python or held.get(name, MISSING) is value:
                continue
            if value is not MISSING:
                setattr(self.holder, name, value)
            elif name in vars(self.holder):
                delattr(self.holder, name)


class NamesPlace(PythonPlace):
    """Some names of a namespace or of an object with slots."""

    __slots__ = ("names",)

    def __init__(self, holder: Any, where: str, names: tuple[str, ...]) -> None:
        super().__init__(holder, where)
        self.names = names

    @property
    def key(self) -> Any:
        """Which place this is."""
        return id(self.holder), self.names

    def read(self) -> tuple[Any, ...]:
        """Return their values."""
        holder = self.holder
        if isinstance(holder, dict):
            return tuple([holder.get(name, MISSING) for name in self.names])
        return tuple([getattr(holder, name, MISSING) for name in self.names])

    def write(self, contents: tuple[Any, ...]) -> None:
        """Put back what `read` returned."""
        for name, value in zip(self.names, contents, strict=True):
            if isinstance(self.holder, dict):
                self._set_in_namespace(name, value)
            else:
                self._set_on_object(name, value)

    def _set_in_namespace(self, name: str, value: Any) -> None:
        if value is MISSING:
            self.holder.pop(name, None)
        else:
            self.holder[name] = value

    def _set_on_object(self, name: str, value: Any) -> None:
        """Set or delete an attribute, past what forbids it to others, as frozen classes do."""
        if value is not MISSING:
            object.__setattr__(self.holder, name, value)
        elif hasattr(self.holder, name):
            object.__delattr__(self.holder, name)


class Cell(PythonPlace):
    """A variable of a closure."""

    __slots__ = ()

    def read(self) -> tuple[Any, ...]:
        """Return its value, if it has one."""
        return contents_of(self.holder)

    def write(self, contents: tuple[Any, ...]) -> None:
        """Put back what `read` returned."""
        if contents:
            self.holder.cell_contents = contents[0]
        else:
            del self.holder.cell_contents


class Memory(PythonPlace):
    """An array of NumPy, or of bytes: a bytearray, an array of `array`, data of ctypes."""

    __slots__ = ()

    @property
    def is_large(self) -> bool:
        """Whether reading it takes long."""
        return memoryview(self.holder).nbytes > LARGE_BYTES if self._has_bytes else False

    @property
    def _has_bytes(self) -> bool:
        return not isinstance(self.holder, np.ndarray) or self.holder.dtype.kind in "biufc"

    def read(self) -> tuple[Any, ...]:
        """Return its bytes, or the objects that it holds."""
        holder = self.holder
        if isinstance(holder, np.ndarray):
            return (holder.tobytes(),) if holder.dtype != object else tuple(holder.flat)
        return (memoryview(holder).tobytes(),)

    def write(self, contents: tuple[Any, ...]) -> None:
        """Put back what `read` returned."""
        holder = self.holder
        if isinstance(holder, np.ndarray):
            is_bytes = holder.dtype != object
            values: Any = np.frombuffer(contents[0], holder.dtype) if is_bytes else contents
            holder.flat[:] = values
        elif isinstance(holder, bytearray):
            holder[:] = contents[0]
        elif isinstance(holder, array.array):
            holder[:] = array.array(holder.typecode, contents[0])
        else:
            ctypes.memmove(ctypes.addressof(holder), contents[0], ctypes.sizeof(holder))


class GeneratorPlace(PythonPlace):
    """A generator of random numbers."""

    __slots__ = ()

    def read(self) -> tuple[Any, ...]:
        """Return its state, as bytes."""
        generator = self.holder
        if isinstance(generator, torch.Generator):
            return (bytes_of(generator.get_state()),)
        if isinstance(generator, random.Random):
            return (pickle.dumps(generator.getstate()),)
        if isinstance(generator, np.random.RandomState):
            return (pickle.dumps(generator.get_state(legacy=False)),)
        return (pickle.dumps(generator.bit_generator.state),)

    def write(self, contents: tuple[Any, ...]) -> None:
        """Put back what `read` returned."""
        generator, state = self.holder, contents[0]
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif isinstance(generator, random.Random):
            generator.setstate(pickle.loads(state))
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(pickle.loads(state))
        else:
            generator.bit_generator.state = pickle.loads(state)


class Advances(PythonPlace):
    """A built-in iterator, whose position can be read but not restored."""

    __slots__ = ()

    def __init__(self, holder: Any, where: str) -> None:
        super().__init__(holder, where, MOVES_ON)

    def read(self) -> tuple[Any, ...]:
        """Return the parts of its pickle, which contain its position.

        Raises:
            TypeError: its position cannot be read, as that of a generator.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools from Python 3.12
            return tuple(_parts(self.holder.__reduce__()))


def _parts(reduced: Any) -> Iterator[Any]:
    for part in reduced:
        if is_iterator(part):
            yield from _parts(part.__reduce__())
        elif isinstance(part, tuple):
            yield from _parts(part)
        else:
            # pickling makes a new list of what is left, so its length is compared
            yield len(part) if isinstance(part, list) else part


def is_iterator(value: Any) -> bool:
    """Return whether a value is a built-in iterator: a generator, a count, a zip."""
    return type(value).__module__ in ("builtins", "itertools") and isinstance(value, Iterator)


def place_of(holder: Any, where: str) -> PythonPlace | None:
    """Return a value as a place; None if it is not one."""
    if isinstance(holder, dict):
        return Items(holder, where)
    if isinstance(holder, list | set | deque):
        return PythonPlace(holder, where)
    if isinstance(holder, GENERATORS):
        return GeneratorPlace(holder, where)
    if isinstance(holder, (np.ndarray, *BYTES)):
        return Memory(holder, where)

    return Advances(holder, f"{where} ({type(holder).__name__})") if is_iterator(holder) else None


def is_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Return whether a place has not changed: it holds the same objects or equal plain values."""
    return len(before) == len(after) and (
        all(map(operator.is_, before, after)) or all(map(_is_same_value, before, after))
    )


def are_same(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> bool:
    """Return whether many places hold the same objects; a fast check before `is_same`."""
    return list(map(len, before)) == list(map(len, after)) and all(
        map(operator.is_, itertools.chain(*before), itertools.chain(*after))
    )


def _is_same_value(before: Any, after: Any) -> bool:
    if before is after:
        return True
    return type(before) is type(after) and type(before) in ATOMS and bool(before == after)


def contents_of(cell: types.CellType) -> tuple[Any, ...]:
    """Return the value of a closure's variable in a tuple, which is empty if it has none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


# Find every place in Python that a module's forward can write to, so that it can be restored.
#
# A forward may write to more than tensors. It may register hooks, fill a cache in an
# attribute, count in a global or in a class, or append to a list that a hook holds. A
# recompute would do all this a second time. `Reachable` walks from a module to every such
# place: through attributes, items of containers, closures, default arguments, and those
# names of classes and globals that the reached code uses. `State` reads the places
# before and after a forward, and restores those that changed.
#
# Left out: what Python cannot inspect (C extensions, files), and objects of torch,
# DeepSpeed, memlab and the standard library, except its containers and weak references. A
# walk takes milliseconds for a block; reading the places that it found takes microseconds.

MOST_PLACES = 20_000  # a walk stops there; a forward rarely reaches more than a thousand places
FOREIGN = (sys.stdlib_module_names | {"torch", "memlab", "numpy", "deepspeed"}) - {"__main__"}
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
HOLDERS = (
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    types.SimpleNamespace,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)
"""Classes of the standard library that the walk looks into."""
CALLED = frozenset(
    (
        "forward",
        "__call__",
        "__enter__",
        "__exit__",
        "__get__",
        "__set__",
        "__getattr__",
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__contains__",
        "__iter__",
        "__next__",
        "__len__",
        "__bool__",
    )
)
"""Methods that code may call without naming them."""
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of torch itself: its registries of parameters, buffers, modules and hooks."""


class Reachable:
    """The places and the tensors that a walk from these roots finds.

    Args:
        roots: the objects to start from, each with a name for messages.
        inside: modules whose own attributes the caller watches itself; only what these attributes
            hold is walked.
    """

    only_named = False  # whether attributes that no reached code names are left out

    def __init__(self, roots: Iterable[tuple[str, Any]], inside: Iterable[nn.Module] = ()) -> None:
        self.places: list[PythonPlace] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.unreadable: list[str] = []  # iterators whose position cannot be read
        self.names = set(CALLED)  # used by the code that was reached
        self._inside = {id(part) for part in inside}
        self.reached: dict[int, Any] = {}  # holds the objects, so that no id is used twice
        self.waiting: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        self._ahead: list[tuple[str, Any]] = list(roots)

        while self._ahead and len(self.places) < MOST_PLACES:
            where, value = self._ahead.pop()
            if type(value) not in ATOMS and id(value) not in self.reached:
                self.reached[id(value)] = value
                self._look_into(where, value)

        self.seen = list(self.reached.values())
        self.reached.clear()

    def _look_into(self, where: str, value: Any) -> None:
        """Add a value if it is a place, and queue what it holds."""
        if isinstance(value, torch.Tensor):
            self._look_into_tensor(where, value)
        elif isinstance(value, dict):
            self.places.append(Items(value, where))
            self._ahead += [(f"{where}[{key!r:.40}]", item) for key, item in _items(value)]
            self._look_into_object(where, value)
        elif isinstance(value, list | deque | set | tuple | frozenset):
            if not isinstance(value, tuple | frozenset):
                self.places.append(PythonPlace(value, where))
            self._ahead += [(f"{where}[{at}]", item) for at, item in enumerate(tuple(value))]
            self._look_into_object(where, value)
        elif isinstance(value, types.FunctionType):
            self._look_into_function(where, value)
        elif isinstance(value, types.MethodType):
            self._ahead += [(where, value.__func__), (where, value.__self__)]
        elif isinstance(value, functools.partial):
            if is_foreign(getattr(value.func, "__globals__", {}).get("__name__", "")):
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
        elif isinstance(value, weakref.ReferenceType):
            self._ahead.append((where, value()))
        elif isinstance(value, (np.ndarray, *BYTES, *GENERATORS)) or is_iterator(value):
            self._look_into_place(where, value)
        elif isinstance(value, threading.local):
            self.places.append(Items(vars(value), where, OF_A_THREAD))
            self._ahead += [(f"{where}.{name}", item) for name, item in vars(value).items()]
        else:
            self._look_into_object(where, value)

    def _look_into_place(self, where: str, value: Any) -> None:
        place = place_of(value, where)
        try:
            if place is not None and place.fixed:
                place.read()
        except TypeError:
            if getattr(value, "gi_frame", value) is not None:  # a generator that has not ended
                self.unreadable.append(f"{where}, a {type(value).__name__}")
        else:
            self.places += [place] if place is not None else []

    def _look_into_tensor(self, where: str, tensor: torch.Tensor) -> None:
        self.tensors.append((where, tensor))
        if isinstance(tensor, nn.Parameter):  # forwards add hooks to it, libraries add attributes
            # DeepSpeed's ("ds_...") say where its parts are now
            own = {name: item for name, item in vars(tensor).items() if name[:3] != "ds_"}
            attributes = {*HOOKS, *own}
            self.places.append(NamesPlace(tensor, where, tuple(attributes)))
            self._ahead += [(f"the hooks of {where}", found) for found in hooks_of(tensor) if found]
            self._ahead += [(f"{where}.{name}", item) for name, item in own.items()]

    def _look_into_function(self, where: str, function: types.FunctionType) -> None:
        namespace = function.__globals__
        if is_foreign(namespace.get("__name__", "")):
            return

        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            variable = f"{name!r} of {function.__qualname__}"
            self.places.append(Cell(cell, variable))
            self._ahead += [(variable, item) for item in contents_of(cell)]

        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._ahead += [(f"a default of {function.__qualname__}", item) for item in defaults]
        if vars(function):
            self._ahead.append((f"an attribute of {function.__qualname__}", vars(function)))

        used = names_in(function.__code__)
        stored = _stored_in(function.__code__)
        self._look_into_names(namespace, used, stored, str(namespace.get("__name__")))
        for name in used - self.names:
            self.names.add(name)
            self._ahead += self.waiting.pop(name, [])

    def _look_into_names(
        self, namespace: dict[str, Any], used: frozenset[str], stored: frozenset[str], of: str
    ) -> None:
        """Add the names that code stores, and queue the values of those that it uses."""
        for name in used & namespace.keys():
            value = namespace[name]
            if not isinstance(value, types.ModuleType):
                self._ahead.append((f"{name!r} of {of}", value))
            elif not is_foreign(value.__name__) and id(value) not in self.reached:
                self._look_into_names(vars(value), used - {name}, stored, value.__name__)

        if stored:
            self.places.append(NamesPlace(namespace, f"the globals of {of}", tuple(stored)))

    def _look_into_class(self, where: str, kind: type) -> None:
        for base in kind.__mro__:
            if is_foreign(base.__module__) or (base is not kind and id(base) in self.reached):
                continue

            self.reached[id(base)] = base
            self.places.append(OfClass(base, f"the class {base.__qualname__}"))
            for name, value in tuple(vars(base).items()):
                is_code = isinstance(
                    value, types.FunctionType | staticmethod | classmethod | property
                )
                own = (f"{base.__qualname__}.{name}", value)
                if (is_code or self.only_named) and name not in self.names:
                    self.waiting[name].append(own)
                else:
                    self._ahead.append(own)

    def _look_into_object(self, where: str, value: Any) -> None:
        kind = type(value)
        is_module = isinstance(value, nn.Module)
        if kind in MAPPINGS or kind in (list, set, tuple, deque, frozenset):
            return
        if is_foreign(kind.__module__) and not is_module and kind not in HOLDERS:
            return

        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and id(value) in self._inside:
            for name, item in tuple(own.items()):
                is_registry = name in OF_TORCH and isinstance(item, dict)
                held = item.values() if is_registry else (item,)
                self._ahead += [(f"{where}.{name}", each) for each in tuple(held)]
        elif isinstance(own, dict):
            self.places.append(Items(own, where))
            self._ahead += [(f"{where}.{name}", item) for name, item in tuple(own.items())]

        slots = tuple(slots_of(kind))
        if slots:
            self.places.append(NamesPlace(value, where, slots))
            self._ahead += [(f"{where}.{name}", getattr(value, name, None)) for name in slots]

        self._ahead.append((where, kind))


def _items(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return list(dict.items(mapping))


def slots_of(kind: type) -> Iterator[str]:
    """Yield the names of the slots of a class.

    Left out: a slot that a class below hides behind a property. Its name reads that property, so
    what the slot itself holds is neither noted nor put back.
    """
    for base in kind.__mro__:
        if not is_foreign(base.__module__) and "__slots__" in vars(base):
            for name, value in vars(base).items():
                is_slot = isinstance(value, types.MemberDescriptorType)
                if is_slot and inspect.getattr_static(kind, name) is value:
                    yield name


def is_foreign(module_name: Any) -> bool:
    """Return whether the walk leaves out the code and the objects of a Python module."""
    return str(module_name).partition(".")[0] in FOREIGN


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code uses, with those of inner functions."""
    inner = [names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _stored_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code sets or deletes."""
    inner = [_stored_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    stores = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR")
    own = (step.argval for step in dis.get_instructions(code) if step.opname in stores)
    return frozenset(own).union(*inner)
