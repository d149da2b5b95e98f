"""The waterfall of a ladder: one bar for each rung, with its peak and its saving.

Left out: what a peak consists of, which `peak_bar` shows for one result.
"""

from collections.abc import Sequence
from dataclasses import fields

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
    INK,
    LIMIT,
    POINTS,
    STACK,
    Canvas,
    Size,
    box_points,
    byte_axis,
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
from memlab.figures.runs import BEATEN, Dot, draw_dots, draw_front, draw_limit, pareto_front
from memlab.prediction.run_result import RunResult, StageCost
from memlab.result import Outcome, Source, StepResult, signed_percent
from memlab.runtime.verify_report import VerifyReport
from memlab.search.answer import Recommendations
from memlab.search.lengths import LengthsResult
from memlab.store.compare import TIME, CostChange, CostChanges
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
    figure = new_figure(size)
    names = [shorten(name, 0.34 * size[0] * POINTS) for name in _names(results)]
    left = max(text_width(name) for name in names) + 10
    axes = data_axes(figure, "ladder", margins=(left, 26, 6, 20))
    name_ticks(axes, "y", range(len(results)), names)
    axes.set_ylim(len(results) - 0.5, -0.5)
    most = max((peak for peak in peaks if peak), default=1)
    said = [_said(results, peaks, reports, row) for row in range(len(results))]
    # the axis leaves room for the longest text beside the longest bar
    room = max(map(text_width, said)) + 12
    axes.set_xlim(0, most / max(1 - room / box_points(axes)[2], 0.3))
    axes.grid(axis="x", color=GRID, linewidth=0.5, alpha=0.45)
    unit = byte_axis(axes, "x", axes.get_xlim()[1])
    before = None

    for row, result in enumerate(results):
        peak = peaks[row]
        _draw(axes, row, peak, before, said[row], is_ok=result.outcome is Outcome.OK)
        before = peak or before

    kind = "reserved" if is_reserved else "allocated"
    write_title(figure, f"peak {unit} {kind} ({origin(results)}), rung by rung")
    return figure


def _draw(
    axes: Axes, row: int, peak: int | None, before: int | None, said: str, *, is_ok: bool
) -> None:
    if before is not None and peak is not None and before > peak:
        axes.barh(row, before - peak, left=peak, height=0.62, color=BAR, alpha=0.22)
    if peak is not None:
        axes.barh(row, peak, height=0.62, color=BAR)
    start = max(peak or 0, before or 0) if peak is not None else 0
    gap = axes.get_xlim()[1] * 0.01
    write(axes, start + gap, row, said, color=INK if is_ok else LIMIT)


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
    is_limit_shown = ranked.limit_bytes <= 2 * highest
    top = max(highest, ranked.limit_bytes * is_limit_shown)
    right = slowest + max(slowest - fastest, 0.2 * slowest)
    shown = [dot for dot in dots if dot.seconds <= right and dot.nbytes <= 1.1 * top]

    figure = new_figure(size)
    axes = data_axes(figure, "recommendations", margins=(34, 44, 10, 20))
    room = 0.12 * (right - fastest)  # for names, and for the limit's
    axes.set(xlim=(max(fastest - room, 0.0), right + room), ylim=(0, 1.15 * top))
    byte_unit, second_unit = byte_axis(axes, "y", axes.get_ylim()[1]), second_axis(axes, right)
    draw_front(axes, front)
    if is_limit_shown:
        draw_limit(axes, ranked.limit_bytes, "")
    draw_dots(axes, shown, ranked.limit_bytes if is_limit_shown else None, [front])
    _write_around(figure, ranked, shown, byte_unit, second_unit, len(dots) - len(shown))
    return figure


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


