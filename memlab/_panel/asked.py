"""The workload, config, device and limit on screen, and what is wrong with them."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from memlab._panel import as_code, cells, choices, state
from memlab._panel.made_choices import MadeChoices
from memlab._panel.made_sizes import MadeSizes
from memlab._panel.neighbours import FARTHEST
from memlab._panel.questions import Question
from memlab._panel.view import View
from memlab.arguments.checks import count
from memlab.arguments.units import parse_bytes
from memlab.config import StepConfig
from memlab.errors import MemlabError, WorkloadError
from memlab.records import where
from memlab.records.recorded import is_recorded, nearest, sizes
from memlab.workload import SampleSize, Workload


class Asked:
    """Reads the controls of a view.

    Args:
        view: whose controls.
        workloads: by name; those in other sizes that are asked for are added.
        panel: whose controls they are; code calls it by its name in the notebook.
        arrived: called in a thread when the workload on screen, which is being made, is there.
    """

    def __init__(
        self,
        view: View,
        workloads: dict[str, Workload],
        panel: object,
        arrived: Callable[[], None],
    ) -> None:
        self._view, self._workloads, self._panel = view, workloads, panel
        self._offered: str | None = None  # the workload whose sizes and choices are offered
        self._choices = MadeChoices(workloads)
        self._sizes = MadeSizes(workloads, arrived)
        self._followed: str | None = None  # the device to which the typed limit belongs
        self._typed_limits: dict[str, str] = {}  # by device, as they were when it was left

    @property
    def listed(self) -> Workload:
        """The workload of the list, with its own choices and in its own sample size."""
        return self._workloads[self._view.workload.value]

    @property
    def given(self) -> Workload:
        """The workload with the choices on screen, or its own if it cannot have these."""
        with contextlib.suppress(WorkloadError):
            return self._with_choices
        return self.listed

    @property
    def _with_choices(self) -> Workload:
        """The same; raises WorkloadError if it cannot have the choices on screen."""
        if self.listed.choices is None or self.listed.name != self._offered:
            return self.listed
        return self._choices.get(self.listed, self._view.choices.value)

    @property
    def choices_problem(self) -> str | None:
        """Why the workload cannot have the choices on screen; None if it can."""
        return _problem(lambda: self._with_choices)

    @property
    def workload(self) -> Workload:
        """The workload on screen, in the sample size on screen; waits until that is made.

        Raises:
            WorkloadError: it cannot have this size.
        """
        return self._sizes.get(self.given, self._size)

    @property
    def _shown(self) -> Workload | None:
        """The same without waiting: None while it is being made.

        Raises:
            WorkloadError: it cannot have this size.
        """
        return self._sizes.look(self.given, self._size)

    @property
    def _size(self) -> Any:
        """The sample size on screen; None for that of the workload itself."""
        is_offered = self.listed.name == self._offered
        return self._view.size.value if self.given.sample_size and is_offered else None

    @property
    def sample_size(self) -> SampleSize | None:
        """The sample size of the workload on screen; None if it has none, or has yet to be made.

        Raises:
            WorkloadError: it cannot have the size on screen.
        """
        shown = self._shown
        return shown.sample_size if shown else None

    @property
    def is_being_made(self) -> bool:
        """Whether the workload on screen is being made in the size on screen."""
        with contextlib.suppress(WorkloadError):
            return self._shown is None
        return False

    @property
    def name(self) -> str:
        """The name of the workload on screen; without its size if it does not have that."""
        with contextlib.suppress(WorkloadError):
            return (self._shown or self.given).name
        return self.given.name

    @property
    def names_by_size(self) -> list[str]:
        """The names of the workload in the sizes next to the one on screen, and in that, ascending.

        Those that are not made yet are left out, and `arrived` tells of them. There are none if the
        workload has one size only, or cannot have the one on screen.
        """
        given, here = self.given, None
        with contextlib.suppress(WorkloadError):
            here = self.sample_size
        if given.sample_size is None or here is None:
            return []

        sizes = sorted({*given.sample_size.offered, here.value})
        middle = sizes.index(here.value)
        near = sizes[max(middle - FARTHEST, 0) : middle + FARTHEST + 1]
        return [workload.name for workload in self._sizes.made(given, near)]

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
        return where.is_here(self.device)

    @property
    def is_recorded(self) -> bool:
        """Whether the device is one whose recorded runs are played back."""
        return is_recorded(self.device)

    @property
    def can_run(self) -> bool:
        """Whether Run can measure on the device, or play back what was recorded on it."""
        return self.is_here or self.is_recorded

    @property
    def nearest_recorded(self) -> StepConfig | None:
        """The recorded settings that are closest to those on screen; None if there are none.

        None too while the workload on screen is being made.

        Raises:
            MemlabError: the settings or the device are not allowed.
        """
        shown = self._shown
        return next(iter(nearest(shown, self.config, self.device)), None) if shown else None

    @property
    def recorded_sizes(self) -> str:
        """Code that makes the workload on screen in recorded sizes; "" if there are no such sizes.

        Raises:
            DeviceError: the device is unknown.
        """
        shown = self._shown
        for run in sizes(shown, self.device) if shown else ():
            return as_code.zoo_source(run.workload, run.options)
        return ""

    @property
    def question(self) -> Question | None:
        """The step to predict; None while its settings or its device are not allowed.

        It is None too while its workload is being made.
        """
        shown = None
        with contextlib.suppress(WorkloadError):
            shown = self._shown
        if shown is None or self.choices_problem or self.device_problem or self.wrong:
            return None
        return Question(shown.name, self.config, choices.name_of(self.device))

    @property
    def num_cards(self) -> int | None:
        """How many cards the cluster on screen has; None if the device is none, or not allowed."""
        return None if self.device_problem else choices.num_cards(self.device)

    @property
    def wrong(self) -> dict[str, str]:
        """The error of each setting on screen that is not allowed, by field."""
        settings, cards = self._view.controls.settings(), self.num_cards
        wrong = state.problems(settings)
        if wrong or cards is None or not state.is_sharded(settings):
            return wrong
        ranks = settings["world_size"]
        if ranks <= cards:
            return {}
        return {"world_size": f"world_size={ranks} is more than the {cards} cards of {self.device}"}

    @property
    def typed_limit(self) -> int | None:
        """The limit that a person typed, in bytes; None for none.

        Raises:
            ConfigError: the typed text is not a size.
        """
        text = self._view.limit.value.strip()
        return parse_bytes(text) if text else None

    @property
    def capacity(self) -> int | None:
        """The bytes that the device on screen can hold; None if that is not known."""
        return None if self.device_problem else where.capacity(self.device)

    @property
    def limit(self) -> int | None:
        """The bytes that the step is compared with: the typed limit if the device can hold that."""
        typed = None if self.limit_problem else self.typed_limit
        return min((size for size in (typed, self.capacity) if size is not None), default=None)

    @property
    def limit_problem(self) -> str | None:
        """Why the typed limit is not allowed; None if it is."""
        return _problem(lambda: self.typed_limit)

    @property
    def device_problem(self) -> str | None:
        """Why the typed device is not allowed; None if it is."""
        return _problem(lambda: choices.name_of(self.device))

    @property
    def size_problem(self) -> str | None:
        """Why the workload cannot have the sample size on screen; None if it can."""
        return _problem(lambda: self._shown)

    @property
    def settings(self) -> dict[str, Any]:
        """All that `Panel.set` takes, as it is on screen; None for the workload's own form."""
        own, size = self.given.sample_size, self._view.size.value
        choices, values = self.listed.choices, self._view.choices.value
        return {
            "workload": self._view.workload.value,
            "choices": None if choices is None or choices.values == values else values,
            "sample_size": None if own is None or own.value == size else size,
            "device": self.device,
            "memory_limit": self._view.limit.value.strip() or None,
            "check_gradients": self._view.check.value,
            **self._view.controls.settings(),
        }

    @property
    def to_keep(self) -> dict[str, Any]:
        """The settings as the history keeps them: with the workload in its own form."""
        return {**self.settings, "given": _in_own_size(self.listed)}

    def not_named(self, kept: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
        """Return the kept settings that the code does not name.

        Code that makes the workload in another form than before names that.
        """
        found = {name: value for name, value in kept.items() if name not in {*named, "given"}}
        given = self._workloads.get(found.get("workload", self.listed.name))
        if given is None or kept.get("given") != _in_own_size(given):
            found.pop("sample_size", None)
            found.pop("choices", None)
        if _problem(lambda: self.check_form(found)):  # the code was edited; the rest comes back
            found.pop("sample_size", None)
            found.pop("choices", None)
        return found

    def source(self, workload: Workload | None = None) -> str:
        """Return code that measures what is asked for, predicts it for a card, or plays it back.

        Args:
            workload: on screen; None waits until it is made.

        Raises:
            ConfigError: the settings on screen are not allowed.
        """
        return as_code.source(
            workload or self.workload,
            self.config,
            self.device,
            self._view.limit.value.strip(),
            has_known_memory=self.capacity is not None,
            ask="recorded" if self.is_recorded else "measure" if self.is_here else "predict",
            check_gradients=self._view.check.value,
            namespace=cells.namespace(),
        )

    def code(self) -> list[as_code.Part]:
        """Return what the button "code" shows: headings, each with code.

        There are none while the workload is being made.

        Raises:
            MemlabError: the settings on screen are not allowed.
        """
        shown = self._shown
        if shown is None:
            return []
        return as_code.parts(
            self.source(shown),
            shown,
            self.config,
            self.device,
            self._view.limit.value.strip(),
            self._panel,
            cells.namespace(),
        )

    def check_form(self, fields: Mapping[str, Any]) -> None:
        """Check that the workload among the fields, or that on screen, can have their form.

        Raises:
            MemlabError: it cannot have their choices or their sample size; the message says why.
        """
        listed = self._workloads.get(fields.get("workload", ""), self.listed)
        is_here = listed is self.listed
        given = self.given if is_here else listed
        if "choices" in fields:
            on_screen = self._view.choices.value if is_here else {}
            given = self._choices.checked(listed, fields["choices"], on_screen)
        if (size := fields.get("sample_size")) is not None:
            self._sizes.get(given, count(1)("sample_size", size))

    def set(self, fields: Mapping[str, Any]) -> None:
        """Set what is no field of a config, as checked.

        A limit among the fields is kept when a device is set with it, and choices and a sample size
        when a workload is.
        """
        if "memory_limit" in fields:
            self._followed = fields.get("device", self._followed)
        others = fields.keys() - {"choices", "sample_size"}
        self._view.set_others({name: fields[name] for name in fields if name in others})
        self.follow_workload()
        if "choices" in fields and (offered := self.listed.choices):
            values, on_screen = fields["choices"], self._view.choices.value
            made = self._choices.checked(self.listed, values, on_screen).choices or offered
            self._view.set_others({"choices": made.values})
        if "sample_size" in fields and (own := self.given.sample_size):
            size = fields["sample_size"]
            self._view.set_others({"sample_size": own.value if size is None else size})

    def follow_workload(self) -> None:
        """Offer the sizes and choices of a newly chosen workload, and show its own."""
        if self.listed.name != self._offered:
            self._view.offer_forms(self.listed)
            self._offered = self.listed.name

    def close(self) -> None:
        """End the thread that makes workloads in other sizes."""
        self._sizes.close()

    def follow_device(self) -> None:
        """Show the limit that was typed for a newly chosen device, and else no typed limit.

        A typed limit belongs to the device for which it was typed.
        """
        if self.device == self._followed or self.device_problem:
            return
        if self._followed is not None:
            self._typed_limits[self._followed] = self._view.limit.value
            self._view.set_others({"memory_limit": self._typed_limits.get(self.device, "")})
        self._followed = self.device


def _in_own_size(given: Workload) -> str:
    return f"{given.base_name}, {given.sample_size}"


def _problem(check: Callable[[], object]) -> str | None:
    """Return the message of the `MemlabError` that the check raises; None if it raises none."""
    try:
        check()
    except MemlabError as error:
        return str(error)
    return None
