"""The workload, config, device and limit on screen, and what is wrong with them."""

import contextlib
import dataclasses
import keyword
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from memlab._panel import choices, state
from memlab._panel.choices import FARTHEST, MadeChoices, MadeSizes, quantized_base, zoo_options
from memlab._panel.questions import Question
from memlab._util.checks import count
from memlab._util.functions import is_same_function
from memlab._util.units import is_a, literal, parse_bytes
from memlab.config import StepConfig
from memlab.errors import MemlabError, WorkloadError
from memlab.store import recorded
from memlab.store.recorded import is_recorded, nearest, sizes
from memlab.techniques.script import script
from memlab.workload import SampleSize, Workload
from memlab.workloads.finetuned import finetune_options

# What the button "code" shows: this step by memlab, in plain PyTorch, the panel, and its
# runs.
#
# Pure functions of what is on screen and of the names of the notebook. No widgets.

Part = tuple[str, str]
"""A heading and the code below it."""
NO_WORKLOAD = "# put the workload here, as `workload`"
NO_PANEL = """# no variable holds this panel yet: let the last lines of its cell be
#     panel = memlab.panel(...)
#     panel
# and run the cell again
"""


def parts(
    measured: str,
    workload: Workload,
    config: StepConfig,
    device: str,
    memory_limit: str,
    panel: object,
    namespace: Mapping[str, Any],
) -> list[Part]:
    """Return all that the button shows.

    Args:
        measured: the code that `source` returned.
        workload: on screen.
        config: the settings on screen.
        device: on screen.
        memory_limit: the typed text; "" for what the device can hold.
        panel: itself, whose variable is looked for.
        namespace: the names of the notebook.
    """
    return [
        ("This step by memlab", measured),
        *_of_quantized_base(workload, device, namespace),
        ("The same step in plain PyTorch", _plain_pytorch(workload, config, device)),
        ("All runs of this panel as a pandas DataFrame", _results_source(panel, namespace)),
        ("This panel again", panel_source(workload, config, device, memory_limit, namespace)),
    ]


def panel_source(
    workload: Workload,
    config: StepConfig,
    device: str,
    memory_limit: str,
    namespace: Mapping[str, Any],
) -> str:
    """Return one line of Python that shows a panel with these settings.

    A comment comes before it if it uses a workload that is in no variable.
    """
    name, line = workload_source(workload, namespace)
    call = line.rpartition("workload = ")[2]
    made = name if call == line else call
    limit = f", memory_limit={literal(memory_limit)}" if memory_limit else ""
    asked = f"config={config_source(config, namespace)}"
    comment = f"{line}\n" if line == NO_WORKLOAD else ""
    return f"{comment}memlab.panel({made}, device={literal(device)}{limit}, {asked})"


