"""Harmless changes that libraries make to their own modules when they are used."""

import sys
import types
from typing import Any

from memlab.arguments.libraries import is_library
from memlab.torch_private import process as torch_process

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
    *torch_process.CACHES,
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
    "networkx.", *torch_process.CHANGED_ONCE,
    "multiprocessing.synchronize.SemLock._make_name",  # joblib names semaphores its own way
)  # fmt: skip
DEFAULT_GROUP = torch_process.DEFAULT_GROUP


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
        each in code.co_filename for each in torch_process.WRAPPERS
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
