"""Measure a sharded step: run it in real ranks, and make one result of those of all ranks."""

import dataclasses
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from memlab.config import StepConfig
from memlab.predicting.rank_spread import peak_of, with_ranks
from memlab.result import Outcome, Source, StepResult
from memlab.running import Ended, Report, explain
from memlab.techniques.sharding.sharding import most_ranks
from memlab.worker.job import Job
from memlab.worker.ranks.group import Answer, RankGroup
from memlab.workload import Workload

WORST_FIRST = (
    Outcome.OUT_OF_MEMORY,
    Outcome.CRASHED,  # a rank that waits for a process that is gone fails: it lost its connection
    Outcome.FAILED,
    Outcome.UNSUPPORTED,
    Outcome.TIMED_OUT,
    Outcome.CANCELLED,
)
"""What ended a run, if ranks ended differently: the others were stopped or waited because of it."""


def measure_ranks(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    *,
    job: Job,
    timeout_seconds: float,
    report: Report,
    **arguments: Any,
) -> StepResult:
    """Measure a step of several ranks. Errors of the step are outcomes, not raised.

    Args:
        workload: what is trained.
        config: how, with sharding.
        device: of the first rank; the others have the next ones of its kind, or the same CPU.
        job: of this worker.
        timeout_seconds: after which the ranks are stopped.
        report: called during the run.
        **arguments: the others of `measure_in_process`.
    """
    deadline = time.monotonic() + timeout_seconds
    asked: dict[str, Any] = {
        "source": Source.MEASURED,
        "device": str(device),
        "config": config,
        "workload_name": workload.name,
        "own_optimizer": workload.make_optimizer is not None,
        "memory_limit_bytes": arguments["memory_limit"],
    }
    try:
        check_devices(config, device)
        job = dataclasses.replace(job, threads=config.threads_of_rank(job.threads))
        with RankGroup(job, config.world_size, device.type, deadline, report) as group:
            own = {"workload": workload, "config": config, "device_type": device.type}
            return measure_in(group, own | arguments, asked)
    except (Exception, SystemExit) as error:
        outcome, message = explain(error, "starting the ranks")
        return StepResult(**asked, outcome=outcome, message=message)


def measure_in(group: RankGroup, arguments: dict[str, Any], asked: dict[str, Any]) -> StepResult:
    """Measure a step in ranks that have started.

    Args:
        group: the ranks; one that fails ends them all.
        arguments: of `measure_rank`.
        asked: fields of the result that are known before it runs.
    """
    answers = group.call("measure", arguments, _is_ok)
    order = sorted(range(len(answers)), key=lambda rank: answers[rank].order)
    results = [_result_of(answer, rank, asked) for rank, answer in enumerate(answers)]
    return together(results, order)


def check_devices(config: StepConfig, device: torch.device) -> None:
    """Raise Ended if this machine has fewer devices than the config has ranks, or starts none."""
    if not (hasattr(socket, "AF_UNIX") and hasattr(signal, "SIGUSR1")):
        raise Ended(
            Outcome.UNSUPPORTED,
            f"sharding={str(config.sharding)!r} runs in processes that memlab starts on Linux and "
            "macOS only; use memlab.predict, which simulates them",
        )
    most = most_ranks(device)
    if config.world_size > most:
        has = f"runs at most {most} ranks" if device.type == "cpu" else f"has {most} of them"
        raise Ended(
            Outcome.UNSUPPORTED,
            f"world_size={config.world_size} is more than the devices of this machine, which "
            f"{has} on {device.type!r}; lower world_size, or use memlab.predict, which simulates "
            "any number of ranks",
        )


def together(results: Sequence[StepResult], order: Sequence[int]) -> StepResult:
    """Return one result of those of all ranks: that of the rank with the highest peak.

    If ranks have ended badly, its message is that of the one that caused it. Others lose their
    connection to it, which is an error of theirs too, and may be noticed first.

    Args:
        results: by rank.
        order: the ranks, as they have answered.
    """
    bad = [results[rank] for rank in order if results[rank].outcome is not Outcome.OK]
    if bad:
        first = min(bad, key=lambda result: WORST_FIRST.index(result.outcome))
        known = [r for r in results if r.peak_allocated_bytes is not None]
        number = first.rank_numbers[0]
        said = f"rank {number} of {len(results)}{first.message.removeprefix(f'rank {number}')}"
        if not first.message.startswith("rank "):
            said = f"rank {number} of {len(results)}: {first.message}"
        kept = first if first in known or not known else max(known, key=peak_of)
        return dataclasses.replace(
            kept, outcome=first.outcome, message=said, fits=first.fits, fit=first.fit,
            ranks=tuple(results), rank_numbers=(),
        )  # fmt: skip

    worst = max(results, key=peak_of)
    seconds = max(result.step_seconds or 0.0 for result in results)
    losses = [result.loss for result in results if result.loss is not None]
    return dataclasses.replace(
        with_ranks(worst, results),
        step_seconds=seconds,
        samples_per_second=worst.config.batch_size / seconds if seconds else None,
        loss=sum(losses) / len(losses) if losses else None,
        finite=all(result.finite for result in results),
    )


def _is_ok(result: StepResult) -> bool:
    """Return whether the other ranks can go on; all of them agree on an end above the limit."""
    if result.peak_allocated_bytes is None:
        return result.outcome is Outcome.OK
    is_over = result.outcome is Outcome.OUT_OF_MEMORY and result.fits is False
    # a rank that has failed while it was timed has a peak too, and the others wait for it
    return is_over or result.outcome in (Outcome.OK, Outcome.CANCELLED)


def _result_of(answer: Answer, rank: int, asked: dict[str, Any]) -> StepResult:
    """Return what became of one rank, which may have no result."""
    if answer.outcome is Outcome.OK:
        found: StepResult = answer.value
        return found
    message = f"rank {rank} {answer.message}"
    return StepResult(**asked, outcome=answer.outcome, message=message, rank_numbers=(rank,))
