"""What records know of operators, as targets of predictions.

A device that is not here is asked for by its record: "h200, recorded". A card of this machine needs
no other name: if a person has a record of it, its operators take what they took there, and the
datasheet serves for the others. A CPU of this machine needs no record, because it can be asked.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from memlab.config import Precision, StepConfig
from memlab.costs.cost_store import is_overhead_seconds
from memlab.devices import cards
from memlab.devices.cards import Target
from memlab.devices.cluster_table import check_room
from memlab.operators.cost import KnownCosts, OperatorCost
from memlab.operators.signatures import Signature
from memlab.records.recorded import DeviceRecord, is_recorded, record_of, recordings
from memlab.records.records import DAMAGE, Kind, costs_from_line
from memlab.trace import Phase


def target_for(device: str | torch.device | None, config: StepConfig) -> Target:
    """Return the device that a step is predicted or planned for.

    Raises:
        DeviceError: the device is neither known nor recorded, or has fewer cards than the config
            has ranks.
    """
    tf32 = config.precision is Precision.TF32
    if isinstance(device, str) and is_recorded(device):
        return target_of(record_of(device), tf32=tf32)

    target = cards.resolve(device)
    if target.cluster is not None:
        check_room(target.cluster, config.world_size)
    is_here = target.card is not None and target.name.startswith("cuda")
    record = _own_record_of(target.card.name) if target.card and is_here else None
    return target if record is None else with_costs(target, record, tf32=tf32)


def _own_record_of(card: str) -> DeviceRecord | None:
    """Return a person's own record of a card, the one that was begun last."""
    own = [r for r in recordings() if r.is_own and r.is_card and r.device == card]
    return max(own, key=_begun, default=None)


def _begun(record: DeviceRecord) -> str:
    return str(record.lines.of(Kind.VISIT)[-1].get("visit", ""))


def with_costs(target: Target, record: DeviceRecord, *, tf32: bool) -> Target:
    """Return a target with what operators took on such a device."""
    known = _costs(record, tf32=tf32)
    if not known.operators:
        return target
    said = f"they were timed on {record.title} ({record.lines.path})"
    return dataclasses.replace(
        target, costs=dataclasses.replace(known, origin=" ".join([said, *record.notes]))
    )


@functools.lru_cache(maxsize=8)
def _costs(record: DeviceRecord, *, tf32: bool) -> KnownCosts:
    return costs_of(record.lines.of(Kind.OPERATORS), tf32=tf32)


def target_of(record: DeviceRecord, *, tf32: bool) -> Target:
    """Return the target of a prediction for a recorded device, with its costs of operators.

    Args:
        record: of the device.
        tf32: as for `costs_of`.
    """
    card = cards.find(record.device) if record.is_card else None
    if card is not None:
        size = record.lines.of(Kind.VISIT)[0].get("memory_bytes")
        if isinstance(size, int) and size > 0:  # otherwise that of the card as it is sold
            card = dataclasses.replace(card, memory_bytes=size)

    return Target(
        kind="cuda" if record.is_card else "cpu",
        card=card,
        name=record.label,
        costs=_costs(record, tf32=tf32),
    )


def costs_of(lines: Iterable[Mapping[str, Any]], *, tf32: bool) -> KnownCosts:
    """Return what the operators in lines of a record cost.

    Args:
        lines: of the kind `operators`.
        tf32: whether the step multiplies fp32 matrices as TF32, for which operators were timed
            apart.
    """
    operators: dict[Signature, OperatorCost] = {}
    overheads: dict[Phase, float] = {}
    for line in lines:
        if "packed" not in line:
            continue  # the run did not end as ok

        with contextlib.suppress(*DAMAGE):  # the prediction itself reports unknown costs
            here = {Phase(name): _overhead(value) for name, value in line["overheads"].items()}
            if line["tf32"] == tf32:
                operators |= costs_from_line(line)
            overheads |= here

    return KnownCosts(operators=operators, overheads=overheads)


def _overhead(value: Any) -> float:
    """Return the recorded time that an operator takes besides its kernel.

    Raises:
        ValueError: it is none.
    """
    if not is_overhead_seconds(value):
        raise ValueError("a time is none")
    return float(value)
