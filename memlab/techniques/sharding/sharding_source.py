"""The lines of a script that divides a model and its batches over ranks.

They belong to `sharding.py`: what it applies in memlab, these lines apply in a script. The script
runs in every rank, and `dist`, `rank` and `num_ranks` exist in all of its lines.
"""

from collections.abc import Mapping

from memlab._util.torch_private.ranks import parts_sent_by
from memlab._util.units import quoted
from memlab.config import Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.batches import is_own_kind
from memlab.techniques.precision import AUTOCAST_DTYPE
from memlab.techniques.sharding import deepspeed_engine, replicated
from memlab.techniques.sharding.deepspeed_engine import USUAL_BUCKET, deepspeed_settings
from memlab.techniques.sharding.ranks import FULLY_SHARDED, REPLICATED, is_tensor_parallel
from memlab.techniques.source import PLACE, ScriptLines, inlined, together
from memlab.techniques.technique import Setup
from memlab.workload import Workload

# The lines of a script whose ranks divide layers, as a trial of the model has found them.
#
# The script makes no trial: it holds what was found, and the files that divide by it.

TABLE = "# how ranks divide each layer, and along which dimension of its weight; * is any number"
SAME = "# all ranks compute the same samples, and each its part of these layers"
SAME_OF_FEW = "# every {} ranks compute the same samples, and each its part of these layers"
AS_ONE = "# ranks that divide layers compute the same samples, so here they count as one"
ALIKE = "# tensors that all ranks have alike, such as masks, meet divided ones"
COPIES = "# the ranks that hold the same parts average their gradients while backward goes on"
ATTENTION = "register_attention()  # for which PyTorch has no rule on a CPU"


def divided_lines(setup: Setup, mesh: str) -> ScriptLines:
    """Return what a script needs for divided layers; nothing if ranks do not divide any.

    Args:
        setup: with the layers.
        mesh: the expression that makes the mesh of all ranks.
    """
    config = setup.config
    if not is_tensor_parallel(config):
        return ScriptLines()
    if setup.layers is None:
        raise UnsupportedError(
            f"{said(config)} has no script of its settings alone, because which layers are divided "
            "depends on the model; use memlab.export_script"
        )
    # late, since these import much of torch.distributed
    from memlab.techniques.sharding.divided_layers import (
        LocalParts,
        divide_layers,
        register_attention,
    )

    is_copied, is_cpu = config.sharding in REPLICATED, setup.device.type == "cpu"
    sends_updated = config.sharding is Sharding.ZERO1
    called = [divide_layers, *[register_attention] * is_cpu, *[LocalParts] * is_copied]
    called += [parts_sent_by] * sends_updated
    is_all = config.sharding is Sharding.TENSOR
    why = SAME if is_all else SAME_OF_FEW.format(config.tensor_parallel_size)
    lines = ScriptLines(
        imports=(
            "from torch.distributed.device_mesh import init_device_mesh",
            "from torch.distributed.tensor.experimental import implicit_replication",
        ),
        functions=(_table(setup.layers),),
        place=(
            PLACE,
            *[ATTENTION] * is_cpu,
            why,
            f"ranks = {mesh}",
            'divide_layers(model, ranks["tensor"], DIVIDED_LAYERS)',
        ),
        optimizer=("parts_sent_by(optimizer)",) if sends_updated else (),
        around=(*["local_parts.used()"] * is_copied, ALIKE, "implicit_replication()"),
    )
    return together([inlined(*called), lines])


def replicated_parts_lines() -> ScriptLines:
    """Return the lines that average the gradients of those ranks that hold the same parts."""
    return ScriptLines(
        model=(
            COPIES,
            'group = ranks["replicate"].get_group()',
            "local_parts = LocalParts(model)",
            "with local_parts.shown():",
            "    model = replicate(model, group)",
        )
    )


def who(config: StepConfig) -> tuple[str, ...]:
    """Return the lines that say which part of a batch a rank computes, of how many."""
    if config.sharding is Sharding.TENSOR:
        return ()
    number, count = "dist.get_rank()", "dist.get_world_size()"
    if not is_tensor_parallel(config):
        return (f"rank, num_ranks = {number}, {count}",)
    size = config.tensor_parallel_size
    return (AS_ONE, f"rank, num_ranks = {number} // {size}, {count} // {size}")


def said(config: StepConfig) -> str:
    """Return the settings that divide layers, as the beginning of a sentence."""
    strategy = f"sharding={str(config.sharding)!r}"
    if config.sharding is Sharding.TENSOR:
        return strategy
    return f"{strategy}, tensor_parallel_size={config.tensor_parallel_size}"


