"""What can be set in the panel, as the page is told: controls, their choices, words and help.

A control of `StepConfig` is declared by its technique (`Control`); nothing here names one but for
its place on the page.
"""

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from memlab._panel import texts
from memlab._panel.choices import OTHER, devices, positions, quantized_base
from memlab._panel.state import PRECISIONS, Settings, counts, offered
from memlab._panel.texts import as_json, more_label, ranks_label
from memlab._version import __version__
from memlab.config import FP32_FORMATS, Precision, StepConfig
from memlab.techniques.registry import CONTROLS, EVERY
from memlab.techniques.technique import Saving
from memlab.workload import Value, Workload, WorkloadChoices

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
HELP_HEADS = ("control", "setting", "saves", "costs", "not for")


def help_page() -> dict[str, Any]:
    """Return the help: how to read the page, as HTML, and a table of what each control saves."""
    rows = [
        [_labels(one), one.setting, one.saves, one.costs or "nothing", one.not_for]
        for one in _savings()
    ]
    return {"general": GENERAL, "heads": HELP_HEADS, "rows": rows}


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


SLIDERS = ("memory_budget", "batch_size", "accumulation_steps")
FIRST = (
    "checkpointing", "checkpoint_policy", "budget_engine", "budget_solver", "budget_estimator",
    "compile",
)  # fmt: skip
"""The first of the folded controls; those of other techniques follow in their own order."""

OF_OPTIMIZER = tuple(c.field for technique in texts.OF_OPTIMIZER for c in technique.controls)
OF_RANKS = tuple(c.field for c in texts.RANK_FIELDS.controls)
PLACED = (*SLIDERS, "precision", *FIRST, *OF_OPTIMIZER, *OF_RANKS)
PLACES = {
    "slider": SLIDERS,
    "main": ("precision",),
    "more": (*FIRST, *(field for field in CONTROLS if field not in PLACED)),
    "optimizer": OF_OPTIMIZER,
    "ranks": OF_RANKS,
}
NUMBERS = (*SLIDERS, "world_size")


def catalog(workloads: Mapping[str, Workload], device: str) -> dict[str, Any]:
    """Return what can be chosen, whatever is set.

    Args:
        workloads: by name.
        device: that is always among the devices.
    """
    return {
        "version": __version__,
        "workloads": [{"value": name, "label": name} for name in workloads],
        "devices": [
            {"value": name, "label": shown, "group": group}
            for shown, name, group in devices(device)
        ],
        "other": OTHER,
        "controls": [control(field, place) for place in PLACES for field in PLACES[place]],
        "tooltips": {name: tooltip(name) for name in HEADER},
        "help": help_page(),
    }


def control(field: str, place: str) -> dict[str, Any]:
    """Return a control of a place of the page."""
    default = getattr(StepConfig(), field)
    is_number = field in NUMBERS
    kind = "number" if is_number else "switch" if isinstance(default, bool) else "choice"
    return {
        "field": field,
        "label": CONTROLS[field].label,
        "tooltip": tooltip(field),
        "place": place,
        "kind": kind,
        "choices": [_offer(value, CONTROLS[field].in_words(value)) for value in offered(field)],
        "positions": positions(field) if is_number else [],
    }


def form(
    listed: Workload,
    given: Workload,
    settings: Settings,
    *,
    formats: tuple[str, ...],
    has_blocks: bool,
) -> dict[str, Any]:
    """Return what the workload on screen offers, and which controls do something.

    Args:
        listed: the workload of the list.
        given: the same with the choices on screen.
        settings: on screen, by field of `StepConfig`.
        formats: of the numbers of its model; empty while they are not known.
        has_blocks: whether it can be checkpointed by block.
    """
    size = given.sample_size
    off = [field for field in CONTROLS if not counts(field, settings)]
    return {
        "size": size and {"label": _begun(size.name), "offered": list(size.offered)},
        "choices": _choices(listed.choices, given.choices),
        "precisions": _precisions(formats, str(settings["precision"])),
        "disabled": off if has_blocks else [*off, "checkpointing"],
        "own": {name: value for name, value in as_json(settings).items() if _is_own(name, value)},
        "moreLabel": more_label(settings),
        "ranksLabel": ranks_label(settings),
        "base": quantized_base(given),
    }


def _is_own(field: str, value: Any) -> bool:
    """Return whether a value is a person's own, which is none of the choices."""
    return bool(offered(field)) and value not in offered(field)


def _choices(own: WorkloadChoices | None, here: WorkloadChoices | None) -> list[dict[str, Any]]:
    """Return the choices of a workload; of which it offers one value alone, that is disabled."""
    if own is None or here is None:
        return []
    found = []
    for name, value in here.values.items():
        values = dict.fromkeys((*own.offered[name], own.values[name], value))
        found.append(
            {
                "name": name,
                "label": label(name),
                "values": [_offer(one, words(one)) for one in values],
                "disabled": len(here.offered.get(name, ())) < 2,
            }
        )
    return found


def _offer(value: Any, said: str) -> dict[str, Any]:
    return {"value": as_json({"": value})[""], "label": said}


def _precisions(formats: tuple[str, ...], chosen: str) -> list[dict[str, Any]]:
    """Return the precisions; "fp32" beside "as-built" where the two differ, or where it is set."""
    is_fp32 = formats == FP32_FORMATS and chosen != Precision.FP32
    built = Precision.AS_BUILT.in_words(formats if is_fp32 else ())
    return [
        _offer(str(one), built if one is Precision.AS_BUILT else str(one))
        for one in PRECISIONS
        if not (is_fp32 and one is Precision.FP32)
    ]


def _begun(name: str) -> str:
    return name[:1].upper() + name[1:]


def label(name: str) -> str:
    """Return the name of a choice as people read it, such as "Prepare for kbit"."""
    return name.replace("_", " ").capitalize()


def words(value: Value) -> str:
    """Return a value as people read it, such as "yes" for True."""
    named = {None: "usual", True: "yes", False: "no"}
    return named[value] if value is None or isinstance(value, bool) else str(value)
