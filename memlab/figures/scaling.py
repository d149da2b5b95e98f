"""`scaling`: what more ranks change, one line for each way to share: the peak of a rank, the speed.

The number of ranks goes across, doubling from tick to tick. Above is the peak of the worst rank,
below the samples per second, with a faint line for the speed that as many ranks would reach if
each were as fast as with the fewest. Where no result has a time there is only the peak.
"""

import math
from collections.abc import Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.config import Sharding
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    POINTS,
    Canvas,
    Size,
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
from memlab.figures.runs import NO_RUNS
from memlab.result import StepResult
from memlab.trace import Category

COLORS = [CATEGORY_COLORS[category] for category in (
    Category.PARAMETERS, Category.ACTIVATIONS, Category.GRADIENTS, Category.OPTIMIZER_STATE,
    Category.BUFFERS,
)]  # fmt: skip
MARKERS = "osD^v"
MOST_TICKS = 7
LEFT, BELOW, BETWEEN, ABOVE = 46, 28, 24, 20  # margins in points


@checked(size=inches)
def scaling(results: Sequence[StepResult], *, size: Size = (4.4, 3.4)) -> Figure:
    """Return the peak of the worst rank and the samples per second against the number of ranks.

    Results of one strategy are joined by a line that has its name. Those without a peak are left
    out. Peaks are of allocated bytes.

    Args:
        results: of one workload with several `world_size`, predicted or measured.
        size: in inches.
    """
    lines = _lines(results)
    if not lines:
        return placeholder(NO_RUNS, size=size)

    figure = new_figure(size)
    is_timed = any(result.samples_per_second for line in lines.values() for result in line)
    height, right = size[1] * POINTS, max(map(text_width, lines)) + 12
    half = (height - BELOW - BETWEEN - ABOVE) / 2 + BETWEEN + BELOW if is_timed else BELOW
    upper = data_axes(figure, "peak", margins=(LEFT, half, right, ABOVE))
    shown = [result for line in lines.values() for result in line]
    highest = max(_peak(result) for result in shown)
    upper.set(ylim=(0, 1.12 * highest))
    _number_ranks(upper, shown)
    unit = byte_axis(upper, "y", 1.12 * highest)
    _draw(upper, lines, are_rates=False)
    if is_timed:
        lower = data_axes(figure, "speed", margins=(LEFT, BELOW, right, height - half + BETWEEN))
        upper.set_xticklabels([])
        _number_rates(lower, [r.samples_per_second for r in shown if r.samples_per_second])
        _number_ranks(lower, shown)
        _draw_ideal(lower, lines)
        _draw(lower, lines, are_rates=True)
        said = shorten("samples per second, each line ten times the last", size[0] * POINTS - 10)
        write(Canvas(figure), 6, half - 14, said)

    write_title(figure, f"peak {unit} allocated, worst rank ({origin(shown)})")
    write(Canvas(figure), size[0] * POINTS - 8, 7, "ranks", ha="right")
    return figure


def _lines(results: Sequence[StepResult]) -> dict[str, list[StepResult]]:
    """Return the results with a peak by strategy, in the order of their ranks."""
    lines: dict[str, list[StepResult]] = {}
    for result in sorted(results, key=lambda result: result.config.world_size):
        if result.peak_allocated_bytes is not None:
            lines.setdefault(_name(result), []).append(result)
    return lines


def _name(result: StepResult) -> str:
    config = result.config
    if config.sharding is Sharding.NONE:
        return "one process"
    name = str(config.sharding)
    if config.shard_group_size:
        name += f", groups of {config.shard_group_size}"
    if config.tensor_parallel_size > 1:
        name += f", tensor {config.tensor_parallel_size}"
    if config.offload_parameters:
        name += ", offloaded"
    return name


def _number_ranks(axes: Axes, shown: Sequence[StepResult]) -> None:
    """Set ticks at numbers of ranks, as many as fit."""
    sizes = sorted({result.config.world_size for result in shown})
    places = [math.log2(size) for size in sizes]
    axes.set_xlim(min(places) - 0.3, max(places) + 0.3)
    step = -(-len(sizes) // MOST_TICKS)
    name_ticks(axes, "x", places[::-step], [f"{size:,}" for size in sizes[::-step]])


def _number_rates(axes: Axes, rates: Sequence[float]) -> None:
    """Set ticks at powers of ten: with ranks that double, a steady speed-up is a straight line."""
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(1.2 * max(rates)))
    axes.set(ylim=(low, high))
    places = list(range(low, high + 1))
    name_ticks(axes, "y", places, [f"{10.0**place:g}" for place in places])
    axes.grid(axis="y", color=GRID, linewidth=0.5, alpha=0.45)


def _draw(axes: Axes, lines: dict[str, list[StepResult]], *, are_rates: bool) -> None:
    ends = []
    for (name, line), color, marker in zip(
        lines.items(), cycle(COLORS), cycle(MARKERS), strict=False
    ):
        values = [_rate(r) if are_rates else _peak(r) for r in line]
        known = [
            (math.log2(r.config.world_size), value)
            for r, value in zip(line, values, strict=True)
            if value is not None
        ]
        if not known:
            continue
        x, y = zip(*known, strict=True)
        axes.plot(x, y, color=color, marker=marker, markersize=4, linewidth=1.2, label=name)
        ends.append((y[-1], x[-1], name, color))
    _name_ends(axes, sorted(ends))


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the names of lines beside their ends, none across another or above the axes."""
    bottom, top = axes.get_ylim()
    figure = axes.get_figure(root=True)
    assert figure is not None
    points = axes.get_position().height * figure.get_size_inches()[1] * POINTS
    line = 11 * (top - bottom) / points
    places, last = list[float](), bottom - line
    for y, *_ in ends:
        last = max(y, last + line)
        places.append(last)

    ceiling = top - line / 2  # above it is the title
    for number in reversed(range(len(places))):
        places[number] = min(places[number], ceiling)
        ceiling = places[number] - line

    right = axes.get_xlim()[1]
    for place, (_, _, name, color) in zip(places, ends, strict=True):
        write(axes, right, place, f" {name}", color=color, clip_on=False)


def _draw_ideal(axes: Axes, lines: dict[str, list[StepResult]]) -> None:
    """Draw the speed of ranks that are all as fast as the fewest are."""
    for line in lines.values():
        timed = [result for result in line if result.samples_per_second]
        if len(timed) < 2:
            continue
        first, last = timed[0], timed[-1]
        start = _rate(first) or 0.0
        growth = math.log10(last.config.world_size / first.config.world_size)
        axes.plot(
            [math.log2(each.config.world_size) for each in (first, last)],
            [start, start + growth],
            color=GRID, linewidth=0.8, linestyle=(0, (4, 3)), label="as fast as the fewest",
        )  # fmt: skip


def _rate(result: StepResult) -> float | None:
    """Return the logarithm of the samples per second."""
    return math.log10(result.samples_per_second) if result.samples_per_second else None


def _peak(result: StepResult) -> int:
    return result.peak_allocated_bytes or 0
