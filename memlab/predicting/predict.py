"""A predicted `StepResult`: the very step of `build_step`, over fake tensors, in this process.

Operators are recorded, not run. On a CPU each distinct operator is then run once alone on real
memory, to learn what its kernel allocates and how long it takes; the model never is. For a CUDA
card the kernels' own memory follows rules read in PyTorch's source, reserved memory a replay of the
caching allocator, and time the card's datasheet. Left out: compiled steps.
"""

from __future__ import annotations

import dataclasses
import platform
import traceback
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from memlab._version import __version__
from memlab.allocator.replay import AllocatorSettings
from memlab.arguments.units import format_bytes, format_seconds
from memlab.config import Precision, StepConfig
from memlab.costs.targets import Kernels, kernels_of, recording_for, seconds_of_intervals
from memlab.devices.cards import Target
from memlab.devices.generators import preserved_random_state
from memlab.devices.here import describe
from memlab.errors import UnsupportedError
from memlab.meters.lifetimes import step_memory
from memlab.plan import Plan
from memlab.predicting.forecast import Forecast, forecast_of
from memlab.predicting.held_against import Attempt, Measured, held_against
from memlab.recording import stand_in
from memlab.recording.assembly import sizes_of
from memlab.recording.fake_workload import over_fakes
from memlab.recording.program import MOST_RECORDED, Program, program_of
from memlab.recording.recording import Recording
from memlab.recording.tracker import Tracker, record_fake
from memlab.result import Outcome, Source, StepResult, format_percent
from memlab.running import Progress, Report, explain
from memlab.step import build_step, notes, set_seed
from memlab.techniques import every
from memlab.techniques.batches import tensors_of
from memlab.techniques.compiling.compilation import is_compiled
from memlab.techniques.offload import offload
from memlab.torch_private.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from memlab.trace import Phase
from memlab.workload import Workload

# relative half-widths: on a CPU above the 95th percentiles that benchmarks/accuracy.py finds, on
# CUDA above those of benchmarks/gpu_peaks.py; time on a card and allocated bytes on one are not
# held against anything yet
CPU_MEMORY, CPU_TIME = 0.01, 0.25
CUDA_MEMORY, CUDA_RESERVED, CUDA_TIME = 0.02, 0.05, 0.5
OF_JAGGED = "create_symbolic_nested_int"  # in torch: makes the size that differs by sample
ASSUMED = 0.1  # more where the run depends on a value that had to be assumed
ASSUMED_SPREAD = 0.25  # more where that value decides how work is spread over parts of the model
ASSUMED_BRANCH = 1.0  # more where that value decides what is run
NOISY_TIME = 0.7  # more where all operators were timed on a busy machine: the half, or a tenth
MOST_UNKNOWN = 0.1  # of a step's work without a known time, for the step to have one


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """What a prediction found: its result, and the arithmetic that gives other batch sizes.

    `forecast` is None where there is none: the outcome is not ok.
    """

    result: StepResult
    forecast: Forecast | None


