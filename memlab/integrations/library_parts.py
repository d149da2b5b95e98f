"""What the scripts for libraries share: which settings they know, the model, the micro-batches.

The library owns the loop: precision, accumulation, clipping and devices. The model, with what is
recomputed and compiled, and the optimizer come from the same techniques as everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import torch

from memlab.config import FULLY_SHARDED, Optimizer, Precision, Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.integrations.script_file import Loop
from memlab.techniques import batches, every
from memlab.techniques.checkpointing import checkpointing
from memlab.techniques.optimizers import optimizers
from memlab.techniques.script import TREE_MAP
from memlab.techniques.sharding import sharding_source
from memlab.techniques.sharding.ranks import SEEDS_BETWEEN_RANKS, is_tensor_parallel
from memlab.techniques.sharding.sharding_source import MEAN, check_written, files_of
from memlab.techniques.source import ScriptLines, together
from memlab.techniques.technique import Plan, Setup
from memlab.workload import Workload

# What the scripts for libraries do with several ranks: which strategies each library knows.
#
# The library carries a strategy out; the part of a rank, its seed and the mean of the
# losses are lines of the script. Left out: DeepSpeed, which has a flavor of its own, tensor
# parallelism, and `ZeroRedundancyOptimizer` where a library reads the whole optimizer state
# at the beginning.

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

SPLIT_AMONG_RANKS = (
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
            f"{sharding_source.said(config)} is not expressed by flavor={str(flavor)!r}: which "
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


KNOWN: Mapping[str, tuple[Any, ...] | None] = {
    "batch_size": None,
    "accumulation_steps": None,
    "precision": (Precision.AS_BUILT, Precision.FP32, Precision.BF16_MIXED),
    "memory_budget": None,
    "compile": None,
    "compile_mode": None,
    "optimizer": (Optimizer.SGD, Optimizer.ADAM, Optimizer.ADAMW),
    "optimizer_implementation": None,
    "max_grad_norm": None,
    "checkpointing": None,
    "checkpoint_modules": None,
    "checkpoint_policy": None,
    "model_cache": None,
    "attention": None,
    "sharding": None,
    "world_size": None,
    "shard_group_size": None,
    "sync_each_micro_batch": None,
}
"""The fields that a script for a library can express, and their values; None for all of them."""

MODEL = '''
def make_model():
    """Return the model as it is trained; the library moves it."""
    model = build_model()
    {lines}
    return model
'''.strip()

MICRO_BATCHES = '''
def make_micro_batches():
    """Return the micro-batches of one batch, as memlab measures it; put your own loader here."""
    set_seed(SEED)
    batch = make_batch(BATCH_SIZE)
    {lines}
'''.strip()

SPLIT = (
    "size = BATCH_SIZE // ACCUMULATION_STEPS",
    "sizes = [size] * ACCUMULATION_STEPS",
    "return [",
    "    tree_map_only(torch.Tensor, lambda t: t.split(sizes)[index], batch)",
    "    for index in range(ACCUMULATION_STEPS)",
    "]",
)
WHOLE = ("return [batch]",)
OWN_SPLIT = (
    "size = BATCH_SIZE // ACCUMULATION_STEPS",
    "return list(split_batch(batch, [size] * ACCUMULATION_STEPS))",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryParts:
    """What a script for a library contains besides the library's own lines.

    Attributes:
        imports: one a line.
        functions: among them `make_model` and `make_micro_batches`.
        optimizer: the lines that define `optimizer`, from `parameters`.
        calls: the functions of the workload that they call.
    """

    imports: tuple[str, ...]
    functions: tuple[str, ...]
    optimizer: tuple[str, ...]
    calls: tuple[str, ...]


def check(workload: Workload, config: StepConfig, device: torch.device, flavor: StrEnum) -> None:
    """Raise UnsupportedError for a setting that a script for a library cannot express."""
    every.check(config, device)
    # first what no flavor writes, since the others are sent to flavor='pytorch'
    check_ranks(config, device, flavor)
    plain = f"use flavor='pytorch', which knows every setting, or {{}} with flavor={str(flavor)!r}"
    if workload.make_optimizer is not None:
        raise UnsupportedError(
            f"make_optimizer of a workload is not expressed by flavor={str(flavor)!r}; "
            "use flavor='pytorch', which knows it, or leave it out"
        )
    for field in fields(config):
        value, known = getattr(config, field.name), KNOWN.get(field.name, (field.default,))
        if known is not None and value not in known:
            written = config.to_dict()[field.name]
            default = str(known[0]) if isinstance(known[0], StrEnum) else known[0]
            raise UnsupportedError(
                f"{field.name}={written!r} is not expressed by flavor={str(flavor)!r}; "
                + plain.format(f"{field.name}={default!r}")
            )
    if config.batch_size % config.accumulation_steps:
        raise UnsupportedError(
            f"accumulation_steps={config.accumulation_steps} does not divide "
            f"batch_size={config.batch_size}, and flavor={str(flavor)!r} gives every micro-batch "
            f"the same weight; " + plain.format("a number that divides it")
        )
    for name in ("accumulation_steps", "world_size"):
        if getattr(config, name) > 1 and workload.num_loss_terms is not None:
            raise UnsupportedError(
                f"{name}={getattr(config, name)} with a workload that has "
                f"num_loss_terms is not expressed by flavor={str(flavor)!r}, which gives every "
                f"micro-batch the same weight; " + plain.format(f"{name}=1")
            )


def library_parts(
    workload: Workload, config: StepConfig, device: torch.device, plan: Plan | None
) -> LibraryParts:
    """Return the parts of a script that are the same for every library."""
    checkpointing.check_plan(config, plan)
    is_mixed = config.precision is Precision.BF16_MIXED
    own = replace(
        config,
        accumulation_steps=1,
        max_grad_norm=None,
        precision=Precision.FP32 if is_mixed else config.precision,
        sharding=Sharding.NONE,
        world_size=1,
        shard_group_size=None,
        sync_each_micro_batch=True,
    )
    is_sharded = config.sharding is not Sharding.NONE
    source = every.source(Setup(config=own, device=device, plan=plan, workload=workload))
    own_kind = batches.is_own_kind(workload)
    model = [*source.before, *source.built, "model.train()", *source.model]
    divided = OWN_SPLIT if own_kind else SPLIT
    if is_sharded:
        parts = OWN_PARTS if own_kind else PARTS
        divided = (*SPLIT_AMONG_RANKS, *parts)
    is_whole = config.accumulation_steps == 1 and not is_sharded
    split = [*source.batch, *(WHOLE if is_whole else divided)]
    own_files = together([
        batches.source() if own_kind else ScriptLines(),
        rank_lines(config) if is_sharded else ScriptLines(),
    ])  # fmt: skip
    return LibraryParts(
        imports=("import torch", TREE_MAP, *own_files.imports, *source.imports),
        functions=(
            *dict.fromkeys((*own_files.functions, *source.functions)),
            MODEL.format(lines="\n    ".join(model)),
            MICRO_BATCHES.format(lines="\n    ".join(split)),
        ),
        optimizer=_optimizer(own, config, device) or source.optimizer,
        calls=("build_model", "make_batch", "compute_loss", *["split_batch"] * own_kind),
    )


def _optimizer(own: StepConfig, config: StepConfig, device: torch.device) -> tuple[str, ...]:
    """Return the lines of an optimizer whose state is divided over the ranks; () for others."""
    if config.sharding is not Sharding.ZERO1:
        return ()
    divided = replace(own, sharding=config.sharding, world_size=config.world_size)
    return optimizers.source(Setup(config=divided, device=device)).optimizer


# What the scripts of several ranks share: how they are launched, and how each rank begins.
#
# `torchrun` starts the ranks on one machine or on several. The script checks that it was
# started so.

PER_MACHINE = 8  # devices, as most machines for training have
IMPORTS = ("import os", "import torch.distributed as dist")
HOW = "this file is for {NUM_RANKS} ranks: torchrun --nproc-per-node {NUM_RANKS} {__file__}"

CHECK_LAUNCH = '''
def check_launch():
    """Stop unless torchrun has started as many ranks as this file is for."""
    if os.environ.get("WORLD_SIZE") != str(NUM_RANKS):
        raise SystemExit(
            f"{how}"
        )
'''.strip().replace("{how}", HOW)

OPEN_GROUP = '''
def open_group():
    """Join the other ranks, which torchrun has started."""
    check_launch()
    {lines}
'''.strip()

BATCHES = '''
def make_batches():
    """Yield one batch again and again, as memlab measures a step; put your own loader here.

    It must give every rank the same batches.
    """
    set_seed(SEED)
    batch = make_batch(BATCH_SIZE)
    {seeded}
    for _ in range(NUM_STEPS):
        yield batch
'''.strip()

OTHER_UNITS = "ranks must not drop out the same units"
SAME_UNITS = "all ranks must drop out the same units: they compute the same samples"
SEEDED = "    set_seed(SEED)\n"  # with which each `main` begins
SETTING = "NUM_RANKS = {}  # {}"


def batches_source(config: StepConfig) -> str:
    """Return the function that makes batches: ranks of other samples draw other numbers."""
    if config.sharding is Sharding.TENSOR:
        return BATCHES.replace("{seeded}", f"set_seed(SEED)  # {SAME_UNITS}")
    part = "dist.get_rank()"
    if config.tensor_parallel_size > 1:
        part = f"({part} // {config.tensor_parallel_size})"
    seeded = f"set_seed(SEED + {SEEDS_BETWEEN_RANKS:_} * {part})  # {OTHER_UNITS}"
    return BATCHES.replace("{seeded}", seeded)


def open_group(config: StepConfig, device: torch.device) -> str:
    """Return the function with which a rank of this kind of device begins."""
    lines = ['dist.init_process_group("gloo")']
    if device.type != "cpu":
        # the norm of offloaded gradients is added up in host memory
        backends = "cpu:gloo,cuda:nccl" if config.offloads_shards else "nccl"
        lines = [
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            f'dist.init_process_group("{backends}")',
        ]
    return OPEN_GROUP.replace("{lines}", "\n    ".join(lines))


def of_ranks(loop: Loop, config: StepConfig) -> Loop:
    """Return a loop with what the scripts of all libraries say about their ranks.

    A library opens the process group by itself, so its `main` checks how it was launched.
    """
    *others, main = loop.functions
    if "open_group()" not in main:
        main = main.replace(SEEDED, f"    check_launch()\n{SEEDED}", 1)
    return replace(
        loop,
        functions=[CHECK_LAUNCH, *others, main],
        imports=[*loop.imports, *IMPORTS],
        settings=(*loop.settings, SETTING.format(config.world_size, _what_each_has(config))),
        launch=launch(config.world_size),
    )


def _what_each_has(config: StepConfig) -> str:
    if config.sharding is Sharding.TENSOR:
        return "each has its part of the divided layers"
    if config.tensor_parallel_size > 1:
        return f"each {config.tensor_parallel_size} of them have a part of a batch"
    return "each has its part of a batch"


def launch(num_ranks: int) -> str:
    """Return the command that starts this many ranks.

    >>> launch(2)
    'torchrun --nproc-per-node 2 FILE'
    >>> launch(16).partition(" --rdzv")[0]
    'torchrun --nnodes 2 --nproc-per-node 8'
    """
    if num_ranks <= PER_MACHINE or num_ranks % PER_MACHINE:
        return f"torchrun --nproc-per-node {num_ranks} FILE"
    return (
        f"torchrun --nnodes {num_ranks // PER_MACHINE} --nproc-per-node {PER_MACHINE} "
        "--rdzv-backend c10d --rdzv-endpoint HOST:29500 FILE"
    )
