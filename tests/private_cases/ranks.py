"""Process groups, DistributedDataParallel and sharded tensors."""

import inspect

import torch
import torch.distributed as dist

from tests.private_cases.parts import arguments_of, at, case


@case(
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    to="be one rank without the others",
)
def _() -> None:
    store = at("torch.testing._internal.distributed.fake_pg.FakeStore")()
    dist.init_process_group("fake", store=store, rank=3, world_size=1000)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 1000)
        dist.all_reduce(torch.ones(2))
    finally:
        dist.destroy_process_group()


@case(
    "torch.distributed.distributed_c10d._world._default_pg",
    to="see whether a job has left a process group open",
)
def _() -> None:
    store = at("torch.testing._internal.distributed.fake_pg.FakeStore")()
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        assert at("torch.distributed.distributed_c10d")._world._default_pg is dist.group.WORLD
    finally:
        dist.destroy_process_group()
    assert at("torch.distributed.distributed_c10d._world._default_pg") is None


@case(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    to="let sharded tensors call operators on their parts",
)
def _() -> None:
    assert issubclass(
        at("torch.distributed._functional_collectives.AsyncCollectiveTensor"), torch.Tensor
    )


@case("._verify_param_shape_across_processes", to="make a replica of fake tensors")
def _() -> None:
    module = at("torch.nn.parallel.distributed")
    assert callable(module._verify_param_shape_across_processes)
    asks = module.DistributedDataParallel.__init__.__code__.co_names
    assert "_verify_param_shape_across_processes" in asks
    assert callable(dist.Reducer._rebuild_buckets)


@case(
    "torch.distributed.fsdp._fully_shard._fsdp_param",
    "._chunk_with_empty",
    to="divide a parameter over thousands of ranks at once",
)
def _() -> None:
    function = at("torch.distributed.fsdp._fully_shard._fsdp_param")._chunk_with_empty
    assert arguments_of(function) == ["tensor", "num_chunks", "dim"]
    parts = function(torch.ones(5), 4, dim=0)
    assert [len(part) for part in parts] == [2, 2, 1, 0]


@case("torch.distributed._compute_bucket_assignment_by_size", to="divide gradients into buckets")
def _() -> None:
    weights = [torch.ones(4), torch.ones(2), torch.ones(3)]
    compute = dist._compute_bucket_assignment_by_size
    assert compute(weights, [8, 100], [False] * 3, [2, 1, 0])[0] == [[2], [1, 0]]


@case(
    "torch.autograd.Variable._execution_engine",
    to="finish the buckets when a backward ends",
)
def _() -> None:
    called: list[int] = []
    x = torch.ones(2, requires_grad=True)
    engine = torch.autograd.Variable._execution_engine
    x.register_hook(lambda grad: engine.queue_callback(lambda: called.append(1)))
    x.sum().backward()
    assert called == [1]


@case(
    "._type",
    "._resolve_process_group",
    to="find the ranks of a collective",
)
def _() -> None:
    store = at("torch.testing._internal.distributed.fake_pg.FakeStore")()
    dist.init_process_group("fake", store=store, rank=0, world_size=4)
    boxes: list[torch.ScriptObject] = []

    class Seen(at("torch.utils._python_dispatch.TorchDispatchMode")):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            boxes.extend(value for value in args if isinstance(value, torch.ScriptObject))
            return func(*args, **(kwargs or {}))

    try:
        with Seen():
            dist.all_reduce(torch.ones(2), group=dist.new_group([0, 2]))
        (box,) = [box for box in boxes if box._type().name() == "ProcessGroup"]
        group = dist.ProcessGroup.unbox(box)
        assert dist.get_process_group_ranks(group) == [0, 2]
        resolved = at("torch.distributed.distributed_c10d")._resolve_process_group(group.group_name)
        assert dist.get_process_group_ranks(resolved) == [0, 2]
    finally:
        dist.destroy_process_group()


@case("._partition_parameters", to="find the rank with the largest share of optimizer state")
def _() -> None:
    kind = at("torch.distributed.optim.ZeroRedundancyOptimizer")
    assert arguments_of(kind._partition_parameters) == ["self", "params_per_rank"]


@case("._broadcast_params_from_rank", to="send parts of parameters after an update")
def _() -> None:
    kind = at("torch.distributed.optim.ZeroRedundancyOptimizer")
    assert arguments_of(kind._broadcast_params_from_rank) == ["self", "rank"]
    assert "_broadcast_params_from_rank" in kind._sync_params.__code__.co_names


@case("._clear_sharding_prop_cache", to="forget the meshes of a closed process group")
def _() -> None:
    at("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


@case(
    "torch.distributed.tensor._sharding_prop",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator",
    "._propagate_tensor_meta_non_cached",
    to="let sharded tensors find shapes unseen",
)
def _() -> None:
    kind = at("torch.distributed.tensor._sharding_prop").ShardingPropagator
    assert arguments_of(kind._propagate_tensor_meta_non_cached) == ["self", "op_schema"]


@case(
    "torch.distributed.tensor._dispatch",
    to="let sharded tensors draw random numbers without the state of a generator",
)
def _() -> None:
    module = at("torch.distributed.tensor._dispatch")
    assert arguments_of(module.is_rng_supported_mesh) == ["device_mesh"]
    assert "is_rng_supported_mesh" in inspect.getsource(module)


@case("._concatenate", to="join the ranks of `fully_shard` with those that divide layers")
def _() -> None:
    kind = at("torch.distributed.device_mesh").DeviceMesh
    assert arguments_of(kind._concatenate) == ["device_mesh_list"]


@case(
    "torch.distributed._functional_collectives",
    to="pause after a collective of sharded tensors, until its thread holds none",
)
def _() -> None:
    module = at("torch.distributed._functional_collectives")
    assert arguments_of(module.wait_tensor) == ["tensor"]
    assert "wait_tensor" in module.AsyncCollectiveTensor.wait.__code__.co_names
