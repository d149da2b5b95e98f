"""`predict_run` and `measure_run`: what a whole run costs, stage by stage."""

import threading
from dataclasses import replace
from typing import Any

import torch

from memlab.arguments.checks import checked, seconds, size
from memlab.config import Sharding, StepConfig
from memlab.devices.here import resolve_device, versions_here
from memlab.errors import ConfigError, UnsupportedError
from memlab.planning.plans import plan_for
from memlab.records.targets import target_for
from memlab.result import Source
from memlab.running import Ended
from memlab.stages.run_result import RunResult
from memlab.stages.run_settings import TrainingRun
from memlab.worker.bar import shows_progress
from memlab.worker.isolation import OnProgress, runner
from memlab.workload import Workload

LIMITS: dict[str, Any] = {"memory_limit": size, "timeout_seconds": seconds}


@checked(**LIMITS)
@shows_progress
def predict_run(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    run: TrainingRun | None = None,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> RunResult:
    """Predict what a whole run would cost, stage by stage, without running it.

    The stages are recorded over fake tensors as `predict` records a step: the build, the first
    step, a step, what `run` adds, and a step after that. On a card one caching allocator serves
    them all, so the cache that an evaluation leaves counts in the step after it. Of many batches or
    tokens a few are recorded, and the others follow from these.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: as for `predict`.
        run: what is done beside the steps; None is nothing.
        seed: set before the model, the batch and each stage.
        memory_limit: bytes, or text such as "2GiB", that each stage is compared with: allocated
            bytes on a CPU, reserved bytes on CUDA. None is what PyTorch can reserve on the card.
        timeout_seconds: the prediction ends as `timed_out` after this time.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed; the message names it and what is allowed. What the
            model cannot do is the `outcome` of the result.

    Weights, their averaged copy, and what SGD adds to them in a step:

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> config = StepConfig(batch_size=4, optimizer="sgd")
    >>> found = predict_run(workload, config, "cpu", run=TrainingRun(ema=True))
    >>> held = found.stage("step").bytes_by_category
    >>> held["parameters"], held["EMA weights"]  # and the number of updates, of 8 bytes
    (2080, 2088)
    """
    target = target_for(device, config)
    limit = size("memory_limit", memory_limit)
    if limit is None and target.card is not None:
        limit = target.card.usable_bytes
    arguments: dict[str, Any] = {"workload": workload, "config": config, "target": target}
    return _ran(
        "predict_run", arguments, run, seed, limit, timeout_seconds, True, on_progress, cancel
    )


@checked(**LIMITS)
@shows_progress
def measure_run(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    run: TrainingRun | None = None,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    isolate: bool = True,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> RunResult:
    """Measure what a whole run costs on a device of this machine, stage by stage.

    The run is that of `predict_run`, with all its batches and tokens, in a worker process and under
    one meter. The result is not written to the store.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: as for `measure`.
        run: what is done beside the steps; None is nothing.
        seed: set before the model, the batch and each stage.
        memory_limit: bytes, or text such as "2GiB". On a CPU each stage is compared with it; on
            CUDA the caching allocator may not reserve more, and the run ends where it needs to.
        timeout_seconds: the run ends as `timed_out` after this time.
        isolate: as for `measure`.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed. What goes wrong during the run is the `outcome` of
            the result.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> found = measure_run(workload, StepConfig(batch_size=4), "cpu", run=TrainingRun(save=True))
    >>> [str(stage.name) for stage in found.stages]
    ['build', 'first step', 'step', 'saving', 'step afterwards']
    """
    limit = size("memory_limit", memory_limit)
    arguments: dict[str, Any] = {
        "workload": workload,
        "config": config,
        "device": resolve_device(device),
    }
    return _ran(
        "measure_run", arguments, run, seed, limit, timeout_seconds, isolate, on_progress, cancel
    )


def _ran(
    function: str,
    arguments: dict[str, Any],
    run: TrainingRun | None,
    seed: int,
    limit: int | None,
    timeout_seconds: float,
    isolate: bool,
    on_progress: OnProgress | None,
    cancel: threading.Event | None,
) -> RunResult:
    """Run a job of the worker and return its result, or that of a run which ended without one."""
    workload, config = arguments["workload"], arguments["config"]
    run = TrainingRun() if run is None else run
    is_cpu = "target" in arguments and arguments["target"].kind == "cpu"
    is_cpu |= "device" in arguments and arguments["device"].type == "cpu"
    _check(config, run, is_cpu=is_cpu)
    job = runner(isolate, timeout_seconds, on_progress, cancel)
    target = arguments.get("target") or target_for(arguments["device"], config)
    try:
        plan = plan_for(workload, config, target, seed=seed, run=job)
        more = {"run": run, "seed": seed, "memory_limit": limit, "plan": plan}
        found: RunResult = job(function, arguments | more)
        return replace(found, config=config)  # a policy function comes back as a copy
    except Ended as ended:
        is_real = function == "measure_run"
        return RunResult(
            outcome=ended.outcome,
            message=str(ended),
            source=Source.MEASURED if is_real else Source.PREDICTED,
            device=str(arguments["device"]) if is_real else target.name,
            versions=versions_here(),
            config=config,
            run=run,
            workload_name=workload.name,
            memory_limit_bytes=limit,
        )


def _check(config: StepConfig, run: TrainingRun, *, is_cpu: bool) -> None:
    """Raise if a run has stages that are not implemented for these settings."""
    if config.sharding is not Sharding.NONE:
        raise UnsupportedError(
            f"sharding={str(config.sharding)!r}: whole runs are implemented for one process only; "
            "use sharding='none', or memlab.predict for a step of several ranks"
        )
    if config.loss_chunks > 1:
        given, usual = f"loss_chunks={config.loss_chunks}", "loss_chunks=1"
    else:
        given, usual = f"loss_kernel={str(config.loss_kernel)!r}", "loss_kernel='as-built'"
    if config.loss_reads_head and run.generate is not None:
        raise UnsupportedError(
            f"generate: with {given} the head returns no logits, from which the next token is "
            f"chosen; use {usual}"
        )
    if config.loss_reads_head and run.evaluate is not None and run.evaluate.keep_outputs != "none":
        raise UnsupportedError(
            f"keep_outputs={str(run.evaluate.keep_outputs)!r}: with {given} the head returns no "
            f"logits that could be kept; use keep_outputs='none', or {usual}"
        )
    if is_cpu and run.evaluate is not None and run.evaluate.to_host_every is not None:
        raise ConfigError(
            f"to_host_every={run.evaluate.to_host_every} does nothing on a CPU, where the device "
            "is the host; leave it out, or predict for a card, such as device='rtx-4060'"
        )
