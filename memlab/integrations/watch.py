"""`watch`: what is written down about memory when a real training run has a problem with it.

After each update of the optimizer one number is read: on CUDA the bytes that tensors hold, on a CPU
the resident memory of the process. On CUDA the allocator also keeps a ring of its newest events,
with Python stacks. Files are written when memory runs out, passes a limit, or grows from step to
step; a snapshot is opened in a process of its own, after the run.

Growth is found by the lowest value of each ten steps: the first ten steps are warm-up, and then
each of eight such values must exceed the one before by `least` bytes, so it takes 100 steps. Nine
values of equal noise are in ascending order once in 9! times. The last four rises must be a third
of all eight, or memory only approaches a level, as caches do.

Left out: on a CPU nothing reports single allocations, so what holds memory beside Python's tensors
(the graph of autograd, libraries) is not known there. Steps are updates of the first optimizer that
makes one. PyTorch cannot detach its observer of out-of-memory errors: one stays in the process and
does nothing when nobody watches.
"""

import atexit
import contextlib
import datetime
import functools
import gc
import html
import importlib
import os
import subprocess
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlab._util.checks import checked, choice, size
from memlab._util.functions import own_line
from memlab._util.torch_private.tensors import (
    dump_history,
    is_history_recorded,
    on_cuda_start,
    on_out_of_memory,
    record_history,
    stop_history,
)
from memlab._util.units import MIB, format_bytes, shown
from memlab.errors import ConfigError, UnsupportedError
from memlab.integrations.out_of_memory import explain_error
from memlab.integrations.snapshot import Snapshot, open_snapshot
from memlab.running import is_out_of_memory

BLOCK_STEPS, NUM_RISES = 10, 8
LEAST_RESIDENT = MIB  # bytes that the resident memory must grow in ten steps; an arena is no leak
LEAST_ALLOCATED = 512 * BLOCK_STEPS  # on CUDA: one block of the caching allocator a step
RING_EVENTS = 100_000
ANSWER_SECONDS = 600
NUM_NAMED = 8  # rows of a list in an answer
ANSWER = "import sys; from memlab.integrations import watch; watch.add_snapshot(*sys.argv[1:])"


