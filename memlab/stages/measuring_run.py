"""A measured `RunResult`: the stages of a run on a device of this machine, under one meter.

The whole run is one recording of every allocation (`meters/meter.py`). On a card the peaks are the
caching allocator's own, reset at the beginning of each stage without giving back its cache. No card
has run this. Left out: time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memlab.config import StepConfig
from memlab.devices.generators import preserved_random_state
from memlab.measuring.measure import clean_up, versions_of
from memlab.meters import cuda
from memlab.meters.meter import Meter, record
from memlab.plan import Plan
from memlab.result import Outcome, Source
from memlab.running import Progress, Report, explain
from memlab.saving import checkpoints
from memlab.stages.course import StageName, course, names_of
from memlab.stages.predicting_run import summary_of, with_judgement
from memlab.stages.run_notes import notes_of_run
from memlab.stages.run_result import RunResult, StageCost
from memlab.stages.run_settings import TrainingRun
from memlab.stages.stage_costs import stage_costs
from memlab.step import Step, build_step, notes
from memlab.techniques.optimizers.optimizers import states_of
from memlab.trace import Phase
from memlab.workload import Workload


def measure_run_in_process(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    *,
    run: TrainingRun,
    seed: int,
    memory_limit: int | None,
    plan: Plan | None = None,
    report: Report,
) -> RunResult:
    """Measure what a run costs on this device. Errors of the run are outcomes, not raised.

    Args:
        workload: what is trained.
        config: how.
        device: of this machine.
        run: what is done beside the steps.
        seed: set before the model, the batch and each stage.
        memory_limit: bytes. On a CPU each stage is compared with it; on CUDA the allocator may not
            reserve more, and the run ends where it needs to.
        plan: of the config's memory budget.
        report: called during the run; an error that it raises ends the run.
    """
    facts: dict[str, Any] = {
        "source": Source.MEASURED,
        "device": str(device),
        "versions": versions_of(device),
        "config": config,
        "run": run,
        "workload_name": workload.name,
        "memory_limit_bytes": memory_limit,
    }
    now: list[StageName] = [StageName.BUILD]
    meter, peaks = Meter(), dict[StageName, cuda.Peaks]()
    said: list[str] = []

    def build() -> Step:
        step = build_step(
            workload, config, device, plan=plan, seed=seed, mark=partial(meter.mark, -1)
        )
        said.extend((*notes(config, device, plan), *step.notes))
        return step

    def begin(name: StageName) -> None:
        _note_peaks(peaks, now[-1], device)
        report(Progress(text=f"{name} of {workload.name}", fraction=len(now) / 10))
        now.append(name)

    try:
        with preserved_random_state(device), cuda.limited_to(memory_limit, device):
            trace = record(partial(_run, build, run, meter, seed, begin), meter, device)
        _note_peaks(peaks, now[-1], device)
    except (Exception, SystemExit) as error:  # an error of a person's model is an outcome
        place = f"the {now[-1]}, {meter.place_of(error)}"
        outcome, message = explain(error, place)
        return RunResult(**facts, outcome=outcome, message=message)
    finally:
        clean_up(config, device)

    stages = _with_peaks(stage_costs(trace, names_of(run), None), peaks)
    said += notes_of_run(config, run, is_cpu=device.type == "cpu")
    return with_judgement(
        RunResult(
            **facts, outcome=Outcome.OK, message=summary_of(stages), stages=stages,
            notes=tuple(said),
        )
    )  # fmt: skip


def _run(
    build: Callable[[], Step],
    run: TrainingRun,
    meter: Meter,
    seed: int,
    begin: Callable[[StageName], None],
) -> None:
    """Build and run everything; nothing of it remains."""
    step = build()
    meter.know(step.model)
    with tempfile.TemporaryDirectory() as folder:
        course(
            step,
            run,
            meter.mark,
            seed=seed,
            num_new_tokens=run.generate.new_tokens if run.generate else 0,
            num_batches=run.evaluate.num_batches if run.evaluate else 0,
            save=partial(checkpoints.save, step, 1, Path(folder)),
            stepped=lambda: meter.know_states(step.model, states_of(step.model, step.optimizer)),
            begin=begin,
        )
    meter.mark(-1, Phase.TEARDOWN, 0)


def _note_peaks(peaks: dict[StageName, cuda.Peaks], name: StageName, device: torch.device) -> None:
    """Keep the allocator's peaks of a stage that ends, and begin those of the next one."""
    found = cuda.read_peaks(device)
    if found is None:
        return
    if name not in peaks or peaks[name].allocated_bytes < found.allocated_bytes:
        peaks[name] = found
    torch.cuda.reset_peak_memory_stats(device)


def _with_peaks(
    stages: tuple[StageCost, ...], peaks: dict[StageName, cuda.Peaks]
) -> tuple[StageCost, ...]:
    """Return the stages with what the allocator itself says, which is exact."""
    return tuple(
        replace(
            stage,
            peak_allocated_bytes=peaks[StageName(stage.name)].allocated_bytes,
            peak_reserved_bytes=peaks[StageName(stage.name)].reserved_bytes,
        )
        if stage.name in peaks
        else stage
        for stage in stages
    )
