"""The workload of transformers' `Trainer`: its model, its data and its loss."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memlab.arguments.quoting import printable, shown
from memlab.errors import WorkloadError
from memlab.importing.copied_model import CopiedModel
from memlab.importing.imported_lengths import with_lengths
from memlab.importing.own_loss import OwnLoss, ignores_number_of_terms, own_loss
from memlab.importing.reading import SourceReading
from memlab.importing.samples import JoinedSamples, KeptColumns, KeptSamples, first_samples
from memlab.importing.transformers_loss import (
    LossTerms,
    TrainerLoss,
    ignores_terms,
    is_causal_model,
    unwrapped,
)
from memlab.importing.trl_trainer import is_of_trl, joins_samples
from memlab.workload import Workload

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def workload_of(reading: SourceReading, trainer: Any) -> Workload | None:
    """Return the Trainer's model, data and loss; None if there is no data.

    Raises:
        WorkloadError: its data cannot be read, or its loss cannot be sent.
    """
    dataset = trainer.train_dataset
    reading.add("trainer.train_dataset", type(dataset).__name__)
    if dataset is None:
        reading.leave(
            "trainer.train_dataset",
            "there is no train_dataset, so no batch and no workload; write a memlab.Workload",
        )
        return None

    kept = _batches(reading, trainer, dataset)
    first = f"its first {len(kept.samples)} samples, in their order, as often as a batch needs them"
    reading.take_into("make_batch", "trainer.train_dataset", first)
    batch = _first_batch(trainer, kept)
    if not isinstance(batch, Mapping):
        reading.is_complete = False
        reading.leave(
            "trainer.data_collator",
            f"it returns a {type(batch).__name__}, which a Trainer cannot pass to a model by name",
        )
        return None

    terms, loss = _loss(reading, trainer, batch)
    joined = JoinedSamples(kept) if joins_samples(trainer) else None
    made = Workload(
        name=type(trainer.model).__name__,
        build_model=CopiedModel(_on_cpu(trainer.model), _autocast(reading)),
        make_batch=joined or kept,
        compute_loss=loss,
        num_loss_terms=terms,
        count_samples=joined.count if joined else None,
        split_batch=joined.split if joined else None,
    )
    found, said = with_lengths(made, kept, trainer)
    reading.take_into("make_batch", "trainer.train_dataset", "; ".join(filter(None, (first, said))))
    return found


def owner_of(trainer: Any, name: str) -> type | None:
    """Return the class outside of transformers that defines a method; None if it does not exist."""
    owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    if owner is None or owner.__module__.partition(".")[0] == "transformers":
        return None
    return owner


def replaced_on(trainer: Any, name: str) -> str:
    """Return where another function was put in the place of a method; "" if none was.

    Packages do that to make training faster, and so do people in a notebook.
    """
    if name in vars(trainer):
        return f"this {type(trainer).__name__} itself"
    owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    if owner is None:
        return ""
    library = owner.__module__.partition(".")[0]
    if library not in ("transformers", "trl"):  # a person's class may have functions from anywhere
        return ""
    module = getattr(vars(owner)[name], "__module__", None) or library
    is_own = module.partition(".")[0] == library
    return "" if is_own else f"{owner.__name__} by {module}"


def _on_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, or a copy on the CPU, which a worker that sees no card can read."""
    if all(p.device.type == "cpu" for p in model.parameters()):
        return model
    return CopiedModel(model)()


def _autocast(reading: SourceReading) -> torch.dtype | None:
    """Return the format of an autocast over weights that `precision` would cast to fp32."""
    for name, dtype in AUTOCAST.items():
        if reading.values.get(name) and reading.settings.get("precision") == "as-built":
            scaler = "; memlab does not scale this loss" if dtype is torch.float16 else ""
            reading.take_into(
                "build_model",
                name,
                "the model has weights that are not fp32, which stay as they are: its forward runs "
                f"in autocast, as in the Trainer{scaler}",
            )
            return dtype
    return None


def _batches(reading: SourceReading, trainer: Any, dataset: Any) -> KeptSamples:
    batch_size = reading.settings["batch_size"]
    samples = first_samples(dataset, batch_size)
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
        "each micro-batch is collated by itself, as in the Trainer"
        if joins_samples(trainer)
        else "it pads the samples of a whole update alike; the Trainer pads each micro-batch by "
        "itself",
    )
    return KeptSamples(samples, collate)


def _first_batch(trainer: Any, kept: KeptSamples) -> Any:
    try:
        return kept(1)
    except Exception as error:  # a person's own collator may raise anything
        raise WorkloadError(
            f"the data_collator ({type(trainer.data_collator).__name__}) cannot make a batch of "
            f"the first sample: {type(error).__name__}: {printable(str(error))}; pass a Trainer "
            "whose collator needs no network and nothing else that is not here, such as one over "
            "samples that are tokenized already"
        ) from error


def _loss(
    reading: SourceReading, trainer: Any, batch: Mapping[str, Any]
) -> tuple[LossTerms | None, Callable[..., torch.Tensor]]:
    """Return what counts the terms of the loss, and the loss."""
    shifts = bool(getattr(trainer, "_loss_shifts_labels", False))
    has_labels = isinstance(batch.get("labels"), torch.Tensor)
    loss_function = getattr(trainer, "compute_loss_func", None)
    takes_terms = bool(getattr(trainer, "model_accepts_loss_kwargs", False))
    is_counted = has_labels and (takes_terms or loss_function is not None)
    is_ignored = is_counted and _ignores_terms(trainer)
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
    if is_ignored and steps > 1 and getattr(trainer, "loss_is_scaled_for_ga", None) is not False:
        reading.take(
            "gradient_accumulation_steps",
            f"the loss of this model ignores num_items_in_batch, so the Trainer sums {steps} means "
            f"and its gradients are {steps} times as large; memlab takes their mean",
            accumulation_steps=steps,
        )
    if owner_of(trainer, "compute_loss") is not None:
        return terms, _own_loss(reading, trainer, terms)
    is_causal = is_causal_model(unwrapped(trainer.model))
    return terms, TrainerLoss(smoother, loss_function, terms, takes_terms, is_causal)


def _ignores_terms(trainer: Any) -> bool:
    """Return whether the loss is a mean, whatever number of terms it is given."""
    owner = owner_of(trainer, "compute_loss")
    if owner is not None and (is_of_trl(owner) or ignores_number_of_terms(trainer.compute_loss)):
        return not is_of_trl(owner)
    has_own = getattr(trainer, "compute_loss_func", None) is not None
    return not has_own and trainer.label_smoother is None and (
        ignores_terms(unwrapped(trainer.model))
    )  # fmt: skip


def _own_loss(reading: SourceReading, trainer: Any, terms: LossTerms | None) -> OwnLoss:
    found = own_loss(trainer, terms)
    reading.take_into(
        "compute_loss",
        "trainer.compute_loss",
        "the method itself runs, on a stand-in for the Trainer that has its attributes, but no "
        "data, optimizer or callbacks",
    )
    return found
