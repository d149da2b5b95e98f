"""The timeline: live bytes of one step, stacked by category. It is public as `plots.timeline`.

It draws what a result holds and computes no memory of its own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon

from memlab._util.checks import checked, choice
from memlab._util.units import format_bytes
from memlab.figures.look import (
    CATEGORY_COLORS,
    CATEGORY_LABELS,
    GRID_LINES,
    HALO,
    INK,
    LIMIT,
    LIMIT_LINE,
    LINE,
    POINTS,
    STACK,
    Margins,
    Picture,
    Size,
    box_points,
    byte_axis,
    category_names,
    data_axes,
    fitting,
    inches,
    near,
    origin,
    picture_of,
    placeholder,
    shorten,
    text_width,
    write,
)
from memlab.prediction.run_result import RunResult
from memlab.result import StepResult, signed_percent
from memlab.trace import (
    CATEGORIES,
    PHASES,
    LiveBytes,
    Phase,
    Place,
    Timeline,
    highest_of_each,
)

# What the timelines of steps and snapshots are drawn with: axes with a key, thinned curves as
# stairs, areas and lines, the phases under the axis and the peak above it.
#
# matplotlib's own functions would spend milliseconds on limits that are set already.

WIDE = 6.4 * POINTS  # a picture that is at least so wide has its key beside it
COLUMNS = 720  # about one a point of the widest figure
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Row = tuple[str, str, str]
"""Colour, name and size in a key; "-" or "--" is the colour of a line, "" of a row of text."""


def memory_axes(
    figure: Picture, label: str, top: int, key: Sequence[Row], *, lines_under: int = 0
) -> tuple[Axes, str]:
    """Return axes for bytes up to `top` over a step, 0..1, with a key; and their unit.

    So many lines stand between the names of phases and the lower edge, or the key.
    """
    is_wide = figure.width >= WIDE
    under = lines_under + (0 if is_wide else math.ceil(len(key) / 2))
    margins = 36.0, 22.0 + 13 * under, 176.0 if is_wide else 6.0, 36.0
    _draw_key(figure, key, is_beside=is_wide)
    return step_axes(figure, label, margins, 1.12 * max(top, 1))


def step_axes(figure: Picture, label: str, margins: Margins, top: float) -> tuple[Axes, str]:
    """Return axes for bytes over a step, 0..1, and their unit."""
    axes = data_axes(figure, label, margins)
    axes.set(xlim=(0, 1), xticks=[])
    axes.spines["bottom"].set_visible(False)
    return axes, byte_axis(axes, "y", top)


def _draw_key(figure: Picture, rows: Sequence[Row], *, is_beside: bool) -> None:
    """Draw the key beside the picture with a heading, or under it in two columns."""
    width = figure.width
    column = 158.0 if is_beside else (width - 24) / 2
    per_column = len(rows) if is_beside else math.ceil(len(rows) / 2)
    top = figure.height - 56 if is_beside else per_column * 13 - 5
    if is_beside:
        write(figure, width - 6, top + 15, "at the peak", ha="right")
    for i, (color, name, size) in enumerate(rows):
        x = width - 6 - column if is_beside else 6 + (i // per_column) * (column + 12)
        y = top - 14 * (i % per_column) - (6 if color[:1] in ("-", "") and is_beside else 0)
        if color.startswith("#"):
            figure.box((x, y - 4, 9, 9), color)
        elif color:
            dashes: Any = (0, (2, 1)) if color == "--" else "-"
            across = Line2D([x - 1, x + 10], [y, y], color=INK, linewidth=1.6, linestyle=dashes)
            figure.place(across)

        write(figure, x + 15, y, shorten(name, column - 20 - text_width(size)))
        write(figure, x + column, y, size, ha="right")


def thin(total: Ints) -> npt.NDArray[np.intp]:
    """Return the first highest instant of each of at most `COLUMNS` equal runs of instants."""
    return highest_of_each(total, COLUMNS)


def stairs(x: Floats, y: Ints) -> tuple[Floats, Ints]:
    """Return the corners of a curve that holds each value until the next instant, and to 1."""
    kept = np.flatnonzero(np.diff(y, prepend=y[0] - 1))
    edges = np.append(x[kept], 1.0)
    edges[0] = 0.0
    return np.repeat(edges, 2)[1:-1], np.repeat(y[kept], 2)


def area(axes: Axes, x: Floats, y: Ints, *, base: int = 0, **style: Any) -> None:
    """Fill from the curve down to `base`; `axes.fill` would spend 6 ms on limits we know."""
    corners = np.column_stack((np.r_[0, x, 1], np.r_[base, y, base]))
    patch = Polygon(corners, closed=True, linewidth=0, zorder=2, **style)
    axes.add_artist(patch).set_clip_path(axes.patch)


def stroke(axes: Axes, x: Any, y: Any, **style: Any) -> None:
    """Draw a line; `axes.plot` would spend 2 ms on limits that are set already."""
    axes.add_artist(Line2D(x, y, **style))


def draw_areas(axes: Axes, x: Floats, held: Ints, named: Sequence[tuple[str, str]]) -> None:
    """Draw what each column holds as an area on those before it, in its colour, with its name."""
    tops = held.cumsum(axis=1)
    for k, (color, name) in reversed(list(enumerate(named))):
        if held[:, k].any():
            area(axes, *stairs(x, tops[:, k]), facecolor=color, label=name)


def draw_total(
    axes: Axes, x: Floats, y: Ints, label: str, *, wider: float = 0.0, dashes: Any = "-"
) -> None:
    """Draw a line that is visible on any area, by its halo."""
    xs, ys = stairs(x, y)
    stroke(axes, xs, ys, color=HALO, alpha=0.75, linewidth=2.8 + 2 * wider, zorder=4)
    style = {"color": LINE, "linewidth": 1.2 + wider, "linestyle": dashes, "label": label}
    stroke(axes, xs, ys, zorder=4, **style)


def begins_of(*columns: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return the first instant of each stretch in which no column changes."""
    changes = [np.diff(column.astype(np.int64)) != 0 for column in columns]
    begins: npt.NDArray[np.intp] = np.r_[0, np.flatnonzero(np.logical_or.reduce(changes)) + 1]
    return begins


