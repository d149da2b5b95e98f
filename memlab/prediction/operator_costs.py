"""Which operators a step runs and what each costs: what a record of a device needs beside its runs.

The step goes over fake tensors, as for a prediction. On a CPU each operator that is new is run
alone; for a card its time is the datasheet's, which tells the operators that are worth timing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from memlab.config import StepConfig
from memlab.cost_model.targets import costs_found_here
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import Target
from memlab.devices.operators import KnownCosts, Signature
from memlab.result import Outcome
from memlab.running import Report
from memlab.techniques.technique import Plan
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
    found = from_traced_step(
        _operators_of,
        workload,
        config,
        target,
        seed=seed,
        plan=plan,
        report=report,
        purpose="for its operators",
    )
    if isinstance(found, Failure):
        return StepOperators(outcome=found.outcome, message=found.message)
    return found


def _operators_of(step: TracedStep) -> StepOperators:
    kernels = step.kernels()
    recording = step.program.recording
    steps = step.program.steps_of(step.config.micro_batch_sizes)
    counts = [interval.step in steps for interval in recording.intervals]
    times = (
        [0.0] * len(recording.operators) if kernels.seconds is None else kernels.seconds.tolist()
    )

    seconds: dict[Signature, float] = defaultdict(float)
    for operator, time in zip(recording.operators, times, strict=True):
        # a copy between host and card is the bus's time, and no operator's
        if operator.signature is not None and counts[operator.interval] and not operator.crosses:
            seconds[operator.signature] += time
    return StepOperators(
        outcome=Outcome.OK,
        seconds=dict(seconds),
        costs=costs_found_here(seconds) if step.target.kind == "cpu" else None,
    )
