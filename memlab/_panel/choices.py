"""The choices in the panel's header: workloads, devices here, cards elsewhere, and a limit."""

import dataclasses
from typing import Any

import torch

from memlab import workloads
from memlab.arguments.functions import is_same_function
from memlab.arguments.units import KIB, parse_bytes
from memlab.devices import cards, cluster_table
from memlab.devices.here import describe, resolve_device
from memlab.errors import ConfigError, WorkloadError
from memlab.records.recorded import is_recorded, record_of, recordings
from memlab.workload import FUNCTIONS, Workload
from memlab.workloads.quantizing import QUANTIZED

OTHER_FORMS = {"pcie", "laptop"}
OTHER, OTHER_TEXT = "other", "another card, by memory size"


def offered_workloads(given: Workload | None) -> dict[str, Workload]:
    """Return workloads by name: the given one first, then the zoo.

    Raises:
        WorkloadError: the argument is not a workload.
    """
    if given is not None and not isinstance(given, Workload):
        raise WorkloadError(
            f"workload={given!r} is not a Workload; pass memlab.workloads.get('gpt-small'), or "
            "Workload.from_module(module, example_batch, loss_fn)"
        )
    first = {given.name: given} if given else {}
    instead = given.base_name if given else None  # of the same in its own size
    return first | {n: workloads.get(n) for n in workloads.names() if n != instead}


def zoo_options(workload: Workload) -> dict[str, Any] | None:
    """Return the options that make this workload of the zoo, or None if it is not of the zoo.

    Its name in the zoo is its `base_name`. One of whose functions a person has replaced is not.
    """
    spec = getattr(workload.build_model, "__self__", None)
    known = workloads.SPECS.get(workload.base_name)
    if spec is None or known is None or type(spec) is not type(known):
        return None

    made = spec.workload(workload.name)
    if not all(is_same_function(getattr(workload, f), getattr(made, f)) for f in FUNCTIONS):
        return None
    return {
        name: getattr(spec, name)
        for name in (field.name for field in dataclasses.fields(known))
        if getattr(spec, name) != getattr(known, name)
    }


def quantized_base(workload: Workload) -> str | None:
    """Return the number format of a fine-tuning's base, if that is quantized."""
    base = workload.choices.values.get("base") if workload.choices else None
    return str(base) if base in QUANTIZED else None


def devices(chosen: str) -> list[tuple[str, str]]:
    """Return the label and the name of each device: here, cards and clusters, recorded ones.

    Args:
        chosen: a name that is always included.
    """
    fastest = resolve_device(None)
    names = []
    if fastest.type != "cpu":
        count = torch.accelerator.device_count()
        names = [f"{fastest.type}:{i}" for i in range(count)]

    shown = [(f"this machine: {n} ({describe(torch.device(n))})", n) for n in names]
    elsewhere = [offered_card(name) for name in (*cards.names(), *cluster_table.NAMES)]
    shown += [("this machine: cpu", "cpu"), *elsewhere]
    shown += [(f"{record.title}, recorded", record.label) for record in recordings()]
    if chosen not in dict(shown).values():
        shown.append(offered_card(chosen))

    return [*shown, (OTHER_TEXT, OTHER)]


def offered_card(name: str) -> tuple[str, str]:
    """Return the label and the name of a card that is not in this machine."""
    return f"{name}, predicted", name


def compared_cards() -> tuple[str, ...]:
    """Return the cards that the table puts side by side: without PCIe and laptop forms of others.

    Each is predicted when the table is opened.
    """
    return tuple(name for name in cards.names() if not OTHER_FORMS & {*name.split("-")})


def name_of(device: Any) -> str:
    """Return the name of a device in results, be it here, elsewhere or recorded.

    Raises:
        DeviceError: the name is unknown.
    """
    return record_of(device).label if is_recorded(device) else cards.resolve(device).name


def num_cards(device: str) -> int | None:
    """Return how many cards a cluster has; None for what is none.

    Raises:
        DeviceError: there are no such machines.
    """
    found = cards.cluster(device) if cards.find(device) is None else None
    return found.num_devices if found else None


def of_capacity(device: str) -> str:
    """Return whose memory `capacity` is: "this machine" or "the card"."""
    return "this machine" if device == "cpu" else "the card"


def limit_text(memory_limit: int | str | None) -> str:
    """Return the text of the limit box.

    Raises:
        ConfigError: the text is not a size.
    """
    if memory_limit is None or (isinstance(memory_limit, str) and not memory_limit):
        return ""

    size = parse_bytes(memory_limit)
    if isinstance(memory_limit, str):
        return memory_limit.strip()

    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = KIB ** ("KMGT".index(unit[0]) + 1)
        if size % factor == 0:
            return f"{size // factor} {unit}"

    return f"{size} B"


def checked(fields: dict[str, Any], workload_names: list[str]) -> dict[str, Any]:
    """Return the values to which the header's controls are set.

    Raises:
        MemlabError: a value is not allowed; the message says what is.
    """
    found = dict(fields)
    if "workload" in fields and fields["workload"] not in workload_names:
        raise WorkloadError(
            f"workload={fields['workload']!r} is not in the panel; allowed is one of "
            f"{workload_names}, or a new memlab.panel(workload)"
        )

    if "device" in fields:
        found["device"] = name_of(fields["device"])
    if "memory_limit" in fields:
        found["memory_limit"] = limit_text(fields["memory_limit"])
    if not isinstance(fields.get("check_gradients", False), bool):
        raise ConfigError(
            f"check_gradients={fields['check_gradients']!r}; allowed is True or False"
        )

    return found
