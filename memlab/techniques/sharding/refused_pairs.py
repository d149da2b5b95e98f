"""What other techniques do not go with a strategy of several ranks, and why.

Each refusal is data, as `Technique` says. What DeepSpeed's engine does not do is in
`deepspeed_engine.py`.
"""

from collections.abc import Iterator

from memlab.config import Optimizer, OptimizerImplementation, Precision, Sharding, StepConfig
from memlab.techniques.compilation import asked_by, is_compiled, without
from memlab.techniques.sharding.ranks import FULLY_SHARDED, REPLICATED, is_tensor_parallel
from memlab.techniques.technique import Refusal

ONE_KIND = (OptimizerImplementation.FOREACH, OptimizerImplementation.FUSED)


def refusals(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse what does not go with a strategy.

    Args:
        config: with several ranks.
        said: the strategy as the beginning of a sentence.
    """
    yield from _of_compiling(config, said)
    yield from _of_formats(config, said)
    yield from _of_replicas(config, said)
    if config.sharding in FULLY_SHARDED or is_tensor_parallel(config):
        yield from _of_shards(config, said)
        yield from _of_in_place(config, said)
    yield from _of_offloading(config, said)
    if is_tensor_parallel(config):
        yield from _of_divided_layers(config, said)


def _of_compiling(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse to compile what is not compiled whole, or not by PyTorch."""
    if not is_compiled(config):
        return
    why = ""
    if config.is_deepspeed:
        why = " is not implemented: DeepSpeed's engine compiles a model by a method of its own"
    elif is_tensor_parallel(config):
        why = ": torch.compile does not trace the DTensors between divided layers (torch 2.13)"
    elif config.memory_budget < 1.0 and not config.is_planned:
        who = "DistributedDataParallel" if config.sharding in REPLICATED else "FSDP2"
        why = f": the plan needs the model in one graph, which the hooks of {who} break"
    if why:
        yield Refusal(why=f"{said} with {asked_by(config)}{why}", remedies=(without(config),))


def _of_formats(config: StepConfig, said: str) -> Iterator[Refusal]:
    if config.precision is Precision.FP8_MIXED:
        yield Refusal(
            why=f"{said} with precision='fp8-mixed' is not implemented: fp8 layers run on cards "
            "only and cannot be predicted, so nothing has checked what several ranks make of them",
            remedies=({"precision": Precision.BF16_MIXED},),
        )


def _of_replicas(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse what would make the copies of a model different, or use one rank's gradients."""
    if config.sharding in REPLICATED and config.optimizer_in_backward:
        yield Refusal(
            why=f"{said} with optimizer_in_backward=True: each rank would update its weights "
            "before the ranks have averaged their gradients",
            remedies=({"optimizer_in_backward": False},),
        )
    has_copies = config.sharding in (Sharding.DDP, Sharding.HYBRID)
    if has_copies and config.precision is Precision.BF16_STOCHASTIC:
        yield Refusal(
            why=f"{said} with precision='bf16-stochastic': each rank would round its copy of the "
            "weights by other random numbers, and the copies would drift apart",
            remedies=({"precision": Precision.BF16_MASTER},),
        )


def _of_shards(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse what does not work with parameters of which a rank holds a part."""
    adamw = {"optimizer": Optimizer.ADAMW}
    if config.optimizer is Optimizer.ADAMW_8BIT:
        yield Refusal(
            why=f"{said} with optimizer='adamw-8bit': bitsandbytes knows no DTensor, as which each "
            "rank holds its part of a parameter",
            remedies=(adamw,),
        )
    if config.optimizer is Optimizer.ADAFACTOR:
        yield Refusal(
            why=f"{said} with optimizer='adafactor': torch.optim.Adafactor takes norms of "
            "a DTensor in place, which DTensor does not implement (torch 2.13)",
            remedies=(adamw,),
        )
    if config.channels_last and config.sharding in FULLY_SHARDED:
        yield Refusal(
            why=f"{said} with channels_last=True: FSDP2 divides contiguous parameters only",
            remedies=({"channels_last": False},),
        )


def _of_in_place(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse to write over activations, of which the trial that allows it is made without ranks."""
    if not config.inplace:
        return
    why = (
        "FSDP2 makes the inputs of its units views, in which autograd forbids to write, and its "
        "own operators hide whether a forward runs others than the trial did"
    )
    if is_tensor_parallel(config):
        why = (
            "the trial that says what may be written over sees DTensors, and not the memory of "
            "their parts"
        )
    yield Refusal(why=f"{said} with inplace=True: {why}", remedies=({"inplace": False},))


def _of_offloading(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse what is not offloaded by a strategy, or only together with something else."""
    if config.is_deepspeed:
        if config.offload_activations:
            yield Refusal(
                why=f"{said} with offload_activations=True is not implemented: DeepSpeed's engine "
                "does not run over fake tensors, so without a card nothing says whether its hooks "
                "and those that offload go together",
                remedies=({"offload_activations": False},),
            )
        return
    if config.offload_activations and is_tensor_parallel(config):
        yield Refusal(
            why=f"{said} with offload_activations=True: what divided layers save for backward are "
            "DTensors, and the hooks that offload do not see the memory of their parts",
            remedies=({"offload_activations": False},),
        )
    if not config.offload_parameters:
        return

    stay = {"offload_parameters": False}
    if is_tensor_parallel(config):
        yield Refusal(
            why=f"{said} with offload_parameters=True: which layers are divided is found by "
            "running the model, and for that all of it must be on the card",
            remedies=(stay,),
        )
    elif config.sharding in REPLICATED:
        yield Refusal(
            why=f"{said} with offload_parameters=True: DistributedDataParallel needs all "
            "parameters on the card when it is built",
            remedies=({"sharding": Sharding.ZERO3, "offload_optimizer": True}, stay),
        )
    else:
        yield from _of_offloaded_shards(config, said)


def _of_offloaded_shards(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse what FSDP2's policy of offloading does not go with."""
    stay = {"offload_parameters": False}
    if not config.offload_optimizer:
        yield Refusal(
            why=f"{said} with offload_parameters=True and offload_optimizer=False: FSDP2 keeps "
            "parameters in host memory together with their gradients and their optimizer state",
            remedies=({"offload_optimizer": True}, stay),
        )
    if config.precision is Precision.FP16_MIXED:
        yield Refusal(
            why=f"{said} with offload_parameters=True and precision='fp16-mixed': the loss scaler "
            "of PyTorch brings its scale to gradients in host memory by a copy that the processor "
            "does not wait for",
            remedies=({"precision": Precision.BF16_MIXED}, stay),
        )


def _of_divided_layers(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse what does not work with layers that are divided."""
    if config.sharding is Sharding.TENSOR and not config.sync_each_micro_batch:
        yield Refusal(
            why=f"{said} with sync_each_micro_batch=False does nothing: no gradients are averaged",
            remedies=({"sync_each_micro_batch": True},),
        )
    if config.optimizer_implementation in ONE_KIND:
        yield Refusal(
            why=f"{said} with optimizer_implementation={str(config.optimizer_implementation)!r}: "
            "its kernels update many parameters at once, either DTensors or others, and a model "
            "with divided layers has both",
            remedies=({"optimizer_implementation": OptimizerImplementation.SINGLE_TENSOR},),
        )
    if config.loss_chunks > 1:
        yield Refusal(
            why=f"{said} with loss_chunks={config.loss_chunks}: the ranks divide the head too, and "
            "a chunk of the loss multiplies by a whole weight",
            remedies=({"loss_chunks": 1},),
        )
    if config.precision is Precision.FP16_MIXED:
        yield Refusal(
            why=f"{said} with precision='fp16-mixed': the loss scaler of PyTorch looks at all "
            "gradients at once, either DTensors or others, and a model with divided layers has "
            "both",
            remedies=({"precision": Precision.BF16_MIXED},),
        )
    if config.precision is Precision.BF16_STOCHASTIC:
        yield Refusal(
            why=f"{said} with precision='bf16-stochastic': the ranks would round their copies of "
            "what is not divided by other random numbers",
            remedies=({"precision": Precision.BF16_MASTER},),
        )
