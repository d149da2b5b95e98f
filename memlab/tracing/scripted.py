"""TorchScript inside a model, whose executor runs the first calls of a function differently.

The executor profiles the first call and runs it like plain PyTorch. The second call runs a graph
with its own backward, which keeps other tensors than autograd would and is profiled too. The third
call frees the gradients of that backward later. From then on all calls are alike, so such a model
is measured in its third step or later. Left out: kernels that the executor fuses on a card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

NUM_STEPS = 3  # of one micro-batch, until a step runs like all later ones
SETTLED = (
    "The model has TorchScript parts, whose executor runs the first two steps differently from all "
    "later ones. These are the numbers of the third step."
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
