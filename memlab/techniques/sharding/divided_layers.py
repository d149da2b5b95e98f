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

It is plain PyTorch, of which exported scripts contain what they call. Which layers are divided is
found by `tensor_parallel.py`.
"""

import contextlib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding


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


# Attention over divided heads, where PyTorch has no rule of its own: its kernel for a CPU.
#
# Heads do not look at one another, so each rank can compute its own. PyTorch says so of its
# kernels for a card, and `register_sharding` is its way to say it of another one.

DIM_OF_HEADS = 1  # (samples, heads, tokens, size)
aten = torch.ops.aten


def register_attention() -> None:
    """Tell DTensor how the attention of a CPU, and its backward, may be divided."""
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    register_sharding(forward)(_forward)
    register_sharding(backward)(_backward)


def _forward(
    query: Any, key: Any, value: Any, dropout: Any = 0.0, is_causal: Any = False, *,
    attn_mask: Any = None, scale: Any = None,
) -> list[Any]:  # fmt: skip
    return [
        ([divided] * 2, [divided] * 3 + [None] * 2 + _of_mask(attn_mask, divided))
        for divided in (Replicate(), Shard(DIM_OF_HEADS))
    ]


def _backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout: Any,
    is_causal: Any, *, attn_mask: Any = None, scale: Any = None,
) -> list[Any]:  # fmt: skip
    return [
        ([divided] * 3, [divided] * 6 + [None] * 2 + _of_mask(attn_mask, divided))
        for divided in (Replicate(), Shard(DIM_OF_HEADS))
    ]


def _of_mask(mask: Any, divided: Any) -> list[Any]:
    """Return how a mask is divided: one for all heads is whole in every rank."""
    if mask is None:
        return []
    has_heads = len(mask.shape) == 4 and mask.shape[DIM_OF_HEADS] > 1
    return [divided if has_heads else Replicate()]


# Divided weights as DistributedDataParallel needs them: this rank's parts, as plain
# parameters.
#
# `DistributedDataParallel` averages gradients by reading their memory, and knows no
# DTensors. So it is given parameters that share the memory of this rank's parts. In a
# micro-batch the layers use DTensors that are made of these, so that autograd brings their
# gradients to the parts, where the average is taken over the ranks that hold the same
# parts. Outside of a micro-batch everything is as without it: the model, its optimizer and
# its checkpoints hold DTensors, which get the gradients.
#
#     weight          DTensor, a parameter of the model: optimizer, clipping, checkpoints
#       | part        plain, in the same memory: DistributedDataParallel
#       v
#     DTensor.from_local(part)        what the layer multiplies by in a micro-batch
#
# It is plain PyTorch, of which exported scripts contain what they call. Source:
# `DTensor.from_local`, through which gradients pass; PyTorch does the same in
# `torch.distributed.tensor.parallel.ddp`, where the model keeps the parts.


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
