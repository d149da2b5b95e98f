"""A predicted `RunResult` of a person's script, in this process.

As for a run of a workload (`predict_run.py`): kernels of a CPU run once alone, those of a card
follow rules, and one caching allocator serves the whole run. The stages are those that the script
was seen to have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memlab._util.units import format_bytes
from memlab.config import StepConfig
from memlab.cost_model.traced_step import Failure, TracedStep, from_recording
from memlab.devices.cards import Target
from memlab.prediction.predict import versions_of
from memlab.prediction.predict_run import RunRecording, stages_of, with_judgement
from memlab.prediction.run_result import RunResult, StageCost
from memlab.prediction.run_settings import TrainingRun
from memlab.result import Outcome, Source
from memlab.running import Report
from memlab.tracing.assembly import layout_of
from memlab.tracing.person_script import Script, ScriptRecording, record_script
from memlab.tracing.program import Program
from memlab.tracing.script_card import LiveAllocator
from memlab.tracing.tracker import Tracker


def predict_script_in_process(
    script: Script, target: Target, *, memory_limit: int | None, report: Report
) -> RunResult:
    """Return what a script would cost on the target; never raises for the script.

    Args:
        script: how it is run.
        target: a CPU, or a CUDA card that need not be there.
        memory_limit: bytes that its stages are compared with; on a card it finds no more.
        report: called as the prediction goes on; what it raises ends it.
    """
    config = StepConfig()
    name = Path(script.path).name
    facts: dict[str, Any] = {
        "source": Source.PREDICTED,
        "device": target.name,
        "versions": versions_of(config, target),
        "config": None,
        "run": None,
        "workload_name": name,
        "memory_limit_bytes": memory_limit,
    }
    card = target.card

    def record(device: torch.device, _: Tracker) -> ScriptRecording:
        allocator = None if card is None else LiveAllocator(memory_limit or card.usable_bytes)
        return record_script(script, device, card, allocator)

    def make(recorded: ScriptRecording) -> RunResult:
        program = _program(recorded)
        run = RunRecording(program=program, run=TrainingRun(), saving_bytes=0)
        step = TracedStep(
            config=config, target=target, device=torch.device(target.kind), program=program,
            report=report,
        )  # fmt: skip
        kernels = step.kernels(timed=False)
        stages, width, replayed = stages_of(run, recorded.names, kernels, config, target)
        return with_judgement(
            RunResult(
                **facts,
                outcome=Outcome.OK,
                message=_summary(stages, recorded),
                stages=stages,
                uncertainty=width,
                notes=(*recorded.recording.notes, *kernels.notes, *recorded.recording.assumptions),
            ),
            replayed,
        )

    text = f"running {name} over fake tensors"
    made = from_recording(record, make, config, target, report=report, text=text)
    if isinstance(made, Failure):
        return RunResult(**facts, outcome=made.outcome, message=made.message)
    return made


def _program(recorded: ScriptRecording) -> Program:
    recording = recorded.recording
    return Program(
        recording=recording,
        ran=recording.ran(),
        layout=layout_of(recording),
        partners={},
        sizes=(1,),
        other_size=1,
        differs="a script is recorded once",
    )


def _summary(stages: tuple[StageCost, ...], recorded: ScriptRecording) -> str:
    worst = max(stages, key=lambda stage: stage.peak_allocated_bytes)
    return f"peak {format_bytes(worst.peak_allocated_bytes)} allocated in the {worst.name}"
