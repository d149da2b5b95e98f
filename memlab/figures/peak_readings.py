"""The readings of a peak that a person can point at: one for each part of the peak bar."""

from collections import Counter
from dataclasses import dataclass

from memlab.explaining.holdings import Group, group
from memlab.figures.category_names import category_names
from memlab.figures.look import CATEGORY_COLORS, GRID, STACK
from memlab.result import StepResult
from memlab.trace import Category

MOST_PLACES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakReading:
    """One part of a peak, as the bar shows it.

    Attributes:
        start: its left edge in the bar, 0..1.
        end: its right edge, 0..1.
        name: of the part, in words.
        color: of the part.
        nbytes: that it holds.
        fraction: of the peak allocated; None for memory that is reserved and not allocated.
        category: None for memory that is reserved and not allocated.
        places: the largest places in the model that hold it, in words, with their bytes.
    """

    start: float
    end: float
    name: str
    color: str
    nbytes: int
    fraction: float | None
    category: Category | None
    places: tuple[tuple[str, int], ...] = ()


def peak_readings(result: StepResult, *, limit_bytes: int | None = None) -> list[PeakReading]:
    """Return the parts of the bar that `plots.peak_bar` draws of a result, from left to right."""
    peak, parts, counted = (
        result.peak_allocated_bytes, result.peak_by_category, result.counted_peak
    )  # fmt: skip
    if not peak or parts is None or counted is None:
        return []

    whole = max(counted.nbytes, limit_bytes or 0, 1)
    places, names = _places(result), category_names(result)
    found, start = [], 0
    for category in STACK:
        nbytes = parts.get(category, 0)
        if nbytes:
            found.append(
                PeakReading(
                    start=start / whole,
                    end=(start + nbytes) / whole,
                    name=names[category],
                    color=CATEGORY_COLORS[category],
                    nbytes=nbytes,
                    fraction=nbytes / peak,
                    category=category,
                    places=tuple(places.get(category, Counter()).most_common(MOST_PLACES)),
                )
            )
        start += nbytes

    if counted.nbytes > peak:
        rest = PeakReading(
            start=peak / whole,
            end=counted.nbytes / whole,
            name="reserved, not allocated",
            color=GRID,
            nbytes=counted.nbytes - peak,
            fraction=None,
            category=None,
        )
        found.append(rest)
    return found


def _places(result: StepResult) -> dict[Category, Counter[str]]:
    """Return the bytes of each category by the place in the model, in words."""
    found: dict[Category, Counter[str]] = {}
    for held in group(result.peak_holdings):
        found.setdefault(held.category, Counter())[in_words(held)] += held.nbytes
    return found


def in_words(held: Group) -> str:
    """Return where memory is held: "mlp.act in 12 blocks" for "transformer.h.*.mlp.act"."""
    if not held.where:
        operator = held.operator.rpartition("::")[2].strip("_")
        return f"outside of all modules ({operator})" if operator else "outside of all modules"
    count = len(held.modules)
    _, star, inside = held.where.rpartition("*")
    if not star or count == 1:
        return held.where
    return f"{inside.lstrip('.')} in {count} blocks".strip() if inside else f"{count} blocks"
