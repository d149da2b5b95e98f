"""TorchScript inside a model, whose executor changes how it runs a function in its first calls.

It watches the first call and runs it like plain PyTorch. The second runs a graph with a backward of
its own, which keeps other tensors than autograd would and is watched in turn; the third frees the
gradients of that backward later. From then on all calls are alike, so a step of such a model is the
third one or a later one. Left out: kernels that the executor fuses on a card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

NUM_STEPS = 3  # of one micro-batch, until a step runs as all later ones do
SETTLED = (
    "The model has TorchScript parts, whose executor runs the first two steps in other ways than "
    "all later ones: these are the numbers of the third."
)


def is_scripted(model: torch.nn.Module) -> bool:
    """Return whether any module was made by `torch.jit.script` or `torch.jit.trace`."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())


@contextlib.contextmanager
def noticed_script_functions(notice: Callable[[], None]) -> Iterator[None]:
    """Call `notice` before each function that was made by `torch.jit.script` or `trace` runs."""
    kind: Any = torch.jit.ScriptFunction
    call = kind.__call__

    def new_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        notice()
        return call(self, *args, **kwargs)

    kind.__call__ = new_call
    try:
        yield
    finally:
        kind.__call__ = call
