"""DeepSpeed's config, a JSON file or a dict.

The step is that of one process: `train_batch_size` counts the samples of all processes, so the
micro-batch and the accumulation say what one of them trains. What is "auto" is filled in by the
Trainer or by accelerate when training begins.
"""

from collections.abc import Mapping
from typing import Any

from memlab.integrations.reading import (
    ADAM_BETAS,
    ADAM_EPS,
    IT_IS_OFF,
    SHARDING,
    ImportedTraining,
    SourceReading,
    flattened,
    hyperparameter,
    of_deepspeed,
    take_mixed,
    take_ranks,
    usual_value,
)

MARKS = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "fp16", "bf16",
         "bfloat16", "gradient_clipping", "zero_allow_untested_optimizer", "steps_per_print",
         "wall_clock_breakdown", "optimizer", "scheduler", "activation_checkpointing"}  # fmt: skip
AUTO = '"auto" is filled in when training begins: pass the Trainer or the TrainingArguments too'
REPORTS = "it is about logging, profiling and saving"
NOT_CONCERNED = (
    "steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "flops_profiler",
    "tensorboard", "wandb", "csv_monitor", "comet", "monitor_config", "comms_logger", "checkpoint",
    "nebula", "dataloader_drop_last", "timers", "autotuning", "aio",
)  # fmt: skip
COMMUNICATION = (
    "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    "disable_allgather", "sparse_gradients", "seq_parallel_communication_data_type",
    "fp32_allreduce",
)  # fmt: skip
UNSAID_CLIPPING = (
    "it is not given, and DeepSpeed then clips at 1 from 0.19.3 on; with an older one use "
    "max_grad_norm=None"
)
UNTESTED = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
WITHOUT: dict[str, str] = {
    "zero_optimization": SHARDING,
    "activation_checkpointing": "it is for models whose code calls deepspeed.checkpointing; "
    "checkpointing='blocks' of memlab recomputes the repeated blocks",
    "compile": "memlab compiles the whole model with compile=True, not by DeepSpeed's passes",
    "scheduler": "memlab has no schedules of this kind; memory and time of a step do not depend on "
    "it",
    "amp": "memlab does not use NVIDIA's apex",
    "data_types": "memlab accumulates gradients in the format of the weights",
}
NOT_IN_STEP = "a step of memlab has nothing like it"
WITHOUT |= dict.fromkeys(("elasticity", "tensor_parallel", "pipeline", "hybrid_engine"), SHARDING)
WITHOUT |= dict.fromkeys(
    (
        "compression_training", "curriculum_learning", "data_efficiency", "eigenvalue",
        "progressive_layer_drop", "quantize_training", "sparse_attention", "zenflow",
    ),
    NOT_IN_STEP,
)  # fmt: skip
PRECISIONS = ("fp16", "bf16", "bfloat16", "torch_autocast")
SCALER = "memlab's scaler has PyTorch's defaults; it changes neither memory nor time"
USUAL = [("bias_correction", True), ("momentum", 0), ("momentum", 0.9)]
FUSED = {"optimizer": "adamw", "optimizer_implementation": "fused"}
OPTIMIZERS: dict[str, tuple[dict[str, str], str]] = {
    "adamw": (FUSED, "PyTorch's fused AdamW stands for DeepSpeed's"),
    "adam": (FUSED, "DeepSpeed's Adam decouples weight decay (adam_w_mode), as AdamW does"),
    "sgd": ({"optimizer": "sgd"}, ""),
    "adafactor": ({"optimizer": "adafactor"}, ""),
}


def read_deepspeed(
    config: Mapping[str, Any], source: str, world_size: int | None = None
) -> ImportedTraining:
    """Return the step that a DeepSpeed config describes.

    >>> given = read_deepspeed({"train_micro_batch_size_per_gpu": 4, "fp16": {}}, "a dict")
    >>> given.config.batch_size
    4
    """
    reading = SourceReading(flattened(config))
    _read_batch(reading, world_size or 1)
    _read_precision(reading)
    _read_optimizer(reading)
    _read_clipping(reading)
    for name, value in reading.values.items():
        _read_rest(reading, name, value)
    take_ranks(reading, world_size, of_deepspeed(reading.values))
    return reading.finish(source)


def _read_batch(reading: SourceReading, num_ranks: int) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given: dict[str, int | None] = {}
    for name in names:
        if reading.values.get(name) == "auto":
            reading.leave(name, AUTO)
            given[name] = None
        else:
            given[name] = None if reading.values.get(name) is None else (
                reading.whole_number(name, 1)
            )  # fmt: skip

    total, micro, steps = given.values()
    if total is not None and total % num_ranks == 0:
        total //= num_ranks  # of one process, as all that follows
    if steps is None and micro is not None and total is not None and total % micro == 0:
        size, steps = total, total // micro
        why = f"{steps} micro-batches of {micro}, as if there were one process"
        reading.take(names[0], why, batch_size=total)
        reading.take(names[1], why, accumulation_steps=steps)
        reading.settings["accumulation_steps"] = steps
    elif micro is None and total is not None:
        size = total
        reading.take(names[0], "as if there were one process", batch_size=total)
    else:
        size = (micro or 8) * (steps or 1)
        why = f"{micro or 8} x {steps or 1} in one update of one process"
        if micro is not None:
            reading.take(names[1], why, batch_size=size)
        if total is not None and total == size:
            reading.take(names[0], batch_size=size)
        elif total is not None:
            reading.leave(names[0], f"it counts the samples of all processes; {SHARDING}",
                          batch_size=size)  # fmt: skip
    reading.settings["batch_size"] = size
    if steps is not None:
        reading.take(names[2], accumulation_steps=steps)
    if total is None and micro is None:
        reading.add("batch size", None)
        reading.leave("batch size", "no batch size is given; it is memlab's default",
                      batch_size=size)  # fmt: skip


