"""accelerate's config file, as `accelerate config` writes it.

Such a file says where a script runs and in which precision. The batch size, the optimizer and the
model are in the script itself.
"""

from collections.abc import Mapping
from typing import Any

from memlab._util.units import shown
from memlab.config import CompileMode
from memlab.integrations.reading import (
    IT_IS_OFF,
    SHARDING,
    ImportedTraining,
    SourceReading,
    flattened,
    of_accelerate,
    take_mixed,
    take_ranks,
)

MARKS = {"compute_environment", "distributed_type", "machine_rank", "num_machines", "fsdp_config",
         "deepspeed_config", "main_training_function", "mixed_precision"}  # fmt: skip
WHERE = "it says where and how processes start"
NOT_CONCERNED = (
    "compute_environment", "debug", "enable_cpu_affinity", "machine_rank", "main_process_ip",
    "main_process_port", "main_training_function", "rdzv_backend", "same_network", "use_cpu",
    "gpu_ids", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_vm",
    "command_file", "commands", "cluster", "zone", "ec2_instance_type", "iam_role_name",
    "image_uri", "profile", "region", "base_job_name", "pytorch_version", "transformers_version",
    "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args",
    "num_cpu_threads_per_process", "log_with",
)  # fmt: skip
SHARDED = ("fsdp_config.", "megatron_lm_config.", "parallelism_config.", "deepspeed_config.")
SINGLE = ("NO", "no", "No", False, None)
NO_BATCH = "accelerate's file has no batch size; it is that of the script, here memlab's default"


def read_accelerate(
    config: Mapping[str, Any], source: str, world_size: int | None = None
) -> ImportedTraining:
    """Return the step that a config file of accelerate describes."""
    reading = SourceReading(flattened(config))
    _read_precision(reading)
    _read_dynamo(reading)
    _read_accumulation(reading)
    reading.skip_all(NOT_CONCERNED, WHERE)
    for name in ("num_machines", "num_processes"):
        reading.leave_unless((1, -1, 0, "1"), name, SHARDING)
    if reading.values.get("distributed_type") in SINGLE:
        reading.skip("distributed_type", "one process holds the whole model, as in memlab")
    else:
        reading.leave("distributed_type", SHARDING)
    for name, value in reading.values.items():
        _read_nested(reading, name, value)

    reading.add("batch size", None)
    reading.leave("batch size", NO_BATCH, batch_size=max(
        8, reading.settings.get("accumulation_steps", 1)))  # fmt: skip
    if world_size is not None:
        take_ranks(reading, world_size, of_accelerate(reading.values, world_size))
    return reading.finish(source)


def _read_precision(reading: SourceReading) -> None:
    values = reading.values
    if values.get("fp16") is True and "mixed_precision" not in values:  # accelerate before 0.7
        take_mixed(reading, "fp16", "fp16-mixed", ())
        _read_downcast(reading)
        return

    reading.skip("fp16")
    name = str(values.get("mixed_precision", "no")).lower()
    backend = str(values.get("fp8_config.backend", "AO")).upper()
    if name in ("no", "false", "none"):  # YAML reads an unquoted no as False
        reading.take("mixed_precision", "the formats of the model stay", precision="as-built")
    elif name in ("bf16", "fp16"):
        take_mixed(reading, "mixed_precision", f"{name}-mixed", ())
    elif name == "fp8" and backend == "AO":
        take_mixed(reading, "mixed_precision", "fp8-mixed", (), "with torchao, one scale a tensor")
    else:
        why = f"memlab has no precision like {shown(name)} (of {backend})" if name == "fp8" else (
            f"memlab does not know the precision {shown(name)}"
        )  # fmt: skip
        reading.leave("mixed_precision", why, precision="as-built")
    _read_downcast(reading)


def _read_downcast(reading: SourceReading) -> None:
    if reading.values.get("downcast_bf16") in (False, "no", None):
        reading.skip("downcast_bf16")
    else:
        reading.leave("downcast_bf16", "it is for TPUs, which memlab does not know")


def _read_dynamo(reading: SourceReading) -> None:
    values = reading.values
    nested, flat = "dynamo_config.dynamo_backend", "dynamo_backend"
    name = nested if nested in values else flat
    backend = str(values.get(name, "no")).upper()
    if backend == "INDUCTOR":
        reading.take(name, compile=True)
    elif backend in ("NO", "FALSE", "NONE"):
        reading.skip(name)
    else:
        reading.leave(name, f"memlab compiles with Inductor, not with {backend}", compile=False)

    is_compiled = reading.settings.get("compile", False)
    mode = values.get("dynamo_config.dynamo_mode")
    if is_compiled and mode in list(CompileMode):
        reading.take("dynamo_config.dynamo_mode", compile_mode=mode)
    else:
        reading.leave_unless((None, "default"), "dynamo_config.dynamo_mode",
                             "memlab has no such mode")  # fmt: skip
    for part in ("use_fullgraph", "use_dynamic", "use_regional_compilation"):
        reading.leave_unless(
            (False, None), f"dynamo_config.dynamo_{part}", "memlab compiles the whole model at once"
        )


def _read_accumulation(reading: SourceReading) -> None:
    """Report accumulation and clipping, which a file has for DeepSpeed or at its top."""
    for name in ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps"):
        if reading.values.get(name) in (None, "auto"):
            reading.leave_unless((None,), name, "the script or the Trainer fills it in")
        else:
            reading.take(name, accumulation_steps=reading.whole_number(name, 1))
    name = "deepspeed_config.gradient_clipping"
    bound = reading.values.get(name)
    if bound in (None, "auto"):
        reading.leave_unless((None,), name, "the script or the Trainer fills it in")
    elif not bound:
        reading.skip(name)
    else:
        reading.take(name, max_grad_norm=bound)


def _read_nested(reading: SourceReading, name: str, value: Any) -> None:
    """Report what belongs to a way of training on several devices."""
    if name == "deepspeed_config.deepspeed_config_file":
        reading.leave(name, "memlab.from_trainer of this file itself says what it holds")
    elif name in ("deepspeed_config.gradient_accumulation_steps",
                  "deepspeed_config.gradient_clipping"):  # fmt: skip
        return
    elif name == "fsdp_config.fsdp_activation_checkpointing" and value is True:
        reading.take(name, "the blocks that memlab finds stand for FSDP's units",
                     checkpointing="blocks", model_cache=False)  # fmt: skip
    elif name.startswith(SHARDED):
        if value in (None, False, "none"):
            reading.skip(name)
        else:
            reading.leave(name, SHARDING)
    elif name.startswith("fp8_config."):
        if reading.settings.get("precision") == "fp8-mixed" and name == "fp8_config.backend":
            reading.take(name, precision="fp8-mixed")
        else:
            reading.leave(name, "memlab's fp8 has no such option")
    elif name.startswith(("mpirun_config.", "ipex_config.")) or (
        value in (None, {}) and name.endswith("_config")
    ):
        reading.skip(name, IT_IS_OFF if value in (None, {}) else WHERE)
