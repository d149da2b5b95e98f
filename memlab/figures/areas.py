"""What the timelines draw with: thinned curves as stairs, areas and lines.

matplotlib's own functions would spend milliseconds on limits that are set already.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon

COLUMNS = 720  # about one a point of the widest figure


def thin(total: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Return the first highest instant of each of at most `COLUMNS` equal runs of instants."""
    width = -(-len(total) // COLUMNS)
    padded = np.full(-(-len(total) // width) * width, -1)
    padded[: len(total)] = total
    rows: npt.NDArray[np.intp]
    rows = np.arange(0, len(padded), width) + padded.reshape(-1, width).argmax(axis=1)
    return rows


def stairs(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the corners of a curve that holds each value until the next instant, and to 1."""
    kept = np.flatnonzero(np.diff(y, prepend=y[0] - 1))
    edges = np.append(x[kept], 1.0)
    edges[0] = 0.0
    return np.repeat(edges, 2)[1:-1], np.repeat(y[kept], 2)


def area(
    axes: Axes,
    x: npt.NDArray[np.float64],
    y: npt.NDArray[np.int64],
    *,
    base: int = 0,
    **style: Any,
) -> None:
    """Fill from the curve down to `base`; `axes.fill` would spend 6 ms on limits we know."""
    corners = np.column_stack((np.r_[0, x, 1], np.r_[base, y, base]))
    patch = Polygon(corners, closed=True, linewidth=0, zorder=2, **style)
    axes.add_artist(patch).set_clip_path(axes.patch)


def stroke(axes: Axes, x: Any, y: Any, **style: Any) -> None:
    """Draw a line; `axes.plot` would spend 2 ms on limits that are set already."""
    axes.add_artist(Line2D(x, y, **style))
