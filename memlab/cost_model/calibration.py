"""What operators allocate and how long they take on a CPU, found by running each alone.

`calibrate` runs them, `overhead_seconds` finds what Python adds to each in a step.

Kernel workspace adds up operator by operator, so that a model need not run for its memory and time
to be known. What is in the store is not run again (`cost_store.py`), unless it was taken on a busy
machine or is in doubt; what is too large to run is run at two smaller sizes. Left out: what depends
on values in tensors, memory that libraries take behind the allocator, and what an operator costs
that cannot run alone (the reason is given).
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from memlab._util.torch_private.tensors import TorchDispatchMode
from memlab._util.units import KIB, MIB, format_bytes
from memlab.cost_model.cost_store import LEAST_OVERHEAD, MOST_OVERHEAD, OVERHEAD, Store
from memlab.devices.here import LoadWatch, is_quiet
from memlab.devices.operators import (
    STEADY,
    OperatorCall,
    OperatorCost,
    Signature,
    as_in_training,
    bytes_and_operations,
    is_view,
    leaf_tensors,
    on_meta,
    prepare,
    signature_of,
    smaller,
)
from memlab.memory.garbage import older_objects_frozen
from memlab.memory.meter import Meter, record
from memlab.trace import Phase

# `run_alone`: bytes and times of operators, each run by itself on real memory.
#
# An operator's call is made anew for each run: `prepare` has found arguments that it
# accepts. Times are those of a few runs without any profile. Bytes come from one profile
# over all operators.
#
# A step of many operators uses its tensors again only after others have gone through the
# caches. So before a run of large tensors the caches are filled with other data; small ones
# are found there in a step too.

CPU = torch.device("cpu")
MAX_RUNS, MIN_RUNS = 9, 3  # with two, an interruption by another process would be half the mean
BUDGET_SECONDS = 0.02  # of runs for one operator, at their median, once it has MIN_RUNS
LONG_SECONDS = 2.0  # of a first run, after which an operator is not run for its time again
# In a step a tensor of this size or more has left the second-level cache before it is used again,
# and smaller ones have not: of 128 KiB to 4 MiB the sum over operators fitted the steps of four
COLD_BYTES = 512 * KIB
EVICT_BYTES = 64 * MIB  # larger than last-level caches of most processors, a core's share of all


def run_alone(
    signatures: list[Signature], timed: bool, report: Callable[[float], None] | None
) -> dict[Signature, OperatorCost | str]:
    """Return what each operator cost or why it did not run."""
    makers: dict[Signature, Callable[[], OperatorCall]] = {}
    times: dict[Signature, list[float]] = {}
    found: dict[Signature, OperatorCost | str] = {}
    evict = cache_filler() if timed else None
    for index, signature in enumerate(signatures):
        try:
            start = time.perf_counter()
            makers[signature] = prepare(signature)
            first = time.perf_counter() - start

            if evict is None:
                times[signature] = []
            elif first > LONG_SECONDS:
                times[signature] = [first]
            else:
                times[signature] = times_of(makers[signature], evict)
        except Exception as error:  # of any operator there is, so that no kind can be named
            makers.pop(signature, None)
            found[signature] = f"{type(error).__name__}: {error}".splitlines()[0]
        if report is not None:
            report((index + 1) / len(signatures))
    del evict
    for signature, cost in _meter(makers).items():
        found[signature] = replace(cost, **_timing(times[signature]))
    return found


def _timing(seconds: list[float]) -> dict[str, Any]:
    """Return the fields of a cost that these times fill; none of an operator that was not timed."""
    if not seconds:
        return {}
    return {
        "seconds": _typical(seconds),
        "num_repeats": len(seconds),
        "median_seconds": statistics.median(seconds),
        "least_seconds": min(seconds),
    }


def _meter(makers: dict[Signature, Callable[[], OperatorCall]]) -> dict[Signature, OperatorCost]:
    """Return the bytes of each call, from one profile over all of them."""
    if not makers:
        return {}
    meter = Meter()
    addresses: list[list[int]] = []

    def run() -> None:
        for index, make in enumerate(makers.values()):
            call = make()
            meter.mark(index, Phase.FORWARD, 0)
            outputs = call()
            meter.mark(-1, Phase.FORWARD, 0)
            addresses.append([t.untyped_storage().data_ptr() for t in leaf_tensors(outputs)])
            del outputs, call

    with older_objects_frozen():
        trace = record(run, meter, CPU)
    index_of = np.array([interval.step for interval in trace.intervals])[trace.interval]
    events: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, address, nbytes in zip(
        index_of.tolist(), trace.address.tolist(), trace.nbytes.tolist(), strict=True
    ):
        events[index].append((address, nbytes))
    return {
        signature: _bytes(events[index], addresses[index]) for index, signature in enumerate(makers)
    }


def _bytes(events: list[tuple[int, int]], outputs: list[int]) -> OperatorCost:
    """Return the bytes of one call from its allocations and frees, and its outputs' addresses."""
    live: dict[int, int] = {}
    peak = 0
    for address, nbytes in events:
        if nbytes > 0:
            live[address] = nbytes
            peak = max(peak, sum(live.values()))
        else:
            live.pop(
                address, None
            )  # an argument's memory may be freed, by an operator that resizes
    output_bytes = tuple(live.pop(address, 0) for address in outputs)
    return OperatorCost(output_bytes=output_bytes, peak_bytes=peak, kept_bytes=sum(live.values()))


