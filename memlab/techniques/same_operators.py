"""Check that a model still runs the operators that it ran on the samples of a trial.

A technique that tries something on a few samples (`inplace`) may rely on the result only while the
model runs the same operators. The names of the operators of each forward are compared, without
views and casts. A forward whose input shapes have been checked before is not watched again.

Left out: what runs outside of the model's forward, such as the loss; the backward, which follows
the forward; and a forward that runs the same operators on other tensors.
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
# copies depend on strides, which a batch of one sample may lack, and offloading adds some
COPIES = ("clone", "copy_", "empty_like")
Shapes = tuple[tuple[int, ...], ...]


class OperatorWatch:
    """Learns which operators a model runs, and then reports a forward that runs other ones.

    Args:
        model: its forward is replaced on the instance.
        report: called with the first operator that differs; it should raise an error.
    """

    def __init__(self, model: nn.Module, report: Callable[[str], None]) -> None:
        self.report = report
        self.is_learning = False
        self.learned: set[tuple[str, ...]] = set()  # one for each forward of a step
        self.checked: set[Shapes] = set()
        forward: Callable[..., Any] = model.forward

        @functools.wraps(forward)  # libraries inspect its signature
        def watched(*args: Any, **kwargs: Any) -> Any:
            shapes = _shapes((args, kwargs))
            if shapes in self.checked and not self.is_learning:
                return forward(*args, **kwargs)

            with _OperatorNames() as names:
                try:
                    out = forward(*args, **kwargs)
                except RuntimeError as error:  # autograd refuses some operators before they run
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
        """Learn the operators that the model runs inside this context."""
        self.is_learning = True
        try:
            yield
        finally:
            self.is_learning = False

    def _compare(self, ran: tuple[str, ...]) -> None:
        """Report the first operator that differs, unless a learned forward begins like this one."""
        same = [_num_same(ran, known) for known in self.learned]
        if same and max(same) < len(ran):
            self.report(ran[max(same)])


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
