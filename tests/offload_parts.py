"""What the tests of offloading share: a chain of layers, and streams that copy late."""

import torch
from torch import nn

import memlab
from memlab import StepConfig, Workload

WIDTH, DEPTH, SAMPLES = 256, 6, 4096


def tanhs() -> nn.Module:
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def chain(**fields) -> Workload:
    """Linear and tanh in turn: a tanh saves its output, which the next linear layer saves too."""
    fields = {
        "name": "chain",
        "build_model": tanhs,
        "make_batch": lambda n: torch.randn(n, WIDTH),
        "compute_loss": lambda model, x: model(x).square().mean(),
        **fields,
    }
    return Workload(**fields)


def predicted(workload, **fields):
    config = StepConfig(**{"batch_size": SAMPLES, "optimizer": "sgd", **fields})
    result = memlab.predict(workload, config, device="h200")
    assert result.outcome is memlab.Outcome.OK, result.message
    return result


class Queue:
    """A stream whose copies are made as late as they may be: when something waits for them."""

    active = None

    def __init__(self):
        self.waiting, self.device = [], torch.device("cpu")

    def __enter__(self):
        Queue.active = self

    def __exit__(self, *_):
        Queue.active = None

    def wait_stream(self, _):
        """Come after what has been queued: on the main stream all is done at once."""

    def record_event(self):
        return self, len(self.waiting)

    def wait_event(self, event):
        queue, count = event
        for copy in queue.waiting[:count]:
            copy()
        queue.waiting[:count] = [lambda: None] * count
