"""`step_times`: the median step time of each run as a bar, its repeats as dots."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.figures.look import (
    GRID,
    INK,
    LIMIT,
    POINTS,
    Size,
    box_points,
    data_axes,
    inches,
    name_ticks,
    new_figure,
    origin,
    placeholder,
    second_axis,
    shorten,
    text_width,
    write,
    write_title,
)
from memlab.figures.runs import NO_RUNS, RUN, labelled, without_numbers
from memlab.result import StepResult

MOST_BARS = 12  # more do not fit the height


@checked(size=inches)
def step_times(
    results: Sequence[StepResult], *, labels: Sequence[str], size: Size = (4.4, 2.6)
) -> Figure:
    """Return a bar of the median step time for each run, its repeats as dots.

    A run without a time gets its outcome in words. Of more than 12 runs the last 12 are shown.
    """
    runs = labelled(results, labels)
    if not runs:
        return placeholder(NO_RUNS, size=size)
    shown = runs[-MOST_BARS:]
    figure = new_figure(size)
    names = [shorten(label, 0.3 * size[0] * POINTS) for _, label in shown]
    left = max(text_width(name) for name in names) + 10
    axes = data_axes(figure, "step times", margins=(left, 16, 6, 20))
    axes.grid(axis="x", color=GRID, linewidth=0.5, alpha=0.45)
    name_ticks(axes, "y", range(len(shown)), names)
    axes.set_ylim(max(len(shown), 4) - 0.5, -0.5)
    times = [t for r, _ in shown if r.step_seconds for t in (*r.step_seconds_all, r.step_seconds)]
    slowest = max(times, default=1.0)
    fastest = max((r.samples_per_second or 0.0 for r, _ in shown), default=0.0)
    rate_width = text_width(f"{_three_digits(fastest)} samples/s  ")
    axes.set_xlim(0, slowest * 1.03 / (1 - rate_width / box_points(axes)[2]))
    unit = second_axis(axes, slowest)
    for row, (result, _) in enumerate(shown):
        _draw_step_time(axes, row, result, newest=row == len(shown) - 1)
    count = "" if shown == runs else f", last {MOST_BARS} of {len(runs)}"
    title = f"median step time, {unit} ({origin([r for r, _ in shown])}){count}"
    write_title(figure, title)
    return figure


def _draw_step_time(axes: Axes, row: int, result: StepResult, *, newest: bool) -> None:
    gap = axes.get_xlim()[1] * 0.025
    if result.step_seconds is None:
        write(axes, gap, row, without_numbers(result), style="italic", color=LIMIT)
        return
    axes.barh(row, result.step_seconds, height=0.62, color=RUN, alpha=1.0 if newest else 0.55)
    repeats = result.step_seconds_all
    axes.plot(repeats, [row] * len(repeats), "o", color=INK, markersize=2.6, markeredgewidth=0)
    if result.samples_per_second is not None:
        rate = f"{_three_digits(result.samples_per_second)} samples/s"
        write(axes, max((*repeats, result.step_seconds)) + gap, row, rate)


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
