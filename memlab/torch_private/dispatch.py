"""The dispatcher: modes that see each operator, and guards that exclude dispatch keys."""

from typing import Any

import torch

# the base class of modes that see each operator, and a context in which none is active
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "TorchDispatchMode", "are_tensors_fake", "below_autograd", "with_versions_counted",
    "without_key", "without_modes", "without_python",
]  # fmt: skip

# a guard under which operators reach neither modes nor the code of tensor subclasses
without_python = torch._C._DisableTorchDispatch

# a guard under which operators reach their kernels, past autograd
below_autograd = torch._C._AutoDispatchBelowAutograd

_COUNTS_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_set_excluded = torch._C._SetExcludeDispatchKeyGuard


def with_versions_counted() -> Any:
    """Return a guard under which views share their version, inside of a mode as well."""
    return _set_excluded(_COUNTS_VERSIONS, False)


def without_key(name: str) -> Any:
    """Return a guard under which operators dispatch past a key, such as "AutocastCPU"."""
    key = torch._C._parse_dispatch_key(name)
    assert key is not None  # torch defines a key of this name
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


def are_tensors_fake() -> bool:
    """Return whether a mode of fake tensors is on."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
