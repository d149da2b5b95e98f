"""What the charts of several runs compare: the axes of the heat map, the neighbours of a setting.

Pure functions of runs and predictions.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from memlab import plots
from memlab._panel.runs import Run
from memlab.config import StepConfig
from memlab.result import StepResult
from memlab.techniques.every import CONTROLS

FIELDS = tuple(field.name for field in dataclasses.fields(StepConfig))
COUNTS = ("batch_size", "accumulation_steps")
FEWEST_VALUES = 2  # of each axis: one row or one column is no map


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Two settings, and the runs that differ from the last run in these two at most."""

    rows: str
    columns: str
    runs: tuple[Run, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Those of the two settings of which another value must be run."""
        return tuple(
            field
            for field in (self.rows, self.columns)
            if len({_value(run.result, field) for run in self.runs}) < FEWEST_VALUES
        )

    @property
    def num_cells(self) -> int:
        """How many pairs of values were run."""
        return len({_cell(run, (self.rows, self.columns)) for run in self.runs})


def grid(runs: Sequence[Run]) -> Grid:
    """Return the heat map's axes: the settings with two values each, then with the most cells.

    In a tie they are those that vary most.
    """
    shown = runs[-1]
    fields = plots.varying_fields([run.result for run in runs])
    fields += [field for field in COUNTS if field not in fields]
    # budgets are compared within one engine
    pairs = itertools.combinations([field for field in fields if field != "budget_engine"], 2)
    grids = [
        Grid(rows=a, columns=b, runs=tuple(run for run in runs if _agree(run, shown, (a, b))))
        for a, b in pairs
    ]
    return max(grids, key=lambda one: (-len(one.missing), one.num_cells))


def missing_words(found: Grid) -> str:
    """Return what has to be run before there is a heat map."""
    names = [CONTROLS[field].label.lower() for field in found.missing]
    others = " and ".join(f"another {name}" for name in names)
    return (
        "A heat map of the peak over two settings is drawn here once each has been run with two "
        f"values. Still to run: {others}, with everything else as in {found.runs[-1].label}."
    )


def neighbours(config: StepConfig, known: Iterable[StepResult]) -> list[StepResult]:
    """Return the results that differ from the config in one setting, and in that by one step.

    A step of a slider is the nearest known value on either side; batch size and accumulation go at
    most to the double or the half. A step of any other control is any other value.

    Args:
        config: the settings on screen.
        known: predictions for the same workload and device.
    """
    nearest: dict[tuple[str, object], StepResult] = {}
    for result in known:
        differing = [name for name in FIELDS if getattr(config, name) != _value(result, name)]
        if len(differing) != 1:
            continue
        (field,) = differing
        here, there = getattr(config, field), _value(result, field)
        if field in COUNTS and not here <= 2 * there <= 4 * here:
            continue
        is_slider = field in COUNTS or field == "memory_budget"
        side = (field, there > here if is_slider else there)
        best = nearest.get(side)
        # of a choice the same value cannot be known twice
        if best is None or abs(there - here) < abs(_value(best, field) - here):
            nearest[side] = result
    return list(nearest.values())


def _value(result: StepResult, field: str) -> Any:
    return getattr(result.config, field)


def _agree(run: Run, shown: Run, apart_from: tuple[str, str]) -> bool:
    here, there = run.result.config, shown.result.config
    is_plain = 1.0 in (here.memory_budget, there.memory_budget)  # whatever the engine
    free = {*apart_from, *(("budget_engine",) if is_plain else ())}
    names = [name for name in FIELDS if name not in free]
    return _cell(run, names) == _cell(shown, names)


def _cell(run: Run, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(_value(run.result, name) for name in names)
