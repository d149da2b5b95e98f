"""What the scripts for libraries share: which settings they know, the model, the micro-batches.

The library owns the loop: precision, accumulation, clipping and devices. The model, with what is
recomputed and compiled, and the optimizer come from the same techniques as everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import torch

from memlab.config import Optimizer, Precision, Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.exporting import library_ranks
from memlab.plan import Plan
from memlab.script import TREE_MAP
from memlab.techniques import batches, every
from memlab.techniques.optimizers import optimizers
from memlab.techniques.recompute import checkpointing
from memlab.techniques.source import ScriptLines, together
from memlab.techniques.technique import Setup
from memlab.workload import Workload

KNOWN: Mapping[str, tuple[Any, ...] | None] = {
    "batch_size": None,
    "accumulation_steps": None,
    "precision": (Precision.AS_BUILT, Precision.FP32, Precision.BF16_MIXED),
    "memory_budget": None,
    "compile": None,
    "compile_mode": None,
    "optimizer": (Optimizer.SGD, Optimizer.ADAM, Optimizer.ADAMW),
    "optimizer_implementation": None,
    "max_grad_norm": None,
    "checkpointing": None,
    "checkpoint_modules": None,
    "checkpoint_policy": None,
    "model_cache": None,
    "attention": None,
    "sharding": None,
    "world_size": None,
    "shard_group_size": None,
    "sync_each_micro_batch": None,
}
"""The fields that a script for a library can express, and their values; None for all of them."""

MODEL = '''
def make_model():
    """Return the model as it is trained; the library moves it."""
    model = build_model()
    {lines}
    return model
'''.strip()

MICRO_BATCHES = '''
def make_micro_batches():
    """Return the micro-batches of one batch, as memlab measures it; put your own loader here."""
    set_seed(SEED)
    batch = make_batch(BATCH_SIZE)
    {lines}
'''.strip()

SPLIT = (
    "size = BATCH_SIZE // ACCUMULATION_STEPS",
    "sizes = [size] * ACCUMULATION_STEPS",
    "return [",
    "    tree_map_only(torch.Tensor, lambda t: t.split(sizes)[index], batch)",
    "    for index in range(ACCUMULATION_STEPS)",
    "]",
)
WHOLE = ("return [batch]",)
OWN_SPLIT = (
    "size = BATCH_SIZE // ACCUMULATION_STEPS",
    "return list(split_batch(batch, [size] * ACCUMULATION_STEPS))",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryParts:
    """What a script for a library contains besides the library's own lines.

    Attributes:
        imports: one a line.
        functions: among them `make_model` and `make_micro_batches`.
        optimizer: the lines that define `optimizer`, from `parameters`.
        calls: the functions of the workload that they call.
    """

    imports: tuple[str, ...]
    functions: tuple[str, ...]
    optimizer: tuple[str, ...]
    calls: tuple[str, ...]


def check(workload: Workload, config: StepConfig, device: torch.device, flavor: StrEnum) -> None:
    """Raise UnsupportedError for a setting that a script for a library cannot express."""
    every.check(config, device)
    # first what no flavor writes, since the others are sent to flavor='pytorch'
    library_ranks.check_ranks(config, device, flavor)
    plain = f"use flavor='pytorch', which knows every setting, or {{}} with flavor={str(flavor)!r}"
    if workload.make_optimizer is not None:
        raise UnsupportedError(
            f"make_optimizer of a workload is not expressed by flavor={str(flavor)!r}; "
            "use flavor='pytorch', which knows it, or leave it out"
        )
    for field in fields(config):
        value, known = getattr(config, field.name), KNOWN.get(field.name, (field.default,))
        if known is not None and value not in known:
            written = config.to_dict()[field.name]
            default = str(known[0]) if isinstance(known[0], StrEnum) else known[0]
            raise UnsupportedError(
                f"{field.name}={written!r} is not expressed by flavor={str(flavor)!r}; "
                + plain.format(f"{field.name}={default!r}")
            )
    if config.batch_size % config.accumulation_steps:
        raise UnsupportedError(
            f"accumulation_steps={config.accumulation_steps} does not divide "
            f"batch_size={config.batch_size}, and flavor={str(flavor)!r} gives every micro-batch "
            f"the same weight; " + plain.format("a number that divides it")
        )
    for name in ("accumulation_steps", "world_size"):
        if getattr(config, name) > 1 and workload.num_loss_terms is not None:
            raise UnsupportedError(
                f"{name}={getattr(config, name)} with a workload that has "
                f"num_loss_terms is not expressed by flavor={str(flavor)!r}, which gives every "
                f"micro-batch the same weight; " + plain.format(f"{name}=1")
            )


def library_parts(
    workload: Workload, config: StepConfig, device: torch.device, plan: Plan | None
) -> LibraryParts:
    """Return the parts of a script that are the same for every library."""
    checkpointing.check_plan(config, plan)
    is_mixed = config.precision is Precision.BF16_MIXED
    own = replace(
        config,
        accumulation_steps=1,
        max_grad_norm=None,
        precision=Precision.FP32 if is_mixed else config.precision,
        sharding=Sharding.NONE,
        world_size=1,
        shard_group_size=None,
        sync_each_micro_batch=True,
    )
    is_sharded = config.sharding is not Sharding.NONE
    source = every.source(Setup(config=own, device=device, plan=plan, workload=workload))
    own_kind = batches.is_own_kind(workload)
    model = [*source.before, *source.built, "model.train()", *source.model]
    divided = OWN_SPLIT if own_kind else SPLIT
    if is_sharded:
        parts = library_ranks.OWN_PARTS if own_kind else library_ranks.PARTS
        divided = (*library_ranks.SPLIT, *parts)
    is_whole = config.accumulation_steps == 1 and not is_sharded
    split = [*source.batch, *(WHOLE if is_whole else divided)]
    own_files = together([
        batches.source() if own_kind else ScriptLines(),
        library_ranks.rank_lines(config) if is_sharded else ScriptLines(),
    ])  # fmt: skip
    return LibraryParts(
        imports=("import torch", TREE_MAP, *own_files.imports, *source.imports),
        functions=(
            *dict.fromkeys((*own_files.functions, *source.functions)),
            MODEL.format(lines="\n    ".join(model)),
            MICRO_BATCHES.format(lines="\n    ".join(split)),
        ),
        optimizer=_optimizer(own, config, device) or source.optimizer,
        calls=("build_model", "make_batch", "compute_loss", *["split_batch"] * own_kind),
    )


def _optimizer(own: StepConfig, config: StepConfig, device: torch.device) -> tuple[str, ...]:
    """Return the lines of an optimizer whose state is divided over the ranks; () for others."""
    if config.sharding is not Sharding.ZERO1:
        return ()
    divided = replace(own, sharding=config.sharding, world_size=config.world_size)
    return optimizers.source(Setup(config=divided, device=device)).optimizer
