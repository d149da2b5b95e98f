"""`export_script`: a step as a file that a person would have written.

Each flavor has a loop, plain PyTorch or a library's, around the same model and batches.

A library owns its loop: precision, accumulation, clipping, devices and sharding. The model, with
what is recomputed and compiled, and the optimizer come from the same techniques as everywhere; the
part of a rank, its seed and the mean of the losses are lines of the script. What libraries do
besides training is switched off, and defaults that would change training are set aside.

The text of the loops is in `templates/`, a file for each library and one for what they share. What
stands there as `$name`, and what depends on a setting, is given here.
"""

import contextlib
import tomllib
from dataclasses import fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memlab._util.checks import checked
from memlab._util.units import shown
from memlab.config import FULLY_SHARDED, Optimizer, Precision, Sharding, StepConfig
from memlab.errors import MemlabError, UnsupportedError, WorkloadError
from memlab.integrations import script_file
from memlab.integrations.script_file import Loop, filled
from memlab.prediction.planning import Layers, layers_for
from memlab.prediction.plans import plan_for
from memlab.running import Ended
from memlab.runtime.isolation import runner
from memlab.store.recorded import target_for
from memlab.techniques import batches, registry
from memlab.techniques.accumulation import has_samples_first
from memlab.techniques.batches import tensors_of
from memlab.techniques.checkpointing import checkpointing, policies
from memlab.techniques.loss.loss_tensors import tensors_of_loss
from memlab.techniques.optimizers import optimizers
from memlab.techniques.script import TREE_MAP, parts, train_arguments
from memlab.techniques.sharding import sharding_source
from memlab.techniques.sharding.deepspeed_engine import OF_TORCH, STAGES
from memlab.techniques.sharding.ranks import SEEDS_BETWEEN_RANKS, is_tensor_parallel
from memlab.techniques.sharding.sharding_source import MEAN, check_written, files_of, sharded_lines
from memlab.techniques.source import ScriptLines, together
from memlab.techniques.technique import Plan, Setup
from memlab.workload import Workload
from memlab.workloads import check_installed


class Flavor(StrEnum):
    """The library whose loop a script uses."""

    PYTORCH = "pytorch"
    LIGHTNING = "lightning"
    TRANSFORMERS = "transformers"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"


LIBRARIES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("flavors.toml").read_text(encoding="utf-8")
)
ANY_VALUE = LIBRARIES.pop("any_value")
VALUES: dict[str, tuple[Any, ...]] = {
    "precision": (Precision.AS_BUILT, Precision.FP32, Precision.BF16_MIXED),
    "optimizer": (Optimizer.SGD, Optimizer.ADAM, Optimizer.ADAMW),
}
"""Values that a script for a library can express; of other fields any, or else the default."""
PER_MACHINE = 8  # devices, as most machines for training have


def check(workload: Workload, config: StepConfig, device: torch.device, flavor: Flavor) -> None:
    """Raise UnsupportedError for a setting that a script for a library cannot express."""
    registry.check(config, device)
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
    if config.sharding not in LIBRARIES[flavor]["strategies"]:
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
    return _of_ranks(found, config, device)


def library_loop(
    flavor: Flavor,
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    plan: Plan | None,
) -> Loop:
    """Return the loop of a library, with the parts that are the same for all of them."""
    checkpointing.check_plan(config, plan)
    library = LIBRARIES[flavor]
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
    source = registry.source(Setup(config=own, device=device, plan=plan, workload=workload))
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
               for name in ("make_model", "make_micro_batches", *library["functions"])]  # fmt: skip
    found = Loop(
        title=library["title"],
        imports=["import torch", TREE_MAP, *files.imports, *source.imports, *imports,
                 *dividing.imports],
        functions=[*dict.fromkeys((*files.functions, *source.functions)), *filter(None, written)],
        calls=("build_model", "make_batch", "compute_loss", *["split_batch"] * own_kind),
        settings=(f"ACCUMULATION_STEPS = {config.accumulation_steps}  # micro-batches",),
        needs=library["needs"],
    )  # fmt: skip
    return _of_ranks(found, config, device)


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


