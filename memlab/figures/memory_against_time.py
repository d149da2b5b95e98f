"""`memory_against_time`: one dot for each run, step time across and peak allocated up.

Both axes are of one kind: the peak is of allocated bytes even where reserved bytes count against
the limit, which the line of the limit then says. Predicted and measured dots differ in their fill.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.errors import ConfigError
from memlab.figures.look import (
    LIMIT,
    POINTS,
    Canvas,
    Size,
    box_points,
    byte_axis,
    data_axes,
    inches,
    new_figure,
    origin,
    placeholder,
    second_axis,
    shorten,
    text_width,
    write,
    write_title,
)
from memlab.figures.runs import NO_RUNS, RUN, labelled
from memlab.result import Source, StepResult

BEATEN = 0.35  # how strongly a run is drawn that another one beats in memory and in time


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One result in the picture.

    Attributes:
        label: the name of the drawn dot.
        seconds: a step takes.
        nbytes: of its peak allocated.
        is_hollow: whether it was predicted.
        strength: how strongly it is drawn, 0..1.
        name: written beside it; "" for none.
        marker: of matplotlib.
    """

    label: str
    seconds: float
    nbytes: int
    is_hollow: bool
    strength: float = 1.0
    name: str = ""
    marker: str = "o"


@checked(size=inches)
def memory_against_time(
    results: Sequence[StepResult],
    *,
    labels: Sequence[str],
    pinned: Collection[int] = (),
    here: StepResult | None = None,
    neighbours: Sequence[StepResult] = (),
    size: Size = (4.4, 2.6),
) -> Figure:
    """Return one dot a run: step time across, peak allocated up; down and left is better.

    A line joins the runs of a Pareto front, those of which no other run takes less memory in no
    more time, or less time in no more memory. All others are fainter. Only runs of the same
    workload and batch size are compared, since a smaller batch does less work in its step. What was
    predicted is hollow.

    Args:
        results: those without a time or a peak are counted in words.
        labels: the name of each run.
        pinned: indices of the runs to name; the last run is always named.
        here: the prediction for a setting that was not run, named "on screen"; not in the front.
        neighbours: predictions for settings beside it, drawn small and faint; not in the front.
        size: in inches.
    """
    runs = labelled(results, labels)
    if max(pinned, default=0) >= max(len(runs), 1):
        raise ConfigError(f"pinned holds {max(pinned)}; allowed is the index of a result")
    dots = _dots(results, "run")
    fronts = _fronts(results, dots)
    names = {i: labels[i] for i in (*pinned, len(runs) - 1) if runs}
    faint = [replace(dot, strength=BEATEN) for dot in _dots(neighbours, "neighbour").values()]
    own = [replace(dot, name="on screen") for dot in _dots([here] if here else [], "here").values()]
    shown = [*faint, *_styled(dots, fronts, names), *own]
    if not shown:
        return placeholder(NO_RUNS if not runs else "No run with a time yet.", size=size)

    figure = new_figure(size)
    axes = data_axes(figure, "memory against time", margins=(34, 28, 10, 20))
    slowest, highest = max(dot.seconds for dot in shown), max(dot.nbytes for dot in shown)
    limit = next((r.memory_limit_bytes for r in reversed(results) if r.memory_limit_bytes), None)
    shown_limit = limit if limit is not None and limit <= 2 * highest else None
    axes.set(xlim=(0, 1.12 * slowest), ylim=(0, 1.15 * max(highest, shown_limit or 0)))
    byte_unit, second_unit = byte_axis(axes, "y", axes.get_ylim()[1]), second_axis(axes, slowest)
    for front in fronts:
        _draw_front(axes, [dots[i] for i in front])
    if shown_limit is not None:
        has_cache = any(r.counted_peak and r.counted_peak.kind == "reserved" for r in results)
        _draw_limit(axes, shown_limit, " of reserved bytes" if has_cache else "")
    _draw_dots(axes, shown, shown_limit, [[dots[i] for i in front] for front in fronts])

    every = [*results, *neighbours, *([here] if here else [])]
    write_title(figure, f"peak {byte_unit} allocated ({origin(every)})")
    missing = f"; {len(runs) - len(dots)} without a time" if len(dots) < len(runs) else ""
    text = f"time per step, {second_unit}{missing}"
    write(Canvas(figure), size[0] * POINTS - 8, 7, text, ha="right")
    return figure


