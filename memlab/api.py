"""The public functions. They check their arguments in the caller and run the work in a worker."""

import threading
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from memlab._util.checks import anything, checked, count, seconds, size
from memlab._util.units import shown
from memlab.config import Sharding, StepConfig
from memlab.devices.cards import Target, with_limit
from memlab.devices.here import resolve_device, versions_here
from memlab.errors import ConfigError, MemlabError, UnsupportedError, WorkloadError
from memlab.loading import LoadingConfig, LoadingResult
from memlab.prediction.plans import plan_for
from memlab.prediction.run_result import RunResult
from memlab.prediction.run_settings import TrainingRun
from memlab.result import Outcome, Source, StepResult
from memlab.running import Ended, Run
from memlab.runtime import isolation
from memlab.runtime.accumulation import MOST_BYTES, AccumulationEffect, shortened
from memlab.runtime.bar import shows_progress
from memlab.runtime.inspect import WorkloadFacts
from memlab.runtime.isolation import OnProgress, runner
from memlab.runtime.same_step import circumstances_here
from memlab.runtime.sending import Stamp, stamp
from memlab.runtime.verify_report import VerifyReport
from memlab.store.database import RunArguments, kept
from memlab.store.recorded import target_for
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab.prediction.predict import Prediction

RANKED = ("measure", "verify")  # jobs that start a process for each rank
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
    how = _HowToRun(isolate, timeout_seconds, on_progress, cancel)
    more = {"repeats": repeats, "warmup": warmup, "memory_limit": limit}
    try:
        result: StepResult = how.run("measure", workload, config, target, seed=seed, **more)
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
    watts: float | None = None,
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
            "h200, recorded" uses the operator times that were recorded on that device, and
            "rtx-4060-laptop, 60 W" is a card under a power limit. None is the device that `measure`
            would use.
        seed: set before the model, the batch and each step.
        memory_limit: bytes, or text such as "2GiB". The result's `fits` compares the peak with it:
            allocated bytes on a CPU, reserved bytes on CUDA.
        watts: a power limit of the card, as it may also stand behind its name.
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
    return predict_with_size_model(
        workload,
        config,
        device if watts is None else with_limit(device, watts),
        seed=seed,
        memory_limit=memory_limit,
        timeout_seconds=timeout_seconds,
        on_progress=on_progress,
        cancel=cancel,
    ).result


