"""Record what the modules of this process hold, so that a change is found.

A place is something that holds other objects. The recorded places are

- modules and their classes, with their attributes;
- containers at module level (a registry, a list of hooks), with their entries;
- objects at module level (a logger, a config), with their attributes.

`Parts` records what functions and classes are made of. A place is unchanged if it holds the same
objects. Comparing ten thousand places takes about 20 ms, and as many functions and classes 30 ms.

Not seen: the state of C code (`unchanged.py` asks for some of it), objects that only other
objects hold, and the caches of `functools` in libraries.

Libraries change when they are used and when they import more of themselves. These changes are
accepted:

- while a library is imported, changes in its own package and additions elsewhere;
- at any time, changes in the caches listed here, new attributes of modules that a
  library defines (late imports), and new entries in dicts and sets of libraries that a job has
  imported, since these are mostly caches.
"""

import _abc  # type: ignore[import-not-found]
import functools
import itertools
import operator
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

from memlab._util.functions import is_library
from memlab._util.torch_private import process
from memlab._util.torch_private.tensors import MODULE_OF_OPERATORS

# `Parts`: record the parts of functions, classes and objects that are in no `__dict__`.
#
# These are a function's code, defaults and closure; what the cells of a closure hold; what
# is registered with a `functools.singledispatch` function; the bases of a class, and what
# is registered with an abstract class; and the class of an object.

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


# Harmless changes that libraries make to their own modules when they are used.

# attributes that Python itself sets when a module or a class is used
IGNORED_NAMES = frozenset(
    {
        "__annotations__",
        "__builtins__",
        "__cached__",
        "__doc__",
        "__slotnames__",
        "__spec__",
        "__warningregistry__",
        # what a finder of importlib has seen of its folder
        "_path_cache",
        "_path_mtime",
        "_relaxed_path_cache",
    }
)
# places where runs leave data (never functions or classes) on which no later run depends
CACHES = (
    # of Python
    "_ctypes._", "_frozen_importlib", "_weakrefset.", "abc.", "ctypes._", "encodings._cache",
    "gettext.", "inspect._filesbymodname", "inspect.modulesbyfile", "linecache.", "logging._",
    "logging.Logger.manager", "mimetypes.", "multiprocessing.context._default_context",
    "multiprocessing.util._", "pkgutil._", "platform.", "re._", "re.RegexFlag",
    "sys.path_importer_cache", "tempfile.", "threading._", "tokenize.", "typing._",
    "warnings.onceregistry", "weakref.finalize",
    *process.CACHES,
    # of others
    "cloudpickle.cloudpickle._DYNAMIC",  # classes of notebooks, by weak references
    "cloudpickle.cloudpickle._extract_code_globals_cache",  # the names that functions use
    "memlab.", "numpy._core.getlimits.", "time.tzname", "sympy.", "tqdm.std.",
    "transformers.conversion_mapping._checkpoint_conversion_mapping_cache",  # names of weights
)  # fmt: skip
# hooks that only print; a library replaces them as it is imported (monai does)
PRINT_ONLY = frozenset({"warnings.showwarning"})
SET_BY_JOBS = frozenset({"sys.path"})
# places that their first use changes permanently; no bytes and no bits of a step depend on them
CHANGED_ONCE = (
    "networkx.", *process.CHANGED_ONCE,
    "multiprocessing.synchronize.SemLock._make_name",  # joblib names semaphores its own way
)  # fmt: skip
DEFAULT_GROUP = process.DEFAULT_GROUP


def is_definition(value: Any) -> bool:
    """Return whether a value is code: a class, a module, a function, a method, a property."""
    kind = type(value)
    return issubclass(kind, type | types.ModuleType) or kind in (
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        staticmethod,
        classmethod,
        property,
    )


def is_cache(name: str) -> bool:
    """Return whether a name is that of a cache, which libraries fill when they are used."""
    is_setting = ".config." in name
    return (name.startswith(CACHES) or name in SET_BY_JOBS) and not is_setting


def is_wrapped_by_torch(old: Any, new: Any) -> bool:
    """Return whether torch itself has wrapped a function, so that `new` calls `old`."""
    if not _is_wrapper(new):
        return False
    cells = [cell.cell_contents for cell in new.__closure__ or ()]
    held = (*cells, getattr(new, "__wrapped__", None))
    return any(_innermost(each) is _innermost(old) for each in held if each is not None)