def predict_in_process(
    workload: Workload,
    config: StepConfig,
    target: Target,
    *,
    seed: int,
    memory_limit: int | None,
    plan: Plan | None = None,
    measured: Measured = (None, None),
    report: Report,
) -> Prediction:
    """Return what the step would cost on the target; never raises for the step.

    Args:
        workload: what is trained.
        config: how.
        target: a CPU, or a CUDA card that need not be there.
        seed: set before the model, the batch and each step.
        memory_limit: bytes that the counted peak of the result is compared with.
        plan: of the config's memory budget.
        measured: what is known of a measured run of this very step.
        report: called as the prediction goes on; what it raises ends it.
    """
    facts: dict[str, Any] = {
        "source": Source.PREDICTED,
        "device": target.name,
        "versions": _versions(target),
        "config": config,
        "workload_name": workload.name,
        "memory_limit_bytes": memory_limit,
    }
    tracker = None
    try:
        check_target(config, target)
        stand_in.device()  # autograd counts the devices at the first backward of a process
        with recording_for(target) as device, preserved_random_state(torch.device("cpu")):
            tracker = Tracker(device.type)
            report(Progress(text=f"recording {workload.name} on fake tensors", fraction=0.1))
            program = recorded(workload, config, device, seed, tracker, plan)
        text = "running new operators alone"

        def attempt(doubted_before: float | None) -> Attempt:
            kernels = kernels_of(
                program,
                config.micro_batch_sizes,
                target,
                lambda share: report(Progress(text=text, fraction=share)),
                tf32_matmul=config.precision is Precision.TF32,
                doubted_before=doubted_before,
            )
            forecast = _forecast(program, kernels, config, target)
            found = _facts(forecast, config, target, kernels)
            return Attempt(
                kernels=kernels,
                forecast=forecast,
                facts=found,
                noise=NOISY_TIME * kernels.noisy_share,
                is_whole=kernels.unknown_share <= MOST_UNKNOWN,
            )

        made = held_against(measured, attempt)
        kernels, forecast = made.kernels, made.forecast
        facts |= made.facts
        if kernels.unknown_share > MOST_UNKNOWN:
            facts |= _without_time(facts, kernels.unknown_share)
            forecast = replace(forecast, seconds=None)
        held = offload.notes(config, program.recording.host_bytes)
        facts["parameter_formats"] = program.recording.parameter_formats
        of_step = (*notes(config, device, plan), *program.recording.notes)
        of_step += _format_notes(program.recording, target)
        facts["notes"] = (*of_step, *held, *facts["notes"])
    except (Exception, SystemExit) as error:  # what a person's model raises is an outcome
        place = "building the step" if tracker is None else tracker.place()
        outcome, message = explain(_in_other_words(error, place), place)
        if outcome is Outcome.OUT_OF_MEMORY:  # of this machine, which says nothing of the step
            outcome = Outcome.UNSUPPORTED
            message = f"the prediction itself needs more memory than there is: {message}"
        if tracker is not None:
            facts["parameter_formats"] = tracker.recording.parameter_formats
        result = StepResult(**{**facts, "outcome": outcome, "message": message})
        return Prediction(result=result, forecast=None)
    result = StepResult(**facts, outcome=Outcome.OK, message=_summary(facts, target))
    return Prediction(result=forecast.against_limit(result, memory_limit), forecast=forecast)


def _in_other_words(error: BaseException, place: object) -> BaseException:
    """Return an error that only a fake tensor can raise as what it means."""
    text = str(error).splitlines()[0] if str(error) else ""
    is_numpy = "not supported for tensor subclasses" in text
    if is_numpy or isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return UnsupportedError(
            f"{place}: the model reads values of a tensor ({text}), which a prediction does not "
            "have; read them in make_batch, or use memlab.measure"
        )
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if OF_JAGGED in frames:
        return UnsupportedError(
            f"{place}: the model makes a nested tensor of jagged layout, whose sizes differ from "
            "sample to sample, which a prediction does not follow; pad the samples to one length, "
            "or use memlab.measure"
        )
    return error


def check_target(config: StepConfig, target: Target) -> None:
    """Raise UnsupportedError for what cannot be predicted, or what the card cannot do."""
    # before any recording, which must not import what the check of an optimizer does
    every.check(config, torch.device(target.kind), target.card)
    if is_compiled(config):
        raise UnsupportedError(
            "predict knows eager steps only: what a compiled step keeps is decided while it "
            "compiles; use memlab.measure, or compile=False and budget_engine='eager'"
        )
    if config.precision is Precision.FP8_MIXED:
        raise UnsupportedError(
            "precision='fp8-mixed' cannot be predicted: what torchao's fp8 layers hold is not "
            "known before they run; use memlab.measure on such a card, or precision='bf16-mixed'"
        )


def _format_notes(recording: Recording, target: Target) -> tuple[str, ...]:
    """Return a note on weights in a format that the card has no arithmetic for."""
    card = target.card
    is_bf16 = "bfloat16" in recording.parameter_formats
    if card is None or not card.compute_capability or card.has_bf16 or not is_bf16:
        return ()
    return (f"{card.title} has no bfloat16 arithmetic: it computes with bf16 weights in fp32.",)


