"""What the scripts for libraries do with several ranks: which strategies each library knows.

The library carries a strategy out; the part of a rank, its seed and the mean of the losses are
lines of the script. Left out: DeepSpeed, which has a flavor of its own, tensor parallelism, and
`ZeroRedundancyOptimizer` where a library reads the whole optimizer state at the beginning.
"""

from enum import StrEnum

import torch

from memlab.config import FULLY_SHARDED, Precision, Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.sharding import divided_source
from memlab.techniques.sharding.ranks import SEEDS_BETWEEN_RANKS, is_tensor_parallel
from memlab.techniques.sharding.sharding_source import MEAN, check_written, files_of
from memlab.techniques.source import ScriptLines, together

OF_ACCELERATE = (Sharding.NONE, Sharding.DDP, Sharding.ZERO2, Sharding.ZERO3)
STRATEGIES: dict[str, tuple[Sharding, ...]] = {
    "lightning": (
        *OF_ACCELERATE,
        Sharding.ZERO1,
        Sharding.HYBRID,
    ),
    "accelerate": OF_ACCELERATE,
    "transformers": OF_ACCELERATE,
}

SPLIT = (
    'rank = int(os.environ["RANK"])  # a library may not have opened the group yet',
    f"set_seed(SEED + {SEEDS_BETWEEN_RANKS:_} * rank)  # ranks must not drop out the same units",
    "size = BATCH_SIZE // (NUM_RANKS * ACCUMULATION_STEPS)",
    "first = ACCUMULATION_STEPS * rank",
)
PARTS = (
    "return [",
    "    tree_map_only(torch.Tensor, lambda t: t.split(size)[first + index], batch)",
    "    for index in range(ACCUMULATION_STEPS)",
    "]",
)
OWN_PARTS = (
    "parts = list(split_batch(batch, [size] * (NUM_RANKS * ACCUMULATION_STEPS)))",
    "return parts[first : first + ACCUMULATION_STEPS]",
)

CLASSES = '''
def sharded_classes(model):
    """Return the names of the classes whose modules are sharded by themselves."""
    return sorted({type(block).__name__ for block in units(model)})
'''.strip()

REPORT = '''
def report(losses):
    """Print the mean loss of the ranks for each update, of `losses` of micro-batches, and leave."""
    for step in range(NUM_STEPS):
        parts = losses[step * ACCUMULATION_STEPS : (step + 1) * ACCUMULATION_STEPS]
        loss = mean_of_ranks(float(sum(parts)) / ACCUMULATION_STEPS, parts[0].device)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss}")
    dist.destroy_process_group()  # the library leaves it open, and Gloo's threads may then abort
'''.strip()


def check_ranks(config: StepConfig, device: torch.device, flavor: StrEnum) -> None:
    """Raise UnsupportedError for a way of sharding that a library cannot carry out."""
    if config.sharding is Sharding.NONE:
        return

    if is_tensor_parallel(config):
        raise UnsupportedError(
            f"{divided_source.said(config)} is not expressed by flavor={str(flavor)!r}: which "
            "layers are divided, and how, is written for plain PyTorch; use flavor='pytorch'"
        )
    check_written(config)
    if config.compile:
        raise UnsupportedError(
            f"compile=True with sharding={str(config.sharding)!r} is not expressed by flavor="
            f"{str(flavor)!r}, which wraps the model by itself; use flavor='pytorch', or "
            "compile=False"
        )
    said = f"sharding={str(config.sharding)!r}"
    other = f"use flavor='pytorch', or sharding='ddp' with flavor={str(flavor)!r}"
    if config.sharding not in STRATEGIES[flavor]:
        raise UnsupportedError(f"{said} is not expressed by flavor={str(flavor)!r}; {other}")

    is_by_accelerate = flavor != "lightning" and config.sharding in FULLY_SHARDED
    if is_by_accelerate and device.type == "cpu":
        raise UnsupportedError(
            f"{said} with flavor={str(flavor)!r}: accelerate shards on accelerators only, and the "
            "file is for a CPU; use device='cuda', or flavor='pytorch'"
        )
    if is_by_accelerate and config.precision is Precision.BF16_MIXED and flavor == "transformers":
        raise UnsupportedError(
            f"{said} with precision='bf16-mixed' and flavor='transformers': its Trainer averages "
            "gradients in bf16, and memlab in fp32; use flavor='accelerate' or 'pytorch'"
        )
    _check_averaging(config, flavor)


def _check_averaging(config: StepConfig, flavor: StrEnum) -> None:
    """Refuse micro-batches whose gradients a library averages at another time."""
    is_late = flavor == "transformers" or (
        flavor == "lightning" and config.sharding not in FULLY_SHARDED
    )
    if config.accumulation_steps > 1 and config.sync_each_micro_batch and is_late:
        raise UnsupportedError(
            f"sync_each_micro_batch=True with sharding={str(config.sharding)!r} and flavor="
            f"{str(flavor)!r}, which averages gradients once an update; use "
            "sync_each_micro_batch=False, or flavor='pytorch'"
        )


def rank_lines(config: StepConfig) -> ScriptLines:
    """Return the imports and functions that a script of ranks needs besides the library's own."""
    own = ScriptLines(imports=("import torch.distributed as dist",), functions=(MEAN,))
    return own if config.sharding is Sharding.DDP else together([files_of(config), own])
