"""Threads that carry out collectives, and frees in them that no profile sees.

On a CPU, Gloo's threads hold the tensors of a collective until shortly after it is done. If the
step drops such a tensor in this moment, the thread is the last to hold it, and frees it outside of
any profile: the trace then counts its bytes to the end. So a metered step waits a little after each
collective, and a trace says how many bytes it may count too much.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memlab.torch_private.ranks import waited_by
from memlab.trace import Trace

PAUSE_SECONDS = 0.003  # a thread that has to wait for a processor needs as long


@contextlib.contextmanager
def paused_for() -> Iterator[None]:
    """Pause after each collective that Python code waits for, until its thread holds no tensor.

    Not for a timed step. For collectives of DistributedDataParallel, which C++ code waits for, the
    pause is before the next forward, as the second one makes its buckets of gradients anew.
    """
    kind: Any = dist.Work
    replica: Any = DistributedDataParallel
    own, own_forward = kind.wait, replica.forward

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        time.sleep(PAUSE_SECONDS)
        return out

    def wait_for(own: Any, tensor: Any) -> Any:
        out = own(tensor)
        time.sleep(PAUSE_SECONDS)
        return out

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(PAUSE_SECONDS)
        return own_forward(self, *args, **kwargs)

    kind.wait, replica.forward = wait, forward
    try:
        with waited_by(wait_for):
            yield
    finally:
        kind.wait, replica.forward = own, own_forward


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