def mark_spans(axes: Axes, spans: Iterable[tuple[float, float, float, str]], gap: float) -> None:
    """Draw spans, 0..1, under the axis in a tone of the ink; those are named that have the room."""
    figure, (left, bottom, width, _) = picture_of(axes), box_points(axes)
    for start, end, tone, name in spans:
        room = (end - start) * width
        box = left + start * width, bottom - 6, max(room - gap, 0.3), 4.0
        figure.box(box, INK, alpha=tone)
        if name and room > text_width(name):
            write(figure, left + (start + end) / 2 * width, bottom - 14, name, ha="center")


def mark_peak(axes: Axes, x: float, y: int, texts: Sequence[str]) -> None:
    """Mark a peak, and write the first of the texts that fits above the axes, or else the last."""
    figure, (left, bottom, width, height) = picture_of(axes), box_points(axes)
    stroke(axes, [x, x], [y, axes.get_ylim()[1]], color=INK, linewidth=0.7, zorder=4)
    style = {"linestyle": "", "marker": "o", "color": INK, "markersize": 4, "label": "peak"}
    stroke(axes, [x], [y], zorder=5, **style)
    right = figure.width - 6
    text = shorten(fitting(texts, right - left) or texts[-1], right - left)
    start = max(left, min(left + x * width - 4, right - text_width(text)))
    write(figure, start, bottom + height + 8, text)


# A part of a step: one phase of one micro-batch, to be drawn by itself.
#
# Forward and backward run once for each micro-batch. Of these the one that reaches highest
# is taken, since that is where the memory of the step is decided.

