"""transformers' `Trainer`, configured but not run: its arguments, and a workload of its parts."""

from collections.abc import Mapping
from typing import Any

import torch

from memlab.arguments.quoting import shown
from memlab.errors import ConfigError, UnsupportedError
from memlab.importing.imported import ImportedTraining
from memlab.importing.optimizer_classes import read_optimizer
from memlab.importing.reading import NO_WORKLOAD, SHARDING, SourceReading
from memlab.importing.samples import CopiedModel, KeptColumns, KeptSamples, first_samples
from memlab.importing.transformers_arguments import read_arguments, values_of
from memlab.importing.transformers_loss import (
    LossTerms,
    TrainerLoss,
    ignores_terms,
    is_causal_model,
    unwrapped,
)
from memlab.techniques.precision import number_formats
from memlab.techniques.recompute import blocks
from memlab.techniques.recompute.checkpointing import FLAGS
from memlab.workload import Workload

LOSS_METHODS = (
    "compute_loss", "training_step", "get_batch_samples", "get_train_dataloader",
    "compute_loss_context_manager",
)  # fmt: skip
UPDATE_METHODS = ("create_optimizer", "get_optimizer_cls_and_kwargs", "create_scheduler",
                  "create_optimizer_and_scheduler", "optimizer_step")  # fmt: skip
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
NO_EFFECT = "it is about evaluation, saving or reports"


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
            reading.add(f"trainer.args.{name}", number)
            if number == world_size:
                reading.take(f"trainer.args.{name}", world_size=number)
            else:
                reading.leave(f"trainer.args.{name}", SHARDING)
    for name in ("eval_dataset", "compute_metrics", "processing_class", "model_init"):
        if getattr(trainer, name, None) is not None:
            part = f"trainer.{name}"
            reading.add(part, type(getattr(trainer, name)).__name__)
            reading.skip(part, "the model is built already" if name == "model_init" else NO_EFFECT)

    reading.add("trainer.model", type(model).__name__)
    workload = _workload(reading, trainer) if reading.is_complete else None
    if workload is None:
        reading.leave("trainer.model", NO_WORKLOAD)
    else:
        reading.take_into("build_model", "trainer.model", "copied for each run, never changed")
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
        reading.add("trainer.optimizer_cls_and_kwargs", given[0].__name__)
        reading.leave(
            "trainer.optimizer_cls_and_kwargs",
            "memlab takes an optimizer that is built, as in optimizers=(optimizer, None); the "
            "config has that of optim",
        )
    if trainer.lr_scheduler is not None:
        reading.add("trainer.lr_scheduler", type(trainer.lr_scheduler).__name__)
        reading.leave("trainer.lr_scheduler", "memlab has no schedules of this kind")


def _read_own_methods(reading: SourceReading, trainer: Any) -> None:
    """Report the methods of a subclass that decide what a step computes."""
    for name in (*LOSS_METHODS, *UPDATE_METHODS):
        owner = _owner(trainer, name)
        if owner is None:
            continue
        part = f"trainer.{name}"
        reading.add(part, f"{owner.__name__}.{name}")
        if name in LOSS_METHODS:
            reading.is_complete = False
            reading.leave(
                part,
                f"{owner.__name__} overrides {name}, whose code memlab cannot take out of the "
                "Trainer, so there is no workload; write a memlab.Workload with this loss",
            )
        else:
            reading.leave(part, f"{owner.__name__} overrides {name}; the config has that of optim")


def _owner(trainer: Any, name: str) -> type | None:
    """Return the class outside of transformers that defines a method; None if it does not exist."""
    owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    if owner is None or owner.__module__.partition(".")[0] == "transformers":
        return None
    return owner


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
        found = set(blocks.select(model, "auto"))
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


def _workload(reading: SourceReading, trainer: Any) -> Workload | None:
    """Return the Trainer's model, data and loss; None if there is no data."""
    dataset = trainer.train_dataset
    reading.add("trainer.train_dataset", type(dataset).__name__)
    if dataset is None:
        reading.leave(
            "trainer.train_dataset",
            "there is no train_dataset, so no batch and no workload; write a memlab.Workload",
        )
        return None

    make_batch = _batches(reading, trainer, dataset)
    batch = make_batch(1)
    if not isinstance(batch, Mapping):
        reading.is_complete = False
        reading.leave(
            "trainer.data_collator",
            f"it returns a {type(batch).__name__}, which a Trainer cannot pass to a model by name",
        )
        return None

    terms, loss = _loss(reading, trainer, batch)
    return Workload(
        name=type(trainer.model).__name__,
        build_model=CopiedModel(_on_cpu(trainer.model)),
        make_batch=make_batch,
        compute_loss=loss,
        num_loss_terms=terms,
    )


def _on_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, or a copy on the CPU, which a worker that sees no card can read."""
    if all(p.device.type == "cpu" for p in model.parameters()):
        return model
    return CopiedModel(model)()


def _batches(reading: SourceReading, trainer: Any, dataset: Any) -> KeptSamples:
    batch_size = reading.settings["batch_size"]
    samples = first_samples(dataset, batch_size)
    reading.take_into(
        "make_batch",
        "trainer.train_dataset",
        f"its first {len(samples)} samples, in their order, as often as a batch needs them",
    )
    collate = trainer.data_collator
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        collate = KeptColumns(collate, frozenset(trainer._signature_columns))
        reading.take_into("make_batch", "remove_unused_columns")
    else:
        reading.skip("remove_unused_columns")
    reading.add("trainer.data_collator", type(trainer.data_collator).__name__)
    reading.take_into(
        "make_batch",
        "trainer.data_collator",
        "it pads the samples of a whole update alike; the Trainer pads each micro-batch by itself",
    )
    return KeptSamples(samples, collate)


def _loss(
    reading: SourceReading, trainer: Any, batch: Mapping[str, Any]
) -> tuple[LossTerms | None, TrainerLoss]:
    """Return what counts the terms of the loss, and the loss."""
    shifts = bool(getattr(trainer, "_loss_shifts_labels", False))
    has_labels = isinstance(batch.get("labels"), torch.Tensor)
    loss_function = getattr(trainer, "compute_loss_func", None)
    takes_terms = bool(getattr(trainer, "model_accepts_loss_kwargs", False))
    is_counted = has_labels and (takes_terms or loss_function is not None)
    is_ignored = is_counted and loss_function is None and trainer.label_smoother is None and (
        ignores_terms(unwrapped(trainer.model))
    )  # fmt: skip
    terms = LossTerms(shifts) if is_counted and not is_ignored else None

    reading.take_into("compute_loss", "label_names")
    smoother = trainer.label_smoother
    if smoother is not None:
        reading.take_into("compute_loss", "label_smoothing_factor")
    else:
        reading.skip("label_smoothing_factor")
    if loss_function is not None:
        reading.add("trainer.compute_loss_func", shown(loss_function))
        reading.take_into(
            "compute_loss",
            "trainer.compute_loss_func",
            "called with the number of labels of each micro-batch, whose mean it returns",
        )

    steps = reading.settings["accumulation_steps"]
    if is_ignored and steps > 1:
        reading.take(
            "gradient_accumulation_steps",
            f"the loss of this model ignores num_items_in_batch, so the Trainer sums {steps} means "
            f"and its gradients are {steps} times as large; memlab takes their mean",
            accumulation_steps=steps,
        )
    is_causal = is_causal_model(unwrapped(trainer.model))
    return terms, TrainerLoss(smoother, loss_function, terms, takes_terms, is_causal)
