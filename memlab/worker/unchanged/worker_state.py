"""Check whether a worker has changed since before its jobs. `serving.py` asks after each job.

`fingerprint.py` compares the modules, `process_state.py` the switches. This file decides when. It
compares before and after each import of a library, to distinguish the effects of the import from
earlier changes by a person's code. A person's own modules are recorded as soon as they are
imported, so that every change by a run is found.
"""

import contextlib
import gc
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from memlab.arguments.libraries import is_library
from memlab.arguments.units import MIB
from memlab.sending.own_values import OwnValues
from memlab.sending.sources import Sources
from memlab.worker.unchanged.fingerprint import Fingerprint
from memlab.worker.unchanged.process_state import (
    OF_IMPORTS,
    differences,
    kept_tensor_bytes,
    process_state,
)

MOST_KEPT_BYTES = 16 * MIB  # of tensors left after a run, such as tables that a library keeps


class WorkerState:
    """The state of this process when it began to serve.

    Attributes:
        found: the names of everything that has changed since.
        own_values: the values that the current job sets on a person's modules.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.own_values = OwnValues({})
        self.fingerprint = Fingerprint()
        self.state: dict[str, Any] = {}
        self.found: list[str] = []
        self.is_watching = False
        self._importing: list[bool] = []  # for each open import: is the module a person's own
        self._packages: set[str] = set()  # of libraries, in the outermost open import

    def watch_imports(self) -> None:
        """From now on, look at modules when they are imported."""
        execute = SourceFileLoader.exec_module
        state = self

        def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
            if state.is_watching:
                state._import(self, module, execute)
            else:
                execute(self, module)

        SourceFileLoader.exec_module = exec_module  # type: ignore[assignment,method-assign]

    def note_modules(self) -> None:
        """Record the modules that are imported before the first job."""
        gc.disable()  # recording makes many objects that stay, so collecting would be wasted time
        self.fingerprint.note_new_modules(is_own_module)
        gc.enable()

    def begin(self) -> None:
        """Record the present state of this process as unchanged."""
        self.note_modules()
        self.fingerprint.begin()
        process_state()  # the first call may itself initialise something
        self.state = process_state()
        self.is_watching = True

    def expect(self) -> None:
        """Record the switches just before a person's code runs."""
        self.state = process_state()

    @property
    def is_changed(self) -> bool:
        """Whether anything has changed."""
        return bool(self.found)

    def look(self) -> None:
        """Look for changes that a job has left behind."""
        self.is_watching = False
        try:
            self.own_values.put_back()
            self.found += [*self.fingerprint.changes(), *differences(self.state, process_state())]
            self.fingerprint.note_new_modules(is_own_module)
        except BaseException as error:  # what a job has done to Python itself
            self.found.append(f"{type(error).__name__}: {error}")

        self.is_watching = True

    def look_at_kept_tensors(self) -> None:
        """Look for tensors that are left after a job, as in a cache of a library or a person."""
        if kept_tensor_bytes() > MOST_KEPT_BYTES:
            self.found.append("tensors are kept")

    def _import(self, loader: SourceFileLoader, module: ModuleType, execute: Any) -> None:
        is_own = not is_librarys(loader.name, loader.path)
        is_outermost = not is_own and not (self._importing and not self._importing[-1])
        if is_outermost:
            changed, switches = self.fingerprint.before_import(), process_state()
            self._packages = set()
        if not is_own:
            self._packages.add(loader.name.partition(".")[0])

        self._importing.append(is_own)
        try:
            with self.sources.reading() if is_own else contextlib.nullcontext():
                execute(loader, module)
        finally:
            self._importing.pop()
            if is_own:
                self.fingerprint.note(loader.name, module, is_own=True)
                if self.own_values.is_set:
                    self.own_values.set(loader.name)
            elif is_outermost:
                self.fingerprint.after_import(self._packages, changed)
                self.fingerprint.note_new_modules(is_own_module)
                now = process_state()
                for name in OF_IMPORTS:
                    if self.state[name] == switches[name]:  # and not by a person, before that
                        self.state[name] = now[name]


def is_librarys(name: str, file: str | None) -> bool:
    """Return whether a module is Python's, an installed package's, or memlab's."""
    return file is None or is_library(file) or name.partition(".")[0] == "memlab"


def is_own_module(name: str) -> bool:
    """Return whether an imported module is a person's own."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and os.path.exists(file) and not is_librarys(name, file)
