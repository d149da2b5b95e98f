"""Ranks: a process group without other processes, and what DistributedDataParallel is made of.

All of it is imported when it is first asked for, since `torch.distributed` takes long to import and
some builds of PyTorch have none.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from memlab._util.torch_private.tensors import without_modes


@contextlib.contextmanager
def group_of_none(rank: int, world_size: int) -> Iterator[None]:
    """Be one of many ranks, in a process group whose collectives return at once and move nothing.

    A process group also makes errors that end the process name the rank; not afterwards.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = own


def group_in(args: Sequence[Any]) -> tuple[str, tuple[int, ...]]:
    """Return the name and the ranks of the process group in the arguments of a collective.

    The dispatcher gives it in a box, or functional collectives by its name, their last text.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    module: Any = distributed_c10d
    for value in args:
        if isinstance(value, torch.ScriptObject):
            kind: Any = value._type()
            if kind.name() == "ProcessGroup":
                group = dist.ProcessGroup.unbox(value)
                return group.group_name, tuple(dist.get_process_group_ranks(group))
    name = [value for value in args if isinstance(value, str)][-1]
    group = module._resolve_process_group(name)
    return name, tuple(dist.get_process_group_ranks(group))


def sharded_types() -> tuple[type, ...]:
    """Return the tensor classes that stand for the parts of all ranks."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return DTensor, AsyncCollectiveTensor


@contextlib.contextmanager
def replicated_by(reducer: type, logger: type) -> Iterator[None]:
    """Make DistributedDataParallel use other classes than its own, which are written in C++.

    Its check that all ranks have the same parameters is left out.
    """
    import torch.distributed
    from torch.nn.parallel import distributed

    dist: Any = torch.distributed
    module: Any = distributed
    own = dist.Reducer, dist.Logger, module._verify_param_shape_across_processes
    dist.Reducer, dist.Logger = reducer, logger
    module._verify_param_shape_across_processes = lambda *args: None
    try:
        yield
    finally:
        dist.Reducer, dist.Logger, module._verify_param_shape_across_processes = own


def buckets_of(
    parameters: Sequence[torch.Tensor], limits: Sequence[int], indices: Sequence[int]
) -> list[list[int]]:
    """Return which parameters DistributedDataParallel puts into a bucket together.

    Args:
        parameters: in the order in which they are put into buckets.
        limits: bytes of the first buckets; the last one is that of all others too.
        indices: the numbers by which the parameters are returned.
    """
    import torch.distributed

    dist: Any = torch.distributed
    are_sparse = [False] * len(parameters)
    given = list(parameters), list(limits), are_sparse, list(indices)
    found: list[list[int]] = dist._compute_bucket_assignment_by_size(*given)[0]
    return found


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs now."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def forget_shardings() -> None:
    """Let DTensors forget how operators divide tensors: with it they keep the meshes they met.

    A mesh of other groups that looks alike would else be given those of a closed process group.
    """
    from torch.distributed.tensor import debug

    module: Any = debug
    module._clear_sharding_prop_cache()


@contextlib.contextmanager
def shapes_found_unseen() -> Iterator[None]:
    """Let sharded tensors find the shapes of their results out of sight of all modes.

    They run each operator once more for it, over fake tensors of their own, and remember the shape
    for the rest of the process.
    """
    from torch.distributed.tensor import _sharding_prop

    kind: Any = _sharding_prop.ShardingPropagator
    own = kind._propagate_tensor_meta_non_cached

    def found(self: Any, schema: Any) -> Any:
        with without_modes():
            return own(self, schema)

    kind._propagate_tensor_meta_non_cached = found
    try:
        yield
    finally:
        kind._propagate_tensor_meta_non_cached = own


@contextlib.contextmanager
def drawn_as_on_a_cpu() -> Iterator[None]:
    """Let sharded tensors draw random numbers without setting the generator's state for each rank.

    For devices like CUDA they read that state, and compute with it, which fake tensors cannot.
    """
    from torch.distributed.tensor import _dispatch

    module: Any = _dispatch
    own = module.is_rng_supported_mesh
    module.is_rng_supported_mesh = lambda mesh: False
    try:
        yield
    finally:
        module.is_rng_supported_mesh = own


@contextlib.contextmanager
def parameters_divided_by(divide: Callable[..., Sequence[torch.Tensor]]) -> Iterator[None]:
    """Let `fully_shard` divide parameters by another function: of a tensor, a number and a dim."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    module: Any = _fsdp_param
    own = module._chunk_with_empty
    module._chunk_with_empty = divide
    try:
        yield
    finally:
        module._chunk_with_empty = own


@contextlib.contextmanager
def storages_resized_by(resize: Callable[..., Any]) -> Iterator[None]:
    """Resize storages by another function: called with PyTorch's own, the storage and the size."""
    kind: Any = torch.UntypedStorage
    own = kind.resize_  # which it inherits

    def method(self: Any, size: int) -> Any:
        return resize(own, self, size)

    kind.resize_ = method
    try:
        yield
    finally:
        del kind.resize_


@contextlib.contextmanager
def meshes_joined_unseen() -> Iterator[None]:
    """Let `fully_shard` join its ranks with those that divide layers out of sight of all modes.

    A mesh reads the numbers of its ranks, which fake tensors do not have.
    """
    import torch.distributed.device_mesh

    kind: Any = torch.distributed.device_mesh.DeviceMesh
    own = vars(kind)["_concatenate"]

    def joined(*meshes: Any) -> Any:
        with without_modes():
            return own(*meshes)

    kind._concatenate = staticmethod(joined)
    try:
        yield
    finally:
        kind._concatenate = own


@contextlib.contextmanager
def waited_by(wait: Callable[..., Any]) -> Iterator[None]:
    """Wait for the collectives of DTensors by another function: of PyTorch's own and a tensor."""
    import torch.distributed._functional_collectives

    module: Any = torch.distributed._functional_collectives
    own = module.wait_tensor
    module.wait_tensor = lambda tensor: wait(own, tensor)
    try:
        yield
    finally:
        module.wait_tensor = own


# What a `ZeroRedundancyOptimizer` sends after an update.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def partition_of(optimizer: Any) -> list[list[torch.Tensor]]:
    """Return the parameters of every rank's share in a `ZeroRedundancyOptimizer`."""
    return [
        [parameter for group in groups for parameter in group["params"]]
        for groups in optimizer._partition_parameters()
    ]


def parts_sent_by(optimizer: Any) -> None:
    """Let a `ZeroRedundancyOptimizer` send parts of parameters: its broadcasts take no DTensors.

    Args:
        optimizer: sends the parameters of each rank's share to the other ranks after an update.
    """
    import torch.distributed as dist

    this = weakref.ref(optimizer)

    def send(rank: int) -> list[Any]:
        own: Any = this()
        group = own.process_group
        source = dist.get_global_rank(group, rank)
        found = []
        for parameter in partition_of(own)[rank]:
            data: Any = parameter.data
            part = data.to_local() if hasattr(data, "to_local") else data
            found.append(dist.broadcast(part, source, group=group, async_op=True))
        return found

    optimizer._broadcast_params_from_rank = send
