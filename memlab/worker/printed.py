"""What a model prints while a job runs: passed on to the worker's output, its beginning kept."""

import dataclasses
from typing import Any, TextIO

from memlab.result import StepResult

MOST_CHARACTERS = 4000  # of the beginning: a forward runs many times and prints the same again


class Printed:
    """Stands in for a stream: keeps the first part of what is written, and passes everything on.

    Args:
        on: the stream, which is also what anything but writing is left to.
    """

    def __init__(self, on: TextIO) -> None:
        self._on, self._kept, self._left_out = on, "", 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream."""
        return getattr(self._on, name)

    def write(self, text: str) -> int:
        """Write text; return its length."""
        kept = text[: MOST_CHARACTERS - len(self._kept)]
        self._kept += kept
        self._left_out += len(text) - len(kept)
        self._on.write(text)
        return len(text)

    @property
    def text(self) -> str:
        """What was printed; a last line says how much was left out."""
        more = f"\n(and {self._left_out:,} more characters)" if self._left_out else ""
        return self._kept.rstrip("\n") + more

    def into(self, value: Any) -> Any:
        """Return a job's value, with what was printed where it is a result or holds one."""
        if not self._kept:
            return value
        if isinstance(value, StepResult):
            return dataclasses.replace(value, printed=self.text)
        if isinstance(result := getattr(value, "result", None), StepResult):
            return dataclasses.replace(value, result=self.into(result))
        return value
