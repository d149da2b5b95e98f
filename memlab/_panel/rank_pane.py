"""`RankPane`: what each rank holds at its peak, drawn while a person has opened it."""

import html
from typing import Any

import ipywidgets as widgets

from memlab import plots
from memlab.arguments.html_tables import columns_table
from memlab.arguments.units import format_bytes
from memlab.figures.rank_peaks import ALONE, rank_bars
from memlab.result import StepResult

SIZE = (6.0, 2.8)  # inches
HEADS = ("together", "ranks", "calls a step", "sent by a rank")


class RankPane:
    """A picture of the ranks, and a table of what they send one another.

    Attributes:
        box: of both; a button shows and hides it.
    """

    def __init__(self) -> None:
        self._picture, self._sent = widgets.HTML(_framed(f"<p>{ALONE}</p>")), widgets.HTML()
        self._picture.add_class("memlab-picture")
        self._sent.add_class("memlab-sent")
        self.box = widgets.Box([self._picture, self._sent])
        for name in ("memlab-details", "memlab-ranks"):
            self.box.add_class(name)
        self._drawn: StepResult | None = None

    def draw(self, result: StepResult | None) -> None:
        """Draw the ranks of a result, if that is on screen and not drawn yet; None for nothing."""
        if self.box.layout.display == "none" or result is self._drawn:
            return
        self._drawn = result
        if result is None:
            self._picture.value, self._sent.value = _framed(f"<p>{ALONE}</p>"), ""
            return
        said = "; ".join(map(str, rank_bars(result)))
        label = f"peak of each rank by category: {said}" if said else ALONE
        self._picture.value = _framed(
            plots.to_svg(plots.rank_peaks(result, size=SIZE), label=label)
        )
        self._sent.value = sent_html(result)


def sent_html(result: StepResult) -> str:
    """Return what a rank sends in a step, by collective, as HTML; "" if nothing is known."""
    rows: list[tuple[Any, ...]] = [
        (each.collective, each.num_ranks, each.num_calls, format_bytes(each.sent_bytes))
        for each in result.communication
    ]
    if not rows:
        return ""
    total = format_bytes(sum(each.sent_bytes for each in result.communication))
    caption = f"A rank sends {total} a step, {result.source}, if all goes round a ring."
    return f"<p>{html.escape(caption)}</p>{columns_table(HEADS, rows)}"


def _framed(content: str) -> str:
    shape = f"aspect-ratio: {SIZE[0]} / {SIZE[1]}"
    return f'<div class="memlab-figure" style="{shape}">{content}</div>'
