"""A predicted `StepResult`: the very step of `build_step`, over fake tensors, in this process.

Operators are recorded, not run. On a CPU each distinct operator is then run once alone on real
memory, to learn what its kernel allocates and how long it takes; the model never is. For a CUDA
card the kernels' own memory follows rules read in PyTorch's source, reserved memory a replay of the
caching allocator, and time the card's datasheet. Left out: the time of compiled steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from memlab._util.units import format_bytes, format_seconds
from memlab.config import Sharding, StepConfig
from memlab.cost_model.cuda_kernels import Workspaces, middle, take_workspace, with_workspaces
from memlab.cost_model.targets import OF_ITS_TIME, Kernels, seconds_of_intervals
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import Card, Target
from memlab.devices.here import describe, versions_here
from memlab.memory.lifetimes import build_peak_bytes, growth_notes, step_memory
from memlab.memory.replay import AllocatorSettings
from memlab.prediction.batch_size_model import BatchSizeModel, Replayed, replayed, size_model_of
from memlab.prediction.check_against_runs import Attempt, Measured, check_against_runs
from memlab.prediction.error_bounds import (
    Compiled,
    compiled_part,
    planned_part,
    weights,
    width_of_needed,
)
from memlab.prediction.evidence import CONVOLUTIONS, QUANTIZED, SHARDED, width_of
from memlab.result import Outcome, Source, StepResult, format_percent
from memlab.running import Report
from memlab.techniques.checkpoint_contents import added_by_saving
from memlab.techniques.compilation import is_compiled
from memlab.techniques.meta_init import peak_notes
from memlab.techniques.offload import offload
from memlab.techniques.step import notes
from memlab.techniques.technique import Plan
from memlab.trace import Timeline, Trace
from memlab.tracing.assembly import sizes_of
from memlab.tracing.program import Program
from memlab.tracing.recording import OpTrace
from memlab.tracing.triton_launches import SHORT
from memlab.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt  # it costs 5 ms at import

# What a prediction says about the Triton kernels of a step, whose launches are left out.

COUNTED = "torch.nn.attention.flex_attention"  # what its kernels allocate is known


def without_time(launches: Mapping[str, int]) -> dict[str, int]:
    """Return the kernels whose time may be a large part of the step's, and is not known.

    >>> without_time({"trl.kernels.chunked_logprob._forward_kernel": 4, "mine.flash": 2})
    {'mine.flash': 2}
    """
    return {name: n for name, n in launches.items() if name.rpartition(".")[0] not in SHORT}


def notes_of(launches: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note on kernels that are assumed to allocate nothing.

    >>> notes_of({"torch.nn.attention.flex_attention.flex_attention": 2})
    ()
    """
    launches = {name: n for name, n in launches.items() if not name.startswith(COUNTED)}
    if not launches:
        return ()
    return (
        f"The step launches Triton kernels ({_in_words(launches)}): they are assumed to allocate "
        "nothing, and their time is left out.",
    )


def bound(launches: Mapping[str, int], rest: float | None) -> str:
    """Return why a step with such kernels has no time.

    Args:
        launches: of the kernels without a time.
        rest: seconds that the operators take.
    """
    longer = "" if rest is None else f": it takes longer than {format_seconds(rest)}, the rest"
    return (
        f"The time of Triton kernels ({_in_words(launches)}) is not known, so the step has "
        f"none{longer}."
    )


def _in_words(launches: Mapping[str, int]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]}: {count}" for name, count in launches.items())


# What a step on a card takes where there is room: the middle of several replays.
#
# cuDNN does not say what its convolutions take (`cost_model/cuda_kernels.py`). So the caching
# allocator is replayed with each hypothesis about it, and the one in the middle is what a
# person is shown. What the step *needs* is the replay without any of these workspaces.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReservedEstimate:
    """The bytes of every block of a program, (blocks,), int64.

    Attributes:
        own: with the workspaces of the hypothesis in the middle.
        least: without workspaces of convolutions.
        has_workspaces: whether it matters for the peak what convolutions take.
        own_run: the recorded run with `own`.
        least_run: the same with `least`.
    """

    own: npt.NDArray[np.int64]
    least: npt.NDArray[np.int64]
    has_workspaces: bool
    own_run: Replayed
    least_run: Replayed


