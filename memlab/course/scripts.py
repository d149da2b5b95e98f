"""Exercises of chapters 13 and 16: a loop that runs out of memory, and a change that must fail."""

import atexit
import functools
import os
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


def _written(name: str, source: str) -> str:
    path = _folder() / f"{name}.py"
    if not path.exists():
        path.write_text(source)
    return str(path)


def _run_of(path: Any) -> RunResult:
    return _run_again(str(path), Path(path).stat().st_mtime_ns)


@functools.cache
def _run_again(path: str, _changed: int) -> RunResult:
    return run_script(path, device=CARD, progress=False)


def _fault(number: str) -> int:
    """Return the line that memlab finds at fault, by a run without a card."""
    return require_ok(_run_of(_written(LOOPS[number], script(number)))).faults[0].line


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


def _good() -> str:
    return _written("train", script("13.1").replace("total += loss", "total += loss.item()"))


def _but_for(name: str, old: str, new: str) -> str:
    return _written(name, Path(_good()).read_text().replace(old, new))


def _refusal(asked: Exercise, given: Any) -> str:
    """Return why a path is no script with an answer; "" if it is one."""
    if not is_a(given, str | os.PathLike) or not Path(given).is_file():
        return asked.hints["no_script"].format(given=shown(given))
    run = _run_of(given)
    return "" if run.outcome is Outcome.OK else asked.hints["no_answer"].format(given=run.message)


def _judge_limit(asked: Exercise, given: Any) -> str:
    """Return the hint for a script and the most that it may hold."""
    hints = asked.hints
    if not (is_a(given, tuple) and len(given) == 2):
        return hints["not_two"].format(given=shown(given))
    path, limit = given
    if said := _refusal(asked, path):
        return said
    try:
        most = parse_bytes(limit)
    except MemlabError as error:
        return str(error)
    peak = _run_of(path).peak_reserved_bytes or 0
    if most < peak:
        return hints["no_room"].format(given=format_bytes(peak))
    return hints["loose"].format(given=format_bytes(peak)) if most > LOOSE * peak else ""


def _judge_request(asked: Exercise, given: Any) -> str:
    """Return the hint for a script and a changed one, whose comparison has to fail."""
    if not (is_a(given, tuple) and len(given) == 2):
        return asked.hints["not_two"].format(given=shown(given))
    if said := _refusal(asked, given[0]) or _refusal(asked, given[1]):
        return said
    old, new = map(_run_of, given)
    if not compare(old, new).ok:
        return ""
    same = Path(given[0]).read_text() == Path(given[1]).read_text()
    return asked.hints["unchanged" if same else "passes"]


EXERCISES = [
    *map(_finder, LOOPS),
    Exercise(
        number="16.1",
        reference=lambda: (_good(), "210 MiB"),
        mistakes={
            "loose": lambda: (_good(), "8 GiB"),
            "no_room": lambda: (_good(), "100 MiB"),
            "no_script": always(("nowhere.py", "1 GiB")),
            "not_two": always("train.py"),
        },
        judge=_judge_limit,
    ),
    Exercise(
        number="16.2",
        reference=lambda: (_good(), _but_for("worse", "batch_size=1024", "batch_size=4096")),
        mistakes={
            "passes": lambda: (_good(), _but_for("same", "mean loss", "mean")),
            "unchanged": lambda: (_good(), _good()),
            "not_two": lambda: _good(),
            "no_script": lambda: (_good(), "nowhere.py"),
        },
        judge=_judge_request,
    ),
]
