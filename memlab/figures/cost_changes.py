"""What changed between two sets of results, a row each: `plots.cost_changes`."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.changes.cost_changes import CostChanges
from memlab.changes.judging import TIME, CostChange
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    INK,
    LIMIT,
    POINTS,
    Canvas,
    Size,
    data_axes,
    inches,
    name_ticks,
    new_figure,
    placeholder,
    shorten,
    text_width,
    write,
)
from memlab.result import signed_percent
from memlab.trace import Category

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
    _draw(memory, rows, [one.counted_peak for one in rows], changes.memory_tolerance)
    time = data_axes(figure, "time", margins=(left + half + 8, 26, 8, 38))
    time.set_yticks([])
    _draw(time, rows, [TIME] * len(rows), changes.time_tolerance)

    overlay = Canvas(figure)
    more = len(changes.changes) - len(rows)
    title = "from old to new: " + (heads.pop() if len(heads) == 1 else "several workloads")
    title += f" ({more} more settings are not drawn)" if more else ""
    write(overlay, 6, overlay.height - 8, shorten(title, width - 10))
    peaks = " or ".join(sorted({one.counted_peak for one in rows}))
    write(overlay, left, overlay.height - 26, peaks)
    write(overlay, left + half + 8, overlay.height - 26, TIME)
    return figure


def _draw(axes: Axes, rows: Sequence[CostChange], names: Sequence[str], tolerance: float) -> None:
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
