"""What a rank allocates, beside its training state, while it saves a checkpoint.

Between two updates a rank holds its weights, its optimizer state and on a CPU its batch. To save,
it takes more, in this order:

- the state of the random generator, from the first to the last instant;
- on rank 0 the lists of all ranks, twice as large over Gloo, which gathers into a tensor of its
  own: little for eight ranks, hundreds of MB for a thousand;
- copies of what it writes: on a CPU only of tensors that are views of larger ones, such as a part
  that `fully_shard` has padded; on a card of all its tensors, in the host's memory. The writer
  (of torch 2.13) makes them one after the other, but keeps them until its file is complete;
- the metadata, in every rank.

Nothing is gathered whole: each rank writes its parts. Not counted: Python's own objects,
of which the lists are made, and what the system caches of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memlab.config import Sharding, StepConfig
from memlab.saving.contents import SavedTensor
from memlab.saving.messages import Messages, most_written, of_random_state, sizes_of_messages

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
