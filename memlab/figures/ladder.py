"""The waterfall of a ladder: one bar for each rung, with its peak and its saving.

Left out: what a peak consists of, which `peak_bar` shows for one result.
"""

from collections.abc import Sequence
from dataclasses import fields

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    INK,
    LIMIT,
    POINTS,
    Size,
    box_points,
    byte_axis,
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
from memlab.result import Outcome, StepResult
from memlab.trace import Category
from memlab.verifying.report import VerifyReport

BAR = CATEGORY_COLORS[Category.ACTIVATIONS]


@checked(size=inches)
def waterfall(
    results: Sequence[StepResult],
    *,
    reports: Sequence[VerifyReport] | None = None,
    size: Size = (9.0, 3.2),
) -> Figure:
    """Return a chart with the peak of each rung as a bar, and its saving as a pale bar behind it.

    The text beside each bar gives the peak, how many times lower it is than on the first rung, the
    time of a step relative to the first, and the error of the gradients. Peaks are reserved bytes
    if all rungs have them, else allocated bytes.

    Args:
        results: of `memlab.ladder`, the plain step first.
        reports: of `memlab.verify` for each result, or None.
        size: width and height in inches.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> rungs = [
    ...     memlab.recorded(workload, StepConfig(batch_size=4, memory_budget=budget), "amd-epyc")
    ...     for budget in (1.0, 0.5)
    ... ]
    >>> memlab.plots.waterfall(rungs).get_size_inches()
    array([9. , 3.2])
    """
    if not results:
        return placeholder("No rung yet.", size=size)
    if reports is not None and len(reports) != len(results):
        raise ConfigError(
            f"reports holds {len(reports)} for {len(results)} results; allowed is one for each"
        )

    held = [result.peak_reserved_bytes for result in results]
    is_reserved = all(
        peak is not None for peak, r in zip(held, results, strict=True) if r.peak_allocated_bytes
    )
    peaks = held if is_reserved else [result.peak_allocated_bytes for result in results]
    figure = new_figure(size)
    names = [shorten(name, 0.34 * size[0] * POINTS) for name in _names(results)]
    left = max(text_width(name) for name in names) + 10
    axes = data_axes(figure, "ladder", margins=(left, 26, 6, 20))
    name_ticks(axes, "y", range(len(results)), names)
    axes.set_ylim(len(results) - 0.5, -0.5)
    most = max((peak for peak in peaks if peak), default=1)
    said = [_said(results, peaks, reports, row) for row in range(len(results))]
    # the axis leaves room for the longest text beside the longest bar
    room = max(map(text_width, said)) + 12
    axes.set_xlim(0, most / max(1 - room / box_points(axes)[2], 0.3))
    axes.grid(axis="x", color=GRID, linewidth=0.5, alpha=0.45)
    unit = byte_axis(axes, "x", axes.get_xlim()[1])
    before = None

    for row, result in enumerate(results):
        peak = peaks[row]
        _draw(axes, row, peak, before, said[row], is_ok=result.outcome is Outcome.OK)
        before = peak or before

    kind = "reserved" if is_reserved else "allocated"
    write_title(figure, f"peak {unit} {kind} ({origin(results)}), rung by rung")
    return figure


def _draw(
    axes: Axes, row: int, peak: int | None, before: int | None, said: str, *, is_ok: bool
) -> None:
    if before is not None and peak is not None and before > peak:
        axes.barh(row, before - peak, left=peak, height=0.62, color=BAR, alpha=0.22)
    if peak is not None:
        axes.barh(row, peak, height=0.62, color=BAR)
    start = max(peak or 0, before or 0) if peak is not None else 0
    gap = axes.get_xlim()[1] * 0.01
    write(axes, start + gap, row, said, color=INK if is_ok else LIMIT)


def _names(results: Sequence[StepResult]) -> list[str]:
    """Return, for each rung, the fields that it adds to the last rung that worked."""
    names, below = ["plain"], results[0].config
    for result in results[1:]:
        changed = [
            f"{field.name}={getattr(result.config, field.name)}"
            for field in fields(StepConfig)
            if getattr(result.config, field.name) != getattr(below, field.name)
        ]
        names.append(", ".join(changed) or "the same")
        if result.outcome is Outcome.OK:
            below = result.config

    return names


def _said(
    results: Sequence[StepResult],
    peaks: Sequence[int | None],
    reports: Sequence[VerifyReport] | None,
    row: int,
) -> str:
    """Return the numbers of a rung in words."""
    result, peak, first = results[row], peaks[row], peaks[0]
    if peak is None:
        return str(result.outcome).replace("_", " ")

    words = [format_bytes(peak)]
    if row and first:
        words.append(f"{first / peak:.1f}x less")
    if row and result.step_seconds and results[0].step_seconds:
        words.append(f"{result.step_seconds / results[0].step_seconds:.2f}x the time")
    if reports is not None and reports[row].global_relative_error is not None:
        words.append(f"gradient error {reports[row].global_relative_error:.1e}")
    return ", ".join(words)
