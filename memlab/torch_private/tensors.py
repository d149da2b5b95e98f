"""Private attributes of tensors and of their storages.

Each is read by one call in C, since most are asked for at every operator of a recorded step.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import transform_subclass

# the number that identifies a storage for as long as anything holds it
storage_key: Callable[[Any], int] = attrgetter("_cdata")

# how many tensors, arrays and others hold a storage, by its key
num_holders_of_storage = torch._C._storage_Use_Count

# how many references C++ code has to a tensor
num_references: Callable[[torch.Tensor], int] = methodcaller("_use_count")

# the number that each change in place raises; inference tensors have none
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# whether a tensor is a view of another one, for autograd
is_view: Callable[[torch.Tensor], bool] = methodcaller("_is_view")

# the two parts of a sparse tensor, without a copy and whether coalesced or not
indices_of: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_indices")
values_of: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")

# the attributes in which a parameter keeps its hooks, and a function that returns both
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
hooks_of: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter(*HOOKS)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the memory of this one: itself, or the parts that it wraps.

    A quantized weight of torchao, for instance, wraps the integers and their scales, each of which
    has memory. Its own storage has none.
    """
    return [part for _, part in named_parts("", tensor)]


def named_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each of `parts_of`, with the path to it: this name, or "name.scale"."""
    if not is_wrapper(type(tensor)):
        yield name, tensor
        return
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        yield from named_parts(f"{name}.{attribute}", getattr(tensor, attribute))


def with_parts(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return a tensor that wraps others with each of `parts_of` changed."""
    made: torch.Tensor = transform_subclass(
        tensor, lambda _, part: with_parts(part, change) if is_wrapper(type(part)) else change(part)
    )
    return made


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of this class consist of others, on which they call operators."""
    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, NestedTensor)
