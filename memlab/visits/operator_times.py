"""How long operators take on a card, each alone: CUDA events around calls in a row.

Calls follow one another as in a step, so that where the host is slower than the kernel its time is
what is found. Left out: fused RNNs, whose reserve nobody but their forward can make.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memlab.arguments.units import from_milliseconds
from memlab.operators.cost import OperatorCost
from memlab.operators.signatures import Signature
from memlab.operators.standalone import as_in_training, prepare

WARMUP, MOST_CALLS, ENOUGH_SECONDS = 3, 50, 2e-3
NOT_ALONE = "_rnn"


def time_operators(
    signatures: Iterable[Signature], device: torch.device, seconds: float
) -> tuple[dict[Signature, OperatorCost], dict[Signature, str]]:
    """Return what operators cost in seconds, and of those that do not run alone the reason.

    Args:
        signatures: of the operators, the most important first.
        device: a card.
        seconds: to spend; what is not reached by then is in neither answer.
    """
    end = time.monotonic() + seconds
    costs: dict[Signature, OperatorCost] = {}
    reasons: dict[Signature, str] = {}
    with as_in_training():
        for signature in signatures:
            if time.monotonic() > end:
                break
            try:
                found = _seconds(signature, device)
            except Exception as error:  # of any operator there is, so that no kind can be named
                reasons[signature] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            costs[signature] = OperatorCost(output_bytes=(), peak_bytes=0, seconds=found)
    return costs, reasons


def _seconds(signature: Signature, device: torch.device) -> float:
    if NOT_ALONE in signature[0]:
        raise ValueError("a fused RNN does not run alone")
    call = prepare(signature, device)().__call__
    for _ in range(WARMUP):
        call()
    once = _timed(call, 1, device)
    return _timed(call, max(1, min(MOST_CALLS, int(ENOUGH_SECONDS / max(once, 1e-6)))), device)


def _timed(call: Callable[[], Any], count: int, device: torch.device) -> float:
    """Return the seconds of one of so many calls in a row."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return from_milliseconds(begin.elapsed_time(end)) / count
