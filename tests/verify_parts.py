"""What the tests of verify share."""

from memlab import StepConfig, verify
from memlab.runtime.accumulation import AccumulationEffect


def check(workload, **fields):
    return verify(workload, StepConfig(**fields), "cpu", isolate=False)


def alike():
    """Return that micro-batches give the gradient of the whole batch."""
    return AccumulationEffect(same="yes", why="a test says so")
