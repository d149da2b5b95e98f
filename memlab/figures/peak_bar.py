"""`peak_bar`: the peak of one run as a bar, stacked by category, against the limit."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.figures.category_names import category_names
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    INK,
    LIMIT,
    POINTS,
    STACK,
    Canvas,
    Size,
    box_points,
    data_axes,
    inches,
    new_figure,
    origin,
    placeholder,
    text_width,
    write,
)
from memlab.figures.peak_map import text_on
from memlab.result import StepResult


@checked(size=inches)
def peak_bar(
    result: StepResult, *, limit_bytes: int | None = None, size: Size = (9.0, 0.9)
) -> Figure:
    """Return the peak as one bar, stacked by category, against the limit.

    What lies beyond the limit is hatched; what is free below it is pale. On CUDA reserved bytes
    count against the limit, and what of them is not allocated follows in grey.
    """
    peak, parts = result.peak_allocated_bytes, result.peak_by_category
    counted = result.counted_peak
    if peak is None or parts is None or counted is None:
        return placeholder(result.message, size=size)
    figure = new_figure(size)
    axes = data_axes(figure, "peak", margins=(6, 16, 6, 18))
    held = counted.nbytes
    axes.set(xlim=(0, max(held, limit_bytes or 0, 1)), ylim=(0, 1), yticks=[], xticks=[])
    axes.spines["bottom"].set_visible(False)
    points_per_byte = box_points(axes)[2] / axes.get_xlim()[1]
    start, unnamed, names = 0, {}, category_names(result)
    for category in STACK:
        num_bytes = parts.get(category, 0)
        if not num_bytes:
            continue
        color, name = CATEGORY_COLORS[category], names[category]
        axes.barh(0.5, num_bytes, left=start, height=1, color=color, label=name)
        texts = (f"{name} {format_bytes(num_bytes)}", name)
        room = num_bytes * points_per_byte - 4
        text = next((text for text in texts if text_width(text) < room), None)
        if text:
            write(axes, start + num_bytes / 2, 0.48, text, ha="center", color=text_on(color))
        else:
            unnamed[num_bytes, color] = f"{name} {format_bytes(num_bytes)}"
        start += num_bytes
    if held > peak:
        axes.barh(0.5, held - peak, left=peak, height=1, color=GRID, label="reserved alone")
        unnamed[held - peak, GRID] = f"reserved, not allocated {format_bytes(held - peak)}"
    overlay, width, top = Canvas(figure), size[0] * POINTS, size[1] * POINTS - 8
    reserved = f", {format_bytes(held)} reserved" if counted.kind == "reserved" else ""
    text = f"peak {format_bytes(peak)} allocated{reserved} ({origin([result])})"
    write(overlay, 6, top, text)
    if limit_bytes:
        fits = result.against_limit(limit_bytes).fits is True
        _draw_limit_on_bar(axes, overlay, held, limit_bytes, width - text_width(text), fits=fits)
    _draw_unnamed(overlay, [(c, unnamed[n, c]) for n, c in sorted(unnamed, reverse=True)])
    return figure


def _draw_limit_on_bar(
    axes: Axes, overlay: Canvas, peak: int, limit: int, room: float, *, fits: bool
) -> None:
    over = peak > limit
    style: dict[str, Any] = {"label": "free", "facecolor": INK, "alpha": 0.14}
    if over:
        style = {
            "label": "over the limit",
            "facecolor": "none",
            "edgecolor": INK if fits else LIMIT,
            "hatch": "////",
        }
    axes.barh(0.5, abs(limit - peak), left=min(peak, limit), height=1, linewidth=0, **style)
    axes.axvline(limit, color=LIMIT, linestyle=(0, (4, 2)), linewidth=1.6, label="limit",
                 clip_on=False)  # fmt: skip
    left = f"{format_bytes(abs(limit - peak))} {'over' if over else 'free'}"
    texts = (f"{left}{'' if over else ' below'} the limit of {format_bytes(limit)}", left, "")
    if over and fits:
        texts = (f"fits the limit of {format_bytes(limit)} with less cache", "fits with less cache",
                 "")  # fmt: skip
    text = next(text for text in texts if text_width(text) < room or not text)
    width, height = overlay.width, overlay.height
    color = LIMIT if over and not fits else INK
    write(overlay, width - 6, height - 8, text, ha="right", color=color)


def _draw_unnamed(overlay: Canvas, parts: Sequence[tuple[str, str]]) -> None:
    """Name under the bar what was too narrow to be named in it, the largest first, as fits."""
    x = 6.0
    for color, text in parts:
        if x + 14 + text_width(text) > overlay.width:
            break
        overlay.add_artist(Rectangle((x, 4), 8, 8, facecolor=color, linewidth=0))
        write(overlay, x + 12, 7.5, text)
        x += 24 + text_width(text)
