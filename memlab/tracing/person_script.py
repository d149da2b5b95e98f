"""Record a person's script, unchanged, over fake tensors: `record_script`.

The script runs as `python train.py` would run it: as `__main__`, with its own arguments, in the
folder of the caller. Its tensors are fake (`tracker.py`), its card is told as it would tell itself
(`script_card.py`), what it does outside of this process is kept within a folder that goes with the
run (`script_sandbox.py`), and its steps are found by what happens (`script_stages.py`).

Beside what a recorded step has, each operator knows the line of the person's code that called it. A
backward operator has the line of its forward operator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import runpy
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memlab._util.functions import own_line
from memlab._util.torch_private.tensors import (
    FakeTensor,
    FakeTensorMode,
    buffers_of,
    convert,
    converted_by,
    parameters_made_of,
    parameters_of,
    swapped,
)
from memlab.devices.operators import signature_of
from memlab.errors import UnsupportedError
from memlab.running import out_of_memory
from memlab.trace import Phase
from memlab.tracing.assembly import BESIDE, LiveBlocks
from memlab.tracing.fakify import check_dense
from memlab.tracing.recording import OpTrace, Streams
from memlab.tracing.script_card import LiveAllocator, found_by_script
from memlab.tracing.script_facts import NOWHERE, Casts, Change, Facts, Line, Watcher
from memlab.tracing.script_ranks import as_first_rank, of_ranks
from memlab.tracing.script_sandbox import around_script
from memlab.tracing.script_stages import (
    BETWEEN,
    SAVING,
    WHOLE,
    Course,
    Enough,
    ScriptGuesses,
    named_by_use,
)
from memlab.tracing.tracker import NO_OPERATORS, Tracker, is_of_list, is_view, record_fake
from memlab.tracing.values import for_real, tensors_in

THEIRS = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
HERE = str(Path(__file__).parents[1])
MOST_FRAMES = 100
SMALLER = "let the script take a smaller batch, or choose a card with more memory"
NO_CARD = re.compile(  # what torch says to a script that asks for a card where there is none
    "not compiled with CUDA|not linked with support for cuda|NVIDIA driver|No CUDA GPUs"
)
MOST_CHARACTERS = 2_000  # of what a script says on stderr
COPY = torch.ops.aten._to_copy.default
OUTLINED = torch.ops.aten.empty_strided.default  # makes again what is left out, without values
MOST_OF_DATA = 2**18  # numbers of a tensor that a script makes of nothing, to be made for real
MOST_ATTEMPTS = 3  # of a script that fails after a value that was assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A script and how it is run.

    Attributes:
        path: of the file; a notebook's code cells are run in turn.
        arguments: its own.
        is_module: whether `path` is the name of a module, as for `python -m`.
        steps: updates after which training has shown what it does.
        writes: whether it may write its files where it would.
        home: folder in which what it writes is kept while it runs; "" for the system's.
        ranks: as which the script is started by `torchrun`, the first of them; 0 without it.
    """

    path: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    steps: int = 3
    writes: bool = False
    home: str = ""
    ranks: int = 0


class ScriptBlocks(LiveBlocks):
    """The live blocks of a script, each with the line that made it, served by the allocator.

    Attributes:
        lines: of each block.
        held: bytes of the live blocks.
    """

    def __init__(
        self, device_type: str, streams: Streams, line: Callable[[], Line],
        allocator: LiveAllocator | None,
    ) -> None:  # fmt: skip
        super().__init__(device_type, streams)
        self._line, self._allocator = line, allocator
        self.lines: list[Line] = []

    def restart(self, recording: OpTrace) -> None:
        """Write into another recording from now on, in which no block is live yet."""
        super().restart(recording)
        self.lines, self.held = [], 0
        if self._allocator is not None:
            self._allocator.restart()

    def born(self, nbytes: int, output: int = BESIDE) -> int:
        """Note memory that the last operator brings into being.

        Raises:
            OutOfMemoryError: the card has no room for it.
        """
        block = super().born(nbytes, output)
        self.lines.append(self._line())
        self.held += nbytes
        if self._allocator is not None:
            try:
                self._allocator.take(block, nbytes, self.streams.current.number)
            except torch.OutOfMemoryError:
                super().freed(block)
                self.held -= nbytes
                raise
        return block

    def freed(self, block: int) -> None:
        """Note that memory is freed after the last operator."""
        super().freed(block)
        self.held -= self.recording.blocks[block].nbytes
        if self._allocator is not None and self.recording.blocks[block].nbytes:
            self._allocator.free(block)


