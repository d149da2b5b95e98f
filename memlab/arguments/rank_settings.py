"""`Sharding`: the ways in which several processes train one model, and the sizes each allows.

A rank is one process with one device. Ranks that compute different samples are data parallel: each
gets an equal part of the batch, and the gradients are averaged over them. How a strategy is carried
out is in `techniques/sharding/`.
"""

from enum import StrEnum
from typing import Any

from memlab.errors import ConfigError

MOST_RANKS = 4096


class Sharding(StrEnum):
    """What each rank holds of a model that several ranks train.

    - none: one process trains by itself.
    - ddp: every rank holds everything, and gradients are averaged (`DistributedDataParallel`).
    - zero1: as ddp, and each rank keeps the optimizer state of its share of the parameters
      (`ZeroRedundancyOptimizer`).
    - zero2: each rank keeps its part of parameters, gradients and optimizer state, and gathers
      whole parameters from the first forward to the end of backward (`fully_shard` with
      `reshard_after_forward=False`).
    - zero3: as zero2, and whole parameters are freed after forward and gathered again for backward.
    - hybrid: as zero3 within groups of `shard_group_size` ranks, each with a copy of the model.
    - tensor: each rank computes a part of each layer, for all samples (DTensor).
    - deepspeed-zero1, -zero2, -zero3: DeepSpeed's own engine.
    """

    NONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    HYBRID = "hybrid"
    TENSOR = "tensor"
    DEEPSPEED_ZERO1 = "deepspeed-zero1"
    DEEPSPEED_ZERO2 = "deepspeed-zero2"
    DEEPSPEED_ZERO3 = "deepspeed-zero3"


FULLY_SHARDED = (Sharding.ZERO2, Sharding.ZERO3, Sharding.HYBRID)
"""By `fully_shard`: each rank keeps its part of parameters, gradients and optimizer state."""
OF_DEEPSPEED = (Sharding.DEEPSPEED_ZERO1, Sharding.DEEPSPEED_ZERO2, Sharding.DEEPSPEED_ZERO3)
WITH_TENSOR_PARALLEL = (Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)


def check_ranks(config: Any) -> None:
    """Raise ConfigError if the ranks, groups and samples of a `StepConfig` do not go together."""
    ranks, sharding = config.world_size, config.sharding
    if sharding is Sharding.NONE:
        _check_alone(config)
        return

    _check_groups(config)
    parts, steps = config.data_parallel_size, config.accumulation_steps
    if config.batch_size % (parts * steps):
        below = config.batch_size // (parts * steps) * parts * steps
        above = below + parts * steps
        split = f"{parts} data parallel ranks"
        split += f" in {steps} micro-batches each" if steps > 1 else ""
        raise ConfigError(
            f"batch_size={config.batch_size} does not divide into equal parts for {split} "
            f"(sharding={str(sharding)!r}, world_size={ranks}); use batch_size="
            f"{f'{below} or {above}' if below else above}, or another world_size"
        )


def _check_alone(config: Any) -> None:
    """Raise ConfigError for settings of ranks that do nothing without sharding."""
    for name, default in (
        ("world_size", 1),
        ("tensor_parallel_size", 1),
        ("shard_group_size", None),
        ("sync_each_micro_batch", True),
    ):
        value = getattr(config, name)
        if value != default:
            raise ConfigError(
                f"{name}={value!r} does nothing with sharding='none'; add sharding='zero3' or "
                "another of "
                f"{', '.join(repr(str(s)) for s in Sharding if s is not Sharding.NONE)}, or leave "
                "it out"
            )


def _check_groups(config: Any) -> None:
    """Raise ConfigError if the ranks do not divide into equal groups."""
    ranks, sharding, tensor = config.world_size, config.sharding, config.tensor_parallel_size
    if tensor > 1 and sharding is Sharding.TENSOR:
        raise ConfigError(
            f"tensor_parallel_size={tensor} with sharding='tensor', which divides each layer over "
            "all ranks by itself; leave tensor_parallel_size out"
        )
    if tensor > 1 and sharding not in WITH_TENSOR_PARALLEL:
        *names, last = (repr(str(each)) for each in WITH_TENSOR_PARALLEL)
        raise ConfigError(
            f"tensor_parallel_size={tensor} with sharding={str(sharding)!r}; use sharding="
            f"{', '.join(names)} or {last}, or leave tensor_parallel_size out"
        )
    if ranks % tensor:
        raise ConfigError(
            f"tensor_parallel_size={tensor} does not divide world_size={ranks}; allowed is "
            f"{_divisors(ranks)}"
        )

    group = config.shard_group_size
    if sharding is not Sharding.HYBRID and group is not None:
        raise ConfigError(
            f"shard_group_size={group} does nothing with sharding={str(sharding)!r}; use "
            "sharding='hybrid', or leave it out"
        )
    if sharding is Sharding.HYBRID and (group is None or ranks % group):
        raise ConfigError(
            f"shard_group_size={group} with sharding='hybrid' and world_size={ranks}; set how many "
            f"ranks hold one copy of the model, usually those of one machine: {_divisors(ranks)}"
        )


def _divisors(number: int) -> str:
    found = [str(n) for n in range(1, number + 1) if number % n == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
