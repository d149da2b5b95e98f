"""When two workloads are the same, and when two settings are: by a hash that outlives a process.

A name is not enough, because a workload is a person's functions. So a workload is what cloudpickle
writes of it, and the contents of the person's own files that this code imports, directly or through
one another. Compared with `runtime/same_step.py`, which asks whether a step would run exactly the
same again in this session, a kernel that was restarted must find its earlier results:

- Code of a notebook counts without the number of its cell, its line and its process.
- Of a class of a notebook the random number is left out that cloudpickle gives it.
- Of tensors of floats only shape and format count, since new random values cost the same. Small
  tensors of whole numbers (lengths, labels) count with their values.

Not seen: data files that a model reads, modules that are imported by a computed name, and what the
environment decides. A set of texts has another order in every process, so a workload that holds one
is a new workload in each.
"""

import ast
import dis
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from memlab._util.functions import is_library
from memlab.config import StepConfig
from memlab.runtime.sending import Hashed, own_values, pickler, tensor_text
from memlab.workload import Workload

CONTENT_BYTES = 2**16  # a tensor of whole numbers up to this size counts with its values
OF_ZOO = ("transformers", "monai", "sklearn", "bitsandbytes", "torchao")  # memlab's own imports
RANDOM_ID = re.compile(r"[0-9a-f]{32}")  # which cloudpickle gives to a class of a notebook
MOST_FILES = 1000  # of a person's own; reading them takes a second or two
# parts of a pickled class or function that depend on what else was imported, or on its line
INCIDENTAL = ("_cloudpickle_submodules", "__firstlineno__", "__static_attributes__")


def workload_key(workload: Workload) -> str | None:
    """Return the identity of a workload; None if it cannot be pickled or is too large."""
    try:
        return identity((
            workload.name, workload.build_model, workload.make_batch, workload.compute_loss,
            workload.num_loss_terms,
            *([workload.make_optimizer] if workload.make_optimizer else []),
        ))  # fmt: skip
    except Exception:  # a person's class may raise anything; sending the workload will report it
        return None


def setting_key(workload_key: str | None, config: StepConfig, **asked: Any) -> str | None:
    """Return the identity of one setting of a workload; None if the workload has none.

    Args:
        workload_key: of `workload_key`.
        config: of the step.
        asked: what else decides the result, as plain JSON types: device, versions, seed, limit.
    """
    if workload_key is None:
        return None

    plain = config.to_dict()
    functions = {name: f for name in plain if callable(f := getattr(config, name))}
    try:  # `to_dict` holds their names only
        plain |= {name: identity(function) for name, function in functions.items()}
    except Exception:  # as above
        return None

    return _sha256(json.dumps([workload_key, plain, asked], sort_keys=True).encode())


def identity(value: Any) -> str:
    """Return a hash of a value and of the person's own files that its code imports.

    Raises:
        Exception: any; a person's class may refuse to be pickled.
    """
    written = Hashed()
    writer = _pickler()(written)
    writer.dump(value)

    files, names = _own_files(writer.imported)
    parts = [written.sha256.hexdigest(), __name__, *_library_versions(names)]
    parts += [f"{name} {_sha256(Path(file).read_bytes())}" for name, file in sorted(files.items())]
    for name, values in sorted(own_values(files).items()):
        parts += [f"{name} {key} {_sha256(value)}" for key, value in sorted(values.items())]
    return _sha256("\n".join(parts).encode())