def _of_ranks(loop: Loop, config: StepConfig, device: torch.device) -> Loop:
    """Return a loop with what the scripts of all libraries say about their ranks, if it has any."""
    if config.sharding is Sharding.NONE:
        return loop
    on_cpu = device.type == "cpu"
    each = "each has its part of a batch"
    if config.sharding is Sharding.TENSOR:
        each = "each has its part of the divided layers"
    elif config.tensor_parallel_size > 1:
        each = f"each {config.tensor_parallel_size} of them have a part of a batch"
    return replace(
        loop,
        functions=[filled("check_launch"), *loop.functions, filled("close_group", on_cpu=on_cpu)],
        imports=[
            *loop.imports,
            "import os",
            *["import time"] * on_cpu,
            "import torch.distributed as dist",
        ],
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


# `export_script` itself.

PLANNING_SECONDS = 120.0
TRIED_SAMPLES = 7  # no usual size of a dimension, such as the three colours of an image


@checked()
def export_script(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    flavor: Flavor = Flavor.PYTORCH,
) -> str:
    """Return a Python file that trains as this config says, and needs no memlab.

    `python file.py` trains for ten updates and prints the loss of each; with sharding, `torchrun`
    starts the file in every rank, as its first lines say. The file holds the workload's own
    functions and what they use; what lies in your own importable modules is imported from there,
    unless these modules import memlab.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: where; the file is written for this kind of device, "cpu" or "cuda". A card by
            its name is "cuda". None is the accelerator if there is one, else the CPU.
        flavor: "pytorch" is a loop in plain PyTorch, whose losses are those of memlab's own step
            bit by bit. "lightning", "transformers" (its Trainer) and "accelerate" use the loop of
            that library, with the defaults set aside that would change training. They know fewer
            settings, and refuse the others by name. "deepspeed" is the loop of "pytorch" around
            DeepSpeed's engine, for sharding="deepspeed-zero1", "-zero2" and "-zero3", which no
            other flavor knows.

    Raises:
        UnsupportedError: the config cannot be expressed, or the source of a function of the
            workload cannot be found; the message names it and a remedy.
        MemlabError: an argument is not allowed.

    >>> import memlab
    >>> text = export_script(memlab.workloads.get("plain-mlp"), StepConfig(), "cpu")
    >>> print(text.splitlines()[0])
    \"\"\"Train plain-mlp with plain PyTorch.
    >>> "memlab." in text
    False
    """
    check_installed(workload)
    policies.keeps(config.checkpoint_policy)  # raises for an operator that does not exist
    kind = target_for(device, config).kind
    where = torch.device(kind)
    _check_split(workload, config)
    _check_engine(config, flavor)
    remark = _check_loss(workload)
    if flavor in LIBRARIES:
        check(workload, config, where, flavor)
        _check_base(workload, config, flavor)
    plan = plan_of(workload, config, device)
    if flavor in LIBRARIES:
        loop = library_loop(flavor, workload, config, where, plan)
    else:
        loop = plain_loop(workload, config, where, plan, layers_of(workload, config, device))
    text = script_file.written(workload, config, kind, replace(loop, remark=remark))
    _check_own_tensors(workload, kind)
    return text


def _check_engine(config: StepConfig, flavor: Flavor) -> None:
    """Refuse DeepSpeed's strategies in other files than DeepSpeed's, and others there."""
    said = f"sharding={str(config.sharding)!r} is not expressed by flavor={str(flavor)!r}"
    if config.is_deepspeed and flavor is not Flavor.DEEPSPEED:
        torchs = str(OF_TORCH[STAGES[config.sharding]])
        raise UnsupportedError(f"{said}; use flavor='deepspeed', or sharding={torchs!r}")
    if flavor is Flavor.DEEPSPEED and not config.is_deepspeed:
        raise UnsupportedError(
            f"{said}, which is for DeepSpeed's engine; use sharding='deepspeed-zero1', "
            "'deepspeed-zero2' or 'deepspeed-zero3', or flavor='pytorch'"
        )


def _check_base(workload: Workload, config: StepConfig, flavor: Flavor) -> None:
    """Refuse a quantized base in several ranks of a library, which may choose a device too late."""
    if config.sharding is not Sharding.NONE and script_file.has_quantized_base(workload):
        raise UnsupportedError(
            f"sharding={str(config.sharding)!r} of {shown(workload.name)}, whose base is loaded "
            f"quantized, is not expressed by flavor={str(flavor)!r}; use flavor='pytorch', or a "
            "base of bf16, fp16 or fp32"
        )


def _check_loss(workload: Workload) -> str:
    """Refuse several losses, and what is no loss; return a remark where it cannot be seen.

    Raises:
        UnsupportedError: there are several losses.
        WorkloadError: the loss is not a scalar that can be trained.
    """
    try:
        found, why = runner(True, PLANNING_SECONDS, None, None)("loss", {"workload": workload})
    except (Ended, MemlabError) as error:
        found, why = "unknown", str(error)
    if found == "several":
        raise UnsupportedError(
            f"{shown(workload.name)} has several losses, and memlab writes no script with an "
            "update for each; write the loop as docs/training.md does, or return one loss"
        )
    if found == "wrong":
        raise WorkloadError(why)
    return f"memlab could not see whether compute_loss returns one loss: {why}" if why else ""


def _check_own_tensors(workload: Workload, kind: str) -> None:
    """Refuse a loss that holds what a script would not train, or would leave on the CPU."""
    said = f"compute_loss of {shown(workload.name)} uses"
    for name, tensor in tensors_of_loss(workload.compute_loss):
        if tensor.requires_grad:
            raise UnsupportedError(
                f"{said} {name}, which requires a gradient, and a script trains the model alone; "
                "make it a parameter of the model, or set its requires_grad to False"
            )
        if kind != "cpu":
            raise UnsupportedError(
                f"{said} {name}, a tensor that a script for {kind!r} would leave on the CPU; make "
                "it in compute_loss, on the device of what the model returns, or keep it as a "
                "buffer of the model"
            )


def _check_split(workload: Workload, config: StepConfig) -> None:
    """Refuse parts of a batch that is a list of samples, which a script cannot split.

    Raises:
        UnsupportedError: the batch holds such a list.
    """
    is_whole = config.accumulation_steps == 1 and config.data_parallel_size == 1
    if is_whole or workload.split_batch is not None:
        return
    batch = None
    # what make_batch raises is told by `measure`, and by the script
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
        batch = workload.make_batch(TRIED_SAMPLES)
    if _holds_samples(batch):
        name = "accumulation_steps" if config.data_parallel_size == 1 else "world_size"
        raise UnsupportedError(
            f"{name}={getattr(config, name)} cannot be exported: the batch of "
            f"{shown(workload.name)} holds a list of samples; give the workload a split_batch, "
            f"or use {name}=1"
        )


def _holds_samples(part: Any) -> bool:
    """Return whether a part of a batch is a list with an entry for each sample."""
    is_list = isinstance(part, list) and len(part) == TRIED_SAMPLES
    if is_list and tensors_of(part) and not has_samples_first(part, TRIED_SAMPLES):
        return True
    parts = part.values() if isinstance(part, dict) else part
    return isinstance(part, dict | list | tuple) and any(map(_holds_samples, parts))


def plan_of(
    workload: Workload, config: StepConfig, device: str | torch.device | None
) -> Plan | None:
    """Return what is recomputed, for a memory budget of the eager engine."""
    found: Plan | None = _in_worker(partial(plan_for, seed=0), workload, config, device)
    return found


def layers_of(
    workload: Workload, config: StepConfig, device: str | torch.device | None
) -> Layers | None:
    """Return which layers the ranks divide, found by trying the model; None if they divide none."""
    if not is_tensor_parallel(config):
        return None
    registry.check(config, torch.device(target_for(device, config).kind))
    found: Layers | None = _in_worker(layers_for, workload, config, device)
    return found


def _in_worker(find: Any, workload: Workload, config: StepConfig, device: Any) -> Any:
    """Return what is found out about a model by building it in the worker."""
    try:
        run = runner(True, PLANNING_SECONDS, None, None)
        return find(workload, config, target_for(device, config), run=run)
    except Ended as ended:
        raise UnsupportedError(str(ended)) from None