PARTS = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def phase_or_none(name: str, value: Any) -> Phase | None:
    """Return the phase that an argument names; None stays None.

    Raises:
        ConfigError: it names none of `PARTS`.
    """
    phase: Phase | None = None if value is None else choice(*PARTS)(name, value)
    return phase


def part_name(timeline: Timeline, phase: Phase) -> str:
    """Return the words for a phase of its highest micro-batch: "backward of micro-batch 2 of 4"."""
    count = int(timeline.micro_batch.max(initial=0)) + 1
    if count == 1 or phase is Phase.OPTIMIZER:
        return str(phase)
    return f"{phase} of micro-batch {highest_micro_batch(timeline, phase) + 1} of {count}"


def highest_micro_batch(timeline: Timeline, phase: Phase) -> int:
    """Return the micro-batch in which a phase reaches highest; 0 if there is no such phase."""
    rows = np.flatnonzero(timeline.phase == PHASES.index(phase))
    if not len(rows):
        return 0
    return int(timeline.micro_batch[rows[timeline.total_bytes[rows].argmax()]])


def part_of(timeline: Timeline, phase: Phase) -> Timeline:
    """Return one phase of its highest micro-batch, from its first instant to its last.

    It is empty if the step has no such phase. Where the optimizer runs in backward, each of the two
    also holds what lies between its own instants of the other.
    """
    is_in = timeline.phase == PHASES.index(phase)
    if phase is not Phase.OPTIMIZER:
        is_in &= timeline.micro_batch == highest_micro_batch(timeline, phase)
    rows = np.flatnonzero(is_in)
    begin, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)

    return Timeline(
        bytes_by_category=timeline.bytes_by_category[begin:end],
        phase=timeline.phase[begin:end],
        micro_batch=np.zeros(end - begin, np.int32),  # there is but one in a part
        operator=timeline.operator[begin:end],
    )


def cut(result: StepResult, phase: Phase) -> StepResult:
    """Return the result with one part of its timeline, and the place of its peak if that is there.

    It has no timeline if the step has no such phase, and its message says so.
    """
    if result.timeline is None:
        return result
    part, place = part_of(result.timeline, phase), result.peak_place
    if not len(part):
        return replace(result, timeline=None, message=f"This step has no {phase} phase.")

    is_there = place is not None and place.phase is phase
    if place is not None and phase is not Phase.OPTIMIZER:
        is_there &= place.micro_batch == highest_micro_batch(result.timeline, phase)
    return replace(result, timeline=part, peak_place=place if is_there else None)


OPTIMIZER_SHARE = 0.2  # of the time axis, at most: a loop over parameters is long and flat
TONES_OF_STAGES = (0.25, 0.5)  # one after the other
PHASE_TONES = {Phase.DATA: 0.1, Phase.FORWARD: 0.25, Phase.BACKWARD: 0.5, Phase.OPTIMIZER: 0.8}


