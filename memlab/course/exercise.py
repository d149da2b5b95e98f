"""`Exercise`: one question, its right answer and the mistakes that have a hint of their own.

What is asked, and the hints, are text in `chapters.toml`.
"""

import functools
import math
import numbers
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab._util.units import GIB, KIB, MIB, is_a, shown

TEXTS = Path(__file__).with_name("chapters.toml")
BLANK = ...  # what stands in a notebook where an answer belongs
SLIPS = {  # of the unit, by the factor between what was asked and what was given
    "in KiB": KIB, "in MiB": MIB, "in GiB": GIB, "in kB (1000 bytes)": 1000,
    "in MB (10**6 bytes)": 10**6, "in GB (10**9 bytes)": 10**9, "in bits": 1 / 8,
}  # fmt: skip
MOST_OF_SLIP = 0.01  # by which an answer in another unit may differ
LEAST_SAID = 0.001  # of how far off an answer is


@functools.cache
def texts() -> dict[str, Any]:
    """Return the texts of the course, by `chapter` and `exercise`."""
    return tomllib.loads(TEXTS.read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exercise:
    """One question of a chapter.

    Attributes:
        number: such as "1.2".
        reference: returns a right answer; memlab computes it, on a step that runs or is predicted.
        mistakes: by the name of a hint, what returns an answer that deserves it.
        judge: returns the hint for an answer, "" for a right one. None judges a number.
        fraction: of the right number, by which an answer may differ.
        unit: of that number.
    """

    number: str
    reference: Callable[[], Any]
    mistakes: Mapping[str, Callable[[], Any]]
    judge: Callable[["Exercise", Any], str] | None = None
    fraction: float = 0.0
    unit: str = "bytes"

    @property
    def hints(self) -> dict[str, str]:
        """The hints, by name."""
        found: dict[str, str] = texts()["exercise"][self.number]
        return found

    def hint(self, given: Any) -> str:
        """Return the hint for an answer; "" for a right one."""
        return self.of_number(given) if self.judge is None else self.judge(self, given)

    def of_number(self, given: Any) -> str:
        """Return the hint for a number; "" for a right one."""
        if is_a(given, bool) or not is_a(given, numbers.Real):
            return f"{shown(given)} is no number; answer with a number of {self.unit}"
        if not (math.isfinite(given) and given > 0):
            return f"{shown(given)} is no size; answer with a number of {self.unit} above 0"
        right = self.reference()
        if abs(given - right) <= self.fraction * right:
            return ""
        for name, answer in self.mistakes.items():
            if _is_near(given, answer(), self.fraction):
                return self.hints[name]
        for unit, factor in SLIPS.items() if self.unit == "bytes" else ():
            if _is_near(given * factor, right, max(self.fraction, MOST_OF_SLIP)):
                return f"that would be right {unit}; the question is in bytes"
        ratio = given / right
        direction = "large" if ratio > 1 else "small"
        if 1 / 2 < ratio < 2:
            return f"too {direction} by {max(abs(ratio - 1), LEAST_SAID):.1%} or less"
        return f"too {direction} by a factor of {max(ratio, 1 / ratio):.3g}"


def always(value: Any) -> Callable[[], Any]:
    """Return what returns `value`."""
    return lambda: value


def one_wrong(reference: Callable[[], Any], wrong: Mapping[str, Any]) -> dict[str, Any]:
    """Return mistakes for an answer by name: in each of them one name has a wrong value.

    Args:
        reference: returns the right values by name.
        wrong: by name, a wrong value, or what returns one.
    """

    def answer(name: str, value: Any) -> Callable[[], Any]:
        return lambda: reference() | {name: value() if callable(value) else value}

    return {name: answer(name, value) for name, value in wrong.items()}


def turned(reference: Callable[[], dict[str, bool]], names: Iterable[str]) -> dict[str, Any]:
    """Return mistakes for an answer by name: in each of them one yes is a no, or one no a yes."""

    def opposite(name: str) -> bool:
        return not reference()[name]

    return one_wrong(reference, {name: functools.partial(opposite, name) for name in names})


def judge_choice(asked: Exercise, given: Any) -> str:
    """Return the hint for one of several names, of which each wrong one has one; "" if right."""
    right = asked.reference()
    known = sorted([*asked.mistakes, right])
    if not is_a(given, str) or given not in known:
        return f"{shown(given)} is no answer here; answer with one of {', '.join(known)}"
    return "" if given == right else asked.hints[given]


def judge_named(asked: Exercise, given: Any) -> str:
    """Return the hint for an answer by name, such as {"sum": True}; "" if each of them is right.

    The mistakes of such an exercise have the same names.
    """
    if said := _unnamed(asked, given):
        return said
    right = asked.reference()
    allowed = sorted(set(right.values()), key=str)
    for name, value in right.items():
        if not any(given[name] is each or (is_a(given[name], str) and given[name] == each)
                   for each in allowed):  # fmt: skip
            said = ", ".join(map(repr, allowed))
            return f"{name}: {shown(given[name])} is no answer; allowed are {said}"
        if given[name] != value:
            return asked.hints[name]
    return ""


def judge_numbers(asked: Exercise, given: Any) -> str:
    """Return the hint for numbers by name; "" if each of them is right."""
    if said := _unnamed(asked, given):
        return said
    for name, value in asked.reference().items():
        answer = given[name]
        if is_a(answer, bool) or not is_a(answer, numbers.Real):
            return f"{name}: {shown(answer)} is no number"
        if not abs(answer - value) <= asked.fraction * max(abs(value), 1):
            return asked.hints[name]
    return ""


def _unnamed(asked: Exercise, given: Any) -> str:
    if not is_a(given, dict):
        return f"{shown(given)} is no dict; answer with one for {', '.join(asked.mistakes)}"
    missing = [name for name in asked.mistakes if name not in given]
    return f"there is no answer for {', '.join(missing)}" if missing else ""


def is_blank(answer: Any) -> bool:
    """Return whether an answer, or a part of one, is still the dots."""
    parts = answer.values() if is_a(answer, dict) else answer if is_a(answer, tuple) else [answer]
    return any(part is BLANK for part in parts)


def _is_near(given: Any, value: Any, fraction: float) -> bool:
    return is_a(value, numbers.Real) and abs(given - value) <= fraction * abs(value)
