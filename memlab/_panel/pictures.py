"""The pictures of a panel: runs in, inline SVG in HTML widgets out, each in a box of fixed shape.

A picture is drawn again only when what it shows has changed. The timeline comes first, since a
person who moves a slider waits for it; the heat map comes last, since the import of seaborn costs
0.7 s. What holds the peak is drawn only while a person has opened it.
"""

import contextlib
import dataclasses
import functools
import html
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from memlab import plots
from memlab._panel.runs import Run, count_runs
from memlab._panel.state import setting_words
from memlab._panel.texts import NOT_DRAWN, error_text
from memlab._util.tables import columns_table
from memlab._util.units import format_bytes
from memlab.config import StepConfig
from memlab.figures.look import (
    CATEGORY_COLORS,
    CATEGORY_LABELS,
    Box,
    Size,
    axes_box,
    category_names,
)
from memlab.figures.peak import ALONE, PeakReading, RankBar, drawn_ranks, peak_readings, rank_bars
from memlab.figures.runs import repeats_in_words
from memlab.figures.timeline import PARTS, Reading, readings
from memlab.result import StepResult, format_percent
from memlab.search.explain import Remedy, explain, remedies
from memlab.techniques.every import CONTROLS
from memlab.trace import Category, Phase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memlab.prediction.batch_size_model import BatchSizeModel

# What the charts of several runs compare: the axes of the heat map, the neighbours of a
# setting.
#
# Pure functions of runs and predictions.

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
        numbers = {field: {_value(run.result, field) for run in self.runs} for field in self.fields}
        return tuple(field for field in self.fields if len(numbers[field]) < FEWEST_VALUES)

    @property
    def fields(self) -> tuple[str, str]:
        """The two settings."""
        return self.rows, self.columns

    @property
    def num_cells(self) -> int:
        """How many pairs of values were run."""
        return len({_cell(run, self.fields) for run in self.runs})


