"""`case`: adds a private name of PyTorch, what memlab uses it for and what must be true of it."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

Check = Callable[[], None]
CASES: dict[str, tuple[str, Check]] = {}
"""By name: what memlab uses it to do, and what must be true of it beyond being there."""
MAY_BE_MISSING = {
    "torch._C._cuda_attach_out_of_memory_observer",  # where torch is built without CUDA
    "torch._C._cuda_clearCublasWorkspaces",  # likewise
    "torch._C._cuda_isHistoryEnabled",  # likewise
    "torch._C._get_cudnn_depthwise_kernel",  # in 2.11
    "torch._C._is_grad_layout_enforcement_enabled",  # in 2.11
    "torch._custom_class_base",  # before 2.14, where it replaces `torch._opaque_base`
    "torch._opaque_base",
}
"""Looked for by memlab: of torch 2.11 to 2.15, not every release and build has them."""


def case(*names: str, to: str) -> Callable[[Check], None]:
    """Add what must be true of private names; `to` completes "which memlab uses to ..."."""

    def add(check: Check) -> None:
        for name in names:
            assert name not in CASES
            CASES[name] = (to, check)

    return add


def there(*names: str, to: str) -> None:
    """Add private names that only have to be there."""
    case(*names, to=to)(lambda: None)


def at(path: str) -> Any:
    """Return what is at a path; AttributeError if nothing is."""
    module, parts = path, list[str]()
    while True:
        try:
            value: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, part = module.rpartition(".")
            parts.insert(0, part)
        else:
            return functools.reduce(getattr, parts, value)


def arguments_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def noting(then: Callable[[Any], Any] = lambda out: out) -> Any:
    """Return a mode that notes the operators it sees, and calls `then` with what they return."""

    class Noting(at("torch.utils._python_dispatch.TorchDispatchMode")):
        def __init__(self) -> None:
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return then(func(*args, **(kwargs or {})))

    return Noting()


def fakes() -> Any:
    return at("torch._subclasses.fake_tensor.FakeTensorMode")()


def raised(kind: str, by: Callable[[Any], Any]) -> None:
    with fakes(), pytest.raises(at(f"torch._subclasses.fake_tensor.{kind}")):
        by(torch.ones(3))
