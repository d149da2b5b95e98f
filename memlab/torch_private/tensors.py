"""Private attributes of tensors and of their storages.

Each is read by one call in C, since most are asked for at every operator of a recorded step.
"""

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch

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
