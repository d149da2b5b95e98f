"""Pictures of results: `StepResult` in, `matplotlib.figure.Figure` out.

Figures belong to nobody but the caller: no pyplot, no global state, so they can be drawn in any
thread. Sizes on an axis are bytes in the data and binary units in the tick labels. Colours are
never alone: order, labels, hatches and markers say the same. How figures look and are exported is
in `figures/look.py`.

>>> import memlab
>>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
>>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
>>> memlab.plots.to_png(memlab.plots.peak_bar(result))[1:4]
b'PNG'
"""

from collections.abc import Collection, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memlab.arguments.checks import checked, choice
from memlab.arguments.units import format_bytes
from memlab.config import Precision, StepConfig
from memlab.errors import ConfigError
from memlab.figures.ladder import waterfall
from memlab.figures.look import (
    CATEGORY_COLORS,
    CATEGORY_LABELS,
    FONT,
    FONT_SIZE,
    GRID,
    INK,
    LIMIT,
    POINTS,
    STACK,
    Size,
    box_points,
    byte_axis,
    canvas,
    data_axes,
    inches,
    name_ticks,
    new_figure,
    origin,
    placeholder,
    second_axis,
    shorten,
    text_width,
    to_png,
    to_svg,
    write,
    write_title,
)
from memlab.figures.peak_map import peak_map, text_on
from memlab.figures.timeline import timeline
from memlab.result import Outcome, StepResult
from memlab.trace import Category

__all__ = [
    "CATEGORY_COLORS",
    "CATEGORY_LABELS",
    "heat_map",
    "memory_against_time",
    "peak_bar",
    "peak_map",
    "placeholder",
    "step_times",
    "timeline",
    "to_png",
    "to_svg",
    "varying_fields",
    "waterfall",
]

RUN = CATEGORY_COLORS[Category.PARAMETERS]
NO_RUNS = "No run yet."
FIELD = choice(*(field.name for field in fields(StepConfig)))
MOST_BARS = 12  # more do not fit the height


@checked(size=inches)
def peak_bar(
    result: StepResult, *, limit_bytes: int | None = None, size: Size = (9.0, 0.9)
) -> Figure:
    """Return the peak as one bar, stacked by category, against the limit.

    What lies beyond the limit is hatched; what is free below it is pale. On CUDA reserved bytes are
    held against the limit, and what of them is not allocated follows in grey.
    """
    peak, parts = result.peak_allocated_bytes, result.peak_by_category
    if peak is None or parts is None:
        return placeholder(result.message, size=size)
    figure = new_figure(size)
    axes = data_axes(figure, "peak", margins=(6, 16, 6, 18))
    held = peak if result.peak_reserved_bytes is None else result.peak_reserved_bytes
    axes.set(xlim=(0, max(held, limit_bytes or 0, 1)), ylim=(0, 1), yticks=[], xticks=[])
    axes.spines["bottom"].set_visible(False)
    points_per_byte = box_points(axes)[2] / axes.get_xlim()[1]
    start, unnamed = 0, {}
    for category in STACK:
        num_bytes = parts.get(category, 0)
        if not num_bytes:
            continue
        color, name = CATEGORY_COLORS[category], CATEGORY_LABELS[category]
        axes.barh(0.5, num_bytes, left=start, height=1, color=color, label=name)
        texts = (f"{name} {format_bytes(num_bytes)}", name)
        room = num_bytes * points_per_byte - 4
        text = next((text for text in texts if text_width(text) < room), None)
        if text:
            write(axes, start + num_bytes / 2, 0.48, text, ha="center", color=text_on(color))
        else:
            unnamed[num_bytes, color] = f"{name} {format_bytes(num_bytes)}"
        start += num_bytes
    if held > peak:
        axes.barh(0.5, held - peak, left=peak, height=1, color=GRID, label="reserved alone")
        unnamed[held - peak, GRID] = f"reserved, not allocated {format_bytes(held - peak)}"
    overlay, width, top = canvas(figure), size[0] * POINTS, size[1] * POINTS - 8
    reserved = "" if result.peak_reserved_bytes is None else f", {format_bytes(held)} reserved"
    text = f"peak {format_bytes(peak)} allocated{reserved} ({origin([result])})"
    write(overlay, 6, top, text)
    if limit_bytes is not None:
        _draw_limit_on_bar(axes, overlay, held, limit_bytes, width - text_width(text))
    _draw_unnamed(overlay, [(c, unnamed[n, c]) for n, c in sorted(unnamed, reverse=True)])
    return figure


