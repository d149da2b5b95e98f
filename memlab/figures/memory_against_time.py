"""`memory_against_time`: one dot for each run, step time across and peak allocated up."""

from collections.abc import Collection, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.errors import ConfigError
from memlab.figures.look import (
    LIMIT,
    POINTS,
    Size,
    box_points,
    byte_axis,
    canvas,
    data_axes,
    inches,
    new_figure,
    origin,
    placeholder,
    second_axis,
    shorten,
    text_width,
    write,
    write_title,
)
from memlab.figures.runs import NO_RUNS, RUN, labelled
from memlab.result import StepResult


@checked(size=inches)
def memory_against_time(
    results: Sequence[StepResult],
    *,
    labels: Sequence[str],
    pinned: Collection[int] = (),
    size: Size = (4.4, 2.6),
) -> Figure:
    """Return one dot a run: step time across, peak allocated up; down and left is better.

    Args:
        results: those without a time or a peak are counted in words.
        labels: the name of each run.
        pinned: indices of the runs to name; the last run is always named and filled.
        size: in inches.
    """
    runs = labelled(results, labels)
    if max(pinned, default=0) >= max(len(runs), 1):
        raise ConfigError(f"pinned holds {max(pinned)}; allowed is the index of a result")
    dots = [
        (i, r.step_seconds, r.peak_allocated_bytes)
        for i, (r, _) in enumerate(runs)
        if r.step_seconds is not None and r.peak_allocated_bytes is not None
    ]
    if not dots:
        return placeholder(NO_RUNS if not runs else "No run with a time yet.", size=size)
    figure = new_figure(size)
    axes = data_axes(figure, "memory against time", margins=(34, 28, 10, 20))
    slowest, highest = max(d[1] for d in dots), max(d[2] for d in dots)
    limit = next((r.memory_limit_bytes for r in reversed(results) if r.memory_limit_bytes), None)
    shown_limit = limit if limit is not None and limit <= 2 * highest else None
    axes.set(xlim=(0, 1.12 * slowest), ylim=(0, 1.15 * max(highest, shown_limit or 0)))
    byte_unit, second_unit = byte_axis(axes, "y", axes.get_ylim()[1]), second_axis(axes, slowest)
    has_cache = any(r.counted_peak and r.counted_peak.kind == "reserved" for r in results)
    what = " of reserved bytes" if has_cache else ""
    _draw_dots(axes, dots, {i: labels[i] for i in (*pinned, len(runs) - 1)}, shown_limit, what)
    write_title(figure, f"peak {byte_unit} allocated ({origin(results)})")
    missing = f"; {len(runs) - len(dots)} without a time" if len(dots) < len(runs) else ""
    write(
        canvas(figure),
        size[0] * POINTS - 8,
        7,
        f"time per step, {second_unit}{missing}",
        ha="right",
    )
    return figure


def _draw_dots(
    axes: Axes,
    dots: Sequence[tuple[int, float, int]],
    names: dict[int, str],
    limit: int | None,
    what: str,
) -> None:
    """Draw the runs; a name goes where it covers least, the right side of its dot first."""
    _, _, width, height = box_points(axes)
    per_x, per_y = width / axes.get_xlim()[1], height / axes.get_ylim()[1]
    taken = [(x * per_x - 4, y * per_y, 8.0) for _, x, y in dots]
    if limit is not None:
        axes.axhline(limit, color=LIMIT, linestyle=(0, (5, 3)), linewidth=1, label="limit")
        write(axes, 0, limit, f" limit {format_bytes(limit)}{what}", color=LIMIT, va="bottom")
        taken.append((0.0, limit * per_y, width))
    newest = max(names)
    for i, x, y in sorted(dots, key=lambda dot: dot[0] in names):
        ring = i in names and i != newest
        axes.plot([x], [y], "D" if ring else "o", markersize=7 if i in names else 4.5, zorder=3,
                  markerfacecolor="none" if ring else RUN, markeredgecolor=RUN if ring else "none",
                  markeredgewidth=1.6, alpha=1.0 if i in names else 0.6,
                  label=f"run {i}")  # fmt: skip
        if i not in names:
            continue
        text = shorten(names[i], 0.45 * width)
        wide = text_width(text)
        spots = [(8.0, 0.0), (-8.0 - wide, 0.0), (-wide / 2, 11.0), (-wide / 2, -11.0)]
        px, py = x * per_x, y * per_y
        dx, dy = min(
            spots, key=lambda spot: _crowding(px + spot[0], py + spot[1], wide, taken, width)
        )
        taken.append((px + dx, py + dy, wide))
        write(axes, (px + dx) / per_x, (py + dy) / per_y, text)


def _crowding(
    x: float, y: float, wide: float, taken: Sequence[tuple[float, float, float]], room: float
) -> int:
    """Return how many names a name here would cover, and ten more if it leaves the axes."""
    covered = sum(
        abs(y - other_y) < 11 and x < other_x + other_wide and other_x < x + wide
        for other_x, other_y, other_wide in taken
    )
    return covered + 10 * (x < 0 or x + wide > room + 8)
