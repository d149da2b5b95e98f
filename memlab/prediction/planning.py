"""The plans of a workload for every memory budget, from one recording of its plain step.

In this process and over fake tensors: the plain step is recorded once, and
`budget_frontier.py` finds what to recompute. Left out: budgets of torch.compile, whose partitioner
makes its own plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memlab.config import StepConfig
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import Target
from memlab.memory.replay import round_block
from memlab.prediction.budget_frontier import BudgetFrontier, frontier_of
from memlab.prediction.recompute_evaluator import RecomputeEvaluator
from memlab.result import Outcome
from memlab.running import Ended, Report, Run
from memlab.tracing.assembly import sizes_of
from memlab.workload import Workload

if TYPE_CHECKING:
    import torch

    from memlab.tracing.tracker import Tracker


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """What planning found: a frontier, or why there is none."""

    frontier: BudgetFrontier | None
    outcome: Outcome = Outcome.OK
    message: str = ""


def plan_in_process(
    workload: Workload, config: StepConfig, target: Target, *, seed: int, report: Report
) -> Planning:
    """Return the plans for all budgets of a config; never raises for the step.

    Args:
        workload: what is trained.
        config: how; its budget does not matter.
        target: where: a plan depends on times and on the operators that are run there.
        seed: set before the model and the batch.
        report: called as planning goes on; what it raises ends it.
    """
    found = from_traced_step(
        _frontier_of,
        workload,
        dataclasses.replace(config, memory_budget=1.0),
        target,
        seed=seed,
        report=report,
        purpose="to plan its budget",
    )
    if isinstance(found, Failure):
        message = f"the memory budget cannot be planned: {found.message}"
        return Planning(frontier=None, outcome=found.outcome, message=message)
    return Planning(frontier=found)


def _frontier_of(step: TracedStep) -> BudgetFrontier:
    """Return the plans that the plain step allows."""
    program, kernels = step.program, step.kernels()
    is_card = step.target.kind == "cuda"
    own = sizes_of(program.recording, program.layout, kernels.effects)
    if is_card:
        own = round_block(own)
    return frontier_of(RecomputeEvaluator(program, own, kernels.seconds, hides_host=is_card))


# Which layers of a workload several ranks divide, as a trial finds them; a worker makes the
# trial.
#
# It is made by the build of a step, over fake tensors and as one of many ranks.

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
    from memlab.cost_model.traced_step import Failure, from_recording
    from memlab.tracing.trace_step import record_layers

    # a budget needs a plan, which is applied to layers that are divided already
    plain = replace(config, memory_budget=1.0)

    def record(device: torch.device, tracker: Tracker) -> Layers:
        return record_layers(workload, plain, device, SEED, tracker)

    text = f"finding the layers of {workload.name} that ranks divide"
    found: Layers | Failure = from_recording(
        record, lambda layers: layers, config, target, report=report, text=text
    )
    if isinstance(found, Failure):
        return FoundLayers(layers={}, outcome=found.outcome, message=found.message)
    return FoundLayers(layers=found)
