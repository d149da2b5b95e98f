"""`Workload`: what is trained, as functions that build the model, a batch and the loss."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memlab.arguments.checks import text
from memlab.arguments.quoting import is_a, shown
from memlab.errors import ConfigError, WorkloadError
from memlab.torch_private import pytree


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, its data and its loss, independent of device and number format.

    Attributes:
        name: the name that results show.
        build_model: returns a new `torch.nn.Module`. `build_step` moves and casts it.
        make_batch: n -> a batch of n samples: any pytree of CPU tensors with n entries along
            dim 0, or of lists with n entries. A batch of any other kind (graphs, packed tokens)
            also needs `count_samples` and `split_batch`.
        compute_loss: (model, batch) -> scalar tensor, the mean over the samples of that batch. It
            must call `model(...)` itself, so that a compiled model is the one that runs.
        num_loss_terms: batch -> int, the number of terms that the loss is a mean over, if that is
            not the number of samples (tokens with ignored labels). It weights each micro-batch.
        count_samples: batch -> int, the number of samples, if it is not the size of dim 0.
        split_batch: (batch, sizes) -> list of batches with these numbers of samples, in order. It
            makes the micro-batches if tensors cannot be split along dim 0.

    Raises:
        WorkloadError: a field has a value that is not allowed.

    >>> import torch
    >>> workload = Workload(
    ...     name="line",
    ...     build_model=lambda: torch.nn.Linear(3, 1),
    ...     make_batch=lambda n: (torch.randn(n, 3), torch.randn(n, 1)),
    ...     compute_loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ... )

    A batch can also be several graphs joined into one. With three nodes in each graph, a batch of
    two samples has six rows.

    >>> graphs = Workload(
    ...     name="graphs",
    ...     build_model=lambda: torch.nn.Linear(3, 1),
    ...     make_batch=lambda n: torch.randn(3 * n, 3),
    ...     compute_loss=lambda model, batch: model(batch).square().mean(),
    ...     count_samples=lambda batch: len(batch) // 3,
    ...     split_batch=lambda batch, sizes: batch.split([3 * size for size in sizes]),
    ... )
    >>> [graphs.count_samples(part) for part in graphs.split_batch(graphs.make_batch(3), [2, 1])]
    [2, 1]
    """

    name: str
    build_model: Callable[[], torch.nn.Module]
    make_batch: Callable[[int], Any]
    compute_loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    num_loss_terms: Callable[[Any], int] | None = None
    count_samples: Callable[[Any], int] | None = None
    split_batch: Callable[[Any, list[int]], Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "name", text("name", self.name))
        except ConfigError as error:
            raise WorkloadError(str(error)) from None

        if not self.name:
            raise WorkloadError("name='' is empty; allowed is a non-empty text")

        for field in ("build_model", "make_batch", "compute_loss"):
            if not callable(getattr(self, field)):
                raise WorkloadError(
                    f"{field}={shown(getattr(self, field))} cannot be called; "
                    f"pass a function, for instance {field}=lambda ...: ..."
                )

        takes = {
            "num_loss_terms": "a batch to an int",
            "count_samples": "a batch to an int",
            "split_batch": "a batch and a list of sizes to a list of batches",
        }
        for field, what in takes.items():
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise WorkloadError(
                    f"{field}={shown(value)} cannot be called; pass a function that maps {what}, "
                    "or leave it out"
                )

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        example_batch: Any,
        loss_fn: Callable[..., torch.Tensor],
        *,
        name: str | None = None,
    ) -> "Workload":
        """Return a workload that trains copies of `module` on the samples of `example_batch`.

        Args:
            module: the model; it is copied for every run and never changed.
            example_batch: CPU tensors in any pytree, at least one sample along dim 0. A batch of n
                repeats these samples in order.
            loss_fn: either `loss_fn(outputs, targets)` such as `torch.nn.functional.cross_entropy`,
                with `example_batch = (inputs, targets)`; or, when its first parameter is named
                `model`, `loss_fn(model, batch)` for anything else.
            name: the name that results show; by default the class name of the module.

        Raises:
            WorkloadError: `module` is not a module, or the batch has no samples.
        """
        if not is_a(module, torch.nn.Module):
            raise WorkloadError(
                f"module={shown(module)} is not a torch.nn.Module; pass the model itself"
            )

        if not callable(loss_fn):
            raise WorkloadError(
                f"loss_fn={shown(loss_fn)} cannot be called; pass a function such as "
                "torch.nn.functional.cross_entropy"
            )

        num_samples = _num_samples(example_batch)
        takes_model = _first_parameter(loss_fn) == "model"
        if not takes_model and not (is_a(example_batch, tuple | list) and len(example_batch) == 2):
            raise WorkloadError(
                "example_batch is not (inputs, targets), which loss_fn(outputs, targets) needs; "
                "pass such a pair, or a loss_fn whose parameters are (model, batch)"
            )

        def make_batch(n: int) -> Any:
            index = torch.arange(n) % num_samples
            return pytree.tree_map_only(torch.Tensor, lambda t: t[index], example_batch)

        def compute_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            return loss_fn(model(batch[0]), batch[1])

        return cls(
            name=type(module).__name__ if name is None or _is_empty(name) else name,
            build_model=lambda: copy.deepcopy(module),
            make_batch=make_batch,
            compute_loss=loss_fn if takes_model else compute_loss,
        )


def _is_empty(name: Any) -> bool:
    return is_a(name, str) and not str.__len__(name)


def _num_samples(batch: Any) -> int:
    try:
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if is_a(leaf, torch.Tensor)]
    except Exception:  # a list that holds itself, keys that cannot be sorted, an own container
        raise WorkloadError(
            f"example_batch={shown(batch)} cannot be flattened into tensors; pass tensors in "
            "tuples, lists and dicts"
        ) from None

    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(sizes) != 1 or 0 in sizes:
        raise WorkloadError(
            f"example_batch has tensors of {sorted(sizes) or 'no'} samples along dim 0; every "
            "tensor needs the same number of samples, and at least one. For another kind of batch "
            "write a Workload with make_batch, count_samples and split_batch"
        )

    return sizes.pop()


def _first_parameter(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except Exception:  # a builtin without a signature, or an object that raises when compared
        return None
