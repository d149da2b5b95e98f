"""What lies around a person's script while it runs over fake tensors: files, processes, loaders.

- **Files** are read where they are. What the script writes goes to a folder of this run, where the
  script finds it again; nothing outside of it changes. A write that passes these functions by, such
  as that of a library in C, is refused where Python hears of it.
- **Processes** are not started and no other host is asked: the script gets the error that it would
  get where that is forbidden. The work of a pool is done in this process, one task after another.
- **Loaders** work in this process, whatever number of workers they ask for.
"""

from __future__ import annotations

import builtins
import concurrent.futures.process
import contextlib
import copy
import functools
import importlib
import inspect
import io
import multiprocessing.dummy
import multiprocessing.pool
import os
import shutil
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

from memlab._util.functions import replaced
from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import FakeTensor, LoaderIterator, storage_key
from memlab.tracing.recording import OpTrace
from memlab.tracing.script_stages import TensorOutline, outline
from memlab.tracing.values import for_real

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NO_FILES = ("/dev/", "/proc/", "/sys/")
QUIET = {
    "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "MLFLOW_TRACKING_URI": "",
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false", "HF_DEACTIVATE_ASYNC_LOAD": "1",
    "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip
CACHES = {  # which a library in C opens, or Python's own import
    "HF_DATASETS_CACHE": "~/.cache/huggingface/datasets",
    "HF_MODULES_CACHE": "~/.cache/huggingface/modules",
    "HF_EVALUATE_CACHE": "~/.cache/huggingface/evaluate",
    "HF_METRICS_CACHE": "~/.cache/huggingface/metrics",
}
CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod"}
STARTS = {"subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn",
          "os.spawn"}  # fmt: skip
# once for all runs: a worker looks for what has changed around each import of a job
SAFETENSORS: list[Any] = []
POOLS: list[Any] = [multiprocessing.pool.Pool]
with contextlib.suppress(ImportError):
    SAFETENSORS.append(importlib.import_module("safetensors.torch"))
with contextlib.suppress(ImportError):
    POOLS.append(importlib.import_module("multiprocess.pool").Pool)  # pickles with dill
HERE = (None, "", "localhost", "127.0.0.1", "::1", socket.gethostname())
NO_PROCESS = (
    "a script does not start processes while memlab runs it over tensors without memory; for ranks "
    "that it would spawn itself give --nproc-per-node"
)
NO_HOST = "no other host is asked while memlab runs a script; make its data available as files"
NO_WRITE = "{path} is not written while memlab runs a script; --write allows it"


_open, _unlink, _readlink, _listdir = open, os.unlink, os.readlink, os.listdir
_getcwd = os.getcwd  # all of these are not what a script finds


class Overlay:
    """Files as a script sees them: those that are there, and what it has written in their place.

    A folder in which the script writes gets a folder of the same name below `root`, with links to
    all that is in it. From then on that one is used.

    Args:
        home: the folder of all attempts, in which one is made for this overlay.
    """

    def __init__(self, home: str) -> None:
        self._home = os.path.realpath(home)
        self.root = tempfile.mkdtemp(dir=self._home)
        self._made: set[str] = set()

    def reading(self, path: Any) -> Any:
        """Return where a file or folder is found."""
        real = self._real(path)
        if real is None:
            return path
        is_ours = self._is_made(real) or self._is_made(os.path.dirname(real))
        own = self.root + real
        found = own if is_ours and not _is_link_to(own, real) else real
        return os.fsencode(found) if isinstance(path, bytes) else found

    def writing(self, path: Any, *, keeps: bool = True) -> Any:
        """Return where a file is written; with `keeps` what it holds is there already."""
        if not isinstance(path, str | bytes | os.PathLike):
            return path
        real = self._real(path)
        if real is not None:
            self._make(os.path.dirname(real))
        own = os.fsdecode(path) if real is None else self.root + real
        if os.path.islink(own) and os.path.isfile(own) and self._is_inside(os.path.abspath(own)):
            there = os.path.realpath(own)
            _unlink(own)
            if keeps:
                with _open(there, "rb") as source, _open(own, "wb") as target:
                    shutil.copyfileobj(source, target)
        return own

    def folder(self, path: str) -> str:
        """Return the folder of the run that stands for a folder, from which ".." leads on too.

        In the system's own folder of temporary files it leads to what holds packages alone.
        """
        self._make(path)
        for above in map(str, Path(path).parents):
            is_temporary = above == os.path.realpath(tempfile.gettempdir())
            self._link(above, _packages_in(above) if is_temporary else None)
        return self.root + path

    def folder_of_script(self) -> str:
        """Return where the script finds itself."""
        return _getcwd().removeprefix(self.root)

    def is_of_person(self, path: Any) -> bool:
        """Return whether a path is outside of the run's own folder."""
        return self._real(path) is not None

    def leads_out(self, path: Any) -> bool:
        """Return whether a path in the run's own folder leads to a person's file by a link."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        text = os.path.abspath(os.fsdecode(path))
        return self._is_inside(text) and not self._is_inside(
            os.path.realpath(os.path.dirname(text))
        )

    def _real(self, path: Any) -> str | None:
        """Return the absolute path of a person's file; None for what is none, or the run's own."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.path.abspath(os.fsdecode(path))
        return None if self._is_inside(text) or text.startswith(NO_FILES) else text

    def _is_inside(self, text: str) -> bool:
        return text == self._home or text.startswith(self._home + os.sep)

    def _is_made(self, folder: str) -> bool:
        own = self.root + folder
        return folder in self._made or (
            len(folder) > 1
            and os.path.isdir(own)
            and not os.path.islink(own)
            and self._is_made(os.path.dirname(folder))
        )

    def _make(self, folder: str) -> None:
        if self._is_made(folder) or not os.path.isdir(folder):
            return
        for above in reversed(Path(folder).parents):  # nothing is made behind a link
            if os.path.islink(self.root + str(above)):
                self._make(str(above))
        own = self.root + folder
        if os.path.islink(own):
            os.unlink(own)
        os.makedirs(own, exist_ok=True)
        self._link(folder)
        self._made.add(folder)

    def _link(self, folder: str, names: Iterable[str] | None = None) -> None:
        own = self.root + folder
        with contextlib.suppress(PermissionError):  # of a folder above that nobody may list
            for name in _listdir(folder) if names is None else names:
                if not os.path.lexists(os.path.join(own, name)):
                    os.symlink(os.path.join(folder, name), os.path.join(own, name))


def _packages_in(folder: str) -> set[str]:
    """Return the names in a folder that lead to where modules are imported from."""
    inside = folder.rstrip(os.sep) + os.sep
    return {each.removeprefix(inside).partition(os.sep)[0]
            for each in sys.path if each.startswith(inside)}  # fmt: skip


def _is_link_to(own: str, real: str) -> bool:
    """Return whether a path of the run is a link that stands for a person's file or folder."""
    return os.path.islink(own) and _readlink(own) == real


class _Entry:
    """An entry of a folder of the run, as the person's own folder would have it."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        self.name, self.path = entry.name, os.path.join(os.fsdecode(folder), entry.name)
        self._entry = entry
        self._real = os.path.abspath(self.path)

    def __fspath__(self) -> str:
        return self.path

    def is_symlink(self) -> bool:
        """Return whether it is a link of the person's or the script's."""
        is_ours = _is_link_to(self._entry.path, self._real)
        return os.path.islink(self._real) if is_ours else self._entry.is_symlink()

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder."""
        return self._entry.is_dir() and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a file."""
        return self._entry.is_file() and (follow_symlinks or not self.is_symlink())

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return what the system knows of it."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """Return its number."""
        return self.stat(follow_symlinks=False).st_ino


class _Entries(contextlib.ExitStack):
    """What `os.scandir` returns for a folder of the run."""

    def __init__(self, entries: Any, folder: Any) -> None:
        super().__init__()
        self.enter_context(entries)
        self._entries, self._folder = entries, folder

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        return _Entry(next(self._entries), self._folder)


READING = (
    "stat", "lstat", "statvfs", "access", "listdir", "readlink", "chdir", "pathconf",
    "listxattr", "getxattr",
)  # fmt: skip
WRITING_ONE = ("mkdir", "rmdir", "remove", "unlink", "chmod", "utime", "truncate", "chown")
WRITING_TWO = ("rename", "replace", "link", "symlink")


def _files(overlay: Overlay) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced, so that files are read and written in the overlay."""
    own_open, os_open, os_scandir = io.open, os.open, os.scandir

    def opened(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        writes = any(letter in mode for letter in "wax+")
        place = overlay.writing(file, keeps="w" not in mode) if writes else overlay.reading(file)
        return own_open(place, mode, *more, **options)

    def opened_by_flags(file: Any, flags: int, *more: Any, **options: Any) -> int:
        writes = bool(flags & WRITING)
        place = overlay.writing(file, keeps=not flags & os.O_TRUNC) if writes else (
            overlay.reading(file)
        )  # fmt: skip
        return os_open(place, flags, *more, **options)

    def read(own: Any, path: Any = ".", *more: Any, **options: Any) -> Any:
        return own(overlay.reading(path), *more, **options)

    def written(own: Any, path: Any, *more: Any, **options: Any) -> Any:
        return own(overlay.writing(path), *more, **options)

    def both(own: Any, source: Any, target: Any, *more: Any, **options: Any) -> Any:
        is_link = own is own_symlink
        first = source if is_link else overlay.writing(source)
        return own(first, overlay.writing(target, keeps=False), *more, **options)

    own_symlink = os.symlink

    def scanned(path: Any = ".") -> Any:
        place = overlay.reading(path)
        return os_scandir(path) if place == path else _Entries(os_scandir(place), path)

    yield builtins, "open", opened
    yield os, "scandir", scanned
    yield io, "open", opened
    yield os, "open", opened_by_flags
    for names, function in ((READING, read), (WRITING_ONE, written), (WRITING_TWO, both)):
        yield from (
            (os, name, functools.partial(function, getattr(os, name)))
            for name in names
            if hasattr(os, name)
        )
    yield shutil, "_use_fd_functions", False


Load = Callable[[Any, bool], contextlib.AbstractContextManager[None]]


def _loaders(load: Load) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced, so that loaders work in this process and ask before each batch."""
    kind: Any = DataLoader
    init, following = kind.__init__, LoaderIterator.__next__
    signature, iterate = inspect.signature(init), kind.__iter__
    with_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders, and iterators of these

    def made(self: Any, *args: Any, **options: Any) -> None:
        given = signature.bind(self, *args, **options).arguments
        alone = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False,
                 "pin_memory": False, "timeout": 0, "multiprocessing_context": None}  # fmt: skip
        init(**{**given, **{name: value for name, value in alone.items() if name in given}})
        if given.get("num_workers"):
            with_workers.add(self)

    def iterator(self: Any) -> Any:
        found = iterate(self)
        if self in with_workers:
            with_workers.add(found)
        return found

    def next_batch(self: Any) -> Any:
        with load(self, self in with_workers):
            return following(self)

    yield kind, "__init__", functools.wraps(init)(made)
    yield kind, "__iter__", iterator
    yield LoaderIterator, "__next__", next_batch


POOLED = (
    "What the script gives to a pool of processes was done in its own process, one task after "
    "another."
)


class _Done(concurrent.futures.Future[Any]):
    """A task of a pool, done at once; `multiprocessing` has other names for its parts."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        try:
            self.set_result(function(*args, **kwargs))
        except Exception as error:
            self.set_exception(error)

    get, ready = concurrent.futures.Future.result, concurrent.futures.Future.done

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""

    def successful(self) -> bool:
        """Return whether it raised nothing."""
        return self.exception() is None


class _PoolHere(multiprocessing.pool.Pool):
    """A pool without processes: whoever gives it tasks does them."""

    _pool: Any = ()
    _ctx: Any = SimpleNamespace(Manager=lambda: contextlib.nullcontext(multiprocessing.dummy))

    def apply_async(
        self, func: Any, args: Any = (), kwds: Any = None, callback: Any = None,
        error_callback: Any = None,
    ) -> Any:  # fmt: skip
        """Do one task."""
        done = _Done(func, args, kwds or {})
        told = callback if done.successful() else error_callback
        if told is not None:
            told(done.exception() or done.result())
        return done

    def _map_async(
        self, func: Any, iterable: Any, mapper: Any, chunksize: Any = None, callback: Any = None,
        error_callback: Any = None,
    ) -> Any:  # fmt: skip
        """Do all tasks; `mapper` gives each of them to the function."""
        every = functools.partial(mapper, (func, iterable))
        return self.apply_async(every, (), None, callback, error_callback)

    def imap(self, func: Any, iterable: Any, chunksize: Any = 1) -> Any:
        """Do each task when its result is asked for."""
        return map(func, iterable)

    imap_unordered: Any = imap

    def close(self) -> None:
        """Do nothing, like what follows: there is no process to end."""

    terminate = join = _check_running = __del__ = close


def _pools(recording: OpTrace) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced, so that pools of processes do their work in this process."""

    def begin(initializer: Any, given: Any) -> None:
        if POOLED not in recording.notes:
            recording.notes += (POOLED,)
        if initializer is not None:
            initializer(*given)

    def pool(
        self: Any, own: Any, processes: Any = None, initializer: Any = None, initargs: Any = (),
        *more: Any, **options: Any,
    ) -> None:  # fmt: skip
        if isinstance(self, multiprocessing.pool.ThreadPool):
            own(self, processes, initializer, initargs, *more, **options)
            return
        self.__class__ = _PoolHere
        begin(initializer, initargs)

    def executor_made(
        self: Any, max_workers: Any = None, mp_context: Any = None, initializer: Any = None,
        initargs: Any = (), **_: Any,
    ) -> None:  # fmt: skip
        begin(initializer, initargs)

    for kind in POOLS:
        yield kind, "__init__", functools.partialmethod(pool, kind.__init__)
    executor: Any = concurrent.futures.ProcessPoolExecutor
    yield executor, "__init__", executor_made
    yield executor, "submit", lambda self, fn, /, *args, **kwargs: _Done(fn, args, kwargs)
    yield executor, "shutdown", lambda self, wait=True, *, cancel_futures=False: None


class _Checkpoints:
    """Files of `torch.save`, which this run writes and reads without the numbers of fake tensors.

    A file holds a mark, so that it may be copied, renamed, or a buffer that the script writes. What
    has all its values is written as PyTorch does where the script may write its files.

    Args:
        recording: whose notes say that a person's file holds a mark.
        writes: whether the script may write its files.
    """

    def __init__(self, recording: OpTrace, *, writes: bool) -> None:
        self._held: dict[bytes, Any] = {}
        self._recording, self._writes = recording, writes
        self._real: set[str] = set()  # files that PyTorch wrote

    def replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what is replaced, so that files of tensors are written and read here."""
        yield torch, "save", functools.partial(self.save, torch.save)
        yield torch, "load", functools.partial(self.load, torch.load, None)
        own: Any = torch.UntypedStorage
        # by their addresses libraries find out which tensors share memory
        yield own, "data_ptr", functools.partialmethod(_address, own.data_ptr)
        for safe in SAFETENSORS:
            yield safe, "save_file", functools.partial(self.save, safe.save_file)
            yield safe, "load_file", functools.partial(self.load, safe.load_file, "cpu")

    def save(self, own: Any, value: Any, file: Any, *more: Any, **options: Any) -> None:
        """Keep what a file would hold, and write its mark."""
        if self._writes and all(map(_has_values, pytree.tree_leaves(value))):
            with for_real():
                own(value, file, *more, **options)
            self._real |= {_place(file)} - {""}
            return
        if self._writes and MARKED not in self._recording.notes:
            self._recording.notes += (MARKED,)
        mark = MARK % len(self._held)
        self._held[mark] = pytree.tree_map_only(torch.Tensor, _Kept, value)
        with _opened(file, "wb") as opened:
            opened.write(mark)

    def load(self, own: Any, usual: Any, file: Any, *more: Any, **options: Any) -> Any:
        """Return what a file of this run holds, or read another one."""
        with _opened(file, "rb") as opened:
            start = opened.tell()
            held = self._held.get(opened.read(len(MARK % 0)))
            opened.seek(start)
        if held is None:
            with for_real() if _place(file) in self._real else contextlib.nullcontext():
                return own(file, *more, **options)
        place = [*more, options.get("map_location"), options.get("device")]  # of either function
        device = next((each for each in place if isinstance(each, str | torch.device)), usual)
        found = pytree.tree_map_only(_Kept, lambda kept: kept(device), held)
        return copy.deepcopy(found) if found is held else found  # a whole model, for instance


MARK = b"a checkpoint of memlab run, %08d"
MARKED = (
    "Tensors have no values in this run: with --write a file of torch.save or safetensors holds a "
    "mark of memlab in their place, and cannot be read later."
)


def _has_values(leaf: Any) -> bool:
    """Return whether a part of a checkpoint can be written: a tensor with values, or plain data."""
    is_plain = isinstance(leaf, torch.Tensor | int | float | complex | str | bytes | type(None))
    return is_plain and not isinstance(leaf, FakeTensor)


class _Kept:
    """A tensor of a file, which is made anew on a device, or on its own for None."""

    def __init__(self, tensor: torch.Tensor) -> None:
        is_fake = isinstance(tensor, FakeTensor)
        self._held = outline(tensor) if is_fake else tensor.detach().clone()

    def __call__(self, device: Any) -> torch.Tensor:
        held = self._held
        return held.made(device) if isinstance(held, TensorOutline) else held.clone().to(device)


def _place(file: Any) -> str:
    """Return the absolute path of a file; "" for one that is open already."""
    return os.path.abspath(os.fsdecode(file)) if isinstance(file, str | bytes | os.PathLike) else ""


def _opened(file: Any, mode: str) -> contextlib.AbstractContextManager[Any]:
    """Return an open file for its path, or a file that is open already."""
    is_path = isinstance(file, str | bytes | os.PathLike)
    return open(file, mode) if is_path else contextlib.nullcontext(file)


def _address(storage: Any, own: Callable[[Any], int]) -> int:
    """Return the address of a storage; of one without memory a number of its own."""
    return own(storage) or storage_key(storage)


class _OutsideGuard:
    """Refuses, where Python hears of it, what would leave this process or the run's folder."""

    def __init__(self) -> None:
        self._is_heard = self._is_on = False
        self._overlay: Overlay | None = None

    @contextlib.contextmanager
    def around(self, overlay: Overlay | None) -> Iterator[None]:
        """Guard a run that writes into an overlay, or with None where it would."""
        if not self._is_heard:
            self._is_heard = True
            sys.addaudithook(self._hear)  # for the rest of the process
        self._is_on, self._overlay = True, overlay
        try:
            yield
        finally:
            self._is_on, self._overlay = False, None

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event in STARTS:
            raise PermissionError(NO_PROCESS)
        is_asking = event == "socket.connect" and isinstance(given[1], tuple)
        if is_asking or (event == "socket.getaddrinfo" and given[0] not in HERE):
            raise ConnectionRefusedError(NO_HOST)
        if event in CHANGES and self._overlay is not None and self._overlay.leads_out(given[0]):
            raise PermissionError(NO_WRITE.format(path=given[0]))
        is_writing = event == "open" and isinstance(given[2], int) and given[2] & WRITING
        if is_writing and self._overlay is not None and self._overlay.is_of_person(given[0]):
            raise PermissionError(NO_WRITE.format(path=given[0]))


_guard = _OutsideGuard()


def _mirrored(folder: str, home: str) -> str:
    """Return a folder of the run with all that is in another one, for libraries in C.

    They open files by themselves, where no name is translated.
    """
    real, root = os.path.abspath(os.path.expanduser(folder)), os.path.join(home, "caches")
    if not os.path.isdir(root + real):
        os.makedirs(root + real)
        for place, _, names in os.walk(real):
            os.makedirs(root + place, exist_ok=True)
            for name in names:
                os.symlink(os.path.join(place, name), os.path.join(root + place, name))
    return root + real


@contextlib.contextmanager
def around_script(load: Load, recording: OpTrace, home: str, *, writes: bool) -> Iterator[None]:
    """Keep what a script does outside of this process within a folder.

    Args:
        load: called around each batch of a loader, with its iterator and whether it has workers.
        recording: whose notes say what was done in another way than the script asks for.
        home: that folder, of all attempts.
        writes: whether the script may write its files where it would.
    """
    before = dict(os.environ)
    os.environ.update(QUIET)
    with contextlib.ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())
        checkpoints = _Checkpoints(recording, writes=writes)
        replaced_parts = [*_loaders(load), *_pools(recording), *checkpoints.replaced()]
        replaced_parts.append((os, "_exit", sys.exit))
        overlay = None
        if not writes:
            overlay = Overlay(home)
            for name, usual in CACHES.items():
                os.environ[name] = _mirrored(os.environ.get(name, usual), home)
            # libraries in C write where the process is, and links lead them to what is there
            os.chdir(overlay.folder(os.getcwd()))
            replaced_parts += [*_files(overlay), (os, "getcwd", overlay.folder_of_script)]
        stack.enter_context(replaced(replaced_parts))
        stack.enter_context(_guard.around(overlay))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
