"""`run`: the peak of each stage of a run as a bar, with the limit; the stage of the peak is named.

Left: what is allocated, stacked by what it is for. Right, for a card: what the caching allocator
holds, which counts against the limit. Each has an axis of its own.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.figures.look import (
    CATEGORY_COLORS,
    LIMIT,
    POINTS,
    STACK,
    Canvas,
    Size,
    box_points,
    byte_axis,
    data_axes,
    inches,
    name_ticks,
    new_figure,
    placeholder,
    text_width,
    write,
    write_title,
)
from memlab.stages.run_result import RunResult, StageCost
from memlab.trace import Category

# what only runs have; each is also named by the key, and has its place in the stack
OF_RUNS = {"EMA weights": "#5b6ea8", "kept outputs": "#c9643c", "KV cache": "#7d5a44"}
COLORS = {**{str(category): CATEGORY_COLORS[category] for category in STACK}, **OF_RUNS}
ORDER = (str(Category.PARAMETERS), "EMA weights", *map(str, STACK[1:]), "kept outputs", "KV cache")
RESERVED = CATEGORY_COLORS[Category.BUFFERS]
LEFT, ABOVE, BELOW, BETWEEN, RIGHT = 96, 34, 46, 62, 62  # margins in points
KEY_BOX = 7


@checked(size=inches)
def run(result: RunResult, *, size: Size = (7.0, 3.0)) -> Figure:
    """Return the peak of each stage of a run as a bar, with the limit as a dashed line.

    Args:
        result: what `predict_run` or `measure_run` returned.
        size: in inches.
    """
    worst = result.worst
    if worst is None:
        return placeholder(result.message, size=size)
    figure = new_figure(size)
    has_reserved = result.peak_reserved_bytes is not None
    width = size[0] * POINTS
    inner = (width - LEFT - RIGHT - (BETWEEN if has_reserved else 0)) / (2 if has_reserved else 1)
    over_right = width - LEFT - inner
    left = data_axes(figure, "allocated", margins=(LEFT, BELOW, over_right, ABOVE))
    names = [stage.name for stage in result.stages]
    name_ticks(left, "y", range(len(names)), names)
    allocated = [stage.peak_allocated_bytes for stage in result.stages]
    head = _scaled(left, "allocated", allocated, None if has_reserved else result)
    for place, stage in enumerate(result.stages):
        _stack(left, place, stage)
    heads = [(float(LEFT), head)]

    if has_reserved:
        begin = LEFT + inner + BETWEEN
        right = data_axes(figure, "reserved", margins=(begin, BELOW, RIGHT, ABOVE))
        right.set_yticks([])
        reserved = [stage.peak_reserved_bytes or 0 for stage in result.stages]
        head = _scaled(right, "reserved", reserved, result)
        for place, nbytes in enumerate(reserved):
            right.add_patch(Rectangle((0, place - 0.32), nbytes, 0.64, color=RESERVED, linewidth=0))
        heads.append((begin, head))

    canvas = Canvas(figure)
    for x, head in heads:
        write(canvas, x, canvas.height - 24, head)
    _key(canvas, result.stages)
    write_title(figure, f"{result.source}, {result.device}: the peak is in the {worst.name}")
    return figure


def _scaled(axes: Axes, kind: str, peaks: Sequence[int], judged: RunResult | None) -> str:
    """Set the range of an axis, draw bytes and limit; return what the axis shows, in words."""
    limit = None if judged is None else judged.memory_limit_bytes
    highest = max(*peaks, 1)
    shown = limit if limit is not None and limit <= 2 * highest else None
    axes.set(xlim=(0, 1.04 * max(highest, shown or 0)), ylim=(len(peaks) - 0.5, -0.5))
    unit = byte_axis(axes, "x", axes.get_xlim()[1])
    for place, nbytes in enumerate(peaks):
        is_highest = nbytes == highest
        fits = judged is None or judged.stages[place].fits is not False
        label = f" {format_bytes(nbytes)}"
        write(
            axes, _beginning(axes, nbytes, label, shown), place, label,
            fontweight="bold" if is_highest else "normal", **({} if fits else {"color": LIMIT}),
        )  # fmt: skip
    if shown is not None:
        axes.axvline(shown, color=LIMIT, linestyle=(0, (5, 3)), linewidth=1, label="limit")
    limit_words = "" if limit is None else f", limit {format_bytes(limit)}"
    return f"{unit} {kind}{limit_words}"


def _beginning(axes: Axes, nbytes: int, label: str, limit: int | None) -> int:
    """Return where the label of a bar begins: after the line of the limit if it would cross it."""
    bytes_per_point = axes.get_xlim()[1] / box_points(axes)[2]
    crosses = limit is not None and nbytes < limit < nbytes + text_width(label) * bytes_per_point
    return limit if limit is not None and crosses else nbytes


def _stack(axes: Axes, place: int, stage: StageCost) -> None:
    """Draw the bar of a stage, by what its bytes are for."""
    begin = 0
    for name in ORDER:
        nbytes = stage.bytes_by_category.get(name, 0)
        box = Rectangle(
            (begin, place - 0.32), nbytes, 0.64, facecolor=COLORS[name], linewidth=0, label=name
        )
        axes.add_patch(box)
        begin += nbytes


def _key(canvas: Canvas, stages: Sequence[StageCost]) -> None:
    """Name the colours of what is there, from left to right; what does not fit goes below."""
    there = [name for name in ORDER if any(stage.bytes_by_category.get(name) for stage in stages)]
    x, y = 8.0, 18.0
    for name in there:
        label = name.replace("_", " ")
        wide = KEY_BOX + 3 + text_width(label) + 8
        if x + wide > canvas.width:
            x, y = 8.0, y - 12
        canvas.add_artist(Rectangle((x, y - 3), KEY_BOX, KEY_BOX, color=COLORS[name], linewidth=0))
        write(canvas, x + KEY_BOX + 3, y, label)
        x += wide