def taken(
    program: Program,
    kernels: Kernels,
    card: Card | None,
    sizes: tuple[int, ...],
    settings: AllocatorSettings,
) -> ReservedEstimate:
    """Return what a recorded run takes on a card, and the least that it needs.

    Args:
        program: of the run.
        kernels: without workspaces of convolutions.
        card: None for a card of unknown architecture.
        sizes: of the micro-batches.
        settings: of the caching allocator.
    """
    owns = possible_sizes(program, kernels, card)
    least = owns[Workspaces.NONE]
    least_run = replayed(program.trace(least, sizes), settings)
    nothing = ReservedEstimate(
        own=least, least=least, has_workspaces=False, own_run=least_run, least_run=least_run
    )
    if len(owns) == 1:
        return nothing

    runs = {Workspaces.NONE: least_run}
    for hypothesis, own in owns.items():
        if hypothesis is not Workspaces.NONE:
            runs[hypothesis] = replayed(program.trace(own, sizes), settings)

    reserved = {hypothesis: run.reserved_bytes for hypothesis, run in runs.items()}
    allocated = {int(run.given.nbytes.cumsum().max()) for run in runs.values()}
    if len(allocated) == len(set(reserved.values())) == 1:  # such as one patch embedding
        return nothing

    chosen = in_the_middle(reserved)
    return ReservedEstimate(
        own=owns[chosen],
        least=least,
        has_workspaces=True,
        own_run=runs[chosen],
        least_run=least_run,
    )


def possible_sizes(
    program: Program, kernels: Kernels, card: Card | None
) -> dict[Workspaces, npt.NDArray[np.int64]]:
    """Return the bytes of every block by each hypothesis; by one alone where all say the same."""
    recording = program.recording
    found = {Workspaces.NONE: sizes_of(recording, program.layout, kernels.effects)}
    if take_workspace(recording.operators, card):
        for hypothesis in Workspaces:
            if hypothesis is not Workspaces.NONE:
                effects = with_workspaces(kernels.effects, recording.operators, card, hypothesis)
                found[hypothesis] = sizes_of(recording, program.layout, effects)
    return found


def in_the_middle(reserved: Mapping[Workspaces, int]) -> Workspaces:
    """Return the hypothesis whose peak of reserved bytes is the weighted median."""
    return middle(reserved, weights())


# One result of those of ranks that hold different things.


def with_ranks(worst: StepResult, results: Sequence[StepResult]) -> StepResult:
    """Return the result of the rank with the highest peak, with all of them in its `ranks`.

    Args:
        worst: of `results`.
        results: of different ranks of one step, each with its `rank_numbers`.
    """
    ordered = sorted(results, key=lambda result: result.rank_numbers)
    notes = (*spread_notes(worst, results), *worst.notes)
    return replace(worst, notes=notes, ranks=tuple(ordered), rank_numbers=())


def spread_notes(worst: StepResult, results: Sequence[StepResult]) -> tuple[str, ...]:
    """Return a note on whose numbers these are, and how far the peaks of ranks lie apart."""
    if len(results) < 2:
        return ()
    known, every = sum(len(r.rank_numbers) for r in results), worst.config.world_size
    ranks = f"{known} ranks" if known == every else f"{known} of {every} ranks"
    highest, lowest = peak_of(worst), min(map(peak_of, results))
    number = worst.rank_numbers[0]
    if highest == lowest:
        return (f"These are the numbers of rank {number}; {ranks} have the same peak.",)
    return (
        f"These are the numbers of rank {number}, which has the highest peak of {ranks}; the "
        f"lowest is {format_bytes(lowest)}.",
    )


def peak_of(result: StepResult) -> int:
    """Return the peak that counts against a limit."""
    counted = result.counted_peak
    return 0 if counted is None else counted.nbytes