def _forecast(program: Program, kernels: Kernels, config: StepConfig, target: Target) -> Forecast:
    own = sizes_of(program.recording, program.layout, kernels.effects)
    seconds = seconds_of_intervals(program.recording, kernels)
    light = program.without_signatures()
    has_cache = target.kind == "cuda"
    settings = AllocatorSettings(expandable_segments=config.expandable_segments)
    return forecast_of(light, own, seconds, settings=settings if has_cache else None)


def _facts(
    forecast: Forecast, config: StepConfig, target: Target, kernels: Kernels
) -> dict[str, Any]:
    sizes = config.micro_batch_sizes
    trace, reserved = forecast.trace(sizes)
    memory = step_memory(trace, 1)
    allocated = memory.peak_bytes
    seconds = forecast.step_seconds(sizes)
    recording = forecast.program.recording
    return {
        "timeline": memory.timeline,
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "peak_by_category": memory.timeline.peak_by_category,
        "peak_place": memory.peak_place,
        "peak_holdings": memory.holdings(),
        "first_step_peak_bytes": step_memory(trace, 0).peak_bytes,
        "step_seconds": seconds,
        "samples_per_second": config.batch_size / seconds if seconds else None,
        "uncertainty": _uncertainty(allocated, kernels, recording, target),
        "notes": (*kernels.notes, *recording.assumptions),
    }


def _without_time(facts: dict[str, Any], unknown: float) -> dict[str, Any]:
    """Return the facts of a step of whose work too much has no known time: a bound, no number."""
    rest = format_seconds(facts["step_seconds"])
    note = (
        f"{format_percent(unknown)} of the work of the operators has no known time, so the step "
        f"has none: it takes longer than {rest}, which is the rest."
    )
    without = {name: width for name, width in facts["uncertainty"].items() if "second" not in name}
    return {
        "step_seconds": None,
        "samples_per_second": None,
        "uncertainty": without,
        "notes": (*facts["notes"], note),
    }


def _uncertainty(
    allocated: int, kernels: Kernels, recording: Recording, target: Target
) -> dict[str, float]:
    """Return the relative half-widths of the predicted numbers."""
    unsure = kernels.unsure_bytes / allocated
    if recording.assumptions:
        spread = ASSUMED_SPREAD if recording.spread else ASSUMED
        unsure += ASSUMED_BRANCH if recording.branched else spread
    if target.kind == "cpu":
        missing = min(kernels.unknown_share, MOST_UNKNOWN)
        seconds = CPU_TIME + missing / (1.0 - missing) + NOISY_TIME * kernels.noisy_share
        return {"peak_allocated_bytes": CPU_MEMORY + unsure, "step_seconds": seconds}
    return {
        "peak_allocated_bytes": CUDA_MEMORY + unsure,
        "peak_reserved_bytes": CUDA_RESERVED + unsure,
        "step_seconds": CUDA_TIME,
    }


def _summary(facts: dict[str, Any], target: Target) -> str:
    unsure = facts["uncertainty"]["peak_allocated_bytes"]
    text = (
        f"predicted peak {format_bytes(facts['peak_allocated_bytes'])} allocated "
        f"(± {unsure:.1%}) in {facts['peak_place']}"
    )
    if facts["step_seconds"] is not None:
        text += f", about {format_seconds(facts['step_seconds'])} a step"
    return text


