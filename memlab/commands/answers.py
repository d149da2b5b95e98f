"""What a command prints, and its exit code.

- 0: done, and the answer is yes: it fits, the gradients are the same, nothing got worse.
- 1: the answer is no: it does not fit or is too close to say, memory ran out, the gradients differ,
  nothing can be recommended, something got worse.
- 2: wrong use: an option, a model, a device or a file that is not allowed.
- 3: no answer: a step is unsupported, failed, crashed or took too long, or nothing was compared.
"""

import json
import sys
from enum import IntEnum
from typing import Any

import click

from memlab.arguments.quoting import printable
from memlab.arguments.units import format_bytes
from memlab.limits.judgement import Judgement
from memlab.result import Outcome, StepResult


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    YES = 0
    NO = 1
    WRONG_USE = 2
    NO_ANSWER = 3
    INTERRUPTED = 130  # by Ctrl-C, as shells have it


def show(answer: Any, *, as_json: bool) -> None:
    """Print an answer: its `to_dict` as one JSON object, or its text."""
    click.echo(json.dumps(answer.to_dict(), allow_nan=False) if as_json else plain(str(answer)))


def plain(text: str) -> str:
    """Return lines that every terminal can show: names in a file may hold anything."""
    return "\n".join(map(printable, text.split("\n")))


def end(code: ExitCode) -> None:
    """End the command with this exit code."""
    click.get_current_context().exit(int(code))


def code_of(result: StepResult) -> ExitCode:
    """Return the exit code of one result."""
    if result.outcome is Outcome.OUT_OF_MEMORY:
        return ExitCode.NO
    if result.outcome is not Outcome.OK:
        return ExitCode.NO_ANSWER
    return ExitCode.YES if result.fit in (None, Judgement.FITS) else ExitCode.NO


def show_result(result: StepResult, *, as_json: bool) -> None:
    """Print one result with its notes, and end with its exit code."""
    show(result, as_json=as_json)
    if not as_json:
        if result.outcome is Outcome.OK and (said := _fit_in_words(result)):
            click.echo(said)
        for note in result.notes:
            click.echo(plain(f"note: {note}"))
    end(code_of(result))


def _fit_in_words(result: StepResult) -> str:
    """Return whether a step fits, and into what; "" if that is not known."""
    limit, of_device = result.memory_limit_bytes, result.usable_memory_bytes
    room = limit or of_device
    if result.fit is None or room is None:
        return ""
    what = "the memory limit" if limit else f"what PyTorch can reserve on {result.device}"
    if result.fit is Judgement.TOO_CLOSE:
        return f"too close to {format_bytes(room)}, {what}, to say whether it fits"
    return f"{result.fit} {format_bytes(room)}, {what}"


def tell(text: str) -> None:
    """Say on stderr what is going on, so that stdout holds the answer alone."""
    click.echo(text, file=sys.stderr)
