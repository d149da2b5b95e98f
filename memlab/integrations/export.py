"""`export_script`: a step as a file that a person would have written."""

import contextlib
from dataclasses import replace
from typing import Any

import torch

from memlab._util.checks import checked
from memlab._util.units import shown
from memlab.config import Sharding, StepConfig
from memlab.errors import MemlabError, UnsupportedError, WorkloadError
from memlab.integrations import script_file
from memlab.integrations.flavors import FUNCTIONS as LIBRARIES
from memlab.integrations.flavors import Flavor, check, library_loop, plain_loop
from memlab.prediction.planning import Layers, layers_for
from memlab.prediction.plans import plan_for
from memlab.running import Ended
from memlab.runtime.isolation import runner
from memlab.store.recorded import target_for
from memlab.techniques import every
from memlab.techniques.accumulation import has_samples_first
from memlab.techniques.batches import tensors_of
from memlab.techniques.checkpointing import policies
from memlab.techniques.loss.loss_tensors import tensors_of_loss
from memlab.techniques.sharding.deepspeed_engine import OF_TORCH, STAGES
from memlab.techniques.sharding.ranks import is_tensor_parallel
from memlab.techniques.technique import Plan
from memlab.workload import Workload
from memlab.workloads import check_installed

__all__ = ["LIBRARIES", "Flavor", "export_script", "layers_of", "plan_of"]

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
    try:
        run = runner(True, PLANNING_SECONDS, None, None)
        return plan_for(workload, config, target_for(device, config), seed=0, run=run)
    except Ended as ended:
        raise UnsupportedError(str(ended)) from None


def layers_of(
    workload: Workload, config: StepConfig, device: str | torch.device | None
) -> Layers | None:
    """Return which layers the ranks divide, found by trying the model; None if they divide none."""
    if not is_tensor_parallel(config):
        return None
    every.check(config, torch.device(target_for(device, config).kind))
    try:
        run = runner(True, PLANNING_SECONDS, None, None)
        return layers_for(workload, config, target_for(device, config), run=run)
    except Ended as ended:
        raise UnsupportedError(str(ended)) from None
