"""`calibrate`: what operators allocate and how long they take, found by running each alone.

Kernel workspace adds up operator by operator, so that a model need not run for its memory and time
to be known. What is in the store is not run again (`cost_store.py`), unless it was taken on a busy
machine or is in doubt (`doubt.py`); what is too large to run is run at two smaller sizes. How one
operator is run is in `run_alone.py`. Left out: what depends on values in tensors, memory that
libraries take behind the allocator, and what an operator costs that cannot run alone (the reason is
given).
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from memlab.arguments.units import format_bytes
from memlab.costs.cost_store import Store
from memlab.costs.doubt import doubted, forget_others, is_due
from memlab.costs.run_alone import MAX_RUNS, run_alone
from memlab.devices.load import LoadWatch, is_quiet
from memlab.operators.cost import OperatorCost
from memlab.operators.signatures import Signature
from memlab.operators.standalone import (
    as_in_training,
    bytes_and_operations,
    is_view,
    on_meta,
    smaller,
)

MAX_OPERATIONS = 10**11  # of one run; about two seconds on two cores
SHARES = (0.5, 0.25)  # of what can be run, for an operator that is too large: a line needs two
AGAIN_SECONDS = 2.0  # of a prediction, for operators that were timed on a busy machine


class Calibration(dict[Signature, OperatorCost | None]):
    """Cost by signature, None for what cannot be run alone; `reasons` says why, by signature."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[Signature, str] = {}