# relative half-widths: on a CPU above the 95th percentiles that benchmarks/accuracy.py finds
CPU_MEMORY, CPU_TIME = 0.01, 0.25
TIMED = ("step_seconds", "watts")
OF_QUANTIZED = ("bitsandbytes::", "torchao::")  # whose operators compute with quantized weights
OF_SHARDED = (
    "Of several cards few runs are known, so the uncertainty covers the largest error of them."
)
ASSUMED = 0.1  # more where the run depends on a value that had to be assumed
ASSUMED_SPREAD = 0.25  # more where that value decides how work is spread over parts of the model
ASSUMED_BRANCH = 1.0  # more where that value decides what is run
NOISY_TIME = 0.7  # more where all operators were timed on a busy machine: the half, or a tenth
MOST_UNKNOWN = 0.1  # of a step's work without a known time, for the step to have one
ON_HOST = (
    "The processor of the host updates the offloaded parameters, and its time is not known, so the "
    "step has none."
)
OF_COMPILED = "The time of compiled code is not known, so the step has none."
CUDA_13_FROM = (7, 5)  # the compute capability where builds other than for CUDA 12.6 begin:
# "PyTorch CUDA Support Matrix" in PyTorch's RELEASE.md, 2.11 to 2.14


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """What a prediction found: its result, and the arithmetic that gives other batch sizes.

    `size_model` is None where there is none: the outcome is not ok.
    """

    result: StepResult
    size_model: BatchSizeModel | None


