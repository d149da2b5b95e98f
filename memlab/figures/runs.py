"""Pictures of several runs, and the words for missing and unsteady numbers.

Public as `plots.memory_against_time`, `step_times`, `heat_map`, `scaling` and `varying_fields`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import cycle, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memlab._util.checks import checked, choice
from memlab._util.units import format_bytes
from memlab.config import Precision, Sharding, StepConfig
from memlab.devices.here import QUIET_SHARE
from memlab.devices.operators import STEADY
from memlab.errors import ConfigError, UnsupportedError
from memlab.figures.look import (
    CATEGORY_COLORS,
    FONT,
    FONT_SIZE,
    GRID,
    GRID_LINES,
    INK,
    LIMIT,
    LIMIT_LINE,
    POINTS,
    Picture,
    Size,
    box_points,
    byte_axis,
    data_axes,
    inches,
    name_ticks,
    near,
    origin,
    placeholder,
    room_of,
    row_axes,
    second_axis,
    shorten,
    text_width,
    write,
)
from memlab.result import Outcome, Source, StepResult
from memlab.trace import Category

RUN = CATEGORY_COLORS[Category.PARAMETERS]  # the colour of a run
NO_RUNS = "No run yet."
FEWEST_REPEATS = 3  # of which a median says anything


def labelled(results: Sequence[StepResult], labels: Sequence[str]) -> list[tuple[StepResult, str]]:
    """Return each result with its label.

    Raises:
        ConfigError: there are not as many labels as results.
    """
    if len(results) != len(labels):
        raise ConfigError(
            f"labels holds {len(labels)} texts for {len(results)} results; allowed is one for each"
        )
    return list(zip(results, labels, strict=True))


def without_numbers(result: StepResult, *, short: bool = False) -> str:
    """Return why a run has no peak or no time."""
    if result.outcome is Outcome.OUT_OF_MEMORY:
        return "OOM" if short else "out of memory"
    return "no time" if result.outcome is Outcome.OK else str(result.outcome).replace("_", " ")


def is_unsteady(result: StepResult) -> bool:
    """Return whether the time of a run is not steady, so that another run may give another time.

    Other programs only ever slow a step down, so its fastest repeat is the nearest to what it takes
    alone, and the distance of the median from it says how much of the quoted time is noise. The
    median moves only when half of the repeats were slowed: one slow step of five changes nothing,
    which the whiskers show all the same. The factor is that of the costs of operators (`STEADY`).
    """
    repeats = result.step_seconds_all
    if result.step_seconds is None or len(repeats) < FEWEST_REPEATS:
        return False
    return result.step_seconds > STEADY * min(repeats)


def why_unsteady(result: StepResult) -> str:
    """Return why the time of a run is not steady; "" if it is."""
    if not is_unsteady(result):
        return ""
    share = result.others_share
    is_alone = share is not None and share <= QUIET_SHARE
    return "the repeats differ widely" if is_alone else "the machine was busy"


# Dots in a picture of memory against time: their front, the limit, and names that cover
# little.

BEATEN = 0.35  # how strongly a dot is drawn that another one beats in memory and in time


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One result in the picture.

    Attributes:
        label: the name of the drawn dot.
        seconds: a step takes.
        nbytes: of its peak allocated.
        is_hollow: whether it was predicted.
        is_small: whether it is drawn small, as what matters less than the others.
        strength: how strongly it is drawn, 0..1.
        name: written beside it; "" for none.
        marker: of matplotlib.
    """

    label: str
    seconds: float
    nbytes: int
    is_hollow: bool
    is_small: bool = False
    strength: float = 1.0
    name: str = ""
    marker: str = "o"

    @property
    def width(self) -> float:
        """The width in points."""
        if self.is_small:
            return 3.0
        if self.marker == "*":
            return 12.0  # its points are thin
        return 7.0 if self.name else 4.5


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point beats, by their first coordinate.

    A point beats another if it is smaller in one coordinate and no larger in the other. Equal
    points are all in the front.

    >>> pareto_front([(1, 9), (2, 5), (3, 7), (4, 5)])
    [0, 1]
    """

    def is_beaten(x: float, y: float) -> bool:
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)

    front = [i for i, (x, y) in enumerate(points) if not is_beaten(x, y)]
    return sorted(front, key=lambda i: points[i])


def _draw_front(axes: Axes, front: Sequence[Dot]) -> None:
    """Draw the front as stairs: whatever lies above them is beaten by a run on them."""
    if len(front) > 1:
        axes.plot([dot.seconds for dot in front], [dot.nbytes for dot in front], color=RUN,
                  drawstyle="steps-post", linewidth=1, alpha=0.5, zorder=2, label="Pareto front",
                  )  # fmt: skip


def draw_dots(
    axes: Axes,
    dots: Sequence[Dot],
    fronts: Sequence[Sequence[Dot]],
    limit: int | None,
    of_which: str = "",
) -> None:
    """Draw the dots over their fronts and the limit, which says `of_which` bytes it is.

    A name goes where it covers least, the right side of its dot first.
    """
    for front in fronts:
        _draw_front(axes, front)
    if limit is not None:
        axes.axhline(limit, **LIMIT_LINE)
        text = f" limit {format_bytes(limit)}{of_which}"
        write(axes, axes.get_xlim()[0], limit, text, color=LIMIT, va="bottom")
    _, _, width, height = box_points(axes)
    low, high = axes.get_xlim()
    per_x, per_y = width / (high - low), height / axes.get_ylim()[1]

    def in_points(dot: Dot) -> tuple[float, float]:
        return (dot.seconds - low) * per_x, dot.nbytes * per_y

    large = [in_points(dot) for dot in dots if not dot.is_small]  # a name may cover the small
    taken = [(x - 4, y, 8.0) for x, y in large]
    if limit is not None:
        taken.append((0.0, limit * per_y, width))
    for front in fronts:
        taken += _along([in_points(dot) for dot in front])

    for dot in sorted(dots, key=lambda dot: bool(dot.name)):
        axes.plot([dot.seconds], [dot.nbytes], dot.marker, markersize=dot.width,
                  markerfacecolor="none" if dot.is_hollow else RUN, markeredgecolor=RUN, zorder=3,
                  markeredgewidth=1.4 if dot.is_hollow else 0, alpha=dot.strength,
                  label=dot.label)  # fmt: skip
        if not dot.name:
            continue
        text = shorten(dot.name, 0.45 * width)
        spot = _spot(*in_points(dot), text_width(text), taken, width)
        taken.append(spot)
        write(axes, low + spot[0] / per_x, spot[1] / per_y, text)


Taken = tuple[float, float, float]
"""Left, middle and width in points of what a name would cover."""


def _spot(px: float, py: float, wide: float, taken: Sequence[Taken], room: float) -> Taken:
    """Return where beside a dot a name covers least, and leaves the axes only if it must."""
    offsets = [(8.0, 0.0), (-8.0 - wide, 0.0)]
    offsets += [(dx, dy) for dx in (-wide / 2, 8.0, -8.0 - wide) for dy in (11.5, -11.5)]

    def crowding(spot: Taken) -> int:
        x, y, _ = spot
        covered = sum(
            abs(y - other_y) < 11 and x < other_x + other_wide and other_x < x + wide
            for other_x, other_y, other_wide in taken
        )
        return covered + 100 * (x < 0 or x + wide > room + 8)

    return min(((px + dx, py + dy, wide) for dx, dy in offsets), key=crowding)


def _along(corners: Sequence[tuple[float, float]]) -> list[Taken]:
    """Return places along the stairs between these points, in points, that a name would cover."""
    found = []
    for (x, y), (next_x, next_y) in pairwise(corners):
        found.append((x, y, next_x - x))
        rows = range(int(min(y, next_y)), int(max(y, next_y)) + 1, 5)
        found += [(next_x, float(row), 1.0) for row in rows]
    return found


# `memory_against_time`: one dot for each run, step time across and peak allocated up.
#
# Both axes are of one kind: the peak is of allocated bytes even where reserved bytes count
# against the limit, which the line of the limit then says. Predicted and measured dots
# differ in their fill.


@checked(size=inches)
def memory_against_time(
    results: Sequence[StepResult],
    *,
    labels: Sequence[str],
    pinned: Collection[int] = (),
    here: StepResult | None = None,
    neighbours: Sequence[StepResult] = (),
    size: Size = (4.4, 2.6),
) -> Figure:
    """Return one dot a run: step time across, peak allocated up; down and left is better.

    A line joins the runs of a Pareto front, those of which no other run takes less memory in no
    more time, or less time in no more memory. All others are fainter. Only runs of the same
    workload and batch size are compared, since a smaller batch does less work in its step. What was
    predicted is hollow.

    Args:
        results: those without a time or a peak are counted in words.
        labels: the name of each run.
        pinned: indices of the runs to name; the last run is always named.
        here: the prediction for a setting that was not run, named "on screen"; not in the front.
        neighbours: predictions for settings beside it, drawn small and faint; not in the front.
        size: in inches.
    """
    runs = labelled(results, labels)
    if max(pinned, default=0) >= max(len(runs), 1):
        raise ConfigError(f"pinned holds {max(pinned)}; allowed is the index of a result")
    dots = _dots(results, "run")
    fronts = _fronts(results, dots)
    names = {i: labels[i] for i in (*pinned, len(runs) - 1) if runs}
    faint = [replace(dot, strength=BEATEN) for dot in _dots(neighbours, "neighbour").values()]
    own = [replace(dot, name="on screen") for dot in _dots([here] if here else [], "here").values()]
    shown = [*faint, *_styled(dots, fronts, names), *own]
    if not shown:
        return placeholder(NO_RUNS if not runs else "No run with a time yet.", size=size)

    figure = Picture(size)
    axes = data_axes(figure, "memory against time", (34, 28, 10, 20))
    slowest, highest = max(dot.seconds for dot in shown), max(dot.nbytes for dot in shown)
    limit = next((r.memory_limit_bytes for r in reversed(results) if r.memory_limit_bytes), None)
    shown_limit = near(limit, highest)
    axes.set_xlim(0, 1.12 * slowest)
    byte_unit = byte_axis(axes, "y", 1.15 * max(highest, shown_limit or 0))
    second_unit = second_axis(axes, slowest)
    drawn = [[dots[i] for i in front] for front in fronts]
    has_cache = any(r.counted_peak and r.counted_peak.kind == "reserved" for r in results)
    draw_dots(axes, shown, drawn, shown_limit, " of reserved bytes" if has_cache else "")

    every = [*results, *neighbours, *([here] if here else [])]
    figure.head(f"peak {byte_unit} allocated ({origin(every)})")
    missing = f"; {len(runs) - len(dots)} without a time" if len(dots) < len(runs) else ""
    figure.foot(f"time per step, {second_unit}{missing}")
    return figure


def _fronts(results: Sequence[StepResult], dots: Mapping[int, Dot]) -> list[list[int]]:
    """Return the Pareto front of the runs of each workload and batch size, as their indices."""
    alike: dict[tuple[str, int], list[int]] = {}
    for i in dots:
        work = results[i].workload_name, results[i].config.batch_size
        alike.setdefault(work, []).append(i)
    return [
        [group[n] for n in pareto_front([(dots[i].seconds, dots[i].nbytes) for i in group])]
        for group in alike.values()
    ]


def _styled(
    dots: Mapping[int, Dot], fronts: Sequence[Sequence[int]], names: Mapping[int, str]
) -> list[Dot]:
    """Return the runs as they are drawn: beaten ones fainter, pinned ones as diamonds."""
    in_front = {i for front in fronts for i in front}
    newest = max(names, default=-1)
    return [
        replace(
            dot,
            name=names.get(i, ""),
            strength=1.0 if i in in_front else BEATEN,
            marker="D" if i in names and i != newest else "o",
        )
        for i, dot in dots.items()
    ]


def _dots(results: Sequence[StepResult], kind: str) -> dict[int, Dot]:
    """Return a dot for each result that has a time and a peak, by its index."""
    return {
        i: Dot(
            label=f"{kind} {i}",
            seconds=result.step_seconds,
            nbytes=result.peak_allocated_bytes,
            is_hollow=result.source is Source.PREDICTED,
        )
        for i, result in enumerate(results)
        if result.step_seconds is not None and result.peak_allocated_bytes is not None
    }


# `step_times`: the median step time of each run as a bar, its repeats as dots and a whisker.

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
    figure, names = Picture(size), [label for _, label in shown]
    axes = row_axes(figure, "step times", names, share=0.3, bottom=16)
    axes.set_ylim(max(len(shown), 4) - 0.5, -0.5)
    times = [t for r, _ in shown if r.step_seconds for t in (*r.step_seconds_all, r.step_seconds)]
    slowest = max(times, default=1.0)
    room = max(text_width(f"{_beside(result)}  ") for result, _ in shown)
    axes.set_xlim(0, slowest * 1.03 / (1 - room / box_points(axes)[2]))
    unit = second_axis(axes, slowest)
    for row, (result, _) in enumerate(shown):
        _draw_step_time(axes, row, result, is_newest=row == len(shown) - 1)
    count = "" if shown == runs else f", last {MOST_BARS} of {len(runs)}"
    figure.head(f"median step time, {unit} ({origin([r for r, _ in shown])}){count}")
    return figure


def _draw_step_time(axes: Axes, row: int, result: StepResult, *, is_newest: bool) -> None:
    gap = axes.get_xlim()[1] * 0.025
    if result.step_seconds is None:
        write(axes, gap, row, without_numbers(result), style="italic", color=LIMIT)
        return
    is_hollow = result.source is Source.PREDICTED
    axes.barh(row, result.step_seconds, height=0.62, alpha=1.0 if is_newest else 0.55,
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


# `heat_map`: the peaks of several runs over two settings; `varying_fields`: which two.

FIELD = choice(*(field.name for field in fields(StepConfig)))


@checked(rows=FIELD, columns=FIELD, size=inches)
def heat_map(
    results: Sequence[StepResult],
    *,
    rows: str = "batch_size",
    columns: str = "accumulation_steps",
    limit_bytes: int | None = None,
    size: Size = (4.4, 2.6),
) -> Figure:
    """Return the peak allocated over two `StepConfig` fields of the settings tried.

    The latest result of a cell counts. A peak that does not fit `limit_bytes` is hatched. A cell
    without a peak says why, such as "OOM"; a setting that was not tried is blank.
    """
    if not results:
        return placeholder(NO_RUNS, size=size)
    try:
        import seaborn  # 0.7 s to import
    except ImportError:
        raise UnsupportedError(
            "heat_map needs seaborn, which is not installed; pip install 'memlab[lab]'"
        ) from None

    latest = {(getattr(r.config, rows), getattr(r.config, columns)): r for r in results}
    ys, xs = (_in_order({cell[axis] for cell in latest}) for axis in (0, 1))
    peaks, words = np.full((len(ys), len(xs)), np.nan), np.full((len(ys), len(xs)), "", object)
    hatched: dict[tuple[int, int], str] = {}
    for (y, x), result in latest.items():
        at = ys.index(y), xs.index(x)
        if result.peak_allocated_bytes is None:
            hatched[at] = without_numbers(result, short=True)
            continue
        peaks[at] = result.peak_allocated_bytes
        words[at] = format_bytes(result.peak_allocated_bytes)
        if result.against_limit(limit_bytes or None).fits is False:
            hatched[at] = ""

    figure, per_column = Picture(size), 0.6 * size[0] * POINTS / len(xs)
    row_names = [shorten(label, 0.4 * figure.width) for label in _labels(ys, results)]
    column_names = [shorten(label, per_column) for label in _labels(xs, results)]
    axes = data_axes(figure, "heat map", (room_of(row_names), 30, 8, 34))
    axes.spines["bottom"].set_visible(False)
    seaborn.heatmap(
        peaks, ax=axes, vmin=0, vmax=np.nanmax(peaks, initial=1), cmap="crest", cbar=False,
        linewidths=0, annot=words, fmt="", annot_kws={"fontfamily": FONT, "fontsize": FONT_SIZE},
        xticklabels=False, yticklabels=False,
    )  # fmt: skip
    name_ticks(axes, "x", [i + 0.5 for i in range(len(xs))], column_names)
    name_ticks(axes, "y", [i + 0.5 for i in range(len(ys))], row_names)
    axes.tick_params(labelrotation=0, labelsize=FONT_SIZE, labelfontfamily=FONT, length=0)
    for at, word in sorted(hatched.items()):
        _hatch_cell(axes, *at, word)
    over = ", hatch: over limit" if "" in hatched.values() else ""
    figure.head(f"peak allocated ({origin(results)}){over}")
    write(figure, 6, figure.height - 22, f"{_axis_name(rows)}, down")
    figure.foot(f"{_axis_name(columns)}, across")
    return figure


def _hatch_cell(axes: Axes, row: int, column: int, word: str) -> None:
    """Hatch a cell that is over the limit, or one without a peak, and say in a word why."""
    axes.add_artist(Rectangle((column + 0.03, row + 0.03), 0.94, 0.94, facecolor="none",
                              edgecolor=GRID if word else LIMIT, hatch="///", alpha=0.5,
                              linewidth=0))  # fmt: skip
    if word:
        write(axes, column + 0.5, row + 0.5, word, ha="center", color=LIMIT)


def _labels(values: Sequence[Any], results: Sequence[StepResult]) -> list[str]:
    """Return the values as they are written; "as-built" is what was built, the same in all runs."""
    built = {r.number_format for r in results if r.config.precision is Precision.AS_BUILT}
    own = {Precision.AS_BUILT: built.pop()} if len(built) == 1 else {}
    return [own.get(value, str(value)) for value in values]


def _axis_name(field: str) -> str:
    """Return a setting as the panel's controls call it."""
    return "accumulation" if field == "accumulation_steps" else field.replace("_", " ")


