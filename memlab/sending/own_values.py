"""Send values that a notebook has set on a person's own modules, and set them in the worker.

The worker imports a person's modules from their files. So a value that was set on one of them after
the import (`mymodule.WIDTH = 200`, `MyModel.width = 7`, `mymodule.block = a_function_of_mine`) has
to be sent. All plain values of these modules are sent, and the worker sets those that differ.

If a file was edited after it was imported here, the newest file counts and no values are sent. To
find out, memlab looks at Python's bytecode cache, which belongs to the present file if the module
was imported or reloaded since the edit. If there is no bytecode, the file is assumed to be
unchanged as long as it is the same as when memlab first saw it.

Left out: values of other kinds (a tokenizer, a lock), values above `MOST_BYTES`, and attributes
that were deleted.
"""

import enum
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from memlab.arguments.units import MIB

MOST_BYTES = MIB  # of one value
MOST_DEPTH = 4
SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic)
OF_TORCH = (torch.dtype, torch.device, torch.Size)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
MISSING = object()
Values = Mapping[str, Mapping[tuple[str, ...], bytes]]  # of a module: by names from there on


def own_values(own_files: Mapping[str, str]) -> dict[str, dict[tuple[str, ...], bytes]]:
    """Return the plain values of the modules of these files, by module and names, pickled."""
    found = {}
    for name, file in own_files.items():
        module = sys.modules.get(name)
        is_memlab = name.partition(".")[0] == "memlab"
        if is_memlab or not isinstance(module, types.ModuleType):
            continue
        if not _is_of_present_file(module, file):
            continue

        if values := _values_of(module):
            found[name] = values

    return found


_first_seen: dict[str, tuple[int, int, int]] = {}  # module and file, as memlab first saw them


def _is_of_present_file(module: types.ModuleType, file: str) -> bool:
    """Return whether a module was imported from the present contents of its file, if known."""
    try:
        source, cache = os.stat(file), importlib.util.cache_from_source(file)
    except (OSError, NotImplementedError):
        return False

    seen = id(module), source.st_mtime_ns, source.st_ctime_ns
    try:
        with open(cache, "rb") as stream:
            header = stream.read(16)
        written_ns = os.stat(cache).st_mtime_ns
    except OSError:  # none is kept
        first = _first_seen.get(file)
        if first is None or first[0] != id(module):
            _first_seen[file] = seen
        return _first_seen[file] == seen

    stamp = (int(source.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little")
    size = (source.st_size & 0xFFFFFFFF).to_bytes(4, "little")
    is_same = header[8:16] == stamp + size
    return is_same and written_ns >= max(source.st_mtime_ns, source.st_ctime_ns)


def _values_of(module: types.ModuleType) -> dict[tuple[str, ...], bytes]:
    import cloudpickle  # late: `import memlab` need not wait for it

    found = {}
    for names, value in _listed(module):
        try:
            pickled: bytes = cloudpickle.dumps(value)
        except Exception:  # whatever the class of a value does
            continue
        if len(pickled) <= MOST_BYTES:
            found[names] = pickled

    return found


def _listed(module: types.ModuleType) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (names, value) of what is sent of a module."""
    name = module.__name__
    for key, value in vars(module).copy().items():
        if key.startswith("__"):
            continue

        if isinstance(value, type) and value.__module__ == name:
            for inner, of_class in vars(value).copy().items():
                if not inner.startswith("__") and _is_sent(name, inner, of_class):
                    yield (key, inner), of_class
        elif _is_sent(name, key, value):
            yield (key,), value
        elif _is_config(value):
            for inner, of_object in vars(value).copy().items():
                if is_plain(of_object):
                    yield (key, inner), of_object


def _is_sent(module: str, key: str, value: Any) -> bool:
    if isinstance(value, FUNCTIONS):
        # a definition under its own name is in the file; under another name it was set
        is_its_own = value.__module__ == module and value.__qualname__.rpartition(".")[2] == key
        return not is_its_own
    return is_plain(value)


def _is_config(value: Any) -> bool:
    """Return whether a value is an object that only holds attributes."""
    if isinstance(value, (types.ModuleType, torch.nn.Module, *FUNCTIONS)):
        return False
    try:
        return type(getattr(value, "__dict__", None)) is dict
    except Exception:  # an attribute of a person's class may raise anything
        return False


def is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value can be sent and compared."""
    if isinstance(value, SCALARS + OF_TORCH):
        return True
    if type(value) in (np.ndarray, torch.Tensor, torch.nn.Parameter):
        is_dense = isinstance(value, np.ndarray) or value.layout is torch.strided
        return bool(is_dense and value.nbytes <= MOST_BYTES and value.dtype != object)
    if depth == MOST_DEPTH:
        return False
    if type(value) in (list, tuple, set, frozenset):
        return all(is_plain(each, depth + 1) for each in value)
    if type(value) is dict:
        return all(is_plain(k, depth + 1) and is_plain(v, depth + 1) for k, v in value.items())

    return False


class OwnValues:
    """The values that one job sets on a person's modules, and how to restore the old ones.

    Attributes:
        values: as `own_values` gives them.
        is_set: from the time on that they are: what is imported later gets them at once.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.is_set = False
        self._undo: list[functools.partial[None]] = []

    def set_all(self) -> None:
        """Set the values of all modules that are already imported."""
        self.is_set = True
        for name in self.values:
            self.set(name)

    def set(self, name: str) -> None:
        """Set the values of one module, if it is imported."""
        import pickle

        module = sys.modules.get(name)
        if module is None:
            return

        for (*owners, key), pickled in self.values.get(name, {}).items():
            owner: Any = module
            for step in owners:
                owner = vars(owner).get(step)
            if not hasattr(owner, "__dict__"):
                continue

            old = vars(owner).get(key, MISSING)
            try:
                new = pickle.loads(pickled)
                is_same = is_equal(old, new)
            except Exception:  # whatever the class of a value does: it is one of another kind
                continue

            if not is_same:
                self._undo.append(functools.partial(_put, owner, key, old))
                _put(owner, key, new)

    def put_back(self) -> None:
        """Restore the values that the files define."""
        for undo in reversed(self._undo):
            undo()


def _put(owner: Any, key: str, value: Any) -> None:
    if isinstance(owner, type | types.ModuleType):
        delattr(owner, key) if value is MISSING else setattr(owner, key, value)
    elif value is MISSING:
        vars(owner).pop(key, None)
    else:
        vars(owner)[key] = value  # past a frozen dataclass


def is_equal(a: Any, b: Any) -> bool:
    """Return whether two values make no difference for a run."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_equal(a[key], b[key]) for key in a)

    return bool(a == b)
