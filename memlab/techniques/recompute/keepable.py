"""Decide which outputs of operators may be kept.

Whatever the policy says, the following outputs are never kept:

- views, and tensors that an operator writes in place;
- random outputs: if one were kept, the recompute would draw fewer numbers than the forward, all
  later draws would differ, and the gradients would be wrong;
- casts: autocast caches those of weights, so a forward and its recompute run different ones.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload


def can_be_kept(func: OpOverload, values: dict[str, Any]) -> bool:
    """Return whether the output of an operator may be kept, whatever a policy says.

    Args:
        func: the operator.
        values: the arguments that the call passes, by name.
    """
    schema = func._schema
    aliases = any(value.alias_info is not None for value in schema.returns)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    casts = func is torch.ops.aten._to_copy.default
    return not (casts or aliases or writes or draws(func, values)) and bool(schema.returns)


def draws(func: OpOverload, values: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers in this call."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # attention and RNNs draw random numbers only with dropout
    for name in ("dropout_p", "dropout"):
        if name in (argument.name for argument in func._schema.arguments):
            return bool(values.get(name, 0.0))

    return True


def values_of(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, without those left at their defaults."""
    names = (str(argument.name) for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs
