"""The controls: sliders with number boxes, choices, and the line that explains each of them.

They know settings by field name, and no runs. A number box accepts any text, so that a wrong
number is explained beside it instead of being clipped silently.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from memlab._panel import guide, texts
from memlab._panel.line import Line
from memlab._panel.state import PRECISIONS, counts, offered, parse_number
from memlab.config import FP32_FORMATS, Precision, StepConfig
from memlab.techniques.every import CONTROLS

POSITIONS = "memlab-at-"  # begins the name of a class that `access.py` reads
SLIDERS = ("memory_budget", "batch_size", "accumulation_steps")
FIRST = (
    "checkpointing", "checkpoint_policy", "budget_engine", "budget_solver", "budget_estimator",
    "compile",
)  # fmt: skip
"""The first of the folded controls; those of other techniques follow in their own order."""

OF_OPTIMIZER = tuple(c.field for technique in texts.OF_OPTIMIZER for c in technique.controls)
RANKS = "world_size"  # whose slider is folded with the choices of ranks
OF_RANKS = tuple(c.field for c in texts.OF_RANKS.controls if c.field != RANKS)
PLACED = (*SLIDERS, RANKS, "precision", *FIRST, *OF_OPTIMIZER, *OF_RANKS)
MORE = (*FIRST, *(field for field in CONTROLS if field not in PLACED))


class ExplainedLine:
    """The line beside a control, with a button for a remedy if there is one."""

    def __init__(self, apply: Callable[[Mapping[str, object]], None]) -> None:
        self.text = widgets.HTML()
        self.text.add_class("memlab-explanation")
        self.button = widgets.Button(description="", layout={"visibility": "hidden"})
        self.button.add_class("memlab-remedy")
        self._apply = apply
        self._remedy: Mapping[str, object] | None = None
        self.button.on_click(self._clicked)

    def show(self, line: Line) -> None:
        """Show the line; a line that is already on screen is not sent again."""
        if self.text.value != (text := line.html()):
            self.text.value = text
        self._remedy = line.remedy[1] if line.remedy else None
        self.button.description = line.remedy[0] if line.remedy else ""
        self.button.layout.visibility = "visible" if line.remedy else "hidden"

    def _clicked(self, _: Any) -> None:
        if self._remedy:
            self._apply(self._remedy)


class SliderRow:
    """A slider and a labelled number box for one number, and the line that explains it."""

    def __init__(
        self,
        slider: Any,
        kind: type[int] | type[float],
        changed: Callable[[], None],
        submit: Callable[[], None],
        apply: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._kind, self._changed = kind, changed
        self.slider = self.used(slider)
        if isinstance(slider, widgets.FloatLogSlider):
            self.say_positions([2**n for n in range(int(slider.max) + 1)])
        # continuous: the prediction follows each key; `settling.py` waits for the last one
        self.box = widgets.Text(continuous_update=True)
        self.box.add_class("memlab-box")
        self.explanation = ExplainedLine(apply)
        self.box.observe(self._typed, "value")
        on_enter(self.box, submit)
        self.row = widgets.HBox(
            [self.slider, self.box, self.explanation.text, self.explanation.button]
        )
        self.row.add_class("memlab-row")

    def used(self, slider: Any) -> Any:
        """Return a slider that looks like one of a row and is followed."""
        slider.add_class("memlab-slider")
        slider.observe(self._slid, "value")
        return slider

    def name(self, label: str, tooltip: str) -> None:
        """Name the number for people, who see the label, and for screen readers."""
        self.box.description, self.box.tooltip = label, tooltip

    def say_positions(self, numbers: Sequence[int]) -> None:
        """Tell the page, which counts positions of the handle from 0, what number each one is."""
        self.slider.add_class(POSITIONS + "-".join(map(str, numbers)))

    @property
    def value(self) -> Any:
        """The number in the box, or its text where that is not a number."""
        return parse_number(self.box.value, self._kind)

    @value.setter
    def value(self, number: float) -> None:
        self.box.value = f"{number:g}" if self._kind is float else str(number)

    @property
    def disabled(self) -> bool:
        """Whether the number does nothing with the other settings."""
        return bool(self.box.disabled)

    @disabled.setter
    def disabled(self, disabled: bool) -> None:
        self.slider.disabled = self.box.disabled = disabled

    def _slid(self, change: Mapping[str, Any]) -> None:
        nearest = self._nearest(self.value)
        # the page snaps the handle to a step and sends that back, which no person chose
        if nearest is None or abs(change["new"] - nearest) > 1e-6:
            self.value = self._number(change["new"])

    def _typed(self, _: Mapping[str, Any]) -> None:
        nearest = self._nearest(self.value)
        # sending the value of the handle back would move it back under fast key presses
        if nearest is not None and abs(nearest - self.slider.value) > 1e-6:
            self.slider.value = nearest
        self._changed()

    def _number(self, position: float) -> float:
        """Return the number at a position of the handle."""
        return round(position) if self._kind is int else round(position, 2)

    def _nearest(self, number: Any) -> float | None:
        """Return the closest position of the handle to this number; None if it is no number."""
        if not isinstance(number, int | float) or not math.isfinite(number):
            return None
        low, high, step = self.slider.min, self.slider.max, self.slider.step
        if not isinstance(self.slider, widgets.FloatLogSlider):
            return round(float(min(max(round(number / step) * step, low), high)), 2)
        exponent = math.log2(number) if number >= 1 else 0.0
        return float(2 ** min(max(round(exponent), low), high))


class Controls:
    """All settings of the panel, as widgets.

    Args:
        settings: the first values.
        changed: called after any change.
        submit: called when Enter was pressed in a number box.
    """

    def __init__(
        self, settings: Mapping[str, Any], changed: Callable[[], None], submit: Callable[[], None]
    ) -> None:
        self._changed, self._quiet = changed, False
        log = {"base": 2, "min": 0, "step": 1, "readout": False}
        sliders = {
            "memory_budget": (widgets.FloatSlider(min=0, max=1, step=0.05, readout=False), float),
            "batch_size": (widgets.FloatLogSlider(max=8, **log), int),
            "accumulation_steps": (widgets.FloatLogSlider(max=5, **log), int),
            RANKS: (widgets.FloatLogSlider(max=12, **log), int),
        }

        self.sliders = {
            field: SliderRow(slider, kind, self._tell, submit, self.set)
            for field, (slider, kind) in sliders.items()
        }
        for field, row in self.sliders.items():
            row.name(CONTROLS[field].label, guide.tooltip(field))
        self.precision = widgets.ToggleButtons(
            options=_precisions((), "fp32"),
            description=CONTROLS["precision"].label,
            tooltip=guide.tooltip("precision"),
        )
        self._formats: tuple[str, ...] = ()
        made = {field: _choice(field) for field in (*MORE, *OF_OPTIMIZER, *OF_RANKS)}
        self.more = tuple(made[field] for field in MORE)
        self.of_optimizer = tuple(made[field] for field in OF_OPTIMIZER)
        self.of_ranks = tuple(made[field] for field in OF_RANKS)
        self._choices = {"precision": self.precision, **made}
        self._has_blocks = True
        for choice in self._choices.values():
            choice.observe(lambda _: self._choice_changed(), "value")

        self.precision_explained = ExplainedLine(self.set)
        self.more_explained = ExplainedLine(self.set)
        self.optimizer_explained = ExplainedLine(self.set)
        self.set(settings)
        self._offer()

    def precision_row(self) -> Any:
        """Return the row of the number formats."""
        explained = self.precision_explained
        row = widgets.HBox([self.precision, explained.text, explained.button])
        row.add_class("memlab-row")
        row.add_class("memlab-choice-row")
        return row

    def settings(self) -> dict[str, Any]:
        """Return the value of each field on screen; text that is not a number stays text."""
        return {
            **{field: row.value for field, row in self.sliders.items()},
            **{field: choice.value for field, choice in self._choices.items()},
        }

    def set(self, settings: Mapping[str, Any]) -> None:
        """Set controls by field; `changed` is called once."""
        self._quiet = True
        try:
            for field, value in settings.items():
                if field in self.sliders:
                    self.sliders[field].value = value
                else:
                    if field == "precision":
                        self._offer_precisions(str(value))
                    _choose(self._choices[field], value)
        finally:
            self._quiet = False

        self._changed()

    def name_formats(self, formats: tuple[str, ...]) -> None:
        """Name the precision "as-built" after the formats of the model; empty if not yet known."""
        if formats != self._formats:
            self._formats = formats
            self._quiet = True
            try:
                self._offer_precisions(self.precision.value)
            finally:
                self._quiet = False

    def _offer_precisions(self, chosen: str) -> None:
        """Offer "fp32" beside "as-built" where the two differ, or where it was chosen."""
        options = _precisions(self._formats, chosen)
        if tuple(options) != tuple(self.precision.options):
            self.precision.options = options  # this also selects the first option
            self.precision.value = chosen

    def offer_blocks(self, possible: bool) -> None:
        """Enable or disable checkpointing by block."""
        self._has_blocks = possible
        if not possible:
            self._choices["checkpointing"].value = "none"
        self._offer()

    def _offer(self) -> None:
        """Enable the controls that have an effect with the other settings."""
        settings = self.settings()
        for field, control in {**self.sliders, **self._choices}.items():
            control.disabled = not counts(field, settings)
        self._choices["checkpointing"].disabled = not self._has_blocks

    def _choice_changed(self) -> None:
        self._offer()
        self._tell()

    def _tell(self) -> None:
        if not self._quiet:
            self._changed()


def _precisions(formats: tuple[str, ...], chosen: str) -> list[tuple[str, str]]:
    """Return the label and the value of each precision for a model of these formats."""
    is_fp32 = formats == FP32_FORMATS and chosen != Precision.FP32
    offered = [p for p in PRECISIONS if not (is_fp32 and p is Precision.FP32)]
    built = Precision.AS_BUILT.in_words(formats if is_fp32 else ())
    return [(built if p is Precision.AS_BUILT else str(p), str(p)) for p in offered]


def _choose(choice: Any, value: object) -> None:
    value = str(value) if isinstance(value, str) else value
    offered = [each for _, each in getattr(choice, "options", ())]
    if offered and value not in offered:
        choice.options = [*choice.options, ("own", value)]  # a person's own function
    choice.value = value
    if value is None:  # which a widget understands as "nothing is chosen"
        choice.index = [offered for _, offered in choice.options].index(None)


def on_enter(box: Any, submit: Callable[[], None]) -> None:
    """Call `submit` when Enter is pressed in a text box."""

    def on_message(_: Any, content: Mapping[str, Any], __: Any) -> None:
        if content.get("event") == "submit":
            submit()

    box.on_msg(on_message)


def close(widget: Any) -> None:
    """Close a widget and all in it with their layouts and styles, which ipywidgets does not."""
    for child in getattr(widget, "children", ()):
        close(child)
    for part in ("style", "layout"):
        if (made := getattr(widget, part, None)) is not None:
            made.close()
    widget.close()


def _choice(field: str) -> Any:
    """Return the control of a field: a checkbox or a choice."""
    control = CONTROLS[field]
    if isinstance(getattr(StepConfig(), field), bool):
        return widgets.Checkbox(
            description=control.label, indent=False, tooltip=guide.tooltip(field)
        )

    # names become text, because the page sends them back as text
    options = [
        (control.in_words(value), str(value) if isinstance(value, str) else value)
        for value in offered(field)
    ]
    return widgets.Dropdown(
        options=options, description=control.label, tooltip=guide.tooltip(field)
    )