def _is_on(reading: SourceReading, part: str) -> bool:
    return reading.values.get(f"{part}.enabled") is True


def _read_precision(reading: SourceReading) -> None:
    for part in ("bf16", "bfloat16"):
        name = f"{part}.enabled"
        if _is_on(reading, part):
            reading.take(
                name,
                "DeepSpeed keeps fp32 weights beside those in bf16, as bf16-master does; it also "
                "adds micro-batches up in fp32 unless ZeRO shards gradients",
                precision="bf16-master",
            )
        else:
            reading.leave_unless((None, False), name, AUTO)
    if _is_on(reading, "fp16"):
        reading.leave(
            "fp16.enabled",
            "DeepSpeed keeps fp16 weights and fp32 copies of them; memlab has fp32 weights with "
            "autocast to fp16 and a loss scaler instead",
            precision="fp16-mixed",
        )
    else:
        reading.leave_unless((None, False), "fp16.enabled", AUTO)
    if _is_on(reading, "torch_autocast"):
        kind = str(reading.values.get("torch_autocast.dtype", "bfloat16"))
        precision = "fp16-mixed" if kind in ("float16", "half", "fp16") else "bf16-mixed"
        take_mixed(reading, "torch_autocast.enabled", precision, ())
        if "torch_autocast.dtype" in reading.values:
            reading.take("torch_autocast.dtype", precision=precision)
    else:
        reading.leave_unless((None, False), "torch_autocast.enabled", AUTO)


def _read_optimizer(reading: SourceReading) -> None:
    kind = reading.values.get("optimizer.type")
    found = OPTIMIZERS.get(str(kind).lower())
    if found is None:
        reading.leave(
            "optimizer.type", "memlab has no such optimizer; the config has the default",
            optimizer="adamw",
        )  # fmt: skip
        settings: dict[str, str] = {"optimizer": "adamw"}
    else:
        settings, why = found
        parameters = reading.values
        if str(kind).lower() == "adam" and parameters.get("optimizer.params.adam_w_mode") is False:
            settings, why = {"optimizer": "adam", "optimizer_implementation": "fused"}, ""
        if str(kind).lower() == "sgd" and parameters.get("optimizer.params.momentum"):
            settings = {"optimizer": "sgd-momentum"}
        if parameters.get("optimizer.params.torch_adam") is True:
            settings = {**settings, "optimizer_implementation": "default"}
        reading.take("optimizer.type", why, **settings)

    optimizer = settings["optimizer"]
    for name in [n for n in reading.values if n.startswith("optimizer.params.")]:
        option = name.rpartition(".")[2]
        if reading.values[name] == "auto":
            reading.leave(name, AUTO)
        elif option in ("lr", "weight_decay", "betas", "eps"):
            usual = {"betas": ADAM_BETAS, "eps": ADAM_EPS}.get(option)
            hyperparameter(reading, name, usual or usual_value(option, optimizer))
        elif option in ("adam_w_mode", "torch_adam"):
            reading.take(name, **settings)
        elif (option, reading.values[name]) in USUAL:
            reading.same(name, f"optimizer={optimizer}")
        else:
            reading.leave(name, "memlab's optimizers have no such option")


def _read_clipping(reading: SourceReading) -> None:
    if "gradient_clipping" not in reading.values:
        reading.add("gradient_clipping", None)
        reading.take("gradient_clipping", UNSAID_CLIPPING, max_grad_norm=1.0)
        return

    bound = reading.values["gradient_clipping"]
    if bound == "auto":
        reading.leave("gradient_clipping", AUTO)
    elif not bound:
        reading.skip("gradient_clipping", "DeepSpeed does not clip")
    else:
        reading.take("gradient_clipping", max_grad_norm=bound)


def _read_rest(reading: SourceReading, name: str, value: Any) -> None:
    """Report the fields that no function above has."""
    part, _, rest = name.partition(".")
    if reading.values.get(f"{part}.enabled") is False:
        reading.skip(name, f"{part} is not enabled")
    elif part in NOT_CONCERNED:
        reading.skip(name, REPORTS)
    elif part in COMMUNICATION:
        reading.leave_unless((None, False, 1.0), name, SHARDING)
    elif part in UNTESTED:
        reading.skip(name, "it is about which optimizers ZeRO allows")
    elif part in PRECISIONS and rest not in ("enabled", "dtype"):
        if _is_on(reading, part):
            reading.leave(name, SCALER if part == "fp16" else f"memlab has no {rest}")
        else:
            reading.skip(name, f"{part} is not enabled")
    elif part in WITHOUT:
        is_off = value in (None, False, 0, "none", {}) and part != "scheduler"
        if is_off:
            reading.skip(name, IT_IS_OFF)
        else:
            reading.leave(name, AUTO if value == "auto" and part != "zero_optimization"
                          else WITHOUT[part])  # fmt: skip
