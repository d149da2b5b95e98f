"""Divided layers of which it is still being found out which they are, and how.

A trial gives roles while the model runs, takes them back if an operator cannot be divided, and
notes what reads the weights of layers from outside. What stays is `divided_layers.py`.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memlab.techniques.sharding.divided_layers import DividedLayers, Role, input_of
from memlab.torch_private.modules import parameters_of


class TriedLayers(DividedLayers):
    """Layers that get their roles while the model runs, and may lose them.

    Attributes:
        before: called with a layer and its input before it runs, to give it a role.
        dims: along which dimension the weight of each divided layer is divided.
        is_exchanging: whether the ranks send tensors to one another because of a role.
        read: parameters that operators read outside of the forward of a divided layer; of a divided
            one also the whole one, which a model may have got hold of before.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.before: Callable[[nn.Module, Any], None] | None = None
        self.dims: dict[nn.Module, int | None] = {}
        self.is_exchanging = False
        self.read: set[nn.Parameter] = set()
        self._whole_of: dict[nn.Parameter, nn.Parameter] = {}  # by the divided one

    def finish(self) -> None:
        """Give no more roles, and drop what was needed for it."""
        self.before = None
        super().finish()
        self._whole_of.clear()
        self.read.clear()

    def undo(self) -> None:
        """Give all layers their whole weights back."""
        for parameter in self._whole_of.values():
            super()._replace(parameter, parameter)
        self._whole_of.clear()
        self.read.clear()
        self.roles.clear()
        self.dims.clear()
        self._last = None

    def end(self) -> None:
        """Undo everything."""
        self.undo()
        self.finish()

    def divide(self, module: nn.Module, role: Role, dim: int | None = None) -> None:
        """Divide the weight of a layer along a dimension; without one, all its parameters stay."""
        self.dims[module] = dim
        self.is_exchanging = True  # what is read from here on is read for the division
        super().divide(module, role, dim)
        self.is_exchanging = False

    def is_read(self, module: nn.Module) -> bool:
        """Return whether an operator read a parameter of a divided layer, but not for the layer."""
        own = [p for p in parameters_of(module).values() if p is not None]
        return any(p in self.read or self._whole_of.get(p) in self.read for p in own)

    def _replace(self, parameter: nn.Parameter, new: nn.Parameter) -> None:
        super()._replace(parameter, new)
        self._whole_of[new] = parameter

    def _enter(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.before is not None:
            self.before(module, input_of(args, options)[1])
        if self.roles.get(module) not in (None, Role.INSIDE):
            self.is_exchanging = True
        return super()._enter(module, args, options)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = super()._leave(module, args, output)
        self.is_exchanging = False
        return output


def is_layer(module: nn.Module) -> bool:
    """Return whether a module multiplies by a matrix, or looks rows of it up.

    `Conv1D` is how transformers calls a linear layer with a transposed weight.
    """
    if isinstance(module, nn.Embedding):  # these look at the whole weight, or at all tokens
        is_known = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    else:
        is_known = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    own = parameters_of(module)
    return is_known and own.get("weight") is not None and set(own) <= {"weight", "bias"}
