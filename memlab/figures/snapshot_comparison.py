"""A step of a memory snapshot over its prediction, public as `plots.snapshot_comparison`.

It draws what `Snapshot.compare` found and computes no memory of its own.
"""

from itertools import pairwise

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
    HALO,
    INK,
    LINE,
    POINTS,
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
from memlab.figures.timeline import PHASE_TONES
from memlab.figures.timeline_key import draw_key
from memlab.snapshots.comparison import SnapshotComparison, signed
from memlab.trace import PHASES, Category

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
    _mark_phases(axes, overlay, comparison)
    _mark_difference(axes, overlay, comparison)
    draw_key(overlay, rows, beside=beside)
    return figure


def _curve(live: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    rows = thin(live)
    return stairs(rows / len(live), live[rows])


def _mark_phases(axes: Axes, overlay: Canvas, comparison: SnapshotComparison) -> None:
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
