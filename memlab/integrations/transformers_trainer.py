"""transformers' `Trainer` and `TrainingArguments`: each field into a setting, or why not.

A Trainer is configured and not run; `transformers_workload.py` makes a workload of its parts. The
arguments are read as a dataclass, whatever its version: fields that only older versions have are
known too, and fields of a subclass that nobody knows are reported as not imported.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memlab._util.units import shown
from memlab.config import CompileMode
from memlab.errors import ConfigError, UnsupportedError
from memlab.integrations.reading import (
    ADAM_BETAS,
    ADAM_EPS,
    KINDS,
    NO_WORKLOAD,
    OF_FILE,
    SHARDING,
    TABLES,
    FoundSharding,
    ImportedTraining,
    SourceReading,
    hyperparameter,
    num_trainable_of,
    of_fsdp,
    read_optimizer,
    take_mixed,
    take_ranks,
    take_tf32,
    usual_value,
)
from memlab.integrations.transformers_workload import (
    is_of_trl,
    is_taken,
    owner_of,
    replaced_on,
    workload_of,
)
from memlab.techniques.checkpointing import policies
from memlab.techniques.checkpointing.checkpointing import FLAGS
from memlab.techniques.precision import number_formats

PREPARED = "the data set has been prepared by it"
NO_SCHEDULE = "memlab has no schedules of this kind; memory and time of a step do not depend on it"
FP32_OUTPUTS = (
    "the Trainer also casts the outputs of the model to fp32 when its forward has ended, which "
    "memlab does not: one more copy of the logits"
)
OPTIMIZERS = {row["name"]: row for row in TABLES["transformers"]["optimizers"]}
NO_OPTIMIZER = {
    "settings": {"optimizer": "adamw"},
    "status": "not imported",
    "why": "memlab has no such optimizer",
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
    reading.use_table("transformers")
    _read_batch(reading)
    _read_precision(reading, formats)
    _read_optimizer(reading)
    _read_checkpointing(reading)
    _read_compiling(reading)
    _read_split_batches(reading)
    take_ranks(reading, world_size, _sharding(values))
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


def _read_optimizer(reading: SourceReading) -> None:
    values = reading.values
    name = str(getattr(values.get("optim"), "value", values.get("optim")))
    if values.get("adafactor"):  # a flag of transformers 4
        name = "adafactor"
        reading.take("adafactor", OPTIMIZERS[name]["why"], optimizer=name)
    else:
        reading.skip("adafactor")

    found = OPTIMIZERS.get(name, NO_OPTIMIZER)
    report = reading.take if found["status"] == "imported" else reading.leave
    report("optim", found["why"], **found["settings"])
    _read_hyperparameters(reading, found["settings"]["optimizer"])

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

    schedule = reading.values.get("lr_scheduler_type")
    if getattr(schedule, "value", schedule) == "constant":
        reading.skip("lr_scheduler_type", "a constant rate has no schedule")
    else:
        reading.leave("lr_scheduler_type", NO_SCHEDULE)


def _read_checkpointing(reading: SourceReading) -> None:
    values = reading.values
    names = [n for n in ("activation_checkpointing", "gradient_checkpointing") if n in values]
    is_on = any(values[name] for name in names)
    for name in names:
        reading.switch(name, is_on, checkpointing="blocks")
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
    names = ("torch_compile", "torch_compile_backend", "torchdynamo")
    if not (values.get("torch_compile") or backend or mode):
        for name in (*names, "torch_compile_mode"):
            reading.skip(name)
        return

    for name in names:
        if backend in (None, "inductor"):
            reading.take(name, compile=True)
        else:
            why = f"memlab compiles with Inductor, not with {shown(backend)}; the config does not"
            reading.leave(name, why, compile=False)

    if mode is None:
        reading.skip("torch_compile_mode")
    elif reading.settings["compile"] and mode in list(CompileMode):
        reading.take("torch_compile_mode", compile_mode=mode)
    else:
        reading.leave("torch_compile_mode", "memlab has no such mode")


def _read_split_batches(reading: SourceReading) -> None:
    """Report whether batches are divided among processes."""
    config = reading.values.get("accelerator_config")
    options = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    if options.get("split_batches"):
        reading.leave(
            "accelerator_config",
            "split_batches divides a batch among processes; batch_size is that of one process",
        )
    else:
        reading.skip("accelerator_config", "it is about how batches reach the processes")


def _sharding(values: Mapping[str, Any]) -> FoundSharding:
    """Return the sharding of transformers' TrainingArguments."""
    if values.get("deepspeed"):
        return FoundSharding(sharding=None, why=OF_FILE, names=("deepspeed",))
    if not values.get("fsdp"):
        return FoundSharding(sharding="ddp", why="the Trainer replicates its model")

    given = values.get("fsdp_config")
    options = given if isinstance(given, Mapping) else {}
    options = {str(name).removeprefix("fsdp_"): value for name, value in options.items()}
    words = _words(values["fsdp"])
    named = next((word for word in words if word in KINDS or "hybrid" in word), True)
    kind = options.get("reshard_after_forward", named)
    is_offloaded = "offload" in words or options.get("cpu_offload") in (True, "true")
    names = ("fsdp", *["fsdp_config"] * (given is not None))
    return of_fsdp(kind, is_offloaded=is_offloaded, names=names)


def _words(fsdp: Any) -> list[str]:
    """Return the options of the field `fsdp`: True, words in a text, or a list of them."""
    if isinstance(fsdp, str):
        return fsdp.split()
    return [] if fsdp is True else [str(getattr(each, "value", each)) for each in fsdp]


def read_trl(reading: SourceReading, arguments: Any, has_workload: bool) -> None:
    """Report the fields that trl adds to TrainingArguments; nothing if they are not trl's.

    The data sets of its trainers have been prepared (tokenized, cut, packed) when they are built,
    so that a batch needs none of the fields again.
    """
    if not any(map(is_of_trl, type(arguments).__mro__)):
        return
    reading.use_table("trl")
    for part, names in TABLES["trl"]["into"].items():
        for name in names:
            value = reading.values.get(name)
            if value is None or value is False:
                reading.skip(name)
            elif has_workload:
                reading.take_into(part, name, PREPARED if part == "make_batch" else "")
            else:
                reading.leave(name, NO_WORKLOAD)


# A Trainer: its optimizer, its own methods, its model.

STEP_METHODS = TABLES["transformers"]["step methods"]
UPDATE_METHODS = TABLES["transformers"]["update methods"]
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
NO_EFFECT = "it is about evaluation, saving or reports"
NO_STEP = (
    "memlab takes no function that was put in the place of a method, so there is no workload; "
    "override compute_loss in a subclass, or write a memlab.Workload with this step"
)


def read_trainer(trainer: Any, library: str, world_size: int | None = None) -> ImportedTraining:
    """Return the step of a Trainer.

    Raises:
        ConfigError: the Trainer has been run, which changes its model.
        WorkloadError: its data set cannot be read.
    """
    state = getattr(trainer, "state", None)
    if getattr(state, "global_step", 0) or getattr(trainer, "is_in_train", False):
        raise ConfigError(
            f"source={shown(trainer)} has been run, which changes its model; pass a Trainer that "
            "has been built and not run"
        )

    model = trainer.model
    formats = number_formats(model)
    reading = read_arguments(values_of(trainer.args), formats, world_size)
    _read_given_optimizer(reading, trainer)
    _read_own_methods(reading, trainer)
    _fit_checkpointing(reading, model)
    for name in ("n_gpu", "world_size"):
        if (number := getattr(trainer.args, name, 1)) > 1:
            part = reading.add(f"trainer.args.{name}", number)
            if number == world_size:
                reading.take(part, world_size=number)
            else:
                reading.leave(part, SHARDING)
    for name in ("eval_dataset", "compute_metrics", "processing_class", "model_init"):
        if getattr(trainer, name, None) is not None:
            part = reading.add(f"trainer.{name}", type(getattr(trainer, name)).__name__)
            reading.skip(part, "the model is built already" if name == "model_init" else NO_EFFECT)

    _read_reference(reading, trainer)
    reading.add("trainer.model", type(model).__name__)
    workload = workload_of(reading, trainer) if reading.is_complete else None
    if workload is None:
        reading.leave("trainer.model", NO_WORKLOAD)
    else:
        reading.take_into("build_model", "trainer.model", "copied for each run, never changed")
    read_trl(reading, trainer.args, workload is not None)
    return reading.finish(f"{type(trainer).__name__} of {library}", workload)


