"""Initialisation on the meta device: a model is built without memory, then created on its device.

While `build_model` runs, its tensors have shapes but no bytes, and every operator on them is
recorded. Then the operators are replayed on the device, in the same order and from the same seed.
So everything that a plain build initialises is initialised: buffers, tied weights and a
constructor's own changes too, which `to_empty` and `reset_parameters` would lose. On a CPU the
values equal those of a plain build bit by bit. A card draws other random numbers than a CPU.

The tensors are fake tensors that report the real device. If a tensor reported "meta",
torch.nn.init and transformers would silently skip its initialisation (torch 2.13, transformers 5).

A model whose parameters are sharded stays without memory until `fully_shard` has divided it, and is
then filled one parameter at a time: no rank ever holds the whole model. Left out:
predictions of other models, whose tensors need no memory anyway.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import (
    FakeTensor,
    OpOverload,
    buffers_of,
    detect_fake_mode,
    parameters_of,
    schema_of,
    without_modes,
)
from memlab._util.units import format_bytes
from memlab.config import StepConfig
from memlab.devices.generators import set_random, states_of_random
from memlab.errors import UnsupportedError
from memlab.techniques import deferred
from memlab.techniques.deferred import (
    RANDOM,
    CannotDefer,
    Notes,
    TensorPlace,
    check_none_is_left,
    of_kind,
    run,
    tensor_at,
    view_at,
)
from memlab.techniques.sharding.ranks import FULLY_SHARDED, is_tensor_parallel, local
from memlab.techniques.source import ScriptLines, inlined, together
from memlab.techniques.technique import Equivalence, Setup, Technique, switch

# Replay what a constructor did, one tensor of the model at a time.
#
# The idea. A constructor makes its tensors in an order of its own: a transformer first
# makes all of them and then initialises all of them again, so that a replay in that order
# would hold the whole model. But what one weight is made of seldom touches another one. So
# the operators are divided into groups that share no storage, and each group is replayed by
# itself:
#
#     the constructor                  the groups
#     w1 = empty, w2 = empty           w1 = empty, w1.normal_()      w1 is used, then freed
#     w1.normal_(), w2.normal_()       w2 = empty, w2.normal_()      w2 is used, then freed
#
# Weights that were computed from one another are in one group, and each is freed after its
# last use.
#
# Random numbers come from one generator, which must be where it was when the constructor
# drew. If the groups draw in another order, all draws are made once beforehand, on memory
# that is freed at once, and the states of the generator are noted: 5 kB for each, and the
# time of drawing twice. Left out: constructors in which a random operator reads a tensor,
# whose groups are replayed together.

Use = Callable[[int, torch.Tensor], None]
"""Called with the number of a storage and a tensor in it, once nothing changes it any more."""
SHAPES_ONLY = "_like"  # the end of the name of a random operator that reads no values


def replay_one_at_a_time(notes: Notes, device: torch.device, wanted: set[int], use: Use) -> None:
    """Make each wanted storage on a device, give it to `use`, and drop it.

    Values and random numbers are those of a constructor that runs on this device.
    """
    groups = list(_groups(notes.operators)) if _can_be_divided(notes) else [notes.operators]
    drawn = [operator for operator in notes.operators if _is_random(operator)]
    states: dict[int, Any] = {}
    end = None
    if _ids_of_draws(groups) != [id(operator) for operator in drawn]:
        groups = [group for group in groups if _storages_of(group) & wanted]
        states = _states_before(drawn, _ids_of_draws(groups), device)
        end = states_of_random([device])

    for group in groups:
        _replay(group, device, wanted, use, states)
    if end is not None:
        set_random(end, None)


def _ids_of_draws(groups: list[list[Any]]) -> list[int]:
    return [id(operator) for group in groups for operator in group if _is_random(operator)]


def _storages_of(group: list[Any]) -> set[int]:
    return {place.storage for operator in group for place in _places(operator)}


def _replay(
    group: list[Any], device: torch.device, wanted: set[int], use: Use, states: dict[int, Any]
) -> None:
    """Run the operators of a group, and use and free each storage after its last one."""
    real: dict[int, torch.Tensor] = {}
    last = {p.storage: index for index, operator in enumerate(group) for p in _places(operator)}
    for index, operator in enumerate(group):
        if id(operator) in states:
            set_random(states[id(operator)], None)
        run(operator, real, device)
        for storage in [storage for storage in real if last[storage] == index]:
            tensor = real.pop(storage)
            if storage in wanted:
                use(storage, tensor)


def _groups(operators: list[Any]) -> Iterator[list[Any]]:
    """Yield operators that share storages, directly or through others, in their order."""
    parent: dict[int, int] = {}

    def root(storage: int) -> int:
        while parent.setdefault(storage, storage) != storage:
            parent[storage] = parent[parent[storage]]
            storage = parent[storage]
        return storage

    for operator in operators:
        first, *others = [place.storage for place in _places(operator)] or [-1]
        for other in others:
            parent[root(other)] = root(first)

    found: dict[int, list[Any]] = {}
    for operator in operators:
        places = _places(operator)
        found.setdefault(root(places[0].storage) if places else -1, []).append(operator)
    yield from found.values()


def _states_before(drawn: list[Any], order: list[int], device: torch.device) -> dict[int, Any]:
    """Draw everything once, and return the generator's state before each draw that is moved."""
    earlier = dict(zip(order[1:], order, strict=False))  # what is drawn before it in the replay
    wanted, states = set(order), {}
    before = None
    for operator in drawn:
        if id(operator) in wanted and (before is None or earlier.get(id(operator)) != before):
            states[id(operator)] = states_of_random([device])
        run(operator, _scratch(operator, device), device)
        before = id(operator)
    return states