def _fronts(results: Sequence[StepResult], dots: Mapping[int, Dot]) -> list[list[int]]:
    """Return the Pareto front of the runs of each workload and batch size, as their indices."""
    alike: dict[tuple[str, int], list[int]] = {}
    for i in dots:
        work = results[i].workload_name, results[i].config.batch_size
        alike.setdefault(work, []).append(i)
    return [
        [group[n] for n in pareto_front([(dots[i].seconds, dots[i].nbytes) for i in group])]
        for group in alike.values()
    ]


def _styled(
    dots: Mapping[int, Dot], fronts: Sequence[Sequence[int]], names: Mapping[int, str]
) -> list[Dot]:
    """Return the runs as they are drawn: beaten ones fainter, pinned ones as diamonds."""
    in_front = {i for front in fronts for i in front}
    newest = max(names, default=-1)
    return [
        replace(
            dot,
            name=names.get(i, ""),
            strength=1.0 if i in in_front else BEATEN,
            marker="D" if i in names and i != newest else "o",
        )
        for i, dot in dots.items()
    ]


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


def _dots(results: Sequence[StepResult], kind: str) -> dict[int, Dot]:
    """Return a dot for each result that has a time and a peak, by its index."""
    return {
        i: Dot(
            label=f"{kind} {i}",
            seconds=result.step_seconds,
            nbytes=result.peak_allocated_bytes,
            is_hollow=result.source is Source.PREDICTED,
        )
        for i, result in enumerate(results)
        if result.step_seconds is not None and result.peak_allocated_bytes is not None
    }


def _draw_front(axes: Axes, front: Sequence[Dot]) -> None:
    """Draw the front as stairs: whatever lies above them is beaten by a run on them."""
    if len(front) > 1:
        axes.plot([dot.seconds for dot in front], [dot.nbytes for dot in front], color=RUN,
                  drawstyle="steps-post", linewidth=1, alpha=0.5, zorder=2, label="Pareto front",
                  )  # fmt: skip


def _draw_limit(axes: Axes, limit: int, what: str) -> None:
    axes.axhline(limit, color=LIMIT, linestyle=(0, (5, 3)), linewidth=1, label="limit")
    write(axes, 0, limit, f" limit {format_bytes(limit)}{what}", color=LIMIT, va="bottom")


def _draw_dots(
    axes: Axes, dots: Sequence[Dot], limit: int | None, fronts: Sequence[Sequence[Dot]]
) -> None:
    """Draw the dots; a name goes where it covers least, the right side of its dot first."""
    _, _, width, height = box_points(axes)
    per_x, per_y = width / axes.get_xlim()[1], height / axes.get_ylim()[1]
    taken = [(dot.seconds * per_x - 4, dot.nbytes * per_y, 8.0) for dot in dots]
    if limit is not None:
        taken.append((0.0, limit * per_y, width))
    for front in fronts:
        taken += _along([(dot.seconds * per_x, dot.nbytes * per_y) for dot in front])

    for dot in sorted(dots, key=lambda dot: bool(dot.name)):
        axes.plot([dot.seconds], [dot.nbytes], dot.marker, markersize=7 if dot.name else 4.5,
                  markerfacecolor="none" if dot.is_hollow else RUN, markeredgecolor=RUN, zorder=3,
                  markeredgewidth=1.4 if dot.is_hollow else 0, alpha=dot.strength,
                  label=dot.label)  # fmt: skip
        if not dot.name:
            continue
        text = shorten(dot.name, 0.45 * width)
        wide = text_width(text)
        spots = [(8.0, 0.0), (-8.0 - wide, 0.0), (-wide / 2, 11.5), (-wide / 2, -11.5)]
        px, py = dot.seconds * per_x, dot.nbytes * per_y
        dx, dy = min(
            spots, key=lambda spot: _crowding(px + spot[0], py + spot[1], wide, taken, width)
        )
        taken.append((px + dx, py + dy, wide))
        write(axes, (px + dx) / per_x, (py + dy) / per_y, text)


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
    """Return how many names a name here would cover, and ten more if it leaves the axes."""
    covered = sum(
        abs(y - other_y) < 11 and x < other_x + other_wide and other_x < x + wide
        for other_x, other_y, other_wide in taken
    )
    return covered + 10 * (x < 0 or x + wide > room + 8)
