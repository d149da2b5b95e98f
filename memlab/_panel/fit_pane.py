"""The button *Fit for me*, its *Undo*, and the list of what it has found."""

import html
from collections.abc import Callable, Sequence

import ipywidgets as widgets

from memlab._panel.verdicts import SYMBOLS, WARN

MOST_FITTING, MOST_CLOSE = 5, 3
WHAT_IT_DOES = (
    "move the sliders to the fastest setting that fits the limit, by prediction: the batch size "
    "and what you chose stay, memory budget and accumulation are searched anew"
)


class FitPane:
    """Widgets alone; `fitting.py` says what they show.

    Args:
        pressed: called when *Fit for me* is pressed.
        undo: called when *Undo* is pressed.
        use: called with the number of a row, from 0, when its button is pressed.

    Attributes:
        button: *Fit for me*.
        undo: beside it; invisible while there is nothing to undo.
        box: the list, of fixed height.
    """

    def __init__(
        self,
        pressed: Callable[[], None],
        undo: Callable[[], None],
        use: Callable[[int], None],
    ) -> None:
        self.button = widgets.Button(description="Fit for me", tooltip=WHAT_IT_DOES)
        self.button.add_class("memlab-fit-button")
        self.button.on_click(lambda _: pressed())
        self.undo = widgets.Button(
            description="Undo", tooltip="bring back the settings as they were before Fit for me"
        )
        self.undo.add_class("memlab-fit-button")
        self.undo.on_click(lambda _: undo())
        self._head, self._past, self._rest = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._rows = [FitRow(at, use) for at in range(MOST_FITTING + MOST_CLOSE)]
        rows = [row.box for row in self._rows]
        self.box = widgets.VBox([self._head, self._past, *rows, self._rest])
        for name in ("memlab-answer", "memlab-fits"):
            self.box.add_class(name)
        self.show("Press Fit for me to search for the fastest setting that fits the limit.", "")
        self.offer_undo(False)

    def show_ready(self, ready: bool) -> None:
        """Allow *Fit for me*, or not."""
        self.button.disabled = not ready

    def offer_undo(self, possible: bool) -> None:
        """Show *Undo* while there is something to undo; its place stays."""
        self.undo.layout.visibility = "visible" if possible else "hidden"

    def show(
        self, answer: str, about: str, rows: Sequence[str] = (), notes: Sequence[str] = ()
    ) -> None:
        """Show an answer.

        Args:
            answer: in a sentence.
            about: what it is an answer to; "" for nothing.
            rows: a line for each setting, as HTML.
            notes: sentences on what was left alone.
        """
        self._head.value = f"<p><b>{html.escape(answer)}</b></p>" + (
            f"<p>{html.escape(about)}</p>" if about else ""
        )
        for at, row in enumerate(self._rows):
            row.show(rows[at] if at < len(rows) else "")
        items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        self._rest.value = f"<p>Left alone:</p><ul>{items}</ul>" if items else ""

    def show_past(self, is_past: bool) -> None:
        """Say that the answer belongs to other settings than those on screen, or not."""
        text = "<p class='memlab-line-warn'>{} {}</p>"
        said = "found for other settings than those on screen: press Fit for me again"
        self._past.value = text.format(SYMBOLS[WARN], said) if is_past else ""

    def mark(self, here: int | None, *, allowed: bool) -> None:
        """Mark the row that is on screen, if one is, and enable the buttons, or not."""
        for at, row in enumerate(self._rows):
            row.button.disabled = not allowed
            (row.box.add_class if at == here else row.box.remove_class)("memlab-fits-here")


class FitRow:
    """A setting and the button that goes there.

    Args:
        at: its number, from 0.
        use: called with that number when the button is pressed.
    """

    def __init__(self, at: int, use: Callable[[int], None]) -> None:
        self.text = widgets.HTML()
        self.button = widgets.Button(description=f"use {at + 1}", tooltip="move the sliders there")
        self.button.on_click(lambda _: use(at))
        self.box = widgets.HBox([self.button, self.text])
        self.box.add_class("memlab-fits-row")

    def show(self, text: str) -> None:
        """Show the setting, as HTML; nothing for ""."""
        self.text.value = text
        self.box.layout.display = "" if text else "none"


def row_html(settings: str, price: str, *, is_close: bool) -> str:
    """Return the line of a setting; one that is too close to say is marked."""
    mark = ""
    if is_close:
        mark = (
            f'<span class="memlab-verdict memlab-{WARN}"><span aria-hidden="true">{SYMBOLS[WARN]}'
            "</span> too close to say</span> "
        )
    return f"{mark}<b>{html.escape(settings)}</b>: {html.escape(price)}"
