"""The loss of a subclass of transformers' `Trainer`, computed by its own `compute_loss`.

The method runs on a stand-in: an object of the same class with the Trainer's attributes, but with
the model of the step, with one process in place of accelerate, and without data, optimizer and
callbacks. It is made anew for each model, so that the Trainer is never changed, and no run sees
what an earlier one left in it.
"""

import copy
import dis
import inspect
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import cloudpickle
import torch

from memlab.errors import WorkloadError
from memlab.importing.reading import SECRET
from memlab.importing.samples import WHICH
from memlab.importing.transformers_loss import LossTerms
from memlab.torch_private.dispatch import are_tensors_fake

# what a step has itself, and what is large; all else of a Trainer that can be sent is sent
NOT_SENT = frozenset({
    "accelerator", "callback_handler", "data_collator", "eval_dataset", "lr_scheduler", "model",
    "model_init", "model_wrapped", "optimizer", "optimizer_cls_and_kwargs", "train_dataset",
})  # fmt: skip
_STAND_INS: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[bytes, Any]]" = (
    weakref.WeakKeyDictionary()
)
WRAPPERS = ("OptimizedModule", "DistributedDataParallel")  # each has the model as its only child


class OneProcess:
    """What a `compute_loss` asks of accelerate, as a single process answers.

    Attributes:
        device: of the model.
    """

    num_processes = 1
    process_index = 0
    is_main_process = True
    parallelism_config = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gather(self, tensors: Any) -> Any:
        """Return the tensors of all processes: those of this one.

        A prediction knows no values. There, what can only be a metric that is read, because it has
        no gradient and is no matrix, is zero, so that reading it assumes nothing about the step.
        """
        is_metric = (
            isinstance(tensors, torch.Tensor) and tensors.dim() < 2 and not tensors.requires_grad
        )
        if is_metric and are_tensors_fake():
            return torch.zeros(tensors.shape, dtype=tensors.dtype, device=tensors.device)
        return tensors

    def gather_for_metrics(self, tensors: Any) -> Any:
        """Return the tensors of all processes: those of this one."""
        return self.gather(tensors)

    def reduce(self, tensors: Any, **_: Any) -> Any:
        """Return the sum over all processes: what this one has."""
        return tensors

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """Return the model itself, without what a library has put around it."""
        return unwrapped_module(model)


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """`compute_loss` of a workload: the Trainer's own, of one micro-batch.

    Attributes:
        name: of the Trainer's class.
        stand_in: the stand-in as cloudpickle's bytes.
        terms: what counts the labels; None if the Trainer does not count them.
    """

    name: str
    stand_in: bytes
    terms: LossTerms | None

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch.

        Raises:
            WorkloadError: the method needs a part of the Trainer that the stand-in lacks.
        """
        trainer = _stand_in_of(unwrapped_module(model), self.stand_in)
        trainer.model = unwrapped_module(model)
        trainer.accelerator = OneProcess(next(model.parameters()).device)
        terms = None if self.terms is None else self.terms.counted(batch)
        # a copy, because the method may write into its inputs
        inputs = {name: value for name, value in batch.items() if name != WHICH}
        try:
            loss: torch.Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=terms)
        except AttributeError as error:
            if error.obj is trainer or error.obj is trainer.accelerator:
                whose = "" if error.obj is trainer else "accelerator."
                raise WorkloadError(
                    f"compute_loss of {self.name} reads self.{whose}{error.name}, which memlab "
                    "does not take out of the Trainer; write a memlab.Workload with this loss"
                ) from error
            raise
        finally:
            del trainer.model
        return loss

    def __repr__(self) -> str:
        """Return whose loss it is, not its bytes."""
        return f"OwnLoss({self.name})"


def own_loss(trainer: Any, terms: LossTerms | None) -> OwnLoss:
    """Return the loss of a Trainer whose class has its own `compute_loss`.

    Raises:
        WorkloadError: the class cannot be sent to the process in which a step runs.
    """
    kind = type(trainer)
    stand_in = object.__new__(kind)
    for name, value in vars(trainer).items():
        if name not in NOT_SENT and not isinstance(value, torch.nn.Module) and _can_be_sent(value):
            setattr(stand_in, name, value)
    stand_in.args = copy.copy(trainer.args)
    for name in vars(trainer.args):
        if name.endswith(SECRET):
            vars(stand_in.args)[name] = None
    # it asks the callbacks, and changes nothing that a step computes
    stand_in.log = _ignore
    # memlab weights the micro-batches itself
    stand_in.current_gradient_accumulation_steps = 1
    try:
        sent = cloudpickle.dumps(stand_in)
    except Exception as error:
        raise WorkloadError(
            f"the loss of {kind.__name__} cannot be sent to the process in which a step runs: "
            f"{type(error).__name__}: {error}; define the class in a module, or write a "
            "memlab.Workload with this loss"
        ) from error
    return OwnLoss(kind.__name__, sent, terms)


def ignores_number_of_terms(method: Callable[..., Any]) -> bool:
    """Return whether a `compute_loss` never reads `num_items_in_batch`.

    One that takes it by **kwargs, or has no code of Python, is taken to read it. Its bytecode
    tells, which is there without a source too, as for a class that was typed into a prompt.
    """
    try:
        parameters = inspect.signature(method).parameters
        code = inspect.unwrap(method).__code__
    except (AttributeError, TypeError, ValueError):
        return False
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return not takes_any and not _reads(code, "num_items_in_batch")


def _reads(code: CodeType, name: str) -> bool:
    """Return whether code loads an argument, or may: functions inside of it, and `locals()`."""
    if name in code.co_cellvars or "locals" in code.co_names:
        return True
    loaded = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return any(name == each or (isinstance(each, tuple) and name in each) for each in loaded)


def unwrapped_module(model: Any) -> Any:
    """Return the model inside of what compiles it or averages its gradients."""
    while type(model).__name__ in WRAPPERS:
        (model,) = model.children()
    return model


def _stand_in_of(model: torch.nn.Module, stand_in: bytes) -> Any:
    """Return the stand-in that belongs to a model: a new model begins with a new one."""
    found: tuple[bytes, Any] | None = _STAND_INS.get(model)
    if found is None or found[0] != stand_in:
        found = _STAND_INS[model] = (stand_in, pickle.loads(stand_in))
    return found[1]


def _can_be_sent(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # a person's object may raise anything
        return False
    return True


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Take what a Trainer would log."""