def _versions(target: Target) -> dict[str, str]:
    found = {
        "memlab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if target.kind == "cpu":
        threads = str(torch.get_num_threads())
        return found | {"device_name": describe(torch.device("cpu")), "threads": threads}
    return found | ({"device_name": target.card.title} if target.card else {})


def recorded(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    seed: int,
    tracker: Tracker,
    plan: Plan | None = None,
) -> Program:
    """Return the program of a step: recorded over this config's micro-batches and others.

    This very config is recorded alone where single samples stand beside larger micro-batches, where
    the two sizes run other operators, and where the model keeps something of the first batch: a
    hidden state, a cache, its last outputs.
    """
    sizes = config.micro_batch_sizes
    size, least = sizes[0], sizes[-1]
    other = least if least < size else max(2, size // 2) if size > 2 else {1: 1, 2: 3}[size]
    record = partial(_recorded, workload, device=device, seed=seed, plan=plan)
    if other == 1 < size:
        return record(config, tracker=tracker, first=config)
    count = min(len(sizes), MOST_RECORDED)
    this = dataclasses.replace(config, batch_size=size * count, accumulation_steps=count)
    that = dataclasses.replace(this, batch_size=other * count)
    is_whole = other == size and count == len(sizes)

    def alone() -> Program:
        another = Tracker(tracker.device_type)
        another.blocks.adopt(tracker.blocks.left())
        return record(config, tracker=another, first=config)

    try:
        program = record(this, tracker=tracker, first=that)
    except Exception as error:  # of any kind: a state of another batch fails in many ways
        if is_whole:
            raise
        try:
            return alone()
        except Exception:
            raise error from None  # the tracker knows the place of this one
    if not is_whole and (program.differs or _keeps_of_batch(program.recording)):
        return alone()
    return program


def _keeps_of_batch(recording: Recording) -> bool:
    """Return whether what outlives a step is as large as its batch: another for each size."""
    kept: list[list[int]] = [[], []]
    for event in recording.events:
        born = recording.intervals[
            recording.operators[recording.blocks[event.block].operator].interval
        ]
        died = recording.intervals[event.interval].step
        computed = born.phase in (Phase.FORWARD, Phase.BACKWARD)
        if not event.is_birth and computed and born.step >= 0 and died != born.step:
            kept[born.step].append(recording.blocks[event.block].nbytes)
    return sorted(kept[0]) != sorted(kept[1])


def _recorded(
    workload: Workload,
    config: StepConfig,
    *,
    device: torch.device,
    seed: int,
    plan: Plan | None,
    tracker: Tracker,
    first: StepConfig,
) -> Program:
    """Return the program of a run whose first step is over another batch than its second."""

    def run(mode: FakeTensorMode) -> None:
        fake = over_fakes(workload, mode, tracker)
        mark = partial(tracker.mark, -1)
        step = build_step(fake, first, device, plan=plan, seed=seed, mark=mark)
        tracker.know(step.model)
        tracker.recording.parameter_formats = step.parameter_formats
        tracker.recording.notes += step.notes
        if step.scaler is not None:  # it makes its scale at the first call: no part of any step
            tracker.mark(-1, Phase.BUILD, 0)
            step.scaler.scale(torch.zeros((), device=device))
        with tracker.modules(step.model):
            set_seed(seed)
            step(partial(tracker.mark, 0))
            tracker.know_states(step.model, step.optimizer)
            if tracker.recording.is_scripted:
                set_seed(seed)
                step(lambda phase, micro_batch: tracker.mark(-1, Phase.BUILD, 0))
            before = step.micro_batches
            step.take_batch(config, seed=seed, mark=partial(tracker.mark, -1))
            tracker.mark(-1, Phase.BUILD, 0)
            _leave_gradients(before, step.micro_batches)
            del before
            set_seed(seed)
            step(partial(tracker.mark, 1))
            tracker.recording.host_bytes = step.host_bytes
        tracker.mark(-1, Phase.TEARDOWN, 0)

    recording = record_fake(run, tracker)
    return program_of(recording, config.micro_batch_sizes, first.micro_batch_sizes[0])


def _leave_gradients(before: list[Any], after: list[Any]) -> None:
    """Give the second step's batch the gradients that the first step has left with its own.

    A batch that a model has asked gradients of, for a penalty on them, keeps them from step to
    step where the step works on the batch itself: for real it is the same one.
    """
    for old, new in zip(tensors_of(before), tensors_of(after), strict=False):
        if old.is_leaf and old.grad is not None:
            new.requires_grad_()
            new.grad = torch.empty_like(new)