def _table(layers: Mapping[str, tuple[str, int | None]]) -> str:
    rows = [
        f"    {quoted(path)}: ({quoted(role)}, {dim!r})," for path, (role, dim) in layers.items()
    ]
    return "\n".join([TABLE, "DIVIDED_LAYERS = {", *rows, "}"])


BY_DEEPSPEED = ("offload_activations", "offload_parameters", "offload_optimizer")
TERMS = (
    "# the loss is a mean over these terms, and micro-batches have different numbers of them",
    "terms = [float(num_loss_terms(part)) for part in parts]",
    "if not min(terms) > 0:",
    '    raise ValueError("a micro-batch has no loss terms, and no rank can skip one")',
)
MOVED = "tree_map_only(torch.Tensor, lambda t: t.to(device), {})"
MEAN = '''
def mean_of_ranks(loss, device):
    """Return the mean of the losses of all ranks."""
    total = torch.tensor(loss, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
'''.strip()

AVERAGED = "average_after = in_micro_batch(model)"
NO_SYNC = "# until the last micro-batch no gradients are sent, and each rank holds whole ones"
PART = "# every rank computes its part of the batch, and the gradients of all ranks are averaged"
SHARED = "# the ranks hold copies of the model, and average their gradients while backward goes on"
GATHERED = "# each rank holds its part of every weight; a block is gathered while it runs"
KEPT = "# each rank holds its part of every weight between steps, and gathers all for a step"
GROUPS = "# groups of {} ranks hold a copy of the model each, of which every rank has its part"


def source(setup: Setup) -> ScriptLines:
    """Return what a script does to the model, and how its ranks average gradients.

    Raises:
        UnsupportedError: the strategy, or a setting beside it, is not written into scripts.
    """
    config = setup.config
    if config.sharding is Sharding.NONE:
        return ScriptLines()

    check_written(config)
    if config.is_deepspeed:
        return deepspeed_lines(config, setup.workload)
    is_replicated = config.sharding in REPLICATED
    is_averaged_late = config.accumulation_steps > 1 and not config.sync_each_micro_batch
    own = ScriptLines(
        imports=("import torch.distributed as dist",),
        functions=(MEAN,),
        before=who(config),
        model=(AVERAGED,) if is_averaged_late else (),
        around=(NO_SYNC, f"average_after(index == {config.accumulation_steps - 1})")
        if is_averaged_late
        else (),
        after=("model = model.module",) if is_replicated else (),
    )
    divided = divided_lines(setup, mesh_made(config))
    return together([files_of(config), strategy_lines(config), own, divided])


def strategy_lines(config: StepConfig) -> ScriptLines:
    """Return the lines that copy or shard a model, whose layers may be divided already."""
    is_divided = is_tensor_parallel(config)
    if config.sharding in REPLICATED:
        return replicated_parts_lines() if is_divided else replicated_lines()
    if config.sharding in FULLY_SHARDED:
        return sharded_lines(config, 'ranks["shard"]' if is_divided else "")
    return ScriptLines()


def divides_batch(config: StepConfig) -> bool:
    """Return whether each rank computes a part of the batch, or each group of them."""
    return config.sharding not in (Sharding.NONE, Sharding.TENSOR)


def mesh_made(config: StepConfig) -> str:
    """Return the expression that makes the mesh of all ranks."""
    from memlab.techniques.sharding.fully_sharded import mesh_of  # late, as above

    shape, names = mesh_of(config)
    return f"init_device_mesh(device.type, {shape}, mesh_dim_names={names})".replace("'", '"')


def files_of(config: StepConfig) -> ScriptLines:
    """Return the functions of memlab that a script of several ranks calls."""
    if config.sharding in REPLICATED:
        more = [replicated.with_sharded_state] if config.sharding is Sharding.ZERO1 else []
        return inlined(replicated.replicate, replicated.in_micro_batch, *more)
    if config.sharding in FULLY_SHARDED:
        from memlab.techniques.sharding import fully_sharded  # late, as above

        return inlined(fully_sharded.shard_blocks, fully_sharded.in_micro_batch)
    return ScriptLines()


def check_written(config: StepConfig) -> None:
    """Raise UnsupportedError for a setting beside a strategy that no script has lines for."""
    said = f"sharding={str(config.sharding)!r}"
    is_filled_late = config.sharding in FULLY_SHARDED and not is_tensor_parallel(config)
    if is_filled_late and config.init_on_meta:
        raise UnsupportedError(
            f"a script for {said} with init_on_meta=True would need all of memlab that makes the "
            "values of one parameter after the other; use init_on_meta=False"
        )
    for field in BY_DEEPSPEED if config.is_deepspeed else ():
        if getattr(config, field):
            raise UnsupportedError(
                f"a script for {said} with {field}=True is not implemented: no card has run "
                f"DeepSpeed's offloading in memlab's tests; use {field}=False"
            )


