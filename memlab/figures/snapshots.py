"""Pictures of memory snapshots, public as `plots.snapshot_*`, and of a replay: `plots.replay`.

They draw what `open_snapshot`, `Snapshot.compare` and `replay_allocations` found and compute no
memory of their own.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from memlab._util.checks import checked
from memlab._util.units import format_bytes
from memlab.figures.look import (
    CATEGORY_COLORS,
    CATEGORY_LABELS,
    GRID,
    GRID_LINES,
    LIMIT,
    STACK,
    Picture,
    Size,
    box_points,
    byte_axis,
    data_axes,
    inches,
    name_ticks,
    placeholder,
    shorten,
    write,
)
from memlab.figures.peak import LEAST_TILE, MOST_TILES, Tile, draw_map
from memlab.figures.timeline import (
    PHASE_TONES,
    Floats,
    Row,
    area,
    begins_of,
    draw_areas,
    draw_total,
    mark_peak,
    mark_spans,
    memory_axes,
    stairs,
    step_axes,
    stroke,
    thin,
)
from memlab.integrations.snapshot import Snapshot, SnapshotTimeline
from memlab.integrations.snapshot_blocks import BELOW, SKIPPED_STEPS, UNKNOWN, RunPhase
from memlab.integrations.snapshot_comparison import SnapshotComparison, signed
from memlab.memory.allocation_script import Moment
from memlab.trace import PHASES, Category, Phase

# From bottom to top. What is unknown has the grey of no category.
COLORS = {**{str(name): CATEGORY_COLORS[name] for name in STACK}, UNKNOWN: GRID}
LABELS = {**{str(name): CATEGORY_LABELS[name] for name in STACK}, UNKNOWN: UNKNOWN}
RUN_PHASE_TONES = {RunPhase.BUILD: 0.1, RunPhase.DATA: 0.1, RunPhase.FORWARD: 0.25,
               RunPhase.BACKWARD: 0.5, RunPhase.OPTIMIZER: 0.8}  # fmt: skip
MOST_STEPS = 40  # that are marked


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
    figure, timeline = Picture(size), snapshot.timeline
    reserved, peak = timeline.reserved_bytes, snapshot.peak_allocated_bytes
    top = max(peak, 0 if reserved is None else int(reserved.max()))
    axes, unit = memory_axes(figure, "snapshot", top, _key(timeline))
    rows = thin(timeline.total_bytes)
    whole = max(timeline.num_events, 1)
    x = timeline.events[rows] / whole
    columns = [timeline.categories.index(name) for name in COLORS]
    named = [(COLORS[name], LABELS[name]) for name in COLORS]
    draw_areas(axes, x, timeline.bytes_by_category[rows][:, columns], named)
    if reserved is not None:
        draw_total(axes, x, reserved[rows], "reserved")
    ends = (timeline.step_ends / whole).tolist()
    for end in ends if len(ends) <= MOST_STEPS else ():
        stroke(axes, [end, end], axes.get_ylim(), **GRID_LINES, zorder=1.5)

    device, num_events = snapshot.device, f"{snapshot.num_events:,} events"
    figure.head(f"{unit} allocated (snapshot, device {device}, {num_events})", left=4)
    begins = begins_of(timeline.phase)
    starts, phases = timeline.events[begins] / whole, map(RunPhase, timeline.phase[begins].tolist())
    _mark_phases(axes, starts, list(phases), RUN_PHASE_TONES)
    text = f"peak {format_bytes(peak)}"
    if snapshot.peak_holdings:
        text += f", the largest part by {snapshot.peak_holdings[0].place}"
    mark_peak(axes, timeline.events[timeline.peak_index] / whole, peak, [text])
    return figure


def _key(timeline: SnapshotTimeline) -> list[Row]:
    at_peak = timeline.peak_by_category
    present = dict(zip(timeline.categories, timeline.bytes_by_category.max(axis=0), strict=True))
    rows = [(COLORS[name], LABELS[name], format_bytes(at_peak[name]))
            for name in reversed(COLORS) if present[name]]  # fmt: skip
    if timeline.reserved_bytes is not None:
        rows.append(("-", "reserved", format_bytes(int(timeline.reserved_bytes.max()))))
    return rows


def _mark_phases(
    axes: Axes, starts: Floats, phases: Sequence[Phase | RunPhase], tones: Mapping[Any, float]
) -> None:
    """Mark phases by a strip of tones under the axis; a stretch below half a point is left out."""
    least = 0.5 / box_points(axes)[2]
    edges = [*starts.tolist(), 1.0]
    spans = [
        (start, end, tones[phase], phase.name.lower())
        for phase, start, end in zip(phases, edges, edges[1:], strict=False)
        if phase in tones and end - start > least
    ]
    mark_spans(axes, spans, 0.5)


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

    figure = Picture(size)
    figure.head(
        f"peak {format_bytes(peak)} allocated (snapshot, device {snapshot.device})", below=9
    )
    sizes = snapshot.peak_by_category
    parts = [
        (COLORS[name], LABELS[name], sizes[name], _tiles(snapshot, name, sizes[name]))
        for name in COLORS
        if sizes[name]
    ]
    draw_map(figure, parts, peak)
    return figure


def _tiles(snapshot: Snapshot, category: str, nbytes: int) -> list[Tile]:
    """Return name and bytes of the places that hold most of a category, then the rest."""
    places = Counter[str]()
    for held in snapshot.peak_holdings:
        if held.category == category:
            places[held.place.split(BELOW)[0]] += held.nbytes
    least = LEAST_TILE * snapshot.peak_allocated_bytes
    large = [tile for tile in places.most_common(MOST_TILES) if tile[1] >= least]
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
    figure = Picture(size)
    axes = data_axes(figure, "growth", (36, 26 + 14 * len(shown), 10, 22))
    steps = range(SKIPPED_STEPS + 1, SKIPPED_STEPS + 1 + len(shown[0].bytes_at_step_ends))
    axes.set_xlim(steps[0], steps[-1])
    unit = byte_axis(axes, "y", 1.08 * max(leak.bytes_at_step_ends[-1] for leak in shown))
    for row, leak in enumerate(shown):
        style: dict[str, Any] = {
            "color": CATEGORY_COLORS[STACK[row]], "marker": MARKERS[row], "markersize": 4,
            "linewidth": 1.6,
        }  # fmt: skip
        every = max(1, len(steps) // 12)
        axes.plot(steps, leak.bytes_at_step_ends, markevery=every, label=leak.place, **style)
        y = 14 * (len(shown) - row) - 6
        figure.place(Line2D([8, 24], [y, y], **style))
        text = f"{format_bytes(leak.bytes_per_step)} a step: {leak.place}"
        write(figure, 32, y, shorten(text, figure.width - 40))
    write(figure, 4, figure.height - 8, f"{unit} held at the end of each step")
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

    shown, request = moment.segments[:MOST_BARS], moment.requested_bytes
    figure = Picture(size)
    axes = data_axes(figure, "segments", (6, 20, 6, 34))
    first = 1 if request is not None else 0
    axes.set(ylim=(max(len(shown) + first, FEWEST_BARS) - 0.5, -0.5), yticks=[])
    unit = byte_axis(axes, "x", max(shown[0].nbytes, request or 0))
    if request is not None:
        axes.barh(0, request, height=0.8, facecolor="none", edgecolor=LIMIT, hatch="////",
                  label="request")  # fmt: skip
    for row, segment in enumerate(shown, start=first):
        axes.barh(row, segment.nbytes, height=0.8, color=GRID, alpha=0.35, linewidth=0,
                  label="reserved")  # fmt: skip
        axes.broken_barh(list(segment.used), (row - 0.4, 0.8), facecolors=USED, linewidth=0)

    when = "at the out-of-memory" if request is not None else "at the end"
    more = f" largest of {len(moment.segments)}" if len(moment.segments) > len(shown) else ""
    figure.head(f"{unit} of segments {when} ({len(shown)}{more}): filled is in use, pale is free")
    largest = format_bytes(moment.largest_hole_bytes)
    said = (
        f"{format_bytes(moment.free_bytes)} free in {moment.num_holes} holes, the largest {largest}"
    )
    if request is not None:
        said = f"hatched: {format_bytes(request)} requested; {said}"
    figure.head(said, below=22)
    return figure


# A step of a memory snapshot over its prediction: `plots.snapshot_comparison`.

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
    figure = Picture(size)
    measured, predicted = comparison.measured_peak_bytes, comparison.predicted_peak_bytes
    key = [
        (COLOR, "predicted", format_bytes(predicted)),
        ("-", "snapshot", format_bytes(measured)),
        ("", "difference", signed(measured - predicted)),
    ]
    axes, unit = memory_axes(figure, "comparison", max(measured, predicted), key)
    live = comparison.predicted
    rows = thin(live)
    area(axes, *stairs(rows / len(live), live[rows]), facecolor=COLOR, label="predicted")
    live = comparison.measured
    rows = thin(live)
    draw_total(axes, rows / len(live), live[rows], "snapshot", wider=0.2)

    step = f"{comparison.workload_name}, {comparison.device}"
    figure.head(f"{unit} allocated in a step ({step})", left=4)
    begins = begins_of(comparison.phase)
    phases = [PHASES[number] for number in comparison.phase[begins]]
    _mark_phases(axes, begins / len(comparison.phase), phases, PHASE_TONES)
    higher = max(comparison.measured, comparison.predicted, key=lambda live: int(live.max()))
    y, first = int(higher.max()), next(iter(comparison.differences), None)
    said = f"the largest difference: {first.name}" if first else "nothing differs"
    at = int(higher.argmax()) / len(higher)
    mark_peak(axes, at, y, [f"peak {format_bytes(y)}, {said}"])
    return figure


# `replay`: what the caching allocator holds after each line of a story.

HELD = {
    "allocated": ("allocated_bytes", CATEGORY_COLORS[Category.PARAMETERS]),
    "free, cannot be given back": ("non_releasable_bytes", CATEGORY_COLORS[Category.ACTIVATIONS]),
    "free, empty_cache() gives it back": ("releasable_bytes", GRID),
}  # bottom to top; together they are what is reserved
LEAST_TICK = 84.0  # points, for a line of the story


@checked(size=inches)
def replay(moments: Sequence[Moment], *, size: Size = (9.0, 2.8)) -> Figure:
    """Return what PyTorch's allocator holds after each line of a story, stacked up to the reserved.

    Args:
        moments: what `memlab.replay_allocations` returned.
        size: in inches.

    >>> import memlab
    >>> moments = memlab.replay_allocations(["a = 30 MiB", "b = 12 MiB", "del a"])
    >>> memlab.plots.replay(moments, size=(9, 2)).get_size_inches()
    array([9., 2.])
    """
    if not moments:
        return placeholder("A story without lines: nothing is allocated.", size=size)
    figure, reserved = Picture(size), [moment.reserved_bytes for moment in moments]
    axes, unit = step_axes(figure, "replay", (36.0, 44.0, 12.0, 26.0), 1.12 * max(*reserved, 1))
    held = np.array([[getattr(moment, field) for field, _ in HELD.values()] for moment in moments])
    draw_areas(axes, np.arange(len(moments)) / len(moments), held, [
        (color, name) for name, (_, color) in HELD.items()
    ])  # fmt: skip
    every = math.ceil(LEAST_TICK * len(moments) / box_points(axes)[2])  # that has the room is named
    room = every * box_points(axes)[2] / len(moments)
    places = [(place + 0.5) / len(moments) for place in range(0, len(moments), every)]
    name_ticks(axes, "x", places, [shorten(moment.line, room) for moment in moments[::every]])
    figure.swatches([(color, name) for name, (_, color) in HELD.items()], 8, line=12)
    ends = moments[-1].allocated_bytes, reserved[-1], moments[-1].non_releasable_bytes
    said = "{} allocated, {} reserved, {} of it stuck".format(*map(format_bytes, ends))
    figure.head(f"{unit} after each line, replayed; at the end {said}", left=4)
    return figure
