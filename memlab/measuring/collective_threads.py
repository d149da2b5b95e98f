"""Threads that carry out collectives, and frees in them that no profile sees.

On a CPU, Gloo's threads hold the tensors of a collective until shortly after it is done. If the
step drops such a tensor in this moment, the thread is the last to hold it, and frees it outside of
any profile: the trace then counts its bytes to the end. So a metered step waits after each
collective until these threads have nothing left to do, lets them go on where it would take their
processor, and a trace says how many bytes it may count too much.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memlab.torch_private.ranks import waited_by
from memlab.trace import Trace

PAUSE_SECONDS = 0.003  # in which a thread that was told of the end begins to run
MOST_PAUSE_SECONDS = 0.05  # busy with other programs; a thread of a person may never rest
THREADS = Path("/proc/self/task")  # of this process, on Linux


def pause() -> None:
    """Wait until no other thread of this process runs or waits for a processor."""
    end = time.monotonic() + MOST_PAUSE_SECONDS
    time.sleep(PAUSE_SECONDS)
    while _are_others_at_work() and time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)


def _are_others_at_work() -> bool:
    own = str(threading.get_native_id())
    try:
        others = [thread for thread in os.listdir(THREADS) if thread != own]
    except OSError:
        return False
    return any(_state_of(thread) == "R" for thread in others)


def _state_of(thread: str) -> str:
    """Return the letter by which Linux says what a thread does: R for running, or ready to."""
    try:
        # the name in brackets may hold anything
        return (THREADS / thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return ""


@contextlib.contextmanager
def paused_for() -> Iterator[None]:
    """Pause after each collective that Python code waits for, until its thread holds no tensor.

    Not for a timed step. For collectives of DistributedDataParallel, which C++ code waits for, the
    pause is before the next forward, as the second one makes its buckets of gradients anew. Those
    of its constructor have no pause: the thread that wakes the step could only lose its processor
    to it, and `SCHED_BATCH` is Linux's word for a thread that takes none on waking.
    """
    kind: Any = dist.Work
    replica: Any = DistributedDataParallel
    own, own_forward = kind.wait, replica.forward

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        pause()
        return out

    def wait_for(own: Any, tensor: Any) -> Any:
        out = own(tensor)
        pause()
        return out

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        pause()
        return own_forward(self, *args, **kwargs)

    kind.wait, replica.forward = wait, forward
    try:
        with waited_by(wait_for), _yielding():
            yield
    finally:
        kind.wait, replica.forward = own, own_forward


@contextlib.contextmanager
def _yielding() -> Iterator[None]:
    """Let the thread that calls this take no processor from another when it wakes, on Linux.

    A sandbox may forbid it. Then only more passes have frees that no profile sees.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return

    own = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, *own)


def unseen_free_bytes(trace: Trace) -> int:
    """Return the bytes of blocks that a trace never frees, though their addresses were used again.

    With them all blocks that are left at the end: a run drops everything that it makes.
    """
    live: dict[int, int] = {}
    unseen = 0
    for address, nbytes in zip(trace.address.tolist(), trace.nbytes.tolist(), strict=True):
        if nbytes > 0:
            unseen += live.get(address, 0)
            live[address] = nbytes
        else:
            live.pop(address, None)
    return unseen + sum(live.values())
