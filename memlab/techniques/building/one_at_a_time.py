"""Replay what a constructor did, one tensor of the model at a time.

The idea. A constructor makes its tensors in an order of its own: a transformer first makes all of
them and then initialises all of them again, so that a replay in that order would hold the whole
model. But what one weight is made of seldom touches another one. So the operators are divided into
groups that share no storage, and each group is replayed by itself:

    the constructor                  the groups
    w1 = empty, w2 = empty           w1 = empty, w1.normal_()      w1 is used, then freed
    w1.normal_(), w2.normal_()       w2 = empty, w2.normal_()      w2 is used, then freed

Weights that were computed from one another are in one group, and each is freed after its last use.

Random numbers come from one generator, which must be where it was when the constructor drew. If the
groups draw in another order, all draws are made once beforehand, on memory that is freed at once,
and the states of the generator are noted: 5 kB for each, and the time of drawing twice. Left out:
constructors in which a random operator reads a tensor, whose groups are replayed together.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab.devices.generators import set_random, states_of_random
from memlab.techniques.building.deferred import RANDOM, Notes, TensorPlace, run
from memlab.torch_private import pytree
from memlab.torch_private.operators import OpOverload, schema_of

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