@checked(**LIMITS)
def predict_with_size_model(
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
    """Return the result of `predict`, without `every_rank` of one rank, and a size model."""
    target = target_for(device, config)
    limit = size("memory_limit", memory_limit)
    how = _HowToRun(True, timeout_seconds, on_progress, cancel)
    more = {"memory_limit": limit, "every_rank": every_rank}
    try:
        found: Prediction = how.run("predict", workload, config, target, seed=seed, **more)
        return replace(found, result=_answering(found.result, workload, config))
    except Ended as ended:
        from memlab.prediction import predict as predicting  # late: fake tensors import slowly

        result = _ended(ended, Source.PREDICTED, target.name, workload, config, limit)
        return predicting.Prediction(result=result, size_model=None)


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
    how = _HowToRun(isolate, timeout_seconds, on_progress, cancel)
    try:
        found: VerifyReport = how.run("verify", workload, config, target, seed=seed)
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


@dataclass(frozen=True, slots=True)
class _HowToRun:
    """How a job of the worker runs, in the words of `measure`."""

    isolate: bool
    timeout_seconds: float
    on_progress: OnProgress | None
    cancel: threading.Event | None

    def run(
        self,
        function: str,
        workload: Workload,
        config: StepConfig,
        where: torch.device | Target,
        *,
        seed: int,
        **more: Any,
    ) -> Any:
        """Plan what a step recomputes, and run a job with the plan.

        The ranks of a sharded step are always processes of their own, which a worker starts. It
        stops them when the time is over, and says where each of them was; so it has a little more
        time.

        Raises:
            Ended: the job, or that which plans it, ended without a result.
        """
        target = where if isinstance(where, Target) else target_for(where, config)
        run = self._runner(self.isolate)
        # planning for a card registers a stand-in for CUDA, which a process cannot undo
        plans = run if target.kind == "cpu" else self._runner(True)
        if function in RANKED and config.sharding is not Sharding.NONE:
            function, more["timeout_seconds"] = f"{function}_ranks", self.timeout_seconds
            run = self._runner(True, STOPPING_SECONDS)
        more["target" if isinstance(where, Target) else "device"] = where
        plan = plan_for(workload, config, target, seed=seed, run=plans)
        arguments = {"workload": workload, "config": config, "seed": seed, "plan": plan}
        return run(function, arguments | more)

    def _runner(self, isolate: bool, more_seconds: float = 0.0) -> Run:
        return runner(isolate, self.timeout_seconds + more_seconds, self.on_progress, self.cancel)


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


# `measure_loading`, the public function for data loading. The measurement runs in the worker.


@checked(dataset=anything, num_steps=count(1), timeout_seconds=seconds)
@shows_progress
def measure_loading(
    workload: Workload,
    config: StepConfig,
    dataset: Dataset[Any],
    loading: LoadingConfig | None = None,
    device: str | torch.device | None = None,
    *,
    num_steps: int = 8,
    seed: int = 0,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> LoadingResult:
    """Measure a training step together with the loader that feeds it.

    The result says how long a step takes with and without loading, how much of that it waits for
    its batch, and how much memory the loader's processes hold.

    Args:
        workload: gives the model and the loss; batches come from `dataset` instead.
        config: how it is trained; `batch_size` is also the loader's.
        dataset: map-style (`__getitem__` and `__len__`), such as `memlab.workloads.JpegDigits()`.
        loading: how the loader works; None is PyTorch's default, loading in the training process.
        device: as for `measure`.
        num_steps: number of timed steps; one untimed step runs before them.
        seed: set before the model and before each step; it also orders the samples.
        timeout_seconds: the run ends as `timed_out` after this time.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed. What goes wrong during the run is the `outcome`.

    A batch of 4 samples, each of 64 and 8 numbers of 4 bytes:

    >>> model, samples = torch.nn.Linear(64, 8), (torch.zeros(16, 64), torch.zeros(16, 8))
    >>> workload = Workload.from_module(model, samples, torch.nn.functional.mse_loss)
    >>> dataset = torch.utils.data.TensorDataset(*samples)
    >>> config = StepConfig(batch_size=4)
    >>> measure_loading(workload, config, dataset, device="cpu", num_steps=2).batch_bytes
    1152
    """
    loading = LoadingConfig() if loading is None else loading
    if not (_has(dataset, "__getitem__") and _has(dataset, "__len__")):
        raise WorkloadError(
            f"dataset={shown(dataset)} is not map-style; give it __getitem__ and __len__, as "
            "torch.utils.data.Dataset describes"
        )

    _check_length(dataset)
    target = resolve_device(device)
    how = _HowToRun(True, timeout_seconds, on_progress, cancel)
    more = {"dataset": dataset, "loading": loading, "num_steps": num_steps}
    try:
        found: LoadingResult = how.run("loading", workload, config, target, seed=seed, **more)
    except Ended as ended:
        return LoadingResult(
            outcome=ended.outcome,
            message=str(ended),
            device=str(target),
            config=config,
            loading=loading,
            workload_name=workload.name,
        )

    return found


def _has(dataset: Any, method: str) -> bool:
    try:
        return hasattr(dataset, method)
    except Exception:  # a person's own __getattr__ may raise anything
        return False


def _check_length(dataset: Any) -> None:
    """Raise WorkloadError if the dataset has no samples or cannot count them."""
    try:
        length = len(dataset)
    except Exception as error:
        raise WorkloadError(
            f"dataset={shown(dataset)}: its __len__ raised {type(error).__name__}: {error}; return "
            "the number of samples"
        ) from error

    if not isinstance(length, int) or length < 1:
        raise WorkloadError(f"dataset={shown(dataset)} has no samples; give it at least one")


# `predict_run` and `measure_run`: what a whole run costs, stage by stage.


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
    how = _HowToRun(True, timeout_seconds, on_progress, cancel)
    return _ran("predict_run", workload, config, target, how, run, seed, limit)


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
    how = _HowToRun(isolate, timeout_seconds, on_progress, cancel)
    return _ran("measure_run", workload, config, resolve_device(device), how, run, seed, limit)


def _ran(
    function: str,
    workload: Workload,
    config: StepConfig,
    where: torch.device | Target,
    how: _HowToRun,
    run: TrainingRun | None,
    seed: int,
    limit: int | None,
) -> RunResult:
    """Run a job of the worker and return its result, or that of a run which ended without one."""
    run = TrainingRun() if run is None else run
    if isinstance(where, torch.device):
        source, name, kind = Source.MEASURED, str(where), where.type
    else:
        source, name, kind = Source.PREDICTED, where.name, where.kind
    _check(config, run, is_cpu=kind == "cpu")
    more = {"run": run, "memory_limit": limit}
    try:
        found: RunResult = how.run(function, workload, config, where, seed=seed, **more)
        return replace(found, config=config)  # a policy function comes back as a copy
    except Ended as ended:
        return RunResult(
            outcome=ended.outcome,
            message=str(ended),
            source=source,
            device=name,
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
