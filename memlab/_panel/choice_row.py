"""The controls of what else a workload can be made with: the adapter, the format of the base.

They are no settings of `StepConfig`: a workload with another adapter is another workload.
"""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from memlab._panel.controls import ExplainedLine, close
from memlab.workload import Value, WorkloadChoices


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
