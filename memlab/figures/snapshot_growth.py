"""What grows from step to step in a memory snapshot: `plots.snapshot_growth`."""

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.figures.look import (
    CATEGORY_COLORS,
    INK,
    POINTS,
    STACK,
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
from memlab.snapshots.growth import SKIPPED_STEPS
from memlab.snapshots.snapshot import Snapshot

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
