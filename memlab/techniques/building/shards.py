"""A model that is sharded while it has no memory, and then filled, one parameter at a time.

First the constructor's operators are noted (`deferred.py`), and the model's tensors are put on
PyTorch's meta device. There they can be cast, and `fully_shard` can divide them. Then each tensor
is made as the constructor made it (`one_at_a_time.py`), this rank keeps its part, and the rest is
freed. So a rank holds its part of the model and one whole parameter at most, with what that is made
of. Each rank draws all random numbers, so nothing is sent.

Buffers, and tensors that modules hold in other places, are whole in every rank, as in a plain step.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from memlab.techniques.building.deferred import (
    CannotDefer,
    Notes,
    TensorPlace,
    check_none_is_left,
    of_kind,
    tensor_at,
    view_at,
)
from memlab.techniques.building.one_at_a_time import replay_one_at_a_time
from memlab.techniques.sharding.ranks import local
from memlab.torch_private import pytree
from memlab.torch_private.fakes import FakeTensor
from memlab.torch_private.modules import buffers_of, parameters_of

Held = tuple[dict[str, Any], str, Any]
"""A dict, a key, and the value that was there, with the number of each tensor in its place."""


class Number(int):
    """Stands for a tensor in a tree: its number."""


class Unfilled:
    """The values of a model on the meta device, which are not there yet.

    Args:
        model: of fake tensors; they are put on the meta device.
        notes: what they are made of.

    Raises:
        CannotDefer: something that is no module holds a tensor.
    """

    def __init__(self, model: nn.Module, notes: Notes) -> None:
        self.model, self.notes = model, notes
        self._numbers: dict[int, Number] = {}  # by the id of the fake
        self._places: list[TensorPlace] = []
        self._attributes: list[dict[str, Any]] = []
        fakes: list[FakeTensor] = []  # held, so that the ids stay theirs
        self._paths = {
            path: self._number(parameter, fakes) for path, parameter in model.named_parameters()
        }
        self._held = self._others(fakes)
        self._to_meta(fakes)
        fakes.clear()
        check_none_is_left(notes)

    def fill(self, device: torch.device, home: torch.device) -> None:
        """Make the values on a device; each parameter's part goes to its `home`."""
        waiting: dict[int, list[Number]] = defaultdict(list)
        for number, place in enumerate(self._places):
            waiting[place.storage].append(Number(number))
        parameters = dict(self.model.named_parameters())
        of_number = {number: parameters[path] for path, number in self._paths.items()}
        whole: dict[Number, torch.Tensor] = {}

        def use(storage: int, tensor: torch.Tensor) -> None:
            for number in waiting[storage]:
                place = self._places[number]
                if number in of_number:
                    values = view_at(place, {storage: tensor})
                    _fill_part(of_number[number], values, home)
                else:
                    whole[number] = tensor_at(place, {storage: tensor})
                    vars(whole[number]).update(self._attributes[number])

        replay_one_at_a_time(self.notes, device, set(waiting), use)
        for holder, name, tree in self._held:
            now = holder[name]
            made = pytree.tree_map_only(Number, whole.__getitem__, tree)
            is_cast = isinstance(now, torch.Tensor) and now.dtype != made.dtype
            holder[name] = made.to(now.dtype) if is_cast else made

    def _number(self, fake: Any, fakes: list[FakeTensor]) -> Number:
        """Return the number of a fake tensor, a new one when it is first seen."""
        if id(fake) not in self._numbers:
            fakes.append(fake)
            self._numbers[id(fake)] = Number(len(self._places))
            self._places.append(self.notes.placed(fake))
            self._attributes.append(self.notes.attributes(fake))
        return self._numbers[id(fake)]

    def _others(self, fakes: list[FakeTensor]) -> list[Held]:
        """Return where modules hold tensors that are no parameters of theirs."""
        found: list[Held] = []
        for module, holder, name, value in _holders(self.model):
            leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, FakeTensor)]
            if holder is parameters_of(module):
                continue
            if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
                _check_renews(module, name)
                continue
            tree = pytree.tree_map_only(FakeTensor, lambda f: self._number(f, fakes), value)
            found.append((holder, name, tree))
        return found

    def _to_meta(self, fakes: list[FakeTensor]) -> None:
        """Put a tensor on the meta device in the place of each fake one."""
        made: dict[int, torch.Tensor] = {}
        for fake, place in zip(fakes, self._places, strict=True):
            meta = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")
            if isinstance(fake, nn.Parameter):
                kind = self._attributes[self._numbers[id(fake)]].pop("_kind", nn.Parameter)
                meta = of_kind(kind, meta, fake.requires_grad)
            made[id(fake)] = meta
        for _, holder, name, value in _holders(self.model):
            holder[name] = pytree.tree_map_only(FakeTensor, lambda f: made[id(f)], value)


def _holders(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any], str, Any]]:
    """Return where fake tensors are: the module, one of its dicts, the key, and the value."""
    return [
        (module, holder, name, value)
        for module in model.modules()
        for holder in (vars(module), parameters_of(module), buffers_of(module))
        for name, value in holder.items()
        if value is not parameters_of(module) and value is not buffers_of(module)
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))
    ]


def _check_renews(module: nn.Module, name: str) -> None:
    """Raise CannotDefer unless a module renews an attribute in which it holds its parameters."""
    if not isinstance(module, nn.RNNBase):  # it does when a parameter of it is set
        raise CannotDefer(
            f"{type(module).__name__} holds a parameter in its attribute {name!r} too, which would "
            "stay whole in every rank",
            "read it by the name under which it is registered",
        )


def _fill_part(parameter: nn.Parameter, whole: torch.Tensor, home: torch.device) -> None:
    """Give a parameter on the meta device this rank's part of its values, in its own format."""
    with torch.no_grad():
        empty = torch.empty_like(parameter, device=home)
        local(empty).copy_(_part_of(whole, parameter))
        filled = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, filled)  # all who hold the parameter still hold it


def _part_of(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return a view of this rank's part; `distribute_tensor` would make a copy first."""
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            parts = whole.chunk(parameter.device_mesh.size(dim), placement.dim)
            rank = parameter.device_mesh.get_local_rank(dim)
            whole = parts[rank] if rank < len(parts) else whole[:0]
    return whole
