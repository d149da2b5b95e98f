"""The memory and time of a recorded run's kernels: calibrated for a CPU, by rules for a card."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from memlab._util.units import GIB
from memlab.cost_model import cuda_kernels, links, power
from memlab.cost_model.calibration import Calibration, calibrate, overhead_seconds
from memlab.cost_model.cost_store import Store
from memlab.cost_model.links import cost_of, is_collective
from memlab.cost_model.overlap import (
    HOST_SECONDS,
    OF_HOST,
    Overlap,
    host_notes,
    overlap_notes,
    overlap_of,
    python_seconds,
)
from memlab.cost_model.roofline import (
    HOST_EFFICIENCY,
    LAUNCH_SECONDS,
    KernelCall,
    StepTime,
    known_time,
    step_time,
    table,
    time_half_width,
    time_note,
    work_of,
)
from memlab.devices.cards import Card, Target
from memlab.devices.clusters import Cluster
from memlab.devices.here import available_memory_bytes
from memlab.devices.operators import KnownCosts, OperatorCost, Signature, call_of_collective
from memlab.errors import UnsupportedError
from memlab.running import no_kernel, says_no_kernel
from memlab.trace import Phase, Place
from memlab.tracing import card_answers
from memlab.tracing.assembly import KernelMemory
from memlab.tracing.program import Program
from memlab.tracing.recording import Operator, OpTrace

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

# What is not known about the kernels of a run on a CPU: shares, bytes, notes; and refusals.

FLOPS_PER_SECOND, BYTES_PER_SECOND = 1e11, 1e10  # of a usual processor
LEAST_NOISE = 0.05  # as a share of a step's time; less is not mentioned
# a polynomial; the values of the matrix decide its degree, and so how many terms are held
BY_VALUES = frozenset({"aten.linalg_matrix_exp.default"})


def check_kernels(recording: OpTrace, run: Sequence[Operator], found: Calibration) -> None:
    """Raise UnsupportedError for the first operator that this CPU cannot run in its format."""
    for operator in run:
        assert operator.signature is not None
        reason = found.reasons.get(operator.signature, "")
        if says_no_kernel(reason):
            interval, paths = recording.intervals[operator.interval], list(recording.modules)
            module = paths[operator.module] if operator.module >= 0 else ""
            place = Place(
                phase=interval.phase, micro_batch=interval.micro_batch, module=module,
                operator=operator.name,
            )  # fmt: skip
            raise UnsupportedError(no_kernel(place, reason))


def noisy_share(run: Sequence[Operator], found: Calibration) -> float:
    """Return the share of the operators' time that was taken on a busy machine, 0..1."""
    costs = [cost for o in run if o.signature and (cost := found[o.signature]) is not None]
    every = sum(cost.seconds or 0.0 for cost in costs)
    return sum(cost.seconds or 0.0 for cost in costs if cost.is_noisy) / every if every else 0.0


def noise_notes(share: float) -> list[str]:
    """Return a note on this share of times that were taken on a busy machine; none if small."""
    if share < LEAST_NOISE:
        return []
    return [
        f"{share:.0%} of the time comes from operators that were timed while other programs used "
        "the processor, and may be too long. A later prediction times them again once the machine "
        "is quiet; memlab.forget_costs() deletes all times at once."
    ]


def unknown_share(run: Sequence[Operator], found: Calibration) -> float:
    """Return the share of the operators' work whose time is not known, 0..1.

    Work is computed from shapes, as seconds of a usual processor, so large operators count more.
    """
    every = unknown = 0.0
    for operator in run:
        assert operator.signature is not None
        work = work_of(operator.signature, operator.outputs)
        weight = work.flops / FLOPS_PER_SECOND + work.num_bytes / BYTES_PER_SECOND
        every += weight
        cost = found[operator.signature]
        if cost is None or cost.seconds is None:
            unknown += weight

    return unknown / every if every else 0.0


