"""`run_alone`: bytes and times of operators, each run by itself on real memory.

An operator's call is made anew for each run: `prepare` has found arguments that it accepts. Times
are those of a few runs without any profile. Bytes come from one profile over all operators.

A step of many operators uses its tensors again only after others have gone through the caches. So
before a run of large tensors the caches are filled with other data; small ones are found there in a
step too.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from memlab.arguments.units import KIB, MIB
from memlab.meters.garbage import older_objects_frozen
from memlab.meters.meter import Meter, record
from memlab.operators.cost import STEADY, OperatorCost
from memlab.operators.signatures import Signature
from memlab.operators.standalone import OperatorCall, prepare, tensors_in
from memlab.trace import Phase

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
            addresses.append([t.untyped_storage().data_ptr() for t in tensors_in(outputs)])
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
