"""The timeline of a memory snapshot, public as `plots.snapshot_timeline`.

It draws what `open_snapshot` found and computes no memory of its own.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from memlab._util.checks import checked
from memlab._util.units import format_bytes
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
    placeholder,
    shorten,
    text_width,
    write,
)
from memlab.figures.peak import LEAST_TILE, MOST_TILES, draw_category, draw_unnamed, squarified
from memlab.figures.timeline import PHASE_TONES, area, draw_key, stairs, stroke, thin
from memlab.integrations.snapshot import Snapshot, SnapshotTimeline
from memlab.integrations.snapshot_blocks import BELOW, SKIPPED_STEPS, UNKNOWN, RunPhase
from memlab.integrations.snapshot_comparison import SnapshotComparison, signed
from memlab.trace import PHASES, Category

# From bottom to top. What is unknown has the grey of no category.
COLORS = {**{str(name): CATEGORY_COLORS[name] for name in STACK}, UNKNOWN: GRID}
LABELS = {**{str(name): CATEGORY_LABELS[name] for name in STACK}, UNKNOWN: UNKNOWN}
RUN_PHASE_TONES = {RunPhase.BUILD: 0.1, RunPhase.DATA: 0.1, RunPhase.FORWARD: 0.25,
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
        if phase in RUN_PHASE_TONES and room > 0.5:
            overlay.add_artist(
                Rectangle((left + start * width, bottom - 6), max(room - 0.5, 0.3), 4, color=INK,
                          alpha=RUN_PHASE_TONES[phase], linewidth=0)
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


# Who holds the peak of a memory snapshot, as a treemap: `plots.snapshot_peak`.
#
# Areas are bytes. Each category is a region, and each stack that allocated some of it is a
# tile, named by the person's own line. The rest of a category is "other".


@checked(size=inches)
def snapshot_peak(snapshot: Snapshot, *, size: Size = (9.0, 4.6)) -> Figure:
    """Return what holds the peak of a snapshot as nested areas: categories, and in them stacks.

    Args:
        snapshot: what `memlab.open_snapshot` returned.
        size: in inches.
    """
    peak = snapshot.peak_allocated_bytes
    if not peak:
        return placeholder("Nothing is allocated in this snapshot.", size=size)

    figure = new_figure(size)
    overlay = Canvas(figure)
    width, height = overlay.width, overlay.height
    title = f"peak {format_bytes(peak)} allocated (snapshot, device {snapshot.device})"
    write(overlay, 6, height - 9, shorten(title, size[0] * POINTS - 10))
    sizes = {name: snapshot.peak_by_category[name] for name in COLORS
             if snapshot.peak_by_category[name]}  # fmt: skip
    ranked = sorted(sizes, key=lambda name: -sizes[name])
    boxes = squarified([sizes[name] for name in ranked], (6.0, 20.0, width - 12, height - 40))
    unnamed = []
    for name, box in zip(ranked, boxes, strict=True):
        named = COLORS[name], LABELS[name]
        tiles = _tiles(snapshot, name, sizes[name])
        if not draw_category(overlay, named, box, tiles, sizes[name], peak):
            unnamed.append((*named, sizes[name]))
    draw_unnamed(overlay, unnamed)
    return figure


def _tiles(snapshot: Snapshot, category: str, nbytes: int) -> list[tuple[str, int]]:
    """Return name and bytes of the places that hold most of a category, then the rest."""
    places: dict[str, int] = {}
    for held in snapshot.peak_holdings:
        if held.category == category:
            own = held.place.split(BELOW)[0]
            places[own] = places.get(own, 0) + held.nbytes
    least = LEAST_TILE * snapshot.peak_allocated_bytes
    large = [item for item in places.items() if item[1] >= least]
    large = sorted(large, key=lambda item: -item[1])[:MOST_TILES]
    left = nbytes - sum(size for _, size in large)
    return [*large, ("other", left)] if left and large else large


# What grows from step to step in a memory snapshot: `plots.snapshot_growth`.

MOST_LINES = 5
MARKERS = "os^vD"  # colours are never alone


@checked(size=inches)
def snapshot_growth(snapshot: Snapshot, *, size: Size = (9.0, 3.0)) -> Figure:
    """Return the live bytes of each leak at the end of each step, a line each, five at most.

    Args:
        snapshot: what `memlab.open_snapshot` returned.
        size: in inches.
    """
    if not snapshot.leaks:
        among = f" in {snapshot.num_steps} steps" if snapshot.num_steps else None
        text = f"Nothing grows from step to step{among or '; no step was recognised'}."
        return placeholder(text, size=size)

    shown = snapshot.leaks[:MOST_LINES]
    figure = new_figure(size)
    axes = data_axes(figure, "growth", margins=(36, 26 + 14 * len(shown), 10, 22))
    steps = range(SKIPPED_STEPS + 1, SKIPPED_STEPS + 1 + len(shown[0].bytes_at_step_ends))
    top = max(leak.bytes_at_step_ends[-1] for leak in shown)
    axes.set(xlim=(steps[0], steps[-1]), ylim=(0, 1.08 * top))
    unit = byte_axis(axes, "y", axes.get_ylim()[1])
    overlay, width = Canvas(figure), size[0] * POINTS
    for row, leak in enumerate(shown):
        color, marker = CATEGORY_COLORS[STACK[row]], MARKERS[row]
        axes.plot(steps, leak.bytes_at_step_ends, color=color, marker=marker, markersize=4,
                  markevery=max(1, len(steps) // 12), linewidth=1.6, label=leak.place)  # fmt: skip
        y = 14 * (len(shown) - row) - 6
        line = Line2D([8, 24], [y, y], color=color, marker=marker, markersize=4, linewidth=1.6)
        overlay.add_artist(line)
        text = f"{format_bytes(leak.bytes_per_step)} a step: {leak.place}"
        write(overlay, 32, y, shorten(text, width - 40))

    write(overlay, 4, size[1] * POINTS - 8, f"{unit} held at the end of each step", color=INK)
    return figure


# What of reserved memory is in use and what is a hole: `plots.snapshot_fragmentation`.
#
# Each segment is a bar as long as its bytes; what is in use is filled. The request that
# failed is a bar of its own scale, so that one sees whether it fits a hole.

MOST_BARS = 24  # segments, the largest; more do not fit the height
FEWEST_BARS = 5  # that the height is divided by
USED = CATEGORY_COLORS[Category.PARAMETERS]


@checked(size=inches)
def snapshot_fragmentation(snapshot: Snapshot, *, size: Size = (9.0, 3.4)) -> Figure:
    """Return the segments of the caching allocator at the last out-of-memory, or else at the end.

    Of more than 24 segments the 24 largest are drawn.

    Args:
        snapshot: what `memlab.open_snapshot` returned.
        size: in inches.
    """
    moment = snapshot.out_of_memory[-1] if snapshot.out_of_memory else snapshot.fragmentation
    if moment is None or not moment.segments:
        return placeholder("This snapshot lists no segment of reserved memory.", size=size)

    shown = moment.segments[:MOST_BARS]
    request = moment.requested_bytes
    figure = new_figure(size)
    axes = data_axes(figure, "segments", margins=(6, 20, 6, 34))
    longest = max(shown[0].nbytes, request or 0)
    first = 1 if request is not None else 0
    axes.set(xlim=(0, longest), ylim=(max(len(shown) + first, FEWEST_BARS) - 0.5, -0.5), yticks=[])
    unit = byte_axis(axes, "x", longest)
    if request is not None:
        axes.barh(0, request, height=0.8, facecolor="none", edgecolor=LIMIT, hatch="////",
                  label="request")  # fmt: skip
    for row, segment in enumerate(shown, start=first):
        axes.barh(row, segment.nbytes, height=0.8, color=GRID, alpha=0.35, linewidth=0,
                  label="reserved")  # fmt: skip
        parts = [(offset, nbytes) for offset, nbytes in segment.used]
        axes.broken_barh(parts, (row - 0.4, 0.8), facecolors=USED, linewidth=0)

    overlay, width = Canvas(figure), size[0] * POINTS - 10
    when = "at the out-of-memory" if request is not None else "at the end"
    count = f"{len(shown)} largest of {len(moment.segments)}" if len(moment.segments) > len(shown) \
        else str(len(shown))  # fmt: skip
    title = f"{unit} of segments {when} ({count}): filled is in use, pale is free"
    write(overlay, 6, size[1] * POINTS - 8, shorten(title, width))
    said = f"{format_bytes(moment.free_bytes)} free in {moment.num_holes} holes, the largest " \
        f"{format_bytes(moment.largest_hole_bytes)}"  # fmt: skip
    if request is not None:
        said = f"hatched: {format_bytes(request)} requested; {said}"
    write(overlay, 6, size[1] * POINTS - 22, shorten(said, width))
    return figure


# A step of a memory snapshot over its prediction, public as `plots.snapshot_comparison`.
#
# It draws what `Snapshot.compare` found and computes no memory of its own.

COLOR = CATEGORY_COLORS[Category.ACTIVATIONS]


@checked(size=inches)
def snapshot_comparison(comparison: SnapshotComparison, *, size: Size = (9.0, 3.4)) -> Figure:
    """Return the live bytes of a step: predicted as an area, those of the snapshot as a line.

    The horizontal axis is the allocations of both sides in order, each pair at one place, so that
    the two lie over one another. Long steps are thinned to the highest place of each column, each
    side by itself, so both peaks are exact.

    Args:
        comparison: what `Snapshot.compare` returned.
        size: in inches; below 6.4 the key moves under the picture.
    """
    figure, beside = new_figure(size), size[0] >= 6.4
    more = comparison.measured_peak_bytes - comparison.predicted_peak_bytes
    rows = [
        (COLOR, "predicted", format_bytes(comparison.predicted_peak_bytes)),
        ("-", "snapshot", format_bytes(comparison.measured_peak_bytes)),
        ("", "difference", signed(more)),
    ]
    margins = (36.0, 22.0 + (0 if beside else 26), 176.0 if beside else 6.0, 36.0)
    axes = data_axes(figure, "comparison", margins=margins)
    top = max(comparison.measured_peak_bytes, comparison.predicted_peak_bytes, 1)
    axes.set(xlim=(0, 1), ylim=(0, 1.12 * top), xticks=[])
    axes.spines["bottom"].set_visible(False)
    unit = byte_axis(axes, "y", axes.get_ylim()[1])
    area(axes, *_curve(comparison.predicted), facecolor=COLOR, label="predicted")
    xs, ys = _curve(comparison.measured)
    stroke(axes, xs, ys, color=HALO, alpha=0.75, linewidth=3.2, zorder=4)
    stroke(axes, xs, ys, color=LINE, linewidth=1.4, zorder=4, label="snapshot")

    overlay = Canvas(figure)
    width = size[0] * POINTS - 8
    title = f"{unit} allocated in a step ({comparison.workload_name}, {comparison.device})"
    write(overlay, 4, size[1] * POINTS - 8, shorten(title, width))
    _mark_phases_snapshot_comparison(axes, overlay, comparison)
    _mark_difference(axes, overlay, comparison)
    draw_key(overlay, rows, beside=beside)
    return figure


def _curve(live: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    rows = thin(live)
    return stairs(rows / len(live), live[rows])


def _mark_phases_snapshot_comparison(
    axes: Axes, overlay: Canvas, comparison: SnapshotComparison
) -> None:
    """Mark phases by a strip of tones under the axis."""
    left, bottom, width, _ = box_points(axes)
    phase, count = comparison.phase, len(comparison.phase)
    begins = np.r_[0, np.flatnonzero(np.diff(phase)) + 1]
    for begin, (start, end) in zip(begins.tolist(), pairwise([*begins.tolist(), count]),
                                   strict=True):  # fmt: skip
        name, room = PHASES[phase[begin]], (end - start) / count * width
        if name in PHASE_TONES and room > 0.5:
            at = left + start / count * width
            overlay.add_artist(Rectangle((at, bottom - 6), max(room - 0.5, 0.3), 4, color=INK,
                                         alpha=PHASE_TONES[name], linewidth=0))  # fmt: skip
            if room > text_width(str(name)):
                write(overlay, at + room / 2, bottom - 14, str(name), ha="center")


def _mark_difference(axes: Axes, overlay: Canvas, comparison: SnapshotComparison) -> None:
    """Mark the higher peak, and say what differs most there."""
    higher = max(comparison.measured, comparison.predicted, key=lambda live: int(live.max()))
    x, y = int(higher.argmax()) / len(higher), int(higher.max())
    left, bottom, width, height = box_points(axes)
    stroke(axes, [x, x], [y, axes.get_ylim()[1]], color=INK, linewidth=0.7, zorder=4)
    stroke(axes, [x], [y], linestyle="", marker="o", color=INK, markersize=4, zorder=5,
           label="peak")  # fmt: skip
    first = next(iter(comparison.differences), None)
    text = f"peak {format_bytes(y)}"
    text += f", the largest difference: {first.name}" if first else ", nothing differs"
    right = overlay.width - 6
    text = shorten(text, right - left)
    start = max(left, min(left + x * width - 4, right - text_width(text)))
    write(overlay, start, bottom + height + 8, text)