def unsure_bytes(operator: Operator, cost: OperatorCost | None) -> int:
    """Return how many more bytes an operator may allocate than is known: as many as it returns.

    If values decide how much a kernel allocates, the whole workspace is uncertain.
    """
    if operator.signature is None:
        return 0
    if cost is not None and operator.signature[0] in BY_VALUES:
        return max(0, cost.peak_bytes - sum(cost.output_bytes))
    if cost is not None and not cost.extrapolated:
        return 0
    return sum(output.nbytes for output in operator.outputs)


def notes_of(recording: OpTrace, found: Calibration) -> list[str]:
    """Return notes on operators that did not run alone as they do in the step."""
    names = {o.signature: o.name for o in recording.operators}
    alone = sorted({names[signature] for signature in found.reasons})
    smaller = sorted({names[s] for s, cost in found.items() if cost and cost.extrapolated})
    notes = []

    if alone:
        notes.append(
            f"Workspace and time are not known for {', '.join(alone)}, because the operator cannot "
            "run alone, would take too long alone, or is not in the record."
        )

    if smaller:
        notes.append(
            f"Too large to run alone, so extrapolated from smaller sizes: {', '.join(smaller)}."
        )

    by_values = sorted({names[signature] for signature in found if signature[0] in BY_VALUES})
    if by_values:
        notes.append(
            f"The memory of {', '.join(by_values)} depends on values that a prediction does not "
            "know."
        )

    return notes


SCALARS_BYTES = 64  # kernels allocate up to this for scalars, whatever the size of tensors
SHARE_FOR_ONE_OPERATOR = 0.25  # of the available memory, for running one operator alone


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kernels:
    """What is known about a recording's kernels.

    Attributes:
        effects: the memory of each operator; None if fake tensors show everything.
        seconds: float64, (operators,); None if no time is known.
        unsure_bytes: bytes of the largest operator whose memory is not known from running it.
        noisy_share: the share of the step's time from operators that were timed while other
            programs used the processor.
        unknown_share: the share of the operators' work whose time is not known. This time is
            missing in `seconds`.
        seconds_half_width: the relative half-width of a step's time on a card; 0 on a CPU.
        overlap: how operators overlap with one another and with the host; None on a CPU.
        is_connected: whether it is known what connects the cards, if there are several.
        busy: seconds in which kernels of a card work in the recorded steps, by what they draw.
        draw: what the card draws in them; None on a CPU or where it is not known.
        products_seconds: of products and attention in forward and backward; 0 if not known.
        notes: sentences about what is not known.
    """

    effects: list[KernelMemory | None]
    seconds: npt.NDArray[np.float64] | None
    unsure_bytes: int = 0
    noisy_share: float = 0.0
    unknown_share: float = 0.0
    seconds_half_width: float = 0.0
    overlap: Overlap | None = None
    is_connected: bool = True
    busy: power.Busy = power.IDLE
    draw: power.PowerDraw | None = None
    products_seconds: float = 0.0
    notes: tuple[str, ...] = ()


def kernels_of(
    program: Program,
    sizes: Sequence[int],
    target: Target,
    on_progress: Callable[[float], None],
    *,
    tf32_matmul: bool = False,
    remeasure_before: float | None = None,
    timed: bool = True,
    judged: int | None = None,
) -> Kernels:
    """Return the memory and time of a run's kernels on the target.

    On a CPU, new operators of the steps with these micro-batch sizes run alone, and their costs are
    scaled to the other recorded size. A target with recorded costs uses these instead, and nothing
    runs.

    Args:
        program: of the run.
        sizes: micro-batch sizes.
        target: the device.
        on_progress: called with the fraction of new operators that have run.
        tf32_matmul: whether a card multiplies fp32 matrices in TF32.
        remeasure_before: a date in seconds since 1970; older costs are taken again.
        timed: whether new operators of a CPU are timed too.
        judged: the step that `Kernels.overlap` tells of; None for the last one.
    """
    if target.kind == "cuda":
        return _on_card(program.recording, target, judged, tf32_matmul=tf32_matmul)
    return _on_cpu(program, sizes, target.costs, on_progress, remeasure_before, timed)


