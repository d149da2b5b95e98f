"""What a checkpoint of a step holds: its weights, buffers and optimizer state, by name."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from memlab.config import Sharding, StepConfig
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


# How large the lists are that ranks send one another to save a checkpoint together.
#
# `torch.distributed.checkpoint` pickles them, and each becomes a tensor where collectives work. The
# steps of a save, with the four lists:
#
#     every rank -> rank 0       plan: a line for each tensor that the rank holds
#     rank 0     -> every rank   share: the lines that the rank is to write, no more than its plan
#     every rank -> rank 0       results: where in its files each of them is, shorter lines
#     rank 0     -> all ranks    metadata: all parts of all tensors, and where they are
#
# So a rank never holds more than plans and metadata. A line is some bytes and the name of its
# tensor. The bytes were fitted to such lists of five models with SGD and AdamW in 1 to 1,024 ranks
# (torch 2.13), which they meet within 5 %, and 9 % where there are fewer than ten tensors. Source:
# torch/distributed/checkpoint/utils.py.

BYTES_OF_PLAN, BYTES_OF_LINE = 580, 139
BYTES_OF_METADATA, BYTES_OF_ENTRY = 400, 182
BYTES_OF_RANK = 210  # in the metadata, of a further rank
BYTES_OF_PARTS, BYTES_OF_PART = 220, 118  # of the same where tensors are divided, and of each


def plan_bytes(saved: Sequence[SavedTensor]) -> int:
    """Return about how large the plan of a rank is that holds these tensors."""
    return BYTES_OF_PLAN + sum(BYTES_OF_LINE + len(tensor.name) for tensor in saved)


def metadata_bytes(saved: Sequence[SavedTensor], num_ranks: int) -> int:
    """Return about how large the metadata of this many ranks are, by what one of them holds."""
    divided = [tensor for tensor in saved if tensor.is_divided]
    num_parts = max((num_ranks // tensor.num_holders for tensor in divided), default=num_ranks)
    alone = sum(BYTES_OF_ENTRY + 2 * len(tensor.name) for tensor in saved)
    grows = BYTES_OF_RANK + (BYTES_OF_PARTS if divided else 0)
    grows += sum(BYTES_OF_PART + len(tensor.name) for tensor in divided)
    return BYTES_OF_METADATA + alone + grows * (num_parts - 1)


def of_random_state() -> SavedTensor:
    """Return the state of the random generator; each rank writes its own."""
    shape = tuple(torch.get_rng_state().shape)
    return SavedTensor(
        name=f"{RANDOM}0", shape=shape, own_shape=shape, dtype=torch.uint8, is_divided=False,
        num_holders=1, is_on_device=False, is_view=False,
    )  # fmt: skip


def most_written(
    saved: Sequence[SavedTensor],
    num_ranks: int,
    size_of: Callable[[list[SavedTensor]], int],
) -> list[SavedTensor]:
    """Return what the rank writes that writes most, if all hold tensors like those of one rank.

    `size_of` gives the size of what a rank writes, a list of tensors, by which ranks are compared.
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
        most: list[SavedTensor] = max(copies, key=size_of)
        written += most
    return written


# What a rank allocates, beside its training state, while it saves a checkpoint.
#
# Between two updates a rank holds its weights, its optimizer state and on a CPU its batch.
# To save, it takes more, in this order:
#
# - the state of the random generator, from the first to the last instant;
# - on rank 0 the lists of all ranks, twice as large over Gloo, which gathers into a tensor
#   of its own: little for eight ranks, hundreds of MB for a thousand;
# - copies of what it writes: on a CPU only of tensors that are views of larger ones, such
#   as a part that `fully_shard` has padded; on a card of all its tensors, in the host's
#   memory. The writer (of torch 2.13) makes them one after the other, but keeps them until
#   its file is complete;
# - the metadata, in every rank.
#
# Nothing is gathered whole: each rank writes its parts. Not counted: Python's own objects,
# of which the lists are made, and what the system caches of files.

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


def added_by_saving(
    saved: Sequence[SavedTensor], config: StepConfig, *, is_first: bool, is_cpu: bool
) -> AddedBySaving:
    """Return what one rank allocates while it saves.

    Args:
        saved: its tensors.
        config: of the step.
        is_first: whether the rank is rank 0, which plans for all.
        is_cpu: whether the ranks train on CPUs, over Gloo, or on cards, over NCCL.
    """
    num_ranks, random = config.world_size, of_random_state()
    is_alone, listed = config.sharding is Sharding.NONE, (*saved, random)
    plan = 0 if is_alone else plan_bytes(listed)
    metadata = 0 if is_alone else metadata_bytes(listed, num_ranks)
    # gathered: what is sent, and on rank 0 what arrives, over Gloo in one piece at first
    num_arriving = (2 if is_cpu else 1) * num_ranks if is_first else 0
    exchanged = max((1 + num_arriving) * plan, metadata)
    copied = [t for t in saved if t.is_view or (t.is_on_device and not is_cpu)]
    staged = _bytes_of(most_written(copied, num_ranks, _bytes_of))
    if not is_cpu:
        host = random.nbytes + max(staged, plan, metadata)
        return AddedBySaving(device_bytes=exchanged, host_bytes=host)

    # where the parts of a tensor begin is counted in a tensor of 64-bit numbers
    rows = max((t.shape[0] for t in saved if t.is_divided and t.shape), default=0)
    most = max(exchanged, staged, POSITION_BYTES * rows)
    return AddedBySaving(device_bytes=random.nbytes + most, host_bytes=None)


def _bytes_of(tensors: Sequence[SavedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