class ScriptTracker(Tracker):
    """A tracker that knows lines, and runs for real what only reads and makes data on the host.

    Args:
        device_type: of the tensors whose memory is followed.
        allocator: of the card; None on a CPU.
        home: the folder of the script.
    """

    blocks: ScriptBlocks
    guesses: ScriptGuesses

    def __init__(self, device_type: str, allocator: LiveAllocator | None, home: str) -> None:
        self._allocator, self._home = allocator, home
        self._at = NOWHERE
        self.lines: list[Line] = []  # of each operator
        self.look: Callable[..., None] | None = None  # before each operator
        super().__init__(device_type)

    def restart(self) -> None:
        """Forget what was seen, for another attempt."""
        if not isinstance(self.blocks, ScriptBlocks):
            self.guesses = ScriptGuesses(MOST_ATTEMPTS)
            self.blocks = ScriptBlocks(self.device_type, self.streams, self._line, self._allocator)
        self.lines, self._at = [], NOWHERE
        super().restart()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on fake tensors, or for real what only reads and makes data."""
        if self.look is not None:
            self.look(func, args, kwargs or {})
        is_real = all(kind is torch.Tensor for kind in types)
        if not is_real or not is_of_data(func, args, kwargs or {}):
            if func is COPY and is_real:  # from the host to the card
                args = (self._faked(args[0]), *args[1:])
            return super().__torch_dispatch__(func, types, args, kwargs)
        with for_real():
            out = func(*args, **(kwargs or {}))
        if self.device_type == "cpu":
            signature = None if is_view(func) else signature_of(func, args, kwargs or {})
            if signature is not None or is_of_list(func, args):
                self._note(func, signature, args, out)
        return out

    def mark(self, step: int, phase: Phase, micro_batch: int) -> None:
        """Begin an interval; what operators read is noted in all of them."""
        super().mark(step, phase, micro_batch)
        self._notes_arguments = True

    def here(self) -> Line:
        """Return the line of the script that runs now."""
        return line_of_person(self._home)

    def is_persons(self, file: str) -> bool:
        """Return whether a file is one of the script."""
        return _is_persons(file, self._home)

    def has_made(self, value: Any) -> bool:
        """Return whether a value is a tensor of this run, and not of others in this process."""
        return issubclass(type(value), FakeTensor) and value.fake_mode is self._mode

    def _faked(self, real: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host as a fake one, whose values are known if they are few."""
        check_dense([real], "the script")
        fake = self._mode.from_tensor(real)
        self.outputs.values.learn(fake, real)
        return fake

    @contextlib.contextmanager
    def fake_parameters(self, mode: FakeTensorMode) -> Iterator[None]:
        """Make each parameter a fake tensor, and so what is computed with it."""

        def fake(real: torch.Tensor) -> torch.Tensor:
            made = self._faked(real)
            self.blocks.note_outputs([made])
            return made

        self._mode = mode
        with parameters_made_of(fake):
            yield

    def _note(self, func: Any, signature: Any, args: Any, out: Any) -> None:
        if signature is not None:
            self._at = line_of_person(self._home)
        self.lines += [self._at] * (len(self.recording.operators) + 1 - len(self.lines))
        super()._note(func, signature, args, out)

    def _line(self) -> Line:
        """Return the line that called the last operator, or of a backward its forward operator."""
        operators = self.recording.operators
        forward = operators[-1].forward if operators else -1
        return self.lines[forward] if 0 <= forward < len(self.lines) else self._at


