"""The picture of the field: for each tool how far each of its answers is from what was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from memlab.figures.look import CATEGORY_COLORS, FONT_SIZE, GRID, INK, LIMIT
from memlab.trace import Category

ENDS = 8.0  # times too little and too much; what is further off is drawn at the end
TICKS = {1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1: "as measured", 2: "2 times", 4: "4", 8: "8"}
ROW_INCHES, WIDTH_INCHES = 0.34, 8.0
PLAIN, OWN = CATEGORY_COLORS[Category.PARAMETERS], LIMIT  # the colour of memlab is its own
DOTS_PER_INCH = 160
SPREAD = 0.3  # of a row: points beside each other where they lie close


def draw(errors: Mapping[str, Sequence[float]], num_rows: int) -> Figure:
    """Return a figure with a row for each tool, the nearest first, and a point for each answer.

    Args:
        errors: signed, relative, by tool.
        num_rows: that each tool was asked.
    """
    order = sorted(errors, key=lambda tool: float(np.median(np.abs(errors[tool]))))
    figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * len(order) + 0.9), layout="constrained")
    axes = figure.add_subplot()
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    for place, tool in enumerate(order):
        ratio = np.clip(1 + np.asarray(errors[tool]), 1 / ENDS, ENDS)
        color = OWN if tool == "memlab" else PLAIN
        beside = np.random.default_rng(0).uniform(-SPREAD, SPREAD, len(ratio))
        axes.plot(ratio, place + beside, ".", color=color, alpha=0.45, ms=5, mew=0)
        text = f"{len(ratio)} of {num_rows}, {100 * np.median(np.abs(errors[tool])):.1f} %"
        axes.annotate(text, (1.01, place), xycoords=("axes fraction", "data"), va="center",
                      color=INK, fontsize=FONT_SIZE)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / ENDS / 1.05, ENDS * 1.05)
    axes.set_xticks(list(TICKS), list(TICKS.values()))
    axes.set_yticks(range(len(order)), order)
    axes.invert_yaxis()
    axes.axvline(1, color=INK, lw=0.8, zorder=0)
    axes.grid(axis="x", color=GRID, alpha=0.35)
    axes.tick_params(colors=INK, labelsize=FONT_SIZE, length=0)
    axes.set_title("peak memory, predicted over measured; answers and their median error",
                   loc="left", color=INK, fontsize=FONT_SIZE)  # fmt: skip
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def in_words(errors: Mapping[str, Sequence[float]]) -> str:
    """Return the numbers of the picture, for those who do not see it."""
    order = sorted(errors, key=lambda tool: float(np.median(np.abs(errors[tool]))))
    parts = [f"{tool} {100 * np.median(np.abs(errors[tool])):.1f} % of {len(errors[tool])} answers"
             for tool in order]  # fmt: skip
    return "Median errors of predicted peaks: " + ", ".join(parts) + "."


def write(errors: Mapping[str, Sequence[float]], num_rows: int, file: Path) -> None:
    """Write the picture as PNG, on no ground, so that it stands on light and dark pages."""
    figure = draw(errors, num_rows)
    figure.savefig(file, dpi=DOTS_PER_INCH, metadata={"Description": in_words(errors)})