@dataclass(slots=True, eq=False)
class Growth:
    """Whether a series grows from step to step, by the rule at the top of this file.

    Attributes:
        least: bytes by which the lowest value of ten steps must exceed that of the ten before.
        num_rises: how often in a row it did so far.
        since: the first step of these rises; 0 if there is none.
    """

    least: int
    num_rises: int = 0
    since: int = 0
    _step: int = 0
    _lowest: int | None = None
    _lows: list[int] = field(default_factory=list)  # of each ten steps after the warm-up

    def add(self, nbytes: int) -> bool:
        """Take the value of one more step; return whether it ends ten steps."""
        self._step += 1
        self._lowest = nbytes if self._lowest is None else min(self._lowest, nbytes)
        if self._step % BLOCK_STEPS:
            return False
        if self._lows:
            is_rise = self._lowest >= self._lows[-1] + self.least
            self.num_rises = self.num_rises + 1 if is_rise else 0
            self.since = self._step - (self.num_rises + 1) * BLOCK_STEPS + 1 if is_rise else 0
        if self._step > BLOCK_STEPS:
            self._lows = [*self._lows[-NUM_RISES:], self._lowest]
        self._lowest = None
        return True

    @property
    def found(self) -> bool:
        """Whether memory grows, and does not approach a level."""
        if self.num_rises < NUM_RISES:
            return False
        first, middle, last = self._lows[0], self._lows[NUM_RISES // 2], self._lows[-1]
        return (last - middle) * 3 >= last - first


class RunWatch(contextlib.ContextDecorator):
    """A watch over a run; see `watch`. It can be entered again, also inside itself."""

    def __init__(self, folder: str, memory_limit: int | None) -> None:
        self.folder, self.memory_limit = Path(folder), memory_limit
        self.files: list[Path] = []
        self._depth = 0

    def __enter__(self) -> "RunWatch":
        """Begin to watch."""
        self._depth += 1
        if self._depth == 1:
            with _noted([]):
                self._state = _Running(folder=self.folder, memory_limit=self.memory_limit)
                self._state.begin()
                self.files = self._state.files
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End, write what is to be written, and pass every error on."""
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and hasattr(self, "_state"):
            with _noted(self._state.problems):
                self._state.end(error)

    def callback(self, library: str) -> Any:
        """Return a callback of a Trainer that watches while it trains.

        Args:
            library: "transformers" or "lightning". The Trainer of transformers tells its callbacks
                of no error: on CUDA the allocator does, on a CPU put `with memlab.watch():` around
                `trainer.train()` instead.

        Raises:
            MemlabError: the library is another one, or is not installed.
        """
        return _callback_class(choice("transformers", "lightning")("library", library))(self)


def _folder(name: str, value: Any) -> str:
    try:
        return os.path.expanduser(os.fsdecode(value))
    except Exception:  # a person's own class may raise anything
        raise ConfigError(f"{name}={shown(value)} is no path; pass that of a folder") from None


@checked(folder=_folder, memory_limit=size)
def watch(
    folder: str | os.PathLike[str] = "memlab-watch", *, memory_limit: int | str | None = None
) -> RunWatch:
    """Watch over the memory of a training run, and write down why it runs out, or grows.

    Use it in `with memlab.watch():`, as a decorator, or by `memlab.watch().callback("lightning")`.
    It changes nothing in the run and raises nothing into it. Nothing is written, and nothing
    printed, unless memory runs out, passes the limit, or grows over 90 updates after the first ten.

    Args:
        folder: for the answers, made when there is one. Names of files have the rank and the
            process. An answer is a text; on CUDA the snapshot of PyTorch and a page lie beside it.
        memory_limit: bytes, or a size such as "8GiB": on CUDA of what the caching allocator
            reserves, on a CPU of the resident memory of this process at the end of a step. It is
            not enforced; passing it is written down once.

    Raises:
        MemlabError: an argument is not allowed.

    >>> with watch() as watched:
    ...     loss = torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum()
    >>> watched.files  # nothing happened
    []
    """
    return RunWatch(str(folder), memory_limit)  # type: ignore[arg-type]  # `checked` reads the size


@dataclass(slots=True, eq=False)
class _Running:
    """One watch while it is on."""

    folder: Path
    memory_limit: int | None
    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)  # the newest, one a step
    num_steps: int = 0
    written: set[str] = field(default_factory=set)
    num_out_of_memory: int = 0
    is_on: bool = False
    pid: int = 0
    _hook: Any = None
    _statm: int = -1
    _optimizer: Any = None
    _records: bool = False
    _growth: Growth | None = None
    _counted: Counter[str] | None = None
    _pending: list[tuple[Path, Path]] = field(default_factory=list)  # text and snapshot
    _first_peak: int = 0

    def begin(self) -> None:
        self.pid, self.is_on = os.getpid(), True
        self._hook = register_optimizer_step_post_hook(self._after_update)
        atexit.register(self.end)
        with contextlib.suppress(OSError):  # no Linux
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        on_cuda_start(self._begin_cuda)

    def _begin_cuda(self) -> None:
        with _noted(self.problems):
            if not self.is_on or os.getpid() != self.pid:
                return
            _observed().add(self)
            self._first_peak = _allocator("reserved_bytes", "peak")
            if not is_history_recorded():
                record_history(RING_EVENTS)
                self._records = True

    def end(self, error: BaseException | None = None) -> None:
        """Remove every hook, write about the error, and have the snapshots read."""
        if not self.is_on or os.getpid() != self.pid:
            return
        try:
            if error is not None and is_out_of_memory(error):
                with _noted(self.problems):
                    self._write_error(error)
        finally:
            self.is_on = False
            self._hook.remove()
            atexit.unregister(self.end)
            if self._statm >= 0:
                os.close(self._statm)
            _OBSERVERS.discard(self)
            if self._records:
                stop_history()
        for text, snapshot in self._pending:
            with _noted(self.problems):
                _answer_elsewhere(text, snapshot)

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        with _noted(self.problems):
            if not self.is_on or os.getpid() != self.pid:
                return
            first = self._optimizer() if self._optimizer else None
            if first is None:
                self._optimizer = weakref.ref(optimizer)
            elif first is not optimizer:
                return
            self._sample()

    def _sample(self) -> None:
        is_cuda = torch.cuda.is_initialized()
        held = _allocator("allocated_bytes", "current") if is_cuda else self._resident()
        if held is None:
            return
        if self._growth is None:
            self._growth = Growth(LEAST_ALLOCATED if is_cuda else LEAST_RESIDENT)
        self.num_steps += 1
        self.samples.append(held)
        if len(self.samples) > 2 * NUM_RISES * BLOCK_STEPS:
            del self.samples[: NUM_RISES * BLOCK_STEPS]

        if self.memory_limit is not None and "limit" not in self.written:
            most = _allocator("reserved_bytes", "peak") if is_cuda else held
            if most > self.memory_limit and not (is_cuda and most == self._first_peak):
                what = "reserved by the caching allocator" if is_cuda else "resident"
                self._write("limit", f"{format_bytes(most)} {what} in step {self.num_steps}: more "
                            f"than memory_limit={format_bytes(self.memory_limit)}.")  # fmt: skip

        if "growth" in self.written or not self._growth.add(held):
            return
        if not is_cuda and self._growth.num_rises == NUM_RISES // 2:
            self._counted = _live_tensors()
        if self._growth.found:
            self._write("growth", self._growth_text(is_cuda))

    def _resident(self) -> int | None:
        if self._statm < 0:
            return None
        return int(os.pread(self._statm, 64, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _growth_text(self, is_cuda: bool) -> str:
        assert self._growth is not None
        steps = (NUM_RISES + 1) * BLOCK_STEPS
        recent = self.samples[-steps:]
        what = "Allocated memory on CUDA" if is_cuda else "The resident memory of this process"
        said = (
            f"{what} has grown since step {self._growth.since}: "
            f"{format_bytes(recent[-1] - recent[0])} in {len(recent)} steps, to "
            f"{format_bytes(recent[-1])} in step {self.num_steps}."
        )
        return said if is_cuda else f"{said}\n\n{_grown_tensors(self._counted)}"

    def out_of_memory(self, device: int, requested: int, total: int, free: int) -> None:
        """Write the snapshot at the moment of the error; the arguments are the observer's."""
        with _noted(self.problems):
            if self.is_on and os.getpid() == self.pid:
                self.num_out_of_memory += 1
                if self.num_out_of_memory > 1:
                    return  # a run that tries again may do so thousands of times
                reserved = _allocator("reserved_bytes", "current", device)
                others = max(total - free - reserved, 0)
                self._write("out-of-memory", f"{format_bytes(requested)} were requested on device "
                            f"{device} and not found in step {self.num_steps + 1}. Of "
                            f"{format_bytes(total)}, {format_bytes(free)} were free, "
                            f"{format_bytes(reserved)} reserved by PyTorch in this process, and "
                            f"{format_bytes(others)} held by other processes, by the CUDA context "
                            "or by libraries.")  # fmt: skip

    def _write_error(self, error: BaseException) -> None:
        line = own_line(error)
        trace = "".join(traceback.format_exception(error)).rstrip()
        peak = _highest_resident()
        facts = [
            f"Memory ran out in step {self.num_steps + 1}" + (f", at {line}." if line else ".")
        ]
        if self.num_out_of_memory > 1:
            facts.append(f"It was the last of {self.num_out_of_memory} such errors in this run.")
        if peak:
            facts.append(f"The process held at most {peak} resident.")
        explained = explain_error(trace)
        self._write("error", " ".join(facts) + f"\n\n{explained}\n\n{trace}",
                    is_dumped=self.num_out_of_memory != 1)  # fmt: skip

    def _write(self, event: str, said: str, *, is_dumped: bool = True) -> None:
        """Write what is known in this process, and the snapshot, and say where on stderr."""
        self.written.add(event)
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = os.environ.get("RANK", "0")
        stem = f"{event}-rank{rank}-pid{self.pid}"
        number = len(list(self.folder.glob(f"{stem}*.txt")))
        path = self.folder / f"{stem}{f'-{number + 1}' if number else ''}.txt"
        held = ", ".join(format_bytes(nbytes) for nbytes in self.samples[-NUM_NAMED:])
        problems = [f"The watch had a problem of its own: {text}" for text in self.problems]
        lines = [f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}", said]
        lines += [f"Held at the end of the last steps: {held}."] if held else []
        path.write_text("\n\n".join([*lines, *problems]) + "\n", encoding="utf-8")
        self.files.append(path)
        print(f"memlab watch: {said.splitlines()[0]} See {path}", file=sys.stderr)
        if is_dumped and self in _OBSERVERS:
            snapshot = path.with_suffix(".pickle")
            dump_history(str(snapshot))
            self.files.append(snapshot)
            self._pending.append((path, snapshot))


@contextlib.contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Note an error of the watch itself instead of raising it into the run."""
    try:
        yield
    except Exception as error:
        if len(problems) < NUM_NAMED:
            problems.append(f"{type(error).__name__}: {error}")


_OBSERVERS: set[_Running] = set()


@functools.cache
def _observed() -> set[_Running]:
    """Return who is told of an out-of-memory on CUDA; the first call attaches the observer."""

    def tell(device: int, requested: int, total: int, free: int) -> None:
        for running in list(_OBSERVERS):
            running.out_of_memory(device, requested, total, free)

    on_out_of_memory(tell)
    return _OBSERVERS


def _allocator(counted: str, when: str, device: int | None = None) -> int:
    """Return one statistic of the caching allocator, read without making all the others."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)[counted]["all"][when])


def _highest_resident() -> str:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return line.split(":")[1].strip().replace("kB", "KiB")
    return ""


# What a CPU run can say about growth: Python's tensors, counted twice.


def _tensors() -> Iterator[torch.Tensor]:
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):  # a proxy's __class__ may run code
            yield each


