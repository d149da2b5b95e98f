"""Dispatch modes that keep outputs of a forward, and return them in its recompute.

An output is identified by its operator and a number: the third `aten.mm` of a call, for instance.
So a forward and its recompute must run the same operators. To check this, memlab compares how many
operators ran before each kept one. Three kinds are not counted, because their number may differ:
casts, which autocast caches from one module to the next; views, which hooks make of a recompute's
inputs; and copies, which bring offloaded weights to the device.

Left out: the choice of what to keep, which `policies.py` makes.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from memlab.techniques.recompute.keepable import can_be_kept, values_of
from memlab.techniques.recompute.policies import Keeps
from memlab.torch_private import pytree
from memlab.torch_private.dispatch import TorchDispatchMode, with_versions_counted
from memlab.torch_private.operators import OpOverload
from memlab.torch_private.tensors import version_of

NO_OPERATORS = ("prim", "profiler")  # namespaces of attribute reads and of annotations
CAST = torch.ops.aten._to_copy.default
MOVES = frozenset((torch.ops.aten.copy_.default, torch.ops.aten.empty_like.default))
"""Operators that bring an offloaded weight to the device."""

Key = tuple[OpOverload, int]


class Keep(TorchDispatchMode):
    """Keeps outputs of a forward, each with the number of operators that ran before it."""

    def __init__(self, keeps: Keeps, kept: dict[Key, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeps, self.kept, self.position = keeps, kept, 0
        self.counts: dict[OpOverload, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; keep its output if the policy says so and it can be kept."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in NO_OPERATORS or func in MOVES:
            return out

        number = self.counts[func]
        self.counts[func] += 1
        self.position += is_counted(func)

        if self.keeps(func, number, args, kwargs, out) and can_be_kept(
            func, values_of(func, args, kwargs)
        ):
            self.kept[func, number] = (
                self.position,
                pytree.tree_map_only(torch.Tensor, _kept, out),
            )

        return out


class Reuse(TorchDispatchMode):
    """Returns kept outputs in a recompute. An output that was changed in place is recomputed.

    Args:
        kept: the outputs that `Keep` kept.
        refuse: raises an error when the recompute differs from the forward.
    """

    def __init__(self, kept: dict[Key, Any], refuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.refuse, self.position = kept, refuse, 0
        self.counts: dict[OpOverload, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the kept output if there is one; otherwise run the operator."""
        if func.namespace not in NO_OPERATORS and func not in MOVES:
            number = self.counts[func]
            self.counts[func] += 1
            self.position += is_counted(func)
            position, found = self.kept.pop((func, number), (self.position, None))
            if position != self.position:
                self.refuse(f"runs other operators before {func} than the first time")
            if found is not None and all(kept.is_unchanged for kept in _kept_in(found)):
                return pytree.tree_map_only(_KeptOutputs, lambda kept: kept.tensor, found)

        return func(*args, **(kwargs or {}))


def is_counted(func: OpOverload) -> bool:
    """Return whether a recompute must run this operator exactly as often as its forward."""
    return func is not CAST and func not in MOVES and not func.is_view


class _KeptOutputs:
    """A kept tensor, detached from its graph, and the version of its contents."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, version_of(tensor)

    @property
    def is_unchanged(self) -> bool:
        return version_of(self.tensor) == self.version


def _kept(tensor: torch.Tensor) -> _KeptOutputs:
    # below autograd a detached tensor gets a version counter of its own unless this key is enabled
    with with_versions_counted():
        return _KeptOutputs(tensor.detach())


def _kept_in(found: Any) -> list[_KeptOutputs]:
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, _KeptOutputs)]
