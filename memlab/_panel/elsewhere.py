"""Keeps the table of cards up to date with the settings on screen, without delaying them."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from memlab._panel.asked import Asked
from memlab._panel.cards_table import CardsTable
from memlab._panel.forecasts import Forecasts
from memlab._panel.job import Latest
from memlab._panel.questions import Question
from memlab.records import where

REST_SECONDS = 0.3  # settings at rest for this long are looked up on all cards


class Elsewhere:
    """Fills the table of cards in a thread of its own, while the table is open.

    Args:
        cards: the table.
        asked: reads what is on screen.
        forecasts: of the panel.
        guarded: shows an exception of its block on the page.
    """

    def __init__(
        self,
        cards: CardsTable,
        asked: Asked,
        forecasts: Forecasts,
        guarded: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._cards, self._asked, self._forecasts = cards, asked, forecasts
        self._guarded = guarded
        self._closed = False
        self._fill = Latest(self._fill_cards)

    @property
    def questions(self) -> list[Question]:
        """What the worker has to predict for the table; nothing while it is folded."""
        question = self._asked.question
        return self._cards.questions(question) if question and self._cards.is_open else []

    def refresh(self) -> None:
        """Show what is known about the settings on screen, soon."""
        if self._cards.is_open:
            self._fill()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._fill.close()

    def _fill_cards(self, _: object) -> None:
        with self._guarded():
            question = self._asked.question
            self._cards.mark_past(question)
            time.sleep(REST_SECONDS)  # a slider that moves must not share the processor

            def is_newest() -> bool:
                return not self._closed and self._asked.question == question

            if question is not None and is_newest():
                limits = {name: where.capacity(name) for name in self._cards.names}
                limits[question.device] = self._asked.limit
                self._cards.fill(question, limits, self._forecasts, is_newest)
