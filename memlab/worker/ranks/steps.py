"""What a rank does when it is asked: measure its step, or run updates for `verify`."""

import contextlib
import dataclasses
import hashlib
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from memlab.config import StepConfig
from memlab.measuring.measure import measure_in_process
from memlab.plan import Plan
from memlab.result import Outcome, StepResult
from memlab.running import Report, explain
from memlab.techniques.recompute.recompute import of_a_model_off
from memlab.verifying.updates import Tensors, UpdatesRun, run_updates
from memlab.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUpdates:
    """The updates of one rank.

    Attributes:
        run: what they did; of the first rank only, since the others saw the same.
        states: the optimizer state that this rank keeps after each update.
        fingerprints: of all weights after each update; equal in all ranks.
        outcome: ok, or what went wrong.
        error: a sentence about that.
    """

    run: UpdatesRun | None = None
    states: list[Tensors] = dataclasses.field(default_factory=list)
    fingerprints: list[str] = dataclasses.field(default_factory=list)
    outcome: Outcome = Outcome.OK
    error: str | None = None


def measure_rank(*, device_type: str, report: Report, **arguments: Any) -> StepResult:
    """Measure this rank's part of a step. The arguments are those of `measure_in_process`."""
    device = _device(device_type)
    result = measure_in_process(device=device, report=report, agreed=_agreed, **arguments)
    return dataclasses.replace(result, rank_numbers=(dist.get_rank(),))


def update_rank(
    *,
    workload: Workload,
    config: StepConfig,
    device_type: str,
    seed: int,
    plan: Plan | None,
    like: UpdatesRun | None,
    with_own: bool,
    report: Report,
) -> RankUpdates:
    """Run updates of a step. The arguments are those of `run_updates`.

    With `with_own` the model's own checkpointing is on.
    """
    try:
        with contextlib.nullcontext() if with_own else of_a_model_off():
            run = run_updates(workload, config, _device(device_type), seed, plan, like=like)
    except (Exception, SystemExit) as error:  # an error of a person's model is an outcome
        outcome, message = explain(error, "the step to verify")
        return RankUpdates(outcome=outcome, error=message)

    return RankUpdates(
        run=run if dist.get_rank() == 0 else None,
        states=[update.after.states for update in run.updates],
        fingerprints=[_fingerprint(update.after.weights) for update in run.updates],
    )


def _device(device_type: str) -> torch.device:
    """Return the device of this rank."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, int(os.environ["LOCAL_RANK"]))


def _agreed(goes_on: bool) -> bool:
    """Return whether all ranks go on. A rank that ended alone would leave the others waiting."""
    votes = torch.tensor([int(goes_on)])
    if "nccl" in dist.get_backend():
        votes = votes.cuda()
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def _fingerprint(weights: Tensors) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
