"""Shard the blocks of a model, and then the rest of it: what an exported script does too.

This file imports nothing from memlab but how blocks are found, because an exported script contains
a copy of it. `fully_sharded.py` says why formats and units are as they are.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from memlab.techniques.recompute.nesting import is_inside
from memlab.techniques.recompute.repeated_blocks import find_stacks


def shard_blocks(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    frees: bool,
    narrow: torch.dtype | None = None,
    on_host: bool = False,
    read_by_loss: nn.Module | None = None,
) -> None:
    """Shard a model in place; it stays the same object and may be called as before.

    Args:
        model: on its device.
        mesh: the ranks that share its parts; with two dimensions, groups of them in rows.
        frees: whether a block's whole parameters are freed after its forward.
        narrow: the format in which parameters are gathered; None keeps theirs.
        on_host: whether parts of parameters, gradients and optimizer state stay in host memory.
        read_by_loss: a module whose parameters are needed after the model's forward too. It is left
            to the model as a whole, which then keeps its parameters until the end of backward.
    """
    from torch.distributed.fsdp import (  # 0.3 s that few need
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )

    options: dict[str, Any] = {"mesh": mesh}
    if on_host:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    if narrow is not None:
        # normalisation over the batch has kernels for fp32 parameters only
        for module in model.modules():
            if isinstance(module, _BatchNorm) and any(True for _ in module.parameters()):
                exact = MixedPrecisionPolicy(cast_forward_inputs=False)
                fully_shard(module, mp_policy=exact, **options)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)

    blocks = [b for b in units(model) if read_by_loss not in set(b.modules())]
    for block in blocks:
        fully_shard(block, reshard_after_forward=frees, **options)

    # without blocks the whole model is one unit
    is_freed = frees and not blocks and read_by_loss is None
    fully_shard(model, reshard_after_forward=is_freed, **options)


def units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that are sharded by themselves: those of every stack of repeated blocks.

    A block that shares a parameter with the rest of the model is left to the model as a whole:
    sharded by itself, it would get a parameter of its own. Of nested blocks the inner ones count,
    since a module cannot be sharded before its parts.
    """
    found = {path: block for stack in find_stacks(model) for path, block in stack.items()}
    outer = {path for path in found if any(is_inside(inner, (path,)) for inner in found)}
    blocks = {path: block for path, block in found.items() if path not in outer}
    holders: dict[nn.Parameter, set[str]] = {}
    for path, module in model.named_modules():
        owner = next((b for b in blocks if path == b or path.startswith(f"{b}.")), "")
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(owner)

    return [
        block
        for block in blocks.values()
        if any(True for _ in block.parameters())
        and all(len(holders[parameter]) == 1 for parameter in block.parameters())
    ]


def in_micro_batch(model: Any) -> Callable[[bool], contextlib.AbstractContextManager[None]]:
    """Return a function that gives the context of a micro-batch.

    It is called with whether the ranks average their gradients after this micro-batch.
    """

    @contextlib.contextmanager
    def context(is_synced: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(is_synced)
        yield

    return context
