"""Find a person's own source files, and whether they have changed since they were imported.

So stale code is never measured. Their bytecode caches are not read, because Python compares a cache
with its source only by size and by whole seconds.
"""

import builtins
import contextlib
import functools
import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

from memlab.arguments.libraries import is_library

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
