"""Find out which layers of a model several ranks can divide among them, by trying.

The idea. A forward and backward of two samples runs with every layer divided, as far as it goes. A
layer whose input is whole is divided by columns. Its output is then a DTensor, and PyTorch's own
rules for DTensors say what becomes of it: activation functions and products keep it divided, a
view of whole heads too, and so does attention over them. A layer whose input arrives divided along
its features is divided by rows, and closes what came before. In a block of Llama:

    q_proj, k_proj, v_proj    input whole                   columns
    o_proj                    input divided: heads          rows: closes q, k, v
    gate_proj, up_proj        input whole                   columns
    down_proj                 input divided: features       rows: closes gate and up

If an operator in between needs the parts of other ranks, or PyTorch has no rule for it, the layers
that are open there cannot stay divided. They are divided alone (their output is gathered at once,
which is always right), and all is tried anew. What is found in one repeated block holds for all.

A layer whose weight is also used outside of its forward, as a head does in
`linear(x, embedding.weight)`, stays whole, and so do all layers that share this weight. If
nothing else helps, layers that are divided alone are kept whole too, from the last to the
first, until the trial runs. The last one kept whole was at fault, so the others are tried again.

The trial only asks which operators run on what shapes, so all ranks find the same, and so does a
simulated one, which has no values. Left out: sequence parallelism, and convolutions.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import TorchDispatchMode, parameters_of, schema_of
from memlab.errors import MemlabError
from memlab.running import is_out_of_memory
from memlab.techniques.checkpointing.blocks import find_stacks
from memlab.techniques.sharding.divided_layers import DividedLayers, Role, features_of, input_of

# Divided layers of which it is still being found out which they are, and how.
#
# A trial gives roles while the model runs, takes them back if an operator cannot be
# divided, and notes what reads the weights of layers from outside. What stays is
# `divided_layers.py`.


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


# Operators on divided tensors: which of them a trial lets through.
#
# DTensor would let more through: it gathers a tensor of which an operator needs the whole,
# and treats a plain tensor as one that all ranks have alike. The first would cost more than
# layers that are not divided, and the second gives a plain tensor a gradient of parts.

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
COLLECTIVES = ("_c10d_functional", "c10d")


class NeedsWholeError(Exception):
    """An operator that runs on parts of tensors needs whole ones."""


@contextlib.contextmanager
def replicating() -> Iterator[None]:
    """Let plain tensors, which all ranks have alike, meet DTensors: masks, rotations, numbers."""
    from torch.distributed.tensor.experimental import implicit_replication

    with implicit_replication():
        yield


class Watch(TorchDispatchMode):
    """Raises NeedsWholeError for an operator on parts whose result would not be right or free."""

    def __init__(self, layers: TriedLayers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = layers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operator before it runs."""
        kwargs = kwargs or {}
        if not self.layers.is_exchanging:
            self.layers.read.update(_read(func, args, kwargs))
        if any(issubclass(kind, DTensor) for kind in types):
            if not self.layers.is_exchanging:
                _check_heads(func, args, self.layers.mesh.size())
                _check(func, args, kwargs)
            return NotImplemented
        if func.namespace in COLLECTIVES and not self.layers.is_exchanging:
            raise NeedsWholeError("an operator needs the parts of other ranks")
        return func(*args, **kwargs)


def _read(func: Any, args: Any, kwargs: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters that an operator reads; of divided ones those that get a gradient.

    A divided one may be looked at, say for its norm, which the loss does not depend on.
    """
    has_gradient = torch.is_grad_enabled() and func is not torch.ops.aten.detach.default
    for given in pytree.tree_leaves((args, kwargs)):
        if isinstance(given, nn.Parameter) and (has_gradient or not isinstance(given, DTensor)):
            yield given


def _check(func: Any, args: Any, kwargs: Any) -> None:
    """Raise NeedsWholeError for random numbers, and for gradients of tensors that are whole."""
    name = func.name().partition("::")[2]
    if torch.Tag.nondeterministic_seeded in func.tags and _dropout_of(func, args, kwargs) != 0.0:
        raise NeedsWholeError(
            f"{name} draws random numbers, and each rank would draw the same for its part"
        )
    for given in pytree.tree_leaves((args, kwargs)):
        is_plain = isinstance(given, torch.Tensor) and not isinstance(given, DTensor)
        if is_plain and given.requires_grad:
            raise NeedsWholeError(f"{name} joins it with a tensor that every rank computes whole")


def _check_heads(func: Any, args: Any, count: int) -> None:
    """Raise NeedsWholeError for a view of features as heads that do not divide by the ranks."""
    dim = divided_dim(args[0]) if func in VIEWS else None
    if dim is None or dim != args[0].ndim - 1 or len(args[1]) <= args[0].ndim:
        return
    shape = list(args[1])
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = args[0].numel() // known
    if shape[:dim] == list(args[0].shape[:dim]) and shape[dim] % count:
        raise NeedsWholeError(
            f"its output is {shape[dim]} heads, which do not divide by {count} ranks; use a number "
            f"of ranks by which {shape[dim]} divides"
        )


def _dropout_of(func: Any, args: Any, kwargs: Any) -> float | None:
    """Return the dropout of an attention; None of other operators, which always draw."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p")
            return float(argument.default_value if given is None else given)
    return None


