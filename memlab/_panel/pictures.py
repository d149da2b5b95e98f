"""The pictures of a panel: runs in, inline SVG in HTML widgets out, each in a box of fixed shape.

A picture is drawn again only when what it shows has changed. The timeline comes first, since a
person who moves a slider waits for it; the heat map comes last, since the import of seaborn costs
0.7 s. What holds the peak is drawn only while a person has opened it.
"""

import contextlib
import functools
import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from memlab import plots
from memlab._panel.comparisons import grid, missing_words
from memlab._panel.rank_pane import RankPane
from memlab._panel.readout import (
    MOMENTS,
    PARTS_OF_PEAK,
    lowering,
    moments,
    parts_of_peak,
    readout,
)
from memlab._panel.runs import Run, count_runs
from memlab._panel.texts import NOT_DRAWN, error_text
from memlab.config import StepConfig
from memlab.explaining.explain import explain
from memlab.figures.category_names import category_names
from memlab.figures.look import axes_box
from memlab.figures.parts import PARTS
from memlab.figures.peak_readings import peak_readings
from memlab.figures.readings import Reading, readings
from memlab.figures.runs import repeats_in_words
from memlab.result import StepResult
from memlab.trace import Category, Phase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memlab.predicting.forecast import Forecast

Size = tuple[float, float]
SIZES: dict[str, Size] = {  # inches; the figure's text grows with its box
    "peak": (6.0, 0.8),
    "timeline": (6.0, 4.2),
    "step_times": (4.0, 2.05),
    "memory_against_time": (4.0, 2.05),
    "heat_map": (4.0, 2.05),
    "peak_map": (6.0, 3.6),
}
OF_RUNS = ("step_times", "memory_against_time", "heat_map")
MOST_TIMES_PEAK = 20  # of a limit that the bar of the peak shows
WAITING = {
    "peak": "The peak, by category.",
    "timeline": "The memory of one training step over time: first as predicted, which takes some "
    "seconds while a worker starts, then as measured, once you press Run.",
    "step_times": "Time per step, one bar per run.",
    "memory_against_time": "Memory against time, one dot per run.",
    "heat_map": "The peak over two settings: a heat map, once two values of each were run.",
    "peak_map": "What holds the peak, by category and module.",
}
WHOLE_STEP = ""  # of the buttons that choose the part of the step


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The content of the pictures.

    Attributes:
        predicted: the prediction, drawn filled below the line of a run; None without one.
        forecast: that gave the prediction and names its operators; None if there is none.
        shown: the run of the same settings; without a prediction, the last run, drawn filled.
        comparison: the pinned run, drawn beside the other.
        runs: the runs of the same workload and device in the table, oldest first.
        limit_bytes: the limit on screen.
        why: a sentence that is shown when there is neither prediction nor run.
        neighbours: known predictions of the settings beside those on screen.
        is_settled: whether no more exact prediction follows.
    """

    predicted: StepResult | None
    shown: Run | None
    comparison: Run | None
    runs: tuple[Run, ...]
    limit_bytes: int | None
    why: str = ""
    forecast: "Forecast | None" = None
    neighbours: tuple[StepResult, ...] = ()
    is_settled: bool = True

    def readings(self, only: Phase | None = None) -> list[Reading]:
        """Return the readings of the drawn timeline; with its operators, if it is predicted."""
        result = self.filled
        if result is None or result.timeline is None or not len(result.timeline):
            return []
        if self.forecast is None or self.predicted is None:
            return readings(result.timeline, only=only)
        ran = self.forecast.ran(result.config.micro_batch_sizes)
        blocks = self.forecast.program.recording.repeated
        return readings(result.timeline, ran, blocks, only=only)

    @property
    def filled(self) -> StepResult | None:
        """The result that is drawn by category."""
        if self.predicted is not None:
            return self.predicted
        return self.shown.result if self.shown else None

    @property
    def at_peak(self) -> StepResult | None:
        """The result whose peak is shown: the run if its memory was measured."""
        run = self.shown.result if self.shown else None
        return run if run is not None and run.peak_by_category else self.filled

    def timeline(self, size: Size, only: Phase | None = None) -> "Figure":
        """Return the memory timeline: predicted by category, with the measured run as a line."""
        assert self.filled is not None
        compare = self.comparison
        return plots.timeline(
            self.filled,
            only=only,
            limit_bytes=self.limit_bytes,
            measured=self.shown.result if self.shown and self.predicted is not None else None,
            compare=compare.result if compare else None,
            compare_label=compare.label if compare else "",
            size=size,
        )


class Pictures:
    """The boxes that hold the pictures, by name, and the controls of what is drawn.

    Attributes:
        boxes: for each picture of `SIZES`, its widget.
        part: the buttons that choose the part of the step that the timeline shows.
        details: what holds the peak, as a map and in words; drawn while it is displayed.
        ranks: what each rank holds; drawn while it is displayed.
        num_drawn: pictures so far.
        failed: why pictures or their readouts were not made, since `draw` was called.
    """

    def __init__(self) -> None:
        self.boxes = {name: _empty_box(name) for name in SIZES}
        self.part = _part_buttons()
        self._explanation = widgets.HTML()
        self._explanation.add_class("memlab-explained")
        self.details = widgets.Box([self.boxes["peak_map"], self._explanation])
        self.details.add_class("memlab-details")
        self.ranks = RankPane()
        self._drawn: dict[str, Any] = {}
        self.num_drawn = 0
        self.failed: list[Exception] = []
        self._name = f"memlab-{id(self)}"
        # the timeline, the bar and the next limit ask for the same result
        self._cached_lowering = functools.lru_cache(2)(lowering)
        self.said_of_division: Callable[[StepConfig], str] = lambda config: ""

    def _lowering(self, result: StepResult) -> dict[Category, str]:
        return self._cached_lowering(result, self.said_of_division(result.config))

    def draw(self, scene: Scene) -> None:
        """Draw the pictures that have changed, the memory timeline first.

        One that cannot be drawn says so in its place, and takes no other with it.
        """
        self.failed = []
        if scene.filled is not None:
            self._draw_memory(scene, scene.filled)
        elif scene.why:
            self._wait("timeline", scene.why)
            self._wait_for_peak(WAITING["peak"])

        if scene.at_peak is not None or scene.why:
            with self._noted():
                self.ranks.draw(scene.at_peak)
        if scene.runs:
            with self._noted("step_times", "memory_against_time"):
                self._draw_runs(scene)
            with self._noted("heat_map"):
                self._draw_heat_map(scene)
        else:
            for name in OF_RUNS:
                self._wait(name, WAITING[name])

    def _draw_memory(self, scene: Scene, filled: StepResult) -> None:
        limit, run, compare = scene.limit_bytes, scene.shown, scene.comparison
        only = Phase(self.part.value) if self.part.value != WHOLE_STEP else None

        def moments_over(figure: "Figure") -> str:
            names = category_names(filled)
            spots = moments(scene.readings(only), self._lowering(filled), names)
            name = f"{self._name}-moments"
            return readout(spots, axes_box(figure), name=name, kind="moment", label=MOMENTS)

        self._show(
            "timeline",
            (
                filled,
                run and run.number,
                limit,
                compare and compare.label,
                only,
                self.said_of_division(filled.config),
            ),
            lambda size: scene.timeline(size, only),
            f"memory through {only or 'one step'}, {filled}",
            moments_over,
        )
        if scene.at_peak is not None:
            self._draw_peak(scene.at_peak, limit)

    def _draw_peak(self, at_peak: StepResult, limit: int | None) -> None:
        if at_peak.peak_allocated_bytes is None:
            self._wait_for_peak("No peak was measured.")
            return

        shown_limit = _near(limit, at_peak)

        def parts_over(figure: "Figure") -> str:
            found = peak_readings(at_peak, limit_bytes=shown_limit)
            spots = parts_of_peak(found, self._lowering(at_peak))
            name = f"{self._name}-parts"
            return readout(spots, axes_box(figure), name=name, kind="part", label=PARTS_OF_PEAK)

        self._show(
            "peak",
            (at_peak, limit, self.said_of_division(at_peak.config)),
            lambda size: plots.peak_bar(at_peak, limit_bytes=shown_limit, size=size),
            f"peak memory by category: {at_peak}",
            parts_over,
        )
        if self.details.layout.display != "none":
            self._draw_details(at_peak, limit)

    def _draw_details(self, at_peak: StepResult, limit: int | None) -> None:
        if self._drawn.get("peak_map") == (at_peak, limit):
            return
        self._show(
            "peak_map",
            (at_peak, limit),
            lambda size: plots.peak_map(at_peak, limit_bytes=limit, size=size),
            f"what holds the peak, by category and module: {at_peak}",
        )
        self._explanation.value = ""
        with self._noted():
            self._explain(at_peak.against_limit(limit))

    def _explain(self, at_peak: StepResult) -> None:
        said = explain(at_peak)._repr_html_()
        # it scrolls, so it can be focused, and its keys are kept from JupyterLab's own shortcuts
        self._explanation.value = (
            '<div class="memlab-scrolled" tabindex="0" role="region" '
            'data-lm-suppress-shortcuts="true" '
            f'aria-label="what holds the peak, and what would lower it">{said}</div>'
        )

    def _draw_runs(self, scene: Scene) -> None:
        runs = scene.runs
        results, labels = [run.result for run in runs], [run.label for run in runs]
        pinned = [i for i, run in enumerate(runs) if run.name]
        key = tuple((run.number, run.name) for run in runs)
        self._show(
            "step_times",
            key,
            lambda size: plots.step_times(results, labels=labels, size=size),
            f"median time per step of {count_runs(len(runs))}: "
            + ", ".join(f"{run.label} {repeats_in_words(run.result)}" for run in runs),
        )

        drawn = self._drawn.get("memory_against_time")
        if drawn is not None and drawn[0] == key and not scene.is_settled:
            return  # not at every move of a slider, since the next move would wait for it

        known = [result.config for result in results]
        here = scene.predicted if scene.predicted and scene.predicted.config not in known else None
        beside = [result for result in scene.neighbours if result.config not in known]
        self._show(
            "memory_against_time",
            (key, here, tuple(beside)),
            lambda size: plots.memory_against_time(
                results, labels=labels, pinned=pinned, here=here, neighbours=beside, size=size
            ),
            f"peak memory against time per step of {count_runs(len(runs))}",
        )

    def _draw_heat_map(self, scene: Scene) -> None:
        found, limit = grid(scene.runs), scene.limit_bytes
        if found.missing:
            self._wait("heat_map", missing_words(found))
            return

        # the last result of a cell is drawn: a measured one, if there is one
        results = [run.result for run in sorted(found.runs, key=lambda run: not run.is_predicted)]
        self._show(
            "heat_map",
            (found.rows, found.columns, limit, *(run.number for run in found.runs)),
            lambda size: plots.heat_map(
                results, rows=found.rows, columns=found.columns, limit_bytes=limit, size=size
            ),
            f"peak memory over {found.rows} and {found.columns}",
        )

    def _show(
        self,
        name: str,
        key: Any,
        draw: Callable[[Size], "Figure"],
        label: str,
        over: Callable[["Figure"], str] = lambda _: "",
    ) -> None:
        """Draw a picture if its key is new; `over` returns HTML that lies over it."""
        if self._drawn.get(name) == key:
            return
        self._drawn.pop(name, None)  # one that fails is tried again at the next change
        with self._noted(name):
            figure, above = draw(SIZES[name]), ""
            with self._noted():
                above = over(figure)
            self.boxes[name].value = _framed(name, plots.to_svg(figure, label=label) + above)
            self.num_drawn += 1
            self._drawn[name] = key

    @contextlib.contextmanager
    def _noted(self, *names: str) -> Iterator[None]:
        """Note an exception, and say in the boxes of these pictures that they are not drawn."""
        try:
            yield
        except Exception as error:
            self.failed.append(error)
            for name in names:
                self.boxes[name].value = _waiting(name, f"{NOT_DRAWN}: {error_text(error)}")

    def _wait_for_peak(self, text: str) -> None:
        self._wait("peak", text)
        self._wait("peak_map", text)
        self._explanation.value = ""

    def _wait(self, name: str, text: str) -> None:
        self.boxes[name].value = _waiting(name, text)
        self._drawn.pop(name, None)


def _near(limit_bytes: int | None, result: StepResult) -> int | None:
    """Return the limit, or None if the peak would be a sliver of a bar up to it."""
    peak = result.counted_peak
    is_far = limit_bytes is None or peak is None or limit_bytes > MOST_TIMES_PEAK * peak.nbytes
    return None if is_far else limit_bytes


def _part_buttons() -> Any:
    options = [("whole step", WHOLE_STEP), *((str(phase), str(phase)) for phase in PARTS)]
    tooltips = [
        "draw the whole step",
        *(f"draw {phase} alone, of the micro-batch in which it reaches highest" for phase in PARTS),
    ]
    made = widgets.ToggleButtons(options=options, description="Show", tooltips=tooltips)
    made.add_class("memlab-part-buttons")
    return made


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
