"""Dispatch modes that keep outputs of a forward, and give them back in its recompute.

Outputs are known by operator and by its number in one call, so that a forward and its recompute
must run the same operators. That is checked by how many ran before each kept one, but for casts,
which autocast remembers from one module to the next, views, which hooks make of what a recompute is
given, and copies, by which weights come to the device. Left out: what to keep, which a policy says.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.techniques.recompute.keepable import can_be_kept, values_of
from memlab.techniques.recompute.policies import Keeps

NO_OPERATORS = ("prim", "profiler")  # questions about a tensor, annotations
CAST = torch.ops.aten._to_copy.default
MOVES = frozenset((torch.ops.aten.copy_.default, torch.ops.aten.empty_like.default))
"""By which a weight comes to the device, once more or less often than in the forward."""

Key = tuple[OpOverload, int]


class Keep(TorchDispatchMode):
    """Keeps outputs of a forward, each with how many operators ran before it."""

    def __init__(self, keeps: Keeps, kept: dict[Key, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeps, self.kept, self.position = keeps, kept, 0
        self.counts: dict[OpOverload, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; keep its output if that is asked for and possible."""
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
    """Gives kept outputs back in a recompute; what was changed in place since then runs again.

    Args:
        kept: by `Keep`.
        refuse: raises for what the recompute does otherwise than the forward.
    """

    def __init__(self, kept: dict[Key, Any], refuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.refuse, self.position = kept, refuse, 0
        self.counts: dict[OpOverload, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what was kept, else run the operator."""
        if func.namespace not in NO_OPERATORS and func not in MOVES:
            number = self.counts[func]
            self.counts[func] += 1
            self.position += is_counted(func)
            position, found = self.kept.pop((func, number), (self.position, None))
            if position != self.position:
                self.refuse(f"runs other operators before {func} than before")
            if found is not None and all(kept.is_unchanged for kept in _kept_in(found)):
                return pytree.tree_map_only(_KeptOutputs, lambda kept: kept.tensor, found)
        return func(*args, **(kwargs or {}))


def is_counted(func: OpOverload) -> bool:
    """Return whether an operator must be the same in a forward that is run again."""
    return func is not CAST and func not in MOVES and not func.is_view


class _KeptOutputs:
    """A kept tensor, outside of any graph, and the version of its contents."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version


def _kept(tensor: torch.Tensor) -> _KeptOutputs:
    # below autograd a detached tensor counts its versions apart, unless this key is let through
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return _KeptOutputs(tensor.detach())


def _kept_in(found: Any) -> list[_KeptOutputs]:
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, _KeptOutputs)]
