"""The timeline: live bytes of one step, stacked by category. It is public as `plots.timeline`.

It draws what a result holds and computes no memory of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.figures.areas import area, stairs, stroke, thin
from memlab.figures.look import (
    CATEGORY_COLORS,
    CATEGORY_LABELS,
    GRID,
    HALO,
    INK,
    LIMIT,
    LINE,
    POINTS,
    STACK,
    Canvas,
    Size,
    box_points,
    byte_axis,
    data_axes,
    inches,
    new_figure,
    origin,
    placeholder,
    shorten,
    text_width,
    write,
)
from memlab.figures.parts import cut, part_name, phase_or_none
from memlab.figures.timeline_key import draw_key, key_rows
from memlab.result import StepResult
from memlab.trace import CATEGORIES, PHASES, Phase, Timeline

OPTIMIZER_SHARE = 0.2  # of the time axis, at most: a loop over parameters is long and flat
PHASE_TONES = {Phase.DATA: 0.1, Phase.FORWARD: 0.25, Phase.BACKWARD: 0.5, Phase.OPTIMIZER: 0.8}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """One phase of one micro-batch on the time axis, 0..1."""

    phase: Phase
    micro_batch: int
    start: float
    end: float


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
    if result.timeline is None or not len(result.timeline):
        return placeholder(result.message, size=size)

    lines = [(r.timeline, style) for r, style in ((measured, "-"), (compare, "--"))
             if r is not None and r.timeline is not None]  # fmt: skip
    figure, beside = new_figure(size), size[0] >= 6.4
    rows = key_rows(result, measured, compare, compare_label)
    under = (0 if beside else math.ceil(len(rows) / 2)) + bool(result.timeline.micro_batch.max())
    margins = (36.0, 22.0 + 13 * under, 176.0 if beside else 6.0, 36.0)
    axes = data_axes(figure, "timeline", margins=margins)
    every = [result.timeline, *(line for line, _ in lines)]
    top = max(int(line.total_bytes.max()) for line in every)
    shown_limit = limit_bytes if limit_bytes is not None and limit_bytes <= 2 * top else None
    axes.set(xlim=(0, 1), ylim=(0, 1.12 * max(top, shown_limit or 0, 1)))
    unit = byte_axis(axes, "y", axes.get_ylim()[1])
    draw_stack(axes, result.timeline, shown_limit)
    for line, style in lines:
        _draw_total(axes, line, style)

    overlay = Canvas(figure)
    sources = [result] if measured is None else [result, measured]
    write(overlay, 4, size[1] * POINTS - 8, f"{unit} allocated ({origin(sources)}){where}")
    mark_phases(axes, overlay, result.timeline)
    _mark_peak(axes, overlay, result)

    if limit_bytes:
        counted = result.counted_peak
        what = " of reserved bytes" if counted and counted.kind == "reserved" else ""
        _mark_limit(axes, limit_bytes, what, shown=shown_limit is not None)

    draw_key(overlay, rows, beside=beside)
    return figure


def positions(timeline: Timeline) -> npt.NDArray[np.float64]:
    """Return where each instant lies in the step, 0..1: by operator, then by order within it."""
    _, first, inverse, counts = np.unique(
        timeline.operator, return_index=True, return_inverse=True, return_counts=True
    )
    within = (np.arange(len(timeline)) - first[inverse]) / counts[inverse]
    x: npt.NDArray[np.float64]
    x = (timeline.operator - timeline.operator[0] + within) / (np.ptp(timeline.operator) + 1)
    others = np.flatnonzero(timeline.phase != PHASES.index(Phase.OPTIMIZER))
    last = others[-1] + 1 if len(others) else 0  # in backward there may be updates before it
    if last >= len(x) or not 0 < x[last] < 1 - OPTIMIZER_SHARE:
        return x

    begin = x[last]
    x = np.interp(x, [0, begin, 1], [0, 1 - OPTIMIZER_SHARE, 1])
    return x


def draw_stack(axes: Axes, timeline: Timeline, limit: int | None) -> None:
    """Draw every category's upper edge as a polygon down to zero, the highest first."""
    rows = thin(timeline.total_bytes)
    x = positions(timeline)[rows]
    columns = [CATEGORIES.index(category) for category in STACK]
    tops = timeline.bytes_by_category[rows][:, columns].cumsum(axis=1)

    for k in reversed(range(len(STACK))):
        if timeline.bytes_by_category[:, columns[k]].any():
            color, name = CATEGORY_COLORS[STACK[k]], CATEGORY_LABELS[STACK[k]]
            area(axes, *stairs(x, tops[:, k]), facecolor=color, label=name)

    if limit is not None and tops[:, -1].max() > limit:
        xs, ys = stairs(x, tops[:, -1])
        area(axes, xs, np.maximum(ys, limit), base=limit, facecolor="none", edgecolor=LIMIT,
              hatch="////", label="over the limit")  # fmt: skip


def _draw_total(axes: Axes, timeline: Timeline, style: str) -> None:
    rows = thin(timeline.total_bytes)
    xs, ys = stairs(positions(timeline)[rows], timeline.total_bytes[rows])
    stroke(axes, xs, ys, color=HALO, alpha=0.75, linewidth=2.8, zorder=4)
    dashes: Any = (0, (4, 2)) if style == "--" else "-"
    label = "compare" if style == "--" else "measured"
    stroke(axes, xs, ys, color=LINE, linewidth=1.2, linestyle=dashes, zorder=4, label=label)


