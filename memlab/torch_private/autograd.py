"""Autograd: the running node, numbers of operators, checkpointing; and the profiler's events."""

import contextlib
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

# the node whose backward runs, None outside of a backward
current_node = torch._C._current_autograd_node

# the number that the next operator with a gradient gets, and the number that a node got
next_sequence_number = torch._C._autograd._get_sequence_nr
sequence_number_of: Callable[[Any], int] = methodcaller("_sequence_nr")

# the innermost `saved_tensors_hooks`, None without any; True: also where they are switched off
innermost_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# the innermost transform of torch.func (vmap, grad, ...) that is active, None outside of them
innermost_transform = torch._C._functorch.peek_interpreter_stack

# the kind of an event of the profiler: an operator, an allocation, ...
EventType = torch._C._profiler._EventType

# the function that `checkpoint` calls for its non-reentrant form: the first that PyTorch has
NON_REENTRANT = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)


@contextlib.contextmanager
def checkpointed_by(generator: Callable[..., Iterator[None]], reentrant: type) -> Iterator[None]:
    """Replace what `torch.utils.checkpoint` runs, inside this context.

    Args:
        generator: replaces the one of its non-reentrant form, which surrounds the function's call.
        reentrant: replaces its class of an autograd function, whose `apply` is called.
    """
    module: Any = torch_checkpoint
    name = next(name for name in NON_REENTRANT if hasattr(module, name))
    replaced: dict[str, Any] = {name: generator, "CheckpointFunction": reentrant}
    own = {name: getattr(module, name) for name in replaced}
    for name, replacement in replaced.items():
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for name, original in own.items():
            setattr(module, name, original)
