"""`BasePane`: what a quantized base saves and costs, cause by cause, with what would change it."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from memlab._panel.fit_pane import FitRow
from memlab._panel.verdicts import SYMBOLS, WARN

COMPARE = "Compare"
WHAT_IT_DOES = (
    "predict this step with a base in bf16 too, and say what the quantized base saves and costs at "
    "the peak, why it may not help, and what would change that"
)
PAST = f"this is of other settings than those on screen: press {COMPARE} again"


class BasePane:
    """Widgets alone; `base_effect.py` says what they show.

    Args:
        ask: called when the pane is opened, and when *Compare* is pressed.
        use: called with the number of a row, from 0, when its button is pressed.

    Attributes:
        toggle: opens and closes the pane; it is there while the base on screen is quantized.
        box: of fixed height.
    """

    def __init__(self, ask: Callable[[], None], use: Callable[[int], None]) -> None:
        self._ask, self._use = ask, use
        self._base: str | None = None
        self.toggle = widgets.ToggleButton(tooltip=WHAT_IT_DOES, layout={"display": "none"})
        self.toggle.observe(self._toggled, "value")
        self._head, self._past, self._parts = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._parts.add_class("memlab-causes")
        self._compare = widgets.Button(description=COMPARE, tooltip=WHAT_IT_DOES)
        self._compare.on_click(lambda _: ask())
        again = widgets.HBox([self._compare, self._past])
        again.add_class("memlab-base-again")
        self._rows: list[FitRow] = []
        self._above = (self._head, again, self._parts)
        self.box = widgets.VBox(self._above, layout={"display": "none"})
        for name in ("memlab-answer", "memlab-base"):
            self.box.add_class(name)
        self.show("Not compared yet.", "")

    def offer(self, base: str | None) -> None:
        """Offer the comparison of a quantized base; None if that on screen is not quantized.

        A pane that is open stays, and can be closed.
        """
        self._base = base
        if base is not None:
            self.toggle.description = f"what {base} saves"
        is_there = base is not None or self.toggle.value
        self.toggle.layout.display = "" if is_there else "none"

    def show(self, answer: str, about: str, parts: str = "", rows: Sequence[str] = ()) -> None:
        """Show an answer.

        Args:
            answer: in a sentence.
            about: what it is an answer to; "" for nothing.
            parts: the causes as HTML.
            rows: a line for each change that may help, as HTML.
        """
        self._head.value = f"<p><b>{html.escape(answer)}</b></p>" + (
            f"<p>{html.escape(about)}</p>" if about else ""
        )
        self._parts.value = parts
        while len(self._rows) < len(rows):
            self._rows.append(FitRow(len(self._rows), self._use))
            self.box.children = (*self._above, *(row.box for row in self._rows))
        for at, row in enumerate(self._rows):
            row.show(rows[at] if at < len(rows) else "")

    def mark(self, *, can_ask: bool, is_past: bool, usable: Sequence[bool]) -> None:
        """Grey what is of other settings than those on screen, and enable what can be pressed.

        Args:
            can_ask: whether there is something new to compare.
            is_past: whether the answer is of other settings.
            usable: for each row, whether it leads somewhere.
        """
        self._compare.disabled = not can_ask
        self._past.value = (
            f"<p class='memlab-line-warn'>{SYMBOLS[WARN]} {PAST}</p>" if is_past else ""
        )
        for part in (self._head, self._parts, *(row.text for row in self._rows)):
            (part.add_class if is_past else part.remove_class)("memlab-past")
        for row, leads in zip(self._rows, usable, strict=False):
            row.button.disabled = is_past or not leads

    def _toggled(self, change: Mapping[str, Any]) -> None:
        self.box.layout.display = "" if change["new"] else "none"
        if change["new"]:
            self._ask()
        else:
            self.offer(self._base)