def _stretches(timeline: Timeline) -> list[_Stretch]:
    """Return the phases of the step in order, with where they begin and end."""
    x = positions(timeline)
    step = np.diff(timeline.phase.astype(np.int64)) | np.diff(timeline.micro_batch)
    begins = np.r_[0, np.flatnonzero(step) + 1]
    edges = np.r_[0.0, x[begins[1:]], 1.0]

    return [
        _Stretch(
            phase=PHASES[timeline.phase[begin]],
            micro_batch=int(timeline.micro_batch[begin]),
            start=float(start),
            end=float(end),
        )
        for begin, (start, end) in zip(begins, pairwise(edges), strict=True)
    ]


def mark_phases(
    axes: Axes, overlay: Canvas, timeline: Timeline, *, with_micro_batches: bool = True
) -> None:
    """Mark phases by a strip of tones under the axis, named where the name fits.

    Below it micro-batches are named, if there are several and they are wanted.
    """
    left, bottom, width, _ = box_points(axes)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    stretches = _stretches(timeline)
    names = _phase_names(stretches, width)

    for s in stretches:
        start, room, name = left + s.start * width, (s.end - s.start) * width, str(s.phase)
        overlay.add_artist(Rectangle((start, bottom - 6), max(room - 0.7, 0.3), 4, color=INK,
                                    alpha=PHASE_TONES.get(s.phase, 0.1), linewidth=0))  # fmt: skip
        name = names.get(s.phase, name)
        if name and room > text_width(name):
            write(overlay, start + room / 2, bottom - 14, name, ha="center")

    spans: dict[int, tuple[float, float]] = {}
    for s in stretches:
        if s.phase is not Phase.OPTIMIZER:
            spans[s.micro_batch] = (spans.get(s.micro_batch, (s.start,))[0], s.end)

    if with_micro_batches and timeline.micro_batch.max() and spans:
        _mark_micro_batches(axes, overlay, spans, below=27 if names[Phase.FORWARD] else 14)


def _phase_names(stretches: Sequence[_Stretch], width: float) -> dict[Phase, str]:
    """Return the longest names that fit every forward and backward; empty ones where none does."""
    pair = (Phase.FORWARD, Phase.BACKWARD)
    room = {p: min((s.end - s.start for s in stretches if s.phase is p), default=1) for p in pair}
    for names in (("forward", "backward"), ("fwd", "bwd")):
        if all(room[p] * width > text_width(name) for p, name in zip(pair, names, strict=True)):
            return dict(zip(pair, names, strict=True))
    return dict.fromkeys(pair, "")


def _mark_micro_batches(
    axes: Axes, overlay: Canvas, spans: dict[int, tuple[float, float]], *, below: float
) -> None:
    left, bottom, width, _ = box_points(axes)
    room = min(end - start for start, end in spans.values()) * width
    count = len(spans)
    named = room > text_width(f"micro-batch {count}")
    every = max(1, math.ceil(text_width(f"{count} ") / max(room, 1)))

    for batch, (start, end) in spans.items():
        stroke(axes, [end, end], axes.get_ylim(), color=GRID, linewidth=0.5, alpha=0.45, zorder=1.5)
        if batch % every == 0:
            text = f"micro-batch {batch + 1}" if named else str(batch + 1)
            write(overlay, left + (start + end) / 2 * width, bottom - below, text, ha="center")

    if below < 27:
        begin, end = min(spans.values())[0], max(spans.values())[1]
        write(overlay, left + (begin + end) / 2 * width, bottom - 27,
              f"{count} micro-batches, each forward (light) and backward", ha="center")  # fmt: skip


def _mark_peak(axes: Axes, overlay: Canvas, result: StepResult) -> None:
    """Mark the peak and say above the picture how high it is and where it happens."""
    assert result.timeline is not None
    peak = result.timeline.peak_index
    x, y = float(positions(result.timeline)[peak]), int(result.timeline.total_bytes[peak])
    left, bottom, width, height = box_points(axes)
    stroke(axes, [x, x], [y, axes.get_ylim()[1]], color=INK, linewidth=0.7, zorder=4)
    stroke(
        axes, [x], [y], linestyle="", marker="o", color=INK, markersize=4, zorder=5, label="peak"
    )
    right = overlay.width - 6
    text = f"peak {format_bytes(y)}"

    if result.peak_place is not None:
        place = replace(result.peak_place, operator="")
        tail = ".".join(place.module.rsplit(".", 2)[-2:])
        places = (result.peak_place, place, replace(place, module=tail and f"…{tail}"))
        texts = [f"{text} in {place}" for place in places]
        text = next((t for t in texts if text_width(t) < right - left), texts[-1])

    text = shorten(text, right - left)
    start = max(left, min(left + x * width - 4, right - text_width(text)))
    write(overlay, start, bottom + height + 8, text)


def _mark_limit(axes: Axes, limit: int, what: str, *, shown: bool) -> None:
    text = f"limit {format_bytes(limit)}{what}"
    if not shown:
        write(axes, 0.99, 0.95 * axes.get_ylim()[1], f"{text}, above this axis", color=LIMIT,
              ha="right")  # fmt: skip
        return

    stroke(axes, [0, 1], [limit, limit], color=LIMIT, linestyle=(0, (5, 3)), linewidth=1.2,
          zorder=4, label="limit")  # fmt: skip
    # over the optimizer phase, where the least is live; the ground holds on what lies over it
    ground = {"facecolor": HALO, "alpha": 0.75, "linewidth": 0, "pad": 1.5}
    height = limit + 0.02 * axes.get_ylim()[1]
    write(axes, 0.99, height, text, color=LIMIT, ha="right", va="bottom", bbox=ground)