@checked(size=inches, only=phase_or_none)
def timeline(
    result: StepResult,
    *,
    only: str | None = None,
    limit_bytes: int | None = None,
    measured: StepResult | None = None,
    compare: StepResult | None = None,
    compare_label: str = "",
    size: Size = (9.0, 3.4),
) -> Figure:
    """Return the live bytes of one step, stacked by category, with its peak and its limit.

    The horizontal axis is the step's operators in order, its optimizer phase squeezed to a fifth.
    Long timelines are thinned to the highest instant of each column, so the peak is exact.

    Args:
        result: without a timeline, its message is shown instead.
        only: "forward", "backward" or "optimizer" to draw that phase alone, of the micro-batch in
            which it reaches highest.
        limit_bytes: drawn as a dashed line; above twice the peak it is only named.
        measured: the same step as it was measured, whose total is drawn as a line over the
            prediction that `result` is; the key says its peak and the signed error.
        compare: another result, whose total is drawn as a dashed line over its own step.
        compare_label: its name in the key; by default the settings in which it differs.
        size: in inches; below 6.4 the key moves under the picture.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> memlab.plots.timeline(result, size=(9, 3)).get_size_inches()
    array([9., 3.])
    """
    where = ""
    if only is not None and result.timeline is not None:
        phase = Phase(only)
        where = f", {part_name(result.timeline, phase)}"
        result = cut(result, phase)
        measured, compare = measured and cut(measured, phase), compare and cut(compare, phase)
    drawn = result.timeline
    if drawn is None or not len(drawn):
        return placeholder(result.message, size=size)

    figure = Picture(size)
    lines = [(r.timeline, style) for r, style in ((measured, "-"), (compare, "--"))
             if r is not None and r.timeline is not None]  # fmt: skip
    top = max(int(line.total_bytes.max()) for line in (drawn, *(line for line, _ in lines)))
    shown_limit = near(limit_bytes, top)
    key = _key_rows(result, measured, compare, compare_label)
    num_lines = int(drawn.micro_batch.max() > 0)
    highest = max(top, shown_limit or 0)
    axes, unit = memory_axes(figure, "timeline", highest, key, lines_under=num_lines)
    draw_stack(axes, drawn, positions(drawn), shown_limit)
    for line, style in lines:
        rows = thin(line.total_bytes)
        dashes: Any = (0, (4, 2)) if style == "--" else "-"
        label = "compare" if style == "--" else "measured"
        x = positions(line)[rows]
        draw_total(axes, x, line.total_bytes[rows], label, dashes=dashes)

    sources = [result] if measured is None else [result, measured]
    write(figure, 4, figure.height - 8, f"{unit} allocated ({origin(sources)}){where}")
    mark_phases(axes, drawn)
    peak = int(drawn.total_bytes.max())
    said = f"peak {format_bytes(peak)}"
    texts = [f"{said} in {place}" for place in places_in_words(result.peak_place)]
    mark_peak(axes, float(positions(drawn)[drawn.peak_index]), peak, texts or [said])
    if limit_bytes:
        counted = result.counted_peak
        what = " of reserved bytes" if counted and counted.kind == "reserved" else ""
        _mark_limit(axes, limit_bytes, what, is_shown=shown_limit is not None)
    return figure


@checked(size=inches)
def run_timeline(result: RunResult, *, size: Size = (9.0, 3.4)) -> Figure:
    """Return the live bytes of a script as it goes on, stacked by category, with its stages.

    The horizontal axis is its operators in order. The limit is a dashed line, if it is below twice
    the peak.

    Args:
        result: what `run_script` returned; without a timeline, its message is shown instead.
        size: in inches; below 6.4 the key moves under the picture.
    """
    drawn, limit = result.timeline, result.memory_limit_bytes
    if drawn is None:
        return placeholder(result.message, size=size)
    figure, peak = Picture(size), int(drawn.total_bytes.max())
    at_peak, present = drawn.peak_by_category, drawn.bytes_by_category.max(axis=0)
    key = [
        (CATEGORY_COLORS[category], CATEGORY_LABELS[category], format_bytes(at_peak[category]))
        for category in reversed(STACK)
        if present[CATEGORIES.index(category)]
    ]
    shown = near(limit, peak)
    axes, unit = memory_axes(figure, "timeline", max(peak, shown or 0), key)
    x = in_order(drawn.operator)
    draw_stack(axes, drawn, x, shown)
    write(figure, 4, figure.height - 8, f"{unit} allocated ({result.source}, {result.device})")
    begins = begins_of(drawn.stage)
    edges = [0.0, *x[begins[1:]].tolist(), 1.0]
    mark_spans(axes, [
        (begin, end, TONES_OF_STAGES[number % 2], drawn.stages[number])
        for number, begin, end in zip(drawn.stage[begins].tolist(), edges, edges[1:], strict=False)
    ], 0.7)  # fmt: skip
    stage = drawn.stages[int(drawn.stage[drawn.peak_index])]
    mark_peak(axes, float(x[drawn.peak_index]), peak, [f"peak {format_bytes(peak)} in {stage}"])
    if limit:
        what = " of reserved bytes" if result.peak_reserved_bytes is not None else ""
        _mark_limit(axes, limit, f"{what} on {result.device}", is_shown=shown is not None)
    return figure


