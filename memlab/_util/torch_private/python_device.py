"""The device for backends written in Python, and what must be replaced while it is used."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _meta_registrations
from torch.utils import backend_registration

# what autograd and the allocator call for such a device; these do nothing
DeviceGuard = backend_registration._DummyDeviceGuard
Hook = backend_registration._DummyPrivateUse1Hook

# registers a device by name, with a module, a hook and a guard, for the rest of the process
register = backend_registration._setup_privateuseone_for_python_backend

# the type of such a device, in C++, and the name that it was registered under
DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1
registered_name = torch._C._get_privateuse1_backend_name

# functions that torch.nn calls and the dispatcher does not see; one set here hides torch's own
functions: Any = sys.modules["torch._VF"]
PAD_PACKED_SEQUENCE = "_pad_packed_sequence"


@contextlib.contextmanager
def moved_by_operators() -> Iterator[None]:
    """Make `torch.tensor(..., device=...)` move its result by an operator, which modes see."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextlib.contextmanager
def convolutions_stored_as(
    format_of: Callable[[torch.Tensor, torch.Tensor, Any], torch.memory_format],
) -> Iterator[None]:
    """Replace the memory format that fake convolutions give their outputs.

    Args:
        format_of: returns the format for an input, a weight and a backend.
    """
    own = torch._C._conv_determine_backend_memory_format
    torch._C._conv_determine_backend_memory_format = format_of  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._C._conv_determine_backend_memory_format = own


@contextlib.contextmanager
def fake_kernels_told(kind_of: Callable[[Callable[[Any], str], Any], str]) -> Iterator[None]:
    """Replace what fake kernels written in Python take for the type of a tensor's device.

    Args:
        kind_of: called with PyTorch's own function and a tensor.
    """
    module: Any = _meta_registrations
    own = module.device_hint
    module.device_hint = functools.partial(kind_of, own)
    try:
        yield
    finally:
        module.device_hint = own
