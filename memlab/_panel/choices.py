"""What the header of the panel offers: workloads, devices of this machine, a limit as text."""

import dataclasses
from typing import Any

import torch

from memlab import workloads
from memlab.errors import ConfigError, WorkloadError
from memlab.memory.devices import describe, resolve_device
from memlab.units import KIB, parse_bytes
from memlab.workload import Workload


def offered_workloads(given: Workload | None) -> dict[str, Workload]:
    """Return workloads by name: the given one first, then the zoo.

    Raises:
        WorkloadError: what was given is no workload.
    """
    if given is not None and not isinstance(given, Workload):
        raise WorkloadError(
            f"workload={given!r} is no Workload; pass memlab.workloads.get('gpt-small'), or "
            "Workload.from_module(module, example_batch, loss_fn)"
        )
    first = {given.name: given} if given else {}
    return first | {n: workloads.get(n) for n in workloads.names() if n not in first}


def zoo_options(workload: Workload) -> dict[str, Any] | None:
    """Return the options that make this workload of the zoo, or None if it is not of the zoo."""
    spec = getattr(workload.build_model, "__self__", None)
    known = workloads.SPECS.get(workload.name)
    if spec is None or known is None or type(spec) is not type(known):
        return None
    return {
        name: getattr(spec, name)
        for name in (field.name for field in dataclasses.fields(known))
        if getattr(spec, name) != getattr(known, name)
    }


def devices() -> list[tuple[str, str]]:
    """Return what to show and the name of each device of this machine."""
    fastest = resolve_device(None)
    names = []
    if fastest.type != "cpu":
        count = torch.accelerator.device_count()
        names = [f"{fastest.type}:{i}" for i in range(count)]
    shown = [(f"this machine: {n} ({describe(torch.device(n))})", n) for n in names]
    return [*shown, ("this machine: cpu", "cpu")]


def limit_text(memory_limit: int | str | None) -> str:
    """Return the text of the limit box.

    Raises:
        ConfigError: it is no size.
    """
    if memory_limit is None or memory_limit == "":
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
    """Return what the header's controls are to be set to.

    Raises:
        MemlabError: a value cannot be; the message says what is allowed.
    """
    found = dict(fields)
    if "workload" in fields and fields["workload"] not in workload_names:
        raise WorkloadError(
            f"workload={fields['workload']!r} is not in the panel; allowed is one of "
            f"{workload_names}, or a new memlab.panel(workload)"
        )
    if "device" in fields:
        found["device"] = str(resolve_device(fields["device"]))
    if "memory_limit" in fields:
        found["memory_limit"] = limit_text(fields["memory_limit"])
    if not isinstance(fields.get("check_gradients", False), bool):
        raise ConfigError(
            f"check_gradients={fields['check_gradients']!r}; allowed is True or False"
        )
    return found