def cache_filler() -> torch.Tensor:
    """Return what fills the caches when each of its numbers is written."""
    return torch.zeros(EVICT_BYTES // torch.float32.itemsize)


def times_of(make: Callable[[], OperatorCall], evict: torch.Tensor) -> list[float]:
    """Return the times of a few calls, each on arguments made anew."""
    seconds: list[float] = []
    while len(seconds) < MAX_RUNS:
        call = make()
        if any(t.nbytes >= COLD_BYTES for t in call.tensors if not t.is_meta):
            evict.add_(1)
        start = time.perf_counter()
        outputs = call()
        del outputs  # what a step allocates it also frees
        seconds.append(time.perf_counter() - start)
        spent = statistics.median(seconds) * len(seconds)
        if spent > BUDGET_SECONDS and len(seconds) >= MIN_RUNS:
            break
    return seconds


def _typical(seconds: list[float]) -> float:
    """Return the median, or the least where runs disagree: then others were using the processor."""
    median, least = statistics.median(seconds), min(seconds)
    return median if median <= STEADY * least else least


# Find the costs of operators that must be taken again, and delete those that were wrong.
#
# A cost is doubted if a measured run contradicts it, and due if its time was taken on a
# busy machine.

Costs = Mapping[Signature, OperatorCost]

# load on a machine lasts for minutes, so costs from the same time are probably wrong as well
NEAR_SECONDS = 600.0
AGAIN_AFTER_SECONDS = 60.0  # since a time of a busy machine: its load is probably still there


def to_remeasure(known: Costs, before: float | None) -> dict[Signature, OperatorCost]:
    """Return the costs that were taken before a date, or that have no date; none if it is None.

    A cost with a date in the future counts as one without a date, since a clock was wrong.
    """
    if before is None:
        return {}
    now = time.time()
    return {
        signature: cost
        for signature, cost in known.items()
        if cost.taken_at is None or not before <= cost.taken_at <= now
    }


def is_due(cost: OperatorCost) -> bool:
    """Return whether a time was taken on a busy machine, long enough ago for that to have ended."""
    return cost.is_noisy and time.time() - (cost.taken_at or 0.0) > AGAIN_AFTER_SECONDS


def forget_others(store: Store, old: Costs, new: Costs, before: float) -> None:
    """Delete costs that were taken at about the same time as costs that were shown to be wrong.

    Args:
        store: already holds the new costs.
        old: the doubted costs.
        new: the costs of the same operators now.
        before: the date before which costs were doubted; later ones are kept.
    """
    wrong = {
        cost.taken_at or 0.0
        for signature, cost in old.items()
        if (again := new.get(signature)) is not None and _is_wrong(cost, again)
    }
    store.forget_near(wrong, within_seconds=NEAR_SECONDS, before=before)


def _is_wrong(old: OperatorCost, new: OperatorCost) -> bool:
    """Return whether a time was far off. Noise only adds, so a faster time is always right."""
    if old.seconds is None or new.seconds is None:
        return False
    if old.seconds > STEADY * new.seconds:
        return True
    return new.seconds > STEADY * old.seconds and not new.is_noisy


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
    remeasure_before: float | None = None,
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
        remeasure_before: costs that were taken before this date, in seconds since 1970, are taken
            again; None to believe all.
        on_progress: called with the fraction that is done; what it raises ends the calibration.
    """
    wanted = list(dict.fromkeys(signatures))
    known = {} if store is None else store.read(wanted)
    old = to_remeasure(known, remeasure_before)
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
        if remeasure_before is not None:
            forget_others(store, old, known, remeasure_before)
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


# What an operator of a step takes besides its kernel, on this machine.
#
# That is modules and the model's Python around it in forward, autograd in backward, the optimizer's
# Python in the update. It is found from a step whose tensors are tiny, so that kernels take almost
# nothing:
#
#     (the fastest of 30 forwards - its operators alone, each at its fastest) / number of operators
#
# Before each phase caches are filled with other data, as they are in a step whose tensors are not
# tiny: warm, the same Python takes half as long.

OVERHEADS: dict[Phase, Signature] = {
    phase: (f"{OVERHEAD}{phase}", (), ())
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
}
NOTHING = OperatorCost(output_bytes=(), peak_bytes=0)
TINY, TINY_LAYERS, TINY_STEPS = 4, 4, 30


def overhead_seconds(
    store: Store | None, remeasure_before: float | None = None
) -> dict[Phase, float]:
    """Return what an operator of each phase takes besides its kernel, in seconds.

    It is less the Python call that an operator alone is timed with: a few microseconds. Views have
    no kernel and take it all the same.

    Args:
        store: as for `calibrate`.
        remeasure_before: as for `calibrate`.
    """
    known = {} if store is None else store.read(list(OVERHEADS.values()))
    old = to_remeasure(known, remeasure_before)
    known = {signature: cost for signature, cost in known.items() if signature not in old}
    found = {phase: known.get(signature) for phase, signature in OVERHEADS.items()}
    is_known = all(cost is not None and cost.seconds is not None for cost in found.values())
    is_any_due = any(is_due(cost) for cost in known.values())
    if is_known and not (is_any_due and is_quiet()):
        return {phase: cost.seconds for phase, cost in found.items() if cost and cost.seconds}

    watch = LoadWatch()
    seconds = _measured()
    if store is not None:
        taken = replace(NOTHING, others_share=watch.others_share(), taken_at=time.time())
        store.write({OVERHEADS[p]: replace(taken, seconds=s) for p, s in seconds.items()})
    return seconds


def _measured() -> dict[Phase, float]:
    """Return the overhead of each phase, from steps of a tiny model that run now."""
    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Sequential(*(_Tiny() for _ in range(TINY_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(TINY, TINY, TINY)
    evict = cache_filler()
    times = [_phase_times(model, optimizer, batch, evict) for _ in range(TINY_STEPS)]

    seconds = {}
    for phase in OVERHEADS:
        signatures = _operators_of(phase, model, optimizer, batch)
        kernels = Counter(signature for signature, has_kernel in signatures if has_kernel)
        unused = torch.empty(0)  # nothing this small is ever evicted
        with as_in_training():
            # the fastest of each: on a busy machine medians differ by more than what is looked for
            alone = sum(min(times_of(prepare(s), unused)) * n for s, n in kernels.items())
        besides = min(each[phase] for each in times) - alone
        seconds[phase] = min(max(besides / len(signatures), LEAST_OVERHEAD), MOST_OVERHEAD)
    return seconds


class _Tiny(torch.nn.Module):
    """What a layer of a library's transformer does on the host, with almost nothing to compute.

    No layer that oneDNN runs: waiting for its threads takes milliseconds on a busy machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(TINY)
        self.up, self.down = torch.nn.Linear(TINY, TINY), torch.nn.Linear(TINY, TINY)
        self.act = torch.nn.GELU()
        self.drop = torch.nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        heads = self.norm(x).view(samples, length, 2, width // 2).transpose(1, 2)
        scores = torch.matmul(heads, heads.transpose(2, 3)) * 0.5
        mixed = torch.matmul(torch.softmax(scores, dim=-1), heads)
        x = x + mixed.transpose(1, 2).reshape(samples, length, width)
        out: torch.Tensor = x + self.drop(self.down(self.act(self.up(x))))
        return out


def _operators_of(
    phase: Phase, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> list[tuple[Signature, bool]]:
    """Return the operators of one phase of a step, and whether each has a kernel: is no view."""
    seen: list[tuple[Signature, bool]] = []

    def run(here: Phase, work: Callable[[], Any]) -> Any:
        if here is not phase:
            return work()
        with _Signatures() as signatures:
            out = work()
        seen.extend(signatures.seen)
        return out

    _tiny_step(model, optimizer, batch, run)
    return seen


def _phase_times(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    evict: torch.Tensor,
) -> dict[Phase, float]:
    seconds: dict[Phase, float] = {}

    def run(here: Phase, work: Callable[[], Any]) -> Any:
        evict.add_(1)
        start = time.perf_counter()
        out = work()
        seconds[here] = time.perf_counter() - start
        return out

    _tiny_step(model, optimizer, batch, run)
    return seconds


def _tiny_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    run: Callable[[Phase, Callable[[], Any]], Any],
) -> None:
    loss = run(Phase.FORWARD, lambda: model(batch).square().mean())
    run(Phase.BACKWARD, loss.backward)
    run(Phase.OPTIMIZER, optimizer.step)
    optimizer.zero_grad()


class _Signatures(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Signature, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "profiler":
            self.seen.append((signature_of(func, args, kwargs or {}), not is_view(func)))
        return func(*args, **(kwargs or {}))
