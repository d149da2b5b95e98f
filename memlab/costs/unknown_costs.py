"""What is not known about the kernels of a run on a CPU: shares, bytes, notes; and refusals."""

from collections.abc import Sequence

from memlab.costs.calibration import Calibration
from memlab.costs.roofline import work_of
from memlab.errors import UnsupportedError
from memlab.operators.cost import OperatorCost
from memlab.recording.recording import Operator, Recording
from memlab.running import no_kernel, says_no_kernel
from memlab.trace import Place

FLOPS_PER_SECOND, BYTES_PER_SECOND = 1e11, 1e10  # of a usual processor
LEAST_NOISE = 0.05  # as a share of a step's time; less is not mentioned
# a polynomial; the values of the matrix decide its degree, and so how many terms are held
BY_VALUES = frozenset({"aten.linalg_matrix_exp.default"})


def check_kernels(recording: Recording, run: Sequence[Operator], found: Calibration) -> None:
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


def notes_of(recording: Recording, found: Calibration) -> list[str]:
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
