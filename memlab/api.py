"""The public functions: checked here, in the caller; run in the worker unless told otherwise."""

import platform
import threading
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from memlab._version import __version__
from memlab.arguments.checks import checked, count, seconds, size
from memlab.config import Precision, StepConfig
from memlab.devices.cards import Target, resolve
from memlab.devices.here import resolve_device
from memlab.errors import WorkloadError
from memlab.measuring.inspect import WorkloadFacts
from memlab.planning.plans import plan_for
from memlab.records.recorded import is_recorded, record_of, target_of
from memlab.result import Outcome, Source, StepResult
from memlab.running import Ended
from memlab.techniques.recompute import policies
from memlab.verifying.verify import VerifyReport
from memlab.worker import isolation
from memlab.worker.isolation import OnProgress, runner
from memlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

    from memlab.predicting.predict import Prediction

# what the annotations of the arguments do not say
LIMITS: dict[str, Any] = {"memory_limit": size, "timeout_seconds": seconds}


@checked(repeats=count(1), **LIMITS)
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
    cancel: threading.Event | None = None,
) -> StepResult:
    """Return what one training step costs, measured on a device of this machine.

    Memory and time are taken in separate passes over the same step: memory by every allocation of
    the real allocator, in the first step that begins with optimizer state; time with no meter on.
    The worker imports your own modules from their files, newest first, and sets on them the plain
    values, functions and classes that differ here; other objects that you changed in them by hand
    stay as their file makes them.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: "cpu", "cuda", "cuda:1"; None is the accelerator if there is one, else the CPU.
        repeats: timed steps, of which the median is quoted.
        warmup: steps before them that are not counted.
        seed: set before the model, the batch and each step.
        memory_limit: bytes, or text such as "2GiB", that the step may hold. On a CPU allocated
            bytes are held against it, on CUDA the caching allocator may not reserve more.
        timeout_seconds: after which the run ends as `timed_out`.
        isolate: run in the worker process. False runs here, where nothing is sent or survives a
            crash, Stop and the time limit act only between two steps, and PyTorch's profiler writes
            two lines to standard error.
        on_progress: called with a `Progress` as the run goes on.
        cancel: once set, the run ends as `cancelled`.

    Raises:
        MemlabError: an argument cannot be; the message names it and what is allowed. What happens
            while the step runs is the `outcome` of the result.

    64 x 8 weights and 8 biases of 4 bytes:

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> result = measure(workload, StepConfig(batch_size=4), "cpu")
    >>> result.outcome, result.peak_by_category["parameters"]
    (<Outcome.OK: 'ok'>, 2080)
    """
    policies.keeps(config.checkpoint_policy)  # raises for an operator that does not exist
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
    run = runner(isolate, timeout_seconds, on_progress, cancel)
    # beside a card a plan needs a process of its own: what stands in for CUDA is for good
    plans = run if target.type == "cpu" else runner(True, timeout_seconds, on_progress, cancel)
    try:
        plan = plan_for(workload, config, resolve(target), seed=arguments["seed"], run=plans)
        result: StepResult = run("measure", arguments | {"plan": plan})
        return _answering(result, workload, config)
    except Ended as ended:
        return _ended(ended, Source.MEASURED, str(target), workload, config, limit)


