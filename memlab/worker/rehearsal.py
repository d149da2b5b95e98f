"""A small measurement or prediction that a worker runs before any code of a person's.

PyTorch initialises much when it is first used, and a prediction registers a device permanently.
After a rehearsal these changes are not mistaken for changes by a person's code. A worker either
measures or predicts, never both: autograd counts the devices at its first backward, so the device
that predictions need must exist by then.
"""

import importlib

import torch

from memlab.config import StepConfig
from memlab.measuring import measure
from memlab.running import Progress
from memlab.torch_private.compiler import DYNAMO
from memlab.workload import Workload

LATE_MODULES = ("cloudpickle", DYNAMO, "torch.utils.serialization")


def import_late_modules() -> None:
    """Import the modules that the first step would import; this touches no device."""
    for name in LATE_MODULES:
        importlib.import_module(name)


def rehearse(*, is_predicting: bool) -> None:
    """Measure or predict a linear layer."""
    workload = Workload(
        name="rehearsal",
        build_model=lambda: torch.nn.Linear(2, 2),
        make_batch=lambda n: torch.ones(n, 2),
        compute_loss=lambda model, batch: model(batch).mean(),
    )
    config = StepConfig(batch_size=2)
    if is_predicting:
        from memlab.devices.cards import resolve
        from memlab.predicting.predict import (
            predict_in_process,  # late: not for a worker that measures
        )

        predict_in_process(
            workload, config, resolve("cpu"), seed=0, memory_limit=None, report=_say_nothing
        )
        # a recorded TF32 step does the same; the first time it writes down what was the default
        torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
        return

    cpu = torch.device("cpu")
    measure.measure_in_process(
        workload, config, cpu, repeats=1, warmup=0, seed=0, memory_limit=None, report=_say_nothing
    )


def _say_nothing(progress: Progress) -> None:
    """Ignore the progress of a rehearsal."""