def _key_rows(
    result: StepResult, measured: StepResult | None, compare: StepResult | None, label: str
) -> list[Row]:
    """Return the rows of the key, top to bottom: what is drawn, with its size at the peak."""
    assert result.timeline is not None
    at_peak = result.timeline.peak_by_category
    present = result.timeline.bytes_by_category.max(axis=0)
    names = category_names(result)
    rows = [
        (CATEGORY_COLORS[category], names[category], format_bytes(at_peak[category]))
        for category in reversed(STACK)
        if present[CATEGORIES.index(category)]
    ]

    if measured is not None and measured.timeline is not None:
        peak = int(measured.timeline.total_bytes.max())
        error = sum(at_peak.values()) / peak - 1
        rows += [
            ("-", f"{measured.source} peak", format_bytes(peak)),
            ("", "prediction error", signed_percent(error)),
        ]

    if compare is not None and compare.timeline is not None:
        other, mine = compare.config.to_dict(), result.config.to_dict()
        changed = [f"{name}={value}" for name, value in other.items() if value != mine[name]]
        name = label or ", ".join(changed) or str(compare.source)
        peak = int(compare.timeline.total_bytes.max())
        rows += [("--", name, ""), ("", "its peak", format_bytes(peak))]

    return rows


def in_order(operator: npt.NDArray[Any]) -> Floats:
    """Return where each instant lies, 0..1: by its operator, then by its order within that."""
    _, first, inverse, counts = np.unique(
        operator, return_index=True, return_inverse=True, return_counts=True
    )
    within = (np.arange(len(operator)) - first[inverse]) / counts[inverse]
    x: Floats = (operator - operator[0] + within) / (np.ptp(operator) + 1)
    return x


def positions(timeline: Timeline) -> Floats:
    """Return where each instant lies in the step, 0..1: by operator, then by order within it."""
    x = in_order(timeline.operator)
    others = np.flatnonzero(timeline.phase != PHASES.index(Phase.OPTIMIZER))
    last = others[-1] + 1 if len(others) else 0  # in backward there may be updates before it
    if last >= len(x) or not 0 < x[last] < 1 - OPTIMIZER_SHARE:
        return x

    begin = x[last]
    x = np.interp(x, [0, begin, 1], [0, 1 - OPTIMIZER_SHARE, 1])
    return x


def draw_stack(axes: Axes, timeline: LiveBytes, at: Floats, limit: int | None) -> None:
    """Draw the categories on one another, each instant `at` 0..1; hatch what is over the limit."""
    total = timeline.total_bytes
    rows = thin(total)
    x, columns = at[rows], [CATEGORIES.index(category) for category in STACK]
    named = [(CATEGORY_COLORS[category], CATEGORY_LABELS[category]) for category in STACK]
    draw_areas(axes, x, timeline.bytes_by_category[rows][:, columns], named)
    if limit is not None and total.max() > limit:
        xs, ys = stairs(x, total[rows])
        area(axes, xs, np.maximum(ys, limit), base=limit, facecolor="none", edgecolor=LIMIT,
             hatch="////", label="over the limit")  # fmt: skip


def places_in_words(place: Place | None) -> list[str]:
    """Return a place in words that get ever shorter."""
    if place is None:
        return []
    short = replace(place, operator="")
    if place.loss:
        return [str(short), str(replace(short, loss="", module="the loss"))]
    parts = place.module.split(".")
    tails = ["…" + ".".join(parts[i:]) for i in range(1, len(parts))]
    return [str(place), str(short), *(str(replace(short, module=tail)) for tail in tails)]


