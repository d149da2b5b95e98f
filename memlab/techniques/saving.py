"""What a checkpoint of a step holds: its weights, buffers and optimizer state, by name."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from memlab.errors import UnsupportedError
from memlab.techniques.optimizers.optimizers import state_of
from memlab.techniques.sharding.ranks import local
from memlab.techniques.step import Step

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


def most_written(saved: Sequence[SavedTensor]) -> list[SavedTensor]:
    """Return what the rank writes that writes most bytes, if all hold tensors like those of one.

    What several ranks hold is written once, by the rank that has the fewest bytes to write so far.
    `torch.distributed.checkpoint` counts whole tensors for that, and rank 0 first.
    """
    written = [tensor for tensor in saved if tensor.num_holders == 1]
    head_start = sum(tensor.whole_nbytes for tensor in written)
    for num_holders in sorted({t.num_holders for t in saved} - {1}):
        copies: list[list[SavedTensor]] = [[] for _ in range(num_holders)]
        planned = [(0 if rank else head_start, rank) for rank in range(num_holders)]
        heapq.heapify(planned)
        for tensor in saved:
            if tensor.num_holders == num_holders:
                size, rank = planned[0]
                heapq.heapreplace(planned, (size + tensor.whole_nbytes, rank))
                copies[rank].append(tensor)
        written += max(copies, key=bytes_of)
    return written


# What a rank allocates, beside its training state, while it saves a checkpoint.
#
# Between two updates a rank holds its weights, its optimizer state and on a CPU its batch.
# To save, it takes more, in this order:
#
# - the state of the random generator, from the first to the last instant;
# - copies of what it writes: on a CPU only of tensors that are views of larger ones, such
#   as a part that `fully_shard` has padded; on a card of all its tensors, in the host's
#   memory. The writer (of torch 2.13) makes them one after the other, but keeps them until
#   its file is complete.
#
# Nothing is gathered whole: each rank writes its parts. Not counted: the lists that ranks send
# one another of what each writes (little for eight ranks, hundreds of MB in rank 0 for a
# thousand), Python's own objects, and what the system caches of files.

POSITION_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedBySaving:
    """What saving allocates beside what is live between two updates.

    Attributes:
        device_bytes: on the device of the step.
        host_bytes: in host memory; None on a CPU, where that is the device.
    """

    device_bytes: int
    host_bytes: int | None


def added_by_saving(saved: Sequence[SavedTensor], *, is_cpu: bool) -> AddedBySaving:
    """Return what one rank allocates while it saves its tensors, on a CPU or on a card."""
    random = torch.get_rng_state().nbytes
    if not is_cpu:
        staged = bytes_of(most_written([t for t in saved if t.is_view or t.is_on_device]))
        return AddedBySaving(device_bytes=0, host_bytes=random + staged)

    staged = bytes_of(most_written([t for t in saved if t.is_view]))
    # where the parts of a tensor begin is counted in a tensor of 64-bit numbers
    rows = max((t.shape[0] for t in saved if t.is_divided and t.shape), default=0)
    return AddedBySaving(device_bytes=random + max(staged, POSITION_BYTES * rows), host_bytes=None)


def bytes_of(tensors: Sequence[SavedTensor]) -> int:
    """Return the bytes of what one rank has of these tensors."""
    return sum(tensor.nbytes for tensor in tensors)
