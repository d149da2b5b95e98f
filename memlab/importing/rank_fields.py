"""Fields about several ranks: which sharding of memlab means the same, for each library.

How many ranks there are is said by the launcher, not by a trainer's arguments. So sharding is
imported only where `from_trainer` is given `world_size`. FSDP1 becomes FSDP2, which shards the same
tensors. Left out: hybrid sharding, whose groups follow the machines, and DeepSpeed's offloading.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memlab.arguments.quoting import shown
from memlab.importing.reading import SourceReading

BLOCKS = "the blocks that memlab finds stand for FSDP's units"
OFFLOADED = "memlab reads no settings of DeepSpeed's offloading: set offload_optimizer yourself"
HYBRID = "the groups of hybrid sharding follow the machines: set sharding='hybrid' and its group"
OF_FILE = "memlab.from_trainer of the DeepSpeed file itself says what it holds"
OF_MODULE = (
    "configure_model of the module says how it is sharded: set the sharding of the config yourself"
)
KINDS = {
    "full_shard": "zero3", "true": "zero3", "1": "zero3",
    "shard_grad_op": "zero2", "false": "zero2", "2": "zero2",
    "no_shard": "ddp", "3": "ddp",
}  # fmt: skip
"""By what FSDP is told: the strategy's name, accelerate's number of it, or FSDP2's switch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSharding:
    """The sharding that a source describes.

    Attributes:
        sharding: of memlab; None if none means the same.
        why: a sentence; required if there is none.
        names: the fields that say so.
        averages_late: whether gradients of micro-batches are averaged once an update.
        is_offloaded: whether parts of parameters, gradients and states are in host memory.
    """

    sharding: str | None
    why: str = ""
    names: tuple[str, ...] = ()
    averages_late: bool = True
    is_offloaded: bool = False


