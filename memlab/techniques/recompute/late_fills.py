"""A forward whose recompute must not end before its last operator has filled what it saved.

A recompute ends as soon as the last tensor that backward needs is saved. Nearly every operator
saves a tensor whose values are complete. A few save memory first and fill it afterwards: the noise
of `rrelu` (https://github.com/pytorch/pytorch/issues/193671). The schema of such an operator says
that it writes to this argument, and its node in the graph says that it saved it. A forward that ran
one saves another, empty tensor at its very end, so that its recompute runs as far as that.

An `autograd.Function` needs nothing: what it saves is taken when its forward has returned.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree


def with_its_end(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a forward returns; if it fills a tensor after saving it, save one more."""
    first = torch._C._autograd._get_sequence_nr()
    out = forward(*args, **kwargs)
    if torch.is_grad_enabled() and any(map(_fills_late, _nodes_of(out, first))):
        save_one_more()
    return out


def save_one_more() -> None:
    """Make autograd save an empty tensor; what runs again until all are saved runs until here."""
    torch.empty(0, requires_grad=True).exp()


def _nodes_of(out: Any, first: int) -> Iterator[Any]:
    """Yield the nodes that lead to these outputs and were made from a number on."""
    todo: list[Any] = [tensor.grad_fn for tensor in _tensors_in(out)]
    seen = {None}
    while todo:
        node = todo.pop()
        if node not in seen and node._sequence_nr() >= first:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def _tensors_in(out: Any) -> Iterator[torch.Tensor]:
    for leaf in _pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = dataclasses.fields(leaf)
            yield from _tensors_in([getattr(leaf, field.name) for field in fields])


def _fills_late(node: Any) -> bool:
    """Return whether the operator of a node has saved an argument and then written to it."""
    kind = type(node)
    return any(hasattr(kind, f"_raw_saved_{name}") for name in _written_by(kind.__name__))


@functools.cache
def _written_by(node: str) -> frozenset[str]:
    """Return the arguments that an operator writes to, given the name of its node."""
    name = re.fullmatch(r"(\w+)Backward\d+", node)
    words = re.findall("[A-Z][a-z0-9]*", name[1]) if name else []
    operator = getattr(torch.ops.aten, "_".join(words).lower(), None) if words else None
    return frozenset(
        argument.name
        for overload in (operator.overloads() if operator else ())
        for argument in getattr(operator, overload)._schema.arguments
        if argument.is_write and not argument.kwarg_only
    )
