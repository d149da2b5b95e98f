"""Verify a sharded step: its updates run in real ranks, those of the reference in this process."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.plan import Plan
from memlab.result import Outcome
from memlab.running import Ended, Report
from memlab.verifying.report import VerifyReport
from memlab.verifying.updates import UpdatesRun
from memlab.verifying.verify import verify_in_process
from memlab.worker.job import Job
from memlab.worker.ranks.group import RankGroup
from memlab.worker.ranks.measuring import WORST_FIRST, check_devices
from memlab.worker.ranks.steps import RankUpdates
from memlab.workload import Workload


def verify_ranks(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    *,
    job: Job,
    timeout_seconds: float,
    report: Report,
    **arguments: Any,
) -> VerifyReport:
    """Compare a step of several ranks with one process; arguments as of `verify_in_process`.

    Args:
        workload: what is trained.
        config: how, with sharding.
        device: of the first rank.
        job: of this worker.
        timeout_seconds: after which the ranks are stopped.
        report: called during the run.
        **arguments: the others of `verify_in_process`.
    """
    deadline = time.monotonic() + timeout_seconds
    with contextlib.ExitStack() as opened:
        groups: list[RankGroup] = []

        def group() -> RankGroup:
            if not groups:  # what the reference refuses needs no ranks
                check_devices(config, device)
                own = dataclasses.replace(job, threads=config.threads_of_rank(job.threads))
                ranks = RankGroup(own, config.world_size, device.type, deadline, report)
                groups.append(opened.enter_context(ranks))
            return groups[0]

        return verify_in_process(
            workload, config, device, report=report, run_in_ranks=updates_in(group), **arguments
        )


def updates_in(group: Callable[[], RankGroup]) -> Callable[..., UpdatesRun]:
    """Return a function that runs updates in the ranks of a group, as `verify` asks for them."""

    def run_in_ranks(
        workload: Workload,
        config: StepConfig,
        device: torch.device,
        seed: int,
        plan: Plan | None,
        *,
        like: UpdatesRun | None,
        with_own: bool,
    ) -> UpdatesRun:
        asked = {
            "workload": workload, "config": config, "device_type": device.type, "seed": seed,
            "plan": plan, "like": like, "with_own": with_own,
        }  # fmt: skip
        return _updates(group(), asked)

    return run_in_ranks


def _updates(group: RankGroup, asked: dict[str, Any]) -> UpdatesRun:
    """Return what the updates did, as the first rank saw it, with the states that others keep.

    Raises:
        Ended: a rank could not run them.
        MemlabError: the ranks do not hold the same weights afterwards.
    """
    answers = group.call("updates", asked, lambda value: value.error is None)
    ended = [
        (answer.outcome, f"rank {rank} of {len(answers)} {answer.message}")
        for rank, answer in enumerate(answers)
        if answer.outcome is not Outcome.OK
    ]
    ended += [
        (answer.value.outcome, f"rank {rank} of {len(answers)}: {answer.value.error}")
        for rank, answer in enumerate(answers)
        if answer.outcome is Outcome.OK and answer.value.error is not None
    ]
    if ended:
        raise Ended(*min(ended, key=lambda end: WORST_FIRST.index(end[0])))

    found: list[RankUpdates] = [answer.value for answer in answers]
    first = found[0].run
    assert first is not None
    for rank, other in enumerate(found[1:], 1):
        for number, (one, two) in enumerate(
            zip(found[0].fingerprints, other.fingerprints, strict=True), 1
        ):
            if one != two:
                raise MemlabError(
                    f"after update {number} rank {rank} holds other weights than rank 0"
                )

    for index, update in enumerate(first.updates):
        states = {name: t for rank in found for name, t in rank.states[index].items()}
        after = dataclasses.replace(update.after, states=update.after.states | states)
        first.updates[index] = dataclasses.replace(update, after=after)
    return first
