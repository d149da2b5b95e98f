"""The plans of a workload for every memory budget, from one prediction of its plain step.

In this process and over fake tensors, as `memlab.predicting` does: the plain step is recorded once,
and `chain.py` finds what to recompute. Left out: budgets of torch.compile, whose partitioner plans
by itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from memlab.allocator.replay import round_block
from memlab.config import StepConfig
from memlab.costs.targets import kernels_of, recording_for
from memlab.devices.cards import Target
from memlab.devices.generators import preserved_random_state
from memlab.planning.chain import Chain, chain_of
from memlab.planning.what_if import WhatIf
from memlab.predicting.predict import check_target, recorded
from memlab.recording import stand_in
from memlab.recording.assembly import sizes_of
from memlab.recording.tracker import Tracker
from memlab.result import Outcome
from memlab.running import Progress, Report, explain
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
    plain = dataclasses.replace(config, memory_budget=1.0)
    tracker = None
    try:
        check_target(plain, target)
        stand_in.device()  # autograd counts the devices at the first backward of a process
        with recording_for(target) as device, preserved_random_state(torch.device("cpu")):
            tracker = Tracker(device.type)
            report(Progress(text=f"recording {workload.name} to plan its budget", fraction=0.1))
            program = recorded(workload, plain, device, seed, tracker)
        kernels = kernels_of(
            program,
            config.micro_batch_sizes,
            target,
            lambda share: report(Progress(text="running new operators alone", fraction=share)),
        )
        is_card = target.kind == "cuda"
        own = sizes_of(program.recording, program.layout, kernels.effects)
        own = round_block(own) if is_card else own
        told = WhatIf(program, own, kernels.seconds, hides_host=is_card)
        return Planning(chain=chain_of(told))
    except (Exception, SystemExit) as error:  # what a person's model raises is an outcome
        outcome, message = explain(error, "planning" if tracker is None else tracker.place())
        return Planning(
            chain=None, outcome=outcome, message=f"the memory budget cannot be planned: {message}"
        )
