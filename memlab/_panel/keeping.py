"""Predictions that a person keeps: each becomes a row of the table once it is exact. No widgets."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from memlab._panel.questions import Estimate, Question
from memlab.result import StepResult


@dataclass(kw_only=True, slots=True, eq=False)
class Wish:
    """A prediction that was asked to be kept.

    Attributes:
        question: what is predicted.
        limit_bytes: the limit on screen when it was asked for; None if there was none.
        result: None until it is kept.
        is_over: set once it is kept, or will never be.
    """

    question: Question
    limit_bytes: int | None
    result: StepResult | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


class Keeper:
    """Holds wishes until their predictions are exact; nothing here waits for the worker.

    Args:
        look: as `Forecasts.look`.
        keep: puts a prediction on the table, with the limit on screen.
    """

    def __init__(
        self,
        look: Callable[[Question, int | None], Estimate | None],
        keep: Callable[[StepResult, int | None], object],
    ) -> None:
        self._look, self._keep = look, keep
        self._lock = threading.Lock()
        self._wishes: list[Wish] = []
        self._closed = False

    @property
    def questions(self) -> list[Question]:
        """What the worker has to predict, the oldest wish first."""
        with self._lock:
            return [wish.question for wish in self._wishes]

    def wish(self, question: Question, limit_bytes: int | None) -> Wish:
        """Ask for a prediction to be kept; a second wish for the same one is the first."""
        with self._lock:
            for wish in self._wishes:
                if (wish.question, wish.limit_bytes) == (question, limit_bytes):
                    return wish

            wish = Wish(question=question, limit_bytes=limit_bytes)
            if self._closed:
                wish.is_over.set()
            else:
                self._wishes.append(wish)
            return wish

    def settle(self) -> None:
        """Keep every prediction that is exact by now."""
        with self._lock:
            waiting = list(self._wishes)

        try:
            for wish in waiting:
                self._settle(wish)
        except Exception:
            self._drop(waiting)  # nobody shall wait for what will not come
            raise

    def close(self) -> None:
        """Drop all wishes; whoever waits for one goes on without it."""
        with self._lock:
            self._closed, waiting = True, list(self._wishes)
        self._drop(waiting)

    def _drop(self, wishes: list[Wish]) -> None:
        with self._lock:
            self._wishes = [wish for wish in self._wishes if wish not in wishes]
        for wish in wishes:
            wish.is_over.set()

    def _settle(self, wish: Wish) -> None:
        estimate = self._look(wish.question, wish.limit_bytes)
        if estimate is None or not estimate.exact:
            return

        with self._lock:
            if wish not in self._wishes:  # the panel was closed meanwhile
                return
            self._wishes.remove(wish)

        self._keep(estimate.result, wish.limit_bytes)
        wish.result = estimate.result
        wish.is_over.set()
