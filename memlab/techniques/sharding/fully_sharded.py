"""Each rank keeps its part of every parameter, gradient and state: FSDP2's `fully_shard`.

Source: the documentation of `torch.distributed.fsdp.fully_shard`. The repeated blocks of the model,
of an encoder and of a decoder alike, are units: before a block runs, the ranks gather its whole
parameters, and after its backward they average its gradients and each keeps its part. Parameters
outside of blocks belong to the model as a whole, which keeps them from the first forward to the
end of backward.

With autocast alone a block's casts to bf16 would be saved for backward, so that every rank would
hold the whole model in bf16 whatever is sharded. So in the mixed formats the parameters themselves
are gathered in the narrow format, and gradients are averaged in fp32. Normalisation over the batch
keeps fp32 parameters, which its kernels need.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.modules.batchnorm import _BatchNorm

from memlab._util.torch_private.tensors import without_modes
from memlab.config import Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing.blocks import find_stacks, is_inside
from memlab.techniques.loss.logits import find_head
from memlab.techniques.precision import AUTOCAST_DTYPE
from memlab.techniques.sharding.ranks import REPLICATED

# Shard the blocks of a model, and then the rest of it: what an exported script does too.
#
# It is plain PyTorch, of which exported scripts contain what they call.


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


def make_mesh(config: StepConfig, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks: one row, or one row for each group.

    A group is that of hybrid sharding, or of the ranks that divide layers.
    """
    shape, names = mesh_of(config)
    with without_modes():  # a mesh reads the numbers of its ranks, which fake tensors do not have
        return init_device_mesh(device_type, shape, mesh_dim_names=names)


def mesh_of(config: StepConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the shape of the mesh of all ranks, and the names of its dimensions."""
    if config.tensor_parallel_size > 1:
        others = "replicate" if config.sharding in REPLICATED else "shard"
        return (config.data_parallel_size, config.tensor_parallel_size), (others, "tensor")
    if config.sharding is not Sharding.HYBRID:
        return (config.world_size,), ("tensor" if config.sharding is Sharding.TENSOR else "shard",)
    assert config.shard_group_size is not None
    num_groups = config.world_size // config.shard_group_size
    return (num_groups, config.shard_group_size), ("replicate", "shard")


def dimension(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return this rank's row or column of a mesh, or the mesh itself if it has no others."""
    if mesh.ndim == 1:
        return mesh
    with without_modes():
        return mesh[name]


def shard(model: nn.Module, config: StepConfig, mesh: DeviceMesh) -> None:
    """Shard a model in place; it stays the same object and may be called as before."""
    if config.tensor_parallel_size > 1:
        mesh = dimension(mesh, "shard")
    if config.offloads_shards and config.max_grad_norm is not None:
        _check_sums_on_host()
    frees = config.sharding is not Sharding.ZERO2
    shard_blocks(
        model,
        mesh,
        frees=frees,
        narrow=AUTOCAST_DTYPE.get(config.precision),
        on_host=config.offloads_shards,
        read_by_loss=find_head(model)[1] if config.loss_chunks > 1 else None,
    )


def _check_sums_on_host() -> None:
    """Raise UnsupportedError unless the ranks can add up numbers that are in host memory."""
    if "cpu:" not in (opened := dist.get_backend_config()):
        raise UnsupportedError(
            "max_grad_norm with offload_parameters=True: the norm of gradients in host memory is "
            f"added up there, and this process group has no backend for it ({opened}); open it by "
            'dist.init_process_group("cpu:gloo,cuda:nccl"), or use max_grad_norm=None'
        )


# Check in the first micro-batch that all ranks run the same modules in the same order.
#
# FSDP2 gathers a block when it runs, and reduces the gradients that a rank has. A rank that
# runs another block than the others, such as the expert to which its tokens are routed,
# would get weights or gradients of the wrong one, without an error. Left out: later micro-
# batches, compiled models.

Context = Callable[[bool], contextlib.AbstractContextManager[None]]


def checked_once(model: nn.Module, context: Context, device: torch.device) -> Context:
    """Return `context`, which also checks the calls of the first micro-batch.

    Args:
        model: fully sharded.
        context: of a micro-batch, by whether the ranks average their gradients after it.
        device: of this rank.

    Raises:
        UnsupportedError: in the micro-batch, in all ranks, before weights or gradients are mixed.
    """
    calls: Calls | None = Calls(model, device)

    @contextlib.contextmanager
    def checked(is_synced: bool) -> Iterator[None]:
        nonlocal calls
        first, calls = calls, None
        with context(is_synced), first or contextlib.nullcontext():
            yield

    return checked


class Calls:
    """The modules with parameters that this rank has run since the ranks last compared them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.paths: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        """Compare before a block is gathered, and after forward."""
        for path, module in self.model.named_modules():
            is_unit = isinstance(module, FSDPModule)
            if is_unit:
                compare = self._comparing(path)
                self._hooks.append(module.register_forward_pre_hook(compare, prepend=True))
            elif any(True for _ in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(self._noting(path)))
        self._hooks.append(self.model.register_forward_hook(self._comparing("the end of forward")))

    def __exit__(self, *_: object) -> None:
        """Watch no more calls."""
        for hook in self._hooks:
            hook.remove()

    def _noting(self, path: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            self.paths.append(path)

        return note

    def _comparing(self, path: str) -> Callable[..., None]:
        def compare(*_: object) -> None:
            self.paths.append(path)
            self._compare()
            self.paths.clear()

        return compare

    def _compare(self) -> None:
        """Raise an error in all ranks if they have run different modules."""
        digest = zlib.crc32("\n".join(self.paths).encode())
        ends = torch.tensor([digest, -digest], device=self.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        most, least = ends.tolist()
        if most == -least:
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.paths)
        other = next(rank for rank, paths in enumerate(found) if paths != found[0])
        place = next(
            index
            for index in range(len(found[0]) + len(found[other]))
            if found[0][index : index + 1] != found[other][index : index + 1]
        )
        first, second = (
            (paths[place] or "the model") if place < len(paths) else "nothing"
            for paths in (found[0], found[other])
        )
        raise UnsupportedError(
            f"rank 0 runs {first} where rank {other} runs {second}: FSDP2 gathers parameters and "
            "reduces gradients in the order in which modules run, so the ranks would train with "
            "one another's; let every rank run every module (an expert that gets no tokens, with "
            "none of them), or train in one process"
        )
