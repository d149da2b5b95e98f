"""The key of a timeline: each category's bytes at the peak, and what its lines are."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from memlab.arguments.units import format_bytes
from memlab.figures.category_names import category_names
from memlab.figures.look import (
    CATEGORY_COLORS,
    INK,
    STACK,
    Canvas,
    shorten,
    text_width,
    write,
)
from memlab.result import StepResult, signed_percent
from memlab.trace import CATEGORIES


def key_rows(
    result: StepResult, measured: StepResult | None, compare: StepResult | None, label: str
) -> list[tuple[str, str, str]]:
    """Return colour, name and size at the peak of what is drawn, top to bottom.

    The colour is "-" or "--" for a line and empty for a row of text alone.
    """
    assert result.timeline is not None
    at_peak = result.timeline.peak_by_category
    present = result.timeline.bytes_by_category.max(axis=0)
    names = category_names(result)
    rows = [
        (CATEGORY_COLORS[category], names[category], format_bytes(at_peak[category]))
        for category in reversed(STACK)
        if present[CATEGORIES.index(category)]
    ]

    if measured is not None and measured.timeline is not None:
        peak = int(measured.timeline.total_bytes.max())
        error = sum(at_peak.values()) / peak - 1
        rows += [
            ("-", f"{measured.source} peak", format_bytes(peak)),
            ("", "prediction error", signed_percent(error)),
        ]

    if compare is not None and compare.timeline is not None:
        other, mine = compare.config.to_dict(), result.config.to_dict()
        changed = [f"{name}={value}" for name, value in other.items() if value != mine[name]]
        name = label or ", ".join(changed) or str(compare.source)
        peak = int(compare.timeline.total_bytes.max())
        rows += [("--", name, ""), ("", "its peak", format_bytes(peak))]

    return rows


def draw_key(overlay: Canvas, rows: Sequence[tuple[str, str, str]], *, beside: bool) -> None:
    """Draw the key beside the picture with a heading, or under it in two columns."""
    width, height = overlay.width, overlay.height
    column = 158.0 if beside else (width - 24) / 2
    per_column = len(rows) if beside else math.ceil(len(rows) / 2)
    top = height - 56 if beside else per_column * 13 - 5
    if beside:
        write(overlay, width - 6, top + 15, "at the peak", ha="right")
    for i, (color, name, size) in enumerate(rows):
        x = width - 6 - column if beside else 6 + (i // per_column) * (column + 12)
        y = top - 14 * (i % per_column) - (6 if color[:1] in ("-", "") and beside else 0)
        if color.startswith("#"):
            overlay.add_artist(Rectangle((x, y - 4), 9, 9, facecolor=color, linewidth=0))
        elif color:
            dashes: Any = (0, (2, 1)) if color == "--" else "-"
            across = Line2D([x - 1, x + 10], [y, y], color=INK, linewidth=1.6, linestyle=dashes)
            overlay.add_artist(across)

        room = column - 20 - text_width(size)
        write(overlay, x + 15, y, shorten(name, room))
        write(overlay, x + column, y, size, ha="right")