def _in_order(values: Collection[Any]) -> list[Any]:
    """Sort numbers by size, choices as their enum lists them, and texts among functions by name."""
    if not all(isinstance(value, int | float | StrEnum) for value in values):
        return sorted(values, key=str)
    return sorted(values, key=lambda v: list(type(v)).index(v) if isinstance(v, StrEnum) else v)


@checked()
def varying_fields(results: Sequence[StepResult]) -> list[str]:
    """Return the `StepConfig` fields in which the results differ, most distinct values first."""
    distinct = {
        field.name: len({getattr(result.config, field.name) for result in results})
        for field in fields(StepConfig)
    }
    return sorted((name for name, n in distinct.items() if n > 1), key=lambda name: -distinct[name])


# `scaling`: what more ranks change, one line for each way to share: the peak of a rank, the
# speed.
#
# The number of ranks goes across, doubling from tick to tick. Above is the peak of the
# worst rank, below the samples per second, with a faint line for the speed that as many
# ranks would reach if each were as fast as with the fewest. Where no result has a time
# there is only the peak.

COLORS = [CATEGORY_COLORS[category] for category in (
    Category.PARAMETERS, Category.ACTIVATIONS, Category.GRADIENTS, Category.OPTIMIZER_STATE,
    Category.BUFFERS,
)]  # fmt: skip
MARKERS = "osD^v"
MOST_TICKS = 7
LEFT, BELOW, BETWEEN, ABOVE = 46, 28, 24, 20  # margins in points
Line = list[tuple[float, float]]
"""Logarithm of the number of ranks, and a peak or the logarithm of a rate."""


