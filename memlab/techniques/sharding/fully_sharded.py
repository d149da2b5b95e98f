"""Each rank keeps its part of every parameter, gradient and state: FSDP2's `fully_shard`.

Source: the documentation of `torch.distributed.fsdp.fully_shard`. The repeated blocks of the model
are units: before a block runs, the ranks gather its whole parameters, and after its backward they
average its gradients and each keeps its part. Parameters outside of blocks belong to the model as
a whole, which keeps them from the first forward to the end of backward.

With autocast alone a block's casts to bf16 would be saved for backward, so that every rank would
hold the whole model in bf16 whatever is sharded. So in the mixed formats the parameters themselves
are gathered in the narrow format, and gradients are averaged in fp32. Normalisation over the batch
keeps fp32 parameters, which its kernels need.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memlab.config import Sharding, StepConfig
from memlab.techniques.precision import AUTOCAST_DTYPE
from memlab.techniques.recompute.nesting import is_inside
from memlab.techniques.recompute.repeated_blocks import find_blocks
from memlab.torch_private.dispatch import without_modes
from memlab.torch_private.modules import BatchNorm


def make_mesh(config: StepConfig, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks: one row, or with hybrid sharding one row for each group."""
    shape: tuple[int, ...] = (config.world_size,)
    names: tuple[str, ...] = ("shard",)
    if config.sharding is Sharding.HYBRID:
        assert config.shard_group_size is not None
        shape = (config.world_size // config.shard_group_size, config.shard_group_size)
        names = ("replicate", "shard")
    with without_modes():  # a mesh reads the numbers of its ranks, which fake tensors do not have
        return init_device_mesh(device_type, shape, mesh_dim_names=names)


def shard(model: nn.Module, config: StepConfig, mesh: DeviceMesh) -> None:
    """Shard a model in place; it stays the same object and may be called as before."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # 0.3 s that few need

    options: dict[str, Any] = {"mesh": mesh}
    if config.precision in AUTOCAST_DTYPE:
        for module in model.modules():
            if isinstance(module, BatchNorm) and any(True for _ in module.parameters()):
                exact = MixedPrecisionPolicy(cast_forward_inputs=False)
                fully_shard(module, mesh=mesh, mp_policy=exact)
        narrow = AUTOCAST_DTYPE[config.precision]
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)

    frees = config.sharding is not Sharding.ZERO2
    blocks = units(model)
    for block in blocks:
        fully_shard(block, reshard_after_forward=frees, **options)

    # without blocks the whole model is one unit
    fully_shard(model, reshard_after_forward=frees and (not blocks or None), **options)


def units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that are sharded by themselves.

    A block that shares a parameter with the rest of the model is left to the model as a whole:
    sharded by itself, it would get a parameter of its own. Of nested blocks the inner ones count,
    since a module cannot be sharded before its parts.
    """
    found = find_blocks(model)
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


def in_micro_batch(
    model: Any,
) -> Callable[[bool], contextlib.AbstractContextManager[None]]:
    """Return a function that gives the context of a micro-batch."""

    @contextlib.contextmanager
    def context(is_synced: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(is_synced)
        yield

    return context
