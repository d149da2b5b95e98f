"""Find how a script imports an object, if it lies in a library or in a person's own module."""

import ast
import functools
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from memlab.arguments.libraries import is_library
from memlab.exporting.own_source import plain_values, values_equal
from memlab.exporting.values import is_name

ZOO = "memlab.workloads"
SHORT = ("torch", "torch.nn", "torch.nn.functional", "typing")  # where builtin functions are found
MISSING = object()


def import_line(value: Any, wanted: str) -> str | None:
    """Return the import that binds an object to a name; None if no import gives it.

    >>> import torch
    >>> import_line(torch.nn, "nn"), import_line(torch.nn.functional, "F")
    ('from torch import nn', 'import torch.nn.functional as F')
    >>> import_line(torch.nn.Linear, "Linear"), import_line(torch.relu, "act")
    ('from torch.nn import Linear', 'from torch import relu as act')
    """
    if isinstance(value, ModuleType):
        return _import_of_module(value, wanted)

    found = place_of(value, wanted)
    if found is None or not may_import(found[0]):
        return None
    module, name = found
    return f"from {module} import {name}" + (f" as {wanted}" if name != wanted else "")


def place_of(value: Any, wanted: str = "") -> tuple[str, str] | None:
    """Return the module and the name by which an object can be imported, the shortest there is."""
    home = getattr(value, "__module__", None)
    homes = _above(home) if isinstance(home, str) and home != "builtins" else []
    for module in [*homes, *SHORT]:
        held = sys.modules.get(module)
        for name in (getattr(value, "__name__", None), wanted):
            if isinstance(name, str) and name.isidentifier() and _get(held, name) is value:
                return module, name
    return None


def may_import(module: str) -> bool:
    """Return whether a script can import a module: one of a library, or a person's own.

    Not `__main__`, not memlab, and no module that itself needs memlab, such as the file in which
    the workload is made. Nor one whose values were changed after it was imported.
    """
    return not _needs_memlab_or_this_process(module, set())


def submodules(value: ModuleType, attributes: list[str]) -> list[str]:
    """Return the imports that `module.a.b` needs besides that of the module.

    >>> import torch.utils.checkpoint
    >>> submodules(torch, ["utils", "checkpoint", "checkpoint"])
    ['import torch.utils.checkpoint']
    """
    longest, path = "", value.__name__
    for name in attributes:
        path = f"{path}.{name}"
        if path not in sys.modules:
            break
        longest = path
    return [f"import {longest}"] if longest else []


def _import_of_module(value: ModuleType, wanted: str) -> str | None:
    name = value.__name__
    if not _is_imported(name, value) or not may_import(name):
        return None
    if name == wanted:
        return f"import {name}"
    parent, _, last = name.rpartition(".")
    if last == wanted and parent:
        return f"from {parent} import {last}"
    return f"import {name} as {wanted}"


def _is_imported(name: str, value: ModuleType) -> bool:
    """Return whether an import of this name gives this module.

    A library that imports late may replace itself once it is used, as transformers does.
    """
    held = sys.modules.get(name)
    file = getattr(value, "__file__", None)
    is_of_same_file = file is not None and getattr(held, "__file__", None) == file
    return held is value or (is_of_same_file and _is_of_library(value))


def _above(module: str) -> list[str]:
    """Return the packages above a module and itself, the outermost first; private ones last."""
    parts = module.split(".")
    every = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return sorted(every, key=lambda name: any(part.startswith("_") for part in name.split(".")))


def _get(module: ModuleType | None, name: str) -> Any:
    """Return what a module has by a name; `MISSING` if it has nothing, as None may be wanted."""
    try:
        return getattr(module, name, MISSING)
    except Exception:  # a module that imports late may raise anything
        return MISSING


def _needs_memlab_or_this_process(module: str, seen: set[str]) -> bool:
    held = sys.modules.get(module)
    if module in ("__main__", "__mp_main__") or module.split(".")[0] == "memlab":
        return True
    if held is None or module in seen or _is_of_library(held):
        return held is None
    seen.add(module)
    if not _is_as_in_its_file(held):
        return True
    for value in list(vars(held).values()):
        home = value.__name__ if isinstance(value, ModuleType) else _home(value)
        is_other = isinstance(home, str) and home in sys.modules and home not in seen
        if is_other and _needs_memlab_or_this_process(home, seen):
            return True
    return False


def _is_as_in_its_file(module: ModuleType) -> bool:
    """Return whether importing a person's module again gives the same plain values."""
    file = getattr(module, "__file__", None)
    names = module.__name__.split(".")
    if not isinstance(file, str) or not all(map(is_name, names)):
        return False
    if PathFinder.find_spec(names[0], sys.path) is None:
        return False  # it was loaded from a file that no import finds
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return all(
        values_equal(vars(module).get(name, module), value)
        for name, value in plain_values(tree.body).items()
    )


def _home(value: Any) -> Any:
    try:
        return getattr(value, "__module__", None)
    except Exception:  # a person's own object may raise anything
        return None


def _is_of_library(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return module.__name__.split(".")[0] in (*sys.stdlib_module_names, *_library_roots())
    return is_library(file) and module.__name__.split(".")[0] != "memlab"


@functools.cache
def _library_roots() -> frozenset[str]:
    """Return packages of compiled modules that have no file of their own: `torch._C._nn`."""
    return frozenset({"torch", "numpy"})
