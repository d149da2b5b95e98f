"""The names of functions, whether two are the same one, and how others stand in for them."""

import contextlib
import functools
import os
import site
import sysconfig
import traceback
import types
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from memlab._util.units import is_a, shown

_MISSING = object()


@contextlib.contextmanager
def replaced(parts: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Let modules and classes have other attributes inside this context.

    Afterwards they are as they were: what was inherited is inherited again.

    Args:
        parts: of each attribute its holder, its name, and what is there instead.

    >>> with replaced([(site, "PREFIXES", [])]):
    ...     site.PREFIXES
    []
    """
    with contextlib.ExitStack() as stack:
        for holder, name, value in parts:
            own = vars(holder).get(name, _MISSING)
            setattr(holder, name, value)
            if own is _MISSING:
                stack.callback(delattr, holder, name)
            else:
                stack.callback(setattr, holder, name, own)
        yield


def named(function: Any) -> str:
    """Return the import path of a function, and what tells it from others of this path.

    >>> named(partial(round, ndigits=2))
    'partial(builtins.round, ndigits=2)'
    >>> def adder(number):
    ...     def add(value):
    ...         return value + number
    ...     return add
    >>> named(adder(2))
    'memlab._util.functions.adder.<locals>.add(number=2)'
    """
    if isinstance(function, partial):
        given = [*map(_value, function.args), *_values(function.keywords)]
        return f"partial({', '.join([named(function.func), *given])})"

    name = getattr(function, "__qualname__", type(function).__name__)
    path = f"{getattr(function, '__module__', '')}.{name}"
    if not is_a(function, types.FunctionType):
        return path
    code, cells = function.__code__, function.__closure__ or ()
    if code.co_name == "<lambda>":
        columns = [column for *_, column, _ in code.co_positions() if column]
        path += f" at {code.co_firstlineno}:{min(columns, default=0)}"
    held = zip(code.co_freevars, cells, strict=True)
    values = _values({key: _content(cell) for key, cell in held})
    return f"{path}({', '.join(values)})" if values else path


def _values(given: dict[str, Any]) -> list[str]:
    return [f"{name}={_value(value)}" for name, value in given.items()]


def _value(value: Any) -> str:
    """Return a value as text without its address, which is another one in each process."""
    own: Any = type(value).__repr__
    if callable(value) or own is object.__repr__:
        return str(getattr(value, "__qualname__", type(value).__name__))
    return shown(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def is_same_function(one: Any, other: Any) -> bool:
    """Return whether two functions run the same code on equal values.

    A lambda that is made in every call of another function is the same one each time, whatever
    variables it uses. Values that cannot be compared count as equal.

    >>> def adder(number):
    ...     return lambda value: value + number
    >>> is_same_function(adder(1), adder(2)), is_same_function(adder(1), len)
    (True, False)
    >>> is_same_function(partial(round, ndigits=1), partial(round, ndigits=2))
    False
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False

    if is_a(one, types.FunctionType):
        return all(
            getattr(one, name) == getattr(other, name)
            for name in ("__code__", "__module__", "__qualname__")
        )
    if is_a(one, types.MethodType):
        is_same = is_same_function(one.__func__, other.__func__)
        return is_same and is_same_function(one.__self__, other.__self__)
    if is_a(one, partial):
        return (
            is_same_function(one.func, other.func)
            and _are_same(one.args, other.args)
            and one.keywords.keys() == other.keywords.keys()
            and _are_same(one.keywords.values(), other.keywords.values())
        )

    if is_a(one, type):
        return bool((one.__module__, one.__qualname__) == (other.__module__, other.__qualname__))

    # an object that can be called, or a value; without an __eq__ its class has to do
    compare: Any = type(one).__eq__
    if compare is object.__eq__:
        return True
    try:
        return bool(one == other)
    except Exception:  # tensors and arrays of several numbers are neither true nor false
        return True


def _are_same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(is_same_function, some, others))


# Which files are a person's own, and which are part of Python or of an installed package.

LIBRARY_FOLDERS = tuple(
    os.path.realpath(folder) + os.sep
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)
# where installers put packages; those of another environment can be on the path as well
PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
OWN_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


@functools.cache
def is_library(file: str) -> bool:
    """Return whether a file is part of Python or of an installed package, of any environment."""
    path = os.path.realpath(file)
    return path.startswith(LIBRARY_FOLDERS) or not PACKAGE_FOLDERS.isdisjoint(path.split(os.sep))


def is_cell(file: str) -> bool:
    """Return whether the name of a code object's file is that of a cell of a notebook."""
    return "ipykernel_" in file or file.startswith("<ipython-input")


def own_line(error: BaseException) -> str:
    """Return the innermost line of a person's own code that an error passed through; "" if none.

    >>> try:
    ...     exec(compile("1 / 0", "/home/me/model.py", "exec"))
    ... except ZeroDivisionError as error:
    ...     own_line(error)
    'model.py, line 1'
    """
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if is_cell(file):
            found = f"a cell of the notebook, line {line} of {frame.f_code.co_name}"
        elif not (file.startswith(("<", OWN_PACKAGE)) or is_library(file)):
            found = f"{os.path.basename(file)}, line {line}"
    return found