def calibrate(
    signatures: Iterable[Signature],
    *,
    timed: bool,
    store: Store | None,
    max_bytes: int,
    num_outputs: Mapping[Signature, int] | None = None,
    doubted_before: float | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Calibration:
    """Return what each operator costs on this machine's CPU with the present number of threads.

    Args:
        signatures: of the operators; each is run once, however often it is given.
        timed: also measure seconds; a stored cost without them is measured again.
        store: asked first, and told what is new; None to keep nothing.
        max_bytes: that one operator's arguments and results may take. A larger one is run on two
            smaller leading dimensions, and its cost is marked `extrapolated`.
        num_outputs: tensors that operators return, by fake tensors. A stored cost of another number
            is not believed: the operator is run again.
        doubted_before: costs that were taken before this date, in seconds since 1970, are taken
            again; None to believe all.
        on_progress: called with the fraction that is done; what it raises ends the calibration.
    """
    wanted = list(dict.fromkeys(signatures))
    known = {} if store is None else store.read(wanted)
    old = doubted(known, doubted_before)
    odd = {
        signature: cost
        for signature, cost in known.items()
        if len(cost.output_bytes) != (num_outputs or {}).get(signature, len(cost.output_bytes))
    }
    known = {s: cost for s, cost in known.items() if s not in old and s not in odd}
    missing = [s for s in wanted if s not in known or (timed and known[s].seconds is None)]
    if timed:
        missing += _to_take_again(known)
    # what was too large when less memory was free
    missing += [s for s in known if known[s].extrapolated and _plan(s, max_bytes) == [(s, 1.0)]]

    result = Calibration()
    plans = {signature: _plan(signature, max_bytes) for signature in missing}
    for signature, outcome in _carried_out(plans, timed, max_bytes, on_progress).items():
        if isinstance(outcome, OperatorCost):
            known[signature] = _better(outcome, known.get(signature))
        else:
            result.reasons[signature] = outcome

    if store is not None:
        store.drop(s for s in odd if not _has_same_outputs(odd[s], known.get(s)))
        store.write({signature: known[signature] for signature in missing if signature in known})
        if doubted_before is not None:
            forget_others(store, old, known, doubted_before)
    result.update({signature: known.get(signature) for signature in wanted})
    return result


def _has_same_outputs(old: OperatorCost, new: OperatorCost | None) -> bool:
    """Return whether an operator really returns as many tensors as its stored cost says."""
    return new is not None and len(old.output_bytes) == len(new.output_bytes)


def _to_take_again(known: Mapping[Signature, OperatorCost]) -> list[Signature]:
    """Return the operators that were timed on a busy machine, if it is quiet now.

    As many as take two seconds; the others are left to later predictions.
    """
    noisy = {s: cost for s, cost in known.items() if is_due(cost)}
    if not noisy or not is_quiet():
        return []
    found, spent = list[Signature](), 0.0
    for signature, cost in noisy.items():
        spent += (cost.seconds or 0.0) * MAX_RUNS
        if found and spent > AGAIN_SECONDS:
            break
        found.append(signature)
    return found


def _better(new: OperatorCost, old: OperatorCost | None) -> OperatorCost:
    """Return the new cost; of two noisy times the smaller, since noise only adds."""
    if old is None or old.seconds is None or new.seconds is None or not new.is_noisy:
        return new
    return replace(old, taken_at=new.taken_at) if old.seconds < new.seconds else new


def _plan(signature: Signature, max_bytes: int) -> list[tuple[Signature, float]]:
    """Return what to run for an operator, each with its share of the whole; empty if nothing."""
    try:
        if is_view(on_meta(signature).func):
            return [(signature, 1.0)]
        size, operations = bytes_and_operations(signature)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return [(signature, 1.0)]  # running it will tell what is wrong with it
    if size <= max_bytes and operations <= MAX_OPERATIONS:
        return [(signature, 1.0)]
    possible = min(1.0, max_bytes / max(size, 1), MAX_OPERATIONS / max(operations, 1))
    parts = [part for share in SHARES if (part := smaller(signature, possible * share))]
    two = len(parts) == len(SHARES) and parts[0][0] != parts[1][0]
    fits = two and bytes_and_operations(parts[0][0])[0] <= max_bytes
    return parts if fits else []


def _carried_out(
    plans: Mapping[Signature, list[tuple[Signature, float]]],
    timed: bool,
    max_bytes: int,
    report: Callable[[float], None] | None,
) -> dict[Signature, OperatorCost | str]:
    """Run what is planned; return what each operator costs, or why that is not known."""
    parts = list(dict.fromkeys(part for plan in plans.values() for part, _ in plan))
    watch = LoadWatch()
    with as_in_training():
        ran = run_alone(parts, timed, report)
    others_share, now = watch.others_share(), time.time()

    found: dict[Signature, OperatorCost | str] = {}
    for signature, plan in plans.items():
        outcome = _outcome(signature, plan, ran, max_bytes)
        if isinstance(outcome, OperatorCost):
            outcome = replace(outcome, others_share=others_share, taken_at=now)
        found[signature] = outcome
    return found


def _too_large(signature: Signature, max_bytes: int) -> str:
    size, operations = bytes_and_operations(signature)
    return (
        f"{signature[0]} takes {format_bytes(size)} and {operations:.1e} operations; allowed is "
        f"{format_bytes(max_bytes)} and {MAX_OPERATIONS:.0e}, and it has no smaller form to run"
    )


def _outcome(
    signature: Signature,
    plan: list[tuple[Signature, float]],
    ran: dict[Signature, OperatorCost | str],
    max_bytes: int,
) -> OperatorCost | str:
    """Return the cost of an operator from the parts of it that ran, or why there is none."""
    if not plan:
        return _too_large(signature, max_bytes)
    costs = []
    for part, _ in plan:
        cost = ran[part]
        if isinstance(cost, str):
            return cost if len(plan) == 1 else f"{_too_large(signature, max_bytes)} ({cost})"
        costs.append(cost)
    return costs[0] if len(plan) == 1 else _extrapolated(costs, [share for _, share in plan])


def _extrapolated(costs: list[OperatorCost], shares: list[float]) -> OperatorCost:
    """Return the cost of the whole on the line through the costs of two shares of it."""
    (big, small), (x, y) = costs, shares

    def at_whole(large: float, little: float) -> float:
        return max(large, large + (large - little) / (x - y) * (1.0 - x))

    noisier = max(costs, key=lambda cost: cost.spread)
    seconds = None
    if big.seconds is not None and small.seconds is not None:
        seconds = at_whole(big.seconds, small.seconds)
    return OperatorCost(
        output_bytes=tuple(
            round(at_whole(*pair))
            for pair in zip(big.output_bytes, small.output_bytes, strict=True)
        ),
        peak_bytes=round(at_whole(big.peak_bytes, small.peak_bytes)),
        kept_bytes=round(at_whole(big.kept_bytes, small.kept_bytes)),
        seconds=seconds,
        extrapolated=True,
        num_repeats=noisier.num_repeats,
        median_seconds=noisier.median_seconds,
        least_seconds=noisier.least_seconds,
    )
