"""A predicted `RunResult`: the stages of a run over fake tensors, in this process.

As for one step (`memlab.predicting`): kernels of a CPU run once alone, those of a card follow
rules. One caching allocator serves the whole run. Nothing is given back between the stages, so what
one of them leaves in the cache, and how it is cut up, counts in those after it. Left out: time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from memlab.allocator.replay import AllocatorSettings, replay
from memlab.arguments.units import format_bytes
from memlab.costs.recorded_step import Failure, RecordedStep, from_recording
from memlab.costs.targets import Kernels
from memlab.devices.cards import Target
from memlab.predicting.memory_widths import compiled_part, width_of
from memlab.predicting.predict import (
    ASSUMED,
    ASSUMED_BRANCH,
    ASSUMED_SPREAD,
    CPU_MEMORY,
    notes_of_recording,
    versions_of,
)
from memlab.predicting.taken import in_the_middle, possible_sizes
from memlab.result import Outcome, Source
from memlab.running import Report
from memlab.stages.asked_run import AskedRun
from memlab.stages.course import names_of
from memlab.stages.judging_run import ReplayedRun, judged
from memlab.stages.recorded_run import RunRecording, record_run
from memlab.stages.run_result import RunResult, StageCost
from memlab.stages.stage_costs import stage_costs


def predict_run_in_process(asked: AskedRun, target: Target, *, report: Report) -> RunResult:
    """Return what a run would cost on the target; never raises for the run.

    Args:
        asked: the run.
        target: a CPU, or a CUDA card that need not be there.
        report: called as the prediction goes on; what it raises ends it.
    """
    config, device = asked.config, torch.device(target.kind)
    facts: dict[str, Any] = {
        "source": Source.PREDICTED,
        "device": target.name,
        "versions": versions_of(config, target),
    }

    def make(recorded: RunRecording) -> RunResult:
        step = RecordedStep(
            config=config, target=target, device=device, program=recorded.program, report=report
        )
        kernels = step.kernels(timed=False)
        stages, width, replayed = _stages(asked, recorded, kernels, target)
        result = asked.result(
            Outcome.OK,
            summary_of(stages),
            **facts,
            stages=stages,
            uncertainty=width,
            notes=(
                *asked.notes(device),
                *notes_of_recording(recorded.program.recording, target),
                *kernels.notes,
                *recorded.program.recording.assumptions,
            ),
        )
        return with_judgement(result, replayed)

    text = f"recording a run of {asked.workload.name}"
    made = from_recording(
        partial(record_run, asked), make, config, target, report=report, text=text
    )
    if isinstance(made, Failure):
        return asked.result(made.outcome, made.message, **facts)
    return made


def with_judgement(result: RunResult, replayed: ReplayedRun | None = None) -> RunResult:
    """Return the result with whether each stage fits its limit."""
    counted = [result.counted(stage) for stage in result.stages]
    return replace(
        result, stages=judged(result.stages, counted, result.memory_limit_bytes, replayed)
    )


def _stages(
    asked: AskedRun, recorded: RunRecording, kernels: Kernels, target: Target
) -> tuple[tuple[StageCost, ...], float, ReplayedRun | None]:
    """Return what the stages cost, the uncertainty of that, and on a card the run at any limit."""
    names, program = names_of(recorded.run), recorded.program
    if target.kind == "cpu":
        stages = stage_costs(recorded.trace(recorded.sizes(kernels.effects)), names, None)
        return stages, CPU_MEMORY + _unsure(asked, recorded, kernels, stages), None

    settings = AllocatorSettings(expandable_segments=asked.config.expandable_segments)
    owns = possible_sizes(program, kernels, target.card)
    traces = {hypothesis: recorded.trace(own) for hypothesis, own in owns.items()}
    runs = {
        hypothesis: replay(trace.address, trace.nbytes, settings, stream=trace.stream)
        for hypothesis, trace in traces.items()
    }
    chosen = in_the_middle({name: held.peak_reserved_bytes for name, held in runs.items()})
    requested, held = traces[chosen], runs[chosen]
    # blocks have the sizes that the allocator gave out
    given_out = replace(requested, nbytes=np.diff(held.allocated_bytes, prepend=0))
    stages = stage_costs(given_out, names, held.reserved_bytes)
    width = width_of("peak_reserved_bytes", convolutions=len(owns) > 1).half_width
    # the first hypothesis, without any workspace, is what the run needs
    replayed = ReplayedRun(next(iter(traces.values())), names, settings)
    return stages, width + _unsure(asked, recorded, kernels, stages), replayed


def _unsure(
    asked: AskedRun, recorded: RunRecording, kernels: Kernels, stages: tuple[StageCost, ...]
) -> float:
    """Return what is not known of kernels and of values, as a part of the peak."""
    recording = recorded.program.recording
    unsure = kernels.unsure_bytes / max(stage.peak_allocated_bytes for stage in stages)
    own = recorded.sizes(kernels.effects)
    unsure += compiled_part(recorded.program, asked.config, own, None).half_width
    if recording.assumptions:
        spread = ASSUMED_SPREAD if recording.spread else ASSUMED
        unsure += ASSUMED_BRANCH if recording.branched else spread
    return unsure


def summary_of(stages: tuple[StageCost, ...]) -> str:
    """Return the sentence of a run that went well."""
    worst = max(stages, key=lambda stage: stage.peak_allocated_bytes)
    return f"peak {format_bytes(worst.peak_allocated_bytes)} allocated in the {worst.name}"