def _scratch(operator: Any, device: torch.device) -> dict[int, torch.Tensor]:
    """Return memory for what an operator writes, without the values that it has in the model."""
    return {
        place.storage: torch.empty(_extent(place), dtype=place.dtype, device=device)
        for place in _places(operator[:3])
    }


def _extent(place: TensorPlace) -> int:
    """Return how many numbers of its format lie from the beginning of a storage to its end."""
    steps = zip(place.shape, place.stride, strict=True)
    return place.offset + 1 + sum((n - 1) * step for n, step in steps if n)


def _can_be_divided(notes: Notes) -> bool:
    """Return whether every random operator only writes, so that it can draw on any memory."""
    return all(_only_writes(operator) for operator in notes.operators if _is_random(operator))


def _only_writes(operator: Any) -> bool:
    func, args, kwargs, _ = operator
    if not isinstance(func, OpOverload) or func.overloadpacket.__name__.endswith(SHAPES_ONLY):
        return True  # a function of torch.nn.init fills its first tensor
    written = [
        value
        for argument, value in zip(schema_of(func).arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return len(_places((args, kwargs))) == len(_places(written))


def _is_random(operator: Any) -> bool:
    """Return whether an operator draws; a function that was noted as a whole does."""
    return RANDOM in getattr(operator[0], "tags", [RANDOM])


def _places(tree: Any) -> list[TensorPlace]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, TensorPlace)]