def seconds_of_intervals(recording: OpTrace, kernels: Kernels) -> npt.NDArray[np.float64] | None:
    """Return the time of each interval, (intervals,); None if times are not known."""
    if kernels.overlap is not None:
        return kernels.overlap.interval_seconds
    return None if kernels.seconds is None else _sums(recording, kernels.seconds)


def _sums(recording: OpTrace, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    interval = np.array([operator.interval for operator in recording.operators], dtype=np.int64)
    found = np.bincount(interval, weights=seconds, minlength=len(recording.intervals))
    return found.astype(np.float64)


def _on_card(
    recording: OpTrace, target: Target, judged: int | None, *, tf32_matmul: bool
) -> Kernels:
    card, costs = target.card, target.costs
    known = {} if costs is None else costs.operators
    effects, notes = cuda_kernels.effects(recording, card), list(card_answers.notes())
    if card is None or card.memory_bytes_per_second is None:
        width = time_half_width(card, 0.0)
        return Kernels(
            effects=effects, seconds=None, seconds_half_width=width,
            is_connected=not _groups(recording), notes=tuple(notes),
        )  # fmt: skip

    times = [_time_on(o, card, target.cluster, known, tf32_matmul) for o in recording.operators]
    seconds = np.array([time.estimate_seconds for time in times])
    every = float(seconds[[not operator.ranks for operator in recording.operators]].sum())
    unsure = sum(time.unsure_seconds for time in times) / every if every else 0.0
    half_width = time_half_width(card, unsure)
    overlap = _overlap(recording, seconds, target, judged, half_width)
    busy, drawn = _power(recording, times, overlap, card)
    if drawn is not None and drawn.slower_half_width:
        working = [drawn.slower * time.busy.seconds for time in times]
        seconds = np.maximum(seconds, np.array(working))
        half_width = math.hypot(half_width, drawn.slower_half_width)
        overlap = _overlap(recording, seconds, target, judged, half_width)

    groups = _groups(recording)
    notes += [] if drawn is None else power.notes(card, drawn.slower)
    notes += overlap_notes(overlap) if groups and target.cluster else []
    notes += host_notes(overlap)
    is_whole = not groups and f"{half_width:.0%}" == f"{overlap.half_width:.0%}"
    notes.append(time_note(card, unsure, "The time" if is_whole else "That of kernels"))
    if costs is not None and costs.origin:
        notes += _origin_note(recording, seconds, costs)
    return Kernels(
        effects=effects,
        seconds=seconds,
        seconds_half_width=overlap.half_width,
        overlap=overlap,
        is_connected=not groups or target.cluster is not None,
        busy=busy,
        draw=drawn,
        products_seconds=float(
            seconds[[_is_product(o, recording) for o in recording.operators]].sum()
        ),
        notes=tuple(notes),
    )


def _groups(recording: OpTrace) -> set[tuple[int, ...]]:
    """Return the ranks of each group that exchanges anything."""
    return {operator.ranks for operator in recording.operators} - {()}


def _power(
    recording: OpTrace, times: Sequence[StepTime], overlap: Overlap, card: Card
) -> tuple[power.Busy, power.PowerDraw | None]:
    """Return the busy seconds of all recorded steps, and what the card draws over them."""
    in_step = [recording.intervals[o.interval].step >= 0 for o in recording.operators]
    busy = power.added(time.busy for time, is_own in zip(times, in_step, strict=True) if is_own)
    if card.board_watts is None:
        return busy, None
    is_step = [interval.step >= 0 for interval in recording.intervals]
    whole = float(overlap.interval_seconds[is_step].sum())
    return busy, power.draw(card, busy, whole, power.sustained(card, table().joules_per_flop))


def _is_product(operator: Operator, recording: OpTrace) -> bool:
    """Return whether an operator multiplies in the forward or backward of the last step."""
    at = recording.intervals[operator.interval]
    is_model = at.step == LAST_STEP and at.phase in (Phase.FORWARD, Phase.BACKWARD)
    signature = None if operator.ranks or not is_model else operator.signature
    return signature is not None and work_of(signature, operator.outputs).flops > 0


def _overlap(
    recording: OpTrace,
    seconds: npt.NDArray[np.float64],
    target: Target,
    judged: int | None,
    kernels_half_width: float,
) -> Overlap:
    """Return how operators overlap; collectives take no time without a cluster."""
    cluster = target.cluster
    between = () if cluster is None else _groups(recording)
    return overlap_of(
        recording,
        seconds,
        kernels_half_width=kernels_half_width,
        links_half_width=max(
            (links.half_width(ranks, cluster) for ranks in between if cluster), default=0.0
        ),
        host_seconds=target.host_seconds or HOST_SECONDS,
        judged=judged,
    )


def _origin_note(
    recording: OpTrace, seconds: npt.NDArray[np.float64], costs: KnownCosts
) -> list[str]:
    """Return a note on the share of the time that was measured; nothing if none was."""
    is_known = np.array([o.signature in costs.operators for o in recording.operators], dtype=bool)
    known, every = float(seconds[is_known].sum()), float(seconds.sum())
    if not known:
        return []
    return [f"{known / every:.0%} of the time is that of operators as {costs.origin}."]


def _time_on(
    operator: Operator,
    card: Card,
    cluster: Cluster | None,
    known: Mapping[Signature, OperatorCost],
    tf32_matmul: bool,
) -> StepTime:
    if operator.signature is None:
        return NO_TIME
    if operator.ranks:
        return _time_between(operator, cluster)
    if operator.crosses:
        nbytes = sum(output.nbytes for output in operator.outputs)
        return known_time(nbytes / (card.host_bytes_per_second * HOST_EFFICIENCY) + LAUNCH_SECONDS)

    call = KernelCall(operator.signature, operator.outputs)
    expected = step_time([call], card, tf32_matmul=tf32_matmul) or NO_TIME
    cost = known.get(operator.signature)
    if cost is None or cost.seconds is None:
        return expected
    return replace(known_time(cost.seconds), busy=expected.busy.scaled_to(cost.seconds))


def _time_between(operator: Operator, cluster: Cluster | None) -> StepTime:
    """Return the time of a collective between the cards of a cluster; none without one."""
    assert operator.signature is not None
    call = call_of_collective(operator.signature, len(operator.ranks))
    if call is None or cluster is None:
        return NO_TIME
    return known_time(
        links.collective_seconds(call.collective, call.payload_bytes, operator.ranks, cluster)
    )


NO_TIME = known_time(0.0)
LAST_STEP = 1  # of the two that are recorded
OF_ITS_TIME = (OF_HOST, power.SAID)  # how notes begin that hold for one batch and its time
_store = Store()


def _on_cpu(
    program: Program,
    sizes: Sequence[int],
    known: KnownCosts | None,
    on_progress: Callable[[float], None],
    remeasure_before: float | None,
    timed: bool,
) -> Kernels:
    recording = program.recording
    steps = program.steps_of(sizes)
    wanted = {i for i, interval in enumerate(recording.intervals) if interval.step in steps}
    run = [o for o in recording.operators if o.interval in wanted and o.signature]
    between_ranks = {
        o.signature: cost_of(o) for o in run if o.signature and is_collective(o.signature)
    }
    num_outputs = {
        o.signature: len(o.outputs) for o in run if o.signature and o.signature not in between_ranks
    }

    if known is None:
        found, overheads = _found_here(num_outputs, on_progress, remeasure_before, timed)
        check_kernels(recording, run, found)
    else:
        found, overheads = _looked_up(num_outputs, known), known.overheads
    found.update(between_ranks)

    phases = [interval.phase for interval in recording.intervals]
    overhead = [overheads.get(phases[o.interval], 0.0) for o in recording.operators]
    for first, seconds in _recomputing(recording):
        overhead[first] += seconds

    costs = [found.get(o.signature) if o.signature else None for o in recording.operators]
    _scale_to_other_size(program, costs)
    noisy = noisy_share(run, found) if timed else 0.0

    return Kernels(
        effects=[
            None if cost is None else _effect(cost, operator)
            for cost, operator in zip(costs, recording.operators, strict=True)
        ],
        seconds=np.array(
            [max(more + _seconds(cost), 0.0) for more, cost in zip(overhead, costs, strict=True)]
        ),
        unsure_bytes=max(
            (unsure_bytes(o, found[o.signature]) for o in run if o.signature), default=0
        ),
        noisy_share=noisy,
        unknown_share=unknown_share(run, found),
        is_connected=not _groups(recording),
        notes=(
            *notes_of(recording, found),
            *(noise_notes(noisy) if known is None else ()),
            *_store.notes,
        ),
    )


def _found_here(
    num_outputs: Mapping[Signature, int],
    on_progress: Callable[[float], None],
    remeasure_before: float | None,
    timed: bool,
) -> tuple[Calibration, Mapping[Phase, float]]:
    """Return the costs of operators on this machine, and the time that Python adds to each."""
    available = available_memory_bytes()
    found = calibrate(
        num_outputs,
        timed=timed,
        store=_store,
        max_bytes=GIB if available is None else int(available * SHARE_FOR_ONE_OPERATOR),
        num_outputs=num_outputs,
        remeasure_before=remeasure_before,
        on_progress=on_progress,
    )

    return found, overhead_seconds(_store, remeasure_before) if timed else {}


def costs_found_here(signatures: Iterable[Signature]) -> KnownCosts:
    """Return the cached costs of operators on this machine's CPU; a prediction must come first."""
    return KnownCosts(operators=_store.read(signatures), overheads=overhead_seconds(_store))


def _looked_up(num_outputs: Mapping[Signature, int], known: KnownCosts) -> Calibration:
    found = Calibration()
    for signature, number in num_outputs.items():
        cost = known.operators.get(signature)
        is_of_it = cost is not None and len(cost.output_bytes) == number
        found[signature] = cost if is_of_it else None
        if not is_of_it:
            found.reasons[signature] = "it is not in the record"

    return found


def _recomputing(recording: OpTrace) -> Iterator[tuple[int, float]]:
    """Yield the first operator of each recomputed call, and Python's time for the call."""
    paths = list(recording.modules)
    for call in recording.calls:
        keeps = recording.recomputed.get(paths[call.module])
        if keeps is not None and call.end > call.first:
            yield call.first, python_seconds(1, call.end - call.first, keeps=keeps)


def _seconds(cost: OperatorCost | None) -> float:
    return 0.0 if cost is None or cost.seconds is None else cost.seconds


def _scale_to_other_size(program: Program, costs: list[OperatorCost | None]) -> None:
    """Fill in unknown costs of step 0 from the same operators of step 1, scaled by size."""
    if program.differs:
        return

    fakes: dict[int, dict[int, int]] = defaultdict(dict)
    for block in program.recording.blocks:
        fakes[block.operator][block.output] = block.nbytes
    share, slices = program.other_size / program.size, program.operator_slices()
    for one, zero in program.partners.items():
        for known, other in zip(range(*slices[one]), range(*slices[zero]), strict=True):
            cost = costs[known]
            if cost is not None and costs[other] is None:
                costs[other] = _scaled(cost, share, fakes[known], fakes[other])


def _scaled(
    cost: OperatorCost, share: float, fake: dict[int, int], other: dict[int, int]
) -> OperatorCost:
    """Return a cost scaled by size; outputs whose fake size is right keep their fake size."""
    outputs = tuple(
        other.get(index, 0) if nbytes == fake.get(index, 0) else round(nbytes * share)
        for index, nbytes in enumerate(cost.output_bytes)
    )
    inside = cost.peak_bytes - sum(cost.output_bytes)
    return OperatorCost(
        output_bytes=outputs,
        peak_bytes=sum(outputs) + (inside if inside <= SCALARS_BYTES else round(inside * share)),
        seconds=None if cost.seconds is None else cost.seconds * share,
    )


def _effect(cost: OperatorCost, operator: Operator) -> KernelMemory:
    inside = cost.peak_bytes - sum(cost.output_bytes) - cost.kept_bytes
    return KernelMemory(
        # alone it ran on other values, so its outputs had another size
        output_bytes=None if operator.by_values else cost.output_bytes,
        workspace_bytes=max(inside, 0),
        kept_bytes=cost.kept_bytes,
    )
