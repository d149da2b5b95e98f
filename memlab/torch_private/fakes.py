"""Fake tensors: shapes, strides and devices without memory."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _meta_registrations

# the active mode of fake tensors, None if there is none
from torch._guards import detect_fake_mode
from torch._subclasses import fake_tensor as _fake_tensor

# the tensors, the mode that makes them, a context without that mode, and the errors about unknown
# values, unknown shapes and missing kernels
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

# a context of a mode, in which operators on its tensors reach the kernels that compute shapes alone
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as shapes_alone

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode",
    "UnsupportedOperatorException", "detect_fake_mode", "found_as", "missing_kernels_run_by",
    "remember_constant", "shapes_alone", "subclasses_left_out",
    "unset_fake_temporarily",
]  # fmt: skip


def remember_constant(fake: Any) -> None:
    """Make PyTorch forget a fake tensor's known value when its memory is written."""
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)


@contextlib.contextmanager
def found_as(stand_in: type) -> Iterator[None]:
    """Make libraries that look up `FakeTensor` in `torch._subclasses` find another class.

    PyTorch's own fake kernels look it up there too, to find the device of a tensor, and take
    tensors of any other class to be on a card. They still find the class itself.
    """
    subclasses: Any = torch._subclasses
    kernels: Any = _meta_registrations
    own = kernels.device_hint

    def device_hint(tensor: Any) -> Any:
        subclasses.FakeTensor = FakeTensor
        try:
            return own(tensor)
        finally:
            subclasses.FakeTensor = stand_in

    subclasses.FakeTensor, kernels.device_hint = stand_in, device_hint
    try:
        yield
    finally:
        subclasses.FakeTensor, kernels.device_hint = FakeTensor, own


@contextlib.contextmanager
def subclasses_left_out(says_class: Callable[[Any, type], None]) -> Iterator[None]:
    """Make a fake tensor that becomes one of another class stay a fake tensor, inside this context.

    `Tensor._make_subclass` cannot make another class of it. As there, the memory is shared. A class
    of parameters makes a parameter, with the attributes that its `__new__` sets.

    Args:
        says_class: is called with the fake parameter and the class that it must say it is of.
    """
    own = torch.Tensor._make_subclass

    def make(cls: type, data: Any, requires_grad: bool = False, *more: Any, **named: Any) -> Any:
        if not isinstance(data, FakeTensor):
            return own(cls, data, requires_grad, *more, **named)
        made: Any = data.detach().requires_grad_(requires_grad)
        if issubclass(cls, torch.nn.Parameter):
            made._is_param = True
            says_class(made, cls)
        return made

    torch.Tensor._make_subclass = staticmethod(make)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor._make_subclass  # what is left is that of the class above


@contextlib.contextmanager
def missing_kernels_run_by(run: Callable[..., Any]) -> Iterator[None]:
    """Run operators that have no fake kernel by another function, inside this context.

    Args:
        run: called with PyTorch's own function and its arguments: the mode, the operator, its
            arguments in a row, their structure, and the error that a missing kernel raised.
    """
    module: Any = _fake_tensor
    own = module.run_fallback_kernel
    module.run_fallback_kernel = functools.partial(run, own)
    try:
        yield
    finally:
        module.run_fallback_kernel = own
