"""What the tests of verify share."""

from memlab import StepConfig, verify


def check(workload, **fields):
    return verify(workload, StepConfig(**fields), "cpu", isolate=False)
