"""What the tests of predictions share: a prediction beside what is measured."""

import memlab
from memlab import Outcome, StepConfig, Workload
from memlab.devices.cards import resolve
from memlab.prediction.predict import predict_in_process
from tests.models import blocks

FEW_BYTES = 64  # of a model of a kilobyte a scalar is a per mille
WIDTH = 128
NARROW, DEPTH = 32, 4  # of the model whose ranks are simulated


def error_of(workload: Workload, config: StepConfig) -> float:
    predicted = memlab.predict(workload, config, "cpu")
    measured = memlab.measure(workload, config, "cpu", repeats=1, warmup=0)
    assert predicted.outcome == measured.outcome == Outcome.OK, (predicted, measured)
    assert sum(predicted.peak_by_category.values()) == predicted.peak_allocated_bytes
    assert sum(h.nbytes for h in predicted.peak_holdings) == predicted.peak_allocated_bytes
    difference = predicted.peak_allocated_bytes - measured.peak_allocated_bytes
    return 0.0 if abs(difference) <= FEW_BYTES else difference / measured.peak_allocated_bytes


def wide():
    return blocks(width=WIDTH, depth=3)


def predicted(config, device="cpu", workload=None, seed=0):
    return predict_in_process(
        workload or wide(), config, resolve(device), seed=seed, memory_limit=None,
        report=lambda progress: None,
    ).result  # fmt: skip


def assert_predicted(workload, config, *, within=0, seed=0):
    """Hold a prediction against a measurement, both of this process, and return the two."""
    found = predicted(config, workload=workload, seed=seed)
    options = {"repeats": 1, "warmup": 0, "seed": seed, "isolate": False}
    real = memlab.measure(workload, config, "cpu", **options)
    assert found.outcome == real.outcome == Outcome.OK, (found.message, real.message)
    assert abs(found.peak_allocated_bytes - real.peak_allocated_bytes) <= within
    return found, real


def simulated(workload=None, **fields):
    """Return what is predicted of a step on a CPU, of several ranks or of one process."""
    model = workload or blocks(width=NARROW, depth=DEPTH)
    found = predicted(StepConfig(**fields), workload=model)
    assert found.outcome == Outcome.OK, found.message
    return found
