"""Find a person's own source files, and whether they have changed since they were imported.

So stale code is never measured. Their bytecode caches are not read, because Python compares a cache
with its source only by size and by whole seconds.
"""

import builtins
import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.util
import io
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

import numpy as np
import torch

from memlab._util.functions import is_library
from memlab._util.units import MIB, is_a
from memlab.errors import WorkloadError
from memlab.workload import Workload

Stamp = tuple[int, int, int, int]


def own_files() -> dict[str, str]:
    """Return the files of the imported modules that are a person's own, by module name."""
    files = {
        name: getattr(module, "__file__", None)
        for name, module in sys.modules.copy().items()  # other threads import
        if name not in ("__main__", "__mp_main__")  # the second is multiprocessing's word for it
    }
    return {
        name: os.path.realpath(file)
        for name, file in files.items()
        if isinstance(file, str)
        and file.endswith(".py")
        and not is_library(file)
        and os.path.exists(file)  # torch.ops names a file that is not there
    }


def read_no_bytecode() -> None:
    """Make this process compile a person's own files whenever it imports them."""
    cached = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if is_library(path):
            return cached(self, fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]


class Sources:
    """The files of a person's own modules, and files that these read while they were imported."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.stamps: dict[str, Stamp | None] = {}
        self.found_on: tuple[list[str], str] | None = None  # sys.path and folder of the last job

    def note(self, job_started_ns: int, path: list[str], folder: str) -> None:
        """Remember the files of modules that were imported since the last call."""
        self.files = own_files()
        self.found_on = (path, folder)
        for file in self.files.values():
            found = stamp(file) if file not in self.stamps else None
            if found is not None:
                # changed after the job began: it may have been imported before that
                self.stamps[file] = found if found[1] <= job_started_ns else None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Remember the files that Python opens to read, while a person's module is imported."""
        opens = io.open

        @functools.wraps(opens)
        def noted(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if isinstance(file, str | bytes | os.PathLike) and not set(mode) & set("wax+"):
                path = os.path.realpath(os.fsdecode(file))
                if not is_library(path) and os.path.isfile(path):
                    self.stamps.setdefault(path, stamp(path))
            return opens(file, mode, *rest, **named)

        io.open = builtins.open = noted
        try:
            yield
        finally:
            if io.open is noted and builtins.open is noted:
                io.open = builtins.open = opens

    def changed(self, callers: Mapping[str, str], path: list[str], folder: str) -> bool:
        """Return whether an imported or read file has changed, or another one would be found now.

        Args:
            callers: files of the caller's own modules, by name.
            path: the caller's `sys.path`.
            folder: the caller's working folder, which "" stands for.
        """
        importlib.invalidate_caches()
        if any(s is None or stamp(file) != s for file, s in self.stamps.items()):
            return True
        if any(self.files[name] != file for name, file in callers.items() if name in self.files):
            return True
        if self.found_on is None or self.found_on == (path, folder):
            return False

        folders = [os.path.join(folder, entry) for entry in path]
        return any(_is_elsewhere(name, folders) for name in sys.modules.copy())


def _is_elsewhere(name: str, folders: list[str]) -> bool:
    """Return whether a module would be found in another file than it was imported from."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if "." in name or name in sys.stdlib_module_names or name in ("__main__", "memlab"):
        return False
    found = PathFinder.find_spec(name, folders) if isinstance(file, str) else None
    if found is None or not isinstance(file, str) or found.origin is None:
        return False
    return os.path.realpath(found.origin) != os.path.realpath(file)


def stamp(file: str) -> Stamp | None:
    """Return what changes when a file does; None if it cannot be read."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    # the time of the change itself comes second: a copy can bring an old time of writing with it
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


# `dumps`: what a notebook or script defines, pickled by value for another process.
#
# cloudpickle does so with functions and classes. Python pickles a function under
# `functools.lru_cache` by its name all the same, which another process cannot look up in
# `__main__`; here it is sent as the function and the size of its cache, and begins with
# nothing in it. Left out: other objects that pickle themselves by name, such as
# `typing.NewType`.

LRU_CACHE = functools._lru_cache_wrapper


def dumps(value: Any) -> bytes:
    """Return a value as bytes that `pickle.loads` reads in another process.

    Raises:
        Exception: any; a person's class may refuse to be pickled.
    """
    with io.BytesIO() as stream:
        pickler()(stream).dump(value)
        return stream.getvalue()


MOST_HASHED_BYTES = 64 * MIB  # of a workload without its tensors; a larger one has no key


@functools.cache
def pickler() -> Any:
    """Return the pickler class, which takes a stream."""
    import cloudpickle  # late, so that `import memlab` need not wait for it

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Pickles by value also what the decorators of `functools` make."""

        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is LRU_CACHE and not _is_found_by_name(obj):
                parameters = obj.cache_parameters()
                return _cached, (obj.__wrapped__, parameters["maxsize"], parameters["typed"])
            if type(obj) is functools.cached_property:  # it holds a lock up to Python 3.11
                state = {"attrname": obj.attrname, "__doc__": obj.__doc__}
                return functools.cached_property, (obj.func,), state
            return super().reducer_override(obj)

    return Pickler


class Hashed:
    """A file that only hashes what is written to it."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self._left = MOST_HASHED_BYTES

    def write(self, data: Any) -> int:
        """Hash some bytes and return how many they are.

        Raises:
            ValueError: there were too many already.
        """
        count = memoryview(data).nbytes
        self._left -= count
        if self._left < 0:
            raise ValueError("what is hashed is too large")
        self.sha256.update(data)
        return count


def tensor_text(tensor: torch.Tensor, device: str, *, has_values: bool) -> str:
    """Return the format of a tensor for a hash; with a hash of its values if it has some here.

    Args:
        tensor: of any layout.
        device: how its device is written.
        has_values: whether its values are wanted.
    """
    words = f"{type(tensor).__qualname__} {tensor.dtype} {tuple(tensor.shape)} {tensor.layout} "
    words += f"{device} {tensor.requires_grad}"
    if not has_values or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return words
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{words} {hashlib.sha256(content.tobytes()).hexdigest()}"


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _is_found_by_name(function: Any) -> bool:
    """Return whether a process that imports the function's module finds this function there."""
    module = getattr(function, "__module__", None)
    if module in (None, "__main__"):
        return False
    found: Any = sys.modules.get(module)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


# Give a worker the caller's environment variables as they are when a job begins.
#
# A variable that nobody in the worker has looked at yet is simply set. One that was looked
# at (by a library as it was imported, say), or that native code may have read by itself,
# needs a new worker.

# variables that native code reads without Python
NATIVE = (
    "ATEN", "BLIS", "CUBLAS", "CUDA", "CUDNN", "DNNL", "GLIBC", "GOMP", "HIP", "HSA", "KMP", "LANG",
    "LC_", "LD_", "MALLOC", "MKL", "NCCL", "NUMEXPR", "NVIDIA", "OMP", "ONEDNN", "OPENBLAS",
    "PYTHON", "PYTORCH", "ROCM", "TORCH", "TRITON", "TZ",
)  # fmt: skip


# threads that spin while they wait take the cores from one another on a busy machine
DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}

