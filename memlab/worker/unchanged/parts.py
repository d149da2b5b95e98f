"""`Parts`: record the parts of functions, classes and objects that are in no `__dict__`.

These are a function's code, defaults and closure; what the cells of a closure hold; what is
registered with a `functools.singledispatch` function; the bases of a class, and what is registered
with an abstract class; and the class of an object.
"""

import _abc  # type: ignore[import-not-found]
import operator
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

Reader = Callable[[Any], Any]
CODE = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")
BASES: Reader = type.__dict__["__bases__"].__get__  # bypasses what a metaclass overrides
CONTENTS = operator.attrgetter("cell_contents")
EMPTY = object()


class Parts:
    """The recorded parts of functions, classes and objects."""

    def __init__(self) -> None:
        self.code = _Column(CODE, operator.eq)
        self.cells = _Column(_contents, _is_same)
        self.dispatched = _Column(_dispatched, operator.eq)
        self.bases = _Column(BASES, operator.eq)
        self.registered = _Column(_registered, set.issuperset)
        self.classes = _Column(type, operator.is_)

    def note_function(self, function: types.FunctionType) -> bool:
        """Record a function; return whether it is new."""
        name = f"{function.__module__}.{function.__qualname__}"
        if not self.code.note(function, name):
            return False

        for variable, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            if variable != "__class__":
                self.cells.note(cell, f"{name}.{variable}")

        if isinstance(vars(function).get("registry"), types.MappingProxyType):
            self.dispatched.note(function, f"{name}.register")
        return True

    def note_object(self, holder: Any, name: str) -> None:
        """Record an object, a module or a class."""
        self.classes.note(holder, f"{name}.__class__")
        if issubclass(type(holder), type):  # torch.distributed.reduce_op warns of any look at it
            self.bases.note(holder, f"{name}.__bases__")
            if "_abc_impl" in type.__getattribute__(holder, "__dict__"):
                self.registered.note(holder, f"{name}.register")

    def begin(self) -> None:
        """Record the present state as unchanged."""
        for column in self._columns():
            column.accept(range(len(column.things)))

    def changes(self) -> list[str]:
        """Return the names of everything that has changed."""
        return [column.names[index] for column in self._columns() for index in column.changed()]

    def changed(self) -> set[tuple[int, int]]:
        """Return what has changed, in the form that `accept` takes."""
        columns = enumerate(self._columns())
        return {(number, index) for number, column in columns for index in column.changed()}

    def accept(self, refused: Collection[tuple[int, int]], not_of: Collection[str]) -> None:
        """Accept the changes that the import of a library has made.

        Args:
            refused: changes that existed before the import.
            not_of: packages in which no change is accepted.
        """
        for number, column in enumerate(self._columns()):
            if column is self.code:  # no known library replaces the code of another
                continue

            column.accept(
                index
                for index in column.changed()
                if (number, index) not in refused
                and column.names[index].partition(".")[0] not in not_of
            )

    def _columns(self) -> tuple["_Column", ...]:
        of_functions = self.code, self.cells, self.dispatched
        return *of_functions, self.bases, self.registered, self.classes


class _Column:
    """Things of one kind, with what each was made of."""

    def __init__(self, read: Reader, is_same: Callable[[Any, Any], bool]) -> None:
        self.read, self.is_same = read, is_same
        self.things: list[Any] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self._known: set[int] = set()

    def note(self, thing: Any, name: str) -> bool:
        if id(thing) in self._known:
            return False
        self._known.add(id(thing))
        self.things.append(thing)
        self.names.append(name)
        self.values.append(self.read(thing))
        return True

    def accept(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            self.values[index] = self.read(self.things[index])

    def changed(self) -> list[int]:
        """Return the indexes of changed things. `map` keeps the loop in C, which is faster."""
        now = list(map(self.read, self.things))
        if all(map(self.is_same, self.values, now)):
            return []
        pairs = enumerate(zip(self.values, now, strict=True))
        return [index for index, (old, new) in pairs if not self.is_same(old, new)]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is filled later
        return EMPTY


def _is_same(old: Any, new: Any) -> bool:
    """Return whether these are the same object, or equal numbers or texts."""
    if old is new:
        return True
    return type(old) is type(new) and type(old) in (str, bytes, int, float) and bool(old == new)


def _dispatched(function: Any) -> tuple[Any, ...]:
    return tuple(function.registry.items())


def _registered(abstract: type) -> set[int]:
    """Return which weak references an abstract class holds to classes that were registered."""
    return set(map(id, _abc._get_dump(abstract)[0]))