def take_ranks(reading: SourceReading, world_size: int | None, found: FoundSharding) -> None:
    """Import the sharding of a source, once its batch and accumulation have been read.

    Args:
        reading: of the source; its batch is that of one process.
        world_size: number of ranks; None imports the step of one process.
        found: what the source describes.
    """
    if world_size is None:
        return
    reading.add("world_size", world_size)
    if found.sharding is None:
        for name in (*found.names, "world_size"):
            reading.leave(name, found.why)
        return

    settings: dict[str, Any] = {"sharding": found.sharding, "world_size": world_size}
    if found.is_offloaded:
        settings |= {"offload_parameters": True, "offload_optimizer": True}
    for name in found.names:
        reading.take(name, found.why, **settings)
    steps = reading.settings.get("accumulation_steps", 1)
    if steps > 1 and found.averages_late:
        settings["sync_each_micro_batch"] = False
    batch = -(-reading.settings.get("batch_size", 8) // steps) * steps * world_size
    reading.take("world_size", "batch_size counts all ranks", batch_size=batch, **settings)


def of_arguments(values: Mapping[str, Any]) -> FoundSharding:
    """Return the sharding of transformers' TrainingArguments."""
    if values.get("deepspeed"):
        return FoundSharding(sharding=None, why=OF_FILE, names=("deepspeed",))
    if not values.get("fsdp"):
        return FoundSharding(sharding="ddp", why="the Trainer replicates its model")

    given = values.get("fsdp_config")
    options = _without_prefix(given if isinstance(given, Mapping) else {})
    words = _words(values["fsdp"])
    named = next((word for word in words if word in KINDS or "hybrid" in word), True)
    kind = options.get("reshard_after_forward", named)
    is_offloaded = "offload" in words or options.get("cpu_offload") in (True, "true")
    names = ("fsdp", *["fsdp_config"] * (given is not None))
    return _of_fsdp(kind, is_offloaded=is_offloaded, names=names)


def _words(fsdp: Any) -> list[str]:
    """Return the options of the field `fsdp`: True, words in a text, or a list of them."""
    if isinstance(fsdp, str):
        return fsdp.split()
    return [] if fsdp is True else [str(getattr(each, "value", each)) for each in fsdp]


def of_accelerate(values: Mapping[str, Any], world_size: int) -> FoundSharding:
    """Return the sharding of accelerate's config file, by its flattened names."""
    names = tuple(name for name in ("distributed_type", "num_processes") if name in values)
    count, kind = values.get("num_processes"), str(values.get("distributed_type", "NO")).upper()
    if count is not None and int(count) != world_size:
        why = f"the file is for {count} processes, and world_size={world_size}"
        return FoundSharding(sharding=None, why=why, names=names)
    if kind in ("MULTI_GPU", "MULTI_CPU"):
        return FoundSharding(sharding="ddp", why="accelerate replicates the model", names=names)
    if kind == "DEEPSPEED":
        part = "deepspeed_config."
        own = {n.removeprefix(part): v for n, v in values.items() if n.startswith(part)}
        if "deepspeed_config_file" in own:
            return FoundSharding(sharding=None, why=OF_FILE, names=names)
        devices = (own.get("offload_optimizer_device"), own.get("offload_param_device"))
        stage = own.get("zero_stage", 0)
        used = (*names, *[f"{part}zero_stage"] * ("zero_stage" in own))
        return _of_stage(stage, is_offloaded=any(map(_is_on, devices)), names=used)
    if kind != "FSDP":
        why = f"memlab has no sharding like distributed_type={shown(kind)}"
        return FoundSharding(sharding=None, why=why, names=names)

    part = "fsdp_config.fsdp_"
    own = {name.removeprefix(part): value for name, value in values.items() if part in name}
    switches = [n for n in ("reshard_after_forward", "sharding_strategy") if n in own]
    others = ("version", "offload_params")
    told = own[switches[0]] if switches else True
    told_by = [f"{part}{name}" for name in (*switches, *others) if name in own]
    is_offloaded = own.get("offload_params") is True
    return _of_fsdp(told, is_offloaded=is_offloaded, names=(*names, *told_by))


def of_deepspeed(values: Mapping[str, Any]) -> FoundSharding:
    """Return the sharding of DeepSpeed's config, by its flattened names."""
    part = "zero_optimization."
    devices = (
        values.get(f"{part}{name}.device") for name in ("offload_optimizer", "offload_param")
    )
    names = tuple(name for name in (f"{part}stage",) if name in values)
    stage = values.get(f"{part}stage", 0)
    return _of_stage(stage, is_offloaded=any(map(_is_on, devices)), names=names)


def of_lightning(trainer: Any, world_size: int) -> FoundSharding:
    """Return the sharding of a Lightning Trainer."""
    strategy, names = trainer.strategy, ("strategy", "devices", "num_nodes")
    count = trainer.num_devices * trainer.num_nodes
    if count != world_size:
        why = f"the Trainer is for {count} ranks, and world_size={world_size}"
        return FoundSharding(sharding=None, why=why, names=names)
    kind = type(strategy).__name__
    if kind == "DDPStrategy":
        return FoundSharding(sharding="ddp", names=names)
    if kind == "FSDPStrategy":
        told = getattr(strategy.sharding_strategy, "name", strategy.sharding_strategy)
        is_offloaded = bool(getattr(strategy.cpu_offload, "offload_params", False))
        return _of_fsdp(told, is_offloaded=is_offloaded, names=names, averages_late=False)
    why = OF_MODULE if kind == "ModelParallelStrategy" else f"memlab has no sharding like {kind}"
    return FoundSharding(sharding=None, why=why, names=names)


def _of_fsdp(told: Any, *, is_offloaded: bool, **rest: Any) -> FoundSharding:
    kind = KINDS.get(str(told).lower())
    if kind == "ddp" and is_offloaded:
        return FoundSharding(sharding=None, why="memlab offloads no replicas", **rest)
    if kind is None:
        why = HYBRID if "hybrid" in str(told).lower() else f"memlab has nothing like {shown(told)}"
        return FoundSharding(sharding=None, why=why, **rest)
    return FoundSharding(sharding=kind, why=BLOCKS, is_offloaded=is_offloaded, **rest)


def _of_stage(stage: Any, *, is_offloaded: bool, names: tuple[str, ...]) -> FoundSharding:
    if is_offloaded:
        return FoundSharding(sharding=None, why=OFFLOADED, names=names)
    found = {"0": "ddp"} | {str(n): f"deepspeed-zero{n}" for n in (1, 2, 3)}
    sharding = found.get(str(stage))
    why = "" if sharding else f"memlab has no stage {shown(stage)} of ZeRO"
    is_late = str(stage) in ("0", "1")  # stages 2 and 3 divide gradients in each backward
    return FoundSharding(sharding=sharding, why=why, names=names, averages_late=is_late)


def _is_on(device: Any) -> bool:
    return device not in (None, "none")


def _without_prefix(options: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name).removeprefix("fsdp_"): value for name, value in options.items()}
