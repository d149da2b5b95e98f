"""The loss of transformers' `Trainer`, as a workload computes it.

The Trainer divides the summed losses of a micro-batch by the labels of the whole update. The
workload divides them by the labels of the micro-batch and weights micro-batches by their labels,
which is the same sum. Labels are counted as this version of the Trainer counts them.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

IGNORED_LABEL = -100
# these losses do not read `num_items_in_batch`
MEAN_LOSSES = ("ForSequenceClassification", "ForQuestionAnswering")


@dataclass(frozen=True, slots=True)
class TrainerLoss:
    """`compute_loss` of a workload: the Trainer's loss of one micro-batch, as a mean.

    Attributes:
        smoother: the Trainer's `label_smoother`, or None.
        loss_function: the Trainer's `compute_loss_func`, or None.
        terms: what counts the labels; None if the Trainer does not count them.
        model_takes_terms: whether the Trainer passes their number to the model.
        shifts_labels: for the smoother: whether a prediction is about the next label.
    """

    smoother: Callable[..., torch.Tensor] | None
    loss_function: Callable[..., torch.Tensor] | None
    terms: "LossTerms | None"
    model_takes_terms: bool
    shifts_labels: bool

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs = dict(batch)
        terms = None if self.terms is None else self.terms.counted(batch)
        has_own = self.smoother is not None or self.loss_function is not None
        labels = inputs.pop("labels", None) if has_own else None
        if terms is not None and self.model_takes_terms:
            inputs["num_items_in_batch"] = terms
        outputs = model(**inputs)

        if self.loss_function is not None:
            return self.loss_function(outputs, labels, num_items_in_batch=terms)
        if labels is not None and self.smoother is not None:
            named: dict[str, Any] = {"shift_labels": True} if self.shifts_labels else {}
            if terms is not None:
                named["num_items_in_batch"] = terms
            return self.smoother(outputs, labels, **named)
        loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return loss


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`num_loss_terms` of a workload: how many labels count.

    Attributes:
        shifts_labels: whether the first label of each sample is never predicted.
    """

    shifts_labels: bool

    def __call__(self, batch: Any) -> int:
        """Return the number of labels of a batch that are not ignored."""
        return int(self.counted(batch))

    def counted(self, batch: Any) -> torch.Tensor:
        """Return it as a tensor, which a forward need not read."""
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., 1:] if self.shifts_labels else batch["labels"]
        found: torch.Tensor = labels.ne(IGNORED_LABEL).sum()
        return found


def unwrapped(model: torch.nn.Module) -> Any:
    """Return the model of transformers, without the adapters of PEFT around it."""
    is_wrapped = type(model).__module__.partition(".")[0] == "peft"
    found: Any = model
    return found.get_base_model() if is_wrapped else found


def ignores_terms(model: Any) -> bool:
    """Return whether the forward of a model computes a mean, whatever number of terms it is given.

    Such a forward calls a loss of torch.nn by itself, or one of transformers that takes means.
    """
    try:
        source = inspect.getsource(type(model).forward)
    except (OSError, TypeError):  # a model that was defined without a file
        return False
    if "num_items_in_batch" in source:
        return False
    return "loss_function" not in source or getattr(model, "loss_type", None) in MEAN_LOSSES


def is_causal_model(model: Any) -> bool:
    """Return whether the Trainer's label smoother shifts the labels of this model."""
    loaded = sys.modules.get("transformers.trainer")  # whoever has a Trainer has imported it
    names = getattr(loaded, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    return type(model).__name__ in names.values()