def config_source(config: StepConfig, namespace: Mapping[str, Any]) -> str:
    """Return the call that makes a config; a function is named as the notebook names it."""
    shown = [f"batch_size={config.batch_size}"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "batch_size" and value != field.default:
            shown.append(f"{field.name}={_expression(value, namespace)}")
    return f"memlab.StepConfig({', '.join(shown)})"


def _of_quantized_base(workload: Workload, device: str, namespace: Mapping[str, Any]) -> list[Part]:
    """Return the call that says what a quantized base saves and costs, if the workload has one."""
    if quantized_base(workload) is None:
        return []
    name, _ = workload_source(workload, namespace)
    call = f"print(memlab.compare_base({name}, config, device={literal(device)}))"
    return [("What its quantized base saves, and why it may not help", call)]


def _plain_pytorch(workload: Workload, config: StepConfig, device: str) -> str:
    """Return the script of a step, or as a comment why there is none."""
    kind = "cpu" if device == "cpu" else "cuda"  # all cards that are not here are CUDA cards
    try:
        return script(config, kind, workload=workload)
    except MemlabError as error:
        return f"# {error}"


def as_source(
    workload: Workload | None,
    config: StepConfig,
    device: str,
    memory_limit: str,
    *,
    has_known_memory: bool = False,
    ask: str = "measure",
    check_gradients: bool = False,
    namespace: Mapping[str, Any] | None = None,
) -> str:
    """Return Python source that measures this config, predicts it or plays it back.

    Args:
        workload: of the zoo, or a person's own; None if only its name is known.
        config: the settings.
        device: the device.
        memory_limit: the typed text; "" for what the device can hold.
        has_known_memory: whether it is known what the device can hold.
        ask: the function to call: "measure", "predict" or "recorded".
        check_gradients: whether the code also compares the gradients.
        namespace: the names of the notebook, among which a person's own workload is found.
    """
    limit = ""
    if memory_limit and ask != "recorded":
        limit = f", memory_limit={literal(memory_limit)}"
    elif ask == "predict" and has_known_memory:
        limit = f", memory_limit=memlab.card({literal(device)}).usable_bytes"

    none = "workload", NO_WORKLOAD
    name, line = workload_source(workload, namespace or {}) if workload else none
    lines = [
        "import memlab\n",
        line,
        f"config = {config_source(config, namespace or {})}",
        f"result = memlab.{ask}({name}, config, device={literal(device)}{limit})",
        "print(result)",
    ]
    if check_gradients and ask == "measure":
        verified = f"memlab.verify({name}, config, device={literal(device)})"
        lines += [f"report = {verified}", "print(report)"]

    return "\n".join(lines) + "\n"


def workload_source(workload: Workload, namespace: Mapping[str, Any]) -> tuple[str, str]:
    """Return the expression that is the workload, and a line before it: its creation, or a comment.

    The expression is a variable, or makes the form on screen of a workload that a variable holds.
    """
    if (options := zoo_options(workload)) is not None:
        return "workload", f"workload = {zoo_source(workload.base_name, options)}"
    own = _variable(workload, namespace)
    if own is None and (made := _made_source(workload, namespace)):
        return made
    if own is None and (call := finetune_source(workload)):
        return "workload", f"{_without_lengths(workload)}workload = {call}"
    if own:
        return own, f"# {own} is the workload that the panel was given"
    return "workload", NO_WORKLOAD


def zoo_source(name: str, options: Mapping[str, Any]) -> str:
    """Return the call that makes a workload of the zoo."""
    given = "".join(f", {option}={literal(value)}" for option, value in options.items())
    return f"memlab.workloads.get({literal(name)}{given})"


def finetune_source(workload: Workload) -> str | None:
    """Return the call that makes a workload of `memlab.workloads.finetune`; None for any other."""
    options = finetune_options(workload)
    if options is None:
        return None
    given = ", ".join(
        literal(value) if name == "model" else f"{name}={literal(value)}"
        for name, value in options.items()
    )
    return f"memlab.workloads.finetune({given})"


def _without_lengths(workload: Workload) -> str:
    """Return a comment on lengths that are too many to be written; "" if none are missing."""
    options, lengths = finetune_options(workload), workload.lengths
    if lengths is None or options is None or "lengths" in options:
        return ""
    return f"# its {len(lengths):,} lengths are left out; a step does not depend on them\n"


def _results_source(panel: object, namespace: Mapping[str, Any]) -> str:
    """Return code that gives the runs; without a variable, from the output of the panel's cell."""
    if name := _variable(panel, namespace):
        return f"{name}.results"
    outputs = namespace.get("Out")  # which a notebook may use for something else
    for number, output in outputs.items() if isinstance(outputs, Mapping) else ():
        if output is panel:
            return f"Out[{number}].results"
    return f"{NO_PANEL}panel.results"


def _expression(value: Any, namespace: Mapping[str, Any]) -> str:
    """Return the value of a setting as Python: a literal, or the variable that holds a function."""
    if not callable(value):
        return literal(value)
    # a function has no literal; an undefined name shows where to put it
    return _variable(value, namespace) or "policy_function"


def _made_source(workload: Workload, namespace: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return an expression and a comment, if a variable holds the workload in another form."""
    for held in namespace.values():
        if not is_a(held, Workload) or not (name := _variable(held, namespace)):
            continue
        call = f"{name}{_chosen_source(held, workload)}{_resized_source(held, workload)}"
        if call != name and _is_same(held, workload):
            return call, f"# {name} is the workload that the panel was given"
    return None


def _chosen_source(held: Workload, shown: Workload) -> str:
    """Return the call that gives a workload the choices of another one; "" for none."""
    if held.choices is None or shown.choices is None:
        return ""
    own, asked = held.choices.values, shown.choices.values
    changed = {name: value for name, value in asked.items() if value != own.get(name)}
    given = ", ".join(f"{name}={literal(value)}" for name, value in changed.items())
    return f".chosen({given})" if given else ""


def _resized_source(held: Workload, shown: Workload) -> str:
    """Return the call that gives a workload the sample size of another one; "" for none."""
    own, asked = held.sample_size, shown.sample_size
    if own is None or asked is None or own.value == asked.value:
        return ""
    return f".resized({asked.value})"


def _is_same(held: Workload, shown: Workload) -> bool:
    """Return whether a workload is another one once it has its choices and its sample size."""
    size, asked = held.sample_size, shown.sample_size
    if held.choices is None or shown.choices is None:
        return size is not None and asked is not None and size.make_workload is asked.make_workload
    try:
        made = held.chosen(**shown.choices.values)
        if asked is not None:
            made = made.resized(asked.value)
    except MemlabError:
        return False
    return made.name == shown.name and is_same_function(made.build_model, shown.build_model)


def _variable(value: Any, namespace: Mapping[str, Any]) -> str | None:
    """Return the name of the notebook's variable that holds this value, if it has one."""
    for name, held in namespace.items():
        is_name = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
        if held is value and is_name:
            return name
    return None


# What the panel knows about its notebook: its variables, and which cell made which panel.
#
# A cell that is run again closes its former panel and ends a run of it.


class Closable(Protocol):
    """Anything that can be closed."""

    def close(self) -> None:
        """Close it."""


class Shown(Protocol):
    """An output that can be replaced in place."""

    def update(self, bundle: Mapping[str, Any], *, raw: bool) -> None:
        """Show this MIME bundle instead."""


_made: dict[str, tuple[str, list[Closable]]] = {}  # cell -> (execution, panels it made)


def namespace() -> Mapping[str, Any]:
    """Return the names of the notebook; empty outside one."""
    shell = _shell()
    return {} if shell is None else dict(shell.user_ns)


def replace_former(panel: Closable) -> None:
    """Close the panels that an earlier execution of this cell made, and remember this one."""
    cell, execution = _here()
    if not cell:
        return

    former, panels = _made.get(cell, ("", []))
    if former != execution:
        for old in panels:
            old.close()
        panels = []

    _made[cell] = (execution, [*panels, panel])


def place() -> str:
    """Return which panel of which cell of which notebook is made next; "" outside JupyterLab.

    It is the same after a restart of the kernel.
    """
    notebook, (cell, execution) = os.environ.get("JPY_SESSION_NAME", ""), _here()
    if not notebook or not cell:
        return ""
    former, panels = _made.get(cell, ("", []))
    return f"{notebook} {cell} {len(panels) if former == execution else 0}"


def show(bundle: Mapping[str, Any]) -> Shown:
    """Show a MIME bundle as an output of the running cell, and return a handle to replace it."""
    from IPython.display import display

    shown: Shown = display(dict(bundle), raw=True, display_id=True)  # type: ignore[no-untyped-call]
    return shown


def _here() -> tuple[str, str]:
    """Return the ids of the running cell and of this execution of it; "" where there are none."""
    parent: dict[str, Any] = getattr(_shell(), "get_parent", dict)() or {}
    metadata = parent.get("metadata") or {}
    return str(metadata.get("cellId", "")), str((parent.get("header") or {}).get("msg_id", ""))


def _shell() -> Any:
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


TYPED = ("device", "memory_limit")  # on a page, as texts


class Asked:
    """The settings on screen, which may be wrong for a while, and what they ask for.

    Args:
        fields: the first settings: all that `Panel.set` takes, by name.
        workloads: by name; those in other sizes that are asked for are added.
        panel: whose settings they are; code calls it by its name in the notebook.
        arrived: called in a thread when the workload on screen, which is being made, is there.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        workloads: dict[str, Workload],
        panel: object,
        arrived: Callable[[], None],
    ) -> None:
        self._fields: dict[str, Any] = {}
        self._own: dict[str, Any] = {}  # by field: what a person has set that is no choice here
        self.set_step(fields)
        self.names = tuple(workloads)  # of the list
        self._workloads, self._panel = workloads, panel
        self._offered: str | None = None  # the workload whose sizes and choices are offered
        self._choices = MadeChoices(workloads)
        self._sizes = MadeSizes(workloads, arrived)
        self._followed: str | None = None  # the device to which the typed limit belongs
        self._typed_limits: dict[str, str] = {}  # by device, as they were when it was left
        self.follow_workload()

    @property
    def fields(self) -> dict[str, Any]:
        """All settings by name, as they are on screen."""
        return dict(self._fields)

    @property
    def of_step(self) -> dict[str, Any]:
        """The settings that are fields of a config, as they are on screen."""
        return {field: self._fields[field] for field in state.FIELDS}

    @property
    def limit_text(self) -> str:
        """The typed limit; "" for none."""
        return str(self._fields["memory_limit"] or "").strip()

    @property
    def _own_choices(self) -> dict[str, Any]:
        return self._fields["choices"] or {}

    @property
    def listed(self) -> Workload:
        """The workload of the list, with its own choices and in its own sample size."""
        return self._workloads[self._fields["workload"]]

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
        return self._choices.get(self.listed, self._own_choices)

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
        size = self._fields["sample_size"]
        return size if self.given.sample_size and is_offered else None

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
        return state.to_config(self.of_step)

    @property
    def device(self) -> str:
        """The device on screen, as it was chosen or typed."""
        return str(self._fields["device"])

    @property
    def is_here(self) -> bool:
        """Whether the device is in this machine."""
        return recorded.is_here(self.device)

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
            return zoo_source(run.workload, run.options)
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
        settings, cards = self.of_step, self.num_cards
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
        return parse_bytes(self.limit_text) if self.limit_text else None

    @property
    def capacity(self) -> int | None:
        """The bytes that the device on screen can hold; None if that is not known."""
        return None if self.device_problem else recorded.capacity(self.device)

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
        own, size = self.given.sample_size, self._fields["sample_size"]
        choices, values = self.listed.choices, self._own_choices
        return {
            **self._fields,
            "choices": None if choices is None or choices.values == values else values,
            "sample_size": None if own is None or own.value == size else size,
            "memory_limit": self.limit_text or None,
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
        return as_source(
            workload or self.workload,
            self.config,
            self.device,
            self.limit_text,
            has_known_memory=self.capacity is not None,
            ask="recorded" if self.is_recorded else "measure" if self.is_here else "predict",
            check_gradients=self.checks_gradients,
            namespace=namespace(),
        )

    def code(self) -> list[Part]:
        """Return what the button "code" shows: headings, each with code.

        There are none while the workload is being made.

        Raises:
            MemlabError: the settings on screen are not allowed.
        """
        shown = self._shown
        if shown is None:
            return []
        return parts(
            self.source(shown),
            shown,
            self.config,
            self.device,
            self.limit_text,
            self._panel,
            namespace(),
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
            on_screen = self._own_choices if is_here else {}
            given = self._choices.checked(listed, fields["choices"], on_screen)
        if (size := fields.get("sample_size")) is not None:
            self._sizes.get(given, count(1)("sample_size", size))

    @property
    def checks_gradients(self) -> bool:
        """Whether a run compares its gradients with those of the reference step."""
        return bool(self._fields["check_gradients"])

    def set(self, fields: Mapping[str, Any]) -> None:
        """Set what is no field of a config, as checked.

        A limit among the fields is kept when a device is set with it, and choices and a sample size
        when a workload is.
        """
        first = {name: fields[name] for name in fields if name not in ("choices", "sample_size")}
        if "memory_limit" in fields:
            self._followed = fields.get("device", self._followed)
        self._fields |= first
        self.follow_workload()
        if "choices" in fields and (offered := self.listed.choices):
            made = self._choices.checked(self.listed, fields["choices"], self._own_choices).choices
            self._fields["choices"] = dict((made or offered).values)
        if "sample_size" in fields and (own := self.given.sample_size):
            size = fields["sample_size"]
            self._fields["sample_size"] = own.value if size is None else size

    def set_step(self, settings: Mapping[str, Any]) -> None:
        """Set fields of a config, as checked."""
        self._own |= {
            field: settings[field]
            for field in state.FIELDS
            if state.offered(field)
            and settings.get(field, state.offered(field)[0]) not in state.offered(field)
        }
        self._fields |= settings

    def take(self, fields: Mapping[str, Any]) -> None:
        """Take what a person has set on the page, which may be wrong for a while.

        Raises:
            MemlabError: there is no such setting, workload or choice; nothing is changed.
        """
        state.check_names(fields)
        workload = fields.get("workload", self._fields["workload"])
        if workload not in self.names:
            raise WorkloadError(f"workload={workload!r} is not in the panel")
        found = {
            name: state.from_page(name, value, self._own.get(name))
            for name, value in fields.items()
            if name in state.FIELDS
        }
        texts = {name: fields[name] and str(fields[name]) for name in TYPED if name in fields}
        if "check_gradients" in fields:
            found["check_gradients"] = bool(fields["check_gradients"])
        former, limit = self.device, self.limit_text
        self._fields |= found | texts | {"workload": workload}
        if "memory_limit" in texts and self.device != former and not self.device_problem:
            self._typed_limits[former] = limit  # the limit that came with a device is of that
            self._followed = self.device
        self.follow_workload()
        if isinstance(values := fields.get("choices"), Mapping):
            known = {name: value for name, value in values.items() if name in self._own_choices}
            self._fields["choices"] = self._own_choices | known
        if (size := fields.get("sample_size")) is not None:
            self._fields["sample_size"] = state.parse_number(str(size), int)
        self.follow_device()

    def follow_workload(self) -> None:
        """Show the own size and choices of a newly chosen workload."""
        if self.listed.name != self._offered:
            own, size = self.listed.choices, self.listed.sample_size
            self._fields["choices"] = dict(own.values) if own else None
            self._fields["sample_size"] = size.value if size else None
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
            self._typed_limits[self._followed] = self.limit_text
            self._fields["memory_limit"] = self._typed_limits.get(self.device) or None
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
