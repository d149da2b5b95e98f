"""The workload, config, device and limit on screen, and what is wrong with them."""

from collections.abc import Callable, Mapping
from typing import Any

from memlab._panel import cells, choices, state
from memlab._panel.forecasts import Question
from memlab._panel.view import View
from memlab.arguments.units import parse_bytes
from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.records.recorded import is_recorded, nearest, sizes
from memlab.workload import Workload


class Asked:
    """Reads the controls of a view.

    Args:
        view: whose controls.
        workloads: by name.
        device: that the view began with.
    """

    def __init__(self, view: View, workloads: Mapping[str, Workload], device: str) -> None:
        self._view, self._workloads = view, workloads
        self._followed: str | None = None  # the device whose default limit was set last
        self._default_limit = choices.default_limit(device)

    @property
    def workload(self) -> Workload:
        """The workload on screen."""
        return self._workloads[self._view.workload.value]

    @property
    def config(self) -> StepConfig:
        """The settings on screen.

        Raises:
            ConfigError: they are not allowed.
        """
        return state.to_config(self._view.controls.settings())

    @property
    def device(self) -> str:
        """The device on screen, as it was chosen or typed."""
        return self._view.device_name

    @property
    def is_here(self) -> bool:
        """Whether the device is in this machine."""
        return choices.is_here(self.device)

    @property
    def is_recorded(self) -> bool:
        """Whether the device is one whose recorded runs are played back."""
        return is_recorded(self.device)

    @property
    def nearest_recorded(self) -> StepConfig | None:
        """The recorded settings that are closest to those on screen; None if there are none.

        Raises:
            MemlabError: the settings or the device are not allowed.
        """
        return next(iter(nearest(self.workload, self.config, self.device)), None)

    @property
    def recorded_sizes(self) -> str:
        """Code that makes the workload on screen in recorded sizes; "" if there are no such sizes.

        Raises:
            DeviceError: the device is unknown.
        """
        for run in sizes(self.workload, self.device):
            return state.zoo_source(run.workload, run.options)
        return ""

    @property
    def question(self) -> Question | None:
        """The step to predict; None while its settings or its device are not allowed."""
        if self.device_problem or state.problems(self._view.controls.settings()):
            return None
        return Question(self.workload.name, self.config, choices.name_of(self.device))

    @property
    def limit(self) -> int | None:
        """The limit in bytes; None for none.

        Raises:
            ConfigError: the typed text is not a size.
        """
        text = self._view.limit.value.strip()
        return parse_bytes(text) if text else None

    @property
    def limit_or_none(self) -> int | None:
        """The limit in bytes; None also while it is not a size."""
        return None if self.limit_problem else self.limit

    @property
    def limit_problem(self) -> str | None:
        """Why the typed limit is not allowed; None if it is."""
        return _problem(lambda: self.limit)

    @property
    def device_problem(self) -> str | None:
        """Why the typed device is not allowed; None if it is."""
        return _problem(lambda: choices.name_of(self.device))

    def source(self) -> str:
        """Return code that measures what is asked for, predicts it for a card, or plays it back.

        Raises:
            ConfigError: the settings on screen are not allowed.
        """
        return state.source(
            self.workload,
            self.config,
            self.device,
            self._view.limit.value.strip(),
            ask="recorded" if self.is_recorded else "measure" if self.is_here else "predict",
            check_gradients=self._view.check.value,
            namespace=cells.namespace(),
        )

    def set(self, fields: Mapping[str, Any]) -> None:
        """Set workload, device, memory_limit or check_gradients as checked.

        A limit among the fields is kept when a device is set with it.
        """
        if "memory_limit" in fields:
            self._followed = fields.get("device", self._followed)
        self._view.set_others(fields)

    def follow_device(self) -> bool:
        """Replace the default limit of the former device by that of a newly chosen one.

        A limit that a person typed stays. Returns whether the device is a new one.
        """
        if self.device == self._followed or self.device_problem:
            return False
        self._followed = self.device
        if self._view.limit.value.strip() == self._default_limit:
            self._default_limit = choices.default_limit(self.device)
            self._view.set_others({"memory_limit": self._default_limit})

        return True


def _problem(check: Callable[[], object]) -> str | None:
    """Return the message of the `MemlabError` that the check raises; None if it raises none."""
    try:
        check()
    except MemlabError as error:
        return str(error)
    return None
