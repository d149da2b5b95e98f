"""`memory_against_time`: one dot for each run, step time across and peak allocated up.

Both axes are of one kind: the peak is of allocated bytes even where reserved bytes count against
the limit, which the line of the limit then says. Predicted and measured dots differ in their fill.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.errors import ConfigError
from memlab.figures.dots import BEATEN, Dot, draw_dots, draw_front, draw_limit, pareto_front
from memlab.figures.look import (
    POINTS,
    Canvas,
    Size,
    byte_axis,
    data_axes,
    inches,
    new_figure,
    origin,
    placeholder,
    second_axis,
    write,
    write_title,
)
from memlab.figures.runs import NO_RUNS, labelled
from memlab.result import Source, StepResult


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
        draw_front(axes, [dots[i] for i in front])
    if shown_limit is not None:
        has_cache = any(r.counted_peak and r.counted_peak.kind == "reserved" for r in results)
        draw_limit(axes, shown_limit, " of reserved bytes" if has_cache else "")
    draw_dots(axes, shown, shown_limit, [[dots[i] for i in front] for front in fronts])

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
