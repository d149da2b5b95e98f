"""`step_times`: the median step time of each run as a bar, its repeats as dots and a whisker."""

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
from memlab.figures.runs import (
    NO_RUNS,
    RUN,
    is_unsteady,
    labelled,
    why_unsteady,
    without_numbers,
)
from memlab.result import Source, StepResult

MOST_BARS = 12  # more do not fit the height
MARK = "▲"  # as the panel marks a warning


@checked(size=inches)
def step_times(
    results: Sequence[StepResult], *, labels: Sequence[str], size: Size = (4.4, 2.6)
) -> Figure:
    """Return a bar of the median step time for each run, its repeats as dots.

    A whisker reaches from the fastest repeat to the slowest. A time that is not steady is marked,
    and words say why in place of the rate. A predicted bar is hollow. A run without a time gets its
    outcome in words. Of more than 12 runs the last 12 are shown.
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
    room = max(text_width(f"{_beside(result)}  ") for result, _ in shown)
    axes.set_xlim(0, slowest * 1.03 / (1 - room / box_points(axes)[2]))
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
    is_hollow = result.source is Source.PREDICTED
    axes.barh(row, result.step_seconds, height=0.62, alpha=1.0 if newest else 0.55,
              facecolor="none" if is_hollow else RUN, edgecolor=RUN,
              linewidth=1.4 if is_hollow else 0)  # fmt: skip
    repeats = result.step_seconds_all
    axes.plot(repeats, [row] * len(repeats), "o", color=INK, markersize=2.6, markeredgewidth=0)
    if len(repeats) > 1:
        axes.plot([min(repeats), max(repeats)], [row, row], "|-", color=INK, markersize=6,
                  linewidth=0.9, label="repeats")  # fmt: skip
    write(axes, max((*repeats, result.step_seconds)) + gap, row, _beside(result))


def _beside(result: StepResult) -> str:
    """Return what is written beside a bar: why its time is not steady, or else the rate."""
    if is_unsteady(result):
        return f"{MARK} {why_unsteady(result)}"
    rate = result.samples_per_second
    return "" if rate is None else f"{_three_digits(rate)} samples/s"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