def _draw_limit_on_bar(axes: Axes, overlay: Axes, peak: int, limit: int, room: float) -> None:
    over = peak > limit
    style: dict[str, Any] = {"label": "free", "facecolor": INK, "alpha": 0.14}
    if over:
        style = {
            "label": "over the limit",
            "facecolor": "none",
            "edgecolor": LIMIT,
            "hatch": "////",
        }
    axes.barh(0.5, abs(limit - peak), left=min(peak, limit), height=1, linewidth=0, **style)
    axes.axvline(limit, color=LIMIT, linestyle=(0, (4, 2)), linewidth=1.6, label="limit",
                 clip_on=False)  # fmt: skip
    left = f"{format_bytes(abs(limit - peak))} {'over' if over else 'free'}"
    texts = (f"{left}{'' if over else ' below'} the limit of {format_bytes(limit)}", left, "")
    text = next(text for text in texts if text_width(text) < room or not text)
    width, height = overlay.get_xlim()[1], overlay.get_ylim()[1]
    write(overlay, width - 6, height - 8, text, ha="right", color=LIMIT if over else INK)


def _draw_unnamed(overlay: Axes, parts: Sequence[tuple[str, str]]) -> None:
    """Name under the bar what was too narrow to be named in it, the largest first, as fits."""
    x = 6.0
    for color, text in parts:
        if x + 14 + text_width(text) > overlay.get_xlim()[1]:
            break
        overlay.add_artist(Rectangle((x, 4), 8, 8, facecolor=color, linewidth=0))
        write(overlay, x + 12, 7.5, text)
        x += 24 + text_width(text)


@checked(size=inches)
def step_times(
    results: Sequence[StepResult], *, labels: Sequence[str], size: Size = (4.4, 2.6)
) -> Figure:
    """Return a bar of the median step time for each run, its repeats as dots.

    A run without a time gets its outcome in words. Of more than 12 runs the last 12 are shown.
    """
    runs = _labelled(results, labels)
    if not runs:
        return placeholder(NO_RUNS, size=size)
    shown = runs[-MOST_BARS:]
    figure = new_figure(size)
    names = [shorten(label, 0.3 * size[0] * POINTS) for _, label in shown]
    left = max(text_width(name) for name in names) + 10
    axes = data_axes(figure, "step times", margins=(left, 16, 6, 20))
    axes.grid(axis="x", color=GRID, linewidth=0.5, alpha=0.45)
    name_ticks(axes, "y", range(len(shown)), names)
    axes.set_ylim(max(len(shown), 4) - 0.5, -0.5)
    times = [t for r, _ in shown if r.step_seconds for t in (*r.step_seconds_all, r.step_seconds)]
    slowest = max(times, default=1.0)
    fastest = max((r.samples_per_second or 0.0 for r, _ in shown), default=0.0)
    rate_width = text_width(f"{_three_digits(fastest)} samples/s  ")
    axes.set_xlim(0, slowest * 1.03 / (1 - rate_width / box_points(axes)[2]))
    unit = second_axis(axes, slowest)
    for row, (result, _) in enumerate(shown):
        _draw_step_time(axes, row, result, newest=row == len(shown) - 1)
    count = "" if shown == runs else f", last {MOST_BARS} of {len(runs)}"
    title = f"median step time, {unit} ({origin([r for r, _ in shown])}){count}"
    write_title(figure, title)
    return figure


def _labelled(results: Sequence[StepResult], labels: Sequence[str]) -> list[tuple[StepResult, str]]:
    """Return each result with its label.

    Raises:
        ConfigError: there are not as many labels as results.
    """
    if len(results) != len(labels):
        raise ConfigError(
            f"labels holds {len(labels)} texts for {len(results)} results; allowed is one for each"
        )
    return list(zip(results, labels, strict=True))


def _draw_step_time(axes: Axes, row: int, result: StepResult, *, newest: bool) -> None:
    gap = axes.get_xlim()[1] * 0.025
    if result.step_seconds is None:
        write(axes, gap, row, _word(result), style="italic", color=LIMIT)
        return
    axes.barh(row, result.step_seconds, height=0.62, color=RUN, alpha=1.0 if newest else 0.55)
    repeats = result.step_seconds_all
    axes.plot(repeats, [row] * len(repeats), "o", color=INK, markersize=2.6, markeredgewidth=0)
    if result.samples_per_second is not None:
        rate = f"{_three_digits(result.samples_per_second)} samples/s"
        write(axes, max((*repeats, result.step_seconds)) + gap, row, rate)


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


