"""The controls: sliders with number boxes, choices, and the line that explains each of them.

They know settings by field name and nothing of runs. A number box takes any text, so that a wrong
number is explained beside it instead of being clipped without a word.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from memlab._panel.state import (
    BUDGET_ENGINES,
    BUDGET_ESTIMATORS,
    BUDGET_SOLVERS,
    CHECKPOINTING,
    IMPLEMENTATIONS,
    LOSS_CHUNKS,
    OFFLOAD_FRACTIONS,
    OPTIMIZERS,
    PRECISIONS,
    parse_number,
)
from memlab._panel.texts import Line
from memlab.config import FP32_FORMATS, PRESET_POLICIES, BudgetEngine, Precision

LABELS = {
    "memory_budget": "Memory budget",
    "batch_size": "Batch size",
    "accumulation_steps": "Accumulation",
    "precision": "Precision",
    "checkpointing": "Checkpointing",
    "checkpoint_policy": "Blocks keep",
    "budget_engine": "Budget by",
    "budget_solver": "Picked by",
    "budget_estimator": "Weighed by",
    "optimizer": "Optimizer",
    "optimizer_implementation": "runs as",
    "optimizer_in_backward": "in backward",
    "compile": "torch.compile",
    "channels_last": "channels last",
    "init_on_meta": "build on meta",
    "model_cache": "model's cache",
    "loss_chunks": "Loss in",
    "inplace": "in place",
    "offload_activations": "offload activations",
    "offload_fraction": "of them",
    "offload_parameters": "offload parameters",
    "offload_optimizer": "offload optimizer",
    "expandable_segments": "expandable segments",
}
SWITCHES = (
    "compile", "channels_last", "init_on_meta", "model_cache", "inplace", "offload_activations",
    "offload_parameters", "offload_optimizer", "expandable_segments",
)  # fmt: skip


class ExplainedLine:
    """The line beside a control, with a remedy button that is there only when it helps."""

    def __init__(self, apply: Callable[[Mapping[str, object]], None]) -> None:
        self.text = widgets.HTML()
        self.text.add_class("memlab-explanation")
        self.button = widgets.Button(description="", layout={"visibility": "hidden"})
        self.button.add_class("memlab-remedy")
        self._apply = apply
        self._remedy: Mapping[str, object] | None = None
        self.button.on_click(self._clicked)

    def show(self, line: Line) -> None:
        """Show the line; what is on screen already is not sent again."""
        if self.text.value != (text := line.html()):
            self.text.value = text
        self._remedy = line.remedy[1] if line.remedy else None
        self.button.description = line.remedy[0] if line.remedy else ""
        self.button.layout.visibility = "visible" if line.remedy else "hidden"

    def _clicked(self, _: Any) -> None:
        if self._remedy:
            self._apply(self._remedy)


class SliderRow:
    """A slider and a labelled number box for one field, and the line that explains it."""

    def __init__(
        self,
        field: str,
        slider: Any,
        kind: type[int] | type[float],
        changed: Callable[[], None],
        submit: Callable[[], None],
        apply: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._kind, self._changed = kind, changed
        self.slider = slider
        self.slider.add_class("memlab-slider")
        # continuous: with it the value is here before the message that Enter was pressed
        self.box = widgets.Text(description=LABELS[field], continuous_update=True)
        self.box.add_class("memlab-box")
        self.explanation = ExplainedLine(apply)
        self.slider.observe(self._slid, "value")
        self.box.observe(self._typed, "value")
        on_enter(self.box, submit)
        self.row = widgets.HBox(
            [self.slider, self.box, self.explanation.text, self.explanation.button]
        )
        self.row.add_class("memlab-row")

    @property
    def value(self) -> Any:
        """The number in the box, or its text where that is no number."""
        return parse_number(self.box.value, self._kind)

    @value.setter
    def value(self, number: float) -> None:
        self.box.value = f"{number:g}" if self._kind is float else str(number)

    def _slid(self, change: Mapping[str, Any]) -> None:
        nearest = self._nearest(self.value)
        # the page snaps the handle to a step and tells it back: no wish of the person
        if nearest is None or abs(change["new"] - nearest) > 1e-6:
            self.value = round(change["new"]) if self._kind is int else round(change["new"], 2)

    def _typed(self, _: Mapping[str, Any]) -> None:
        nearest = self._nearest(self.value)
        # an echo of where the handle stands would throw it back under fast keys
        if nearest is not None and abs(nearest - self.slider.value) > 1e-6:
            self.slider.value = nearest
        self._changed()

    def _nearest(self, number: Any) -> float | None:
        """Return the value nearest to this number at which the handle can stand."""
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
        settings: to begin with.
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
        }
        self.sliders = {
            field: SliderRow(field, slider, kind, self._tell, submit, self.set)
            for field, (slider, kind) in sliders.items()
        }
        self.precision = widgets.ToggleButtons(
            options=_precisions((), "fp32"), description=LABELS["precision"]
        )
        self._formats: tuple[str, ...] = ()
        self.checkpointing = _dropdown("checkpointing", CHECKPOINTING)
        self.policy = _dropdown("checkpoint_policy", PRESET_POLICIES)
        self.engine = _dropdown("budget_engine", BUDGET_ENGINES)
        self.solver = _dropdown("budget_solver", BUDGET_SOLVERS)
        self.estimator = _dropdown("budget_estimator", BUDGET_ESTIMATORS)
        self.optimizer = _dropdown("optimizer", OPTIMIZERS)
        self.implementation = _dropdown("optimizer_implementation", IMPLEMENTATIONS)
        self.in_backward = _checkbox("optimizer_in_backward")
        switches = {f: _checkbox(f) for f in SWITCHES}
        self.compile, self.channels_last = switches["compile"], switches["channels_last"]
        chunks = [(f"{n} chunks" if n > 1 else "one piece", n) for n in LOSS_CHUNKS]
        self.loss_chunks = widgets.Dropdown(options=chunks, description=LABELS["loss_chunks"])
        shares = [(f"{share:.0%}", share) for share in OFFLOAD_FRACTIONS]
        self.share = widgets.Dropdown(options=shares, description=LABELS["offload_fraction"])
        rest = [switches[field] for field in SWITCHES[2:]]
        at = rest.index(switches["offload_activations"]) + 1
        self.saving = (self.loss_chunks, *rest[:at], self.share, *rest[at:])
        self._choices = {
            "precision": self.precision,
            "checkpointing": self.checkpointing,
            "checkpoint_policy": self.policy,
            "budget_engine": self.engine,
            "budget_solver": self.solver,
            "budget_estimator": self.estimator,
            "optimizer": self.optimizer,
            "loss_chunks": self.loss_chunks,
            "offload_fraction": self.share,
            **switches,
            "optimizer_implementation": self.implementation,
            "optimizer_in_backward": self.in_backward,
        }
        for choice in self._choices.values():
            choice.observe(lambda _: self._tell(), "value")
        self.engine.observe(lambda _: self._offer_solvers(), "value")
        switches["offload_activations"].observe(lambda _: self._offer_shares(), "value")
        self.precision_explained = ExplainedLine(self.set)
        self.more_explained = ExplainedLine(self.set)
        self.optimizer_explained = ExplainedLine(self.set)
        self.set(settings)
        self._offer_solvers()
        self._offer_shares()

    def precision_row(self) -> Any:
        """Return the row of the number formats."""
        explained = self.precision_explained
        row = widgets.HBox([self.precision, explained.text, explained.button])
        row.add_class("memlab-row")
        row.add_class("memlab-choice-row")
        return row

    def settings(self) -> dict[str, Any]:
        """Return what is on screen by field; text that is no number stays text."""
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
                    self._choices[field].value = str(value) if isinstance(value, str) else value
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
        """Offer "fp32" beside "as-built" where it is another step, or what was chosen."""
        options = _precisions(self._formats, chosen)
        if tuple(options) != tuple(self.precision.options):
            self.precision.options = options  # which chooses the first of them
            self.precision.value = chosen

    def offer_blocks(self, possible: bool) -> None:
        """Allow checkpointing by block, or not."""
        self.checkpointing.disabled = not possible
        if not possible:
            self.checkpointing.value = "none"
        self.policy.disabled = self.checkpointing.value == "none"

    def _offer_solvers(self) -> None:
        """Allow the choices of PyTorch's partitioner where it plans."""
        for choice in (self.solver, self.estimator):
            choice.disabled = self.engine.value != BudgetEngine.COMPILE

    def _offer_shares(self) -> None:
        """Allow a share of the activations where they are offloaded."""
        self.share.disabled = not self._choices["offload_activations"].value

    def _tell(self) -> None:
        if not self._quiet:
            self._changed()


def _precisions(formats: tuple[str, ...], chosen: str) -> list[tuple[str, str]]:
    """Return the words and the value of each precision for a model of these formats."""
    is_fp32 = formats == FP32_FORMATS and chosen != Precision.FP32
    offered = [p for p in PRECISIONS if not (is_fp32 and p is Precision.FP32)]
    built = Precision.AS_BUILT.in_words(formats if is_fp32 else ())
    return [(built if p is Precision.AS_BUILT else str(p), str(p)) for p in offered]


def on_enter(box: Any, submit: Callable[[], None]) -> None:
    """Call `submit` when Enter is pressed in a text box."""

    def told(_: Any, content: Mapping[str, Any], __: Any) -> None:
        if content.get("event") == "submit":
            submit()

    box.on_msg(told)


def _dropdown(field: str, choices: tuple[Any, ...]) -> Any:
    return widgets.Dropdown(options=[str(c) for c in choices], description=LABELS[field])


def _checkbox(field: str) -> Any:
    return widgets.Checkbox(description=LABELS[field], indent=False)
