"""`rank_timelines`: the live bytes of a step in each rank, side by side on the same scale.

Ranks that hold the same at their peak have one picture. All have the same height in bytes, and each
its own operators from left to right: they run the same phases, though not at the same moment.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.figures.look import (
    POINTS,
    Canvas,
    Size,
    box_points,
    byte_axis,
    data_axes,
    inches,
    new_figure,
    origin,
    placeholder,
    shorten,
    write,
    write_title,
)
from memlab.figures.rank_peaks import ALONE, MOST_BARS, RankBar, draw_names, rank_bars
from memlab.figures.timeline import draw_stack, mark_phases
from memlab.result import StepResult

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