def replicated_lines() -> ScriptLines:
    """Return the lines that copy the model to all ranks."""
    return ScriptLines(model=(SHARED, "model = replicate(model)"))


def sharded_lines(config: StepConfig, mesh: str = "") -> ScriptLines:
    """Return the lines that divide every parameter.

    Args:
        config: says how.
        mesh: an expression for the ranks, if a library has made it.
    """
    why = KEPT if config.sharding is Sharding.ZERO2 else GATHERED
    if config.sharding is Sharding.HYBRID:
        why = GROUPS.format(config.shard_group_size)
    frees = config.sharding is not Sharding.ZERO2
    narrow = AUTOCAST_DTYPE.get(config.precision)
    more = "" if narrow is None else f", narrow={narrow}"
    more += ", on_host=True" if config.offloads_shards else ""
    more += ", read_by_loss=head" if config.loss_chunks > 1 else ""
    return ScriptLines(
        imports=() if mesh else ("from torch.distributed.device_mesh import init_device_mesh",),
        model=(
            why,
            f"mesh = {mesh or mesh_made(config)}",
            f"shard_blocks(model, mesh, frees={frees}{more})",
        ),
    )


def deepspeed_lines(config: StepConfig, workload: Workload | None) -> ScriptLines:
    """Return the lines that give the model to DeepSpeed, which computes gradients and updates."""
    settings = [
        f"    {k!r}: {v!r},".replace("'", '"') for k, v in deepspeed_settings(config).items()
    ]
    loss = "loss * weight" if has_weight(config, workload) else "loss"
    last = f"model.set_gradient_accumulation_boundary(index == {config.accumulation_steps - 1})"
    return together([
        inlined(deepspeed_engine.started_engine),
        ScriptLines(
            imports=("import torch.distributed as dist",),
            functions=(MEAN,),
            before=who(config),
            optimizer=(
                "settings = {",
                *settings,
                "}",
                "# it is allocated whole, and need not be larger than the model",
                f"bucket_size = min(sum(p.numel() for p in parameters), {USUAL_BUCKET:_})",
                'settings["zero_optimization"]["reduce_bucket_size"] = bucket_size',
                "model = started_engine(model, optimizer, settings, device)",
            ),
            backward=(
                *[last] * (config.accumulation_steps > 1),
                "# the weights of micro-batches are in their losses already",
                f"model.backward({loss}, scale_wrt_gas=False)",
            ),
            update=("model.step()",),
            after=("model = model.module",),
        ),
    ])  # fmt: skip


def part_lines(config: StepConfig, workload: Workload | None) -> list[str]:
    """Return the lines of a script that define `micro_batch` of a rank, from the whole batch.

    If `has_weight`, they open a loop, whose body has to follow, and define `weight` too.
    """
    own_kind = workload is not None and is_own_kind(workload)
    has_terms = workload is not None and workload.num_loss_terms is not None
    size, steps = config.micro_batch_size, config.accumulation_steps
    own = "rank" if steps == 1 else f"{steps} * rank + index"
    if not has_weight(config, workload):
        part = f"moved(split_batch(batch, [{size}] * num_ranks)[rank], device)"
        return [PART, f"micro_batch = {part}"] if own_kind else [PART, *_moved_split(size, own)]

    count = f"{steps} * num_ranks"
    weight = f"{size} / {config.batch_size} * num_ranks"
    lines = [PART]
    if own_kind:
        lines += [f"parts = split_batch(batch, [{size}] * ({count}))", "del batch"]
    elif has_terms:
        lines += [
            "parts = [",
            f"    tree_map_only(torch.Tensor, lambda t: t.split({size})[index], batch)",
            f"    for index in range({count})",
            "]",
        ]
    if has_terms:
        weight = f"terms[{own}] / sum(terms) * num_ranks"
        lines += [*TERMS]

    moved = "moved({}, device)" if own_kind else MOVED
    body = [f"micro_batch = {moved.format(f'parts[{own}]')}"]
    if not (own_kind or has_terms):
        body = _moved_split(size, own)
    return [
        *lines,
        f"for index in range({steps}):",
        f"    weight = {weight}",
        *(f"    {line}" for line in body),
    ]


def has_weight(config: StepConfig, workload: Workload | None) -> bool:
    """Return whether the micro-batches of a rank have weights other than 1."""
    has_terms = workload is not None and workload.num_loss_terms is not None
    return config.accumulation_steps > 1 or has_terms


def _moved_split(size: int, own: str) -> list[str]:
    return [
        "micro_batch = tree_map_only(",
        f"    torch.Tensor, lambda t: t.split({size})[{own}].to(device), batch",
        ")",
    ]
