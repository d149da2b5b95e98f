"""Which operators a step runs and what each costs: what a record of a device needs beside its runs.

The step goes over fake tensors, as for a prediction. On a CPU each operator that is new is run
alone; for a card its time is the datasheet's, which tells the operators that are worth timing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from memlab.config import Precision, StepConfig
from memlab.costs.targets import costs_found_here, kernels_of, recording_for
from memlab.devices.cards import Target
from memlab.devices.generators import preserved_random_state
from memlab.operators.cost import KnownCosts
from memlab.operators.signatures import Signature
from memlab.plan import Plan
from memlab.predicting.predict import check_target, recorded
from memlab.recording import stand_in
from memlab.recording.tracker import Tracker
from memlab.result import Outcome
from memlab.running import Report, explain
from memlab.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepOperators:
    """The operators of a step.

    Attributes:
        outcome: ok, or why there are none.
        message: a sentence on that; empty if ok.
        seconds: by signature, of all its calls in the step together, predicted.
        costs: as found on this machine, on a CPU; None for a card.
    """

    outcome: Outcome
    message: str = ""
    seconds: dict[Signature, float] = field(default_factory=dict)
    costs: KnownCosts | None = None


def operators_in_process(
    workload: Workload,
    config: StepConfig,
    target: Target,
    *,
    seed: int,
    plan: Plan | None = None,
    report: Report,
) -> StepOperators:
    """Return the operators of a step, in this process; never raises for the step.

    Args:
        workload: what is trained.
        config: how.
        target: a CPU, or a CUDA card that need not be there.
        seed: set before the model, the batch and each step.
        plan: of the config's memory budget.
        report: called as for a prediction; what it raises ends it.
    """
    tracker = None
    try:
        check_target(config, target)
        stand_in.device()  # autograd counts the devices at the first backward of a process
        with recording_for(target) as device, preserved_random_state(torch.device("cpu")):
            tracker = Tracker(device.type)
            program = recorded(workload, config, device, seed, tracker, plan)
        is_tf32 = config.precision is Precision.TF32
        sizes = config.micro_batch_sizes
        kernels = kernels_of(program, sizes, target, lambda share: None, tf32_matmul=is_tf32)
    except (Exception, SystemExit) as error:  # what a person's model raises is an outcome
        outcome, message = explain(error, "a step" if tracker is None else tracker.place())
        return StepOperators(outcome=outcome, message=message)
    seconds: dict[Signature, float] = defaultdict(float)
    recording, steps = program.recording, program.steps_of(sizes)
    counts = [interval.step in steps for interval in recording.intervals]
    times = (
        [0.0] * len(recording.operators) if kernels.seconds is None else kernels.seconds.tolist()
    )
    for operator, time in zip(recording.operators, times, strict=True):
        # a copy between host and card is the bus's time, and no operator's
        if operator.signature is not None and counts[operator.interval] and not operator.crosses:
            seconds[operator.signature] += time
    return StepOperators(
        outcome=Outcome.OK,
        seconds=dict(seconds),
        costs=costs_found_here(seconds) if target.kind == "cpu" else None,
    )
