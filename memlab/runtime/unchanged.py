"""Check whether a worker has changed since before its jobs. `serving.py` asks after each job.

`fingerprint.py` compares the modules, and this file the switches, and decides when. It
compares before and after each import of a library, to distinguish the effects of the import from
earlier changes by a person's code. A person's own modules are recorded as soon as they are
imported, so that every change by a run is found.
"""

import _thread
import contextlib
import decimal
import faulthandler
import gc
import locale
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import numpy as np
import torch

from memlab._util.functions import is_library
from memlab._util.torch_private import process
from memlab._util.torch_private.tensors import innermost_saved_tensors_hooks
from memlab._util.units import MIB
from memlab.runtime.fingerprint import Fingerprint
from memlab.runtime.sending import OwnValues, Sources

# The settings of a process: torch's switches, Python's and the system's, as values to
# compare.
#
# A job that leaves one of them changed would affect every later job. The settings are read
# through functions that were looked up when this file was imported, so a job cannot hide a
# change by replacing such a function. A switch that this torch or this system does not have
# is left out.

# functions without arguments
TORCH = (
    "get_default_dtype", "get_default_device", "is_grad_enabled", "is_inference_mode_enabled",
    "is_anomaly_enabled", "is_anomaly_check_nan_enabled", "get_num_threads",
    "get_num_interop_threads", "get_float32_matmul_precision", "get_deterministic_debug_mode",
    "is_autocast_cache_enabled", "is_warn_always_enabled",
)  # fmt: skip
PYTHON = (
    "getdlopenflags", "getprofile", "getrecursionlimit", "getswitchinterval", "gettrace",
    "get_asyncgen_hooks", "get_coroutine_origin_tracking_depth", "get_int_max_str_digits",
)  # fmt: skip
SCHEDULING = ("sched_getscheduler", "sched_getparam")
PRECISION_OF = [
    (backend, operator)
    for backend in ("generic", "cuda", "mkldnn")
    for operator in ("all", "conv", "matmul", "rnn")
]
# child processes that libraries keep: a compiler's pool, a tracker of resources
QUIET_CHILDREN = (*process.COMPILER_PROCESSES, "resource_tracker")
TIMERS = [getattr(signal, name) for name in dir(signal) if name.startswith("ITIMER_")]
# files of /proc/self: the priority when memory runs out, the slack of timers, the process's timers
OF_THE_SYSTEM = ("oom_score_adj", "timerslack_ns", "timers")
ENDING_SECONDS = 0.1  # how long an ended thread may still be counted
SMALLEST, HALF_ULP = 5e-324, 2.0**-53