def grid(runs: Sequence[Run]) -> Grid:
    """Return the heat map's axes: the settings with two values each, then with the most cells.

    In a tie they are those that vary most.
    """
    fields = plots.varying_fields([run.result for run in runs])
    fields += [field for field in COUNTS if field not in fields]
    fields = [field for field in fields if field != "budget_engine"]  # compared within one engine
    grids = [
        Grid(rows=a, columns=b, runs=tuple(run for run in runs if _agree(run, runs[-1], (a, b))))
        for a, b in itertools.combinations(fields, 2)
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


def framed(size: Size, content: str, kind: str = "") -> str:
    """Return a picture, or a text in its place, in a box of the picture's shape."""
    shape = f"aspect-ratio: {size[0]} / {size[1]}"
    return f'<div class="memlab-figure {kind}" style="{shape}">{content}</div>'


def _said(error: Exception) -> str:
    return f"<p>{html.escape(f'{NOT_DRAWN}: {error_text(error)}')}</p>"


# `RankPane`: what each rank holds, at its peak or over a step, while a person has opened it.

SIZE = (6.0, 2.8)  # inches
HEADS = ("together", "ranks", "calls a step", "sent by a rank")
AT_PEAK, OVER_STEP = "the peak of each rank", "all ranks over the step"


class RankPane:
    """A picture of the ranks, and a table of what they send one another.

    Attributes:
        box: of all of it; a button shows and hides it.
        choice: of what is drawn: the peaks, all ranks over the step, or one of them.
    """

    def __init__(self) -> None:
        self._picture, self._sent = _html("memlab-picture"), _html("memlab-sent")
        self._picture.value = framed(SIZE, f"<p>{ALONE}</p>")
        self.choice = widgets.Dropdown(options=[AT_PEAK, OVER_STEP], description="Show")
        self.choice.tooltip = "the peaks beside each other, or how the memory goes in each rank"
        self.box = widgets.Box([widgets.VBox([self.choice, self._picture]), self._sent])
        for name in ("memlab-details", "memlab-ranks"):
            self.box.add_class(name)
        self._drawn: tuple[StepResult | None, str] | None = None
        self._is_offering = False

    def on_choice(self, changed: Callable[[], None]) -> None:
        """Call a function whenever a person chooses what is drawn."""

        def tell(_: Any) -> None:
            if not self._is_offering:
                changed()

        self.choice.observe(tell, "value")

    def draw(self, result: StepResult | None) -> None:
        """Draw the ranks of a result, if that is on screen and not drawn yet; None for nothing."""
        if self.box.layout.display == "none" or self._drawn == (result, self.choice.value):
            return
        ranks = [] if result is None else drawn_ranks(result)
        self._offer([AT_PEAK, OVER_STEP, *(bar.label for bar in ranks)])
        self._drawn = result, self.choice.value
        self._sent.value = "" if result is None else sent_html(result)
        content = f"<p>{ALONE}</p>"
        try:
            if result is not None:
                figure, label = _picture_of(result, self.choice.value, ranks)
                content = plots.to_svg(figure, label=label)
        except Exception as error:
            content = _said(error)
            raise
        finally:
            self._picture.value = framed(SIZE, content)

    def _offer(self, options: list[str]) -> None:
        """Offer other ranks; one that is chosen and there is no more gives way to the peaks."""
        if list(self.choice.options) == options:
            return
        chosen = self.choice.value
        self._is_offering = True
        try:
            self.choice.options = options
            self.choice.value = chosen if chosen in options else AT_PEAK
        finally:
            self._is_offering = False


def _picture_of(result: StepResult, choice: str, ranks: Sequence[RankBar]) -> tuple["Figure", str]:
    """Return what a person has chosen to see, and what a screen reader says of it."""
    if choice == AT_PEAK:
        of_all, said = "peak of each rank by category", [str(bar) for bar in rank_bars(result)]
        figure = plots.rank_peaks(result, size=SIZE)
    elif choice == OVER_STEP:
        of_all = "memory through one step in each rank"
        said = [f"{bar.label} up to {format_bytes(bar.peak_bytes)}" for bar in ranks]
        figure = plots.rank_timelines(result, size=SIZE)
    else:
        chosen = next(bar for bar in ranks if bar.label == choice)
        return plots.timeline(chosen.result, size=SIZE), f"memory through one step in {chosen}"
    return figure, f"{of_all}: {'; '.join(said)}" if said else ALONE


def sent_html(result: StepResult) -> str:
    """Return what a rank sends in a step, by collective, as HTML; "" if nothing is known."""
    if not result.communication:
        return ""
    rows = [
        (each.collective, each.num_ranks, each.num_calls, format_bytes(each.sent_bytes))
        for each in result.communication
    ]
    total = format_bytes(sum(each.sent_bytes for each in result.communication))
    caption = f"A rank sends {total} a step, {result.source}, if all goes round a ring."
    return f"<p>{html.escape(caption)}</p>{columns_table(HEADS, rows)}"


# The readout of a picture: what is held where a person points, and what would lower it.
#
# Over each column of the timeline, and over each part of the peak bar, lies a radio button
# with its words. The page's own style shows the words of the one under the pointer, or of
# the one that is chosen by click or by arrow keys. All is HTML and CSS, so it works without
# a kernel, offline, and wherever HTML is shown.

MOST_CATEGORIES, MOST_SETTINGS = 5, 3
READOUTS = {
    "timeline": ("moment", "moments of the step; arrow keys move through them"),
    "peak": ("part", "parts of the peak; arrow keys move through them"),
}
"""What a spot of a picture is, for the style, and what a screen reader says of them all."""

# what does not change in a step, such as the parameters, is in each of its moments
_size = functools.lru_cache(1024)(format_bytes)

Lowering = Mapping[Category, str]
"""For each category, a line about the settings that would free some of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A place of a picture that a person can point at.

    Attributes:
        start: its left edge, 0..1.
        end: its right edge, 0..1.
        heard: what a screen reader says.
        content: what is shown, as HTML.
    """

    start: float
    end: float
    heard: str
    content: str


def moments(
    readings: Sequence[Reading],
    lowering: Lowering,
    names: Mapping[Category, str] = CATEGORY_LABELS,
) -> list[Spot]:
    """Return the spots of a timeline, one for each of its readings; `names` of the categories."""
    lower = {category: f"<em>{html.escape(line)}</em>" for category, line in lowering.items()}
    return [_moment(reading, lower, names) for reading in readings]


def _moment(reading: Reading, lower: Mapping[Category, str], names: Mapping[Category, str]) -> Spot:
    said = ", ".join(part for part in (reading.when, reading.where) if part)
    title = f"{format_bytes(reading.nbytes)}{', the peak' if reading.is_peak else ''}"
    rows = "".join(
        f"{_dot(CATEGORY_COLORS[category])}{names[category]} <b>{_size(nbytes)}</b> "
        f"<em>{format_percent(nbytes / reading.nbytes)}</em><br>"
        for category, nbytes in reading.by_category[:MOST_CATEGORIES]
    )
    line = lower.get(reading.by_category[0][0], "") if reading.by_category else ""
    content = f"<b>{title}</b><br>{html.escape(said)}<br>{rows}{line}"
    return Spot(start=reading.start, end=reading.end, heard=f"{title}, {said}", content=content)


def parts_of_peak(readings: Sequence[PeakReading], lowering: Lowering) -> list[Spot]:
    """Return the spots of a peak bar, one for each of its parts."""
    return [_part(reading, lowering) for reading in readings]


def _part(reading: PeakReading, lowering: Lowering) -> Spot:
    share = "" if reading.fraction is None else f", {format_percent(reading.fraction)} of the peak"
    title = f"{reading.name} {format_bytes(reading.nbytes)}{share}"
    places = [f"{place} {format_bytes(nbytes)}" for place, nbytes in reading.places]
    line = lowering.get(reading.category, "") if reading.category else ""
    rows = "".join(f"{html.escape(place)}<br>" for place in places)
    content = f"{_dot(reading.color)}<b>{title}</b><br>{rows}<em>{html.escape(line)}</em>"
    heard = ", ".join(part for part in (title, *places, line) if part)
    return Spot(start=reading.start, end=reading.end, heard=heard, content=content)


def _dot(color: str) -> str:
    return f'<i style="background:{color}"></i>'


def readout(spots: Sequence[Spot], box: Box, *, name: str, kind: str, label: str) -> str:
    """Return the readout as HTML, to lie over a picture.

    Args:
        spots: from left to right, each beginning where the one before ends.
        box: where they lie in the picture: left, top, width and height as fractions of it.
        name: of the group of radio buttons; another for each picture of a page.
        kind: "moment" or "part", for the style.
        label: what a screen reader says of them all.
    """
    if not spots:
        return ""
    left, top, width, height = (f"{share:.2%}" for share in box)
    columns = " ".join(f"{spot.end - spot.start:.4f}fr" for spot in spots)
    rest = 1 - spots[-1].end  # below the limit, where nothing is held
    columns += f" {rest:.4f}fr" if rest > 0 else ""
    style = f"left:{left};top:{top};width:{width};height:{height};grid-template-columns:{columns}"
    strips = "".join(_strip(spot, html.escape(name), kind) for spot in spots)
    return (
        f'<div class="memlab-spots memlab-{kind}s" style="{style}" role="radiogroup" '
        f'aria-label="{label}">{strips}</div>'
    )


def _strip(spot: Spot, name: str, kind: str) -> str:
    side = "right" if spot.start < 0.5 else "left"
    return (  # the attribute keeps keys from JupyterLab's own shortcuts
        f'<label class="memlab-spot memlab-{kind}"><input type="radio" name="{name}" '
        f'data-lm-suppress-shortcuts="true" aria-label="{html.escape(spot.heard)}">'
        f'<span class="memlab-reading memlab-{side}">{spot.content}</span></label>'
    )


def lowering(result: StepResult, said_of_division: str = "") -> dict[Category, str]:
    """Return for each category a line about the settings that would free some of it.

    The settings and their savings are those of `memlab.explain`, in the words of the controls;
    those that lower the peak most come first. A category that no setting frees is left out. With
    more micro-batches comes what is said of their gradient.
    """
    offered, said = remedies(result), dict[Category, str]()
    for category, label in CATEGORY_LABELS.items():
        freeing = [remedy for remedy in offered if category in remedy.categories]
        if freeing:
            words = [_in_words(one, said_of_division) for one in freeing[:MOST_SETTINGS]]
            said[category] = f"lower {label}: {', '.join(words)}"
    return said


def _in_words(remedy: Remedy, said_of_division: str) -> str:
    """Return for instance "accumulation 2 (peak about 12.0 MiB lower)"."""
    setting = ", ".join(setting_words(field, value) for field, value in remedy.change.items())
    said = [said_of_division] if said_of_division and "accumulation_steps" in remedy.change else []
    if remedy.freed_bytes is not None:
        said.insert(0, f"peak about {format_bytes(remedy.freed_bytes)} lower")
    return f"{setting} ({'; '.join(said)})" if said else setting


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
        size_model: that gave the prediction and names its operators; None if there is none.
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
    size_model: "BatchSizeModel | None" = None
    neighbours: tuple[StepResult, ...] = ()
    is_settled: bool = True

    def readings(self, only: Phase | None = None) -> list[Reading]:
        """Return the readings of the drawn timeline; with its operators, if it is predicted."""
        result = self.filled
        if result is None or result.timeline is None or not len(result.timeline):
            return []
        if self.size_model is None or self.predicted is None:
            return readings(result.timeline, only=only)
        ran = self.size_model.ran(result.config.micro_batch_sizes)
        blocks = self.size_model.program.recording.repeated
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
        run, compare = self.shown, self.comparison
        return plots.timeline(
            self.filled, only=only, limit_bytes=self.limit_bytes, size=size,
            measured=run.result if run and self.predicted is not None else None,
            compare=compare.result if compare else None,
            compare_label=compare.label if compare else "",
        )  # fmt: skip


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
        self._drawn: dict[str, Any] = {}
        self.boxes = {name: _html("memlab-picture", f"memlab-picture-{name.replace('_', '-')}")
                      for name in SIZES}  # fmt: skip
        for name, text in WAITING.items():
            self._wait(name, text)
        self.part = _part_buttons()
        self._explanation = _html("memlab-explained")
        self.details = widgets.Box([self.boxes["peak_map"], self._explanation])
        self.details.add_class("memlab-details")
        self.ranks = RankPane()
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
        said = self.said_of_division(filled.config)
        self._show(
            "timeline",
            (filled, run and run.number, limit, compare and compare.label, only, said),
            lambda size: scene.timeline(size, only),
            f"memory through {only or 'one step'}, {filled}",
            lambda: moments(scene.readings(only), self._lowering(filled), category_names(filled)),
        )
        if scene.at_peak is not None:
            self._draw_peak(scene.at_peak, limit)

    def _draw_peak(self, at_peak: StepResult, limit: int | None) -> None:
        if at_peak.peak_allocated_bytes is None:
            self._wait_for_peak("No peak was measured.")
            return

        near = _near(limit, at_peak)
        self._show(
            "peak",
            (at_peak, limit, self.said_of_division(at_peak.config)),
            lambda size: plots.peak_bar(at_peak, limit_bytes=near, size=size),
            f"peak memory by category: {at_peak}",
            lambda: parts_of_peak(
                peak_readings(at_peak, limit_bytes=near), self._lowering(at_peak)
            ),
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
            said = explain(at_peak.against_limit(limit))._repr_html_()
            # it scrolls, so it can be focused, and its keys are kept from JupyterLab's shortcuts
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
        count = count_runs(len(runs))
        said = [f"{run.label} {repeats_in_words(run.result)}" for run in runs]
        self._show(
            "step_times", key,
            lambda size: plots.step_times(results, labels=labels, size=size),
            f"median time per step of {count}: {', '.join(said)}",
        )  # fmt: skip

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
            f"peak memory against time per step of {count}",
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
        spots: Callable[[], Sequence[Spot]] = lambda: (),
    ) -> None:
        """Draw a picture if its key is new, with its spots over it."""
        if self._drawn.get(name) == key:
            return
        self._drawn.pop(name, None)  # one that fails is tried again at the next change
        with self._noted(name):
            figure, above = draw(SIZES[name]), ""
            with self._noted():
                kind, heard = READOUTS.get(name, ("", ""))
                group, box = f"{self._name}-{kind}s", axes_box(figure)
                above = readout(spots(), box, name=group, kind=kind, label=heard)
            content = plots.to_svg(figure, label=label) + above
            self.boxes[name].value = framed(SIZES[name], content)
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
                self.boxes[name].value = framed(SIZES[name], _said(error), "memlab-waiting")

    def _wait_for_peak(self, text: str) -> None:
        self._wait("peak", text)
        self._wait("peak_map", text)
        self._explanation.value = ""

    def _wait(self, name: str, text: str) -> None:
        content = f"<p>{html.escape(text)}</p>"
        self.boxes[name].value = framed(SIZES[name], content, "memlab-waiting")
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


def _html(*classes: str) -> Any:
    made = widgets.HTML()
    for name in classes:
        made.add_class(name)
    return made
