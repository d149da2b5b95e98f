"""A model that goes wrong in one of the ranks that train it."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

from memlab import Workload

WIDTH = 64


class Faulty(nn.Module):
    """Blocks; in its second forward rank 1 does something."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.num_calls = fault, 0
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        )

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls == 2 and dist.is_initialized() and dist.get_rank() == 1:
            FAULTS[self.fault]()
        return self.blocks(x)


def wait_for_ever():
    while True:
        time.sleep(0.1)


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def take_too_much():
    torch.empty(10**15)


def raise_an_error():
    raise ValueError("only here")


FAULTS = {
    "": lambda: None,
    "hang": wait_for_ever,
    "kill": kill_myself,
    "memory": take_too_much,
    "error": raise_an_error,
    "exit": lambda: os._exit(3),
}


def faulty(fault=""):
    """The workload of a model that goes wrong in one way."""
    return Workload(
        name=f"faulty-{fault or 'not'}",
        build_model=lambda: Faulty(fault),
        make_batch=lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )
