"""Operators on divided tensors: which of them a trial lets through.

DTensor would let more through: it gathers a tensor of which an operator needs the whole, and
treats a plain tensor as one that all ranks have alike. The first would cost more than layers that
are not divided, and the second gives a plain tensor a gradient of parts.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from memlab.techniques.sharding.tried_layers import TriedLayers
from memlab.torch_private import pytree
from memlab.torch_private.dispatch import TorchDispatchMode
from memlab.torch_private.operators import schema_of

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
COLLECTIVES = ("_c10d_functional", "c10d")


class NeedsWholeError(Exception):
    """An operator that runs on parts of tensors needs whole ones."""


@contextlib.contextmanager
def replicating() -> Iterator[None]:
    """Let plain tensors, which all ranks have alike, meet DTensors: masks, rotations, numbers."""
    from torch.distributed.tensor.experimental import implicit_replication

    with implicit_replication():
        yield


class Watch(TorchDispatchMode):
    """Raises NeedsWholeError for an operator on parts whose result would not be right or free."""

    def __init__(self, layers: TriedLayers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = layers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operator before it runs."""
        kwargs = kwargs or {}
        if not self.layers.is_exchanging:
            self.layers.read.update(_read(func, args, kwargs))
        if any(issubclass(kind, DTensor) for kind in types):
            if not self.layers.is_exchanging:
                _check_heads(func, args, self.layers.mesh.size())
                _check(func, args, kwargs)
            return NotImplemented
        if func.namespace in COLLECTIVES and not self.layers.is_exchanging:
            raise NeedsWholeError("an operator needs the parts of other ranks")
        return func(*args, **kwargs)


def _read(func: Any, args: Any, kwargs: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters that an operator reads; of divided ones those that get a gradient.

    A divided one may be looked at, say for its norm, which the loss does not depend on.
    """
    has_gradient = torch.is_grad_enabled() and func is not torch.ops.aten.detach.default
    for given in pytree.tree_leaves((args, kwargs)):
        if isinstance(given, nn.Parameter) and (has_gradient or not isinstance(given, DTensor)):
            yield given


def _check(func: Any, args: Any, kwargs: Any) -> None:
    """Raise NeedsWholeError for random numbers, and for gradients of tensors that are whole."""
    name = func.name().partition("::")[2]
    if torch.Tag.nondeterministic_seeded in func.tags and _dropout_of(func, args, kwargs) != 0.0:
        raise NeedsWholeError(
            f"{name} draws random numbers, and each rank would draw the same for its part"
        )
    for given in pytree.tree_leaves((args, kwargs)):
        is_plain = isinstance(given, torch.Tensor) and not isinstance(given, DTensor)
        if is_plain and given.requires_grad:
            raise NeedsWholeError(f"{name} joins it with a tensor that every rank computes whole")


def _check_heads(func: Any, args: Any, count: int) -> None:
    """Raise NeedsWholeError for a view of features as heads that do not divide by the ranks."""
    dim = divided_dim(args[0]) if func in VIEWS else None
    if dim is None or dim != args[0].ndim - 1 or len(args[1]) <= args[0].ndim:
        return
    shape = list(args[1])
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = args[0].numel() // known
    if shape[:dim] == list(args[0].shape[:dim]) and shape[dim] % count:
        raise NeedsWholeError(
            f"its output is {shape[dim]} heads, which do not divide by {count} ranks; use a number "
            f"of ranks by which {shape[dim]} divides"
        )


def _dropout_of(func: Any, args: Any, kwargs: Any) -> float | None:
    """Return the dropout of an attention; None of other operators, which always draw."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p")
            return float(argument.default_value if given is None else given)
    return None


def divided_dim(given: Any) -> int | None:
    """Return along which dimension a layer's input is divided; None if it is whole."""
    if not isinstance(given, DTensor):
        return None
    placement = given.placements[0]
    return placement.dim if isinstance(placement, Shard) else None
