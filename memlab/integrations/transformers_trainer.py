"""transformers' `Trainer`, configured but not run: its arguments, and a workload of its parts."""

from typing import Any

import torch

from memlab._util.units import shown
from memlab.errors import ConfigError, UnsupportedError
from memlab.integrations.reading import (
    NO_WORKLOAD,
    SHARDING,
    ImportedTraining,
    SourceReading,
    read_optimizer,
)
from memlab.integrations.transformers_arguments import (
    is_of_trl,
    read_arguments,
    read_trl,
    values_of,
)
from memlab.integrations.transformers_workload import (
    is_taken,
    owner_of,
    replaced_on,
    workload_of,
)
from memlab.techniques.checkpointing import policies
from memlab.techniques.checkpointing.checkpointing import FLAGS
from memlab.techniques.precision import number_formats

STEP_METHODS = (
    "training_step", "get_batch_samples", "get_train_dataloader", "compute_loss_context_manager",
    "_prepare_inputs", "_get_num_items_in_batch", "train", "_inner_training_loop", "_run_epoch",
)  # fmt: skip
UPDATE_METHODS = ("create_optimizer", "get_optimizer_cls_and_kwargs", "create_scheduler",
                  "create_optimizer_and_scheduler", "optimizer_step")  # fmt: skip
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
        read_optimizer(reading, "trainer.optimizer", trainer.optimizer, trainer.model)
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
            reading.add_if_missing(field, True)
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
