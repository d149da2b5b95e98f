"""What DeepSpeed is told about a step: the JSON of its settings, and what it is not asked to do.

Source: https://www.deepspeed.ai/docs/config-json. What is not mentioned has DeepSpeed's default.
Two defaults show in small models: stage 3 keeps parameters of fewer than 100,000 values whole in
every rank, and gathered parameters stay whole until 1,000,000,000 values of them are live.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from memlab.config import Optimizer, Precision, Sharding, StepConfig
from memlab.techniques.technique import Refusal

STAGES = {
    Sharding.DEEPSPEED_ZERO1: 1,
    Sharding.DEEPSPEED_ZERO2: 2,
    Sharding.DEEPSPEED_ZERO3: 3,
}
OF_TORCH = {1: Sharding.ZERO1, 2: Sharding.ZERO2, 3: Sharding.ZERO3}
USUAL_BUCKET = 500_000_000  # DeepSpeed's default, in values
PRECISIONS: dict[Precision, dict[str, Any]] = {
    Precision.AS_BUILT: {},
    Precision.FP32: {},
    Precision.TF32: {},
    Precision.BF16_MIXED: {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    Precision.BF16_MASTER: {"bf16": {"enabled": True}},
}
"""The formats that mean the same to memlab and DeepSpeed, and how DeepSpeed is told."""


def deepspeed_settings(config: StepConfig, num_parameters: int | None = None) -> dict[str, Any]:
    """Return the settings of DeepSpeed for a step: what `deepspeed.initialize` takes as `config`.

    The optimizer is not among them. It is a torch.optim object that `initialize` takes too.

    Args:
        config: with one of DeepSpeed's strategies.
        num_parameters: values of the trained parameters. DeepSpeed allocates a bucket whole, 2 GB
            in fp32, so it is made no larger than a model that is smaller.

    >>> config = StepConfig(batch_size=8, sharding="deepspeed-zero2", world_size=2)
    >>> deepspeed_settings(config)["zero_optimization"]
    {'stage': 2}
    """
    zero: dict[str, Any] = {"stage": STAGES[config.sharding]}
    if num_parameters is not None and num_parameters < USUAL_BUCKET:
        zero["reduce_bucket_size"] = max(1, num_parameters)
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}

    settings: dict[str, Any] = {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "zero_optimization": zero,
        # optimizers of torch.optim, on the CPU too: DeepSpeed's own are compiled when they are used
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # without it, DeepSpeed clips at 1 from 0.19.3 on
        "gradient_clipping": config.max_grad_norm or 0.0,
    }
    return settings | PRECISIONS[config.precision]


def refusals(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse what DeepSpeed's engine does not do, or does in another way than memlab says."""
    stage = STAGES[config.sharding]
    if find_spec("deepspeed") is None:
        yield Refusal(
            why=f"{said} needs deepspeed, which is not installed",
            remedies=({"sharding": OF_TORCH[stage]},),
            otherwise="pip install 'memlab[deepspeed]'",
        )
    yield from _of_formats(config, said)
    yield from _of_updates(config, said)
    yield from _of_stage(config, said, stage)


def _of_formats(config: StepConfig, said: str) -> Iterator[Refusal]:
    precision = config.precision
    if precision in (Precision.BF16, Precision.BF16_STOCHASTIC):
        yield Refusal(
            why=f"{said} with precision={str(precision)!r}: DeepSpeed keeps fp32 copies of bf16 "
            "weights, which is 'bf16-master'",
            remedies=({"precision": Precision.BF16_MASTER},),
        )
    if precision in (Precision.FP16, Precision.FP16_MIXED):
        yield Refusal(
            why=f"{said} with precision={str(precision)!r} is not implemented: DeepSpeed has a "
            "loss scaler of its own",
            remedies=({"precision": Precision.BF16_MIXED},),
        )


def _of_updates(config: StepConfig, said: str) -> Iterator[Refusal]:
    """Refuse what does not go with parameters that DeepSpeed flattens and updates by itself."""
    if config.optimizer in (Optimizer.ADAFACTOR, Optimizer.ADAMW_8BIT):
        yield Refusal(
            why=f"{said} with optimizer={str(config.optimizer)!r}: DeepSpeed updates all "
            "parameters as one flat tensor, and this optimizer goes by the shape of each",
            remedies=({"optimizer": Optimizer.ADAMW},),
        )
    if config.optimizer_in_backward:
        yield Refusal(
            why=f"{said} with optimizer_in_backward=True: DeepSpeed's engine updates the weights "
            "when backward has ended",
            remedies=({"optimizer_in_backward": False},),
        )
    if config.loss_chunks > 1:
        yield Refusal(
            why=f"{said} with loss_chunks={config.loss_chunks}: DeepSpeed hooks the output of the "
            "model, which is then computed only in the loss",
            remedies=({"loss_chunks": 1},),
        )
    if config.channels_last:
        yield Refusal(
            why=f"{said} with channels_last=True: DeepSpeed makes parameters views of a flat "
            "tensor, which are contiguous",
            remedies=({"channels_last": False},),
        )


def _of_stage(config: StepConfig, said: str, stage: int) -> Iterator[Refusal]:
    once = not config.sync_each_micro_batch
    if config.accumulation_steps > 1 and stage == 1 and not once:
        yield Refusal(
            why=f"{said} with sync_each_micro_batch=True: DeepSpeed's stage 1 averages gradients "
            "once an update",
            remedies=({"sync_each_micro_batch": False},),
        )
    if config.accumulation_steps > 1 and stage > 1 and once:
        yield Refusal(
            why=f"{said} with sync_each_micro_batch=False: DeepSpeed's stages 2 and 3 average "
            "gradients after every micro-batch",
            remedies=({"sync_each_micro_batch": True},),
        )
    if config.offload_parameters and stage < 3:
        yield Refusal(
            why=f"{said} with offload_parameters=True: DeepSpeed offloads parameters in stage 3 "
            "only",
            remedies=({"sharding": Sharding.DEEPSPEED_ZERO3}, {"offload_parameters": False}),
        )
    if config.inplace and stage == 3:
        yield Refusal(
            why=f"{said} with inplace=True: what DeepSpeed's hooks run in a forward hides whether "
            "the model runs other operators than the trial did",
            remedies=({"inplace": False},),
        )


def notes(config: StepConfig) -> list[str]:
    """Say what DeepSpeed does that the config does not mention."""
    said = []
    if STAGES[config.sharding] == 3:
        said.append(
            "DeepSpeed's stage 3 keeps parameters of fewer than 100,000 values whole in every "
            "rank, and gathered ones from their forward to their backward unless more than "
            "1,000,000,000 values are live."
        )
    if config.offload_parameters or config.offload_optimizer:
        said.append(
            "No card has run DeepSpeed's offloading in memlab's tests: these numbers are unchecked."
        )
    return said
