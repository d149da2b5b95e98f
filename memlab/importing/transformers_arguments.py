"""transformers' `TrainingArguments`: each field into a setting, or a sentence why not.

The arguments are read as a dataclass, whatever its version: fields that only older versions have
are known too, and fields of a subclass that nobody knows are reported as not imported.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from memlab.arguments.quoting import shown
from memlab.config import CompileMode
from memlab.errors import ConfigError
from memlab.importing.optimizer_classes import (
    ADAM_BETAS,
    ADAM_EPS,
    HYPERPARAMETER,
    hyperparameter,
    usual_value,
)
from memlab.importing.precisions import take_mixed, take_tf32
from memlab.importing.rank_fields import of_arguments, take_ranks
from memlab.importing.reading import OFF, SourceReading
from memlab.importing.transformers_names import NOT_CONCERNED, NOT_IMPORTED

NO_SCHEDULE = "memlab has no schedules of this kind; memory and time of a step do not depend on it"
EIGHT_BIT = (
    "the Trainer keeps the states of embeddings in fp32, memlab in 8 bits: the Trainer needs 6 "
    "bytes more for each value of an embedding"
)
PAGED = "memlab does not page the optimizer's state to host memory"
TRAINERS_ADAFACTOR = "PyTorch's Adafactor stands for transformers' own, which keeps the same states"
FP32_OUTPUTS = (
    "the Trainer also casts the outputs of the model to fp32 when its forward has ended, which "
    "memlab does not: one more copy of the logits"
)
# settings for each name of `optim`, and a sentence; an empty one means the same update
OPTIMIZERS: dict[str, tuple[dict[str, str], str]] = {
    "adamw_torch": ({"optimizer": "adamw"}, ""),
    "adamw_torch_fused": ({"optimizer": "adamw", "optimizer_implementation": "fused"}, ""),
    "adamw_hf": (
        {"optimizer": "adamw", "optimizer_implementation": "single-tensor"},
        "PyTorch's AdamW stands for transformers' own, which updated one parameter after another",
    ),
    "adamw_apex_fused": (
        {"optimizer": "adamw", "optimizer_implementation": "fused"},
        "PyTorch's fused AdamW stands for apex's",
    ),
    "adafactor": ({"optimizer": "adafactor"}, TRAINERS_ADAFACTOR),
    "sgd": ({"optimizer": "sgd"}, ""),
    "adamw_bnb_8bit": ({"optimizer": "adamw-8bit"}, EIGHT_BIT),
    "adamw_8bit": ({"optimizer": "adamw-8bit"}, EIGHT_BIT),
}
INSTEAD: dict[str, tuple[dict[str, str], str]] = {
    "paged_adamw_8bit": ({"optimizer": "adamw-8bit"}, f"{PAGED}; {EIGHT_BIT}"),
    "paged_adamw_32bit": ({"optimizer": "adamw"}, PAGED),
    "paged_adamw": ({"optimizer": "adamw"}, PAGED),
}
ADAM_FIELDS = ("adam_beta1", "adam_beta2", "adam_epsilon")


def values_of(arguments: Any) -> dict[str, Any]:
    """Return the fields of TrainingArguments by name.

    Raises:
        ConfigError: the object is no dataclass.
    """
    if not dataclasses.is_dataclass(arguments) or isinstance(arguments, type):
        raise ConfigError(
            f"source={shown(arguments)} has no fields; pass an instance of TrainingArguments"
        )
    return {each.name: getattr(arguments, each.name) for each in dataclasses.fields(arguments)}


def read_arguments(
    values: Mapping[str, Any], formats: Sequence[str] = (), world_size: int | None = None
) -> SourceReading:
    """Return what becomes of each field.

    Args:
        values: fields of TrainingArguments by name, of any version.
        formats: the formats of the model's parameters; empty if there is no model.
        world_size: number of ranks; None reads the step of one process.
    """
    reading = SourceReading(values)
    _read_batch(reading)
    _read_precision(reading, formats)
    _read_optimizer(reading)
    _read_checkpointing(reading)
    _read_compiling(reading)
    _read_batch_keepers(reading)
    for why, names in NOT_CONCERNED.items():
        reading.skip_all(names, why)
    for name, (off, why) in NOT_IMPORTED.items():
        reading.leave_unless(off, name, why)
    take_ranks(reading, world_size, of_arguments(values))
    return reading


def _read_batch(reading: SourceReading) -> None:
    values = reading.values
    name = "per_device_train_batch_size"
    if values.get("per_gpu_train_batch_size") is not None:  # it wins where it exists
        reading.skip(name, "per_gpu_train_batch_size overrides it")
        name = "per_gpu_train_batch_size"
    else:
        reading.skip("per_gpu_train_batch_size")

    size = reading.whole_number(name, 8)
    steps = reading.whole_number("gradient_accumulation_steps", 1)
    reading.take(name, f"{size} x {steps} in one update of one process", batch_size=size * steps)
    reading.take("gradient_accumulation_steps", accumulation_steps=steps)


def _read_precision(reading: SourceReading, formats: Sequence[str]) -> None:
    values = reading.values
    for name, precision in (("bf16", "bf16-mixed"), ("fp16", "fp16-mixed")):
        if values.get(name):
            take_mixed(reading, name, precision, formats, FP32_OUTPUTS)
        else:
            reading.skip(name)

    if values.get("tf32"):
        take_tf32(reading, "tf32", formats)
    else:
        reading.skip("tf32")

    apex = "memlab does not use NVIDIA's apex"
    usual: tuple[object, ...] = (None, "auto", "amp", "cuda_amp", "cpu_amp")
    for name in ("half_precision_backend", "fp16_backend"):
        reading.leave_unless(usual, name, apex)
    reading.skip("fp16_opt_level", "it is about NVIDIA's apex")


def _read_optimizer(reading: SourceReading) -> None:
    values = reading.values
    name = str(getattr(values.get("optim"), "value", values.get("optim")))
    if values.get("adafactor"):  # a flag of transformers 4
        name = "adafactor"
        reading.take("adafactor", TRAINERS_ADAFACTOR, optimizer="adafactor")
    else:
        reading.skip("adafactor")

    if name in OPTIMIZERS:
        settings, why = OPTIMIZERS[name]
        reading.take("optim", why, **settings)
    else:
        settings, why = INSTEAD.get(name, ({"optimizer": "adamw"}, "memlab has no such optimizer"))
        reading.leave("optim", why, **settings)
    _read_hyperparameters(reading, settings["optimizer"])

    norm = values.get("max_grad_norm")
    if norm is not None and norm > 0:
        reading.take("max_grad_norm", max_grad_norm=norm)
    else:
        reading.take("max_grad_norm", "the Trainer does not clip", max_grad_norm=None)


def _read_hyperparameters(reading: SourceReading, optimizer: str) -> None:
    usual = (*ADAM_BETAS, ADAM_EPS)
    for name, value in zip(ADAM_FIELDS, usual, strict=True):
        if optimizer.startswith("adam"):
            hyperparameter(reading, name, value)
        else:
            reading.skip(name, f"{optimizer} has no such value")
    for name, option in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        hyperparameter(reading, name, usual_value(option, optimizer))
    reading.leave_unless((None, ""), "optim_args", HYPERPARAMETER)

    schedule = reading.values.get("lr_scheduler_type")
    if getattr(schedule, "value", schedule) == "constant":
        reading.skip("lr_scheduler_type", "a constant rate has no schedule")
    else:
        reading.leave("lr_scheduler_type", NO_SCHEDULE)
    for name in ("lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"):
        reading.leave_unless((None, {}, 0, 0.0), name, NO_SCHEDULE)


def _read_checkpointing(reading: SourceReading) -> None:
    values = reading.values
    names = [n for n in ("activation_checkpointing", "gradient_checkpointing") if n in values]
    is_on = any(values[name] for name in names)
    for name in names:
        if is_on:
            reading.take(name, checkpointing="blocks")
        else:
            reading.skip(name)
    for name in names:
        _read_checkpointing_options(reading, f"{name}_kwargs", is_on)

    if is_on:
        reading.take("use_cache", "a checkpointed model fills no cache", model_cache=False)
        reading.settings["model_cache"] = False  # older versions have no such field
    elif "use_cache" in values:
        reading.take("use_cache", model_cache=bool(values["use_cache"]))


def _read_checkpointing_options(reading: SourceReading, name: str, is_on: bool) -> None:
    options = reading.values.get(name)
    if not options or not isinstance(options, Mapping):
        reading.leave_unless((None, {}), name, "these options could not be read")
        return
    if not is_on:
        reading.skip(name, "checkpointing is off")
        return

    rest = dict(options)
    every = rest.pop("every_n_layers", 1)
    if rest.pop("use_reentrant", False):
        rest["use_reentrant"] = True
    rest = {key: value for key, value in rest.items() if value not in (False, None)}
    settings = {} if every == 1 else {"checkpoint_modules": f"every {every}"}
    if not rest:
        reading.take(name, **(settings or {"checkpointing": "blocks"}))
        return
    reading.leave(
        name,
        f"of these options {', '.join(rest)} has no effect here: memlab's checkpointing is not "
        "reentrant, restores random numbers and keeps inputs on the device; gradients are the same",
        **settings,
    )


def _read_compiling(reading: SourceReading) -> None:
    values = reading.values
    old = values.get("torchdynamo")
    backend = values.get("torch_compile_backend") or old
    mode = values.get("torch_compile_mode")
    if not (values.get("torch_compile") or backend or mode):
        for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode", "torchdynamo"):
            reading.skip(name)
        return

    if backend in (None, "inductor"):
        reading.take("torch_compile", compile=True)
        reading.take("torch_compile_backend", compile=True)
        reading.take("torchdynamo", compile=True)
    else:
        why = f"memlab compiles with Inductor, not with {shown(backend)}; the config does not"
        for name in ("torch_compile", "torch_compile_backend", "torchdynamo"):
            reading.leave(name, why, compile=False)

    if mode is None:
        reading.skip("torch_compile_mode")
    elif reading.settings["compile"] and mode in list(CompileMode):
        reading.take("torch_compile_mode", compile_mode=mode)
    else:
        reading.leave("torch_compile_mode", "memlab has no such mode")


def _read_batch_keepers(reading: SourceReading) -> None:
    """Report the fields that matter for batches, loss and parts of the model."""
    values = reading.values
    config = values.get("accelerator_config")
    options = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    if options.get("split_batches"):
        reading.leave(
            "accelerator_config",
            "split_batches divides a batch among processes; batch_size is that of one process",
        )
    else:
        reading.skip("accelerator_config", "it is about how batches reach the processes")

    for name in ("remove_unused_columns", "label_names"):
        reading.skip(name, f"{OFF} without a Trainer, whose data it is about")
    reading.leave_unless(
        (0, 0.0),
        "label_smoothing_factor",
        "there is no workload whose loss it could smooth; pass a Trainer with data",
    )
