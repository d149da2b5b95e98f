"""Exercises of chapters 13 and 16: a loop that runs out of memory, and a change that must fail."""

import atexit
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memlab._util.units import format_bytes, is_a, parse_bytes, shown
from memlab.course.exercise import Exercise, always
from memlab.errors import ConfigError, MemlabError
from memlab.integrations.person_script import run_script
from memlab.prediction.run_result import RunResult
from memlab.result import Outcome
from memlab.running import require_ok
from memlab.store.compare import compare

CARD = "rtx-4060"
FOLDER = Path(__file__).with_name("loops")
LOOPS = {"13.1": "loss", "13.2": "evaluation", "13.3": "gradients"}
LINES_OF = {  # that deserve a hint: how each begins
    "13.1": {"raises": "loss.backward()", "number": "right =", "printed": "print(float(right))"},
    "13.2": {"forward": "scores =", "at_the_end": "right =", "training": "optimizer.zero_grad()"},
    "13.3": {"zeroed": "optimizer.zero_grad()", "forward": "scores =", "clipped": "nn.utils"},
}


def script(number: str) -> str:
    """Return the script of an exercise of chapter 13.

    Args:
        number: of the exercise: "13.1", "13.2" or "13.3".

    Raises:
        ConfigError: the exercise has no script.

    >>> "optimizer.step()" in script("13.1")
    True
    """
    if not is_a(number, str) or number not in LOOPS:
        raise ConfigError(f"number={shown(number)} has no script; allowed are {', '.join(LOOPS)}")
    return "".join((FOLDER / f"{name}.py.txt").read_text() for name in ("common", LOOPS[number]))


def numbered(number: str) -> str:
    """Return the script of an exercise with the number of each line before it.

    Args:
        number: as for `script`.

    Raises:
        ConfigError: the exercise has no script.

    >>> print(numbered("13.1").splitlines()[0])
     1  import torch
    """
    lines = script(number).splitlines()
    return "\n".join(f"{place:>2}  {line}" for place, line in enumerate(lines, 1))


def _line(number: str, start: str) -> int:
    lines = script(number).splitlines()
    return next(at for at, line in enumerate(lines, 1) if line.strip().startswith(start))


@functools.cache
def _folder() -> Path:
    """Return a folder that lives as long as this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def _run(name: str, source: str) -> RunResult:
    path = _folder() / f"{name}.py"
    path.write_text(source)
    return require_ok(run_script(path, device=CARD, progress=False))


def _fault(number: str) -> int:
    """Return the line that memlab finds at fault, by a run without a card."""
    return _run(LOOPS[number], script(number)).faults[0].line


def _judge_line(asked: Exercise, given: Any) -> str:
    """Return the hint for the number of a line."""
    lines = script(asked.number).splitlines()
    if not is_a(given, int) or is_a(given, bool) or not 1 <= given <= len(lines):
        return f"{shown(given)} is no line; answer with its number, from 1 to {len(lines)}"
    if given == _fault(asked.number):
        return ""
    for name, start in LINES_OF[asked.number].items():
        if lines[given - 1].strip().startswith(start):
            return asked.hints[name]
    return asked.hints["another"]


def _finder(number: str) -> Exercise:
    """Return the exercise that asks for the line at fault."""
    mistakes: dict[str, Callable[[], Any]] = {
        name: functools.partial(_line, number, start) for name, start in LINES_OF[number].items()
    }
    return Exercise(
        number=number,
        reference=functools.partial(_fault, number),
        mistakes=mistakes | {"another": always(1)},
        judge=_judge_line,
    )


# chapter 16
LOOSE = 1.25  # times the peak: a limit above it lets much more pass


def _good(batch_size: int = 1024) -> RunResult:
    """Return the run of the script that stands for a reader's own."""
    repaired = script("13.1").replace("total += loss", "total += loss.item()")
    return _run("train", repaired.replace("batch_size=1024", f"batch_size={batch_size}"))


def _refusal(asked: Exercise, given: Any) -> str:
    """Return why this is no run that says what a script takes; "" if it is one."""
    if not is_a(given, RunResult):
        return asked.hints["no_run"].format(given=shown(given))
    return "" if given.outcome is Outcome.OK else asked.hints["no_end"].format(given=given.message)


def _is_pair(given: Any) -> bool:
    return is_a(given, tuple) and len(given) == 2


def _judge_limit(asked: Exercise, given: Any) -> str:
    """Return the hint for a run and the most that it may hold."""
    hints = asked.hints
    if not _is_pair(given):
        return hints["not_two"].format(given=shown(given))
    run, limit = given
    if said := _refusal(asked, run):
        return said
    try:
        most = parse_bytes(limit)
    except MemlabError as error:
        return str(error)
    peak = max((run.counted(stage).nbytes for stage in run.stages), default=0)
    if most < peak:
        return hints["no_room"].format(given=format_bytes(peak))
    return hints["loose"].format(given=format_bytes(peak)) if most > LOOSE * peak else ""


def _judge_request(asked: Exercise, given: Any) -> str:
    """Return the hint for a run and that of a changed script, whose comparison has to fail."""
    if not _is_pair(given):
        return asked.hints["not_two"].format(given=shown(given))
    if said := _refusal(asked, given[0]) or _refusal(asked, given[1]):
        return said
    old, new = given
    if old.device != new.device:
        return asked.hints["other_card"].format(given=f"{old.device} and {new.device}")
    if not compare(old, new).ok:
        return ""
    return asked.hints["smaller" if compare(new, old).worse else "unchanged"]


EXERCISES = [
    *map(_finder, LOOPS),
    Exercise(
        number="16.1",
        reference=lambda: (_good(), "210 MiB"),
        mistakes={
            "loose": lambda: (_good(), "8 GiB"),
            "no_room": lambda: (_good(), "100 MiB"),
            "no_run": always(("train.py", "1 GiB")),
            "not_two": always("210 MiB"),
        },
        judge=_judge_limit,
    ),
    Exercise(
        number="16.2",
        reference=lambda: (_good(), _good(4096)),
        mistakes={
            "unchanged": lambda: (_good(), _good()),
            "smaller": lambda: (_good(4096), _good()),
            "not_two": _good,
            "no_run": lambda: (_good(), "changed.py"),
        },
        judge=_judge_request,
    ),
]
