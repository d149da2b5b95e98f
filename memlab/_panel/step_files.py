"""Recorded steps as files for the page, numbered so that it asks for those that it lacks."""

import base64
import itertools
import threading
from collections.abc import Iterable, Sequence

from memlab._panel.questions import Question, Recorded
from memlab.config import StepConfig
from memlab.prediction.step_file import packed

MOST_FILES = 8  # of one family: a page computes with each of them
MOST_KEPT = 64  # recordings, each from a half to two MB; a page has its own copies


class StepFiles:
    """Numbers recorded steps and their families, and packs those that are asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[Question, int] = {}
        self._next = itertools.count()
        self._numbers: dict[tuple[int, bool], int] = {}  # the one told of last comes last
        self._recorded: dict[int, Recorded] = {}  # by number
        self._packed: dict[int, bytes] = {}

    def family(self, question: Question) -> str:
        """Return the name of all questions that differ in batch, micro-batches or budget alone."""
        with self._lock:
            return str(self._families.setdefault(question.relatives, len(self._families)))

    def numbers(self, recorded: Sequence[Recorded], here: StepConfig) -> list[int]:
        """Return the numbers of recorded steps; of many those that tell most of a config.

        A step has another number once the plans of its budgets are known, which its file holds.
        """
        with self._lock:
            numbers = sorted(self._number(one) for one in _telling(recorded, here))
            self._forget()
            return numbers

    def _number(self, recorded: Recorded) -> int:
        key = id(recorded.prediction.size_model), recorded.frontier is not None
        number = self._numbers.pop(key, None)
        if number is None:
            number = next(self._next)
            self._recorded[number] = recorded  # which keeps the id taken
        self._numbers[key] = number
        return number

    def _forget(self) -> None:
        """Forget what was told of longest ago; if it is told of again, it has a new number."""
        while len(self._numbers) > MOST_KEPT:
            number = self._numbers.pop(next(iter(self._numbers)))
            del self._recorded[number]
            self._packed.pop(number, None)

    def file(self, number: int) -> bytes | None:
        """Return the file of a number; None if there is none."""
        with self._lock:
            recorded = self._recorded.get(number)
            if recorded is None:
                return None
            if number not in self._packed:
                config = recorded.question.config
                self._packed[number] = packed(recorded.prediction, recorded.frontier, config)
            return self._packed[number]

    def as_text(self, numbers: Iterable[int]) -> list[str]:
        """Return files in base64, as a saved page holds them."""
        files = [self.file(number) for number in numbers]
        return [base64.b64encode(file).decode() for file in files if file is not None]


def _telling(recorded: Sequence[Recorded], here: StepConfig) -> list[Recorded]:
    """Return some of each number of micro-batches, the nearest budgets and the newest first."""
    ranked: list[tuple[int, float, int, Recorded]] = []
    seen: dict[int, int] = {}

    def distance(one: Recorded) -> float:
        return abs(one.question.config.memory_budget - here.memory_budget)

    newest_first = recorded[::-1]
    for age, one in enumerate(sorted(newest_first, key=distance)):
        count = one.question.config.accumulation_steps
        seen[count] = seen.get(count, 0) + 1
        ranked.append((seen[count], distance(one), age, one))
    return [one for *_, one in sorted(ranked, key=lambda each: each[:3])[:MOST_FILES]]