# A model that is sharded while it has no memory, and then filled, one parameter at a time.
#
# First the constructor's operators are noted (`deferred.py`), and the model's tensors are
# put on PyTorch's meta device. There they can be cast, and `fully_shard` can divide them.
# Then each tensor is made as the constructor made it, one at a time, this rank keeps
# its part, and the rest is freed. So a rank holds its part of the model and one whole
# parameter at most, with what that is made of. Each rank draws all random numbers, so
# nothing is sent.
#
# Buffers, and tensors that modules hold in other places, are whole in every rank, as in a
# plain step.

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


Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A model as it was built.

    Attributes:
        model: on the meta device if its values come later.
        unfilled: its values, if they come later.
    """

    model: nn.Module
    unfilled: Unfilled | None = None

    def fill(self, device: torch.device, home: torch.device) -> None:
        """Make the values that were to come later, once the model is sharded.

        Args:
            device: where they are made.
            home: where parts of parameters stay: the device, or the host if they are offloaded.
        """
        if self.unfilled is not None:
            self.unfilled.fill(device, home)


def _comes_later(config: StepConfig) -> bool:
    """Return whether values are made when the model is sharded; dividing its layers needs them."""
    return config.sharding in FULLY_SHARDED and not is_tensor_parallel(config)


def built(build_model: Callable[[], nn.Module], device: torch.device, config: StepConfig) -> Built:
    """Return the model as a config asks for it: plainly, or without memory.

    Raises:
        UnsupportedError: as for `build`.
    """
    if not config.init_on_meta:
        return Built(model=build_model())
    if not _comes_later(config):
        return Built(model=build(build_model, device))

    with without_modes():  # a prediction sees how the values are made, not how they are noted
        unfilled = _refused_by_name(lambda: Unfilled(*deferred.noted_build(build_model)))
    return Built(model=unfilled.model, unfilled=unfilled)


def build(build_model: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return the model, built without memory and then created on this device.

    Raises:
        UnsupportedError: its constructors read or draw numbers in a way that cannot be replayed.
    """
    if detect_fake_mode() is not None:
        return build_model()

    return _refused_by_name(lambda: deferred.build_on_meta(build_model, device))


def _refused_by_name(make: Callable[[], Made]) -> Made:
    try:
        return make()
    except deferred.CannotDefer as error:
        instead = f", or {error.instead}" if error.instead else ""
        raise UnsupportedError(
            f"init_on_meta=True cannot build this model without memory ({error}); use "
            f"init_on_meta=False{instead}"
        ) from error


def notes(setup: Setup) -> list[str]:
    """Say where the initial values come from, and where nothing is saved."""
    if not setup.config.init_on_meta:
        return []

    if _comes_later(setup.config):
        return [
            "Each rank was built with its part of the model and one whole parameter at a time, "
            "never with the whole model."
        ]
    if setup.device.type == "cpu" or setup.config.offload_parameters:
        return [
            "init_on_meta saves nothing here, because the model's weights are in host memory "
            "anyway. The initial values equal those of a plain build on a CPU bit by bit."
        ]

    return [
        "The initial values are drawn on the card, which draws other random numbers than a CPU."
    ]


def peak_notes(config: StepConfig, peak_bytes: int) -> list[str]:
    """Say what a rank with a part of the model held while it was built."""
    if not _comes_later(config):
        return []
    return [f"While the model was built, this rank held at most {format_bytes(peak_bytes)}."]


WHY = "# built without memory first, so that weights are created where they stay"


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script that build the model."""
    config = setup.config
    if not config.init_on_meta:
        return ScriptLines()

    # offloaded weights are created in host memory
    where = 'torch.device("cpu")' if config.offload_parameters else "device"
    before = f"build_model = functools.partial(build_on_meta, build_model, {where})"
    return together(
        [
            inlined(deferred.build_on_meta),
            ScriptLines(imports=("import functools",), before=(WHY, before)),
        ]
    )


def says(setup: Setup) -> str:
    """Return what it does now."""
    if not setup.config.init_on_meta:
        return ""
    return "the model is built without memory, then its weights are created on the device"


BUILT_ON_META = Technique(
    fields=("init_on_meta",),
    equivalence=Equivalence.NUMERICAL,
    examples={"built on meta": {"init_on_meta": True}},
    source=source,
    notes=notes,
    controls=(
        switch(
            "init_on_meta",
            "build on the meta device",
            "built on the meta device",
            "built with its weights",
        ),
    ),
    says=says,
)
