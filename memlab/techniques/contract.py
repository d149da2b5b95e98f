"""What a step requires of the model and of the loss that a workload's functions return."""

import weakref
from typing import Any

import torch

from memlab.errors import WorkloadError

_built: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


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
    if any(isinstance(p, torch.nn.UninitializedParameter) for p in model.parameters()):
        raise WorkloadError(
            f"{name} has parameters without a shape yet; call it once on a sample in build_model"
        )
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
