"""`ModuleAttributes`: what a module's attributes and torch's registries held, and putting it back.

    attributes    those that the model sets itself, such as `self.calls`, one by one
    registries    torch's own dicts of each module: hooks of every kind, buffers; their contents

Parameters and modules are registries too, and a forward that changes them is refused: they are
what a model is made of. Another class over the memory of a frozen weight is no change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memlab.techniques.recompute.places import are_same, is_same
from memlab.techniques.recompute.reachable import OF_TORCH
from memlab.techniques.recompute.without_graphs import without_graph, without_graphs
from memlab.torch_private.modules import MODULES, PARAMETERS
from memlab.torch_private.tensors import is_wrapper, storage_key

REGISTRIES = tuple(sorted(OF_TORCH))


class ModuleAttributes:
    """The attributes and registries of a module and all modules in it, as they are now.

    Args:
        parts: the module itself, and then all modules in it.
        with_graphs: note results of autograd as they are; if not, their numbers without the graphs.

    Attributes:
        values: of the attributes of each part.
    """

    def __init__(self, parts: list[nn.Module], *, with_graphs: bool) -> None:
        self._parts = parts
        values = [tuple(vars(part).values()) for part in parts]
        self.values = values if with_graphs else [tuple(map(without_graph, v)) for v in values]
        self._names = [tuple(vars(part)) for part in parts]
        self._registries = _registries(parts)
        self._own_forward = vars(parts[0]).get("forward")

    def check_structure(self, refuse: Callable[[str], None]) -> None:
        """Call `refuse` with why, if what the model is made of has changed since."""
        if vars(self._parts[0]).get("forward") is not self._own_forward:
            refuse("its forward replaces the forward of its own module")
        for part, before in zip(self._parts, self._registries, strict=True):
            for name, what in ((MODULES, "modules"), (PARAMETERS, "parameters")):
                held, now = before.get(name, ()), vars(part)[name]
                now = (*now, *now.values())
                if not is_same(held, now) and not _are_of_same_memory(held, now):
                    refuse(
                        f"its forward makes, replaces or removes {what} of its own; do that in "
                        "its constructor"
                    )

    def let_go_of_graphs(self) -> None:
        """Let go of the graphs in attributes that were replaced: each would hold the one before."""
        for at, part in enumerate(self._parts):
            now, before = vars(part), self.values[at]
            if not are_same([tuple(now.values())], [before]):
                self.values[at] = tuple(
                    value if now.get(name) is value else without_graphs(value)
                    for name, value in zip(self._names[at], before, strict=True)
                )

    def put_back(self) -> None:
        """Give the modules what was noted."""
        _set_attributes(self._parts, self._names, self.values)
        _set_registries(self._parts, self._registries)


def _are_of_same_memory(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether nothing but the classes of frozen parameters has changed.

    FSDP gathers a 4-bit weight of bitsandbytes as a plain tensor, and the layer gives it back its
    class in its forward: another object over the same memory, which FSDP replaces again.
    """
    half = len(now) // 2
    return before[:half] == now[:half] and all(map(_is_of_same_memory, before[half:], now[half:]))


def _is_of_same_memory(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if not (isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)):
        return False
    if before.requires_grad or now.requires_grad:  # its gradient belongs to one object
        return False
    return (
        not is_wrapper(type(before))
        and not is_wrapper(type(now))
        and _memory(before) == _memory(now)
    )


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = storage_key(tensor.untyped_storage())
    return storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _set_attributes(
    parts: list[nn.Module], names: list[tuple[str, ...]], values: list[tuple[Any, ...]]
) -> None:
    """Give modules the attributes that they had, but for those of torch itself."""
    for part, own_names, own_values in zip(parts, names, values, strict=True):
        now = vars(part)
        if tuple(now) == own_names and all(map(operator.is_, now.values(), own_values)):
            continue
        for name in now.keys() - set(own_names) - OF_TORCH:
            del now[name]
        now.update(
            (name, value)
            for name, value in zip(own_names, own_values, strict=True)
            if name not in OF_TORCH
        )


def _registries(parts: list[nn.Module]) -> list[dict[str, tuple[Any, ...]]]:
    """Return what torch's own registries of each module hold: the names, and then the values."""
    return [
        {
            name: (*held, *held.values())
            for name in REGISTRIES
            if (held := vars(part).get(name)) and isinstance(held, dict)
        }
        for part in parts
    ]


def _set_registries(parts: list[nn.Module], registries: list[dict[str, tuple[Any, ...]]]) -> None:
    for part, noted, now in zip(parts, registries, _registries(parts), strict=True):
        for name in REGISTRIES:
            before = noted.get(name, ())
            if not is_same(before, now.get(name, ())):
                held = vars(part)[name]
                half = len(before) // 2
                held.clear()
                held.update(zip(before[:half], before[half:], strict=True))
