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

This file imports nothing from memlab, because an exported script contains a copy of it. Which
layers are divided is found by `tried_layers.py` and `dividing.py`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


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
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.roles: dict[nn.Module, Role] = {}
        # every place of a parameter: shared weights stay shared, also by layers that never run
        self._places: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}
        self._hooks: dict[nn.Module, list[Any]] = {}
        self._last: tuple[torch.Tensor, tuple[Any, ...], DTensor] | None = None

    def listen(self, module: nn.Module) -> None:
        """Hook a layer that may get a role, or that holds a weight of one that may."""
        own = module._parameters
        for name, parameter in own.items():
            if parameter is not None:
                self._places.setdefault(parameter, []).append((own, name))
        self._hooks[module] = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave),
        ]

    def finish(self) -> None:
        """Give no more roles, and drop what was needed for it."""
        for module in [module for module in self._hooks if module not in self.roles]:
            self._unhook(module)
        self._places.clear()

    def divide(self, module: nn.Module, role: Role, dim: int | None = None) -> None:
        """Divide the weight of a layer along a dimension; without one, all its parameters stay."""
        self.roles[module] = role
        own = [(name, p) for name, p in module._parameters.items() if p in self._places]
        for name, parameter in own:
            assert parameter is not None
            placement: Placement = Replicate()
            if dim is not None and name == "weight":
                placement = Shard(dim)
            elif dim is not None and dim == features_of(module)[0]:
                placement = Shard(0)
            self._replace(parameter, _divided(parameter, self.mesh, placement))

    def _replace(self, parameter: nn.Parameter, new: nn.Parameter) -> None:
        """Let all modules that hold a parameter hold another one."""
        for holder, name in self._places[parameter]:
            holder[name] = new

    def _enter(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Give a layer its input as its role needs it."""
        role, (name, given) = self.roles.get(module), input_of(args, options)
        if role is None or role is Role.INSIDE or given is None:
            return None
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
        state = (given._version, given.requires_grad, torch.is_grad_enabled())
        last = self._last
        if is_shared and last is not None and last[0] is given and last[1] == state:
            return last[2]
        made = DTensor.from_local(given, self.mesh, [Replicate()], run_check=False)
        if is_shared:
            self._last = (given, state, made)
        return made

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output of a layer: divided after columns, else whole."""
        if self.roles.get(module) in (Role.ROWS, Role.ALONE):
            output = output.redistribute(placements=[Replicate()]).to_local()
        return output

    def _unhook(self, module: nn.Module) -> None:
        for hook in self._hooks.pop(module):
            hook.remove()


def input_of(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[str | None, Any]:
    """Return under which name a layer was given its input, None for by position, and the input."""
    if args:
        return None, args[0]
    name = next(iter(options), None)
    return name, None if name is None else options[name]


def divide_layers(
    model: nn.Module, mesh: DeviceMesh, found: Mapping[str, tuple[str, int | None]]
) -> None:
    """Divide layers of a model in place, as a trial has found that they can be.

    Args:
        model: on its device, whole.
        mesh: the ranks that divide it, one dimension.
        found: the role of each layer and the dimension along which its weight is divided, by the
            layer's path; `*` in a path is any number. In the order of the forward.

    Raises:
        ValueError: the model has no layer with such a path.
    """
    layers = DividedLayers(mesh)
    modules = dict(model.named_modules())
    for module in modules.values():
        if any(True for _ in module.parameters(recurse=False)):
            layers.listen(module)
    for pattern, (role, dim) in found.items():
        named = [module for path, module in modules.items() if is_named(path, pattern)]
        if not named:
            raise ValueError(f"{type(model).__name__} has no layer {pattern!r}, which is divided")
        for module in named:
            layers.divide(module, Role(role), dim)
    layers.finish()


def is_named(path: str, pattern: str) -> bool:
    """Return whether a path is that of a pattern, in which `*` is any number.

    >>> is_named("blocks.11.up", "blocks.*.up"), is_named("blocks.11.down", "blocks.*.up")
    (True, False)
    """
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(
        name == want or (want == "*" and name.isdigit())
        for name, want in zip(names, wanted, strict=True)
    )


def features_of(module: nn.Module) -> tuple[int, int]:
    """Return which dimension of a layer's weight is its output features, and which its input.

    An embedding reads one row of its weight for each token; its rows are here its output, since a
    head that shares the weight has them as output.
    """
    return (1, 0) if type(module).__name__ == "Conv1D" else (0, 1)


def _divided(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return this rank's part of a parameter, in memory of its own."""
    part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    own = DTensor.from_local(part.to_local().clone(), mesh, [placement], run_check=False)
    return nn.Parameter(own, requires_grad=parameter.requires_grad)