def _is_wrapper(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return isinstance(code, types.CodeType) and any(
        each in code.co_filename for each in process.WRAPPERS
    )


def _innermost(function: Any) -> Any:
    while _is_wrapper(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def package_of(value: Any) -> str:
    """Return the top package that a definition comes from."""
    is_module = isinstance(value, types.ModuleType)
    name = getattr(value, "__name__" if is_module else "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_of_library(value: Any) -> bool:
    """Return whether a value is a module of a library, or defined in one."""
    if not isinstance(value, types.ModuleType):
        name = getattr(value, "__module__", None)
        value = sys.modules.get(name) if isinstance(name, str) else None
    if value is None:
        return False
    file = getattr(value, "__file__", None)
    name = getattr(value, "__name__", "")
    return file is None or is_library(file) or str(name).partition(".")[0] == "memlab"


PLAIN = frozenset({str, bytes, int, float, bool, complex, type(None), tuple, frozenset})
FUNCTION = types.FunctionType
LRU_CACHE = functools._lru_cache_wrapper
UNSEEN = frozenset({"__main__", "__mp_main__", __name__})  # the worker itself, and this module
ENVIRONMENT = vars(os.environ).get("_data")  # the module posix holds it too
TOGETHER = 64  # number of places that are compared at once
MISSING = object()
CONTAINERS = (dict, list, set)
LET_GO = object()
"""In place of a cache: what is noted is held, and with a filled cache that PyTorch has dropped the
tensors in it would be, such as the weights of `torch.nn.utils.parametrize.cached`."""
Before = tuple[set[tuple[int, Any, int]], set[tuple[int, int]]]  # changes in places and in parts


class ModulePlace:
    """An object that holds others, and what it held.

    Attributes:
        name: of the object, for people and to be looked up in `CACHES`.
        package: whose it is: the first part of its module's name.
        kind: "module", "class", "object", "dict", "list" or "set".
    """

    __slots__ = ("held", "holder", "keys", "kind", "name", "package", "read_keys", "read_values")

    def __init__(self, name: str, package: str, kind: str, holder: Any) -> None:
        self.name, self.package, self.kind, self.holder = name, package, kind, holder
        self.read_keys, self.read_values = _readers(kind, holder)
        self.note()

    def note(self) -> None:
        """Record the present contents as unchanged."""
        self.keys, self.held = tuple(self.read_keys()), tuple(self.read_values())
        if self.kind == "module":
            self.held = tuple(
                LET_GO if type(value) in CONTAINERS and is_cache(f"{self.name}.{key}") else value
                for key, value in zip(self.keys, self.held, strict=True)
            )

    def accept(self, refused: list[tuple[Any, Any, Any]]) -> None:
        """Record the present contents as unchanged, except for these differences."""
        self.note()
        if not refused:
            return

        if self.kind in ("list", "set"):
            come = {id(new) for _, _, new in refused}
            gone = [old for _, old, _ in refused if old is not MISSING]
            self.held = (*(value for value in self.held if id(value) not in come), *gone)
            return

        entries = dict(zip(self.keys, self.held, strict=True))
        for key, old, _ in refused:
            entries.pop(key, None)
            if old is not MISSING:
                entries[key] = old

        self.keys, self.held = tuple(entries), tuple(entries.values())

    def is_same(self) -> bool:
        """Return whether the same objects are held, in the same order."""
        held = tuple(self.read_values())
        return len(held) == len(self.held) and all(map(operator.is_, held, self.held))

    def differences(self) -> list[tuple[Any, Any, Any]]:
        """Return (key, old, new) of every difference; a value that does not exist is `MISSING`."""
        keys, held = tuple(self.read_keys()), tuple(self.read_values())
        if self.kind in ("list", "set"):
            old_ids, new_ids = set(map(id, self.held)), set(map(id, held))
            gone = [(None, value, MISSING) for value in self.held if id(value) not in new_ids]
            come = [(None, MISSING, value) for value in held if id(value) not in old_ids]
            return gone + come

        old, new = dict(zip(self.keys, self.held, strict=True)), dict(zip(keys, held, strict=True))
        pairs = [(key, old.get(key, MISSING), new.get(key, MISSING)) for key in {**old, **new}]
        return [(key, a, b) for key, a, b in pairs if a is not b and not _equal(a, b)]


def _readers(kind: str, holder: Any) -> tuple[Callable[[], Iterable[Any]], ...]:
    """Return functions that read keys and values, and bypass methods that a subclass overrides."""
    if kind in ("list", "set"):
        read = functools.partial(list.copy if kind == "list" else set.copy, holder)
        return tuple, read
    if kind == "cache":
        return lambda: ("currsize",), lambda: (holder.cache_info().currsize,)
    if kind == "class":
        entries = type.__getattribute__(holder, "__dict__")
        return entries.keys, entries.values

    entries = holder if kind == "dict" else object.__getattribute__(holder, "__dict__")
    return functools.partial(dict.keys, entries), functools.partial(dict.values, entries)


def _equal(a: Any, b: Any) -> bool:
    """Return whether these are equal numbers or texts, which may be equal but not identical."""
    return type(a) is type(b) and type(a) in PLAIN - {tuple, frozenset} and bool(a == b)


class Fingerprint:
    """All places of the recorded modules."""

    def __init__(self) -> None:
        self.modules: dict[str, Any] = {}
        self._places: dict[int, ModulePlace] = {}
        self._parts = Parts()
        self._base_packages: frozenset[str] = frozenset()
        self._own_packages: set[str] = set()

    def note_new_modules(self, is_own: Callable[[str], bool]) -> None:
        """Record every imported module that is new, except a person's own."""
        for name, module in sys.modules.copy().items():
            if name not in self.modules and name not in UNSEEN and not is_own(name):
                self.note(name, module)

    def note(self, name: str, module: Any, *, is_own: bool = False) -> None:
        """Record a module and what it holds. In a person's own module no change is accepted."""
        package = name.partition(".")[0]
        self.modules[name] = module
        if is_own:
            self._own_packages.add(package)
        self._walk(name, package, module)

    def begin(self) -> None:
        """Record the present state as that of a worker before its first job."""
        self._base_packages = frozenset(name.partition(".")[0] for name in self.modules)
        self._look(lambda *_: True)
        self._parts.begin()

    def changes(self) -> list[str]:
        """Return the names of everything that has changed, without usual changes of libraries."""
        found = [
            f"sys.modules[{name!r}]"
            for name, module in self.modules.items()
            if sys.modules.get(name) is not module
        ]
        found += [_name(place, key) for place, key, _ in self._look(self._is_usual)]
        found += [name for name in self._parts.changes() if not _is_changed_once(name)]
        return list(dict.fromkeys(found))

    def before_import(self) -> Before:
        """Return the changes that exist before a library is imported."""
        found = self._look(self._is_usual)
        return {(id(place), key, id(new)) for place, key, new in found}, self._parts.changed()

    def after_import(self, packages: Collection[str], before: Before) -> None:
        """Accept the changes that the import of these packages explains.

        Args:
            packages: all whose modules were imported.
            before: what `before_import` found.
        """
        places, parts = before

        def explained(place: ModulePlace, key: Any, old: Any, new: Any) -> bool:
            if place.package in self._own_packages or (id(place), key, id(new)) in places:
                return False
            is_its_own = place.package in packages and (
                not (is_definition(old) or is_definition(new)) or package_of(new) == place.package
            )
            return old is MISSING or is_its_own or self._is_usual(place, key, old, new)

        self._look(explained)
        self._parts.accept(parts, not_of=self._own_packages)
        for name, module in list(self.modules.items()):
            now = sys.modules.get(name)
            if now is not None and now is not module and name.partition(".")[0] in packages:
                self.note(name, now)  # some libraries replace their module by an object

    def _look(
        self, accepts: Callable[[ModulePlace, Any, Any, Any], bool]
    ) -> list[tuple[ModulePlace, Any, Any]]:
        """Return (place, key, new value) of what is changed and not accepted."""
        found: list[tuple[ModulePlace, Any, Any]] = []
        for place in self._changed_places():
            refused = [each for each in place.differences() if not accepts(place, *each)]
            found += [(place, key, new) for key, _, new in refused]
            place.accept(refused)
            self._walk_values(place)

        return found

    def _changed_places(self) -> list[ModulePlace]:
        """Return the changed places. Comparing many at once takes a fifth of the time."""
        places = list(self._places.values())
        changed: list[ModulePlace] = []
        for begin in range(0, len(places), TOGETHER):
            some = places[begin : begin + TOGETHER]
            now = list(itertools.chain.from_iterable([place.read_values() for place in some]))
            then = list(itertools.chain.from_iterable([place.held for place in some]))
            if len(now) != len(then) or not all(map(operator.is_, now, then)):
                changed += [place for place in some if not place.is_same()]

        return changed

    def _is_usual(self, place: ModulePlace, key: Any, old: Any, new: Any) -> bool:
        if key in IGNORED_NAMES:
            return True
        if place.package in self._own_packages:
            return place.kind == "module" and isinstance(new, types.ModuleType)
        name = _name(place, key)
        if name.startswith(CHANGED_ONCE) or (name in PRINT_ONLY and is_of_library(new)):
            return True

        is_entry = place.kind in ("dict", "list", "set")
        is_data = not (is_definition(old) or is_definition(new))
        if (is_entry or is_data) and is_cache(name):
            return True
        if old is MISSING:
            return self._is_usual_addition(place, key, new)
        if new is MISSING and package_of(old) == "memlab":
            return True  # recorded in the middle of a prediction, which has removed it since
        if name == DEFAULT_GROUP and new is None:
            return True  # likewise: one of many ranks was predicted, and no group is open now

        is_private = isinstance(key, str) and key.startswith("_")
        if old is None and is_private and package_of(new) == place.package:
            return True  # created when it was first needed

        return is_wrapped_by_torch(old, new)

    def _is_usual_addition(self, place: ModulePlace, key: Any, new: Any) -> bool:
        is_late = place.package not in self._base_packages  # of a library that a job has imported
        if place.kind == "module":
            return is_of_library(new)

        if place.kind == "class":
            hidden = [vars(base)[key] for base in place.holder.__mro__[1:] if key in vars(base)]
            if hidden:
                return is_wrapped_by_torch(hidden[0], new)
            is_cached = is_late and type(new) in PLAIN and key.startswith("_")
            return is_cached or (is_definition(new) and is_of_library(new))

        return place.kind in ("dict", "set") and is_late

    def _walk(self, name: str, package: str, holder: Any) -> None:
        """Record an object and the classes, functions and containers in it."""
        kind = _kind(holder)
        if kind is None or id(holder) in self._places:
            return
        place = self._places[id(holder)] = ModulePlace(name, package, kind, holder)
        if kind in ("module", "class", "object"):
            self._parts.note_object(holder, name)
        self._walk_values(place)

    def _walk_values(self, place: ModulePlace) -> None:
        if place.kind not in ("module", "class", "object"):
            return

        for key, value in zip(place.keys, place.held, strict=True):
            kind = type(value)
            if kind in PLAIN or key in IGNORED_NAMES or value is sys.modules:
                continue
            if value is os.environ or value is ENVIRONMENT:  # each job brings its own environment
                continue
            if kind.__module__ == MODULE_OF_OPERATORS:  # they cache themselves when they are used
                continue

            if kind in (staticmethod, classmethod):
                value = value.__func__
                kind = type(value)

            if kind is FUNCTION:
                self._parts.note_function(value)
            elif kind is property:
                for function in (value.fget, value.fset, value.fdel):
                    if type(function) is FUNCTION:
                        self._parts.note_function(function)
            elif issubclass(kind, type):
                self._walk(f"{value.__module__}.{value.__qualname__}", place.package, value)
            elif is_cache(_name(place, key)) or key == "_cache":  # the latter of a logger
                continue
            elif kind is LRU_CACHE:
                is_own = package_of(value) == place.package  # and not imported from a library
                if is_own and place.package in self._own_packages:
                    self._walk(_name(place, key), place.package, value)
            elif issubclass(kind, dict | list | set) or (
                place.kind == "module" and not issubclass(kind, types.ModuleType)
            ):
                self._walk(_name(place, key), place.package, value)


def _is_changed_once(name: str) -> bool:
    return f"{name}.".startswith(CHANGED_ONCE) or is_cache(name)


def _kind(holder: Any) -> str | None:
    """Return the kind of place that an object is; None if it holds nothing to compare."""
    kind = type(holder)
    for base, name in ((type, "class"), (dict, "dict"), (list, "list"), (set, "set")):
        if issubclass(kind, base):
            return name

    if issubclass(kind, types.ModuleType):
        return "module"
    if kind is LRU_CACHE:
        return "cache"

    try:
        entries = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None

    return "object" if type(entries) is dict else None


def _name(place: ModulePlace, key: Any) -> str:
    return f"{place.name}.{key}" if isinstance(key, str) else place.name
