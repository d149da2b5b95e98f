"""The strategies by which several ranks train one model, what each refuses, and how it is applied.

Left out: compiled steps that PyTorch plans, of divided layers and of DeepSpeed; fp8; and the pairs
that docs/sharded_combinations.md lists with their reasons.
"""

import contextlib
import functools
import gc
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memlab._util.torch_private.tensors import are_tensors_fake
from memlab.config import WITH_TENSOR_PARALLEL, Sharding, StepConfig
from memlab.techniques.compilation import asked_by, is_compiled, without
from memlab.techniques.sharding import deepspeed_engine
from memlab.techniques.sharding.deepspeed_engine import OF_TORCH, STAGES
from memlab.techniques.sharding.ranks import (
    FULLY_SHARDED,
    REPLICATED,
    Divided,
    Sharded,
    check_group,
    check_weights,
    is_tensor_parallel,
    part_of,
)
from memlab.techniques.sharding.sharding_source import source
from memlab.techniques.technique import (
    Control,
    Equivalence,
    Refusal,
    Setup,
    Technique,
    in_words,
    switch,
)

# What the panel says of ranks: the words of its controls, and who computes and holds what.

WITH_RANKS = tuple(sharding for sharding in Sharding if sharding is not Sharding.NONE)
OFFERED = {
    Sharding.NONE: "none: one device",
    Sharding.DDP: "ddp: each rank holds all",
    Sharding.ZERO1: "zero1: divide the optimizer state",
    Sharding.ZERO2: "zero2: and the gradients",
    Sharding.ZERO3: "zero3: and the parameters",
    Sharding.HYBRID: "hybrid: zero3 within groups",
    Sharding.TENSOR: "tensor: divide each layer",
}
GROUPS = (None, 2, 4, 8, 16, 32, 64)
TENSOR_PARALLEL = (1, 2, 4, 8, 16)


def says(setup: Setup) -> str:
    """Say who computes what and keeps what between updates."""
    config = setup.config
    if config.sharding is Sharding.NONE:
        return ""
    if config.world_size == 1:
        return "one rank computes all samples and keeps everything"
    return f"{_computes(config)}{_keeps(config)}"


def _computes(config: StepConfig) -> str:
    ranks = config.world_size
    together = ranks // config.data_parallel_size  # ranks that compute the same samples
    if together == ranks:
        return f"all {ranks} ranks compute the same {config.batch_size} samples"
    who = f"each of {ranks} ranks" if together == 1 else f"each {together} of {ranks} ranks"
    verb = "computes" if together == 1 else "compute"
    return f"{who} {verb} {config.rank_batch_size} of {config.batch_size} samples"


def _keeps(config: StepConfig) -> str:
    """Return what a rank keeps, as the end of a sentence; "" for what its name does not tell."""
    divided = config.world_size if config.shard_group_size is None else config.shard_group_size
    copies = config.world_size // divided
    return {
        Sharding.DDP: " and keeps the whole model",
        Sharding.ZERO1: f" and keeps the model, and 1/{config.data_parallel_size} of the states",
        Sharding.ZERO2: f" and keeps 1/{divided} of the model, which is gathered once a step",
        Sharding.ZERO3: f" and keeps 1/{divided} of the model; its blocks are gathered to run",
        Sharding.HYBRID: f" and keeps 1/{divided} of the model, of which there are {copies} copies",
    }.get(config.sharding, "")


CONTROLS = (
    Control(
        field="sharding",
        label="Sharding",
        named=lambda value: "one device" if value == Sharding.NONE else str(value),
        in_words=lambda value: OFFERED.get(value, str(value)),
    ),
    Control(
        field="world_size",
        label="World size",
        named=lambda value: "1 rank" if value == 1 else f"{value} ranks",
        only_with={"sharding": WITH_RANKS},
    ),
    Control(
        field="shard_group_size",
        label="Ranks in a group",
        named=lambda value: "no groups" if value is None else f"groups of {value}",
        offered=GROUPS,
        in_words=lambda value: "not chosen" if value is None else str(value),
        only_with={"sharding": Sharding.HYBRID},
    ),
    Control(
        field="tensor_parallel_size",
        label="Tensor parallel",
        named=lambda value: "no tensor parallelism" if value == 1 else f"tensor parallel {value}",
        offered=TENSOR_PARALLEL,
        in_words=lambda value: "off" if value == 1 else f"{value} ranks",
        only_with={"sharding": WITH_TENSOR_PARALLEL},
    ),
    switch(
        "sync_each_micro_batch",
        "average gradients after every micro-batch",
        on="averaged after every micro-batch",
        off="averaged once an update",
        only_with={"sharding": WITH_RANKS},
    ),
)


