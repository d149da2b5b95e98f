"""transformers' `TrainingArguments`: each field into a setting, or a sentence why not.

The arguments are read as a dataclass, whatever its version: fields that only older versions have
are known too, and fields of a subclass that nobody knows are reported as not imported.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from memlab._util.units import shown
from memlab.config import CompileMode
from memlab.errors import ConfigError
from memlab.integrations.reading import (
    ADAM_BETAS,
    ADAM_EPS,
    HYPERPARAMETER,
    IT_IS_OFF,
    SourceReading,
    hyperparameter,
    of_arguments,
    take_mixed,
    take_ranks,
    take_tf32,
    usual_value,
)

# Which fields of transformers' TrainingArguments do not concern the step, and why.
#
# The names are those of transformers 5.23 and of older versions, back to 4.0.

LOGGING = "it is about logging and reports"
EVALUATION = "it is about evaluation"
SAVING = "it is about saving and publishing"
LENGTH = "it is about how long the training lasts and what the script does"
LOADING = "it is about how batches are loaded; memlab.measure_loading has its own settings"
SEEDS = "memlab takes a seed when it builds a step"
PROCESSES = "it is about communication between processes"
DEVICE = "memlab is given the device when it measures or predicts"

NOT_CONCERNED: dict[str, tuple[str, ...]] = {
    LOGGING: (
        "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
        "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level",
        "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "debug",
        "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics",
        "logging_dir", "include_tokens_per_second", "tpu_metrics_debug",
    ),
    EVALUATION: (
        "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size",
        "prediction_loss_only", "eval_on_start", "eval_do_concat_batches",
        "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
        "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "load_best_model_at_end",
        "metric_for_best_model", "greater_is_better", "do_eval", "do_predict",
        "evaluation_strategy", "evaluate_during_training", "include_inputs_for_metrics",
        "per_gpu_eval_batch_size", "use_legacy_prediction_loop", "jit_mode_eval",
        "generation_max_length", "generation_num_beams", "generation_config",
        "predict_with_generate",
    ),
    SAVING: (
        "output_dir", "save_only_model", "save_strategy", "save_steps", "save_on_each_node",
        "save_total_limit", "enable_jit_checkpoint", "push_to_hub", "hub_token",
        "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
        "overwrite_output_dir", "save_safetensors", "push_to_hub_model_id",
        "push_to_hub_organization", "push_to_hub_token",
    ),
    LENGTH: (
        "num_train_epochs", "max_steps", "do_train", "resume_from_checkpoint", "ignore_data_skip",
        "restore_callback_states_from_checkpoint", "ray_scope",
    ),
    LOADING: (
        "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory",
        "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context", "dataloader_in_order", "train_sampling_strategy",
        "length_column_name", "group_by_length", "dispatch_batches",
    ),
    SEEDS: ("seed", "data_seed"),
    PROCESSES: (
        "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_broadcast_buffers",
        "ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank", "xpu_backend",
        "average_tokens_across_devices",
    ),
    DEVICE: ("use_cpu", "no_cuda", "use_mps_device", "tpu_num_cores"),
}  # fmt: skip

SHARDED = (
    "sharding is not imported: the config is the step of one process, which holds the whole model; "
    "pass world_size, the number of ranks, to import it"
)
NOT_IMPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "fsdp": ((None, "", False), SHARDED),
    "fsdp_config": ((None,), SHARDED),
    "fsdp_min_num_params": ((0,), SHARDED),
    "fsdp_transformer_layer_cls_to_wrap": ((None,), SHARDED),
    "deepspeed": (
        (None,),
        f"{SHARDED}; memlab.from_trainer of the DeepSpeed file itself says what it holds",
    ),
    "sharded_ddp": ((None, "", False), SHARDED),
    "parallelism_config": ((None,), SHARDED),
    "mp_parameters": ((None, ""), SHARDED),
    "split_batches": (
        (None, False),
        "batches that are divided among processes are not imported; batch_size is that of one "
        "process",
    ),
    "auto_find_batch_size": (
        (False,),
        "memlab never changes the batch size by itself; the config has the size that the Trainer "
        "tries first",
    ),
    "use_liger_kernel": (
        (False,),
        "memlab does not replace kernels of a model; build the model with Liger's kernels instead",
    ),
    "liger_kernel_config": ((None,), "memlab does not replace kernels of a model"),
    "neftune_noise_alpha": (
        (None,), "the noise on the embeddings is not added; it takes memory of one embedding output"
    ),
    "torch_empty_cache_steps": (
        (None,), "memlab does not empty the allocator's cache during a step"
    ),
    "full_determinism": (
        (False,), "memlab does not switch to deterministic kernels; they may need other memory"
    ),
    "optim_target_modules": ((None,), "memlab's optimizers update all trainable parameters alike"),
    "jit_mode": ((None, False), "memlab does not script models"),
    "use_ipex": ((None, False), "memlab does not use Intel's extension for PyTorch"),
    "past_index": ((-1,), "memlab does not carry hidden states from one batch to the next"),
}  # fmt: skip


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
        reading.skip(name, f"{IT_IS_OFF} without a Trainer, whose data it is about")
    reading.leave_unless(
        (0, 0.0),
        "label_smoothing_factor",
        "there is no workload whose loss it could smooth; pass a Trainer with data",
    )