# fake tensors of a card behave as on a machine without one, where all tests run, and no prediction
# waits for the driver or takes memory on a card
NO_CARDS = {"CUDA_VISIBLE_DEVICES": ""}


def for_worker(callers: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker: the caller's, and `DEFAULTS` where the caller has none."""
    return {**DEFAULTS, **callers}


def without_cards(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which a process that has not met its cards yet sees none."""
    return {**variables, **NO_CARDS}


class Environment:
    """The variables that this process was started with, and which of them were read."""

    def __init__(self) -> None:
        self._set = dict(os.environ)
        self._read: set[str] = set()

    def watch(self) -> None:
        """From now on, record which variables are read."""
        get, noted = os._Environ.__getitem__, self._read

        def getitem(self: Any, key: Any) -> Any:
            if isinstance(key, str):
                noted.add(key)
            return get(self, key)

        def copy(self: Any) -> dict[str, str]:
            # starting a process copies all variables, which does not count as reading them
            return {self.decodekey(k): self.decodevalue(v) for k, v in self._data.items()}

        os._Environ.__getitem__ = getitem  # type: ignore[method-assign]
        os._Environ.copy = copy  # type: ignore[assignment,method-assign]

    def hide_cards(self) -> None:
        """Let this process see no card; it must not have met one yet."""
        os.environ.update(NO_CARDS)
        self._set = without_cards(self._set)

    def takes(self, callers: Mapping[str, str]) -> bool:
        """Set the caller's variables and return True; False if that needs a new worker."""
        names = {*callers, *self._set}
        changed = [name for name in names if callers.get(name) != self._set.get(name)]
        if any(name in self._read or name.startswith(NATIVE) for name in changed):
            return False

        for name in changed:
            if name in callers:
                os.environ[name] = callers[name]
            else:
                os.environ.pop(name, None)

        self._set = dict(callers)
        return True


# Send values that a notebook has set on a person's own modules, and set them in the worker.
#
# The worker imports a person's modules from their files. So a value that was set on one of
# them after the import (`mymodule.WIDTH = 200`, `MyModel.width = 7`, `mymodule.block =
# a_function_of_mine`) has to be sent. All plain values of these modules are sent, and the
# worker sets those that differ.
#
# If a file was edited after it was imported here, the newest file counts and no values are
# sent. To find out, memlab looks at Python's bytecode cache, which belongs to the present
# file if the module was imported or reloaded since the edit. If there is no bytecode, the
# file is assumed to be unchanged as long as it is the same as when memlab first saw it.
#
# Left out: values of other kinds (a tokenizer, a lock), values above `MOST_BYTES`, and
# attributes that were deleted.

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


# The arguments of a job as they are sent to a worker.


def in_one_form(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with a workload that cannot be made in other forms.

    Only the caller does that, by a function that may hold a data set or what cannot be sent. Nor
    does a worker need the lengths of all samples.
    """
    workload: Any = arguments.get("workload")
    if not is_a(workload, Workload):
        return arguments
    alone = dataclasses.replace(workload, sample_size=None, choices=None, lengths=None)
    return {**arguments, "workload": alone}


def pickled(arguments: dict[str, Any]) -> bytes:
    """Return the arguments as cloudpickle writes them.

    Raises:
        WorkloadError: they hold what cannot be pickled: a lock, a file or a generator.
    """
    try:
        return dumps(arguments)
    except Exception as error:
        workload = arguments.get("workload")
        raise WorkloadError(
            f"workload {getattr(workload, 'name', '?')!r} cannot be sent to the worker "
            f"({type(error).__name__}: {error}); create the objects that it uses inside "
            "build_model or make_batch, or measure with isolate=False"
        ) from error
