"""The controls: sliders with number boxes, choices, and the line that explains each of them.

They know settings by field name, and no runs. A number box accepts any text, so that a wrong
number is explained beside it instead of being clipped silently.
"""

import html
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import ipywidgets as widgets

from memlab._panel import texts
from memlab._panel.state import (
    BAD,
    PRECISIONS,
    WARN,
    Settings,
    counts,
    is_sharded,
    offered,
    parse_number,
    problems,
    setting_words,
)
from memlab._panel.texts import Line, refusal_line
from memlab.config import FP32_FORMATS, Precision, StepConfig
from memlab.techniques.every import CONTROLS, EVERY
from memlab.techniques.sharding.sharding import SHARDING, most_ranks
from memlab.techniques.technique import Saving, Setup
from memlab.workload import SampleSize, Value, WorkloadChoices

# What the "?" button and the tooltips say: how to read the page, and a row about every
# control.
#
# What settings save comes from their techniques, as docs/saving.md does. Rows about
# controls that belong to no technique are in `help.toml`, as is how to read the page.

HEADER = {
    "workload": "Workload",
    "device": "On",
    "memory_limit": "Limit",
    "check_gradients": "check gradients",
    "sample_size": "Sequence length or image size",
    "choices": "Adapter, rank, base and others",
}
"""The labels of controls that are no field of a config."""

_HELP = tomllib.loads(resources.files(__package__).joinpath("help.toml").read_text("utf-8"))
OWN_ROWS = tuple(Saving(**row) for row in _HELP["rows"])
GENERAL: str = _HELP["general"]
MORE_IN_HELP = "more in the help (?)"


def page() -> str:
    """Return the help as HTML: how to read the page, and a table of what each control saves."""
    rows = "".join(
        f"<tr><td>{html.escape(_labels(saving))}</td><td>{_code(saving.setting)}</td>"
        f"<td>{_code(saving.saves)}</td><td>{_code(saving.costs) or 'nothing'}</td>"
        f"<td>{_code(saving.not_for)}</td></tr>"
        for saving in _savings()
    )
    names = ("control", "setting", "saves", "costs", "not for")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f'{GENERAL}<table class="memlab-savings"><tr>{head}</tr>{rows}</table>'


def tooltip(field: str) -> str:
    """Return what a field saves and costs, for the tooltip of its control; "" without a row of it.

    >>> tooltip("loss_chunks").split(",")[0]
    'loss_chunks=16: saves the logits'
    """
    found = [saving for saving in _savings() if re.search(rf"\b{field}\b", saving.setting)]
    return "\n".join([*map(_sentence, found), MORE_IN_HELP]) if found else ""


def _savings() -> list[Saving]:
    """Return all rows of the table."""
    return [*OWN_ROWS, *(saving for technique in EVERY for saving in technique.savings)]


def _labels(saving: Saving) -> str:
    """Return the labels of the controls that a row is about."""
    names = re.findall(r"`(\w+)", saving.setting)
    labels = {name: control.label for name, control in CONTROLS.items()} | HEADER
    return ", ".join(dict.fromkeys(labels[name] for name in names if name in labels))


def _sentence(saving: Saving) -> str:
    text = f"{saving.setting}: saves {saving.saves}"
    if saving.costs:
        text += f"; costs {saving.costs}"
    if saving.not_for:
        text += f"; not for {saving.not_for}"
    return text.replace("`", "")


def _code(markdown: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(markdown, quote=False))


POSITIONS = "memlab-at-"  # begins the name of a class that `access.js` reads
SLIDERS = ("memory_budget", "batch_size", "accumulation_steps")
FIRST = (
    "checkpointing", "checkpoint_policy", "budget_engine", "budget_solver", "budget_estimator",
    "compile",
)  # fmt: skip
"""The first of the folded controls; those of other techniques follow in their own order."""

