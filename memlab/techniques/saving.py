"""What a checkpoint of a step holds: its weights, buffers and optimizer state, by name."""

from __future__ import annotations

import functools
import heapq
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memlab._util.torch_private.checkpoints import begin_of_files, place_in_file
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
# `torch.distributed.checkpoint` pickles them, and each becomes a tensor where collectives
# work. The steps of a save, with the four lists:
#
#     every rank -> rank 0    plan: a line for each tensor that the rank holds rank 0 ->
# every rank    share: the lines that the rank is to write; copies are written once every
# rank -> rank 0    results: where in its files the rank has written each of them rank 0 ->
# all ranks     metadata: all parts of all tensors, and where they are
#
# The sizes are those of such lists, filled from the tensors of one rank. Lists of other
# ranks have other numbers in them, which changes some bytes. The metadata grow with the
# number of ranks by what a second rank adds to those of the first. Source:
# torch/distributed/checkpoint/utils.py.

FRAME_BYTES = 1200  # of the zip file that torch.save makes of each tensor, about


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Bytes of the lists of one save; of those that differ between ranks the longest."""

    plan: int = 0
    share: int = 0
    results: int = 0
    metadata: int = 0


def sizes_of_messages(saved: Sequence[SavedTensor], num_ranks: int) -> Messages:
    """Return the bytes of the lists with which this many ranks save."""
    return _sizes_of_messages((*saved, of_random_state()), num_ranks)


@functools.lru_cache(maxsize=8)  # a search predicts many steps that save the same
def _sizes_of_messages(saved: tuple[SavedTensor, ...], num_ranks: int) -> Messages:
    plan, share = _plan(saved), _plan(most_written(saved, num_ranks, len))
    share = replace(share, storage_data=begin_of_files("__0_"))
    num_parts = max((num_ranks // t.num_holders for t in saved if t.is_divided), default=num_ranks)
    alone = _pickled(_metadata(saved, num_parts=1))
    grows = _pickled(_metadata(saved, num_parts=2)) - alone
    return Messages(
        plan=_pickled(plan),
        share=_pickled(share),
        results=_pickled(_results(share.items)),
        metadata=alone + grows * (num_parts - 1),
    )


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
    size_of: Callable[[Any], int],
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
        written += max(copies, key=size_of)
    return written


def _plan(saved: Sequence[SavedTensor]) -> Any:
    """Return the lines of tensors, and of the one text that is saved with them."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

    text = WriteItem(index=MetadataIndex(PROGRESS), type=WriteItemType.BYTE_IO)
    names = {name: (name,) for name in (*(tensor.name for tensor in saved), PROGRESS)}
    return SavePlan([*map(_line, saved), text], planner_data=names)


def _line(saved: SavedTensor, part: int = 0) -> Any:
    """Return the line of one tensor, or of another part of it."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    begin = [part * size for size in saved.own_shape[:1]] + [0] * (len(saved.own_shape) - 1)
    offsets, sizes = torch.Size(begin), torch.Size(saved.own_shape)
    return WriteItem(
        index=MetadataIndex(saved.name, offsets),
        type=WriteItemType.SHARD if saved.is_divided else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=saved.dtype),
            size=torch.Size(saved.shape),
        ),
    )


def _results(lines: Sequence[Any], part: int = 0) -> list[Any]:
    """Return what a rank says of what it has written, one tensor after the other into a file."""
    from torch.distributed.checkpoint.storage import WriteResult

    file, at, found = f"__{part}_0.distcp", 0, []
    for line in lines:
        about = line.tensor_data
        nbytes = about.chunk.sizes.numel() * about.properties.dtype.itemsize if about else 0
        nbytes += FRAME_BYTES
        found.append(WriteResult(line.index, nbytes, place_in_file(file, at, nbytes)))
        at += nbytes
    return found


def _metadata(saved: Sequence[SavedTensor], num_parts: int) -> Any:
    """Return what is written down of all parts of all tensors."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    of_tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for part in range(num_parts):
        lines = [
            _line(replace(tensor, name=f"{RANDOM}{part}") if is_random else tensor, part)
            for tensor in saved
            for is_random in [tensor.name.startswith(RANDOM)]
            if part == 0 or tensor.is_divided or is_random
        ]
        for line in lines:
            about = line.tensor_data
            of_tensors.setdefault(
                line.index.fqn, TensorStorageMetadata(about.properties, about.size, chunks=[])
            ).chunks.append(about.chunk)
        received = pickle.loads(pickle.dumps(_results(lines, part)))
        places |= {result.index: result.storage_data for result in received}
    return Metadata(
        of_tensors,
        planner_data={name: (name,) for name in of_tensors},
        storage_data=places,
        storage_meta=StorageMeta(),
    )


def _pickled(value: Any) -> int:
    return len(pickle.dumps(value))


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
    num_ranks = config.world_size
    is_alone = config.sharding is Sharding.NONE
    sent = Messages() if is_alone else sizes_of_messages(saved, num_ranks)
    # gathered: what is sent, and on rank 0 what arrives, over Gloo in one piece at first
    num_arriving = (2 if is_cpu else 1) * num_ranks if is_first else 0
    exchanged = max(
        (1 + num_arriving) * max(sent.plan, sent.share, sent.results),
        sent.metadata,
    )
    random_state = of_random_state().nbytes
    copied = [t for t in saved if t.is_view or (t.is_on_device and not is_cpu)]
    staged = _bytes_of(most_written(copied, num_ranks, _bytes_of))
    if not is_cpu:
        host = random_state + max(staged, sent.plan, sent.metadata)
        return AddedBySaving(device_bytes=exchanged, host_bytes=host)

    # where the parts of a tensor begin is counted in a tensor of 64-bit numbers
    rows = max((t.shape[0] for t in saved if t.is_divided and t.shape), default=0)
    most = max(exchanged, staged, POSITION_BYTES * rows)
    return AddedBySaving(device_bytes=random_state + most, host_bytes=None)


def _bytes_of(tensors: Sequence[SavedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
