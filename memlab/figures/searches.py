"""Pictures of what has several settings, stages or lengths: ladder, recommend, compare, a run.

Left out: what a peak consists of, which `peak_bar` shows for one result.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from memlab._util.checks import checked
from memlab._util.units import format_bytes, format_percent
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    GRID_LINES,
    INK,
    LIMIT,
    LIMIT_LINE,
    STACK,
    Picture,
    Size,
    axes_beside,
    box_points,
    byte_axis,
    data_axes,
    inches,
    name_rows,
    name_ticks,
    near,
    origin,
    placeholder,
    room_beside,
    room_of,
    row_axes,
    second_axis,
    shorten,
    text_width,
    write,
)
from memlab.figures.runs import BEATEN, Dot, draw_dots, pareto_front
from memlab.prediction.run_result import RunResult
from memlab.result import Outcome, Source, StepResult, signed_percent
from memlab.runtime.verify_report import VerifyReport
from memlab.search.answer import Recommendations
from memlab.search.lengths import LengthsResult
from memlab.store.compare import TIME, CostChange, CostChanges, in_words
from memlab.trace import Category

BAR = CATEGORY_COLORS[Category.ACTIVATIONS]


@checked(size=inches)
def waterfall(
    results: Sequence[StepResult],
    *,
    reports: Sequence[VerifyReport] | None = None,
    size: Size = (9.0, 3.2),
) -> Figure:
    """Return a chart with the peak of each rung as a bar, and its saving as a pale bar behind it.

    The text beside each bar gives the peak, how many times lower it is than on the first rung, the
    time of a step relative to the first, and the error of the gradients. Peaks are reserved bytes
    if all rungs have them, else allocated bytes.

    Args:
        results: of `memlab.ladder`, the plain step first.
        reports: of `memlab.verify` for each result, or None.
        size: width and height in inches.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> rungs = [
    ...     memlab.recorded(workload, StepConfig(batch_size=4, memory_budget=budget), "amd-epyc")
    ...     for budget in (1.0, 0.5)
    ... ]
    >>> memlab.plots.waterfall(rungs).get_size_inches()
    array([9. , 3.2])
    """
    if not results:
        return placeholder("No rung yet.", size=size)
    if reports is not None and len(reports) != len(results):
        raise ConfigError(
            f"reports holds {len(reports)} for {len(results)} results; allowed is one for each"
        )

    held = [result.peak_reserved_bytes for result in results]
    is_reserved = all(
        peak is not None for peak, r in zip(held, results, strict=True) if r.peak_allocated_bytes
    )
    peaks = held if is_reserved else [result.peak_allocated_bytes for result in results]
    figure = Picture(size)
    axes = row_axes(figure, "ladder", _names(results), share=0.34, bottom=26)
    said = [_said(results, peaks, reports, row) for row in range(len(results))]
    # the axis leaves room for the longest text beside the longest bar
    room = max(map(text_width, said)) + 12
    most = max((peak for peak in peaks if peak), default=1)
    unit = byte_axis(axes, "x", most / room_beside(axes, room, 0.3))
    before = None
    for row, (result, peak) in enumerate(zip(results, peaks, strict=True)):
        color = INK if result.outcome is Outcome.OK else LIMIT
        write(axes, _draw_rung(axes, row, peak, before), row, said[row], color=color)
        before = peak or before

    kind = "reserved" if is_reserved else "allocated"
    figure.head(f"peak {unit} {kind} ({origin(results)}), rung by rung")
    return figure


def _draw_rung(axes: Axes, row: int, peak: int | None, before: int | None) -> float:
    """Draw a peak, and pale what it is below that before; return where its text begins."""
    gap = axes.get_xlim()[1] * 0.01
    if peak is None:
        return gap
    axes.barh(row, peak, height=0.62, color=BAR)
    if before is not None and before > peak:
        axes.barh(row, before - peak, left=peak, height=0.62, color=BAR, alpha=0.22)
    return max(peak, before or 0) + gap


def _names(results: Sequence[StepResult]) -> list[str]:
    """Return, for each rung, the fields that it adds to the last rung that worked."""
    names, below = ["plain"], results[0].config
    for result in results[1:]:
        changed = [
            f"{field.name}={getattr(result.config, field.name)}"
            for field in fields(StepConfig)
            if getattr(result.config, field.name) != getattr(below, field.name)
        ]
        names.append(", ".join(changed) or "the same")
        if result.outcome is Outcome.OK:
            below = result.config

    return names


def _said(
    results: Sequence[StepResult],
    peaks: Sequence[int | None],
    reports: Sequence[VerifyReport] | None,
    row: int,
) -> str:
    """Return the numbers of a rung in words."""
    result, peak, first = results[row], peaks[row], peaks[0]
    if peak is None:
        return str(result.outcome).replace("_", " ")

    words = [format_bytes(peak)]
    if row and first:
        words.append(f"{first / peak:.1f}x less")
    if row and result.step_seconds and results[0].step_seconds:
        words.append(f"{result.step_seconds / results[0].step_seconds:.2f}x the time")
    if reports is not None and reports[row].global_relative_error is not None:
        words.append(f"gradient error {reports[row].global_relative_error:.1e}")
    return ", ".join(words)


# `recommendations`: what `recommend` has looked at, step time across and memory up.
#
# The memory is the peak that counts against the limit: reserved bytes of a card, allocated
# bytes of a CPU. So the line of the limit lies on the axis of the dots.

MARKERS = {
    "fastest that fits": "*", "fits too": "D", "too close to say": "^",
    "did not fit when measured": "X",
}  # fmt: skip
"""Of settings about which the answer says something; all others are small circles."""

IN_WORDS = {"*": "★", "D": "◆", "^": "▲", "X": "✖"}


@checked(size=inches)
def recommendations(ranked: Recommendations, *, size: Size = (7.4, 3.8)) -> Figure:
    """Return every setting that was looked at: step time across, the memory that counts up.

    The first recommendation is a star with a name, and the others are diamonds. Settings too close
    to the limit to say are triangles. What was predicted is hollow, what was measured is filled.
    A line joins the Pareto front of these: no other takes less memory in no more time, or less time
    in no more memory. Estimates of further settings are small and faint, and not in the front: some
    of them are too low, so a setting is recommended only after it has been predicted itself.

    A recommended setting above the limit fits with less cache: its peak is what it takes where
    there is room.

    Args:
        ranked: what `memlab.recommend` returned.
        size: in inches.
    """
    dots = _dots(ranked)
    if not dots:
        return placeholder(ranked.message, size=size)

    sure = [dot for dot in dots if not dot.is_small]
    front = [sure[i] for i in pareto_front([(dot.seconds, dot.nbytes) for dot in sure])]
    told = [*front, *(dot for dot in sure if dot.marker != "o")]
    fastest, slowest = min(dot.seconds for dot in dots), max(dot.seconds for dot in told)
    highest = max(dot.nbytes for dot in told)
    limit = near(ranked.limit_bytes, highest)
    top = max(highest, limit or 0)
    right = slowest + max(slowest - fastest, 0.2 * slowest)
    shown = [dot for dot in dots if dot.seconds <= right and dot.nbytes <= 1.1 * top]

    figure = Picture(size)
    axes = data_axes(figure, "recommendations", (34, 44, 10, 20))
    room = 0.12 * (right - fastest)  # for names, and for the limit's
    axes.set_xlim(max(fastest - room, 0.0), right + room)
    byte_unit, second_unit = byte_axis(axes, "y", 1.15 * top), second_axis(axes, right)
    draw_dots(axes, shown, [front], limit)

    results = [*ranked.tried, *ranked.dropped, *(one.result for one in ranked)]
    peak = next(peak for result in results if (peak := result.counted_peak))
    figure.head(f"peak {byte_unit} {peak.kind} ({origin(results)})")
    figure.foot(f"time per step, {second_unit}", y=23)
    marks = _marks(shown)
    if ranked.limit_bytes > axes.get_ylim()[1]:
        marks.append(f"limit {format_bytes(ranked.limit_bytes)}, above this picture")
    if num_outside := len(dots) - len(shown):
        marks.append(f"{num_outside} slower or larger ones not shown")
    write(figure, 6, 7, "   ".join(marks))
    return figure


def _marks(shown: Sequence[Dot]) -> list[str]:
    """Return what the marks of these dots mean."""
    used = {dot.marker for dot in shown}
    sure = {dot.is_hollow for dot in shown if not dot.is_small}
    kinds = {
        "● measured": False in sure,
        "○ predicted": True in sure,
        "∘ estimated": any(dot.is_small for dot in shown),
    }
    marks = [f"{IN_WORDS[marker]} {kind}" for kind, marker in MARKERS.items() if marker in used]
    return [*marks, *(words for words, is_there in kinds.items() if is_there)]


def _dots(ranked: Recommendations) -> list[Dot]:
    """Return a dot for each setting that has a time and a peak, those with a marker last."""
    results: dict[tuple[str, StepConfig], tuple[StepResult, str]] = {}
    for kind, marked in (
        ("estimated", ranked.estimated),
        ("predicted", ranked.tried),
        ("did not fit when measured", ranked.dropped),
        ("too close to say", [one.result for one in ranked.too_close]),
        ("fits too", [one.result for one in ranked[1:]]),
        ("fastest that fits", [one.result for one in ranked[:1]]),
    ):
        for result in marked:
            key = result.workload_name, result.config
            results.pop(key, None)  # so that it is drawn later
            results[key] = result, kind

    several = len(ranked.workloads) > 1
    dots = (_dot(result, kind, several=several) for result, kind in results.values())
    return [dot for dot in dots if dot is not None]


def _dot(result: StepResult, kind: str, *, several: bool) -> Dot | None:
    """Return the dot of a step, with its workload where there are several; None without a time."""
    peak = result.counted_peak
    if peak is None or result.step_seconds is None:
        return None
    which = f"{result.workload_name}; " if several else ""
    return Dot(
        label=f"{kind}: {which}{result.config}",
        seconds=result.step_seconds,
        nbytes=peak.nbytes,
        is_hollow=result.source is Source.PREDICTED,
        is_small=kind == "estimated",
        strength=BEATEN if kind == "estimated" else 1.0,
        name=f"{which}{_changed(result.config)}" if MARKERS.get(kind) == "*" else "",
        marker=MARKERS.get(kind, "o"),
    )


def _changed(config: StepConfig) -> str:
    """Return what a setting changes, in few words."""
    here, default = config.to_dict(), StepConfig().to_dict()
    changed = [
        value if isinstance(value, str) else f"{field}={value}"
        for field, value in here.items()
        if field != "batch_size" and value != default[field]
    ]
    return ", ".join(changed) or "as it is"


# What changed between two sets of results, a row each: `plots.cost_changes`.

MOST_ROWS = 24
LEAST_SPAN = 0.05  # of an axis
ROOM = 2.2  # for the texts beside the longest lines
ROSE, FELL, SAME = (LIMIT, "^"), (CATEGORY_COLORS[Category.GRADIENTS], "v"), (INK, "o")


@checked(size=inches)
def cost_changes(changes: CostChanges, *, size: Size = (9.0, 3.2)) -> Figure:
    """Return the relative change of memory and of time of each setting, worse ones at the top.

    Memory is the peak that counts, reserved bytes on CUDA and allocated bytes on a CPU. The grey
    bands are the tolerances. A triangle that points up has risen by more than that and the noise,
    one that points down has fallen.

    Args:
        changes: what `memlab.compare` returned.
        size: in inches.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> cost_changes(memlab.compare(result, result)).get_size_inches()
    array([9. , 3.2])
    """
    if not changes.changes:
        return placeholder("Nothing was compared.", size=size)

    rows, figure = changes.changes[:MOST_ROWS], Picture(size)
    heads = {f"{one.new.workload_name}, {one.new.device} ({one.new.source})" for one in rows}
    names = [str(one.new.config) if len(heads) == 1 else in_words(one.new) for one in rows]
    names = [shorten(name, 0.4 * figure.width) for name in names]
    left = room_of(names)
    memory, time = axes_beside(figure, ["memory", "time"], (left, 26, 8, 38), between=8)
    name_rows(memory, names)
    _draw_cost_changes(memory, rows, [one.counted_peak for one in rows], changes.memory_tolerance)
    _draw_cost_changes(time, rows, [TIME] * len(rows), changes.time_tolerance)

    more = len(changes.changes) - len(rows)
    title = "from old to new: " + (heads.pop() if len(heads) == 1 else "several workloads")
    figure.head(title + (f" ({more} more settings are not drawn)" if more else ""))
    peaks = " or ".join(sorted({one.counted_peak for one in rows}))
    for axes, head in ((memory, peaks), (time, TIME)):
        write(figure, box_points(axes)[0], figure.height - 26, head)
    return figure


def _draw_cost_changes(
    axes: Axes, rows: Sequence[CostChange], names: Sequence[str], tolerance: float
) -> None:
    """Draw a marker for each known change of these costs, and the tolerance as a band."""
    values = [one.change_of(name) for one, name in zip(rows, names, strict=True)]
    most = max([*(abs(value) for value in values if value is not None), tolerance, LEAST_SPAN])
    axes.set(xlim=(-ROOM * most, ROOM * most), ylim=(len(rows) - 0.5, -0.5))
    axes.axvspan(-tolerance, tolerance, color=GRID, alpha=0.25, linewidth=0)
    axes.axvline(0.0, color=GRID, linewidth=0.7)
    axes.set_xticks([-most, 0.0, most], [signed_percent(-most), "0", signed_percent(most)])

    for row, (one, name, value) in enumerate(zip(rows, names, values, strict=True)):
        if value is None:
            write(axes, 0.0, row, "not known", ha="center")
            continue
        color, marker = ROSE if name in one.rose else FELL if name in one.fell else SAME
        axes.plot([0.0, value], [row, row], color=color, linewidth=2.0)
        axes.plot([value], [row], marker=marker, color=color, markersize=6)
        is_right = value >= 0
        write(axes, value + (0.1 if is_right else -0.1) * most, row, signed_percent(value),
              ha="left" if is_right else "right")  # fmt: skip


# `run`: the peak of each stage of a run as a bar, with the limit; the stage of the peak is
# named.
#
# Left: what is allocated, stacked by what it is for. Right, for a card: what the caching
# allocator holds, which counts against the limit. Each has an axis of its own.

# what only runs have; each is also named by the key, and has its place in the stack
OF_RUNS = {"EMA weights": "#5b6ea8", "kept outputs": "#c9643c", "KV cache": "#7d5a44"}
COLORS = {**{str(category): CATEGORY_COLORS[category] for category in STACK}, **OF_RUNS}
ORDER = (str(Category.PARAMETERS), "EMA weights", *map(str, STACK[1:]), "kept outputs", "KV cache")
RESERVED = CATEGORY_COLORS[Category.BUFFERS]


@checked(size=inches)
def run(result: RunResult, *, size: Size = (7.0, 3.0)) -> Figure:
    """Return the peak of each stage of a run as a bar, with the limit as a dashed line.

    Args:
        result: what `predict_run` or `measure_run` returned.
        size: in inches.
    """
    worst = result.worst
    if worst is None:
        return placeholder(result.message, size=size)
    figure, stages = Picture(size), result.stages
    peaks = {"allocated": [stage.peak_allocated_bytes for stage in stages]}
    if result.peak_reserved_bytes is not None:
        peaks["reserved"] = [stage.peak_reserved_bytes or 0 for stage in stages]
    panes = axes_beside(figure, list(peaks), (96, 46, 62, 34), between=62)
    for axes, (kind, nbytes) in zip(panes, peaks.items(), strict=True):
        head = _scaled(axes, kind, nbytes, result if axes is panes[-1] else None)
        write(figure, box_points(axes)[0], figure.height - 24, head)
    name_ticks(panes[0], "y", range(len(stages)), [stage.name for stage in stages])
    for place, stage in enumerate(stages):
        begin = 0
        for name in ORDER:
            held = stage.bytes_by_category.get(name, 0)
            _draw_stage(panes[0], place, begin, held, facecolor=COLORS[name], label=name)
            begin += held
        for axes in panes[1:]:
            _draw_stage(axes, place, 0, stage.peak_reserved_bytes or 0, color=RESERVED)

    there = [name for name in ORDER if any(stage.bytes_by_category.get(name) for stage in stages)]
    figure.swatches([(COLORS[name], name.replace("_", " ")) for name in there], 15, line=12)
    figure.head(f"{result.source}, {result.device}: the peak is in the {worst.name}")
    return figure


def _draw_stage(axes: Axes, place: int, begin: int, nbytes: int, **style: Any) -> None:
    axes.add_patch(Rectangle((begin, place - 0.32), nbytes, 0.64, linewidth=0, **style))


def _scaled(axes: Axes, kind: str, peaks: Sequence[int], judged: RunResult | None) -> str:
    """Set the range of an axis, draw bytes and limit; return what the axis shows, in words."""
    limit = None if judged is None else judged.memory_limit_bytes
    highest = max((*peaks, 1))
    shown = near(limit, highest)
    axes.set_ylim(len(peaks) - 0.5, -0.5)
    unit = byte_axis(axes, "x", 1.04 * max(highest, shown or 0))
    for place, nbytes in enumerate(peaks):
        fits = judged is None or judged.stages[place].fits is not False
        label, weight = f" {format_bytes(nbytes)}", "bold" if nbytes == highest else "normal"
        x = _beginning(axes, nbytes, label, shown)
        write(axes, x, place, label, fontweight=weight, color=INK if fits else LIMIT)
    if shown is not None:
        axes.axvline(shown, **LIMIT_LINE)
    limit_words = "" if limit is None else f", limit {format_bytes(limit)}"
    return f"{unit} {kind}{limit_words}"


def _beginning(axes: Axes, nbytes: int, label: str, limit: int | None) -> int:
    """Return where the label of a bar begins: after the line of the limit if it would cross it."""
    bytes_per_point = axes.get_xlim()[1] / box_points(axes)[2]
    crosses = limit is not None and nbytes < limit < nbytes + text_width(label) * bytes_per_point
    return limit if limit is not None and crosses else nbytes


# `lengths`: the peak of a batch against its longest sample, over the lengths of the samples.
#
# Above is the peak, below how many samples have which length. Both axes across are the
# same, so the part of the data set that makes batches beyond the limit lies below the part
# of the line that is above it.

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
    figure = Picture(size)
    half = BELOW + SHARE_BELOW * (figure.height - BELOW - ABOVE)
    upper = data_axes(figure, "peak", (LEFT, half + BETWEEN, RIGHT, ABOVE))
    lower = data_axes(figure, "lengths", (LEFT, BELOW, RIGHT, figure.height - half))
    for axes in (upper, lower):
        axes.set_xlim(0, 1.03 * result.data.longest)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.grid(axis="x", **GRID_LINES)
    upper.set_xticklabels([])
    unit = _draw_peaks(upper, result)
    _draw_lengths(lower, result)

    peak, chance = result.worst.counted_peak, result.chance_above_limit
    assert peak is not None
    figure.head(f"peak {unit} {peak.kind} of a batch ({origin([result.worst])})")
    over = f"; {format_percent(chance)} of random batches do not fit" if chance else ""
    write(figure, 6, half + 8, shorten(f"samples{over}", figure.width - 12))
    figure.foot(f"{result.unit} of the longest sample")
    return figure


def _draw_peaks(axes: Axes, result: LengthsResult) -> str:
    """Draw the curve, its end and the limit; return the unit of the bytes."""
    highest = int(result.curve_bytes.max())
    shown = near(result.memory_limit_bytes, highest)
    top = 1.15 * max(highest, shown or 0)
    unit = byte_axis(axes, "y", top)
    axes.plot(result.curve_lengths, result.curve_bytes, color=LINE, linewidth=1.6, label="peak")
    axes.plot([result.data.longest], [result.curve_bytes[-1]], "o", color=LINE, label="worst batch")
    if shown is not None:
        axes.axhline(shown, **LIMIT_LINE)
        # at the right, where the curve is far above a limit that it crosses
        x, y, words = axes.get_xlim()[1], shown + ABOVE_LINE * top, f"limit {format_bytes(shown)}"
        write(axes, x, y, words, color=LIMIT, ha="right", va="bottom")
    return unit


def _draw_lengths(axes: Axes, result: LengthsResult) -> None:
    """Draw how many samples have which length; those that are too long are hatched."""
    data, fitting = result.data.lengths, result.longest_that_fits
    edges = np.linspace(0, result.data.longest, NUM_BARS + 1)
    is_over = data > (result.data.longest if fitting is None else fitting)
    fit, over = (np.histogram(data[which], bins=edges)[0] for which in (~is_over, is_over))
    style = {"align": "edge", "width": edges[1], "linewidth": 0}
    axes.bar(edges[:-1], fit, color=BARS, label="samples", **style)
    hatched: dict[str, Any] = {
        "color": "none",
        "edgecolor": LIMIT,
        "hatch": "//////",
        "label": "too long",
    }
    axes.bar(edges[:-1], over, bottom=fit, **hatched, **style)
    axes.set_ylim(0, 1.1 * int((fit + over).max()))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    axes.grid(axis="y", **GRID_LINES)
