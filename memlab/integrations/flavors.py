"""The loops of `export_script`: plain PyTorch or a library's, around the same model and batches.

A library owns its loop: precision, accumulation, clipping, devices and sharding. The model, with
what is recomputed and compiled, and the optimizer come from the same techniques as everywhere; the
part of a rank, its seed and the mean of the losses are lines of the script. What libraries do
besides training is switched off, and defaults that would change training are set aside.

The text of the loops is in `templates/`, a file for each library and one for what they share. What
stands there as `$name`, and what depends on a setting, is given here.
"""

from dataclasses import fields, replace
from enum import StrEnum
from typing import Any

import torch

from memlab.config import FULLY_SHARDED, Optimizer, Precision, Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.integrations.script_file import Loop, filled
from memlab.prediction.planning import Layers
from memlab.techniques import batches, every
from memlab.techniques.checkpointing import checkpointing
from memlab.techniques.optimizers import optimizers
from memlab.techniques.script import TREE_MAP, parts, train_arguments
from memlab.techniques.sharding import sharding_source
from memlab.techniques.sharding.ranks import SEEDS_BETWEEN_RANKS, is_tensor_parallel
from memlab.techniques.sharding.sharding_source import MEAN, check_written, files_of, sharded_lines
from memlab.techniques.source import ScriptLines, together
from memlab.techniques.technique import Plan, Setup
from memlab.workload import Workload


class Flavor(StrEnum):
    """The library whose loop a script uses."""

    PYTORCH = "pytorch"
    LIGHTNING = "lightning"
    TRANSFORMERS = "transformers"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"


OF_ACCELERATE = (Sharding.NONE, Sharding.DDP, Sharding.ZERO2, Sharding.ZERO3)
STRATEGIES = {
    Flavor.LIGHTNING: (*OF_ACCELERATE, Sharding.ZERO1, Sharding.HYBRID),
    Flavor.TRANSFORMERS: OF_ACCELERATE,
    Flavor.ACCELERATE: OF_ACCELERATE,
}
"""What each library shards. Left out: DeepSpeed, which has a flavor of its own, layers that ranks
divide, and `ZeroRedundancyOptimizer` where a library reads the whole optimizer state at first."""
ANY_VALUE = (
    "batch_size", "accumulation_steps", "memory_budget", "compile", "compile_mode",
    "optimizer_implementation", "max_grad_norm", "checkpointing", "checkpoint_modules",
    "checkpoint_policy", "model_cache", "attention", "sharding", "world_size", "shard_group_size",
    "sync_each_micro_batch",
)  # fmt: skip
VALUES: dict[str, tuple[Any, ...]] = {
    "precision": (Precision.AS_BUILT, Precision.FP32, Precision.BF16_MIXED),
    "optimizer": (Optimizer.SGD, Optimizer.ADAM, Optimizer.ADAMW),
}
"""Values that a script for a library can express; of other fields any, or else the default."""
TITLES = {
    Flavor.LIGHTNING: ("Lightning", 'Lightning: pip install "lightning!=2.6.2,!=2.6.3"'),
    Flavor.TRANSFORMERS: (
        "the Trainer of transformers",
        "transformers and accelerate: pip install transformers accelerate",
    ),
    Flavor.ACCELERATE: ("accelerate", "accelerate: pip install accelerate"),
}
PER_MACHINE = 8  # devices, as most machines for training have
FUNCTIONS = {
    Flavor.LIGHTNING: ("report", "module", "as_it_is", "main"),
    Flavor.TRANSFORMERS: ("report", "sharded_classes", "trainer", "as_it_is", "main"),
    Flavor.ACCELERATE: ("sharded_classes", "main"),
}
"""What the script for a library defines besides the model and its micro-batches, in this order."""


def check(workload: Workload, config: StepConfig, device: torch.device, flavor: Flavor) -> None:
    """Raise UnsupportedError for a setting that a script for a library cannot express."""
    every.check(config, device)
    # first what no flavor writes, since the others are sent to flavor='pytorch'
    if config.sharding is not Sharding.NONE:
        _check_ranks(config, device, flavor)
    others = "use flavor='pytorch', which knows every setting, or"

    def refused(what: str, instead: str, why: str = "") -> UnsupportedError:
        said = f"{_unexpressed(what, flavor)}{why}; {others} {instead}"
        return UnsupportedError(f"{said} with flavor={str(flavor)!r}")

    if workload.make_optimizer is not None:
        said = _unexpressed("make_optimizer of a workload", flavor)
        raise UnsupportedError(f"{said}; use flavor='pytorch', which knows it, or leave it out")
    for field in fields(config):
        value, known = getattr(config, field.name), VALUES.get(field.name, (field.default,))
        if field.name not in ANY_VALUE and value not in known:
            written = config.to_dict()[field.name]
            default = str(known[0]) if isinstance(known[0], StrEnum) else known[0]
            raise refused(f"{field.name}={written!r}", f"{field.name}={default!r}")
    same_weight = "which gives every micro-batch the same weight"
    if config.batch_size % config.accumulation_steps:
        raise UnsupportedError(
            f"accumulation_steps={config.accumulation_steps} does not divide "
            f"batch_size={config.batch_size}, and flavor={str(flavor)!r} gives every micro-batch "
            f"the same weight; {others} a number that divides it with flavor={str(flavor)!r}"
        )
    for name in ("accumulation_steps", "world_size"):
        if getattr(config, name) > 1 and workload.num_loss_terms is not None:
            what = f"{name}={getattr(config, name)} with a workload that has num_loss_terms"
            raise refused(what, f"{name}=1", f", {same_weight}")


