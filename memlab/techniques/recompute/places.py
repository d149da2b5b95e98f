"""Places in Python that a forward may write to: read, compare and restore what they hold.

A place is, for instance, a list, the attributes of an object or the variable of a closure. It is
read one level deep. Its contents are compared by identity, and plain values by value. Iterators
cannot be restored, since they only move forward, and neither can data of one thread. These are read
too, so that a change can be refused by name.
"""

import _ctypes
import array
import ctypes
import itertools
import operator
import pickle
import random
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memlab.arguments.units import MIB
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
