"""`RankPane`: what each rank holds, at its peak or over a step, while a person has opened it."""

import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from memlab import plots
from memlab._panel.texts import NOT_DRAWN, error_text
from memlab.arguments.tables import columns_table
from memlab.arguments.units import format_bytes
from memlab.figures.rank_peaks import ALONE, RankBar, rank_bars
from memlab.figures.rank_timelines import drawn_ranks
from memlab.result import StepResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (6.0, 2.8)  # inches
HEADS = ("together", "ranks", "calls a step", "sent by a rank")
AT_PEAK, OVER_STEP = "the peak of each rank", "all ranks over the step"


class RankPane:
    """A picture of the ranks, and a table of what they send one another.

    Attributes:
        box: of all of it; a button shows and hides it.
        choice: of what is drawn: the peaks, all ranks over the step, or one of them.
    """

    def __init__(self) -> None:
        self._picture, self._sent = widgets.HTML(_framed(f"<p>{ALONE}</p>")), widgets.HTML()
        self._picture.add_class("memlab-picture")
        self._sent.add_class("memlab-sent")
        self.choice = widgets.Dropdown(options=[AT_PEAK, OVER_STEP], description="Show")
        self.choice.tooltip = "the peaks beside each other, or how the memory goes in each rank"
        self.box = widgets.Box([widgets.VBox([self.choice, self._picture]), self._sent])
        for name in ("memlab-details", "memlab-ranks"):
            self.box.add_class(name)
        self._drawn: tuple[StepResult | None, str] | None = None
        self._is_offering = False

    def on_choice(self, changed: Callable[[], None]) -> None:
        """Call a function whenever a person chooses what is drawn."""

        def tell(_: Any) -> None:
            if not self._is_offering:
                changed()

        self.choice.observe(tell, "value")

    def draw(self, result: StepResult | None) -> None:
        """Draw the ranks of a result, if that is on screen and not drawn yet; None for nothing."""
        if self.box.layout.display == "none" or self._drawn == (result, self.choice.value):
            return
        ranks = [] if result is None else drawn_ranks(result)
        self._offer([AT_PEAK, OVER_STEP, *(bar.label for bar in ranks)])
        self._drawn = result, self.choice.value
        if result is None:
            self._picture.value, self._sent.value = _framed(f"<p>{ALONE}</p>"), ""
            return
        self._sent.value = sent_html(result)
        try:
            figure, label = _picture_of(result, self.choice.value, ranks)
            self._picture.value = _framed(plots.to_svg(figure, label=label))
        except Exception as error:
            said = html.escape(f"{NOT_DRAWN}: {error_text(error)}")
            self._picture.value = _framed(f"<p>{said}</p>")
            raise

    def _offer(self, options: list[str]) -> None:
        """Offer other ranks; one that is chosen and there is no more gives way to the peaks."""
        if list(self.choice.options) == options:
            return
        chosen = self.choice.value
        self._is_offering = True
        try:
            self.choice.options = options
            self.choice.value = chosen if chosen in options else AT_PEAK
        finally:
            self._is_offering = False


def _picture_of(result: StepResult, choice: str, ranks: Sequence[RankBar]) -> tuple["Figure", str]:
    """Return what a person has chosen to see, and what a screen reader says of it."""
    if choice == AT_PEAK:
        said = "; ".join(map(str, rank_bars(result)))
        label = f"peak of each rank by category: {said}" if said else ALONE
        return plots.rank_peaks(result, size=SIZE), label

    if choice == OVER_STEP:
        said = "; ".join(f"{bar.label} up to {format_bytes(bar.peak_bytes)}" for bar in ranks)
        label = f"memory through one step in each rank: {said}" if said else ALONE
        return plots.rank_timelines(result, size=SIZE), label

    chosen = next(bar for bar in ranks if bar.label == choice)
    label = f"memory through one step in {chosen}"
    return plots.timeline(chosen.result, size=SIZE), label


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
