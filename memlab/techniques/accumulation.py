"""Gradient accumulation: micro-batches, their exact weights, and when the gradient stays the same.

Not covered: data parallel, where the weights would have to be shared between ranks.
"""

import math
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memlab.config import StepConfig
from memlab.errors import WorkloadError
from memlab.workload import Workload


def check_batch(batch: Any, batch_size: int) -> None:
    """Raise WorkloadError unless every tensor of the batch has `batch_size` samples along dim 0."""
    every = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0]]
    for path, leaf in every:
        if not isinstance(leaf, torch.Tensor | str | bytes | int | float | NoneType):
            raise WorkloadError(
                f"make_batch({batch_size}) returned a {type(leaf).__name__} at batch{path}, which "
                "cannot be split into micro-batches; return tensors in lists, tuples and dicts: "
                "dict(encoding), torch.from_numpy(array)"
            )
    leaves = [(path, leaf) for path, leaf in every if isinstance(leaf, torch.Tensor)]
    if not leaves:
        raise WorkloadError(
            f"make_batch({batch_size}) returned no tensor; return a pytree of tensors with "
            f"{batch_size} samples along dim 0"
        )
    for path, leaf in leaves:
        if leaf.layout is not torch.strided:
            raise WorkloadError(f"batch{path} is {leaf.layout}; allowed are dense tensors")
        if leaf.ndim == 0 or leaf.shape[0] != batch_size:
            raise WorkloadError(
                f"make_batch({batch_size}) returned a tensor of shape {tuple(leaf.shape)} at "
                f"batch{path}; allowed is {batch_size} samples along dim 0: make_batch(n) must "
                "use its n"
            )


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return micro-batches of these sizes, views of the batch; what is no tensor goes to each."""
    leaves, structure = pytree.tree_flatten(batch)
    columns = [
        torch.split(leaf, list(sizes)) if isinstance(leaf, torch.Tensor) else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [
        pytree.tree_unflatten([column[i] for column in columns], structure)
        for i in range(len(sizes))
    ]


def weights(workload: Workload, micro_batches: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return the weight of each micro-batch's loss; they sum to 1.

    The mean over N samples is the sum of the micro-batch means weighted by n_i / N; where the loss
    is a mean over another number of terms (tokens that count), by that number instead.
    """
    if workload.num_loss_terms is None:
        terms = [float(size) for size in sizes]
    else:
        terms = [_number(workload.num_loss_terms(batch)) for batch in micro_batches]
    total = sum(terms)
    if not min(terms) >= 0 or not 0 < total < math.inf:
        raise WorkloadError(
            f"num_loss_terms returned {terms} over the micro-batches; allowed are counts of which "
            "at least one is above 0"
        )
    return [count / total for count in terms]


def lines(config: StepConfig) -> list[str]:
    """Return what defines `micro_batch` in a script, and `weight` in a loop if there are several.

    The loop's body is to follow.
    """
    sizes = list(config.micro_batch_sizes)
    if len(sizes) == 1:
        return ["micro_batch = tree_map_only(torch.Tensor, lambda t: t.to(device), batch)"]
    return [
        f"sizes = {sizes}",
        "for index, size in enumerate(sizes):",
        "    weight = size / sum(sizes)",
        "    micro_batch = tree_map_only(",
        "        torch.Tensor, lambda t: t.split(sizes)[index].to(device), batch",
        "    )",
    ]


def _number(terms: Any) -> float:
    try:
        return float(terms)
    except (TypeError, ValueError):
        raise WorkloadError(
            f"num_loss_terms returned {terms!r}; allowed is the number of terms that the loss is "
            "a mean over"
        ) from None


def sample_mixing_modules(model: torch.nn.Module) -> list[str]:
    """Return the paths of modules whose output for a sample depends on the rest of its batch."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, kind)
        and not isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)
        and (module.training or module.running_mean is None)
    ]


def random_modules(model: torch.nn.Module) -> list[str]:
    """Return the paths of modules that draw random numbers in training (dropout of any kind)."""
    return [
        path
        for path, module in model.named_modules()
        if module.training
        and (
            (isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0)
            or (
                isinstance(module, torch.nn.RNNBase)
                and module.dropout > 0
                and module.num_layers > 1
            )
            or (isinstance(module, torch.nn.MultiheadAttention) and module.dropout > 0)
            or isinstance(module, torch.nn.RReLU)
        )
    ]