def is_of_data(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator without fake arguments is run for real: it works on the host.

    A large tensor that it would make of nothing stays fake: weights, and data that are made up.
    """
    if func.namespace in NO_OPERATORS or func is OUTLINED:
        return False
    places = [each for each in (*args, kwargs.get("device")) if isinstance(each, torch.device)]
    if any(each.type != "cpu" for each in places):
        return False
    if tensors_in([*args, *kwargs.values()]):
        return True
    sizes = [each for each in args if isinstance(each, list | tuple)]
    numbers = sizes[0] if sizes else [each for each in args if isinstance(each, int)]
    return math.prod(map(int, numbers)) <= MOST_OF_DATA


def line_of_person(home: str) -> Line:
    """Return the innermost line of a person's own code that runs now."""
    frame: Any = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if _is_persons(code.co_filename, home):
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return NOWHERE


@functools.cache
def _is_persons(file: str, home: str) -> bool:
    """Return whether a file is a person's: in the script's folder, or of no library."""
    if file.startswith("<") or file.startswith(HERE):
        return False
    path = os.path.abspath(file)
    is_installed = "site-packages" in path.removeprefix(home) or path.startswith(THEIRS)
    return not is_installed or (path.startswith(home + os.sep) and home.startswith(THEIRS))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScriptRecording:
    """What a script did over fake tensors.

    Attributes:
        recording: its operators and blocks.
        lines: of each block, where it was made.
        operator_lines: of each operator, where it was called.
        names: of its stages, by number.
        updates: that its optimizers made.
        cut: what of it was ended early, as `Course` says.
        facts: what else it did.
        ended: a sentence if it ran out of memory and did not catch that, else "".
    """

    recording: OpTrace
    lines: tuple[Line, ...]
    operator_lines: tuple[Line, ...]
    names: tuple[str, ...]
    updates: int
    cut: frozenset[str]
    facts: Facts
    ended: str

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it ended because the card had no room."""
        return bool(self.ended)


def record_script(
    script: Script, device: torch.device, card: Any, allocator: LiveAllocator | None,
    changes: Sequence[Change] = (), around: Callable[[ScriptTracker], Any] = contextlib.nullcontext,
) -> ScriptRecording:  # fmt: skip
    """Return what a script does over fake tensors.

    Args:
        script: how it is run.
        device: of its tensors: a CPU, or the stand-in for a card.
        card: that it finds.
        allocator: of that card; None on a CPU.
        changes: of the script, which are tried.
        around: returns a context for the script itself, which is told the tracker.

    Raises:
        BaseException: whatever the script raises and does not catch.
    """
    home = str(Path(script.path).resolve().parent) if not script.is_module else os.getcwd()
    tracker = ScriptTracker(device.type, allocator, home)
    tracker.draws.are_followed = True  # scripts read losses: nearly each would run once more
    courses: list[Course] = []
    facts: list[Facts] = []
    ended: list[str] = []

    def run(mode: FakeTensorMode) -> None:
        watcher = Watcher(tracker, tracker.here, changes)
        guesses = tracker.guesses
        if guesses.is_whole:
            tracker.recording.notes += (WHOLE,)
        course = Course(tracker, watcher, script.steps, lambda: tracker.blocks.held, guesses)
        tracker.look = course.look
        courses.append(course)
        facts.append(watcher.facts)
        tracker.mark(-1, Phase.BUILD, 0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracker.fake_parameters(mode))
            stack.enter_context(converted_by(functools.partial(converted, mode)))
            stack.enter_context(
                around_script(course.load, tracker.recording, folder, writes=script.writes)
            )
            if allocator is not None:
                found = found_by_script(device, card, allocator, tracker.streams)
                stack.enter_context(found)
                stack.enter_context(Casts(watcher, tracker.is_persons))
            stack.enter_context(as_first_rank(script.ranks, tracker))
            stack.enter_context(course.followed())
            said = stack.enter_context(_last_of_errors())
            stack.enter_context(_threads_heard(tracker.recording))
            try:
                with around(tracker):
                    start(script)
                watcher.facts.is_seen_to_end = True
                ended.append("")
            except Enough:
                ended.append("")
            except torch.OutOfMemoryError as error:
                place = f"at {own_line(error) or 'no line of the script'}, in {tracker.place()}"
                said_by_torch = str(error).partition(" See doc")[0].rstrip(". ")
                ended.append(out_of_memory(place, said_by_torch, SMALLER))
            except (KeyError, ValueError) as error:
                said_of_ranks = of_ranks(Path(script.path).name, error)
                if script.ranks or not said_of_ranks:
                    raise
                raise UnsupportedError(said_of_ranks) from error
            except (AssertionError, RuntimeError) as error:
                if device.type != "cpu" or not NO_CARD.search(str(error)):
                    raise
                raise UnsupportedError(
                    f"{Path(script.path).name} asks for a CUDA card at "
                    f"{own_line(error) or 'no line of its own'}, and runs as on a CPU here; say "
                    "for which card: --device rtx-4060, or device='rtx-4060' from Python"
                ) from error
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise UnsupportedError(_of_exit(script, error.code, said.text)) from error
                ended.append("")
        if all(name in (BETWEEN, SAVING) for name in course.names):  # it does nothing but build
            course.names[:] = [BETWEEN]
            intervals = tracker.recording.intervals
            intervals[:] = [dataclasses.replace(each, step=0) for each in intervals]
        tracker.mark(len(course.names) - 1, Phase.TEARDOWN, 0)

    with tempfile.TemporaryDirectory(prefix="memlab-run-", dir=script.home or None) as folder:
        recording = record_fake(run, tracker)
    return ScriptRecording(
        recording=recording,
        lines=tuple(tracker.blocks.lines),
        operator_lines=tuple(tracker.lines),
        names=tuple(named_by_use(courses[-1].names, recording, facts[-1])),
        updates=courses[-1].updates,
        cut=frozenset(courses[-1].cut),
        facts=facts[-1],
        ended=ended[-1],
    )


class _Last:
    """Stands in for `sys.stderr`, passes everything on and keeps the end of it."""

    def __init__(self, on: Any) -> None:
        self._on, self.text = on, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._on, name)

    def write(self, text: str) -> int:
        self.text = (self.text + text)[-MOST_CHARACTERS:]
        self._on.write(text)
        return len(text)


@contextlib.contextmanager
def _last_of_errors() -> Iterator[_Last]:
    before, sys.stderr = sys.stderr, _Last(sys.stderr)
    try:
        yield sys.stderr
    finally:
        sys.stderr = before


@contextlib.contextmanager
def _threads_heard(recording: OpTrace) -> Iterator[None]:
    """Note what threads of a script raise: they see neither fake tensors nor the card."""
    own = threading.excepthook

    def hear(raised: threading.ExceptHookArgs) -> None:
        recording.notes += (
            f"A thread of the script raised {raised.exc_type.__name__} ({raised.exc_value}): what "
            "threads do with PyTorch is not followed, and is missing in these numbers.",
        )
        own(raised)

    threading.excepthook = hear
    try:
        yield
    finally:
        threading.excepthook = own


def _of_exit(script: Script, code: Any, said: str) -> str:
    """Return the sentence for a script that ended itself."""
    name = Path(script.path).name
    if not isinstance(code, int):
        return f"{name} ended itself: {code}"
    last = said.strip().splitlines()[-1:]
    return f"{name} ended itself with exit code {code}" + (f", saying: {last[0]}" if last else "")


def start(script: Script) -> None:
    """Run a script as `python` runs it, and forget its modules."""
    argv, path, known = sys.argv, sys.path[:], set(sys.modules)
    sys.argv = [script.path, *script.arguments]
    try:
        if script.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script.path, run_name="__main__", alter_sys=True)
        elif script.path.endswith(".ipynb"):
            sys.path.insert(0, str(Path(script.path).resolve().parent))
            _run_cells(script.path)
        else:
            sys.path.insert(0, str(Path(script.path).resolve().parent))
            runpy.run_path(script.path, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
        for name in set(sys.modules) - known:
            if _is_of_script(sys.modules[name]):
                del sys.modules[name]


def _is_of_script(module: Any) -> bool:
    """Return whether a module is a person's own; a library in C may not be imported twice."""
    path = os.path.abspath(getattr(module, "__file__", None) or HERE)
    return "site-packages" not in path and not path.startswith((*THEIRS, HERE))


def _run_cells(path: str) -> None:
    """Run the code cells of a notebook, without its magics."""
    with open(path, encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": path}
    for number, cell in enumerate(cells, start=1):
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            text = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)
            exec(compile(text, f"{path}, cell {number}", "exec"), names)


def converted(mode: FakeTensorMode, own: Any, module: Any, fn: Any, recurse: bool) -> Any:
    """Convert a module in place: its parameters stay the same objects, as in a real run."""
    for child in module.children() if recurse else ():
        convert(child, fn)
    parameters, buffers = parameters_of(module), buffers_of(module)
    with torch.no_grad():
        for name, held in parameters.items():
            if held is None:
                continue
            gradient = held.grad
            fake = held if isinstance(held, FakeTensor) else mode.from_tensor(held)
            new = fn(fake.detach())
            if new.device == fake.device and new.dtype == fake.dtype and fake is held:
                continue
            made = torch.nn.Parameter(new, held.requires_grad)
            parameters[name] = swapped(held, made) if fake is held else made
            if gradient is not None:
                parameters[name].grad = fn(gradient)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = fn(buffer)
    return module