OF_OPTIMIZER = tuple(c.field for technique in texts.OF_OPTIMIZER for c in technique.controls)
RANKS = "world_size"  # whose slider is folded with the choices of ranks
RANK_FIELDS = tuple(c.field for c in texts.RANK_FIELDS.controls if c.field != RANKS)
PLACED = (*SLIDERS, RANKS, "precision", *FIRST, *OF_OPTIMIZER, *RANK_FIELDS)
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
        # continuous: the prediction follows each key; `job.py` waits for the last one
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
            row.name(CONTROLS[field].label, tooltip(field))
        self.precision = widgets.ToggleButtons(
            options=_precisions((), "fp32"),
            description=CONTROLS["precision"].label,
            tooltip=tooltip("precision"),
        )
        self._formats: tuple[str, ...] = ()
        made = {field: _choice(field) for field in (*MORE, *OF_OPTIMIZER, *RANK_FIELDS)}
        self.more = tuple(made[field] for field in MORE)
        self.of_optimizer = tuple(made[field] for field in OF_OPTIMIZER)
        self.of_ranks = tuple(made[field] for field in RANK_FIELDS)
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
        return widgets.Checkbox(description=control.label, indent=False, tooltip=tooltip(field))

    # names become text, because the page sends them back as text
    options = [
        (control.in_words(value), str(value) if isinstance(value, str) else value)
        for value in offered(field)
    ]
    return widgets.Dropdown(options=options, description=control.label, tooltip=tooltip(field))


# The controls of what else a workload can be made with: the adapter, the format of the base.
#
# They are no settings of `StepConfig`: a workload with another adapter is another workload.