def _named(owner: Any, prefix: str, names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    return {prefix + name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _questions() -> dict[str, Callable[[], Any]]:
    """Return a function that reads each switch, by the name of the switch."""
    asked = {
        **_named(torch, "torch.", TORCH),
        **process.switches(),
        **_named(sys, "sys.", PYTHON),
    }
    asked["torch.autocast"] = _autocast
    asked["torch.autograd.graph.saved_tensors_hooks"] = _saved_tensors_hooks
    asked["fp32 precision"] = _fp32_precision
    asked["the modes of dispatch"] = _dispatch_keys
    asked["denormal numbers"] = lambda: (SMALLEST * len("1"), 1.0 + HALF_ULP * len("1"))
    return asked | _system_questions()


def _system_questions() -> dict[str, Callable[[], Any]]:
    return {
        "gc": partial(_gc, gc.isenabled, gc.get_threshold, gc.get_debug),
        "decimal": partial(_decimal, decimal.getcontext),
        "faulthandler": faulthandler.is_enabled,
        "locale": partial(locale.setlocale, locale.LC_ALL),
        "multiprocessing": partial(_start_method, multiprocessing.get_start_method),
        "numpy": partial(_numpy, np.geterr, np.geterrcall, np.get_printoptions),
        "signals": partial(
            _signals,
            signal.getsignal,
            getattr(signal, "pthread_sigmask", None),
            getattr(signal, "getitimer", None),
        ),
        "socket": socket.getdefaulttimeout,
        "streams": _streams,
        "tracemalloc": tracemalloc.is_tracing,
        "threads": _threads,
        "threads of _thread": _raw_threads,
        "children": _children,
        "umask": _umask,
        "rlimits": _rlimits,
        **{name: partial(ask, 0) for name, ask in _named(os, "os.", SCHEDULING).items()},
        "/proc/self": _of_the_system,
        "priority": partial(getattr(os, "getpriority", lambda *_: None), 0, 0),  # of this process
        "affinity": partial(getattr(os, "sched_getaffinity", lambda _: None), 0),
        "environ": partial(dict.copy, os.environ._data),  # type: ignore[attr-defined]
        "the memory of the card": _cuda,
    }


def _gc(is_enabled: Any, threshold: Any, debug: Any) -> Any:
    return is_enabled(), threshold(), debug()


def _start_method(get: Any, usual: str = multiprocessing.get_all_start_methods()[0]) -> Any:
    return get(allow_none=True) or usual


def _numpy(errors: Any, call: Any, printing: Any) -> Any:
    return errors(), call(), str(printing())


def _decimal(get: Any) -> Any:
    """Return the settings of the decimal context, without flags, which any division may set."""
    context = get()
    return context.prec, context.rounding, context.Emin, context.Emax, dict(context.traps)


def _autocast(
    enabled: Any = torch.is_autocast_enabled,
    dtype: Any = torch.get_autocast_dtype,
    enter: Any = torch.autocast_increment_nesting,
    leave: Any = torch.autocast_decrement_nesting,
) -> Any:
    enter()
    return [(enabled(device), dtype(device)) for device in ("cpu", "cuda")], leave()


def _saved_tensors_hooks(top: Any = innermost_saved_tensors_hooks) -> Any:
    return top(True)  # even where they are off


def _fp32_precision(get: Any = process.fp32_precision_of) -> Any:
    return get and [_answer(partial(get, *which)) for which in PRECISION_OF]


def _dispatch_keys(
    included: Any = process.included_dispatch_keys,
    excluded: Any = process.excluded_dispatch_keys,
) -> tuple[str, str]:
    return str(included()), str(excluded())


def _signals(get: Any, mask: Any, timer: Any) -> Any:
    handlers = [get(number) for number in range(1, signal.NSIG) if number not in (32, 33)]
    masked = mask and mask(signal.SIG_BLOCK, [])  # not on Windows
    return handlers, masked, [timer(which) for which in TIMERS]


def _of_the_system(open_file: Any = open) -> list[str]:
    found = []
    for name in OF_THE_SYSTEM:
        try:
            with open_file(f"/proc/self/{name}") as file:
                found.append(file.read())
        except OSError:
            found.append("")

    return found


def _streams(fstat: Any = os.fstat) -> Any:
    """Return which files the three standard streams are, and whether Python's are open."""
    files: list[Any] = []
    for number in (0, 1, 2):
        try:
            status = fstat(number)
            files.append((status.st_dev, status.st_ino))
        except OSError:
            files.append(None)

    return files, [getattr(stream, "closed", True) for stream in (sys.stdout, sys.stderr)]


def _threads(enumerate_threads: Any = threading.enumerate) -> Any:
    """Return Python's threads, without those that installed packages run."""
    return {t.ident for t in enumerate_threads() if not _is_packages_own(t)}


def _raw_threads(
    count: Any = _thread._count,
    enumerate_threads: Any = threading.enumerate,
    sleep: Any = time.sleep,
    clock: Any = time.monotonic,
) -> int:
    """Return the number of threads that were started through `_thread`, not `threading`.

    Threads of C libraries, such as OpenMP's, are not counted.
    """
    until = clock() + ENDING_SECONDS
    while True:
        known = [t for t in enumerate_threads() if not isinstance(t, threading._DummyThread)]
        found: int = count() + 1 - len(known)  # it leaves out the main thread
        if found <= 0 or clock() > until:
            return max(found, 0)
        sleep(ENDING_SECONDS / 10)  # a thread that has just ended is still counted for a moment


def _is_packages_own(thread: threading.Thread) -> bool:
    if isinstance(thread, threading._DummyThread):  # begun by C code: autograd's
        return True
    owner = getattr(thread, "_target", None) if type(thread) is threading.Thread else type(thread)
    package = str(getattr(owner, "__module__", "")).partition(".")[0]
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or ""
    return package not in sys.stdlib_module_names and "site-packages" in file


def _children(listdir: Any = os.listdir, open_file: Any = open) -> Any:
    """Return the ids of child processes, on Linux, without those that libraries keep."""
    found = set()
    try:
        for task in listdir("/proc/self/task"):
            with open_file(f"/proc/self/task/{task}/children") as file:
                found.update(file.read().split())
        return {pid for pid in found if not _is_librarys_child(pid, open_file)}
    except OSError:
        return None


def _is_librarys_child(pid: str, open_file: Any) -> bool:
    try:
        with open_file(f"/proc/{pid}/cmdline") as file:
            command = file.read()
    except OSError:
        return False
    return any(text in command for text in QUIET_CHILDREN)


def _umask(umask: Any = os.umask) -> int:
    mask: int = umask(0o077)
    umask(mask)
    return mask


def _rlimits() -> Any:
    try:
        import resource
    except ImportError:
        return None
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return [resource.getrlimit(getattr(resource, name)) for name in names]


def _cuda() -> Any:
    """Return what is allocated on each card, if CUDA has started in this process."""
    cuda = torch.cuda
    if not cuda.is_initialized():
        return None
    allocated = [cuda.memory_allocated(index) for index in range(cuda.device_count())]
    return allocated, cuda.current_device(), cuda.current_stream().cuda_stream


_QUESTIONS = _questions()
# settings that importing a library may change permanently, because no later job depends on them
OF_IMPORTS = frozenset({"environ", "threads"})


def process_state() -> dict[str, Any]:
    """Return the value of every switch."""
    return {name: _answer(ask) for name, ask in _QUESTIONS.items()}


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:  # some functions raise while settings contradict each other
        return f"{type(error).__name__}: {error}"


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the switches that have changed."""
    return [name for name, value in before.items() if not _same(value, after[name])]


def _same(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)
    except Exception:
        return before is after


def kept_tensor_bytes() -> int:
    """Return the bytes of the tensors that exist and are not frozen (`gc.freeze`)."""
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type != "meta":
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


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
        self.compares = True  # what an import of a library changes
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
        is_inside = bool(self._importing) and not self._importing[-1]
        is_outermost = self.compares and not is_own and not is_inside
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
