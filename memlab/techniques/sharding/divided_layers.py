"""Layers whose weights the ranks of a group divide among them, by DTensor.

    columns   each rank computes its part of the output features: x whole -> y divided
    rows      each rank sums over its part of the input features, and the ranks add their sums:
              y divided -> z whole
    alone     as columns, and the ranks gather the output at once: x whole -> y whole
    inside    a normalisation between columns and rows, on the part of the features of this rank

For `z = down(gelu(up(x)))` of two ranks, where `up` gives 8 features and `down` takes them:

    rank 0   up.weight[:4]  (4, in)   y[..., :4]   down.weight[:, :4]   its sum --+
                                                                                  +--> z, in both
    rank 1   up.weight[4:]  (4, in)   y[..., 4:]   down.weight[:, 4:]   its sum --+

Outside of such layers all tensors are plain and whole, and the same in all ranks. Between columns
and rows they are DTensors, so every operator there is PyTorch's own rule for divided tensors, and
whatever it does to features, heads and gradients is right or an error. Sources: the documentation
of `torch.distributed.tensor`, and Shoeybi et al., Megatron-LM (2019), for columns and rows.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from memlab.torch_private.modules import parameters_of
from memlab.torch_private.tensors import version_of


class Role(StrEnum):
    """How a layer is divided."""

    COLUMNS = "columns"
    ROWS = "rows"
    ALONE = "alone"
    INSIDE = "inside"


class DividedLayers:
    """The layers of a model that are divided, and how. Hooks on them keep the rest plain.

    Attributes:
        mesh: of the ranks that divide the layers, one dimension.
        roles: of each divided layer.
        before: called with a layer and its input before it runs, to give it a role.
        is_exchanging: whether the ranks send tensors to one another because of a role.
        read: parameters that operators read outside of the forward of a divided layer; of a divided
            one also the whole one, which a model may have got hold of before.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.roles: dict[nn.Module, Role] = {}
        self.before: Callable[[nn.Module, Any], None] | None = None
        self.is_exchanging = False
        self.read: set[nn.Parameter] = set()
        # every place of a parameter: shared weights stay shared, also by layers that never run
        self._places: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}
        self._whole_of: dict[nn.Parameter, nn.Parameter] = {}  # by the divided one
        self._hooks: dict[nn.Module, list[Any]] = {}
        self._last: tuple[torch.Tensor, tuple[Any, ...], DTensor] | None = None

    def listen(self, module: nn.Module) -> None:
        """Hook a layer that may get a role, or that holds a weight of one that may."""
        own = parameters_of(module)
        for name, parameter in own.items():
            if parameter is not None:
                self._places.setdefault(parameter, []).append((own, name))
        self._hooks[module] = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave),
        ]

    def finish(self) -> None:
        """Give no more roles, and drop what was needed for it."""
        self.before = None
        for module in [module for module in self._hooks if module not in self.roles]:
            self._unhook(module)
        self._places.clear()
        self._whole_of.clear()
        self.read.clear()

    def undo(self) -> None:
        """Give all layers their whole weights back."""
        for parameter in self._whole_of.values():
            self._put(parameter, parameter)
        self._whole_of.clear()
        self.read.clear()
        self.roles.clear()
        self._last = None

    def end(self) -> None:
        """Undo everything."""
        self.undo()
        for module in list(self._hooks):
            self._unhook(module)

    def divide(self, module: nn.Module, role: Role, dim: int | None = None) -> None:
        """Divide the weight of a layer along a dimension; without one, all its parameters stay."""
        self.roles[module] = role
        own = [(name, p) for name, p in parameters_of(module).items() if p in self._places]
        self.is_exchanging = True  # what is read from here on is read for the division
        for name, parameter in own:
            placement: Placement = Replicate()
            if dim is not None and name == "weight":
                placement = Shard(dim)
            elif dim is not None and dim == features_of(module)[0]:
                placement = Shard(0)
            made = _divided(parameter, self.mesh, placement)
            self._put(parameter, made)
            self._whole_of[made] = parameter
        self.is_exchanging = False

    def is_read(self, module: nn.Module) -> bool:
        """Return whether an operator read a parameter of a divided layer, but not for the layer."""
        own = [p for p in parameters_of(module).values() if p is not None]
        return any(p in self.read or self._whole_of.get(p) in self.read for p in own)

    def _put(self, parameter: nn.Parameter, new: nn.Parameter) -> None:
        for holder, name in self._places[parameter]:
            holder[name] = new

    def _enter(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Give a layer its input as its role needs it; it may be called by position or by name."""
        name = None if args else next(iter(options), None)
        given = args[0] if name is None and args else options.get(name or "")
        if self.before is not None:
            self.before(module, given)
        role = self.roles.get(module)
        if role is None or role is Role.INSIDE or given is None:
            return None
        self.is_exchanging = True
        if not isinstance(given, DTensor):
            given = self._replicated(given, is_shared=role is Role.COLUMNS)
        if role is Role.ROWS:
            self._last = None  # the layers before have used it; a recompute may end in this one
            given = given.redistribute(placements=[Shard(given.ndim - 1)])
        return ((given, *args[1:]), options) if name is None else (args, {**options, name: given})

    def _replicated(self, given: torch.Tensor, *, is_shared: bool) -> DTensor:
        """Return a whole tensor as one that all ranks have.

        If layers share their input, as query, key and value do, they get the same one. Its
        gradient is then summed over the ranks once, not once for each layer.
        """
        state = (version_of(given), given.requires_grad, torch.is_grad_enabled())
        last = self._last
        if is_shared and last is not None and last[0] is given and last[1] == state:
            return last[2]
        made = DTensor.from_local(given, self.mesh, [Replicate()], run_check=False)
        if is_shared:
            self._last = (given, state, made)
        return made

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output of a layer: divided after columns, else whole."""
        role = self.roles.get(module)
        if role in (Role.ROWS, Role.ALONE):
            output = output.redistribute(placements=[Replicate()]).to_local()
        self.is_exchanging = False
        return output

    def _unhook(self, module: nn.Module) -> None:
        for hook in self._hooks.pop(module):
            hook.remove()


def features_of(module: nn.Module) -> tuple[int, int]:
    """Return which dimension of a layer's weight is its output features, and which its input.

    An embedding reads one row of its weight for each token; its rows are here its output, since a
    head that shares the weight has them as output.
    """
    return (1, 0) if type(module).__name__ == "Conv1D" else (0, 1)


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


def _divided(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return this rank's part of a parameter, in memory of its own."""
    part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    own = DTensor.from_local(part.to_local().clone(), mesh, [placement], run_check=False)
    return nn.Parameter(own, requires_grad=parameter.requires_grad)
