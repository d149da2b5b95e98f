"""Optimizers, with PyTorch's own defaults: on CUDA that is the foreach implementation."""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from memlab.config import Optimizer, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.source import UPDATE, Source

LEARNING_RATE = 1e-3
MOMENTUM = 0.9
SCHEDULE_STEPS = 1000  # length of the cosine; memory and time of a step do not depend on it


def check(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that is named but not built."""
    if optimizer in (Optimizer.ADAFACTOR, Optimizer.ADAMW_8BIT):
        raise UnsupportedError(
            f"optimizer={str(optimizer)!r} is not built yet; "
            "use 'sgd-momentum' for a smaller optimizer state than 'adamw'"
        )


def make(
    model: torch.nn.Module, optimizer: Optimizer
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """Return the optimizer over the trainable parameters, and its schedule if it has one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    match optimizer:
        case Optimizer.SGD:
            return torch.optim.SGD(parameters, lr=LEARNING_RATE), None
        case Optimizer.SGD_MOMENTUM:
            sgd = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
            return sgd, CosineAnnealingLR(sgd, T_max=SCHEDULE_STEPS)
        case Optimizer.ADAM:
            return torch.optim.Adam(parameters, lr=LEARNING_RATE), None
        case _:
            return torch.optim.AdamW(parameters, lr=LEARNING_RATE), None


def source(config: StepConfig) -> Source:
    """Return the lines that make the optimizer, and its schedule."""
    made = {
        Optimizer.SGD: f"SGD(parameters, lr={LEARNING_RATE})",
        Optimizer.SGD_MOMENTUM: f"SGD(parameters, lr={LEARNING_RATE}, momentum={MOMENTUM})",
        Optimizer.ADAM: f"Adam(parameters, lr={LEARNING_RATE})",
        Optimizer.ADAMW: f"AdamW(parameters, lr={LEARNING_RATE})",
    }
    lines = (f"optimizer = torch.optim.{made[config.optimizer]}",)
    if config.optimizer is not Optimizer.SGD_MOMENTUM:
        return Source(optimizer=lines)
    schedule = (
        f"scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max={SCHEDULE_STEPS})"
    )
    return Source(optimizer=(*lines, schedule), update=(UPDATE, "scheduler.step()"))
