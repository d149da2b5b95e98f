"""What the kernels of a recorded run do, on a CPU as calibrated and on a CUDA card by rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from memlab.memory import cuda_kernels, stand_in
from memlab.memory.assembly import Effect
from memlab.memory.calibration import Calibration, calibrate, overhead_seconds
from memlab.memory.cards import Card, Target
from memlab.memory.cost_store import OperatorCost, Store
from memlab.memory.devices import available_memory_bytes
from memlab.memory.recording import Operator, Recording
from memlab.memory.roofline import Call, step_time
from memlab.units import GIB

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

SHARE_FOR_ONE_OPERATOR = 0.25  # of the memory that is available, for running it alone


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kernels:
    """What is known of a recording's kernels.

    Attributes:
        effects: on memory, of each operator; None where fake tensors show all.
        seconds: float64, (operators,); None where no time is known.
        unsure_bytes: of the largest operator whose memory is not known from a run.
        notes: sentences on what is not known.
    """

    effects: list[Effect | None]
    seconds: npt.NDArray[np.float64] | None
    unsure_bytes: int = 0
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def recording_for(target: Target) -> Iterator[torch.device]:
    """Give the device that fake tensors must be on to dispatch as they would on the target."""
    if target.kind == "cpu":
        yield torch.device("cpu")
    else:
        with stand_in.as_cuda() as device:
            yield device


def kernels_of(
    recording: Recording, target: Target, on_progress: Callable[[float], None]
) -> Kernels:
    """Return what the kernels of a run do on the target; on a CPU new operators are run alone."""
    if target.kind == "cuda":
        return _on_card(recording, target)
    return _on_cpu(recording, on_progress)


def seconds_of_intervals(recording: Recording, kernels: Kernels) -> npt.NDArray[np.float64] | None:
    """Return the time of each interval, (intervals,); None if times are not known."""
    if kernels.seconds is None:
        return None
    interval = [operator.interval for operator in recording.operators]
    count = len(recording.intervals)
    return np.bincount(interval, weights=kernels.seconds, minlength=count).astype(np.float64)


def _on_card(recording: Recording, target: Target) -> Kernels:
    card = target.card
    seconds = None
    if card is not None and card.memory_bytes_per_second is not None:
        times = [_time_on(operator, card) for operator in recording.operators]
        seconds = np.array(times)
    return Kernels(effects=cuda_kernels.effects(recording, card), seconds=seconds)


def _time_on(operator: Operator, card: Card) -> float:
    if operator.signature is None:
        return 0.0
    call = Call(operator.signature, operator.outputs)
    time = step_time([call], card)
    return 0.0 if time is None else time.estimate_seconds


_store = Store()


def _on_cpu(recording: Recording, on_progress: Callable[[float], None]) -> Kernels:
    signatures = [o.signature for o in recording.operators if o.signature is not None]
    available = available_memory_bytes()
    found = calibrate(
        signatures,
        timed=True,
        store=_store,
        max_bytes=GIB if available is None else int(available * SHARE_FOR_ONE_OPERATOR),
        on_progress=on_progress,
    )
    overhead = overhead_seconds(_store)
    costs = [o.signature and found[o.signature] for o in recording.operators]
    return Kernels(
        effects=[None if cost is None else _effect(cost) for cost in costs],
        seconds=np.array([overhead + ((cost.seconds or 0.0) if cost else 0.0) for cost in costs]),
        unsure_bytes=max(map(_unsure, recording.operators, costs), default=0),
        notes=(*_notes(recording, found), *([_store.problem] if _store.problem else [])),
    )


def _effect(cost: OperatorCost) -> Effect:
    inside = cost.peak_bytes - sum(cost.output_bytes) - cost.kept_bytes
    return Effect(
        output_bytes=cost.output_bytes,
        workspace_bytes=max(inside, 0),
        kept_bytes=cost.kept_bytes,
    )


def _unsure(operator: Operator, cost: OperatorCost | None) -> int:
    """Return what an operator may take beyond what is known of it: as much as it returns."""
    if operator.signature is None or (cost is not None and not cost.extrapolated):
        return 0
    return sum(output.nbytes for output in operator.outputs)


def _notes(recording: Recording, found: Calibration) -> list[str]:
    names = {o.signature: o.name for o in recording.operators}
    alone = sorted({names[signature] for signature in found.reasons})
    smaller = sorted({names[s] for s, cost in found.items() if cost and cost.extrapolated})
    notes = []
    if alone:
        notes.append(
            f"Kernel workspace is not known of {', '.join(alone)}, which cannot run alone."
        )
    if smaller:
        notes.append(
            f"Too large to be run here, so extrapolated from smaller sizes: {', '.join(smaller)}."
        )
    return notes