@checked(size=inches)
def scaling(results: Sequence[StepResult], *, size: Size = (4.4, 3.4)) -> Figure:
    """Return the peak of the worst rank and the samples per second against the number of ranks.

    Results of one strategy are joined by a line that has its name. Those without a peak are left
    out. Peaks are of allocated bytes.

    Args:
        results: of one workload with several `world_size`, predicted or measured.
        size: in inches.
    """
    shown = [result for result in results if result.peak_allocated_bytes is not None]
    if not shown:
        return placeholder(NO_RUNS, size=size)
    peaks, rates = dict[str, Line](), dict[str, Line]()
    for result in sorted(shown, key=lambda result: result.config.world_size):
        name, ranks = _name(result), math.log2(result.config.world_size)
        peaks.setdefault(name, []).append((ranks, result.peak_allocated_bytes or 0))
        line = rates.setdefault(name, [])
        if result.samples_per_second:
            line.append((ranks, math.log10(result.samples_per_second)))

    figure, right = Picture(size), max(map(text_width, peaks)) + 12
    is_timed = any(rates.values())
    half = (figure.height - BELOW - BETWEEN - ABOVE) / 2 + BETWEEN + BELOW if is_timed else BELOW
    upper = data_axes(figure, "peak", (LEFT, half, right, ABOVE))
    _number_ranks(upper, shown)
    unit = byte_axis(upper, "y", 1.12 * max(result.peak_allocated_bytes or 0 for result in shown))
    _draw_lines(upper, peaks)
    if is_timed:
        above = figure.height - half + BETWEEN
        lower = data_axes(figure, "speed", (LEFT, BELOW, right, above))
        upper.set_xticklabels([])
        _number_rates(lower, [r.samples_per_second for r in shown if r.samples_per_second])
        _number_ranks(lower, shown)
        for line in rates.values():
            _draw_ideal(lower, line)
        _draw_lines(lower, rates)
        said = shorten("samples per second, each line ten times the last", figure.width - 10)
        write(figure, 6, half - 14, said)

    figure.head(f"peak {unit} allocated, worst rank ({origin(shown)})")
    figure.foot("ranks")
    return figure


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
    axes.grid(axis="y", **GRID_LINES)


def _draw_lines(axes: Axes, lines: Mapping[str, Line]) -> None:
    ends = []
    drawn = zip(lines.items(), cycle(COLORS), cycle(MARKERS), strict=False)
    for (name, line), color, marker in drawn:
        if line:
            x, y = zip(*line, strict=True)
            axes.plot(x, y, color=color, marker=marker, markersize=4, linewidth=1.2, label=name)
            ends.append((y[-1], x[-1], name, color))
    _name_ends(axes, sorted(ends))


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the names of lines beside their ends, none across another or above the axes."""
    bottom, top = axes.get_ylim()
    line = 11 * (top - bottom) / box_points(axes)[3]
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


def _draw_ideal(axes: Axes, line: Line) -> None:
    """Draw the speed of ranks that are all as fast as the fewest are."""
    if len(line) < 2:
        return
    (first, start), (last, _) = line[0], line[-1]
    growth = (last - first) * math.log10(2)
    axes.plot(
        [first, last], [start, start + growth], color=GRID, linewidth=0.8,
        linestyle=(0, (4, 3)), label="as fast as the fewest",
    )  # fmt: skip