def predict_in_process(
    workload: Workload,
    config: StepConfig,
    target: Target,
    *,
    seed: int,
    memory_limit: int | None,
    plan: Plan | None = None,
    every_rank: bool = True,
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
        every_rank: whether ranks that hold less than the one that holds most are predicted too.
        measured: what is known of a measured run of this very step.
        report: called as the prediction goes on; what it raises ends it.
    """
    asked: dict[str, Any] = {
        "source": Source.PREDICTED,
        "device": target.name,
        "versions": versions_of(config, target),
        "config": config,
        "workload_name": workload.name,
        "own_optimizer": workload.make_optimizer is not None,
        "memory_limit_bytes": memory_limit,
        "usable_memory_bytes": target.card and target.card.usable_bytes,
    }
    made = from_traced_step(
        lambda step: _predicted_ranks(step, plan, measured),
        workload,
        config,
        target,
        seed=seed,
        plan=plan,
        every_rank=every_rank,
        compiles=True,
        report=report,
        purpose="on fake tensors",
    )
    if isinstance(made, Failure):
        result = StepResult(
            **asked,
            outcome=made.outcome,
            message=made.message,
            parameter_formats=made.parameter_formats,
        )
        return Prediction(result=result, size_model=None)
    of_ranks = []
    for facts, size_model in made:
        result = StepResult(**asked, **facts, outcome=Outcome.OK)
        judged = size_model.against_limit(result, memory_limit)
        of_ranks.append(Prediction(result=judged, size_model=size_model))
    if config.sharding is Sharding.NONE:
        return of_ranks[0]
    worst = max(of_ranks, key=lambda each: peak_of(each.result))
    return replace(worst, result=with_ranks(worst.result, [each.result for each in of_ranks]))


def _predicted_ranks(
    step: TracedStep, plan: Plan | None, measured: Measured
) -> list[tuple[dict[str, Any], BatchSizeModel]]:
    """Return what a recorded step costs, of several ranks what it costs each that differs."""
    programs = [step.program, *step.program.other_ranks]
    return [_predicted(replace(step, program=each), plan, measured) for each in programs]


def _predicted(
    step: TracedStep, plan: Plan | None, measured: Measured
) -> tuple[dict[str, Any], BatchSizeModel]:
    """Return what a recorded step costs, as facts of a result, and its size model."""
    config, target, recording = step.config, step.target, step.program.recording
    timed = not is_compiled(config)

    def attempt(remeasure_before: float | None) -> Attempt:
        kernels = step.kernels(remeasure_before=remeasure_before, timed=timed)
        held = _taken(step.program, kernels, config, target)
        size_model = _size_model(step.program, kernels, held)
        if is_compiled(config) and target.kind != "cpu":
            compiled = planned_part(recording.padded_bytes)
        else:
            compiled = compiled_part(step.program, config, size_model.own, kernels.seconds)
        return Attempt(
            kernels=kernels,
            size_model=size_model,
            facts=_facts(size_model, config, kernels, held, compiled),
            noise=NOISY_TIME * kernels.noisy_share,
            is_whole=max(kernels.unknown_share, compiled.share) <= MOST_UNKNOWN,
        )

    made = check_against_runs(measured, attempt)
    facts, size_model = made.facts, made.size_model
    is_connected = made.kernels.is_connected or config.world_size == 1
    facts = facts | {
        "communication": step.program.communication(config.micro_batch_sizes),
        "rank_numbers": step.program.ranks,
        **_saving(step, facts["timeline"]),
    }
    if config.offloads_shards:
        facts = facts | _with_bound(facts, ON_HOST)
        size_model = replace(size_model, seconds=None)
    elif config.sharding is not Sharding.NONE and not is_connected:
        facts = facts | _without_communication(facts, target)
        size_model = replace(size_model, seconds=None)
    elif is_compiled(config) or (recording.compiled and not made.is_whole):
        facts = facts | _with_bound(facts, OF_COMPILED)
        size_model = replace(size_model, seconds=None)
    elif not made.is_whole:
        facts = facts | _without_time(facts, made.kernels.unknown_share)
        size_model = replace(size_model, seconds=None)
    elif kernels_without_time := without_time(recording.launches):
        facts = facts | _with_bound(facts, bound(kernels_without_time, facts["step_seconds"]))
        size_model = replace(size_model, seconds=None)

    of_step = (
        *notes(config, step.device, plan),
        *notes_of_recording(recording, target),
        *_rank_notes(config, target),
        *offload.notes(config, recording.host_memory, facts["timeline"]),
    )
    facts = facts | {
        "parameter_formats": recording.parameter_formats,
        **offload.facts(config, recording.host_memory),
        "notes": (*of_step, *facts["notes"]),
        "message": _summary(facts),
    }
    return facts, size_model


def _saving(step: TracedStep, timeline: Timeline) -> dict[str, int | None]:
    """Return what a checkpoint after the step takes while it is saved."""
    saved, is_cpu = step.program.recording.saved, step.target.kind == "cpu"
    if saved is None:
        return {}
    is_first = 0 in step.program.ranks
    added = added_by_saving(saved, step.config, is_first=is_first, is_cpu=is_cpu)
    held = int(timeline.total_bytes[-1])  # between two updates
    return {
        "saving_peak_bytes": held + added.device_bytes, "saving_host_bytes": added.host_bytes,
    }  # fmt: skip


def notes_of_recording(recording: OpTrace, target: Target) -> tuple[str, ...]:
    """Return what a recording says of the kernels that run, and of a card without some of them."""
    return (
        *recording.notes,
        *notes_of(recording.launches),
        *_format_notes(recording, target),
        *_wheel_notes(target),
    )


def _format_notes(recording: OpTrace, target: Target) -> tuple[str, ...]:
    """Return a note on weights in a format that the card has no arithmetic for."""
    card = target.card
    is_bf16 = "bfloat16" in recording.parameter_formats
    if card is None or not card.compute_capability or card.has_bf16 or not is_bf16:
        return ()
    return (f"{card.title} has no bfloat16 arithmetic: it computes with bf16 weights in fp32.",)


def _wheel_notes(target: Target) -> tuple[str, ...]:
    """Return a note on cards that most builds of PyTorch have no kernels for."""
    capability = target.card and target.card.compute_capability
    if not capability or capability >= CUDA_13_FROM:
        return ()
    assert target.card is not None
    return (
        f"{target.card.title} has compute capability {capability[0]}.{capability[1]}: PyTorch 2.11 "
        "to 2.14 runs on it only as built with CUDA 12.6, since its other builds begin at 7.5.",
    )


def _rank_notes(config: StepConfig, target: Target) -> tuple[str, ...]:
    """Return a note on what the ranks' cards hold that is not PyTorch's."""
    if config.sharding is Sharding.NONE or target.kind == "cpu":
        return ()
    return (
        "NCCL takes memory for its communicators outside of PyTorch's allocator (NCCL_BUFFSIZE: 4 "
        "MiB for each channel and peer), which is not counted.",
    )


def _taken(
    program: Program, kernels: Kernels, config: StepConfig, target: Target
) -> ReservedEstimate | None:
    """Return what the step takes on a card; None on a CPU."""
    if target.kind == "cpu":
        return None
    settings = AllocatorSettings(expandable_segments=config.expandable_segments)
    return taken(program, kernels, target.card, config.micro_batch_sizes, settings)


def trace_of_step(step: TracedStep, kernels: Kernels) -> Trace:
    """Return the trace that is predicted for a recorded step: on a card that of the allocator."""
    sizes = step.config.micro_batch_sizes
    held = _taken(step.program, kernels, step.config, step.target)
    if held is not None:
        return held.own_run.given
    own = sizes_of(step.program.recording, step.program.layout, kernels.effects)
    return step.program.trace(own, sizes)


def _size_model(
    program: Program, kernels: Kernels, held: ReservedEstimate | None
) -> BatchSizeModel:
    seconds = seconds_of_intervals(program.recording, kernels)
    least_seconds = None if kernels.overlap is None else kernels.overlap.least_seconds
    lean = program.without_objects()
    if held is None:
        own = sizes_of(program.recording, program.layout, kernels.effects)
        return size_model_of(lean, own, seconds, settings=None)
    settings = held.own_run.settings
    made = size_model_of(lean, held.own, seconds, settings=settings, least=held.least)
    return replace(made, least_seconds=least_seconds, products_seconds=kernels.products_seconds)


def _facts(
    size_model: BatchSizeModel,
    config: StepConfig,
    kernels: Kernels,
    held: ReservedEstimate | None,
    compiled: Compiled,
) -> dict[str, Any]:
    sizes = config.micro_batch_sizes
    if held is None:
        trace, reserved, needed = size_model.program.trace(size_model.own, sizes), None, None
    else:  # the search may find more by as much as it is coarse
        trace, reserved = held.own_run.given, held.own_run.reserved_bytes
        needed = min(held.least_run.needed_bytes(), reserved)

    kinds = None if held is None else _kinds_of_kernels(size_model.program, config, held)
    memory = step_memory(trace, 1)
    allocated = memory.peak_bytes
    seconds = size_model.step_seconds(sizes)
    recording, is_same = size_model.program.recording, config.sharding is Sharding.NONE
    is_same &= size_model.program.other_size == size_model.program.size  # both steps have one batch
    return {
        "timeline": memory.timeline,
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "needed_bytes": needed,
        "peak_by_category": memory.timeline.peak_by_category,
        "peak_place": memory.peak_place,
        "peak_holdings": memory.holdings(),
        "first_step_peak_bytes": step_memory(trace, 0).peak_bytes,
        "step_seconds": seconds,
        "watts": kernels.draw and kernels.draw.watts,
        "kernels": kinds or (),
        "samples_per_second": config.batch_size / seconds if seconds else None,
        "uncertainty": _uncertainty(allocated, kernels, recording, kinds, compiled),
        "notes": (
            *compiled.notes,
            *kernels.notes,
            *recording.assumptions,
            *_width_notes(kinds),
            *(growth_notes(trace, 1) if is_same else ()),
            *peak_notes(config, build_peak_bytes(trace)),
        ),
    }


def _without_time(facts: dict[str, Any], unknown: float) -> dict[str, Any]:
    """Return the facts of a step of whose work too much has no known time: a bound, no number."""
    rest = format_seconds(facts["step_seconds"])
    return _with_bound(
        facts,
        f"{format_percent(unknown)} of the work of the operators has no known time, so the step "
        f"has none: it takes longer than {rest}, which is the rest.",
    )


def _without_communication(facts: dict[str, Any], target: Target) -> dict[str, Any]:
    """Return the facts of a rank, whose time depends on what connects it with the others."""
    own = facts["step_seconds"]
    bound = f": its own operators take {format_seconds(own)}" if own is not None else ""
    remedy = "" if target.kind == "cpu" else "; name a cluster, such as device='8x-h100'"
    return _with_bound(
        facts,
        "The time of the communication between ranks is not known, so the step has no time"
        f"{bound}{remedy}.",
    )


def _with_bound(facts: dict[str, Any], note: str) -> dict[str, Any]:
    """Return the facts without a time, and with a note that says why."""
    without = {name: width for name, width in facts["uncertainty"].items() if name not in TIMED}
    kept = [one for one in facts["notes"] if not one.startswith(OF_ITS_TIME)]
    return {
        "step_seconds": None,
        "watts": None,
        "samples_per_second": None,
        "uncertainty": without,
        "notes": (*kept, note),
    }


def _uncertainty(
    allocated: int,
    kernels: Kernels,
    recording: OpTrace,
    kinds: tuple[str, ...] | None,
    compiled: Compiled,
) -> dict[str, float]:
    """Return the relative half-widths of the predicted numbers; on a CPU there are no kinds."""
    unsure = (kernels.unsure_bytes + recording.padded_bytes) / allocated + compiled.half_width
    if recording.assumptions:
        spread = ASSUMED_SPREAD if recording.spread else ASSUMED
        unsure += ASSUMED_BRANCH if recording.branched else spread
    seconds = width_of_seconds(kernels, is_cpu=kinds is None) + compiled.share
    if kinds is None:
        return {"peak_allocated_bytes": CPU_MEMORY + unsure, "step_seconds": seconds}
    widths = {
        number: width_of(number, kinds).half_width + unsure
        for number in ("peak_allocated_bytes", "peak_reserved_bytes")
    } | {"needed_bytes": width_of_needed() + unsure}
    power = {} if kernels.draw is None else {"watts": kernels.draw.half_width}
    return widths | {"step_seconds": seconds} | power


def _kinds_of_kernels(
    program: Program, config: StepConfig, held: ReservedEstimate
) -> tuple[str, ...]:
    """Return the kinds by which public runs are near, of a step on a card."""
    is_quantized = any(
        name.startswith(OF_QUANTIZED) and "optimizer" not in name for name in program.ran.names
    )
    is_sharded = config.sharding is not Sharding.NONE
    kinds = {CONVOLUTIONS: held.has_workspaces, QUANTIZED: is_quantized, SHARDED: is_sharded}
    return tuple(kind for kind, is_there in kinds.items() if is_there)


def width_of_seconds(kernels: Kernels, *, is_cpu: bool) -> float:
    """Return the relative half-width of the time of a step."""
    if not is_cpu:
        return kernels.seconds_half_width
    missing = min(kernels.unknown_share, MOST_UNKNOWN)
    return CPU_TIME + missing / (1.0 - missing) + NOISY_TIME * kernels.noisy_share


def _width_notes(kinds: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return where the uncertainty of reserved bytes comes from."""
    if kinds is None:
        return ()
    width = width_of("peak_reserved_bytes", kinds)
    what = "with convolutions " if CONVOLUTIONS in kinds else ""
    said = (
        f"The uncertainty of reserved bytes comes from {width.runs} runs of {width.models} models "
        f"{what}on real cards: with the model of the run left out, nine in ten lie within it. "
        "memlab.evidence(result) names the nearest."
    )
    return (said, OF_SHARDED) if SHARDED in kinds else (said,)


def _summary(facts: dict[str, Any]) -> str:
    unsure = facts["uncertainty"]["peak_allocated_bytes"]
    text = (
        f"predicted peak {format_bytes(facts['peak_allocated_bytes'])} allocated "
        f"(± {unsure:.1%}) in {facts['peak_place']}"
    )
    if facts["step_seconds"] is not None:
        text += f", about {format_seconds(facts['step_seconds'])} a step"
    return text


def versions_of(config: StepConfig, target: Target) -> dict[str, str]:
    """Return the versions that a prediction depends on."""
    found = versions_here()
    if target.kind == "cpu":
        threads = str(config.threads_of_rank(torch.get_num_threads()))
        return found | {"device_name": describe(torch.device("cpu")), "threads": threads}
    return found | ({"device_name": target.card.title} if target.card else {})
