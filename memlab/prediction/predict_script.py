"""A predicted `RunResult` of a person's script, in this process.

As for a run of a workload (`predict_run.py`): kernels of a CPU run once alone, those of a card
follow rules, and one caching allocator serves the whole run. The stages are those that the script
was seen to have.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memlab.config import StepConfig
from memlab.cost_model.targets import Kernels, seconds_of_intervals
from memlab.cost_model.traced_step import Failure, TracedStep, from_recording
from memlab.devices.cards import Target
from memlab.memory.lifetimes import alike, step_memory
from memlab.prediction.predict import MOST_UNKNOWN, OF_COMPILED, versions_of, width_of_seconds
from memlab.prediction.predict_run import RunRecording, stages_of, summary_of, with_judgement
from memlab.prediction.run_result import LineHolding, RunResult, text_of
from memlab.prediction.run_settings import TrainingRun
from memlab.prediction.run_stages import peaks_of_stages, timeline_of_run
from memlab.prediction.script_faults import Peaks, faults_of
from memlab.result import Outcome, Source
from memlab.running import Report
from memlab.trace import CATEGORIES, STATES, Trace
from memlab.tracing.assembly import layout_of
from memlab.tracing.person_script import Script, ScriptRecording, record_script
from memlab.tracing.program import Program
from memlab.tracing.script_card import LiveAllocator
from memlab.tracing.script_facts import Change, Line
from memlab.tracing.script_stages import (
    CALLS,
    EVALUATION,
    FIRST,
    GENERATION,
    MOST_BATCHES,
    REST,
    STEP,
)
from memlab.tracing.script_step import SeenStep, see_step
from memlab.tracing.trace_step import attention_notes_of_stages
from memlab.tracing.tracker import Tracker

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

AS_PLANNED = (
    "The config that memlab.from_script returns is predicted as torch.compile plans it where "
    "compile=True is set in it."
)
WORKSPACE = "workspaces_of_kernels"  # that a library keeps, or an operator takes while it runs


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
    config = StepConfig(batch_size=1)  # the size of `_program`, so that all stages count
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

    def record(device: torch.device, _: Tracker, *changes: Change) -> ScriptRecording:
        allocator = None if card is None else LiveAllocator(memory_limit or card.usable_bytes)
        return record_script(script, device, card, allocator, changes)

    def traced(recorded: ScriptRecording) -> tuple[RunRecording, TracedStep]:
        run = RunRecording(program=_program(recorded), run=TrainingRun(), saving_bytes=0)
        step = TracedStep(
            config=config, target=target, device=torch.device(target.kind), program=run.program,
            report=report,
        )  # fmt: skip
        return run, step

    def again(change: Change) -> Peaks | None:
        """Return the peaks of the stages of the script with a change; None if it fails."""

        def peaks(recorded: ScriptRecording) -> Peaks | None:
            run, step = traced(recorded)
            found = stages_of(run, recorded.names, step.kernels(timed=False), config, target)
            return {each.name: each.peak_allocated_bytes for each in found.costs}

        said = f"running {name} with a change of line {change.line[1]}"
        tried = from_recording(
            lambda *to: record(*to, change), peaks, config, target, report=report, text=said
        )
        return None if isinstance(tried, Failure) else tried

    def make(recorded: ScriptRecording) -> RunResult:
        run, step = traced(recorded)
        if not recorded.recording.blocks:
            said = f"{name} makes no tensor on {target.name}"
            notes = recorded.recording.notes
            return RunResult(**facts, outcome=Outcome.OK, message=said, notes=notes)
        kernels = step.kernels(judged=_whole_update(recorded))
        in_update = _of_update(recorded, kernels)
        found = stages_of(run, recorded.names, kernels, config, target, in_update)
        is_known = found.compiled.share <= MOST_UNKNOWN
        seconds = _seconds(recorded, kernels, target) if is_known else {}
        with_notes = kernels if seconds else step.kernels(timed=False)
        result = RunResult(
            **facts,
            outcome=Outcome.OUT_OF_MEMORY if recorded.is_out_of_memory else Outcome.OK,
            message=recorded.ended or summary_of(found.costs),
            stages=found.costs,
            uncertainty=found.width,
            **_at_peak(recorded, found.trace, run.program),
            faults=faults_of(recorded, found.trace, recorded.names, again),
            **seconds,
            timeline=timeline_of_run(found.trace, recorded.names),
            notes=(
                *_notes(recorded, script),
                *with_notes.notes,
                *found.compiled.notes,
                *(AS_PLANNED for _ in found.compiled.notes if recorded.updates),
                *(() if is_known else (OF_COMPILED,)),
                *recorded.recording.assumptions,
            ),
        )
        return with_judgement(result, found.replayed)

    text = f"running {name} over fake tensors"
    made = from_recording(record, make, config, target, report=report, text=text, place=name)
    if isinstance(made, Failure):
        return RunResult(**facts, outcome=made.outcome, message=made.message)
    return made


def script_step_in_process(script: Script, target: Target, *, report: Report) -> SeenStep | Failure:
    """Return the training step that a script takes on the target, or why none was seen.

    Args:
        script: how it is run.
        target: a CPU, or a CUDA card that need not be there.
        report: called as the run goes on; what it raises ends it.
    """
    name = Path(script.path).name
    return from_recording(
        lambda device, _: see_step(script, device, target.card), lambda seen: seen,
        StepConfig(), target, report=report, text=f"running {name} over fake tensors", place=name,
    )  # fmt: skip


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


def _at_peak(recorded: ScriptRecording, trace: Trace, program: Program) -> dict[str, Any]:
    """Return what holds the peak of the run, by line and by module, as fields of a result."""
    live = np.cumsum(trace.nbytes)
    peak = max((row for *_, row in peaks_of_stages(trace, recorded.names, live)), key=live.item)
    step = max(trace.intervals[trace.interval[peak]].step, 0)
    blocks, layout = step_memory(trace, step).blocks, program.layout
    found: dict[tuple[Line, str], list[int]] = {}
    modules: Counter[str] = Counter()
    for at in np.flatnonzero((blocks.births <= peak) & (peak < blocks.deaths)).tolist():
        birth = int(blocks.births[at])
        block = int(trace.address[birth])
        if block < layout.num_blocks:
            line, category = recorded.lines[block], str(CATEGORIES[blocks.columns[at]])
        else:
            kernel = layout.kernels[(block - layout.num_blocks) // 2]
            line, category = recorded.operator_lines[kernel], WORKSPACE
        held = found.setdefault((line, category), [0, 0])
        held[0] += 1
        held[1] += int(trace.nbytes[birth])
        kind, path, *_ = alike(trace, CATEGORIES[blocks.columns[at]], birth)
        is_of_parameter = kind in STATES and path not in trace.modules
        module = path.rpartition(".")[0] if is_of_parameter else ""
        modules[module or path] += int(trace.nbytes[birth])
    lines = [
        LineHolding(
            file=file,
            line=number,
            category=category,
            num_blocks=count,
            nbytes=nbytes,
            text=text_of(file, number),
        )
        for ((file, number), category), (count, nbytes) in found.items()
    ]
    lines.sort(key=lambda each: -each.nbytes)
    return {"lines": tuple(lines), "modules": dict(modules.most_common())}


def _whole_update(recorded: ScriptRecording) -> int | None:
    """Return the number of the last whole update; None if there is none."""
    steps = [number for number, name in enumerate(recorded.names) if name in (FIRST, STEP)]
    return steps[min(len(steps), recorded.updates) - 1] if steps else None


def _of_update(recorded: ScriptRecording, kernels: Kernels) -> npt.NDArray[np.float64] | None:
    """Return the seconds of the operators of the last whole update, 0 of all others."""
    whole, intervals = _whole_update(recorded), recorded.recording.intervals
    if kernels.seconds is None or whole is None:
        return None
    is_in = [intervals[each.interval].step == whole for each in recorded.recording.operators]
    return np.where(is_in, kernels.seconds, 0.0)


def _seconds(recorded: ScriptRecording, kernels: Kernels, target: Target) -> dict[str, Any]:
    """Return the time of the last whole update, as fields of a result."""
    seconds, whole = seconds_of_intervals(recorded.recording, kernels), _whole_update(recorded)
    if seconds is None or whole is None or kernels.unknown_share > MOST_UNKNOWN:
        return {}
    taken = sum(
        float(seconds[at])
        for at, interval in enumerate(recorded.recording.intervals)
        if interval.step == whole
    )
    width = width_of_seconds(kernels, is_cpu=target.kind == "cpu")
    return {"step_seconds": taken or None, "seconds_uncertainty": width}


def _notes(recorded: ScriptRecording, script: Script) -> tuple[str, ...]:
    """Return what is said of the run itself."""
    found = []
    ended = {
        STEP: f"training after {recorded.updates} updates",
        EVALUATION: f"an evaluation that holds no more with each batch after {MOST_BATCHES}",
        GENERATION: f"a generation that holds no more with each batch after {MOST_BATCHES}",
    }
    if early := [said for kind, said in ended.items() if kind in recorded.cut]:
        found.append(
            f"Loops were ended early: {', '.join(early)}. What the script would do later, and "
            "differently, is not in these numbers."
        )
    if CALLS in recorded.cut:
        found.append(
            f"Of the calls of a model without gradients those after {MOST_BATCHES} of the same "
            "shapes were not run: what they return was made again."
        )
    if REST in recorded.cut:
        found.append(
            "The run ended with its training: what the script does only after it, such as a last "
            "evaluation, was not seen. With --steps N (steps=N in Python), N above the number of "
            "its updates, it goes on to its own end."
        )
    if not recorded.updates:
        found.append(
            "No update of weights was seen: the script does not train, or not by gradients that "
            "autograd gives to its weights."
        )
    if script.ranks:
        found.append(
            f"It ran as the first of {script.ranks} ranks, whose collectives moved nothing: ranks "
            "that hold something else are not in these numbers."
        )
    attention = attention_notes_of_stages(recorded.recording, recorded.names)
    return (*found, *attention, *recorded.recording.notes)