def _write_around(
    figure: Figure,
    ranked: Recommendations,
    shown: Sequence[Dot],
    byte_unit: str,
    second_unit: str,
    num_outside: int,
) -> None:
    """Write what the axes, the marks and the limit are."""
    results = [*ranked.tried, *ranked.dropped, *(one.result for one in ranked)]
    peak = next(peak for result in results if (peak := result.counted_peak))
    write_title(figure, f"peak {byte_unit} {peak.kind} ({origin(results)})")

    canvas, right = Canvas(figure), figure.get_size_inches()[0] * POINTS - 8
    write(canvas, right, 23, f"time per step, {second_unit}", ha="right")
    marks = [f"{IN_WORDS[marker]} {kind}" for kind, marker in MARKERS.items()
             if any(dot.marker == marker for dot in shown)]  # fmt: skip
    sure = {dot.is_hollow for dot in shown if not dot.is_small}
    for words, is_there in (
        ("● measured", False in sure),
        ("○ predicted", True in sure),
        ("∘ estimated", any(dot.is_small for dot in shown)),
    ):
        marks += [words] if is_there else []
    outside = [f"{num_outside} slower or larger ones not shown"] if num_outside else []
    if ranked.limit_bytes > figure.axes[0].get_ylim()[1]:
        outside.insert(0, f"limit {format_bytes(ranked.limit_bytes)}, above this picture")
    write(canvas, 6, 7, "   ".join([*marks, *outside]))


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

    rows = changes.changes[:MOST_ROWS]
    figure, width = new_figure(size), size[0] * POINTS
    heads = {f"{one.new.workload_name}, {one.new.device} ({one.new.source})" for one in rows}
    names = [str(one.new.config if len(heads) == 1 else one.new) for one in rows]
    names = [shorten(name, 0.4 * width) for name in names]
    left = max(text_width(name) for name in names) + 10
    half = (width - left - 16) / 2
    memory = data_axes(figure, "memory", margins=(left, 26, half + 16, 38))
    name_ticks(memory, "y", range(len(rows)), names)
    _draw_cost_changes(memory, rows, [one.counted_peak for one in rows], changes.memory_tolerance)
    time = data_axes(figure, "time", margins=(left + half + 8, 26, 8, 38))
    time.set_yticks([])
    _draw_cost_changes(time, rows, [TIME] * len(rows), changes.time_tolerance)

    overlay = Canvas(figure)
    more = len(changes.changes) - len(rows)
    title = "from old to new: " + (heads.pop() if len(heads) == 1 else "several workloads")
    title += f" ({more} more settings are not drawn)" if more else ""
    write(overlay, 6, overlay.height - 8, shorten(title, width - 10))
    peaks = " or ".join(sorted({one.counted_peak for one in rows}))
    write(overlay, left, overlay.height - 26, peaks)
    write(overlay, left + half + 8, overlay.height - 26, TIME)
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
STAGES_LEFT, STAGES_ABOVE, STAGES_BELOW, STAGES_BETWEEN, STAGES_RIGHT = (
    96,
    34,
    46,
    62,
    62,
)  # margins in points
KEY_BOX = 7


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
    figure = new_figure(size)
    has_reserved = result.peak_reserved_bytes is not None
    width = size[0] * POINTS
    inner = (width - STAGES_LEFT - STAGES_RIGHT - (STAGES_BETWEEN if has_reserved else 0)) / (
        2 if has_reserved else 1
    )
    over_right = width - STAGES_LEFT - inner
    left = data_axes(
        figure, "allocated", margins=(STAGES_LEFT, STAGES_BELOW, over_right, STAGES_ABOVE)
    )
    names = [stage.name for stage in result.stages]
    name_ticks(left, "y", range(len(names)), names)
    allocated = [stage.peak_allocated_bytes for stage in result.stages]
    head = _scaled(left, "allocated", allocated, None if has_reserved else result)
    for place, stage in enumerate(result.stages):
        _stack(left, place, stage)
    heads = [(float(STAGES_LEFT), head)]

    if has_reserved:
        begin = STAGES_LEFT + inner + STAGES_BETWEEN
        right = data_axes(
            figure, "reserved", margins=(begin, STAGES_BELOW, STAGES_RIGHT, STAGES_ABOVE)
        )
        right.set_yticks([])
        reserved = [stage.peak_reserved_bytes or 0 for stage in result.stages]
        head = _scaled(right, "reserved", reserved, result)
        for place, nbytes in enumerate(reserved):
            right.add_patch(Rectangle((0, place - 0.32), nbytes, 0.64, color=RESERVED, linewidth=0))
        heads.append((begin, head))

    canvas = Canvas(figure)
    for x, head in heads:
        write(canvas, x, canvas.height - 24, head)
    _key(canvas, result.stages)
    write_title(figure, f"{result.source}, {result.device}: the peak is in the {worst.name}")
    return figure


def _scaled(axes: Axes, kind: str, peaks: Sequence[int], judged: RunResult | None) -> str:
    """Set the range of an axis, draw bytes and limit; return what the axis shows, in words."""
    limit = None if judged is None else judged.memory_limit_bytes
    highest = max(*peaks, 1)
    shown = limit if limit is not None and limit <= 2 * highest else None
    axes.set(xlim=(0, 1.04 * max(highest, shown or 0)), ylim=(len(peaks) - 0.5, -0.5))
    unit = byte_axis(axes, "x", axes.get_xlim()[1])
    for place, nbytes in enumerate(peaks):
        is_highest = nbytes == highest
        fits = judged is None or judged.stages[place].fits is not False
        label = f" {format_bytes(nbytes)}"
        write(
            axes, _beginning(axes, nbytes, label, shown), place, label,
            fontweight="bold" if is_highest else "normal", **({} if fits else {"color": LIMIT}),
        )  # fmt: skip
    if shown is not None:
        axes.axvline(shown, color=LIMIT, linestyle=(0, (5, 3)), linewidth=1, label="limit")
    limit_words = "" if limit is None else f", limit {format_bytes(limit)}"
    return f"{unit} {kind}{limit_words}"


def _beginning(axes: Axes, nbytes: int, label: str, limit: int | None) -> int:
    """Return where the label of a bar begins: after the line of the limit if it would cross it."""
    bytes_per_point = axes.get_xlim()[1] / box_points(axes)[2]
    crosses = limit is not None and nbytes < limit < nbytes + text_width(label) * bytes_per_point
    return limit if limit is not None and crosses else nbytes


def _stack(axes: Axes, place: int, stage: StageCost) -> None:
    """Draw the bar of a stage, by what its bytes are for."""
    begin = 0
    for name in ORDER:
        nbytes = stage.bytes_by_category.get(name, 0)
        box = Rectangle(
            (begin, place - 0.32), nbytes, 0.64, facecolor=COLORS[name], linewidth=0, label=name
        )
        axes.add_patch(box)
        begin += nbytes


def _key(canvas: Canvas, stages: Sequence[StageCost]) -> None:
    """Name the colours of what is there, from left to right; what does not fit goes below."""
    there = [name for name in ORDER if any(stage.bytes_by_category.get(name) for stage in stages)]
    x, y = 8.0, 18.0
    for name in there:
        label = name.replace("_", " ")
        wide = KEY_BOX + 3 + text_width(label) + 8
        if x + wide > canvas.width:
            x, y = 8.0, y - 12
        canvas.add_artist(Rectangle((x, y - 3), KEY_BOX, KEY_BOX, color=COLORS[name], linewidth=0))
        write(canvas, x + KEY_BOX + 3, y, label)
        x += wide


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