def _unexpressed(what: str, flavor: Flavor) -> str:
    return f"{what} is not expressed by flavor={str(flavor)!r}"


def _check_ranks(config: StepConfig, device: torch.device, flavor: Flavor) -> None:
    """Raise UnsupportedError for a way of sharding that a library cannot carry out."""
    said, named = f"sharding={str(config.sharding)!r}", f"flavor={str(flavor)!r}"
    if is_tensor_parallel(config):
        raise UnsupportedError(
            f"{_unexpressed(sharding_source.said(config), flavor)}: which layers are divided, and "
            "how, is written for plain PyTorch; use flavor='pytorch'"
        )
    check_written(config)
    if config.compile:
        raise UnsupportedError(
            f"{_unexpressed(f'compile=True with {said}', flavor)}, which wraps the model by "
            "itself; use flavor='pytorch', or compile=False"
        )
    if config.sharding not in STRATEGIES[flavor]:
        other = f"use flavor='pytorch', or sharding='ddp' with {named}"
        raise UnsupportedError(f"{_unexpressed(said, flavor)}; {other}")

    is_divided, is_lightning = config.sharding in FULLY_SHARDED, flavor is Flavor.LIGHTNING
    if is_divided and not is_lightning and device.type == "cpu":
        raise UnsupportedError(
            f"{said} with {named}: accelerate shards on accelerators only, and the file is for a "
            "CPU; use device='cuda', or flavor='pytorch'"
        )
    is_trainer, is_mixed = flavor is Flavor.TRANSFORMERS, config.precision is Precision.BF16_MIXED
    if is_divided and is_trainer and is_mixed:
        raise UnsupportedError(
            f"{said} with precision='bf16-mixed' and flavor='transformers': its Trainer averages "
            "gradients in bf16, and memlab in fp32; use flavor='accelerate' or 'pytorch'"
        )
    averages_late = is_trainer or (is_lightning and not is_divided)
    if averages_late and config.accumulation_steps > 1 and config.sync_each_micro_batch:
        raise UnsupportedError(
            f"sync_each_micro_batch=True with {said} and {named}, which averages gradients once "
            "an update; use sync_each_micro_batch=False, or flavor='pytorch'"
        )


def plain_loop(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    plan: Plan | None,
    layers: Layers | None = None,
) -> Loop:
    """Return the loop in plain PyTorch, whose losses are those of `build_step` bit by bit.

    With sharding by DeepSpeed it is the same loop around DeepSpeed's engine.

    Args:
        workload: what is trained.
        config: how.
        device: where; only its type counts.
        plan: what is recomputed, for a memory budget of the eager engine.
        layers: those that the ranks divide, if they do.

    Raises:
        UnsupportedError: this config is refused, or has no short form in plain PyTorch.
    """
    setup = Setup(config=config, device=device, plan=plan, workload=workload, layers=layers)
    imports, functions = parts(setup)
    more = train_arguments(config, workload)
    given = ", ".join(["build_model", "make_batches()", "compute_loss", "DEVICE", *more])
    part = "dist.get_rank()"
    if config.tensor_parallel_size > 1:
        part = f"({part} // {config.tensor_parallel_size})"
    is_sharded, is_split = config.sharding is not Sharding.NONE, config.sharding is Sharding.TENSOR
    between = f"{SEEDS_BETWEEN_RANKS:_}"
    own = [
        filled("make_batches", sharded=is_sharded, same_samples=is_split, part=part,
               between=between),
        *[open_group(config, device)] * is_sharded,
        filled("plain main", sharded=is_sharded, given=given),
    ]  # fmt: skip
    title, needs = "plain PyTorch", ""
    if config.is_deepspeed:
        title, needs = "DeepSpeed", "DeepSpeed: pip install deepspeed"
    found = Loop(
        title=title,
        imports=[line for line in imports if line],
        functions=[*functions, *own],
        calls=("build_model", "make_batch", "compute_loss", *more),
        needs=needs,
    )
    return _of_ranks(found, config)


