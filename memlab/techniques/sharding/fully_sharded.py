"""Each rank keeps its part of every parameter, gradient and state: FSDP2's `fully_shard`.

Source: the documentation of `torch.distributed.fsdp.fully_shard`. The repeated blocks of the model,
of an encoder and of a decoder alike, are units: before a block runs, the ranks gather its whole
parameters, and after its backward they average its gradients and each keeps its part. Parameters
outside of blocks belong to the model as a whole, which keeps them from the first forward to the
end of backward.

With autocast alone a block's casts to bf16 would be saved for backward, so that every rank would
hold the whole model in bf16 whatever is sharded. So in the mixed formats the parameters themselves
are gathered in the narrow format, and gradients are averaged in fp32. Normalisation over the batch
keeps fp32 parameters, which its kernels need. `shards.py` carries it out.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memlab.config import Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.loss.heads import find_head
from memlab.techniques.precision import AUTOCAST_DTYPE
from memlab.techniques.sharding.ranks import REPLICATED
from memlab.techniques.sharding.shards import shard_blocks
from memlab.torch_private.dispatch import without_modes


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
