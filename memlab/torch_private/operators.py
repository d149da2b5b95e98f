"""Operators: their classes, their schemas and their kernels."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

# one overload of an operator (`aten.add.Tensor`), all of its overloads, and a namespace of them
from torch._ops import OpOverload, OpOverloadPacket
from torch._ops import _OpNamespace as OpNamespace

__all__ = [
    "MODULE_OF_OPERATORS", "OpNamespace", "OpOverload", "OpOverloadPacket", "has_kernel_for",
    "is_composed", "is_registered", "names_of_all_operators", "runs_for", "schema_of",
]  # fmt: skip

# the arguments and results of an overload, and which of them it writes or returns a view of
schema_of: Callable[[Any], Any] = attrgetter("_schema")

# the name of the module that defines the classes of operators
MODULE_OF_OPERATORS = OpOverload.__module__

# by an operator's full name: whether it is registered, and has a kernel of its own for a key
is_registered = torch._C._dispatch_has_kernel
has_kernel_for = torch._C._dispatch_has_kernel_for_dispatch_key

# the same, where a kernel that PyTorch takes from elsewhere (composite ones) counts too
runs_for = torch._C._dispatch_has_computed_kernel_for_dispatch_key


def is_composed(func: OpOverload) -> bool:
    """Return whether an operator only calls others, here and on a device that is written in Python.

    Autograd takes such an operator apart. Below it, as in `torch.inference_mode` and inside of a
    tensor subclass, it comes whole.
    """
    name = func.name()
    return has_kernel_for(name, "CompositeImplicitAutograd") and not any(
        has_kernel_for(name, key) for key in ("CPU", "PrivateUse1", "AutogradPrivateUse1")
    )


# the full names of all operators
names_of_all_operators = torch._C._dispatch_get_all_op_names
