"""Private attributes and classes of `torch.nn`, and of optimizers."""

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from torch import nn

# the bases of all batch norms, instance norms and dropouts, and of all norms with statistics
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm

# a list, which may be extended: tensor classes for which optimizers keep their foreach variant
from torch.optim.optimizer import _foreach_supported_types as foreach_types

__all__ = [
    "MODULES", "PARAMETERS", "BatchNorm", "Dropout", "InstanceNorm", "NormWithStatistics",
    "buffers_of", "convert", "converted_by", "foreach_types", "parameters_of",
]  # fmt: skip

# the attributes in which a module keeps its children and its parameters
MODULES, PARAMETERS = "_modules", "_parameters"

# a module's own parameters and buffers by name: dicts that may be written, some values None
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")


def convert(module: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    """Change all tensors of a module by a function, as `module.to` does."""
    converted: nn.Module = module._apply(change)
    return converted


@contextlib.contextmanager
def converted_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Convert modules by another function, inside this context.

    Args:
        apply: called with PyTorch's own method, the module, the change and whether to recurse.
    """
    own = nn.Module._apply

    def method(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        return apply(own, self, fn, recurse)

    nn.Module._apply = method  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = own  # type: ignore[method-assign]