def library_loop(
    flavor: Flavor,
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    plan: Plan | None,
) -> Loop:
    """Return the loop of a library, with the parts that are the same for all of them."""
    checkpointing.check_plan(config, plan)
    is_sharded = config.sharding is not Sharding.NONE
    own = replace(  # what the library does is left out
        config,
        accumulation_steps=1,
        max_grad_norm=None,
        precision=Precision.FP32 if _is_mixed(config) else config.precision,
        sharding=Sharding.NONE,
        world_size=1,
        shard_group_size=None,
        sync_each_micro_batch=True,
    )
    source = every.source(Setup(config=own, device=device, plan=plan, workload=workload))
    optimizer = source.optimizer
    if config.sharding is Sharding.ZERO1:  # its state is divided over the ranks
        divided = replace(own, sharding=config.sharding, world_size=config.world_size)
        optimizer = optimizers.source(Setup(config=divided, device=device)).optimizer

    own_kind = batches.is_own_kind(workload)
    files = together([
        batches.source() if own_kind else ScriptLines(),
        _rank_lines(config) if is_sharded else ScriptLines(),
    ])  # fmt: skip
    dividing = _dividing(config) if flavor is Flavor.LIGHTNING else ScriptLines()
    given = _given(config, device) | {
        "model": [*source.before, *source.built, "model.train()", *source.model],
        "batch": source.batch,
        "optimizer": optimizer,
        "own_split": own_kind,
        "dividing": dividing.model,
    }
    imports = filled("imports", flavor, **given).split("\n")
    written = [filled(name, flavor, **given)
               for name in ("make_model", "make_micro_batches", *FUNCTIONS[flavor])]  # fmt: skip
    title, needs = TITLES[flavor]
    found = Loop(
        title=title,
        imports=["import torch", TREE_MAP, *files.imports, *source.imports, *imports,
                 *dividing.imports],
        functions=[*dict.fromkeys((*files.functions, *source.functions)), *filter(None, written)],
        calls=("build_model", "make_batch", "compute_loss", *["split_batch"] * own_kind),
        settings=(f"ACCUMULATION_STEPS = {config.accumulation_steps}  # micro-batches",),
        needs=needs,
    )  # fmt: skip
    return _of_ranks(found, config)


def _is_mixed(config: StepConfig) -> bool:
    return config.precision is Precision.BF16_MIXED


def _rank_lines(config: StepConfig) -> ScriptLines:
    """Return the imports and functions that a script of ranks needs besides the library's own."""
    own = ScriptLines(imports=("import torch.distributed as dist",), functions=(MEAN,))
    return own if config.sharding is Sharding.DDP else together([files_of(config), own])


def _dividing(config: StepConfig) -> ScriptLines:
    """Return the lines with which Lightning's module divides its model over the ranks."""
    if config.sharding not in FULLY_SHARDED:
        return ScriptLines()
    if config.sharding is not Sharding.HYBRID:
        return sharded_lines(config, 'self.device_mesh["data_parallel"]')
    found = sharded_lines(config, "")
    return replace(found, model=("device = self.trainer.strategy.root_device", *found.model))


def _given(config: StepConfig, device: torch.device) -> dict[str, Any]:
    """Return what the templates of libraries ask of a config, and the values they write."""
    is_sharded, is_divided = config.sharding is not Sharding.NONE, config.sharding in FULLY_SHARDED
    is_repeated = config.accumulation_steps > 1
    return {
        "on_cpu": device.type == "cpu",
        "sharded": is_sharded,
        "divided": is_divided,
        "mixed": _is_mixed(config),
        "whole": not is_repeated,
        "averaged": is_sharded and is_repeated,
        "late": is_divided and is_repeated and not config.sync_each_micro_batch,
        "clipped": config.max_grad_norm is not None,
        "norm": repr(config.max_grad_norm),
        "each": config.sync_each_micro_batch,
        "frees": config.sharding is not Sharding.ZERO2,
        "between": f"{SEEDS_BETWEEN_RANKS:_}",
    }


# What the scripts of several ranks share: how they are launched, and how each rank begins.
#
# `torchrun` starts the ranks on one machine or on several. The script checks that it was
# started so.


def open_group(config: StepConfig, device: torch.device) -> str:
    """Return the function with which a rank of this kind of device begins."""
    # the norm of offloaded gradients is added up in host memory
    backends = "cpu:gloo,cuda:nccl" if config.offloads_shards else "nccl"
    return filled("open_group", on_cpu=device.type == "cpu", backends=backends)


def _of_ranks(loop: Loop, config: StepConfig) -> Loop:
    """Return a loop with what the scripts of all libraries say about their ranks, if it has any."""
    if config.sharding is Sharding.NONE:
        return loop
    each = "each has its part of a batch"
    if config.sharding is Sharding.TENSOR:
        each = "each has its part of the divided layers"
    elif config.tensor_parallel_size > 1:
        each = f"each {config.tensor_parallel_size} of them have a part of a batch"
    return replace(
        loop,
        functions=[filled("check_launch"), *loop.functions],
        imports=[*loop.imports, "import os", "import torch.distributed as dist"],
        settings=(*loop.settings, f"NUM_RANKS = {config.world_size}  # {each}"),
        launch=launch(config.world_size),
    )


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
