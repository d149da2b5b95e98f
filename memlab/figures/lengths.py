"""`lengths`: the peak of a batch against its longest sample, over the lengths of the samples.

Above is the peak, below how many samples have which length. Both axes across are the same, so the
part of the data set that makes batches beyond the limit lies below the part of the line that is
above it.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes, format_percent
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    LIMIT,
    POINTS,
    Canvas,
    Size,
    byte_axis,
    data_axes,
    inches,
    new_figure,
    origin,
    shorten,
    write,
    write_title,
)
from memlab.lengths.lengths_result import LengthsResult
from memlab.trace import Category

LINE, BARS = CATEGORY_COLORS[Category.PARAMETERS], CATEGORY_COLORS[Category.BUFFERS]
ABOVE_LINE = 0.015  # of the axis, between the line of the limit and its name
NUM_BARS = 40
LEFT, BELOW, BETWEEN, RIGHT, ABOVE = 40, 28, 22, 12, 20  # margins in points
SHARE_BELOW = 0.3  # of the height, for the lengths


@checked(size=inches)
def lengths(result: LengthsResult, *, size: Size = (4.4, 3.4)) -> Figure:
    """Return the peak of a step against its longest sample, and the lengths of the samples.

    A limit is a dashed line, if it is below twice the highest peak. Samples that make a batch too
    large for it are hatched.

    Args:
        result: what `predict_lengths` returned.
        size: in inches.
    """
    figure = new_figure(size)
    half = BELOW + SHARE_BELOW * (size[1] * POINTS - BELOW - ABOVE)
    upper = data_axes(figure, "peak", margins=(LEFT, half + BETWEEN, RIGHT, ABOVE))
    lower_top = size[1] * POINTS - half
    lower = data_axes(figure, "lengths", margins=(LEFT, BELOW, RIGHT, lower_top))
    unit = _draw_peaks(upper, result)
    _draw_lengths(lower, result)
    for axes in (upper, lower):
        axes.set_xlim(0, 1.03 * result.data.longest)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.grid(axis="x", color=GRID, linewidth=0.5, alpha=0.45)
    upper.set_xticklabels([])

    peak = result.worst.counted_peak
    assert peak is not None
    write_title(figure, f"peak {unit} {peak.kind} of a batch ({origin([result.worst])})")
    canvas = Canvas(figure)
    write(canvas, 6, half + 8, shorten(_below_words(result), size[0] * POINTS - 12))
    write(canvas, size[0] * POINTS - 8, 7, f"{result.unit} of the longest sample", ha="right")
    return figure


def _draw_peaks(axes: Axes, result: LengthsResult) -> str:
    """Draw the curve, its end and the limit; return the unit of the bytes."""
    highest, limit = int(result.curve_bytes.max()), result.memory_limit_bytes
    shown = limit if limit is not None and limit <= 2 * highest else None
    axes.set(ylim=(0, 1.15 * max(highest, shown or 0)), xlim=(0, 1.03 * result.data.longest))
    unit = byte_axis(axes, "y", axes.get_ylim()[1])
    axes.plot(result.curve_lengths, result.curve_bytes, color=LINE, linewidth=1.6, label="peak")
    axes.plot([result.data.longest], [result.curve_bytes[-1]], "o", color=LINE, label="worst batch")
    if shown is not None:
        axes.axhline(shown, color=LIMIT, linestyle=(0, (5, 3)), linewidth=1, label="limit")
        # at the right, where the curve is far above a limit that it crosses
        words, above = f"limit {format_bytes(shown)}", shown + ABOVE_LINE * axes.get_ylim()[1]
        write(axes, axes.get_xlim()[1], above, words, color=LIMIT, ha="right", va="bottom")
    return unit


def _draw_lengths(axes: Axes, result: LengthsResult) -> None:
    """Draw how many samples have which length; those that are too long are hatched."""
    data, fitting = result.data.lengths, result.longest_that_fits
    edges = np.linspace(0, result.data.longest, NUM_BARS + 1)
    is_over = data > (result.data.longest if fitting is None else fitting)
    fit, over = (np.histogram(data[which], bins=edges)[0] for which in (~is_over, is_over))
    style = {"align": "edge", "width": edges[1], "linewidth": 0}
    axes.bar(edges[:-1], fit, color=BARS, label="samples", **style)
    axes.bar(
        edges[:-1], over, bottom=fit, color="none", edgecolor=LIMIT, hatch="//////",
        label="too long", **style,
    )  # fmt: skip
    axes.set_ylim(0, 1.1 * int((fit + over).max()))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    axes.grid(axis="y", color=GRID, linewidth=0.5, alpha=0.45)


def _below_words(result: LengthsResult) -> str:
    """Return what the lower picture shows, and how likely a batch is that does not fit."""
    chance = result.chance_above_limit
    over = "" if not chance else f"; {format_percent(chance)} of random batches do not fit"
    return f"samples{over}"