@functools.cache
def _pickler() -> Any:
    class IdentityPickler(pickler()):  # type: ignore[misc]
        """Writes what decides the cost of a step, and notes the names of imported modules."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.imported: set[str] = set()
            self._storages: dict[int, int] = {}  # in the order in which they are met

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                is_whole = not (obj.is_floating_point() or obj.is_complex())
                is_small = obj.layout is torch.strided and obj.nbytes <= CONTENT_BYTES
                text = tensor_text(obj, obj.device.type, has_values=is_whole and is_small)
                return str, (f"{text} {self._storage_of(obj)}",)
            if isinstance(obj, CodeType):
                self.imported.update(_imports_of(obj))
                return str, (_code_in_words(obj),)
            if isinstance(obj, ModuleType):
                self.imported.add(obj.__name__)
                return str, (f"module {obj.__name__}",)

            reduced = super().reducer_override(obj)
            if not isinstance(obj, type | FunctionType):
                self.imported.add(type(obj).__module__)
                return reduced
            if not isinstance(reduced, tuple):  # it is written as a name
                self.imported.add(str(obj.__module__))
                return reduced
            return _steady(reduced)

        def _storage_of(self, tensor: torch.Tensor) -> str:
            """Return how a tensor lies in memory, and with which others it shares it."""
            if tensor.layout is not torch.strided:
                return ""
            held = tensor.untyped_storage()
            number = self._storages.setdefault(held.data_ptr(), len(self._storages))
            return f"{tensor.stride()} {held.nbytes()} storage {number}"

    return IdentityPickler


def _steady(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how cloudpickle writes a class or function, without what differs between processes."""
    make, arguments, *rest = reduced
    arguments = tuple(
        "" if isinstance(each, str) and RANDOM_ID.fullmatch(each) else each for each in arguments
    )
    if rest and isinstance(rest[0], tuple):  # its state: dicts by name
        rest[0] = tuple(
            {key: value for key, value in part.items() if key not in INCIDENTAL}
            if isinstance(part, dict)
            else part
            for part in rest[0]
        )
    return make, arguments, *rest


def _code_in_words(code: CodeType) -> str:
    """Return what a function does, without its file and its lines."""
    constants = [
        _code_in_words(each) if isinstance(each, CodeType) else _constant(each)
        for each in code.co_consts
    ]
    return repr((
        code.co_name, code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars,
        code.co_cellvars, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
        code.co_flags,
    ))  # fmt: skip


def _constant(value: Any) -> str:
    # the order of a set of texts is another one in every process
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _imports_of(code: CodeType) -> Iterator[str]:
    """Yield the modules that a function of a notebook imports while it runs."""
    for line in dis.get_instructions(code):
        if line.opname == "IMPORT_NAME":
            yield str(line.argval)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _imports_of(each)


def _library_versions(names: Iterable[str]) -> list[str]:
    """Return the versions of the libraries behind these modules, and of those behind the zoo."""
    packages = {name.partition(".")[0] for name in names} | {*OF_ZOO}
    distributions = _distributions()
    found = {each for package in packages for each in distributions.get(package, ())}
    return sorted(f"{each} {importlib.metadata.version(each)}" for each in found)


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _own_files(names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Return the person's own files behind these modules and behind all that these import.

    The second value is the names of all these modules, libraries among them.
    """
    found: dict[str, str] = {}
    waiting = [part for name in names for part in _with_parents(name)]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        file = _file_of(name)
        if file is None:
            continue
        found[name] = file
        if len(found) > MOST_FILES:
            raise ValueError("the workload imports too many files")
        imports = _imports_in(name, file, os.stat(file).st_mtime_ns)
        fresh = {part for each in imports for part in _with_parents(each)} - seen
        seen |= fresh
        waiting += fresh
    return found, seen


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


@functools.lru_cache(maxsize=2 * MOST_FILES)
def _imports_in(name: str, file: str, changed_ns: int) -> tuple[str, ...]:
    """Return what a file imports anywhere: names of modules, and names of what they hold.

    Args:
        name: of the module.
        file: of the module.
        changed_ns: when the file was changed, so that it is read again then.
    """
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()

    found: list[str] = []
    package = name if os.path.basename(file) == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            levels = package.split(".") if package else []
            base = levels[: len(levels) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{start}.{alias.name}".lstrip(".") for alias in node.names]
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _is_elsewhere(top: str) -> bool:
    """Return whether a module is memlab's, or of Python itself."""
    return top in ("memlab", "__main__", "") or top in sys.stdlib_module_names


def _file_of(name: str) -> str | None:
    """Return the file of a module if it is a person's own; nothing is imported for that."""
    top = name.partition(".")[0]
    if _is_elsewhere(top):
        return None

    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str):
        file = _found(name)
    if file is None or not file.endswith(".py") or is_library(file) or not os.path.isfile(file):
        return None
    return os.path.realpath(file)


def _found(name: str) -> str | None:
    """Return the file from which a module would be imported."""
    folders: Any = sys.path
    origin = None
    try:
        for part in _with_parents(name):
            spec = PathFinder.find_spec(part, folders)
            if spec is None:
                return None
            origin, folders = spec.origin, spec.submodule_search_locations or []
    except (ImportError, OSError, ValueError):
        return None
    return origin


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
