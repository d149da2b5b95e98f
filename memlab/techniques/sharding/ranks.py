"""The ranks that train one model: who this process is among them, and what is its own.

Its own are the model as it runs it, its part of the batch, and what it holds of a tensor.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from memlab._util.torch_private.tensors import is_wrapper
from memlab.config import FULLY_SHARDED as FULLY_SHARDED
from memlab.config import Sharding, StepConfig
from memlab.errors import UnsupportedError, WorkloadError

if TYPE_CHECKING:
    from memlab.techniques.sharding.deepspeed_engine import Engine

REPLICATED = (Sharding.DDP, Sharding.ZERO1)  # each rank holds all weights, gradients and buckets
SEEDS_BETWEEN_RANKS = 1_000_003  # more than any run has steps, so that no two draw alike
MOST_SIMULATED_PARTS = 16  # of a batch; all parts of a batch are made alike


@dataclass(frozen=True, kw_only=True, slots=True)
class Divided:
    """The layers of a model, divided over ranks.

    Attributes:
        mesh: of all ranks, with a dimension "tensor".
        layers: the role of each and the dimension along which its weight is divided, by its path;
            `*` in a path is any number.
        notes: what a reader must know about which layers are divided.
    """

    mesh: Any
    layers: Mapping[str, tuple[str, int | None]]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """A model as one of several ranks runs it.

    Attributes:
        run_model: what runs instead of the model: it communicates with the other ranks.
        part: which part of the batch this rank computes, from 0.
        num_parts: into how many equal parts a batch is divided.
        in_micro_batch: returns the context of the forward and backward of a micro-batch, given
            whether the ranks average their gradients after it.
        layers: those that are divided, as in `Divided`.
        notes: what a reader must know about how the model is divided.
        engine: computes gradients and updates in place of autograd and the optimizer; None
            without DeepSpeed.
        group: the process group of the ranks that hold copies of the same; None if all do.
    """

    run_model: torch.nn.Module
    part: int
    num_parts: int
    in_micro_batch: Callable[[bool], contextlib.AbstractContextManager[None]]
    layers: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    engine: "Engine | None" = None
    group: Any = None

    def seed_of(self, seed: int) -> int:
        """Return the seed of a step in this rank."""
        return seed_of(seed, self.part)

    @property
    def num_made(self) -> int:
        """How many parts of a batch this rank makes, to know what they weigh: all, if it is real.

        The batch of thousands of simulated ranks would take longer to make than to train on.
        """
        is_simulated = dist.is_initialized() and dist.get_backend() == "fake"
        return min(self.num_parts, MOST_SIMULATED_PARTS) if is_simulated else self.num_parts


def check_group(config: StepConfig) -> None:
    """Raise UnsupportedError unless this process is one of as many ranks as the config asks for."""
    here = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if here == config.world_size:
        return

    found = "no process group is open here" if here is None else f"this group has {here} ranks"
    raise UnsupportedError(
        f"sharding={str(config.sharding)!r} needs a process group of world_size="
        f"{config.world_size} ranks, and {found}; use memlab.measure, which starts the ranks, or "
        f"run this file with torchrun --nproc-per-node={config.world_size} and call "
        "torch.distributed.init_process_group() first"
    )


def check_weights(model: torch.nn.Module, config: StepConfig) -> None:
    """Raise UnsupportedError if a quantized weight cannot be sent or divided as one tensor."""
    divides = config.sharding in FULLY_SHARDED or is_tensor_parallel(config)
    said = f"sharding={str(config.sharding)!r}"
    for name, weight in model.named_parameters():
        kind = type(weight).__name__
        if is_wrapper(type(weight)):
            raise UnsupportedError(
                f"{said} sends each weight as one tensor, and {name} is made of several ({kind}), "
                "whose library has no function for that; allowed is sharding='none', or a base "
                "whose weights are plain tensors, such as 'bf16' or 'nf4'"
            )
        if hasattr(weight, "CB") and divides:
            raise UnsupportedError(
                f"{said} divides each weight, and {name} is one in 8 bits of bitsandbytes, which "
                "loses its scales when it is divided; allowed is sharding='ddp' or 'zero1', or "
                "another base, such as 'bf16' or 'nf4'"
            )


def part_of(config: StepConfig, rank: int) -> int:
    """Return which part of the batch a rank computes. Tensor parallel ranks share one."""
    return rank // (config.world_size // config.data_parallel_size)


def is_tensor_parallel(config: StepConfig) -> bool:
    """Return whether several ranks divide each layer."""
    is_of_all = config.sharding is Sharding.TENSOR
    return (config.world_size if is_of_all else config.tensor_parallel_size) > 1


def seed_of(seed: int, part: int) -> int:
    """Return the seed of a step in the rank that computes this part of the batch.

    The ranks must not drop out the same units of different samples.
    """
    return seed + SEEDS_BETWEEN_RANKS * part


def part_sizes(config: StepConfig, sharded: Sharded) -> list[int]:
    """Return the samples of every part of a batch that a rank makes."""
    return [config.rank_batch_size] * sharded.num_made


def own_weights(weights: Sequence[float], sharded: Sharded) -> list[float]:
    """Return the weights of this rank's micro-batches, given those of all ranks in order.

    The ranks' gradients are averaged, so that each weight is multiplied by their number: the sum
    over all micro-batches, which one process would compute, is the average of the ranks' sums.

    Raises:
        WorkloadError: a micro-batch has no loss terms. One process would skip it, but all ranks
            must run the same collectives.
    """
    if not min(weights) > 0.0:
        raise WorkloadError(
            "num_loss_terms counts no terms in one of the micro-batches, which the ranks of a "
            "sharded step cannot skip; use larger micro-batches, or samples that all have terms"
        )
    count = len(weights) // sharded.num_made
    first = sharded.part % sharded.num_made * count
    return [weight * sharded.num_made for weight in weights[first : first + count]]


def local(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor: its part of a DTensor, else the tensor itself.

    A parameter of DeepSpeed's stage 3 has its part apart, and is empty itself.
    """
    tensor = getattr(tensor, "ds_tensor", tensor)
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def whole(tensor: Any) -> torch.Tensor:
    """Return a tensor with the parts of all ranks; all of them must ask at once."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def divided_like(tensor: torch.Tensor, target: Any) -> torch.Tensor:
    """Return a whole tensor divided over the ranks as another is; without communication."""
    if not hasattr(target, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # 0.3 s that few need

    mesh = target.device_mesh
    divided = distribute_tensor(
        tensor.to(mesh.device_type), mesh, target.placements, src_data_rank=None
    )
    return divided.to(target.device)  # which is the host if the parts are offloaded