class ChoiceRow:
    """A control for each choice of a workload, and the line that explains them.

    The row is hidden for a workload without choices.
    """

    def __init__(
        self, changed: Callable[[], None], apply: Callable[[Mapping[str, object]], None]
    ) -> None:
        self._changed = changed
        self._offered: dict[str, tuple[Value, ...]] = {}
        self._controls: dict[str, Any] = {}
        self.explanation = ExplainedLine(apply)
        self._box = widgets.HBox()
        self._box.add_class("memlab-more")
        self.row = widgets.VBox(
            [self._box, widgets.HBox([self.explanation.text, self.explanation.button])]
        )
        self.row.add_class("memlab-choices")
        self.row.layout.display = "none"

    def offer(self, choices: WorkloadChoices | None) -> None:
        """Make the controls of a newly chosen workload, with its values; None for no choices."""
        former = list(self._controls.values())
        self._controls, self._offered = {}, {}
        if choices is not None:
            self._controls = {name: self._made(name, choices) for name in choices.values}
        self._box.children = list(self._controls.values())
        self.row.layout.display = "" if self._controls else "none"
        for control in former:
            close(control)

    def enable(self, choices: WorkloadChoices) -> None:
        """Disable the controls of which the workload on screen offers one value alone."""
        for name, control in self._controls.items():
            control.disabled = len(choices.offered.get(name, ())) < 2

    @property
    def value(self) -> dict[str, Value]:
        """The values on screen, by name."""
        return {
            name: self._offered[name][control.value] for name, control in self._controls.items()
        }

    @value.setter
    def value(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            control, offered = self._controls[name], self._offered[name]
            if value not in offered:
                self._offered[name] = offered = (*offered, value)
                control.options = _options(offered)
            control.value = offered.index(value)

    def _made(self, name: str, choices: WorkloadChoices) -> Any:
        """Return the control of a choice. Its value is a place in what is offered."""
        own = choices.values[name]
        offered = choices.offered[name]
        self._offered[name] = offered = offered if own in offered else (*offered, own)
        control = widgets.Dropdown(
            options=_options(offered), value=offered.index(own), description=label(name)
        )
        control.observe(lambda _: self._changed(), "value")
        return control


def label(name: str) -> str:
    """Return the name of a choice as people read it, such as "Prepare for kbit"."""
    return name.replace("_", " ").capitalize()


def words(value: Value) -> str:
    """Return a value as people read it, such as "yes" for True."""
    named = {None: "usual", True: "yes", False: "no"}
    return named[value] if value is None or isinstance(value, bool) else str(value)


def _options(offered: tuple[Value, ...]) -> list[tuple[str, int]]:
    return [(words(value), place) for place, value in enumerate(offered)]


# The slider of a workload's sample size: a sequence length, or the size of images.
#
# It is no setting of `StepConfig`: a workload in another size is another workload.


class SizeRow(SliderRow):
    """A slider with one position for each size that a workload offers; any size can be typed.

    The row is hidden for a workload with samples of one size only.
    """

    def __init__(
        self,
        changed: Callable[[], None],
        submit: Callable[[], None],
        apply: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._offered: tuple[int, ...] = ()  # until a workload offers some
        slider = widgets.IntSlider(min=0, max=1, readout=False)
        super().__init__(slider, int, changed, submit, apply)
        self.name("Sample size", "")
        self.offer(None)

    def offer(self, size: SampleSize | None) -> None:
        """Offer the sizes of a workload and show its own; None for one of one size only."""
        self.row.layout.display = "none" if size is None else ""
        if size is None:
            return

        label = size.name[:1].upper() + size.name[1:]
        self.name(label, tooltip("sample_size"))
        if self._offered != size.offered:
            self._offered = size.offered
            self._renew(size)
        self.value = size.value
        self.slider.value = self._nearest(size.value)  # also if the box shows this already

    def _renew(self, size: SampleSize) -> None:
        """Put another slider in the place of the one that was there.

        A page that is told of another number of positions may move the handle of a slider within
        the old ones, and send that back as if a person had moved it.
        """
        former, last = self.slider, len(size.offered) - 1
        made = widgets.IntSlider(min=0, max=last, value=self._nearest(size.value), readout=False)
        self.slider = self.used(made)
        self.say_positions(size.offered)
        self.row.children = [self.slider, *self.row.children[1:]]
        close(former)

    def _number(self, position: float) -> float:
        return self._offered[round(position)]

    def _nearest(self, number: Any) -> float | None:
        if not isinstance(number, int) or not self._offered:
            return None

        def distance(position: int) -> float:
            return abs(math.log(self._offered[position]) - math.log(max(number, 1)))

        return min(range(len(self._offered)), key=distance)


# The line beside the number of ranks, and the button that shows it. Pure functions.

ALONE = "one device trains by itself; a sharding divides the step over several"
TWO = ("2 ranks", {"world_size": 2})
REMEDIES: tuple[Mapping[str, object], ...] = (
    {"shard_group_size": 8},
    {"shard_group_size": 4},
    {"shard_group_size": 2},
    {"tensor_parallel_size": 1},
    {"world_size": 2},
    {"world_size": 2, "shard_group_size": 2},
)
"""What may make ranks go together, the one that changes least first."""


def ranks_line(
    settings: Settings,
    wrong: Mapping[str, str],
    setup: Setup,
    *,
    is_here: bool,
    num_cards: int | None = None,
) -> Line:
    """Explain who computes and keeps what, or why these ranks are not possible.

    Args:
        settings: on screen.
        wrong: the error of each setting that is not allowed, by field.
        setup: the same settings, with defaults in place of wrong ones.
        is_here: whether the device is in this machine, so that Run starts real ranks.
        num_cards: of the cluster on screen; None if the device is none.
    """
    if "world_size" in wrong:
        return Line(wrong["world_size"], remedy=_remedy(settings, num_cards), kind=BAD)
    if not is_sharded(settings):
        return Line(ALONE) if num_cards is None else _unused_line(num_cards)
    if wrong:
        return Line("needs valid settings above first")
    if refused := refusal_line((SHARDING,), setup):
        return refused
    if setup.config.world_size == 1:
        return Line(SHARDING.says(setup), remedy=TWO, kind=WARN)

    most = most_ranks(setup.device) if is_here else None
    if most is not None and setup.config.world_size > most:
        at_most = f"; Run starts at most {most} ranks on this machine, so this is predicted only"
        return Line(SHARDING.says(setup) + at_most, kind=WARN)
    return Line(SHARDING.says(setup))


def ranks_label(settings: Settings) -> str:
    """Return the label of the button that shows the controls of ranks, which says what is set."""
    if not is_sharded(settings):
        return "Ranks (one device)"
    return f"Ranks ({settings['sharding']} x {settings['world_size']})"


def _unused_line(num_cards: int) -> Line:
    """Return that a sharding would use all cards of a cluster, with a button for one."""
    every: Mapping[str, object] = {"sharding": "zero3", "world_size": num_cards}
    text = f"one of {num_cards} cards trains by itself; a sharding divides the step over them"
    return Line(text, remedy=(f"zero3 x {num_cards}", every))


def _remedy(settings: Settings, num_cards: int | None) -> tuple[str, Mapping[str, object]] | None:
    """Return the first remedy that lifts the error, with its words."""
    every = () if num_cards is None else ({"world_size": num_cards},)
    was_wrong = "world_size" in problems(settings)
    for remedy in (*REMEDIES, *every) if was_wrong else every:
        if "world_size" not in problems({**settings, **remedy}):
            return ", ".join(setting_words(*change) for change in remedy.items()), remedy
    return None
