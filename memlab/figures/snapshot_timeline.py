"""The timeline of a memory snapshot, public as `plots.snapshot_timeline`.

It draws what `open_snapshot` found and computes no memory of its own.
"""

from itertools import pairwise

import numpy as np
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
    shorten,
    text_width,
    write,
)
from memlab.figures.timeline_key import draw_key
from memlab.snapshots.phases import UNKNOWN, RunPhase
from memlab.snapshots.snapshot import Snapshot, SnapshotTimeline

# From bottom to top. What is unknown has the grey of no category.
COLORS = {**{str(name): CATEGORY_COLORS[name] for name in STACK}, UNKNOWN: GRID}
LABELS = {**{str(name): CATEGORY_LABELS[name] for name in STACK}, UNKNOWN: UNKNOWN}
PHASE_TONES = {RunPhase.BUILD: 0.1, RunPhase.DATA: 0.1, RunPhase.FORWARD: 0.25,
               RunPhase.BACKWARD: 0.5, RunPhase.OPTIMIZER: 0.8}  # fmt: skip


@checked(size=inches)
def snapshot_timeline(snapshot: Snapshot, *, size: Size = (9.0, 3.4)) -> Figure:
    """Return the live bytes over the trace of a snapshot, stacked by category, with its peak.

    The horizontal axis is the trace, event by event. A line shows reserved bytes, and the strip of
    tones under the axis the phases, as far as stacks show them. Steps are marked if there are at
    most 40. Long traces are thinned to the highest instant of each column, so the peak is exact.

    Args:
        snapshot: what `memlab.open_snapshot` returned.
        size: in inches; below 6.4 the key moves under the picture.
    """
    timeline = snapshot.timeline
    figure, beside = new_figure(size), size[0] >= 6.4
    rows = _key(timeline)
    under = 0 if beside else -(-len(rows) // 2)
    margins = (36.0, 22.0 + 13 * under, 176.0 if beside else 6.0, 36.0)
    axes = data_axes(figure, "snapshot", margins=margins)
    reserved = timeline.reserved_bytes
    top = max(snapshot.peak_allocated_bytes, 0 if reserved is None else int(reserved.max()), 1)
    axes.set(xlim=(0, 1), ylim=(0, 1.12 * top), xticks=[])
    axes.spines["bottom"].set_visible(False)
    unit = byte_axis(axes, "y", axes.get_ylim()[1])
    _draw_stack(axes, timeline)
    _mark_steps(axes, timeline)

    overlay = Canvas(figure)
    title = f"{unit} allocated (snapshot, device {snapshot.device}, {snapshot.num_events:,} events)"
    write(overlay, 4, size[1] * POINTS - 8, shorten(title, size[0] * POINTS - 8))
    _mark_phases(axes, overlay, timeline)
    _mark_peak(axes, overlay, snapshot)
    draw_key(overlay, rows, beside=beside)
    return figure


def _key(timeline: SnapshotTimeline) -> list[tuple[str, str, str]]:
    at_peak = timeline.peak_by_category
    present = dict(zip(timeline.categories, timeline.bytes_by_category.max(axis=0), strict=True))
    rows = [(COLORS[name], LABELS[name], format_bytes(at_peak[name]))
            for name in reversed(COLORS) if present[name]]  # fmt: skip
    if timeline.reserved_bytes is not None:
        rows.append(("-", "reserved", format_bytes(int(timeline.reserved_bytes.max()))))
    return rows


def _draw_stack(axes: Axes, timeline: SnapshotTimeline) -> None:
    """Draw every category's upper edge down to zero, the highest first, and reserved bytes."""
    rows = thin(timeline.total_bytes)
    x = timeline.events[rows] / max(timeline.num_events, 1)
    columns = [timeline.categories.index(name) for name in COLORS]
    tops = timeline.bytes_by_category[rows][:, columns].cumsum(axis=1)
    for k, name in reversed(list(enumerate(COLORS))):
        if timeline.bytes_by_category[:, columns[k]].any():
            area(axes, *stairs(x, tops[:, k]), facecolor=COLORS[name], label=LABELS[name])
    if timeline.reserved_bytes is not None:
        xs, ys = stairs(x, timeline.reserved_bytes[rows])
        stroke(axes, xs, ys, color=HALO, alpha=0.75, linewidth=2.8, zorder=4)
        stroke(axes, xs, ys, color=LINE, linewidth=1.2, zorder=4, label="reserved")


def _mark_steps(axes: Axes, timeline: SnapshotTimeline, most: int = 40) -> None:
    for end in timeline.step_ends.tolist() if len(timeline.step_ends) <= most else ():
        x = end / max(timeline.num_events, 1)
        stroke(axes, [x, x], axes.get_ylim(), color=GRID, linewidth=0.5, alpha=0.45, zorder=1.5)


def _mark_phases(axes: Axes, overlay: Canvas, timeline: SnapshotTimeline) -> None:
    """Mark phases by a strip of tones under the axis; a stretch below half a point is left out."""
    left, bottom, width, _ = box_points(axes)
    begins = np.r_[0, np.flatnonzero(np.diff(timeline.phase)) + 1]
    edges = [*(timeline.events[begins] / max(timeline.num_events, 1)).tolist(), 1.0]
    for begin, (start, end) in zip(begins.tolist(), pairwise(edges), strict=True):
        phase, room = RunPhase(int(timeline.phase[begin])), (end - start) * width
        if phase in PHASE_TONES and room > 0.5:
            overlay.add_artist(
                Rectangle((left + start * width, bottom - 6), max(room - 0.5, 0.3), 4, color=INK,
                          alpha=PHASE_TONES[phase], linewidth=0)
            )  # fmt: skip
            name = phase.name.lower()
            if room > text_width(name):
                write(overlay, left + (start + end) / 2 * width, bottom - 14, name, ha="center")


def _mark_peak(axes: Axes, overlay: Canvas, snapshot: Snapshot) -> None:
    timeline = snapshot.timeline
    at = timeline.peak_index
    x, y = timeline.events[at] / max(timeline.num_events, 1), snapshot.peak_allocated_bytes
    left, bottom, width, height = box_points(axes)
    stroke(axes, [x, x], [y, axes.get_ylim()[1]], color=INK, linewidth=0.7, zorder=4)
    stroke(axes, [x], [y], linestyle="", marker="o", color=INK, markersize=4, zorder=5,
           label="peak")  # fmt: skip
    right = overlay.width - 6
    text = f"peak {format_bytes(y)}"
    if snapshot.peak_holdings:
        text += f", the largest part by {snapshot.peak_holdings[0].place}"
    text = shorten(text, right - left)
    start = max(left, min(left + x * width - 4, right - text_width(text)))
    write(overlay, start, bottom + height + 8, text)
