"""A few samples, on which a technique tries out what a model does before it changes anything."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memlab.config import StepConfig
from memlab.techniques import precision
from memlab.techniques.batch_tensors import moved
from memlab.techniques.contract import check_loss
from memlab.techniques.loss.several_losses import several_losses
from memlab.workload import Workload

NUM_SAMPLES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A model and the settings with which it is tried out.

    Attributes:
        workload: makes the samples and computes the loss.
        model: on its device.
        config: says in which formats it computes.
        device: of the model.
        set_seed: sets the seed of the step, so that every trial draws the same numbers.
    """

    workload: Workload
    model: torch.nn.Module
    config: StepConfig
    device: torch.device
    set_seed: Callable[[], None]

    def batch(self) -> Any:
        """Return two samples on the device, or one if a micro-batch has no more."""
        self.set_seed()
        batch = self.workload.make_batch(min(NUM_SAMPLES, self.config.micro_batch_size))
        return moved(precision.cast_batch(batch, self.config.precision), self.device)

    def loss(
        self, batch: Any, around: contextlib.AbstractContextManager[None] | None = None
    ) -> torch.Tensor:
        """Run the forward on a batch, within a context, and return the loss."""
        self.set_seed()
        with precision.autocast(self.config, self.device), around or contextlib.nullcontext():
            loss: torch.Tensor = self.workload.compute_loss(self.model, batch)
        if not isinstance(loss, torch.Tensor):
            several_losses(loss, self.config, {})  # which refuses what is tried with one loss
        check_loss(loss)
        return loss

    def loss_of_few(self) -> torch.Tensor:
        """Run the forward on a few samples and return the loss."""
        return self.loss(self.batch())
