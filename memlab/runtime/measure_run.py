"""A measured `RunResult`: the stages of a run on a device of this machine, under one meter.

The whole run is one recording of every allocation (`memory/meter.py`). On a card the peaks are the
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

from memlab.devices.generators import preserved_random_state
from memlab.memory import cuda
from memlab.memory.meter import Meter, record
from memlab.prediction.predict_run import summary_of, with_judgement
from memlab.prediction.run_result import RunResult, StageCost
from memlab.prediction.run_spec import RunSpec
from memlab.prediction.run_stages import StageName, names_of, run_all_stages, stage_costs
from memlab.result import Outcome, Source
from memlab.running import Progress, Report, explain
from memlab.runtime.measure import clean_up, versions_of
from memlab.techniques import checkpoints
from memlab.techniques.optimizers.optimizers import states_of
from memlab.techniques.step import Step
from memlab.trace import Phase


def measure_run_in_process(spec: RunSpec, device: torch.device, *, report: Report) -> RunResult:
    """Measure what a run costs on this device. Errors of the run are outcomes, not raised.

    Args:
        spec: the run.
        device: of this machine.
        report: called during the run; an error that it raises ends the run.
    """
    facts: dict[str, Any] = {
        "source": Source.MEASURED,
        "device": str(device),
        "versions": versions_of(device),
    }
    now: list[StageName] = [StageName.BUILD]
    meter, peaks = Meter(), dict[StageName, cuda.Peaks]()
    said: list[str] = []

    def build() -> Step:
        step = spec.build(device, partial(meter.mark, -1))
        said.extend(step.notes)
        return step

    def begin(name: StageName) -> None:
        _note_peaks(peaks, now[-1], device)
        report(Progress(text=f"{name} of {spec.workload.name}", fraction=len(now) / 10))
        now.append(name)

    try:
        with preserved_random_state(device), cuda.limited_to(spec.memory_limit, device):
            trace = record(partial(_run, build, spec, meter, begin), meter, device)
        _note_peaks(peaks, now[-1], device)
    except (Exception, SystemExit) as error:  # an error of a person's model is an outcome
        place = f"the {now[-1]}, {meter.place_of(error)}"
        outcome, message = explain(error, place)
        return spec.result(outcome, message, **facts)
    finally:
        clean_up(spec.config, device)

    stages = _with_peaks(stage_costs(trace, names_of(spec.run), None), peaks)
    notes = (*spec.notes(device), *said)
    return with_judgement(
        spec.result(Outcome.OK, summary_of(stages), **facts, stages=stages, notes=notes)
    )


def _run(
    build: Callable[[], Step],
    spec: RunSpec,
    meter: Meter,
    begin: Callable[[StageName], None],
) -> None:
    """Build and run everything; nothing of it remains."""
    step, run = build(), spec.run
    meter.know(step.with_loss)
    with tempfile.TemporaryDirectory() as folder:
        run_all_stages(
            step,
            run,
            meter.mark,
            seed=spec.seed,
            num_new_tokens=run.generate.new_tokens if run.generate else 0,
            num_batches=run.evaluate.num_batches if run.evaluate else 0,
            save=partial(checkpoints.save, step, 1, Path(folder)),
            stepped=lambda: meter.know_states(
                step.with_loss, states_of(step.with_loss, step.optimizer)
            ),
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