NOTHING_TO_WAIT_FOR = (
    "sync_each_micro_batch=False changes nothing with accumulation_steps=1: the gradients of the "
    "only micro-batch are averaged either way."
)
MOST_RANKS_ON_A_CPU = 8  # or one a processor: more of them only wait for one another


def divide(
    model: torch.nn.Module,
    config: StepConfig,
    device: torch.device,
    loss_of_few: Callable[[], torch.Tensor],
) -> Divided | None:
    """Divide the layers of a model in place over the ranks; None without tensor parallelism.

    Args:
        model: on its device, before anything else changes how its forward runs.
        config: how to train.
        device: of this rank.
        loss_of_few: runs the model's forward on a few samples and returns the loss.

    Raises:
        UnsupportedError: this process is not one of as many ranks as the config asks for, no layer
            of the model can be divided, or its weights cannot be sent.
    """
    if config.sharding is not Sharding.NONE:
        check_weights(model, config)
    if not is_tensor_parallel(config):
        return None

    check_group(config)
    # late, since these import much of torch.distributed
    from memlab.techniques.sharding import fully_sharded, tensor_parallel

    before = sum(p.nbytes for p in model.parameters())
    mesh = fully_sharded.make_mesh(config, device.type)
    row = fully_sharded.dimension(mesh, "tensor")
    found = tensor_parallel.apply(model, row, loss_of_few)
    notes = tensor_parallel.notes(found, before)
    return Divided(mesh=mesh, layers=tensor_parallel.layers_by_path(found), notes=notes)


def apply(
    model: torch.nn.Module, config: StepConfig, device: torch.device, divided: Divided | None
) -> Sharded | None:
    """Return the model as this rank runs it; None without sharding, and for DeepSpeed's engine.

    Args:
        model: on its device, with all other techniques applied; fully sharded in place.
        config: how to train.
        device: of this rank.
        divided: what `divide` returned for this model.

    Raises:
        UnsupportedError: this process is not one of as many ranks as the config asks for.
    """
    if config.sharding is Sharding.NONE or config.is_deepspeed:
        return None

    check_group(config)
    # late, since these import much of torch.distributed
    from memlab.techniques.sharding import fully_sharded, replicated, tensor_parallel

    run_model, group = model, None
    if config.sharding in REPLICATED and divided is not None:
        from memlab.techniques.sharding import divided_layers

        parts = divided_layers.LocalParts(model)
        group = fully_sharded.dimension(divided.mesh, "replicate").get_group()
        with parts.shown():
            run_model = replica = replicated.replicate(model, group)
        context = tensor_parallel.in_micro_batch(replicated.in_micro_batch(replica), parts)
    elif config.sharding in REPLICATED:
        run_model = replica = replicated.replicate(model)
        context = replicated.in_micro_batch(replica)
    elif config.sharding is Sharding.TENSOR:
        context = tensor_parallel.in_micro_batch(lambda is_synced: contextlib.nullcontext())
    else:
        mesh = fully_sharded.make_mesh(config, device.type) if divided is None else divided.mesh
        fully_sharded.shard(model, config, mesh)
        gc.collect()  # whole weights may be in cycles: those of bitsandbytes know their module
        context = fully_sharded.in_micro_batch(model)
        if not config.compile and not are_tensors_fake():  # hooks would divide the graph
            context = fully_sharded.checked_once(model, context, device)
        context = context if divided is None else tensor_parallel.in_micro_batch(context)

    return Sharded(
        run_model=run_model,
        part=part_of(config, dist.get_rank()),
        num_parts=config.data_parallel_size,
        in_micro_batch=context,
        layers={} if divided is None else divided.layers,
        notes=() if divided is None else divided.notes,
        group=group,
    )


def with_engine(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: StepConfig,
    device: torch.device,
) -> Sharded:
    """Return the model as DeepSpeed's engine runs it; the engine needs the optimizer.

    Args:
        model: as for `apply`; flattened in place.
        optimizer: of its trainable parameters; it gets flat ones.
        config: how to train.
        device: of this rank.

    Raises:
        UnsupportedError: this process is not one of as many ranks as the config asks for, or the
            parameters have a format that DeepSpeed is not told of.
    """
    check_group(config)
    from memlab.techniques.sharding.deepspeed_engine import Engine

    engine = Engine(model, optimizer, config, device)
    return Sharded(
        run_model=engine.run_model,
        part=part_of(config, dist.get_rank()),
        num_parts=config.data_parallel_size,
        in_micro_batch=lambda is_synced: contextlib.nullcontext(),  # the engine's backward knows
        engine=engine,
    )