def _read_given_optimizer(reading: SourceReading, trainer: Any) -> None:
    given = getattr(trainer, "optimizer_cls_and_kwargs", None)
    if trainer.optimizer is not None:
        for name in ("optim", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
                     "adam_epsilon", "optim_args"):  # fmt: skip
            reading.skip(name, "the Trainer was given an optimizer")
        reading.settings["optimizer_implementation"] = "default"
        read_optimizer(reading, "trainer.optimizer", trainer.optimizer,
                       num_trainable_of(trainer.model))  # fmt: skip
    elif given is not None:
        reading.leave(
            reading.add("trainer.optimizer_cls_and_kwargs", given[0].__name__),
            "memlab takes an optimizer that is built, as in optimizers=(optimizer, None); the "
            "config has that of optim",
        )
    if trainer.lr_scheduler is not None:
        part = reading.add("trainer.lr_scheduler", type(trainer.lr_scheduler).__name__)
        reading.leave(part, "memlab has no schedules of this kind")


def _read_own_methods(reading: SourceReading, trainer: Any) -> None:
    """Report the methods of a subclass that decide what a step computes."""
    for name in ("compute_loss", *STEP_METHODS, *UPDATE_METHODS):
        part = f"trainer.{name}"
        if place := replaced_on(trainer, name):
            reading.add(part, name)
            reading.is_complete &= name in UPDATE_METHODS
            effect = "the config has that of optim" if name in UPDATE_METHODS else NO_STEP
            reading.leave(part, f"{name} was replaced on {place}; {effect}")
            continue
        owner = owner_of(trainer, name)
        if owner is None:
            continue
        reading.add(part, f"{owner.__name__}.{name}")
        if name in UPDATE_METHODS:
            reading.leave(part, f"{owner.__name__} overrides {name}; the config has that of optim")
        elif name == "training_step" and is_taken(owner):
            reading.skip(part, "it adds nothing but activation_offloading")
        elif name in STEP_METHODS:
            reading.is_complete = False
            which = " (of trl, memlab takes SFTTrainer and DPOTrainer)" if is_of_trl(owner) else ""
            reading.leave(
                part,
                f"{owner.__name__} overrides {name}, whose code memlab cannot take out of the "
                f"Trainer{which}, so there is no workload; write a memlab.Workload with this step",
            )
        else:  # until the workload takes it
            reading.leave(part, NO_WORKLOAD)


def _read_reference(reading: SourceReading, trainer: Any) -> None:
    """Report a second model, with which a trainer of trl compares the one it trains."""
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        reading.is_complete = False
        reading.leave(
            reading.add("trainer.ref_model", type(reference).__name__),
            "a step of memlab has one model, so there is no workload; with peft_config the adapter "
            "is switched off instead, and with precompute_ref_log_probs=True the data set has what "
            "the reference says",
        )


def _fit_checkpointing(reading: SourceReading, model: torch.nn.Module) -> None:
    """Have memlab checkpoint the modules that transformers would checkpoint."""
    names = [name for name in CHECKPOINTING if reading.values.get(name)]
    flagged = any(getattr(m, flag, False) is True for m in model.modules() for flag in FLAGS)
    if flagged:
        for field in CHECKPOINTING:
            reading.values.setdefault(field, True)
            reading.take_into("build_model", field, "the model already checkpoints itself")
        for setting in ("checkpointing", "checkpoint_modules"):
            reading.settings.pop(setting, None)
        return
    if not names or "checkpoint_modules" in reading.settings:
        return

    layers = {
        path: type(module).__name__
        for path, module in model.named_modules()
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
    }
    try:
        found = set(policies.select(model, "auto"))
    except UnsupportedError:
        found = set()
    kinds = set(layers.values())
    if found == set(layers):
        return
    for name in names:
        if len(kinds) == 1:
            (kind,) = kinds
            reading.take(name, checkpointing="blocks", checkpoint_modules=kind)
        else:
            reading.leave(
                name,
                f"transformers would checkpoint {', '.join(sorted(kinds)) or 'no module'}; the "
                "config checkpoints the repeated blocks that memlab finds",
                checkpointing="blocks" if found else "none",
            )