def _name(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _live_tensors() -> Counter[str]:
    return Counter(_name(tensor) for tensor in _tensors())


def _grown_tensors(before: Counter[str] | None) -> str:
    """Return which of Python's tensors have become more, and what refers to them."""
    steps = NUM_RISES // 2 * BLOCK_STEPS
    grown = _live_tensors() - (before or Counter())
    rows = [(name, more) for name, more in grown.most_common(NUM_NAMED) if more >= steps // 2]
    lines = []
    for name, more in rows if before is not None else []:
        newest = [tensor for tensor in _tensors() if _name(tensor) == name][-1]
        lines.append(f"  {more} more tensors of {name}{_held_by(newest)}")
    unknown = (
        "A CPU run cannot know which line allocated them; `memlab run` finds lines."
        if lines
        else "No kind of Python's tensors has become so many more: it may be a graph of autograd "
        "that is kept (a loss that is added up without .item() or .detach()), another Python "
        "object, or a library. A CPU run cannot know more; `memlab run` finds lines."
    )
    head = [f"In the last {steps} steps:"] if lines else []
    return "\n".join([*head, *lines, unknown])


def _held_by(tensor: torch.Tensor) -> str:
    """Return the container or attribute that refers to a tensor; "" if none is found."""
    for holder in gc.get_referrers(tensor):
        if type(holder) not in (list, dict, tuple, set):
            continue
        for owner in gc.get_referrers(holder):
            names = owner if type(owner) is dict else getattr(owner, "__dict__", None)
            if type(names) is not dict:
                continue
            found = next((name for name, value in names.items() if value is holder), None)
            if isinstance(found, str) and len(holder) > BLOCK_STEPS:
                of = names.get("__name__", "") if type(owner) is dict else type(owner).__name__
                kind = type(holder).__name__
                return f", in the {kind} `{found}`{f' of {of}' if of else ''} ({len(holder)} items)"
    return ""


# The answer, made of the error and the snapshot.


def answer_text(snapshot: Snapshot) -> str:
    """Return what a snapshot says about why memory ran out or grew, and what would help.

    Args:
        snapshot: that was written at the moment of the error, limit or growth.
    """
    lines, last = [], snapshot.out_of_memory[-1] if snapshot.out_of_memory else None
    if last is not None and last.requested_bytes is not None:
        lines.append(str(last))
        free = (last.device_free_bytes or 0) + (last.usable_free_bytes or 0)
        if not (last.is_cause or last.card_had_room):
            missing = last.requested_bytes - free
            lines.append(f"{format_bytes(missing)} were missing for this request alone. "
                         "memlab.recommend finds the settings that fit; memlab.from_trainer reads "
                         "a Trainer for it.")  # fmt: skip
    if snapshot.leaks:
        first = snapshot.leaks[0]
        lines.append(f"What grows: {format_bytes(first.bytes_per_step)} a step, allocated by "
                     f"{first.place}.")  # fmt: skip
    return "\n\n".join([*lines, str(snapshot)])


def add_snapshot(text_path: str, snapshot_path: str) -> None:
    """Add what a snapshot shows to an answer, and write both as a page; called in a new process."""
    path, snapshot = Path(text_path), open_snapshot(snapshot_path)
    told = f"{path.read_text(encoding='utf-8')}\n{answer_text(snapshot)}\n"
    path.write_text(told, encoding="utf-8")
    page = f"<!DOCTYPE html><meta charset='utf-8'><title>{html.escape(path.stem)}</title>"
    page += f"<pre style='white-space: pre-wrap'>{html.escape(told)}</pre>"
    path.with_suffix(".html").write_text(page + snapshot._repr_html_(), encoding="utf-8")


def _answer_elsewhere(text: Path, snapshot: Path) -> None:
    """Run `add_snapshot` in a new process, which sees no card, and note if it fails."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(text), str(snapshot)],
        env=environment, capture_output=True, text=True, timeout=ANSWER_SECONDS,
    )  # fmt: skip
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        with text.open("a", encoding="utf-8") as file:
            file.write(f"\nThe snapshot could not be read: {why}\n")


@functools.cache
def _callback_class(library: str) -> Callable[[RunWatch], Any]:
    try:  # an optional package, which takes seconds to import
        module: Any = importlib.import_module(
            "lightning.pytorch" if library == "lightning" else library
        )
    except ImportError:
        raise UnsupportedError(f"{library} is not installed; pip install {library}") from None
    base = module.Callback if library == "lightning" else module.TrainerCallback

    class WatchCallback(base):  # type: ignore[misc, valid-type]
        """Enters the watch when training begins, and leaves it when training ends."""

        def __init__(self, watched: RunWatch) -> None:
            self.watch, self._is_entered = watched, False

        def _enter(self, *_: Any, **__: Any) -> None:
            if not self._is_entered:  # a Trainer that tries a smaller batch begins once more
                self.watch.__enter__()
                self._is_entered = True

        def _leave(self, error: BaseException | None) -> None:
            if self._is_entered:
                self._is_entered = False
                self.watch.__exit__(type(error), error, None)

        on_train_begin = on_train_start = _enter  # of transformers, of Lightning

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._leave(None)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._leave(exception)

    return WatchCallback
