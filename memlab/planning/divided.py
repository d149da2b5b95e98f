"""Which layers of a workload several ranks divide, as a trial finds them; a worker makes the trial.

It is made by the build of a step, over fake tensors and as one of many ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memlab.config import StepConfig
from memlab.devices.cards import Target
from memlab.result import Outcome
from memlab.running import Ended, Report, Run
from memlab.workload import Workload

if TYPE_CHECKING:
    import torch

    from memlab.recording.tracker import Tracker

SEED = 0  # no value decides which layers are divided

Layers = Mapping[str, tuple[str, int | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundLayers:
    """What a trial found: layers as in `Divided`, or why there are none."""

    layers: Layers
    outcome: Outcome = Outcome.OK
    message: str = ""


def layers_for(workload: Workload, config: StepConfig, target: Target, *, run: Run) -> Layers:
    """Return which layers the ranks of a config divide.

    Raises:
        Ended: no layer can be divided, or the model fails; the message says why.
    """
    found: FoundLayers = run("layers", {"workload": workload, "config": config, "target": target})
    if found.outcome is not Outcome.OK:
        raise Ended(found.outcome, found.message)
    return found.layers


def layers_in_process(
    workload: Workload, config: StepConfig, target: Target, *, report: Report
) -> FoundLayers:
    """Return the same in this process; never raises for the step."""
    # late, because a caller of the worker needs nothing of what runs there
    from memlab.costs.recorded_step import Failure, from_recording
    from memlab.recording.record_step import record_layers

    # a budget needs a plan, which is applied to layers that are divided already
    plain = replace(config, memory_budget=1.0)

    def record(device: "torch.device", tracker: "Tracker") -> Layers:
        return record_layers(workload, plain, device, SEED, tracker)

    text = f"finding the layers of {workload.name} that ranks divide"
    found: Layers | Failure = from_recording(
        record, lambda layers: layers, config, target, report=report, text=text
    )
    if isinstance(found, Failure):
        return FoundLayers(layers={}, outcome=found.outcome, message=found.message)
    return FoundLayers(layers=found)
