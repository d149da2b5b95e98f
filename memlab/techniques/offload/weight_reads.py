"""Detect reads of parameters: a mode that sees every function of torch, in backward too.

PyTorch switches a mode off while the mode handles a function, and so for the whole of
`Tensor.backward`. Here the autograd engine is called directly, and the mode stays on.
This file imports nothing from memlab, because an exported script contains a copy of it. Left out:
C++ code that reads a parameter without a function of torch, and hooks in a backward of
`torch.autograd.grad`.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

QUESTIONS = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf",
    "is_cuda", "is_sparse", "is_meta", "is_quantized", "is_mkldnn", "nbytes", "size", "dim",
    "numel", "nelement", "stride", "is_floating_point", "is_complex", "__hash__", "_version",
    "is_inference", "is_nested", "_backward_hooks", "_post_accumulate_grad_hooks",
}  # fmt: skip
"""Attributes and methods that do not read a weight's values."""


class WeightReads(TorchFunctionMode):
    """Calls `on_read` for every parameter whose values a function of torch is about to read.

    A read of `.data` counts as a possible write, because a write through it changes no version.
    """

    def __init__(self, on_read: Callable[..., None]) -> None:
        super().__init__()
        self.on_read = on_read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attribute = func.__name__ in ("__get__", "__set__")
        name = func.__self__.__name__ if is_attribute else func.__name__
        if name not in QUESTIONS:
            for given in (*args, *(kwargs or {}).values()):
                for part in given if isinstance(given, list | tuple) else (given,):
                    if isinstance(part, nn.Parameter):
                        self.on_read(part, may_write=name == "data")
        if func in (torch.Tensor.backward, torch.autograd.backward):
            with self:  # a mode is off while it handles a function
                return _backward(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _backward(
    tensors: Any,
    gradients: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **others: Any,
) -> None:
    """Do what `torch.autograd.backward` does, by calling the engine, which bypasses modes."""
    gradients = others.get("gradient", others.get("grad_tensors", gradients))
    tensors, gradients, inputs = (
        () if given is None else (given,) if isinstance(given, torch.Tensor) else tuple(given)
        for given in (tensors, gradients, inputs)
    )
    every = itertools.zip_longest(tensors, gradients)
    torch.autograd.Variable._execution_engine.run_backward(
        tensors,
        tuple(
            torch.ones_like(tensor) if gradient is None and tensor.requires_grad else gradient
            for tensor, gradient in every
        ),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs,
        allow_unreachable=True,
        accumulate_grad=True,
    )
