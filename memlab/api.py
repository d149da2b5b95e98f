"""The public functions. They check their arguments in the caller and run the work in a worker."""

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memlab.arguments.checks import checked, count, seconds, size
from memlab.config import Sharding, StepConfig
from memlab.devices.here import resolve_device, versions_here
from memlab.errors import MemlabError, WorkloadError
from memlab.measuring.inspect import WorkloadFacts
from memlab.planning.plans import plan_for
from memlab.records.targets import target_for
from memlab.result import Outcome, Source, StepResult
from memlab.running import Ended, Run
from memlab.sending.same_step import circumstances_here
from memlab.sending.sources import Stamp, stamp
from memlab.store.keeping import kept
from memlab.store.rows import RunArguments
from memlab.verifying.accumulation import MOST_BYTES, AccumulationEffect, shortened
from memlab.verifying.report import VerifyReport
from memlab.worker import isolation
from memlab.worker.bar import shows_progress
from memlab.worker.isolation import OnProgress, runner
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab.predicting.predict import Prediction

STOPPING_SECONDS = 20.0  # for a worker to stop the ranks of a step that takes too long
# rules for arguments whose annotation does not say which values are allowed
LIMITS: dict[str, Any] = {"memory_limit": size, "timeout_seconds": seconds}


@checked(repeats=count(1), **LIMITS)
@shows_progress
def measure(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    repeats: int = 5,
    warmup: int = 1,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    isolate: bool = True,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> StepResult:
    """Measure what one training step costs on a device of this machine.

    Memory and time are measured in separate passes over the same step. The memory pass records
    every allocation of the real allocator in the first step that begins with optimizer state. The
    time pass runs without a meter. The result is written to the store (`memlab.results`); if that
    is not possible, its notes say why.

    The step runs in a worker process. The worker imports your own modules from the newest version
    of their files, and sets plain values, functions and classes that you have changed in them here.
    Other objects that you have changed by hand are as their file makes them.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: "cpu", "cuda", "cuda:1"; None is the accelerator if there is one, else the CPU.
        repeats: number of timed steps; the result quotes their median.
        warmup: number of untimed steps before them.
        seed: set before the model, the batch and each step.
        memory_limit: bytes, or text such as "2GiB", that the step may hold. On a CPU it limits
            allocated bytes, on CUDA what the caching allocator reserves.
        timeout_seconds: the run ends as `timed_out` after this time.
        isolate: run in the worker process. With False the step runs in this process: a crash ends
            it, `cancel` and the time limit act only between two steps, and PyTorch's profiler
            writes two lines to standard error. The ranks of a sharded step are always processes
            of their own.
        on_progress: called with a `Progress` during the run.
        progress: whether a notebook or a terminal shows a bar after the first second, unless
            `on_progress` is given.
        cancel: once this event is set, the run ends as `cancelled`.

    Raises:
        MemlabError: an argument is not allowed; the message names it and what is allowed. What
            goes wrong while the step runs is the `outcome` of the result.

    64 x 8 weights and 8 biases of 4 bytes:

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> result = measure(workload, StepConfig(batch_size=4), "cpu")
    >>> result.outcome, result.peak_by_category["parameters"]
    (<Outcome.OK: 'ok'>, 2080)
    """
    result = measure_only(
        workload,
        config,
        device,
        repeats=repeats,
        warmup=warmup,
        seed=seed,
        memory_limit=memory_limit,
        timeout_seconds=timeout_seconds,
        isolate=isolate,
        on_progress=on_progress,
        cancel=cancel,
    )
    asked = RunArguments(
        seed=seed,
        repeats=repeats,
        warmup=warmup,
        memory_limit_bytes=size("memory_limit", memory_limit),
        timeout_seconds=timeout_seconds,
    )
    return kept(result, workload, asked, is_isolated=isolate, device=resolve_device(device))


@checked(repeats=count(1), **LIMITS)
def measure_only(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    repeats: int = 5,
    warmup: int = 1,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    isolate: bool = True,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> StepResult:
    """Return what `measure` returns, and leave the store alone; a sweep writes by itself."""
    target = resolve_device(device)
    limit = size("memory_limit", memory_limit)
    arguments: dict[str, Any] = {
        "workload": workload,
        "config": config,
        "device": target,
        "repeats": repeats,
        "warmup": warmup,
        "seed": seed,
        "memory_limit": limit,
    }

    step, plans = _runners("measure", config, target, isolate, timeout_seconds, on_progress, cancel)

    try:
        plan = plan_for(
            workload, config, target_for(target, config), seed=arguments["seed"], run=plans
        )
        result: StepResult = step(arguments | {"plan": plan})
        return _answering(result, workload, config)
    except Ended as ended:
        return _ended(ended, Source.MEASURED, str(target), workload, config, limit)


@checked(**LIMITS)
@shows_progress
def predict(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> StepResult:
    """Predict what one training step would cost, without running it.

    The step runs over fake tensors, which have shapes but no data, in a worker of its own. For a
    CPU, each operator that is new to memlab runs once alone, to learn the memory and the time of
    its kernel.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: "cpu", "cuda", a card by name ("h200", "rtx-4090", "t4") or by memory ("24GiB"), or
            several cards ("8x-h100", "64x8-h100", "2-pcs"). They need not be in this machine.
            "h200, recorded" uses the operator times that were recorded on that device. None is
            the device that `measure` would use.
        seed: set before the model, the batch and each step.
        memory_limit: bytes, or text such as "2GiB". The result's `fits` compares the peak with it:
            allocated bytes on a CPU, reserved bytes on CUDA.
        timeout_seconds: the prediction ends as `timed_out` after this time.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed; the message names it and what is allowed.

    A card rounds every block up to 512 bytes: 2048 of weights, and 32 of biases.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> result = predict(workload, StepConfig(batch_size=4), "t4", memory_limit="8GiB")
    >>> result.fits, result.peak_by_category["parameters"]
    (True, 2560)
    """
    return predict_with_forecast(
        workload,
        config,
        device,
        seed=seed,
        memory_limit=memory_limit,
        timeout_seconds=timeout_seconds,
        on_progress=on_progress,
        cancel=cancel,
    ).result


@checked(**LIMITS)
def predict_with_forecast(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
    every_rank: bool = True,
) -> "Prediction":
    """Return the result of `predict`, without `every_rank` of one rank, and a forecast."""
    target = target_for(device, config)
    limit = size("memory_limit", memory_limit)
    arguments: dict[str, Any] = {
        "workload": workload,
        "config": config,
        "target": target,
        "seed": seed,
        "memory_limit": limit,
    }

    run = runner(True, timeout_seconds, on_progress, cancel)

    try:
        plan = plan_for(workload, config, target, seed=arguments["seed"], run=run)
        found: Prediction = run("predict", arguments | {"plan": plan, "every_rank": every_rank})
        return replace(found, result=_answering(found.result, workload, config))
    except Ended as ended:
        from memlab.predicting import predict as predicting  # late: fake tensors import slowly

        result = _ended(ended, Source.PREDICTED, target.name, workload, config, limit)
        return predicting.Prediction(result=result, forecast=None)


@checked(timeout_seconds=seconds)
@shows_progress
def verify(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    seed: int = 0,
    timeout_seconds: float = 120,
    isolate: bool = True,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> VerifyReport:
    """Check that `config` trains like the reference step: same gradients, weights and buffers.

    The reference step has the same batch, micro-batches and optimizer, and every technique off.
    Three updates of both steps are compared. The reference step also switches off a model's own use
    of `torch.utils.checkpoint`, so this is checked too. A recompute that the model implements by
    itself is part of both steps and cannot be checked.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: as for `measure`.
        seed: set before the model, the batch and each step.
        timeout_seconds: the check ends as `timed_out` after this time.
        isolate: as for `measure`.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> report = verify(workload, StepConfig(batch_size=4, accumulation_steps=2), "cpu")
    >>> report.ok, report.same_as_full_batch
    (True, 'yes')
    """
    target = resolve_device(device)
    arguments: dict[str, Any] = {
        "workload": workload,
        "config": config,
        "device": target,
        "seed": seed,
    }

    step, plans = _runners("verify", config, target, isolate, timeout_seconds, on_progress, cancel)

    try:
        plan = plan_for(
            workload, config, target_for(target, config), seed=arguments["seed"], run=plans
        )
        found: VerifyReport = step(arguments | {"plan": plan})
    except Ended as ended:
        return VerifyReport(ok=False, outcome=ended.outcome, why=str(ended), device=str(target))

    return found


@checked(timeout_seconds=seconds)
def inspect_workload(workload: Workload, *, timeout_seconds: float = 120) -> WorkloadFacts:
    """Return sizes of the workload, and the modules in it that limit techniques.

    Raises:
        WorkloadError: the model or a batch of two samples could not be made; the message says why.
    """
    try:
        facts: WorkloadFacts = isolation.run(
            "inspect", {"workload": workload}, timeout_seconds=timeout_seconds
        )
    except Ended as ended:
        raise WorkloadError(f"workload {workload.name!r} cannot be built: {ended}") from None

    return facts


_effects: dict[str, tuple[AccumulationEffect, dict[str, Stamp | None]]] = {}


def accumulation_effect(
    workload: Workload,
    *,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> AccumulationEffect:
    """Return whether micro-batches give the gradient of the whole batch.

    A few samples are trained, or else the shapes of the step are looked at. A session asks once
    for a workload, as long as its code, its values and the files that it comes from stay. What was
    cancelled, took too long or could not be made is unknown, and asked for again.
    """
    key, stamps = circumstances_here([workload], every_value=True)
    if key in _effects and all(stamp(file) == was for file, was in _effects[key][1].items()):
        return _effects[key][0]
    run = runner(True, timeout_seconds, on_progress, cancel)
    found = AccumulationEffect(same="unknown", why="")
    by_shapes = {"workload": shortened(workload)}
    jobs: list[tuple[str, dict[str, Any]]] = [
        ("per_sample", by_shapes | {"least_bytes": MOST_BYTES}),
        ("accumulation", {"workload": workload}),
    ]
    while jobs and found.same == "unknown":
        job, arguments = jobs.pop(0)
        try:
            answer: AccumulationEffect | None = run(job, arguments)
        except (Ended, MemlabError) as error:  # what was found beside it stays
            answer, key = AccumulationEffect(same="unknown", why=str(error)), None
        if answer is None:
            jobs.append(("per_sample", by_shapes))
            continue
        both = "; ".join(filter(None, [found.why, answer.why]))
        found = answer if answer.same != "unknown" else replace(found, why=both)
    if key is not None:
        lanes = isolation.measuring.stamps | isolation.predicting.stamps
        _effects[key] = found, {**lanes, **stamps}
    return found


def _runners(
    function: str,
    config: StepConfig,
    target: torch.device,
    isolate: bool,
    timeout_seconds: float,
    on_progress: OnProgress | None,
    cancel: threading.Event | None,
) -> tuple[Callable[[dict[str, Any]], Any], Run]:
    """Return a function that runs the step itself, and one that runs the jobs that plan it.

    The ranks of a sharded step are always processes of their own, which a worker starts. It stops
    them when the time is over, and says where each of them was; so it has a little more time.
    """
    run = runner(isolate, timeout_seconds, on_progress, cancel)
    # planning for a card registers a stand-in for CUDA, which a process cannot undo
    own = runner(True, timeout_seconds, on_progress, cancel)
    plans = run if target.type == "cpu" else own
    if config.sharding is Sharding.NONE:
        return partial(run, function), plans

    longer = runner(True, timeout_seconds + STOPPING_SECONDS, on_progress, cancel)
    more = {"timeout_seconds": timeout_seconds}
    return lambda arguments: longer(f"{function}_ranks", arguments | more), plans


def _answering(result: StepResult, workload: Workload, config: StepConfig) -> StepResult:
    """Return a result with the caller's own config, since a policy function comes back as a copy.

    Raises:
        Ended: the worker returned the result of another workload or config.
    """
    answered = result.config
    others = [
        field.name
        for field in fields(config)
        if (asked := getattr(config, field.name)) != (found := getattr(answered, field.name))
        and not (callable(asked) and callable(found))
    ]
    if others or result.workload_name != workload.name:
        raise Ended(
            Outcome.CRASHED,
            "the worker returned a result that was not asked for: workload "
            f"{result.workload_name!r} with {answered}; run it again",
        )

    return replace(result, config=config)


def _ended(
    ended: Ended,
    source: Source,
    device: str,
    workload: Workload,
    config: StepConfig,
    limit: int | None,
) -> StepResult:
    """Return the result of a run that ended without one."""
    return StepResult(
        outcome=ended.outcome,
        message=str(ended),
        source=source,
        device=device,
        versions=versions_here(),
        config=config,
        workload_name=workload.name,
        memory_limit_bytes=limit,
    ).against_limit(limit)
