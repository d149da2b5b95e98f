"""Which outputs of operators may be kept, whatever a policy says.

Never kept are views; what an operator writes in place; operators that draw random numbers, since
one that is kept shifts the stream of all that are drawn again, and the gradients are wrong; and
casts, since autocast caches those of weights, and a forward and its recompute do not run the same
ones.

An exported script holds this file as it stands, so it imports nothing of memlab.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload


def can_be_kept(func: OpOverload, values: dict[str, Any]) -> bool:
    """Return whether the output of an operator may be kept, whatever a policy says.

    Args:
        func: the operator.
        values: of its arguments by name, as far as they are given.
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
    for name in ("dropout_p", "dropout"):  # attention and RNNs without dropout draw nothing
        if name in (argument.name for argument in func._schema.arguments):
            return bool(values.get(name, 0.0))
    return True


def values_of(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, without those left at their defaults."""
    names = (str(argument.name) for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs
