"""Whether a model runs the operators that it ran on a few samples, by which something was decided.

Compared are the names of the operators of each forward, views and casts aside; with inputs of
shapes that were checked before nothing is watched. Left out: what runs outside of the model's
forward, such as the loss; backward, which follows the forward; and a forward that gives the same
operators other tensors.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memlab.techniques.recompute.keeping import NO_OPERATORS, is_counted
from memlab.torch_private import pytree
from memlab.torch_private.dispatch import TorchDispatchMode

END, REFUSED = "the end", "in-place operation"
# as strides need them, which one sample may not have, and as offloading makes them as it saves
COPIES = ("clone", "copy_", "empty_like")
Shapes = tuple[tuple[int, ...], ...]


class OperatorWatch:
    """Learns which operators a model runs, and then tells of a forward that runs others.

    Args:
        model: its forward is replaced on the instance.
        tell: called with the first operator that ran where another one did; it should raise.
    """

    def __init__(self, model: nn.Module, tell: Callable[[str], None]) -> None:
        self.tell, self.is_learning = tell, False
        self.learned: set[tuple[str, ...]] = set()  # one for each forward of a step
        self.checked: set[Shapes] = set()
        forward: Callable[..., Any] = model.forward

        @functools.wraps(forward)  # libraries ask for the arguments that it takes
        def watched(*args: Any, **kwargs: Any) -> Any:
            shapes = _shapes((args, kwargs))
            if shapes in self.checked and not self.is_learning:
                return forward(*args, **kwargs)
            with _OperatorNames() as names:
                try:
                    out = forward(*args, **kwargs)
                except RuntimeError as error:  # autograd refuses some before they run
                    refused = (REFUSED,) if REFUSED in str(error) else ()
                    self._compare((*names.ran, *refused))
                    raise
            if self.is_learning:
                self.learned.add((*names.ran, END))
            self._compare((*names.ran, END))
            self.checked.add(shapes)
            return out

        model.forward = watched

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Learn from what the model runs meanwhile."""
        self.is_learning = True
        try:
            yield
        finally:
            self.is_learning = False

    def _compare(self, ran: tuple[str, ...]) -> None:
        """Tell of the first operator, if no learned forward begins as this one."""
        same = [_num_same(ran, known) for known in self.learned]
        if same and max(same) < len(ran):
            self.tell(ran[max(same)])


class _OperatorNames(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator and run it."""
        is_copy = func.overloadpacket.__name__ in COPIES
        if is_counted(func) and not is_copy and func.namespace not in NO_OPERATORS:
            self.ran.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _num_same(ran: tuple[str, ...], known: tuple[str, ...]) -> int:
    pairs = zip(ran, known, strict=False)
    return next((at for at, (now, then) in enumerate(pairs) if now != then), len(ran))


def _shapes(values: Any) -> Shapes:
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return tuple(tuple(tensor.shape) for tensor in tensors)