def divided_dim(given: Any) -> int | None:
    """Return along which dimension a layer's input is divided; None if it is whole."""
    if not isinstance(given, DTensor):
        return None
    placement = given.placements[0]
    return placement.dim if isinstance(placement, Shard) else None


Key = tuple[str, str]
Loss = Callable[[], torch.Tensor]


def divide(model: nn.Module, mesh: DeviceMesh, loss_of_few: Loss) -> "Division":
    """Divide the layers of a model in place, as far as possible.

    Args:
        model: on its device, whole.
        mesh: the ranks that divide it, one dimension.
        loss_of_few: runs the forward on a few samples and returns the loss.
    """
    found = Division(model, mesh)
    try:
        while not found.is_tried(loss_of_few):
            pass
    except BaseException:
        found.layers.end()
        raise
    found.layers.finish()
    return found


class Division:
    """What has been found out so far.

    Attributes:
        layers: those that are divided.
        reasons: why layers are not divided by columns and rows, by a pattern of their paths.
        whole: why layers are not divided at all, by the same.
        shared: the modules that share a weight, each with all of them.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model = model
        self.layers = TriedLayers(mesh)
        self.reasons: dict[str, str] = {}
        self.whole: dict[str, str] = {}
        self.keys = _keys(model)
        self._alone: set[Key] = set()
        self._whole: set[Key] = set()
        self._at_fault: dict[nn.Module, str] = {}
        self._suspected: dict[nn.Module, str] = {}
        self._open: list[nn.Module] = []
        self._closed: list[list[nn.Module]] = []
        self.shared, self._with_others = _sharing(model)
        self.layers.before = self._decide
        for module in model.modules():
            if any(p is not None for p in parameters_of(module).values()):
                self.layers.listen(module)

    def is_tried(self, loss_of_few: Loss) -> bool:
        """Return whether forward and backward ran; if not, fewer layers are divided next time."""
        self._open, self._closed = [], []
        self.layers.is_exchanging = False
        try:
            with _unchanged(self.model), replicating():
                self._run(loss_of_few)
        except Exception as error:  # whatever an operator raises that cannot be divided
            why = str(error).partition("\n")[0].rstrip(".")
            is_own = isinstance(error, MemlabError) or is_out_of_memory(error)
            if is_own or not self._demote(why):
                raise
            self.layers.undo()
            return False
        if self._suspected:
            module, why = self._suspected.popitem()  # without it the trial ran at last
            self._start_again({module: why})
            return False
        return True

    def _start_again(self, at_fault: dict[nn.Module, str]) -> None:
        """Forget all demotions but those of layers that are known to be at fault."""
        self._at_fault.update(at_fault)
        for found in (self._suspected, self._alone, self._whole, self.reasons, self.whole):
            found.clear()
        for module, why in self._at_fault.items():
            self._keep_whole(module, why)
        self.layers.undo()

    def _run(self, loss_of_few: Loss) -> None:
        with Watch(self.layers):
            loss = loss_of_few()
        if self._open:
            raise NeedsWholeError("its output is used outside of layers that are divided")
        if any(map(self._is_used_outside, self.layers.roles)):
            raise NeedsWholeError("an operator has used a weight whole before it was divided")
        loss.backward()

    def _decide(self, module: nn.Module, given: Any) -> None:
        """Give a layer a role, by what arrives at it."""
        if module in self.layers.roles:
            return
        key, shard_of = self.keys[module], divided_dim(given)
        if not is_layer(module):
            if shard_of is not None and module in self._with_others:
                raise NeedsWholeError("a module between shares its weight with another one")
            if shard_of is not None:
                self.layers.divide(module, Role.INSIDE)
            return
        if key in self._whole or module in self._with_others:
            return

        outputs, inputs = features_of(module)
        if shard_of is not None and shard_of == given.ndim - 1:
            self.layers.divide(module, Role.ROWS, inputs)
            self._closed.append([*self._open, module])
            self._open = []
        elif shard_of is None and self._may_be_columns(module, key):
            self.layers.divide(module, Role.COLUMNS, outputs)
            self._open.append(module)
        elif shard_of is None and (dim := self._dim_alone(module)) is not None:
            self.layers.divide(module, Role.ALONE, dim)

    def _may_be_columns(self, module: Any, key: Key) -> bool:
        return (
            key not in self._alone
            and not isinstance(module, nn.Embedding)
            and module not in self.shared
            and self._dim_alone(module) == features_of(module)[0]
        )

    def _dim_alone(self, module: Any) -> int | None:
        """Return along which dimension a layer is divided alone; None if no one divides.

        PyTorch compares the index of the padding with rows of this rank, so an embedding that has
        one is not divided by rows.
        """
        outputs, inputs = features_of(module)
        is_padded = any(getattr(m, "padding_idx", None) is not None
                        for m in self.shared.get(module, (module,)))  # fmt: skip
        dims = (inputs,) if is_padded else (outputs, inputs)
        count = self.layers.mesh.size()
        return next((dim for dim in dims if module.weight.shape[dim] % count == 0), None)

    def _demote(self, why: str) -> bool:
        """Divide fewer layers in the next trial; return whether there were any."""
        roles = self.layers.roles
        alone = [module for module, role in roles.items() if role is Role.ALONE]
        used = [module for module in roles if self._is_used_outside(module)]
        if used:
            why = "its weight is also used outside of its own forward"
            self._start_again(dict.fromkeys(used, why))
        elif self._open or self._closed:
            blamed = self._open or self._closed[-1]
            self._alone |= {self.keys[module] for module in blamed}
            for module in blamed:
                if self.keys[module][0] or not alone:  # a head alone needs no reason
                    self.reasons[self._name(module)] = why
        elif alone:
            self._suspected[alone[-1]] = why
            self._keep_whole(alone[-1], why)
        else:
            return False
        return True

    def _is_used_outside(self, module: nn.Module) -> bool:
        return is_layer(module) and self.layers.is_read(module)

    def _keep_whole(self, module: nn.Module, why: str) -> None:
        """Divide this layer no more, and none that shares a weight with it."""
        self._whole |= {self.keys[other] for other in self.shared.get(module, (module,))}
        self.reasons.pop(self._name(module), None)
        self.whole[self._name(module)] = why

    def _name(self, module: nn.Module) -> str:
        block, path = self.keys[module]
        return f"{block}.{path}".lstrip(".") or type(module).__name__

    def names(self, *roles: Role) -> list[str]:
        """Return the layers with these roles; those of repeated blocks once, after their class."""
        found = [m for m in self.model.modules() if self.layers.roles.get(m) in roles]
        return list(dict.fromkeys(self._name(module) for module in found))


def _keys(model: nn.Module) -> dict[nn.Module, Key]:
    """Return for each module the class of its repeated block and its path in there."""
    keys: dict[nn.Module, Key] = {}
    blocks = {path: block for stack in find_stacks(model) for path, block in stack.items()}
    for path, module in model.named_modules():
        block = next((b for b in blocks if path.startswith(f"{b}.")), None)
        inside = "" if block is None else f"{type(blocks[block]).__name__}"
        keys[module] = (inside, path if block is None else path.removeprefix(f"{block}."))
    return keys


def _sharing(model: nn.Module) -> tuple[dict[nn.Module, list[nn.Module]], set[nn.Module]]:
    """Return the modules that share a weight, each with all of them.

    Then those of them that share it with others than layers, or in another way.
    """
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in parameters_of(module).values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(module)

    shared: dict[nn.Module, list[nn.Module]] = {}
    for together in holders.values():
        if len(together) > 1:  # those that share another weight with one of these belong to them
            every = list(dict.fromkeys(m for one in together for m in shared.get(one, (one,))))
            shared.update(dict.fromkeys(every, every))
    return shared, {module for module, every in shared.items() if not _are_alike(every)}


def _are_alike(modules: list[nn.Module]) -> bool:
    return all(map(is_layer, modules)) and len({features_of(module) for module in modules}) == 1


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Take back what a forward and backward leave in buffers and gradients."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
