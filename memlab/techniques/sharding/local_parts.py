"""Divided weights as DistributedDataParallel needs them: this rank's parts, as plain parameters.

`DistributedDataParallel` averages gradients by reading their memory, and knows no DTensors. So it
is given parameters that share the memory of this rank's parts. In a micro-batch the layers use
DTensors that are made of these, so that autograd brings their gradients to the parts, where the
average is taken over the ranks that hold the same parts. Outside of a micro-batch everything is as
without it: the model, its optimizer and its checkpoints hold DTensors, which get the gradients.

    weight          DTensor, a parameter of the model: optimizer, clipping, checkpoints
      | part        plain, in the same memory: DistributedDataParallel
      v
    DTensor.from_local(part)        what the layer multiplies by in a micro-batch

This file imports nothing from memlab, because an exported script contains a copy of it. Source:
`DTensor.from_local`, through which gradients pass; PyTorch does the same in
`torch.distributed.tensor.parallel.ddp`, where the model keeps the parts.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class LocalParts:
    """This rank's parts of a model's divided weights.

    Args:
        model: whose layers are divided.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._parts: dict[Any, nn.Parameter] = {}  # shared weights have one
        for module in model.modules():
            own: dict[str, Any] = module._parameters
            for name, weight in own.items():
                if isinstance(weight, DTensor):
                    self._places.append((own, name, weight))
                    if weight not in self._parts:
                        part = weight.to_local().detach()
                        self._parts[weight] = nn.Parameter(part, weight.requires_grad)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let the model have its parts as parameters, for who wraps it."""
        with self._in_place(self._parts):
            yield

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers use DTensors made of the parts, and give their gradients to the weights.

        A gradient that a weight has already goes on to grow.
        """
        for weight, part in self._parts.items():
            part.grad = None if weight.grad is None else weight.grad.to_local()
            weight.grad = None
        used = {weight: _of(part, weight) for weight, part in self._parts.items()}
        try:
            with self._in_place(used):
                yield
        finally:
            with torch.no_grad():
                for weight, part in self._parts.items():
                    weight.grad = None if part.grad is None else _of(part.grad, weight)
                    part.grad = None

    @contextlib.contextmanager
    def _in_place(self, others: dict[Any, Any]) -> Iterator[None]:
        for holder, name, weight in self._places:
            holder[name] = others[weight]
        try:
            yield
        finally:
            for holder, name, weight in self._places:
                holder[name] = weight


def _of(part: torch.Tensor, weight: Any) -> DTensor:
    """Return a DTensor of this rank's part, divided as a weight."""
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, run_check=False,
        shape=weight.shape, stride=weight.stride(),
    )  # fmt: skip
