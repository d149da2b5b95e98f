"""What of reserved memory is in use and what is a hole: `plots.snapshot_fragmentation`.

Each segment is a bar as long as its bytes; what is in use is filled. The request that failed is a
bar of its own scale, so that one sees whether it fits a hole.
"""

from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    LIMIT,
    POINTS,
    Canvas,
    Size,
    byte_axis,
    data_axes,
    inches,
    new_figure,
    placeholder,
    shorten,
    write,
)
from memlab.snapshots.snapshot import Snapshot
from memlab.trace import Category

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
