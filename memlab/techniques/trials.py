"""A few samples, on which a technique tries out what a model does before it changes anything."""

import contextlib
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from memlab.config import StepConfig
from memlab.errors import WorkloadError
from memlab.techniques import precision
from memlab.techniques.batches import moved
from memlab.techniques.loss.several_losses import several_losses
from memlab.workload import Workload

# What a step requires of the model and of the loss that a workload's functions return.

_built: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def check_shapes(model: torch.nn.Module) -> None:
    """Raise WorkloadError if a module waits for a first sample to know its sizes."""
    if any(map(is_lazy, itertools.chain(model.parameters(), model.buffers()))):
        raise WorkloadError(
            f"{type(model).__name__} has parameters or buffers without a shape yet; call it once "
            "on a sample in build_model"
        )


def check_model(model: Any) -> None:
    """Raise WorkloadError if `build_model` returned something that cannot be trained."""
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(
            f"build_model returned {type(model).__name__}; return a new torch.nn.Module"
        )

    name = type(model).__name__
    if model in _built or any(p.grad is not None for p in model.parameters()):
        raise WorkloadError(
            f"build_model returned a {name} that has been trained already; return a new one each "
            "time, for instance copy.deepcopy(model)"
        )

    _built.add(model)
    check_shapes(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise WorkloadError(f"{name} has no trainable parameter; give it one, or set requires_grad")


def check_loss(loss: Any) -> None:
    """Raise WorkloadError if `compute_loss` returned something that backward cannot begin at."""
    if not isinstance(loss, torch.Tensor):
        raise WorkloadError(
            f"compute_loss returned {type(loss).__name__}; return a scalar tensor, "
            "the mean over the samples"
        )

    if loss.ndim != 0:
        raise WorkloadError(
            f"compute_loss returned a tensor of shape {tuple(loss.shape)}; allowed is a scalar "
            "(shape ()): return loss.mean()"
        )

    if not loss.requires_grad:
        raise WorkloadError(
            "compute_loss returned a loss that does not depend on the model's parameters; compute "
            "it from model(...) without torch.no_grad() or .detach()"
        )


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
