"""The graph of a step, a row each node: `plots.step_graph`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc

from memlab._util.checks import checked
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    LIMIT,
    Picture,
    Size,
    axes_beside,
    box_points,
    byte_axis,
    inches,
    name_ticks,
    placeholder,
    room_of,
    second_axis,
    shorten,
    text_width,
    write,
)
from memlab.prediction.graph_table import GraphRow, GraphTable, NodeKind
from memlab.result import Outcome
from memlab.trace import Category

MOST_ROWS = 40
MOST_SINGLE = 30  # with more, the nodes of a block are one row
ARCS = 34  # points at the left, for what is read from further above
SAVED, TIME = CATEGORY_COLORS[Category.ACTIVATIONS], CATEGORY_COLORS[Category.PARAMETERS]
TALL = 0.72


@checked(size=inches)
def step_graph(table: GraphTable, *, size: Size = (9.0, 7.0)) -> Figure:
    """Return the nodes of a step from top to bottom, with their bytes and their time.

    A filled bar is what a node saves for backward, a hollow one what it holds when it ends. The bar
    of a collective is hatched: the bytes of its tensors. Beside it are the seconds of forward
    (filled) and of backward (hollow), with the ranks that take part in a collective. An arc at the
    left is a value that a node further down reads. Nodes that take neither memory nor time are left
    out. With more than 30 rows the nodes of each block, such as `layers.3`, are one.

    Args:
        table: what `memlab.graph_table` returned.
        size: in inches.

    >>> import memlab
    >>> workload = memlab.workloads.get("plain-mlp")
    >>> table = memlab.graph_table(workload, memlab.StepConfig(batch_size=4), "t4")
    >>> step_graph(table).get_size_inches()
    array([9., 7.])
    """
    if table.outcome is not Outcome.OK:
        return placeholder(table.message, size=size)

    rows = _without_empty(table.rows)
    if len(rows) > MOST_SINGLE:
        rows = _folded(rows)
    shown, figure = rows[:MOST_ROWS], Picture(size)
    names = [shorten(row.name, 0.3 * figure.width) for row in shown]
    left, panes = room_of(names) + ARCS, ["bytes", "seconds"]
    memory, times = axes_beside(figure, panes, (left, 18, 8, 38), between=14)
    name_ticks(memory, "y", range(len(shown)), names)
    for axes in (memory, times):
        axes.set_ylim(len(shown) - 0.4, -0.6)
    unit, second = _draw_bytes(memory, shown), _draw_times(times, shown)
    _draw_arcs(memory, shown, left - ARCS)

    more = len(rows) - len(shown)
    title = f"{table.workload_name}, {table.device}: by {table.traced_by}"
    figure.head(title + (f" ({more} more rows are not drawn)" if more else ""))
    payload = ", payload (//)" if any(row.payload_bytes for row in shown) else ""
    heads = f"saved, held (hollow){payload}, {unit}", f"forward, backward (hollow), {second}"
    for axes, head in zip((memory, times), heads, strict=True):
        start, _, wide, _ = box_points(axes)
        write(figure, start, figure.height - 26, shorten(head, wide))
    return figure


def _draw_bytes(axes: Axes, rows: Sequence[GraphRow]) -> str:
    largest = max([1, *(max(row.kept_bytes, row.payload_bytes) for row in rows)])
    unit = byte_axis(axes, "x", 1.05 * largest, highest=largest)
    for place, row in enumerate(rows):
        if row.kind is NodeKind.COLLECTIVE:
            _hollow(axes, place, row.payload_bytes, LIMIT, hatch="////")
            continue
        _hollow(axes, place, row.kept_bytes, SAVED)
        axes.barh(place, row.saved_bytes, height=TALL, color=SAVED, linewidth=0)
    return unit


def _hollow(axes: Axes, place: int, end: float, color: str, **style: Any) -> None:
    axes.barh(place, end, height=TALL, facecolor="none", edgecolor=color, linewidth=0.8, **style)


def _draw_times(axes: Axes, rows: Sequence[GraphRow]) -> str:
    slowest = max([1e-9, *(row.seconds or 0.0 for row in rows)])
    axes.set_xlim(0, 1.05 * slowest)
    unit = second_axis(axes, slowest)
    for place, row in enumerate(rows):
        if row.forward_seconds is None or row.backward_seconds is None:
            ranks = f", ranks {row.group}" if row.ranks else ""
            write(axes, 0.0, place, f"not known{ranks}", style="italic")
            continue
        axes.barh(place, row.forward_seconds, height=TALL, color=TIME, linewidth=0)
        _hollow(axes, place, row.backward_seconds, TIME, left=row.forward_seconds)
        if row.ranks:
            _name_ranks(axes, place, row)
    return unit


def _name_ranks(axes: Axes, place: int, row: GraphRow) -> None:
    """Write which ranks take part beside the bar of a collective, or over a long one."""
    text, most = f"ranks {row.group}", axes.get_xlim()[1]
    room = text_width(text) / max(box_points(axes)[2], 1.0) * most
    end = row.seconds or 0.0
    start = end + 0.01 * most if end + room < most else max(most - room, 0.0)
    write(axes, start, place, text)


def _draw_arcs(axes: Axes, rows: Sequence[GraphRow], points: float) -> None:
    """Draw an arc from each row to those that it reads, unless that is the row above."""
    per_point = axes.get_xlim()[1] / box_points(axes)[2]
    right = -(points + 4) * per_point
    for place, row in enumerate(rows):
        for read in row.reads:
            if read >= place - 1 or rows[read].kind is NodeKind.BATCH:
                continue
            reach = min(1.0, 0.25 + (place - read) / len(rows)) * (ARCS - 8) * per_point
            axes.add_patch(
                Arc((right, (place + read) / 2), 2 * reach, place - read,
                    theta1=90, theta2=270, color=GRID, linewidth=0.9, clip_on=False)
            )  # fmt: skip


def _without_empty(rows: Sequence[GraphRow]) -> list[GraphRow]:
    """Return the rows that hold or take something; what read another row reads what that read."""
    kept: list[GraphRow] = []
    places: list[set[int]] = []  # of what a row stands for, among those that are kept
    for row in rows:  # rows read those before them
        reads = {place for read in row.reads if read < len(places) for place in places[read]}
        if row.kept_bytes or row.payload_bytes or row.seconds:
            kept.append(replace(row, reads=tuple(sorted(reads))))
            reads = {len(kept) - 1}
        places.append(reads)
    return kept


def _folded(rows: Sequence[GraphRow]) -> list[GraphRow]:
    """Return the rows with those in a row of one block as one; collectives stay."""
    groups: list[list[GraphRow]] = []
    group_of: list[int] = []
    for row in rows:
        block = _block_of(row)
        if not (groups and block and _block_of(groups[-1][0]) == block):
            groups.append([])
        groups[-1].append(row)
        group_of.append(len(groups) - 1)

    found = []
    for index, group in enumerate(groups):
        reads = tuple(sorted({group_of[read] for row in group for read in row.reads} - {index}))
        found.append(replace(_sum_of(group), reads=reads))
    return found


def _sum_of(rows: Sequence[GraphRow]) -> GraphRow:
    first = rows[0]
    if len(rows) == 1:
        return first
    return replace(
        first,
        name=f"{_block_of(first)} ({len(rows)} nodes)",
        kept_bytes=sum(row.kept_bytes for row in rows),
        saved_bytes=sum(row.saved_bytes for row in rows),
        forward_seconds=sum(row.forward_seconds or 0.0 for row in rows),
        backward_seconds=sum(row.backward_seconds or 0.0 for row in rows),
    )


def _block_of(row: GraphRow) -> str:
    """Return the path of the repeated block that a node is in: up to the first number in it."""
    if row.kind is NodeKind.COLLECTIVE:
        return ""
    parts = row.module.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])
