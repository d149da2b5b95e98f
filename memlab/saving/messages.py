"""How large the lists are that ranks send one another to save a checkpoint together.

`torch.distributed.checkpoint` pickles them, and each becomes a tensor where collectives work. The
steps of a save, with the four lists:

    every rank -> rank 0    plan: a line for each tensor that the rank holds
    rank 0 -> every rank    share: the lines that the rank is to write; copies are written once
    every rank -> rank 0    results: where in its files the rank has written each of them
    rank 0 -> all ranks     metadata: all parts of all tensors, and where they are

The sizes are those of such lists, filled from the tensors of one rank. Lists of other ranks have
other numbers in them, which changes some bytes. The metadata grow with the number of ranks by what
a second rank adds to those of the first. Source: torch/distributed/checkpoint/utils.py.
"""

from __future__ import annotations

import functools
import heapq
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memlab.saving.contents import PROGRESS, RANDOM, SavedTensor
from memlab.torch_private.checkpoints import begin_of_files, place_in_file

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
