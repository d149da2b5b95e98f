"""Results of autograd without their graphs, for what is noted of a call.

A graph holds what it was computed from. So a module that keeps its last output, noted before each
forward as it is, would hold the graphs of all forwards before, one through the other.
"""

import operator
from typing import Any

import torch


def without_graph(value: Any) -> Any:
    """Return a value; of a result of autograd its numbers alone."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def without_graphs(value: Any) -> Any:
    """Return a value; of a container that holds results of autograd a copy without their graphs."""
    if type(value) in (list, tuple):
        items = [without_graphs(item) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) is dict:
        copied = {key: without_graphs(item) for key, item in value.items()}
        return value if all(copied[key] is value[key] for key in copied) else copied
    return without_graph(value)