@checked(**LIMITS)
def predict(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> StepResult:
    """Return what one training step would cost, without running it.

    The step goes over fake tensors, in a worker of its own. For a CPU each operator that was not
    seen before is run once alone, on memory of its own, to learn what its kernel takes.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: "cpu", "cuda", a card by name ("h200", "rtx-4090", "t4") or by memory ("24GiB"); no
            card need be there. "h200, recorded" is a recorded device, on which operators take the
            time that they took there. None is what `measure` would take.
        seed: set before the model, the batch and each step.
        memory_limit: bytes, or text such as "2GiB", that `fits` is told against: allocated bytes on
            a CPU, reserved ones on CUDA.
        timeout_seconds: after which the prediction ends as `timed_out`.
        on_progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument cannot be; the message names it and what is allowed.

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
) -> "Prediction":
    """Return what `predict` does, with the arithmetic that gives other batch sizes at once."""
    policies.keeps(config.checkpoint_policy)  # raises for an operator that does not exist
    target = _target(device, config)
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
        found: Prediction = run("predict", arguments | {"plan": plan})
        return replace(found, result=_answering(found.result, workload, config))
    except Ended as ended:
        from memlab.predicting import predict as predicting  # late, as all that fake tensors need

        result = _ended(ended, Source.PREDICTED, target.name, workload, config, limit)
        return predicting.Prediction(result=result, forecast=None)


@checked(timeout_seconds=seconds)
def verify(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    seed: int = 0,
    timeout_seconds: float = 120,
    isolate: bool = True,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> VerifyReport:
    """Return whether `config` gives the gradients of the plain fp32 step, split as it is.

    A model's own use of `torch.utils.checkpoint` is off in the reference step, and so is checked
    too; a recompute that it has written for itself is part of both steps and cannot be seen.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: as for `measure`.
        seed: set before the model, the batch and each step.
        timeout_seconds: after which the check ends.
        isolate: as for `measure`.
        on_progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument cannot be.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> report = verify(workload, StepConfig(batch_size=4, accumulation_steps=2), "cpu")
    >>> report.ok, report.same_as_full_batch
    (True, 'yes')
    """
    policies.keeps(config.checkpoint_policy)  # raises for an operator that does not exist
    target = resolve_device(device)
    arguments: dict[str, Any] = {
        "workload": workload,
        "config": config,
        "device": target,
        "seed": seed,
    }
    run = runner(isolate, timeout_seconds, on_progress, cancel)
    # beside a card a plan needs a process of its own: what stands in for CUDA is for good
    plans = run if target.type == "cpu" else runner(True, timeout_seconds, on_progress, cancel)
    try:
        plan = plan_for(workload, config, resolve(target), seed=arguments["seed"], run=plans)
        found: VerifyReport = run("verify", arguments | {"plan": plan})
    except Ended as ended:
        return VerifyReport(ok=False, outcome=ended.outcome, why=str(ended))
    return found


@checked(timeout_seconds=seconds)
def inspect_workload(workload: Workload, *, timeout_seconds: float = 120) -> WorkloadFacts:
    """Return sizes of the workload, and the modules in it that limit techniques.

    Raises:
        WorkloadError: the model or a batch of two could not be made; says why.
    """
    try:
        facts: WorkloadFacts = isolation.run(
            "inspect", {"workload": workload}, timeout_seconds=timeout_seconds
        )
    except Ended as ended:
        raise WorkloadError(f"workload {workload.name!r} cannot be built: {ended}") from None
    return facts


@checked()
def to_frame(results: Iterable[StepResult]) -> "pd.DataFrame":
    """Return one row a result: config, outcome and costs; the timeline is left out.

    Columns that end in `_bytes` are bytes, in `_seconds` seconds.

    Raises:
        MemlabError: something in `results` is no `StepResult`.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> to_frame([result])[["batch_size", "peak_allocated_bytes", "peak_activations_bytes"]]
       batch_size  peak_allocated_bytes  peak_activations_bytes
    0           4              38325928                13656628
    """
    import pandas as pd

    rows = []
    for result in results:
        row = result.to_dict()
        del row["timeline"], row["step_seconds_all"], row["versions"], row["peak_holdings"]
        del row["parameter_formats"]
        config, categories = row.pop("config"), row.pop("peak_by_category") or {}
        place = result.peak_place
        rows.append(
            {"workload_name": row.pop("workload_name"), "number_format": result.number_format}
            | config
            | row
            | {"peak_place": str(place) if place else None, "notes": " ".join(result.notes)}
            | {f"peak_{name}_bytes": size for name, size in categories.items()}
        )
    return pd.DataFrame(rows)


def _target(device: str | torch.device | None, config: StepConfig) -> Target:
    """Return what a prediction is for.

    Raises:
        DeviceError: no such device is known or recorded.
    """
    if not isinstance(device, str) or not is_recorded(device):
        return resolve(device)
    return target_of(record_of(device), tf32=config.precision is Precision.TF32)


def _answering(result: StepResult, workload: Workload, config: StepConfig) -> StepResult:
    """Return a result with the caller's own config: a policy function comes back as another object.

    Raises:
        Ended: it is the result of another question.
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
            f"the worker answered another question: for workload {result.workload_name!r} with "
            f"{answered}; run it once more",
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
    is_measured = source is Source.MEASURED  # a prediction's own memory says nothing of the step
    versions = {
        "memlab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return StepResult(
        outcome=ended.outcome,
        message=str(ended),
        source=source,
        device=device,
        versions=versions,
        config=config,
        workload_name=workload.name,
        memory_limit_bytes=limit,
        fits=False if limit and is_measured and ended.outcome is Outcome.OUT_OF_MEMORY else None,
    )
