"""The setting on screen on every known card, side by side: a folded table, filled row by row.

It shows what the panel's forecasts know of each card; `page.py` fills it as settings change.
"""

import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from memlab._panel.questions import Estimate, Forecasts, Question
from memlab._panel.state import outcome_verdict
from memlab._panel.table import NONE, format_rate, limit_verdict, or_none
from memlab._util.units import format_bytes, format_seconds, plus_minus
from memlab.result import StepResult

SHOW = "show"
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
    """A button that opens the table, and the table: a row and a button for each card.

    Args:
        names: of the cards.
        choose: called with the name of the card whose button was pressed.
        opened: called after the table was opened.
    """

    def __init__(
        self, names: Sequence[str], choose: Callable[[str], None], opened: Callable[[], None]
    ) -> None:
        self.names = tuple(names)
        self._opened = opened
        self._asked: Question | None = None  # whose rows are known, for whatever card
        self._cards: dict[str, OnCard] = {}
        self.toggle = widgets.ToggleButton(description="cards")
        self.toggle.tooltip = "predict the setting on screen for other cards, side by side"
        self.toggle.observe(self._toggled, "value")
        self._html = widgets.HTML(cards_html([], ""), tabbable=True)  # so that keys can scroll it
        self._html.add_class("memlab-grid")
        corner = widgets.HTML("")
        corner.add_class("memlab-corner")
        buttons = widgets.VBox([corner, *(_button(name, choose) for name in self.names)])
        buttons.add_class("memlab-row-buttons")
        self._pane = widgets.HBox([self._html, buttons], layout={"display": "none"})
        self._pane.add_class("memlab-table-body")
        bar = widgets.HBox([self.toggle])
        bar.add_class("memlab-table-bar")
        self.box = widgets.VBox([bar, self._pane])
        self.box.add_class("memlab-cards")

    @property
    def is_open(self) -> bool:
        """Whether the rows are on screen."""
        return bool(self.toggle.value)

    def questions(self, question: Question) -> list[Question]:
        """Return the question on screen for each of the cards."""
        return [dataclasses.replace(question, device=name) for name in self.names]

    def mark_past(self, question: Question | None) -> None:
        """Grey the rows if they are of another question."""
        is_past = self._asked is not None and _anywhere(question) != self._asked
        (self._html.add_class if is_past else self._html.remove_class)("memlab-past")

    def fill(
        self,
        question: Question,
        limits: Mapping[str, int | None],
        forecasts: Forecasts,
        is_newest: Callable[[], bool],
    ) -> None:
        """Show what is known about a question on each card. One thread at a time.

        Args:
            question: on screen.
            limits: of each card, by name.
            forecasts: of the panel; a row of which they know nothing new is not looked up again.
            is_newest: whether the question is still on screen; if not, the rows stay as they are.
        """
        former = self._cards if self._asked == _anywhere(question) else {}
        cards = {}
        for asked in self.questions(question):
            if not is_newest():
                return
            name, limit = asked.device, limits[asked.device]
            card = former.get(name)
            if card is None or card.is_outdated(limit, forecasts.known(asked)):
                found = forecasts.look(asked, limit)
                card = OnCard(name=name, limit_bytes=limit, estimate=found)
            cards[name] = card

        self._asked, self._cards = _anywhere(question), cards
        self.mark_past(question)
        content = cards_html(list(cards.values()), question.device)
        if self._html.value != content:
            self._html.value = content

    def _toggled(self, change: Mapping[str, Any]) -> None:
        self._pane.layout.display = "" if change["new"] else "none"
        if change["new"]:
            self._opened()


def cards_html(cards: Sequence[OnCard], chosen: str) -> str:
    """Return the table of cards as HTML; every cell is escaped.

    Args:
        cards: one for each row.
        chosen: the name of the card on screen, whose row is marked.
    """
    head = "".join(
        f'<th scope="col" title="{html.escape(title)}">{name}</th>'
        for name, title in TITLES.items()
    )
    rows = "".join(_row(card, card.name == chosen) for card in cards)
    return (
        '<table class="memlab-on-cards" aria-label="the setting on screen on other cards, '
        f'predicted"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _row(card: OnCard, is_chosen: bool) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in (html.escape(card.name), *_cells(card)))
    kind = ' class="memlab-compared"' if is_chosen else ""
    return f"<tr{kind}>{cells}</tr>"


def _cells(card: OnCard) -> tuple[str, str, str, str]:
    """Return the cells after the name as HTML."""
    limit = NONE if card.limit_bytes is None else format_bytes(card.limit_bytes)
    if card.estimate is None:
        return limit, WAITING, NONE, NONE
    result = card.estimate.result
    if not card.estimate.is_ok:
        return limit, outcome_verdict(result).html(), NONE, NONE

    fit = limit if card.limit_bytes is None else limit_verdict(result, card.limit_bytes).html()
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


def _button(name: str, choose: Callable[[str], None]) -> Any:
    # the page's style shows the first word alone; a screen reader reads the card too
    made = widgets.Button(description=f"{SHOW} {name}", tooltip=f"show {name} in the panel")
    made.add_class("memlab-show")
    made.on_click(lambda _: choose(name))
    return widgets.HBox([made])
