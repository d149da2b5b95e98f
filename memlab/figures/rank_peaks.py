"""`rank_peaks`: the peak of each rank as a bar, stacked by category; ranks that hold the same once.

Left out: when each rank has its peak. The bars of two ranks may be of different instants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memlab.arguments.checks import checked
from memlab.arguments.collectives import named_ranks
from memlab.arguments.units import format_bytes
from memlab.figures.category_names import category_names
from memlab.figures.look import (
    CATEGORY_COLORS,
    POINTS,
    STACK,
    Canvas,
    Size,
    box_points,
    byte_axis,
    data_axes,
    inches,
    name_ticks,
    new_figure,
    origin,
    placeholder,
    shorten,
    text_width,
    write,
    write_title,
)
from memlab.result import StepResult

MOST_BARS = 8  # more do not fit the height
LEAST_ROWS = 3  # of room
ALONE = "One device trains by itself; with sharding each rank has a bar here."


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBar:
    """Ranks that hold the same at their peak.

    Attributes:
        numbers: of the ranks; empty for a prediction of the heaviest rank alone.
        result: of one of them.
    """

    numbers: tuple[int, ...]
    result: StepResult

    @property
    def label(self) -> str:
        """The ranks in words: "rank 0", "ranks 1-3, 6"."""
        if not self.numbers:
            return "heaviest rank"
        return f"rank{'s' * (len(self.numbers) > 1)} {named_ranks(self.numbers)}"

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one of these ranks holds."""
        return sum((self.result.peak_by_category or {}).values())

    def __str__(self) -> str:
        """Return the ranks, their peak and its categories, as a screen reader says them."""
        names, parts = category_names(self.result), self.result.peak_by_category or {}
        held = [f"{names[c]} {format_bytes(parts[c])}" for c in STACK if parts.get(c)]
        return f"{self.label}: {format_bytes(sum(parts.values()))}, {', '.join(held)}"


def rank_bars(result: StepResult) -> list[RankBar]:
    """Return the ranks of a result of which a peak is known; none without sharding."""
    if result.config.world_size == 1:
        return []
    found: dict[tuple[tuple[str, int], ...], RankBar] = {}
    for rank in result.ranks or (result,):
        parts = rank.peak_by_category
        if parts is not None:
            held = tuple(sorted(parts.items()))
            before = found[held].numbers if held in found else ()
            found[held] = RankBar(numbers=(*before, *rank.rank_numbers), result=rank)
    return sorted(found.values(), key=lambda bar: bar.numbers[:1])


@checked(size=inches)
def rank_peaks(result: StepResult, *, size: Size = (6.0, 2.8)) -> Figure:
    """Return the peak of each rank as a bar, bytes in live tensors, stacked by category.

    Ranks that hold the same are one bar. Of more than 8 bars those with the highest peaks are
    drawn.
    """
    bars = rank_bars(result)
    if not bars:
        is_alone = result.config.world_size == 1
        return placeholder(ALONE if is_alone else result.message, size=size)

    highest = sorted(bars, key=lambda bar: bar.peak_bytes, reverse=True)[:MOST_BARS]
    shown = [bar for bar in bars if bar in highest]
    figure = new_figure(size)
    names = [shorten(bar.label, 0.3 * size[0] * POINTS) for bar in shown]
    left = max(map(text_width, names)) + 10
    axes = data_axes(figure, "rank peaks", margins=(left, 46, 6, 20))
    name_ticks(axes, "y", range(len(shown)), names)
    around = max(LEAST_ROWS - len(shown), 0) / 2  # few bars are in the middle, and not thicker
    axes.set_ylim(len(shown) - 0.5 + around, -0.5 - around)
    room = max(text_width(f" {format_bytes(bar.peak_bytes)} ") for bar in shown)
    most = max(highest[0].peak_bytes, 1)
    axes.set_xlim(0, most / max(1 - room / box_points(axes)[2], 0.2))
    unit = byte_axis(axes, "x", most)
    for row, bar in enumerate(shown):
        _draw(axes, row, bar)
    left_out = f", the {MOST_BARS} highest of {len(bars)}" if len(bars) > MOST_BARS else ""
    title = f"peak allocated of each rank, {unit} ({origin([result])}){left_out}"
    write_title(figure, title)
    draw_names(Canvas(figure), shown)
    return figure


def _draw(axes: Axes, row: int, bar: RankBar) -> None:
    """Draw a bar, longest-lived categories first, and its sum beside it."""
    start, parts = 0, bar.result.peak_by_category or {}
    for category in STACK:
        num_bytes = parts.get(category, 0)
        axes.barh(row, num_bytes, left=start, height=0.66, color=CATEGORY_COLORS[category])
        start += num_bytes
    gap = axes.get_xlim()[1] * 0.01
    write(axes, start + gap, row, format_bytes(start))


def draw_names(overlay: Canvas, bars: Sequence[RankBar]) -> None:
    """Name the categories of the bars in their order, in two lines at most."""
    x, y, names = 6.0, 18.0, category_names(bars[0].result)
    for category in STACK:
        if not any((bar.result.peak_by_category or {}).get(category) for bar in bars):
            continue
        text = names[category]
        if x + 14 + text_width(text) > overlay.width:
            x, y = 6.0, 4.0
        overlay.add_artist(
            Rectangle((x, y), 8, 8, facecolor=CATEGORY_COLORS[category], linewidth=0)
        )
        write(overlay, x + 12, y + 3.5, text)
        x += 20 + text_width(text)
