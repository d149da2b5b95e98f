"""The setting on screen on every known card, side by side: what the forecasts know of each."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from memlab._panel.asked import Asked
from memlab._panel.choices import compared_cards
from memlab._panel.job import Latest
from memlab._panel.panes import Panes
from memlab._panel.questions import Estimate, Forecasts, Question
from memlab._panel.state import Verdict, outcome_verdict
from memlab._panel.table import NONE, cell, format_rate, limit_verdict, or_none
from memlab._util.units import format_bytes, format_seconds, plus_minus
from memlab.result import StepResult
from memlab.store import recorded

WAITING = "waiting"
TITLES = {
    "card": "a card that need not be in this machine",
    "limit": "whether the step fits this card; for the card chosen above, your limit",
    "peak": "most bytes that count against the limit, predicted; ± is the uncertainty",
    "time per step": "time of one optimizer update, predicted; ± is the uncertainty",
    "samples/s": "batch size divided by the time per step, predicted",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OnCard:
    """What is known about the setting on one card.

    Attributes:
        name: of the card.
        limit_bytes: that the step is compared with; None if it is not known.
        estimate: the best so far; None if there is none.
    """

    name: str
    limit_bytes: int | None
    estimate: Estimate | None = None

    def is_outdated(self, limit_bytes: int | None, answer: StepResult | None) -> bool:
        """Return whether more may be known by now; `answer` is the worker's, if there is one."""
        if self.estimate is None or self.limit_bytes != limit_bytes:
            return True
        return not self.estimate.exact and answer is not None


class CardsTable:
    """The rows of all cards, of which only those are looked up again that may have changed.

    Args:
        names: of the cards.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._asked: Question | None = None  # whose rows are known, for whatever card
        self._cards: dict[str, OnCard] = {}

    def questions(self, question: Question) -> list[Question]:
        """Return the question on screen for each of the cards."""
        return [dataclasses.replace(question, device=name) for name in self.names]

    def fill(
        self,
        question: Question,
        limits: Mapping[str, int | None],
        forecasts: Forecasts,
        is_newest: Callable[[], bool],
    ) -> bool:
        """Look up a question on each card; return whether all rows are of it now.

        Args:
            question: on screen.
            limits: of each card, by name.
            forecasts: of the panel.
            is_newest: whether the question is still on screen; if not, the rows stay as they are.
        """
        former = self._cards if self._asked == _anywhere(question) else {}
        cards = {}
        for asked in self.questions(question):
            if not is_newest():
                return False
            name, limit = asked.device, limits[asked.device]
            card = former.get(name)
            if card is None or card.is_outdated(limit, forecasts.known(asked)):
                found = forecasts.look(asked, limit)
                card = OnCard(name=name, limit_bytes=limit, estimate=found)
            cards[name] = card

        self._asked, self._cards = _anywhere(question), cards
        return True

    def told(self, here: Question | None) -> dict[str, Any]:
        """Return the table as the page is told; `here`: what is on screen."""
        return {
            "isPast": self._asked is not None and _anywhere(here) != self._asked,
            "heads": list(TITLES.items()),
            "rows": [
                {
                    "name": card.name,
                    "cells": [card.name, *map(cell, _cells(card))],
                    "isHere": here is not None and card.name == here.device,
                }
                for card in self._cards.values()
            ],
        }


def _cells(card: OnCard) -> tuple[str | Verdict, ...]:
    """Return the cells after the name."""
    limit = NONE if card.limit_bytes is None else format_bytes(card.limit_bytes)
    if card.estimate is None:
        return limit, WAITING, NONE, NONE
    result = card.estimate.result
    if not card.estimate.is_ok:
        return limit, outcome_verdict(result), NONE, NONE

    fit = limit if card.limit_bytes is None else limit_verdict(result, card.limit_bytes)
    how = "" if card.estimate.exact else ", an estimate"
    peak = result.counted_peak
    size = NONE
    if peak is not None:
        size = f"{peak.in_words}{how}"
    return fit, size, _time(result), or_none(result.samples_per_second, format_rate)


def _time(result: StepResult) -> str:
    if result.step_seconds is None:
        return NONE
    return f"{format_seconds(result.step_seconds)}{plus_minus(result.time_width)}"


def _anywhere(question: Question | None) -> Question | None:
    """Return the question without its device."""
    return dataclasses.replace(question, device="") if question else None


# Keeps the table of cards up to date with the settings on screen, without delaying them.

REST_SECONDS = 0.3  # settings at rest for this long are looked up on all cards


class Elsewhere:
    """Fills the table of cards in a thread of its own, while it is open.

    Args:
        asked: reads what is on screen.
        forecasts: of the panel.
        panes: show the table.
        guarded: shows an exception of its block on the page, since a thread has no caller.
    """

    def __init__(
        self,
        asked: Asked,
        forecasts: Forecasts,
        panes: Panes,
        guarded: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._cards = CardsTable(compared_cards())
        self._asked, self._forecasts, self._panes = asked, forecasts, panes
        self._guarded = guarded
        self._closed = False
        self._fill = Latest(self._fill_cards)

    @property
    def questions(self) -> list[Question]:
        """What the worker has to predict for the table; nothing while it is folded."""
        question = self._asked.question
        return self._cards.questions(question) if question and self._is_open else []

    @property
    def _is_open(self) -> bool:
        return self._panes.is_open("cards")

    def refresh(self) -> None:
        """Show what is known about the settings on screen, soon."""
        if self._is_open:
            self._fill()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._fill.close()

    def _fill_cards(self, _: object) -> None:
        with self._guarded():
            self._fill_in()

    def _fill_in(self) -> None:
        question = self._asked.question
        self._panes.show(cards=self._cards.told(question))
        time.sleep(REST_SECONDS)  # a slider that moves must not share the processor

        def is_newest() -> bool:
            return not self._closed and self._asked.question == question

        if question is not None and is_newest():
            limits = {name: recorded.capacity(name) for name in self._cards.names}
            limits[question.device] = self._asked.limit
            if self._cards.fill(question, limits, self._forecasts, is_newest):
                self._panes.show(cards=self._cards.told(question))