@checked(size=inches)
def memory_against_time(
    results: Sequence[StepResult],
    *,
    labels: Sequence[str],
    pinned: Collection[int] = (),
    size: Size = (4.4, 2.6),
) -> Figure:
    """Return one dot a run: step time across, peak allocated up; down and left is better.

    Args:
        results: those without a time or a peak are counted in words.
        labels: the name of each run.
        pinned: indices of the runs to name; the last run is always named and filled.
        size: in inches.
    """
    runs = _labelled(results, labels)
    if max(pinned, default=0) >= max(len(runs), 1):
        raise ConfigError(f"pinned holds {max(pinned)}; allowed is the index of a result")
    dots = [
        (i, r.step_seconds, r.peak_allocated_bytes)
        for i, (r, _) in enumerate(runs)
        if r.step_seconds is not None and r.peak_allocated_bytes is not None
    ]
    if not dots:
        return placeholder(NO_RUNS if not runs else "No run with a time yet.", size=size)
    figure = new_figure(size)
    axes = data_axes(figure, "memory against time", margins=(34, 28, 10, 20))
    slowest, highest = max(d[1] for d in dots), max(d[2] for d in dots)
    limit = next((r.memory_limit_bytes for r in reversed(results) if r.memory_limit_bytes), None)
    shown_limit = limit if limit is not None and limit <= 2 * highest else None
    axes.set(xlim=(0, 1.12 * slowest), ylim=(0, 1.15 * max(highest, shown_limit or 0)))
    byte_unit, second_unit = byte_axis(axes, "y", axes.get_ylim()[1]), second_axis(axes, slowest)
    _draw_dots(axes, dots, {i: labels[i] for i in (*pinned, len(runs) - 1)}, shown_limit)
    write_title(figure, f"peak {byte_unit} allocated ({origin(results)})")
    missing = f"; {len(runs) - len(dots)} without a time" if len(dots) < len(runs) else ""
    write(
        canvas(figure),
        size[0] * POINTS - 8,
        7,
        f"time per step, {second_unit}{missing}",
        ha="right",
    )
    return figure


def _draw_dots(
    axes: Axes, dots: Sequence[tuple[int, float, int]], names: dict[int, str], limit: int | None
) -> None:
    """Draw the runs; a name goes where it covers least, the right side of its dot first."""
    _, _, width, height = box_points(axes)
    per_x, per_y = width / axes.get_xlim()[1], height / axes.get_ylim()[1]
    taken = [(x * per_x - 4, y * per_y, 8.0) for _, x, y in dots]
    if limit is not None:
        axes.axhline(limit, color=LIMIT, linestyle=(0, (5, 3)), linewidth=1, label="limit")
        write(axes, 0, limit, f" limit {format_bytes(limit)}", color=LIMIT, va="bottom")
        taken.append((0.0, limit * per_y, width))
    newest = max(names)
    for i, x, y in sorted(dots, key=lambda dot: dot[0] in names):
        ring = i in names and i != newest
        axes.plot([x], [y], "D" if ring else "o", markersize=7 if i in names else 4.5, zorder=3,
                  markerfacecolor="none" if ring else RUN, markeredgecolor=RUN if ring else "none",
                  markeredgewidth=1.6, alpha=1.0 if i in names else 0.6,
                  label=f"run {i}")  # fmt: skip
        if i not in names:
            continue
        text = shorten(names[i], 0.45 * width)
        wide = text_width(text)
        spots = [(8.0, 0.0), (-8.0 - wide, 0.0), (-wide / 2, 11.0), (-wide / 2, -11.0)]
        px, py = x * per_x, y * per_y
        dx, dy = min(
            spots, key=lambda spot: _crowding(px + spot[0], py + spot[1], wide, taken, width)
        )
        taken.append((px + dx, py + dy, wide))
        write(axes, (px + dx) / per_x, (py + dy) / per_y, text)


def _crowding(
    x: float, y: float, wide: float, taken: Sequence[tuple[float, float, float]], room: float
) -> int:
    """Return how many names a name here would cover, and ten more if it leaves the axes."""
    covered = sum(
        abs(y - other_y) < 11 and x < other_x + other_wide and other_x < x + wide
        for other_x, other_y, other_wide in taken
    )
    return covered + 10 * (x < 0 or x + wide > room + 8)


@checked()
def varying_fields(results: Sequence[StepResult]) -> list[str]:
    """Return the `StepConfig` fields in which the results differ, most distinct values first."""
    distinct = {
        field.name: len({getattr(result.config, field.name) for result in results})
        for field in fields(StepConfig)
    }
    return sorted((name for name, n in distinct.items() if n > 1), key=lambda name: -distinct[name])


