"""`rank_peaks`: the peak of each rank as a bar, stacked by category; ranks that hold the same once.

Left out: when each rank has its peak. The bars of two ranks may be of different instants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memlab._util.checks import checked
from memlab._util.collectives import named_ranks
from memlab._util.units import format_bytes
from memlab.figures.look import (
    CATEGORY_COLORS,
    POINTS,
    STACK,
    Canvas,
    Size,
    box_points,
    byte_axis,
    category_names,
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
from memlab.figures.timeline import draw_stack, mark_phases
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


# `rank_timelines`: the live bytes of a step in each rank, side by side on the same scale.
#
# Ranks that hold the same at their peak have one picture. All have the same height in
# bytes, and each its own operators from left to right: they run the same phases, though not
# at the same moment.

LEFT, TOP, NAMES = 34.0, 22.0, 26.0  # points: the scale, the title, the names of categories
ABOVE, BELOW, BETWEEN = 12.0, 22.0, 8.0  # points around each picture


def drawn_ranks(result: StepResult) -> list[RankBar]:
    """Return the ranks of a result of which a timeline is known, at most 8: the highest peaks."""
    known = [bar for bar in rank_bars(result) if bar.result.timeline is not None]
    highest = sorted(known, key=lambda bar: bar.peak_bytes, reverse=True)[:MOST_BARS]
    return [bar for bar in known if bar in highest]


@checked(size=inches)
def rank_timelines(result: StepResult, *, size: Size = (9.0, 4.2)) -> Figure:
    """Return the live bytes of one step in each rank, stacked by category, on one scale.

    Ranks that hold the same at their peak are one picture, with the timeline of one of them. Of
    more than 8 those with the highest peaks are drawn.

    Args:
        result: of a sharded step, measured or predicted.
        size: in inches.

    >>> import memlab
    >>> workload = memlab.workloads.get("plain-mlp")
    >>> config = memlab.StepConfig(batch_size=8, sharding="zero3", world_size=2)
    >>> memlab.plots.rank_timelines(memlab.predict(workload, config, "cpu")).get_size_inches()
    array([9. , 4.2])
    """
    ranks = drawn_ranks(result)
    if not ranks:
        is_alone = result.config.world_size == 1
        return placeholder(ALONE if is_alone else result.message, size=size)

    figure = new_figure(size)
    unit = _draw_all(figure, ranks)
    num_drawn, num_ranks = sum(len(bar.numbers) for bar in ranks), result.config.world_size
    left_out = f", {num_drawn} of {num_ranks} ranks" if 0 < num_drawn < num_ranks else ""
    write_title(figure, f"{unit} allocated in each rank over a step ({origin([result])}){left_out}")
    draw_names(Canvas(figure), ranks)
    return figure


def _draw_all(figure: Figure, ranks: Sequence[RankBar]) -> str:
    """Draw the picture of each rank in its place; return the unit of the scale."""
    width, height = figure.get_size_inches() * POINTS
    num_columns = 1 if len(ranks) < 3 else 2
    num_rows = -(-len(ranks) // num_columns)
    wide, high = (width - LEFT) / num_columns, (height - TOP - NAMES) / num_rows
    most = max(bar.peak_bytes for bar in ranks)
    unit = ""
    for number, bar in enumerate(ranks):
        row, column = divmod(number, num_columns)
        left, top = LEFT + column * wide, TOP + row * high
        below = height - top - high + BELOW
        margins = (left, below, width - left - wide + BETWEEN, top + ABOVE)
        axes = data_axes(figure, bar.label, margins=margins)
        axes.set(xlim=(0, 1), ylim=(0, max(most, 1)))
        unit = byte_axis(axes, "y", most)
        if column:
            axes.set_yticklabels([])
        timeline = bar.result.timeline
        assert timeline is not None
        draw_stack(axes, timeline, None)
        overlay = Canvas(figure)
        mark_phases(axes, overlay, timeline, with_micro_batches=False)
        start, bottom, room, tall = box_points(axes)
        text = f"{bar.label}: peak {format_bytes(bar.peak_bytes)}"
        write(overlay, start, bottom + tall + 6, shorten(text, room))
    return unit
