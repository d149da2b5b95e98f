"""Report which module is running, by hooks on forward calls; not for compiled models."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as nn_module


@contextlib.contextmanager
def reported(
    model: torch.nn.Module, begin: Callable[[str], None], end: Callable[[], None]
) -> Iterator[None]:
    """Call `begin` with a module's path before each of its forward calls, and `end` after it.

    Modules of other models are ignored. The path of the model itself is the name of its class.
    """
    paths = {module: path or name_of_class(module) for path, module in model.named_modules()}

    # a part that a person has compiled would be cut at each hook
    def enter(module: torch.nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and module in paths:
            begin(paths[module])

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        if not torch.compiler.is_compiling() and module in paths:
            end()

    # global hooks leave the modules of the model themselves unchanged
    hooks = (
        nn_module.register_module_forward_pre_hook(enter),
        nn_module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def name_of_class(model: torch.nn.Module) -> str:
    """Return the name of a model's class; `fully_shard` puts one of its own before it."""
    kind, fsdp = type(model), sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and kind.__bases__[0] is fsdp.FSDPModule:
        kind = kind.__bases__[-1]
    return kind.__name__
