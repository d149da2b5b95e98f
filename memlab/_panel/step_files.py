"""Recorded steps as files for the page, numbered so that it asks for those that it lacks."""

import base64
import threading
from collections.abc import Sequence

from memlab._panel.questions import Question, Recorded
from memlab.prediction.step_file import packed

MOST_FILES = 8  # of one family: a page computes with each of them


class StepFiles:
    """Numbers recorded steps and their families, and packs those that are asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[Question, int] = {}
        self._numbers: dict[tuple[int, bool], int] = {}
        self._recorded: dict[int, Recorded] = {}  # by number
        self._packed: dict[int, bytes] = {}

    def family(self, question: Question) -> str:
        """Return the name of all questions that differ in batch, micro-batches or budget alone."""
        with self._lock:
            return str(self._families.setdefault(question.relatives, len(self._families)))

    def numbers(self, recorded: Sequence[Recorded]) -> list[int]:
        """Return the numbers of recorded steps, the newest ones if there are many.

        A step has another number once the plans of its budgets are known, which its file holds.
        """
        with self._lock:
            return [self._number(one) for one in recorded[-MOST_FILES:]]

    def _number(self, recorded: Recorded) -> int:
        key = id(recorded.prediction.size_model), recorded.frontier is not None
        if key not in self._numbers:
            number = self._numbers[key] = len(self._numbers)
            self._recorded[number] = recorded  # which keeps the id taken
        return self._numbers[key]

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

    def as_text(self, recorded: Sequence[Recorded]) -> list[str]:
        """Return the files of recorded steps in base64, as a saved page holds them."""
        files = [self.file(number) for number in self.numbers(recorded)]
        return [base64.b64encode(file).decode() for file in files if file is not None]
