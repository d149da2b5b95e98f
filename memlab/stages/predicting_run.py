"""A predicted `RunResult`: the stages of a run over fake tensors, in this process.

As for one step (`memlab.predicting`): kernels of a CPU run once alone, those of a card follow
rules. One caching allocator serves the whole run. Nothing is given back between the stages, so what
one of them leaves in the cache, and how it is cut up, counts in those after it. Left out: time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memlab.allocator.replay import AllocatorSettings, Reserved, replay
from memlab.arguments.units import format_bytes
from memlab.config import Precision, StepConfig
from memlab.costs.cudnn_workspace import Workspaces, middle, take_workspace, with_workspaces
from memlab.costs.recorded_step import Failure, from_recording
from memlab.costs.targets import Kernels, kernels_of
from memlab.devices.cards import Target
from memlab.plan import Plan
from memlab.predicting.memory_widths import weights, width_of
from memlab.predicting.predict import (
    ASSUMED,
    ASSUMED_BRANCH,
    ASSUMED_SPREAD,
    CPU_MEMORY,
    versions_of,
)
from memlab.recording.assembly import sizes_of
from memlab.recording.tracker import Tracker
from memlab.result import Outcome, Source
from memlab.running import Progress, Report
from memlab.stages.course import names_of
from memlab.stages.judging_run import ReplayedRun, judged
from memlab.stages.recorded_run import RunRecording, record_run
from memlab.stages.run_notes import notes_of_run
from memlab.stages.run_result import RunResult, StageCost
from memlab.stages.run_settings import TrainingRun
from memlab.stages.stage_costs import stage_costs
from memlab.step import notes
from memlab.trace import Trace
from memlab.workload import Workload

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import


def predict_run_in_process(
    workload: Workload,
    config: StepConfig,
    target: Target,
    *,
    run: TrainingRun,
    seed: int,
    memory_limit: int | None,
    plan: Plan | None = None,
    report: Report,
) -> RunResult:
    """Return what a run would cost on the target; never raises for the run.

    Args:
        workload: what is trained.
        config: how.
        target: a CPU, or a CUDA card that need not be there.
        run: what is done beside the steps.
        seed: set before the model, the batch and each stage.
        memory_limit: bytes that each stage is compared with.
        plan: of the config's memory budget.
        report: called as the prediction goes on; what it raises ends it.
    """
    asked: dict[str, Any] = {
        "source": Source.PREDICTED,
        "device": target.name,
        "versions": versions_of(config, target),
        "config": config,
        "run": run,
        "workload_name": workload.name,
        "memory_limit_bytes": memory_limit,
    }

    def record(device: torch.device, tracker: Tracker) -> RunRecording:
        return record_run(workload, config, device, tracker, run=run, seed=seed, plan=plan)

    def make(recorded: RunRecording) -> RunResult:
        kernels = kernels_of(
            recorded.program,
            config.micro_batch_sizes,
            _without_times(target),
            lambda share: report(Progress(text="running new operators alone", fraction=share)),
            tf32_matmul=config.precision is Precision.TF32,
            timed=False,
        )
        stages, width, replayed = _stages(recorded, kernels, config, target)
        result = RunResult(
            **asked,
            outcome=Outcome.OK,
            message=summary_of(stages),
            stages=stages,
            uncertainty=width,
            notes=(
                *notes(config, torch.device(target.kind), plan),
                *recorded.program.recording.notes,
                *notes_of_run(config, run, is_cpu=target.kind == "cpu"),
                *kernels.notes,
                *recorded.program.recording.assumptions,
            ),
        )
        return with_judgement(result, replayed)

    made = from_recording(
        record, make, config, target, report=report, text=f"recording a run of {workload.name}"
    )
    if isinstance(made, Failure):
        return RunResult(**asked, outcome=made.outcome, message=made.message)
    return made


def with_judgement(result: RunResult, replayed: ReplayedRun | None = None) -> RunResult:
    """Return the result with whether each stage fits its limit."""
    counted = [result.counted(stage) for stage in result.stages]
    return replace(
        result, stages=judged(result.stages, counted, result.memory_limit_bytes, replayed)
    )


def _without_times(target: Target) -> Target:
    """Return a target whose operators have no known times, which a run does not need."""
    if target.card is None:
        return target
    return replace(target, card=replace(target.card, memory_bytes_per_second=None))


def _stages(
    recorded: RunRecording, kernels: Kernels, config: StepConfig, target: Target
) -> tuple[tuple[StageCost, ...], float, ReplayedRun | None]:
    """Return what the stages cost, the uncertainty of that, and on a card the run at any limit."""
    recording, names = recorded.program.recording, names_of(recorded.run)
    least = sizes_of(recording, recorded.program.layout, kernels.effects)
    trace = recorded.trace(least)
    if target.kind == "cpu":
        stages = stage_costs(trace, names, None)
        return stages, CPU_MEMORY + _unsure(recorded, kernels, stages), None

    settings = AllocatorSettings(expandable_segments=config.expandable_segments)
    replayed = ReplayedRun(trace, names, settings)
    runs = {Workspaces.NONE: (trace, _replay(trace, settings))}
    has_workspaces = take_workspace(recording.operators, target.card)
    if has_workspaces:
        for hypothesis in Workspaces:
            if hypothesis is not Workspaces.NONE:
                given = _sizes(recorded, kernels, target, hypothesis)
                other = recorded.trace(given)
                runs[hypothesis] = other, _replay(other, settings)
    peaks = {hypothesis: held.peak_reserved_bytes for hypothesis, (_, held) in runs.items()}
    asked, held = runs[middle(peaks, weights())]
    # blocks have the sizes that the allocator gave out
    given_out = replace(asked, nbytes=np.diff(held.allocated_bytes, prepend=0))
    stages = stage_costs(given_out, names, held.reserved_bytes)
    width = width_of("peak_reserved_bytes", convolutions=has_workspaces).half_width
    return stages, width + _unsure(recorded, kernels, stages), replayed


def _sizes(
    recorded: RunRecording, kernels: Kernels, target: Target, hypothesis: Workspaces
) -> npt.NDArray[np.int64]:
    recording = recorded.program.recording
    effects = with_workspaces(kernels.effects, recording.operators, target.card, hypothesis)
    return sizes_of(recording, recorded.program.layout, effects)


def _replay(trace: Trace, settings: AllocatorSettings) -> Reserved:
    return replay(trace.address, trace.nbytes, settings, stream=trace.stream)


def _unsure(recorded: RunRecording, kernels: Kernels, stages: tuple[StageCost, ...]) -> float:
    """Return what is not known of kernels and of values, as a part of the peak."""
    recording = recorded.program.recording
    unsure = kernels.unsure_bytes / max(stage.peak_allocated_bytes for stage in stages)
    if recording.assumptions:
        spread = ASSUMED_SPREAD if recording.spread else ASSUMED
        unsure += ASSUMED_BRANCH if recording.branched else spread
    return unsure


def summary_of(stages: tuple[StageCost, ...]) -> str:
    """Return the sentence of a run that went well."""
    worst = max(stages, key=lambda stage: stage.peak_allocated_bytes)
    return f"peak {format_bytes(worst.peak_allocated_bytes)} allocated in the {worst.name}"