def most_ranks(device: torch.device) -> int:
    """Return how many ranks can run on the devices of this kind in this machine."""
    if device.type == "cpu":
        return max(MOST_RANKS_ON_A_CPU, os.cpu_count() or 1)
    return torch.accelerator.device_count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Settings that do not go with some strategies: a row of `refusals.toml`, which says more.

    Attributes:
        ranks: the strategies, each by words that are all true of it; "*" for all.
        settings: by field a value, some of them, or "*" for all.
        unless: settings with which there is nothing to refuse.
        how: what they are together ("is not implemented"), if that is to be said.
        why: a clause without its full stop.
        use: remedies, the best first.
    """

    ranks: Sequence[str]
    settings: Mapping[str, Any]
    unless: Mapping[str, Any] = field(default_factory=dict)
    how: str = ""
    why: str
    use: Sequence[Mapping[str, Any]]


@functools.cache
def pairs() -> Mapping[str, tuple[Pair, ...]]:
    """Return the rows of `refusals.toml`: of every strategy, and of those of DeepSpeed."""
    tables = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text(encoding="utf-8"))
    return {name: tuple(Pair(**row) for row in rows) for name, rows in tables.items()}


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse settings that do not go with a strategy."""
    config = setup.config
    if config.sharding is Sharding.NONE:
        return

    said = f"sharding={str(config.sharding)!r}"
    if config.tensor_parallel_size > 1:
        said += f", tensor_parallel_size={config.tensor_parallel_size}"
    if is_compiled(config) and (why := _why_not_compiled(config)):
        yield Refusal(why=f"{said} with {asked_by(config)}{why}", remedies=(without(config),))
    yield from _refused(pairs()["every"], config, said)
    if not config.is_deepspeed:
        return
    if find_spec("deepspeed") is None:
        yield Refusal(
            why=f"{said} needs deepspeed, which is not installed",
            remedies=({"sharding": OF_TORCH[STAGES[config.sharding]]},),
            otherwise="pip install 'memlab[deepspeed]'",
        )
    yield from _refused(pairs()["deepspeed"], config, said)


def _refused(rows: Sequence[Pair], config: StepConfig, said: str) -> Iterator[Refusal]:
    """Yield a refusal for each row that applies; `said` names the strategy."""
    words = {"*", str(config.sharding)}
    words.add("divided" if is_tensor_parallel(config) else "undivided")
    if config.sharding in (*REPLICATED, *FULLY_SHARDED):
        words.add("replicated" if config.sharding in REPLICATED else "sharded")
    for pair in rows:
        if not any(words.issuperset(each.split()) for each in pair.ranks):
            continue
        if _has(config, pair.settings) and not (pair.unless and _has(config, pair.unless)):
            own = in_words({name: getattr(config, name) for name in pair.settings})
            how = f" {pair.how}" if pair.how else ""
            yield Refusal(why=f"{said} with {own}{how}: {pair.why}", remedies=tuple(pair.use))


def _has(config: StepConfig, settings: Mapping[str, Any]) -> bool:
    return all(
        value == "*" or getattr(config, name) in (value if isinstance(value, list) else [value])
        for name, value in settings.items()
    )


def _why_not_compiled(config: StepConfig) -> str:
    """Return why a strategy is not compiled whole, or not by PyTorch; "" if it is."""
    if config.is_deepspeed:
        return " is not implemented: DeepSpeed's engine compiles a model by a method of its own"
    if is_tensor_parallel(config):
        return ": torch.compile does not trace the DTensors between divided layers (torch 2.13)"
    if config.memory_budget < 1.0 and not config.is_planned:
        who = "DistributedDataParallel" if config.sharding in REPLICATED else "FSDP2"
        return f": the plan needs the model in one graph, which the hooks of {who} break"
    return ""


def notes(setup: Setup) -> list[str]:
    """Say what the ranks do that one process does not."""
    config = setup.config
    own = deepspeed_engine.notes(config) if config.is_deepspeed else []
    if config.sharding is Sharding.NONE:
        return own
    if config.accumulation_steps == 1:
        is_needless = not config.sync_each_micro_batch and not config.is_deepspeed
        return [NOTHING_TO_WAIT_FOR, *own] if is_needless else own
    if config.sync_each_micro_batch:
        return ["The ranks average their gradients after every micro-batch.", *own]
    return [
        "The ranks average their gradients once an update; until then each holds whole gradients.",
        *own,
    ]


SHARDING = Technique(
    fields=(
        "sharding",
        "world_size",
        "tensor_parallel_size",
        "shard_group_size",
        "sync_each_micro_batch",
    ),
    equivalence=Equivalence.NUMERICAL,
    refusals=refusals,
    source=source,
    notes=notes,
    controls=CONTROLS,
    says=says,
    may_be_faster=True,
    changes_plans=False,
)
