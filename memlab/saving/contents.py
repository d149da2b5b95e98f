"""What a checkpoint of a step holds: its weights, buffers and optimizer state, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from memlab.errors import UnsupportedError
from memlab.step import Step
from memlab.techniques.optimizers.optimizers import state_of
from memlab.techniques.sharding.ranks import local

WEIGHT, STATE, RANDOM, PROGRESS = "weight ", "state ", "random ", "progress"
"""How the names in a checkpoint begin; the first two are followed by the path of a parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint, as one rank holds it.

    Attributes:
        name: in the checkpoint.
        shape: of the whole tensor.
        own_shape: of what this rank has of it.
        dtype: number format.
        is_divided: whether other ranks have other parts of it.
        num_holders: how many ranks hold what this rank has; one of them writes it.
        is_on_device: whether it is on the device of the step.
        is_view: whether its memory holds more than itself, so that a copy of it is written.
    """

    name: str
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    dtype: torch.dtype
    is_divided: bool
    num_holders: int
    is_on_device: bool
    is_view: bool

    @property
    def nbytes(self) -> int:
        """Bytes of what this rank has."""
        return math.prod(self.own_shape) * self.dtype.itemsize

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def weights_in(step: Step) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; tensors that share their memory.

    Raises:
        UnsupportedError: checkpoints of such a step are not implemented.
    """
    if step.engine is not None:
        raise UnsupportedError(
            f"checkpoints with sharding={str(step.config.sharding)!r} are not implemented; use "
            f"sharding={str(step.config.sharding).removeprefix('deepspeed-')!r}"
        )
    if step.config.offload_parameters:
        raise UnsupportedError(
            "checkpoints with offload_parameters=True are not implemented yet; use "
            "offload_parameters=False"
        )
    of_loss = {**step.loss.parameters, **step.loss.buffers}
    every = (*step.model.state_dict().items(), *of_loss.items())
    return {WEIGHT + path: value for path, value in every if isinstance(value, torch.Tensor)}


def states_in(step: Step) -> dict[str, torch.Tensor]:
    """Return the optimizer state that this rank keeps, by path and name."""
    held = state_of(step.optimizer)
    return {
        f"{STATE}{path}: {key}": value
        for path, parameter in step.with_loss.named_parameters()
        for key, value in held.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def saved_tensors(step: Step) -> tuple[SavedTensor, ...] | None:
    """Return the tensors of a recorded step's checkpoint; None if they are not known."""
    try:
        weights = weights_in(step)
    except Exception:  # it is not saved, or the model's own `state_dict` needs values
        return None
    states = states_in(step)
    if any(tensor.layout is not torch.strided for tensor in (*weights.values(), *states.values())):
        return None

    # an optimizer of shares keeps whole states, each in one rank
    num_state_holders = 1 if hasattr(step.optimizer, "optim") else step.config.world_size
    with torch.no_grad():  # else asking for a part would be an operator of autograd
        found = _facts(weights, step, step.config.world_size)
        found += _facts(states, step, num_state_holders)
    return tuple(found)


def _facts(tensors: Mapping[str, torch.Tensor], step: Step, num_holders: int) -> list[SavedTensor]:
    """Return facts of tensors that this many ranks hold, if they are not divided."""
    found = []
    for name, tensor in tensors.items():
        own = local(tensor)
        num_alike = _num_copies(tensor) if hasattr(tensor, "placements") else num_holders
        saved = SavedTensor(
            name=name,
            shape=tuple(tensor.shape),
            own_shape=tuple(own.shape),
            dtype=tensor.dtype,
            is_divided=hasattr(tensor, "placements") and num_alike < step.config.world_size,
            num_holders=num_alike,
            is_on_device=own.device.type == step.device.type,
            is_view=own.untyped_storage().nbytes() != own.nbytes,
        )
        found.append(saved)
    return found


def _num_copies(tensor: torch.Tensor) -> int:
    """Return how many ranks hold the same part of a DTensor."""
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    copied = [mesh.size(dim) for dim, each in enumerate(placements) if each.is_replicate()]
    return math.prod(copied)
