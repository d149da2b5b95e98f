"""`heat_map`: the peaks of several runs over two settings; `varying_fields`: which two."""

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
from memlab.figures.look import (
    FONT,
    FONT_SIZE,
    GRID,
    LIMIT,
    POINTS,
    Canvas,
    Size,
    data_axes,
    inches,
    name_ticks,
    new_figure,
    origin,
    placeholder,
    shorten,
    text_width,
    write,
    write_title,
)
from memlab.figures.runs import NO_RUNS, without_numbers
from memlab.result import StepResult

FIELD = choice(*(field.name for field in fields(StepConfig)))


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

    The latest result of a cell counts. A peak that does not fit `limit_bytes` is hatched. A cell
    without a peak says why, such as "OOM"; a setting that was not tried is blank.
    """
    if not results:
        return placeholder(NO_RUNS, size=size)
    import seaborn  # 0.7 s to import

    ys, xs, peaks, words, fits = _cells(results, rows, columns, limit_bytes or None)
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
    over = np.argwhere(~np.isnan(peaks) & ~fits)
    for row, column in over:
        _hatch_cell(axes, row, column, LIMIT)
    hatched = ", hatch: over limit" if len(over) else ""
    write_title(figure, f"peak allocated ({origin(results)}){hatched}")
    overlay = Canvas(figure)
    write(overlay, 6, size[1] * POINTS - 22, f"{_axis_name(rows)}, down")
    write(overlay, size[0] * POINTS - 8, 7, f"{_axis_name(columns)}, across", ha="right")
    return figure


def _cells(
    results: Sequence[StepResult], rows: str, columns: str, limit: int | None
) -> tuple[
    list[Any], list[Any], npt.NDArray[np.float64], npt.NDArray[np.object_], npt.NDArray[np.bool_]
]:
    """Return values down and across, peaks (NaN: none), words (empty: untried), and what fits."""
    latest = {(getattr(r.config, rows), getattr(r.config, columns)): r for r in results}
    ys, xs = (_in_order({cell[axis] for cell in latest}) for axis in (0, 1))
    peaks, words = np.full((len(ys), len(xs)), np.nan), np.full((len(ys), len(xs)), "", object)
    fits = np.full((len(ys), len(xs)), True)
    for (y, x), result in latest.items():
        at = ys.index(y), xs.index(x)
        fits[at] = result.against_limit(limit).fits is not False
        if result.peak_allocated_bytes is not None:
            peaks[at] = result.peak_allocated_bytes
            words[at] = format_bytes(result.peak_allocated_bytes)
        else:
            words[at] = without_numbers(result, short=True)
    return ys, xs, peaks, words, fits


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


@checked()
def varying_fields(results: Sequence[StepResult]) -> list[str]:
    """Return the `StepConfig` fields in which the results differ, most distinct values first."""
    distinct = {
        field.name: len({getattr(result.config, field.name) for result in results})
        for field in fields(StepConfig)
    }
    return sorted((name for name, n in distinct.items() if n > 1), key=lambda name: -distinct[name])