@checked(rows=FIELD, columns=FIELD, size=inches)
def heat_map(
    results: Sequence[StepResult],
    *,
    rows: str = "batch_size",
    columns: str = "accumulation_steps",
    limit_bytes: int | None = None,
    size: Size = (4.4, 2.6),
) -> Figure:
    """Return the peak allocated over two `StepConfig` fields of the settings tried.

    The latest result of a cell counts. A peak above `limit_bytes` is hatched. A cell without a
    peak says why, such as "OOM"; a setting that was not tried is blank.
    """
    if not results:
        return placeholder(NO_RUNS, size=size)
    import seaborn  # 0.7 s to import

    ys, xs, peaks, words = _cells(results, rows, columns)
    figure = new_figure(size)
    row_names = [shorten(label, 0.4 * size[0] * POINTS) for label in _labels(ys, results)]
    column_names = [
        shorten(label, 0.6 * size[0] * POINTS / len(xs)) for label in _labels(xs, results)
    ]
    left = max(map(text_width, row_names)) + 10
    axes = data_axes(figure, "heat map", margins=(left, 30, 8, 34))
    axes.spines["bottom"].set_visible(False)
    top = np.nanmax(peaks, initial=1)
    font = {"fontfamily": FONT, "fontsize": FONT_SIZE}
    style = {"cmap": "crest", "cbar": False, "linewidths": 0}
    no_ticks = {"xticklabels": False, "yticklabels": False}
    seaborn.heatmap(
        peaks, ax=axes, vmin=0, vmax=top, annot=words, fmt="", annot_kws=font, **style, **no_ticks
    )
    name_ticks(axes, "x", [i + 0.5 for i in range(len(xs))], column_names)
    name_ticks(axes, "y", [i + 0.5 for i in range(len(ys))], row_names)
    axes.tick_params(labelrotation=0, labelsize=FONT_SIZE, labelfontfamily=FONT, length=0)
    for row, column in np.argwhere(np.isnan(peaks)):
        _mark_cell(axes, row, column, words[row, column])
    over = np.argwhere(peaks > (limit_bytes or np.inf))
    for row, column in over:
        _hatch_cell(axes, row, column, LIMIT)
    hatched = ", hatch: over limit" if len(over) else ""
    write_title(figure, f"peak allocated ({origin(results)}){hatched}")
    overlay = canvas(figure)
    write(overlay, 6, size[1] * POINTS - 22, f"{_axis_name(rows)}, down")
    write(overlay, size[0] * POINTS - 8, 7, f"{_axis_name(columns)}, across", ha="right")
    return figure


def _cells(
    results: Sequence[StepResult], rows: str, columns: str
) -> tuple[list[Any], list[Any], npt.NDArray[np.float64], npt.NDArray[np.object_]]:
    """Return the values down and across, peaks (NaN: none) and words (empty: untried)."""
    latest = {(getattr(r.config, rows), getattr(r.config, columns)): r for r in results}
    ys, xs = (_in_order({cell[axis] for cell in latest}) for axis in (0, 1))
    peaks, words = np.full((len(ys), len(xs)), np.nan), np.full((len(ys), len(xs)), "", object)
    for (y, x), result in latest.items():
        at = ys.index(y), xs.index(x)
        if result.peak_allocated_bytes is not None:
            peaks[at] = result.peak_allocated_bytes
            words[at] = format_bytes(result.peak_allocated_bytes)
        else:
            words[at] = _word(result, short=True)
    return ys, xs, peaks, words


def _labels(values: Sequence[Any], results: Sequence[StepResult]) -> list[str]:
    """Return the values as they are written; "as-built" is what was built, the same in all runs."""
    built = {r.number_format for r in results if r.config.precision is Precision.AS_BUILT}
    own = {Precision.AS_BUILT: built.pop()} if len(built) == 1 else {}
    return [own.get(value, str(value)) for value in values]


def _mark_cell(axes: Axes, row: int, column: int, word: str) -> None:
    """Hatch the cell of a run that gave no peak and say why; leave an untried one blank."""
    if word:
        _hatch_cell(axes, row, column, GRID)
        write(axes, column + 0.5, row + 0.5, word, ha="center", color=LIMIT)


def _hatch_cell(axes: Axes, row: int, column: int, color: str) -> None:
    axes.add_artist(Rectangle((column + 0.03, row + 0.03), 0.94, 0.94, facecolor="none",
                              edgecolor=color, hatch="///", alpha=0.5, linewidth=0))  # fmt: skip


def _axis_name(field: str) -> str:
    """Return a setting as the panel's controls call it."""
    return "accumulation" if field == "accumulation_steps" else field.replace("_", " ")


def _in_order(values: Collection[Any]) -> list[Any]:
    """Sort numbers by size, choices as their enum lists them, and texts among functions by name."""
    if not all(isinstance(value, int | float | StrEnum) for value in values):
        return sorted(values, key=str)
    return sorted(values, key=lambda v: list(type(v)).index(v) if isinstance(v, StrEnum) else v)


def _word(result: StepResult, *, short: bool = False) -> str:
    if result.outcome is Outcome.OUT_OF_MEMORY:
        return "OOM" if short else "out of memory"
    return "no time" if result.outcome is Outcome.OK else str(result.outcome).replace("_", " ")
