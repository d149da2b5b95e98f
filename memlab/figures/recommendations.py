"""`recommendations`: what `recommend` has looked at, step time across and memory up.

The memory is the peak that counts against the limit: reserved bytes of a card, allocated bytes of a
CPU. So the line of the limit lies on the axis of the dots.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.config import StepConfig
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
from memlab.recommending.recommendations import Recommendations
from memlab.result import Source, StepResult

MARKERS = {
    "fastest that fits": "*", "fits too": "D", "too close to say": "^",
    "did not fit when measured": "X",
}  # fmt: skip
"""Of settings about which the answer says something; all others are small circles."""

IN_WORDS = {"*": "★", "D": "◆", "^": "▲", "X": "✖"}


@checked(size=inches)
def recommendations(ranked: Recommendations, *, size: Size = (7.4, 3.8)) -> Figure:
    """Return every setting that was looked at: step time across, the memory that counts up.

    The first recommendation is a star with a name, and the others are diamonds. Settings too close
    to the limit to say are triangles. What was predicted is hollow, what was measured is filled.
    A line joins the Pareto front of these: no other takes less memory in no more time, or less time
    in no more memory. Estimates of further settings are small and faint, and not in the front: some
    of them are too low, so a setting is recommended only after it has been predicted itself.

    A recommended setting above the limit fits with less cache: its peak is what it takes where
    there is room.

    Args:
        ranked: what `memlab.recommend` returned.
        size: in inches.
    """
    dots = _dots(ranked)
    if not dots:
        return placeholder(ranked.message, size=size)

    sure = [dot for dot in dots if not dot.is_small]
    front = [sure[i] for i in pareto_front([(dot.seconds, dot.nbytes) for dot in sure])]
    told = [*front, *(dot for dot in sure if dot.marker != "o")]
    fastest, slowest = min(dot.seconds for dot in dots), max(dot.seconds for dot in told)
    highest = max(dot.nbytes for dot in told)
    is_limit_shown = ranked.limit_bytes <= 2 * highest
    top = max(highest, ranked.limit_bytes * is_limit_shown)
    right = slowest + max(slowest - fastest, 0.2 * slowest)
    shown = [dot for dot in dots if dot.seconds <= right and dot.nbytes <= 1.1 * top]

    figure = new_figure(size)
    axes = data_axes(figure, "recommendations", margins=(34, 44, 10, 20))
    room = 0.12 * (right - fastest)  # for names, and for the limit's
    axes.set(xlim=(max(fastest - room, 0.0), right + room), ylim=(0, 1.15 * top))
    byte_unit, second_unit = byte_axis(axes, "y", axes.get_ylim()[1]), second_axis(axes, right)
    draw_front(axes, front)
    if is_limit_shown:
        draw_limit(axes, ranked.limit_bytes, "")
    draw_dots(axes, shown, ranked.limit_bytes if is_limit_shown else None, [front])
    _write_around(figure, ranked, shown, byte_unit, second_unit, len(dots) - len(shown))
    return figure


def _dots(ranked: Recommendations) -> list[Dot]:
    """Return a dot for each setting that has a time and a peak, those with a marker last."""
    results: dict[tuple[str, StepConfig], tuple[StepResult, str]] = {}
    for kind, marked in (
        ("estimated", ranked.estimated),
        ("predicted", ranked.tried),
        ("did not fit when measured", ranked.dropped),
        ("too close to say", [one.result for one in ranked.too_close]),
        ("fits too", [one.result for one in ranked[1:]]),
        ("fastest that fits", [one.result for one in ranked[:1]]),
    ):
        for result in marked:
            key = result.workload_name, result.config
            results.pop(key, None)  # so that it is drawn later
            results[key] = result, kind

    several = len(ranked.workloads) > 1
    dots = (_dot(result, kind, several=several) for result, kind in results.values())
    return [dot for dot in dots if dot is not None]


def _dot(result: StepResult, kind: str, *, several: bool) -> Dot | None:
    """Return the dot of a step, with its workload where there are several; None without a time."""
    peak = result.counted_peak
    if peak is None or result.step_seconds is None:
        return None
    which = f"{result.workload_name}; " if several else ""
    return Dot(
        label=f"{kind}: {which}{result.config}",
        seconds=result.step_seconds,
        nbytes=peak.nbytes,
        is_hollow=result.source is Source.PREDICTED,
        is_small=kind == "estimated",
        strength=BEATEN if kind == "estimated" else 1.0,
        name=f"{which}{_changed(result.config)}" if MARKERS.get(kind) == "*" else "",
        marker=MARKERS.get(kind, "o"),
    )


def _changed(config: StepConfig) -> str:
    """Return what a setting changes, in few words."""
    here, default = config.to_dict(), StepConfig().to_dict()
    changed = [
        value if isinstance(value, str) else f"{field}={value}"
        for field, value in here.items()
        if field != "batch_size" and value != default[field]
    ]
    return ", ".join(changed) or "as it is"


def _write_around(
    figure: Figure,
    ranked: Recommendations,
    shown: Sequence[Dot],
    byte_unit: str,
    second_unit: str,
    num_outside: int,
) -> None:
    """Write what the axes, the marks and the limit are."""
    results = [*ranked.tried, *ranked.dropped, *(one.result for one in ranked)]
    peak = next(peak for result in results if (peak := result.counted_peak))
    write_title(figure, f"peak {byte_unit} {peak.kind} ({origin(results)})")

    canvas, right = Canvas(figure), figure.get_size_inches()[0] * POINTS - 8
    write(canvas, right, 23, f"time per step, {second_unit}", ha="right")
    marks = [f"{IN_WORDS[marker]} {kind}" for kind, marker in MARKERS.items()
             if any(dot.marker == marker for dot in shown)]  # fmt: skip
    sure = {dot.is_hollow for dot in shown if not dot.is_small}
    for words, is_there in (
        ("● measured", False in sure),
        ("○ predicted", True in sure),
        ("∘ estimated", any(dot.is_small for dot in shown)),
    ):
        marks += [words] if is_there else []
    outside = [f"{num_outside} slower or larger ones not shown"] if num_outside else []
    if ranked.limit_bytes > figure.axes[0].get_ylim()[1]:
        outside.insert(0, f"limit {format_bytes(ranked.limit_bytes)}, above this picture")
    write(canvas, 6, 7, "   ".join([*marks, *outside]))
