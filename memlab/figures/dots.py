"""Dots in a picture of memory against time: their front, the limit, and names that cover little."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes

from memlab.arguments.units import format_bytes
from memlab.figures.look import LIMIT, box_points, shorten, text_width, write
from memlab.figures.runs import RUN

BEATEN = 0.35  # how strongly a dot is drawn that another one beats in memory and in time


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One result in the picture.

    Attributes:
        label: the name of the drawn dot.
        seconds: a step takes.
        nbytes: of its peak allocated.
        is_hollow: whether it was predicted.
        is_small: whether it is drawn small, as what matters less than the others.
        strength: how strongly it is drawn, 0..1.
        name: written beside it; "" for none.
        marker: of matplotlib.
    """

    label: str
    seconds: float
    nbytes: int
    is_hollow: bool
    is_small: bool = False
    strength: float = 1.0
    name: str = ""
    marker: str = "o"

    @property
    def width(self) -> float:
        """The width in points."""
        if self.is_small:
            return 3.0
        if self.marker == "*":
            return 12.0  # its points are thin
        return 7.0 if self.name else 4.5


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point beats, by their first coordinate.

    A point beats another if it is smaller in one coordinate and no larger in the other. Equal
    points are all in the front.

    >>> pareto_front([(1, 9), (2, 5), (3, 7), (4, 5)])
    [0, 1]
    """

    def is_beaten(x: float, y: float) -> bool:
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)

    front = [i for i, (x, y) in enumerate(points) if not is_beaten(x, y)]
    return sorted(front, key=lambda i: points[i])


def draw_front(axes: Axes, front: Sequence[Dot]) -> None:
    """Draw the front as stairs: whatever lies above them is beaten by a run on them."""
    if len(front) > 1:
        axes.plot([dot.seconds for dot in front], [dot.nbytes for dot in front], color=RUN,
                  drawstyle="steps-post", linewidth=1, alpha=0.5, zorder=2, label="Pareto front",
                  )  # fmt: skip


def draw_limit(axes: Axes, limit: int, what: str) -> None:
    """Draw the limit as a line; `what` says of which bytes it is."""
    axes.axhline(limit, color=LIMIT, linestyle=(0, (5, 3)), linewidth=1, label="limit")
    write(
        axes,
        axes.get_xlim()[0],
        limit,
        f" limit {format_bytes(limit)}{what}",
        color=LIMIT,
        va="bottom",
    )


def draw_dots(
    axes: Axes, dots: Sequence[Dot], limit: int | None, fronts: Sequence[Sequence[Dot]]
) -> None:
    """Draw the dots; a name goes where it covers least, the right side of its dot first."""
    _, _, width, height = box_points(axes)
    low, high = axes.get_xlim()
    per_x, per_y = width / (high - low), height / axes.get_ylim()[1]
    taken = [
        ((dot.seconds - low) * per_x - 4, dot.nbytes * per_y, 8.0)
        for dot in dots
        if not dot.is_small  # a name may cover those
    ]
    if limit is not None:
        taken.append((0.0, limit * per_y, width))
    for front in fronts:
        taken += _along([((dot.seconds - low) * per_x, dot.nbytes * per_y) for dot in front])

    for dot in sorted(dots, key=lambda dot: bool(dot.name)):
        axes.plot([dot.seconds], [dot.nbytes], dot.marker, markersize=dot.width,
                  markerfacecolor="none" if dot.is_hollow else RUN, markeredgecolor=RUN, zorder=3,
                  markeredgewidth=1.4 if dot.is_hollow else 0, alpha=dot.strength,
                  label=dot.label)  # fmt: skip
        if not dot.name:
            continue
        text = shorten(dot.name, 0.45 * width)
        wide = text_width(text)
        spots = [(x, 0.0) for x in (8.0, -8.0 - wide)]
        spots += [(x, y) for x in (-wide / 2, 8.0, -8.0 - wide) for y in (11.5, -11.5)]
        px, py = (dot.seconds - low) * per_x, dot.nbytes * per_y
        dx, dy = min(
            spots, key=lambda spot: _crowding(px + spot[0], py + spot[1], wide, taken, width)
        )
        taken.append((px + dx, py + dy, wide))
        write(axes, low + (px + dx) / per_x, (py + dy) / per_y, text)


def _along(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Return places along the stairs between these points, in points, that a name would cover."""
    found = []
    for (x, y), (next_x, next_y) in pairwise(corners):
        found.append((x, y, next_x - x))
        rows = range(int(min(y, next_y)), int(max(y, next_y)) + 1, 5)
        found += [(next_x, float(row), 1.0) for row in rows]
    return found


def _crowding(
    x: float, y: float, wide: float, taken: Sequence[tuple[float, float, float]], room: float
) -> int:
    """Return how many names a name here would cover, and many more if it leaves the axes."""
    covered = sum(
        abs(y - other_y) < 11 and x < other_x + other_wide and other_x < x + wide
        for other_x, other_y, other_wide in taken
    )
    return covered + 100 * (x < 0 or x + wide > room + 8)
