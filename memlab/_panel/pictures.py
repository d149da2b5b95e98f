"""The pictures of a panel: runs in, inline SVG in HTML widgets out, each in a box of fixed shape.

A picture is drawn again only when what it shows has changed. The heat map comes last, since the
import of seaborn costs 0.7 s.
"""

import dataclasses
import html
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from memlab import plots
from memlab._panel.runs import Run, count_runs
from memlab.config import StepConfig
from memlab.result import StepResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Size = tuple[float, float]
SIZES: dict[str, Size] = {  # inches; the figure's text grows with its box
    "peak": (8.0, 0.95),
    "timeline": (8.0, 5.2),
    "step_times": (4.0, 2.05),
    "memory_against_time": (4.0, 2.05),
    "heat_map": (4.0, 2.05),
}
WAITING = {
    "peak": "The peak, by category.",
    "timeline": "The memory of one training step over time: first as predicted, which takes some "
    "seconds while a worker starts, then as measured, once you press Run.",
    "step_times": "Time per step, one bar per run.",
    "memory_against_time": "Memory against time, one dot per run.",
    "heat_map": "Peak over the settings tried: a heat map, from the second run on.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The content of the pictures.

    Attributes:
        predicted: the prediction, drawn filled below the line of a run; None without one.
        shown: the run of the same settings; without a prediction, the last run, drawn filled.
        comparison: the pinned run, drawn beside the other.
        runs: the runs of the same workload and device in the table, oldest first.
        limit_bytes: the limit on screen.
        why: a sentence that is shown when there is neither prediction nor run.
    """

    predicted: StepResult | None
    shown: Run | None
    comparison: Run | None
    runs: tuple[Run, ...]
    limit_bytes: int | None
    why: str = ""

    @property
    def filled(self) -> StepResult | None:
        """The result that is drawn by category."""
        if self.predicted is not None:
            return self.predicted
        return self.shown.result if self.shown else None

    def timeline(self, size: Size) -> "Figure":
        """Return the memory timeline: predicted by category, with the measured run as a line."""
        assert self.filled is not None
        compare = self.comparison
        return plots.timeline(
            self.filled,
            limit_bytes=self.limit_bytes,
            measured=self.shown.result if self.shown and self.predicted is not None else None,
            compare=compare.result if compare else None,
            compare_label=compare.label if compare else "",
            size=size,
        )


class Pictures:
    """The boxes that hold the pictures, by name."""

    def __init__(self) -> None:
        self.boxes = {name: _empty_box(name) for name in SIZES}
        self._drawn: dict[str, Any] = {}

    def draw(self, scene: Scene) -> None:
        """Draw the pictures that have changed, the memory timeline first."""
        if scene.filled is not None:
            self._draw_memory(scene, scene.filled)
        elif scene.why:
            self._wait("timeline", scene.why)
            self._wait("peak", WAITING["peak"])

        if scene.runs:
            self._draw_runs(scene.runs)
            self._draw_heat_map(scene, scene.runs[-1])

    def _draw_memory(self, scene: Scene, filled: StepResult) -> None:
        limit, run, compare = scene.limit_bytes, scene.shown, scene.comparison
        self._show(
            "timeline",
            (filled, run and run.number, limit, compare and compare.label),
            scene.timeline,
            f"memory through one step, {filled}",
        )
        at_peak = run.result if run and run.result.peak_by_category else filled
        if at_peak.peak_allocated_bytes is None:
            self._wait("peak", "No peak was measured.")
            return

        self._show(
            "peak",
            (at_peak, limit),
            lambda size: plots.peak_bar(at_peak, limit_bytes=limit, size=size),
            f"peak memory by category: {at_peak}",
        )

    def _draw_runs(self, runs: tuple[Run, ...]) -> None:
        results, labels = [run.result for run in runs], [run.label for run in runs]
        pinned = [i for i, run in enumerate(runs) if run.name]
        key = tuple((run.number, run.name) for run in runs)
        self._show(
            "step_times",
            key,
            lambda size: plots.step_times(results, labels=labels, size=size),
            f"median time per step of {count_runs(len(runs))}",
        )

        self._show(
            "memory_against_time",
            key,
            lambda size: plots.memory_against_time(
                results, labels=labels, pinned=pinned, size=size
            ),
            f"peak memory against time per step of {count_runs(len(runs))}",
        )

    def _draw_heat_map(self, scene: Scene, shown: Run) -> None:
        rows, columns, runs = _on_axes(scene.runs, shown)
        if len(runs) < 2:
            self._wait("heat_map", WAITING["heat_map"])
            return

        results, limit = [run.result for run in runs], scene.limit_bytes
        self._show(
            "heat_map",
            (rows, columns, limit, *(run.number for run in runs)),
            lambda size: plots.heat_map(
                results, rows=rows, columns=columns, limit_bytes=limit, size=size
            ),
            f"peak memory over {rows} and {columns}",
        )

    def _show(self, name: str, key: Any, draw: Callable[[Size], "Figure"], label: str) -> None:
        if self._drawn.get(name) == key:
            return
        self.boxes[name].value = _framed(name, plots.to_svg(draw(SIZES[name]), label=label))
        self._drawn[name] = key

    def _wait(self, name: str, text: str) -> None:
        self.boxes[name].value = _waiting(name, text)
        self._drawn.pop(name, None)


def _on_axes(runs: tuple[Run, ...], shown: Run) -> tuple[str, str, list[Run]]:
    """Return two settings, and the runs that differ from the shown one in these two at most.

    The two are those with the most cells; in a tie, the two that vary most.
    """
    fields = plots.varying_fields([run.result for run in runs])
    fields += [f for f in ("batch_size", "accumulation_steps") if f not in fields]
    # budgets are compared within one engine
    pairs = itertools.combinations([field for field in fields if field != "budget_engine"], 2)
    found = [(*pair, [run for run in runs if _agree(run, shown, pair)]) for pair in pairs]
    return max(found, key=lambda one: len({_cell(run, one[:2]) for run in one[2]}))


def _agree(run: Run, shown: Run, apart_from: tuple[str, str]) -> bool:
    here, there = run.result.config, shown.result.config
    is_plain = 1.0 in (here.memory_budget, there.memory_budget)  # whatever the engine
    free = {*apart_from, *(("budget_engine",) if is_plain else ())}
    names = [field.name for field in dataclasses.fields(StepConfig) if field.name not in free]
    return _cell(run, names) == _cell(shown, names)


def _cell(run: Run, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(run.result.config, name) for name in names)


def _empty_box(name: str) -> Any:
    box = widgets.HTML(_waiting(name, WAITING[name]))
    box.add_class("memlab-picture")
    box.add_class(f"memlab-picture-{name.replace('_', '-')}")
    return box


def _waiting(name: str, text: str) -> str:
    return _framed(name, f"<p>{html.escape(text)}</p>", "memlab-waiting")


def _framed(name: str, content: str, kind: str = "") -> str:
    width, height = SIZES[name]
    shape = f"aspect-ratio: {width} / {height}"
    return f'<div class="memlab-figure {kind}" style="{shape}">{content}</div>'
