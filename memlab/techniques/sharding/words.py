"""What the panel says of ranks: the words of its controls, and who computes and holds what."""

from memlab.arguments.rank_settings import WITH_TENSOR_PARALLEL
from memlab.config import Sharding, StepConfig
from memlab.techniques.technique import Control, Setup, switch

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


def says(asked: Setup) -> str:
    """Say who computes what and keeps what between updates."""
    config = asked.config
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
