"""The plans of a workload for every memory budget, from one recording of its plain step.

In this process and over fake tensors: the plain step is recorded once, and `chain.py` finds what to
recompute. Left out: budgets of torch.compile, whose partitioner makes its own plans.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memlab.allocator.replay import round_block
from memlab.config import StepConfig
from memlab.costs.recorded_step import Failure, RecordedStep, from_recorded_step
from memlab.devices.cards import Target
from memlab.planning.chain import Chain, chain_of
from memlab.planning.what_if import WhatIf
from memlab.recording.assembly import sizes_of
from memlab.result import Outcome
from memlab.running import Report
from memlab.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """What planning found: a chain, or why there is none."""

    chain: Chain | None
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
    found = from_recorded_step(
        _chain_of,
        workload,
        dataclasses.replace(config, memory_budget=1.0),
        target,
        seed=seed,
        report=report,
        purpose="to plan its budget",
    )
    if isinstance(found, Failure):
        message = f"the memory budget cannot be planned: {found.message}"
        return Planning(chain=None, outcome=found.outcome, message=message)
    return Planning(chain=found)


def _chain_of(step: RecordedStep) -> Chain:
    """Return the plans that the plain step allows."""
    program, kernels = step.program, step.kernels()
    is_card = step.target.kind == "cuda"
    own = sizes_of(program.recording, program.layout, kernels.effects)
    if is_card:
        own = round_block(own)
    return chain_of(WhatIf(program, own, kernels.seconds, hides_host=is_card))