def mark_phases(axes: Axes, timeline: Timeline, *, with_micro_batches: bool = True) -> None:
    """Mark phases by a strip of tones under the axis, named where the name fits.

    Below it micro-batches are named, if there are several and they are wanted.
    """
    begins = begins_of(timeline.phase, timeline.micro_batch)
    phases = [PHASES[number] for number in timeline.phase[begins]]
    edges = [0.0, *positions(timeline)[begins[1:]].tolist(), 1.0]
    spans = list(zip(phases, edges, edges[1:], strict=False))
    names = _phase_names(spans, box_points(axes)[2])
    marked = [
        (start, end, PHASE_TONES.get(phase, 0.1), names.get(phase, str(phase)))
        for phase, start, end in spans
    ]
    mark_spans(axes, marked, 0.7)

    batches: dict[int, tuple[float, float]] = {}
    for (phase, start, end), batch in zip(spans, timeline.micro_batch[begins], strict=True):
        if phase is not Phase.OPTIMIZER:
            batches[int(batch)] = batches.get(int(batch), (start,))[0], end
    if with_micro_batches and timeline.micro_batch.max() and batches:
        _mark_micro_batches(axes, batches, below=27 if names[Phase.FORWARD] else 14)


def _phase_names(spans: Sequence[tuple[Phase, float, float]], width: float) -> dict[Phase, str]:
    """Return the longest names that fit every forward and backward; empty ones where none does."""
    pair = (Phase.FORWARD, Phase.BACKWARD)
    room = {p: min((end - start for phase, start, end in spans if phase is p), default=1)
            for p in pair}  # fmt: skip
    for names in (("forward", "backward"), ("fwd", "bwd")):
        if all(room[p] * width > text_width(name) for p, name in zip(pair, names, strict=True)):
            return dict(zip(pair, names, strict=True))
    return dict.fromkeys(pair, "")


def _mark_micro_batches(axes: Axes, spans: dict[int, tuple[float, float]], *, below: float) -> None:
    figure, (left, bottom, width, _) = picture_of(axes), box_points(axes)
    room = min(end - start for start, end in spans.values()) * width
    count = len(spans)
    named = room > text_width(f"micro-batch {count}")
    every = max(1, math.ceil(text_width(f"{count} ") / max(room, 1)))

    for batch, (start, end) in spans.items():
        stroke(axes, [end, end], axes.get_ylim(), **GRID_LINES, zorder=1.5)
        if batch % every == 0:
            text = f"micro-batch {batch + 1}" if named else str(batch + 1)
            write(figure, left + (start + end) / 2 * width, bottom - below, text, ha="center")

    if below < 27:
        begin, end = min(spans.values())[0], max(spans.values())[1]
        write(figure, left + (begin + end) / 2 * width, bottom - 27,
              f"{count} micro-batches, each forward (light) and backward", ha="center")  # fmt: skip


def _mark_limit(axes: Axes, limit: int, what: str, *, is_shown: bool) -> None:
    text, top = f"limit {format_bytes(limit)}{what}", axes.get_ylim()[1]
    # the ground holds on what lies over it
    ground = {"facecolor": HALO, "alpha": 0.75, "linewidth": 0, "pad": 1.5}
    if not is_shown:
        text = f"{text}, above this axis"
        write(axes, 0.99, 0.95 * top, text, color=LIMIT, ha="right", bbox=ground, zorder=5)
        return

    stroke(axes, [0, 1], [limit, limit], **{**LIMIT_LINE, "linewidth": 1.2}, zorder=4)
    # over the optimizer phase, where the least is live
    height = limit + 0.02 * top
    write(axes, 0.99, height, text, color=LIMIT, ha="right", va="bottom", bbox=ground)
