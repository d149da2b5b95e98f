"""What a visit records, in order of value: first a little of every model, then more of each."""

import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memlab import StepConfig
from memlab.cli.device_visit import Case
from memlab.search.ladder import RUNGS as LADDER
from memlab.store.records import Kind

NUM_AGAIN = 20
MONAI = ("densenet", "vnet")  # names of workloads begin so


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A workload, three batch sizes, and fields of configs that only it can have."""

    name: str
    sizes: tuple[int, int, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    extra: tuple[Mapping[str, Any], ...] = ()

    def cases(self, every: Iterable[Mapping[str, Any]], **facts: Any) -> list[Case]:
        """Return a run for each of these fields of a config."""
        return [
            Case(workload=self.name, options=self.options, config=StepConfig(**fields), **facts)
            for fields in every
        ]


CHUNKED, LAST = {"loss_chunks": 8}, {"channels_last": True}
LARGE = (
    Model(name="gpt2-medium", sizes=(2, 4, 8), extra=(CHUNKED,)),
    Model(name="resnet-50", sizes=(32, 64, 128), extra=(LAST,)),
    Model(name="vit-large", sizes=(16, 32, 64)),
    Model(name="llama-1b", sizes=(1, 2, 4), extra=(CHUNKED,)),
    Model(name="lstm-large", sizes=(16, 32, 64)),
    Model(name="densenet-121", sizes=(16, 32, 64), extra=(LAST,)),
    Model(name="vnet", sizes=(1, 2, 4)),
    # bound by the host: what Python takes between launches shows in these
    Model(name="gpt-small", sizes=(8, 32, 128), extra=(CHUNKED,)),
    Model(name="resnet-digits", sizes=(8, 32, 128), extra=(LAST,)),
)
SMALL = (
    Model(name="gpt-small", sizes=(3, 4, 8), options={"num_layers": 2, "sequence_length": 64}),
    Model(name="resnet-digits", sizes=(3, 4, 8)),
    Model(name="vit-digits", sizes=(5, 8, 16), options={"num_layers": 3}),
    Model(name="lstm-text", sizes=(3, 4, 8), options={"sequence_length": 48}),
)
MIXED = {"precision": "bf16-mixed"}
BUDGETS = tuple(round(0.1 * i, 1) for i in range(10))
# a loss in chunks lowers no peak of a model with a thousand classes
RUNGS = ({}, *(rung for rung in LADDER if "loss_chunks" not in rung))
ALLOCATOR = (
    "expandable_segments:True",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6",
)


def on_card() -> list[Case]:
    """Return what is recorded on a card: at least 200 eager configs where all models import."""
    models = [model for model in LARGE if is_here(model.name)]
    found = [case for model in models for case in _first(model)]
    found += _again(found) + [c for model in models for c in _operators(_first(model)[:4])]
    found += [case for model in models for case in _techniques(model)]
    found += _climb("vit-large", 64) + _curve("gpt2-medium", 8)
    found += [_grown("gpt2-medium", 2, "16GiB"), _grown("resnet-50", 16, "16GiB")]
    found += _verified(models[-2:])
    found += [case for model in models for case in _rest(model)]
    found += [
        Case(kind=Kind.ALLOCATOR, group="", workload="gpt2-medium", config=_mixed(4), setting=each)
        for each in ALLOCATOR
    ]
    return found + [case for model in models[:4] for case in _compiled(model)]


def small() -> list[Case]:
    """Return what is recorded on a CPU: minutes on two cores."""
    models = [model for model in SMALL if is_here(model.name)]
    runs = [case for model in models for case in _first(model)[:4] + _few(model)]
    found = [each for case in runs for each in (case, *_operators([case]))]
    found += [_grown("vit-digits", 4, "64MiB", num_layers=3), *_verified(models)]
    return found + _again(runs[::2])


def is_here(workload: str) -> bool:
    """Return whether what a workload needs is installed."""
    return not workload.startswith(MONAI) or importlib.util.find_spec("monai") is not None


def _first(model: Model) -> list[Case]:
    low, middle, high = model.sizes
    plain = [{"batch_size": size} for size in model.sizes]
    mixed = [each | MIXED for each in plain]
    others = [{"batch_size": middle, "precision": name} for name in ("tf32", "fp16-mixed", "bf16")]
    split = [{"batch_size": high, "accumulation_steps": 2}]
    odd = [{"batch_size": high - 1, "accumulation_steps": 3} | MIXED] if high > low + 1 else []
    return model.cases([plain[1], mixed[1], plain[2], mixed[2], *split, *odd, plain[0], *others])


def _techniques(model: Model) -> list[Case]:
    middle, high = ({"batch_size": size} | MIXED for size in model.sizes[1:])
    blocks = {"checkpointing": "blocks"}
    return model.cases(
        [
            high | blocks,
            middle | blocks | {"checkpoint_policy": "keep-matmuls"},
            high | blocks | {"checkpoint_modules": "every 2"},
            *(middle | {"memory_budget": budget} for budget in (0.5, 0.0, 0.75, 0.25)),
            {"batch_size": model.sizes[1], "memory_budget": 0.5},
            middle | {"offload_activations": True},
            middle | {"offload_activations": True, "offload_fraction": 0.5},
            middle | {"offload_parameters": True},
            middle | {"offload_optimizer": True},
            high | {"accumulation_steps": 4 if model.sizes[2] >= 4 else 2},
            *(middle | fields for fields in model.extra),
        ]
    )


def _rest(model: Model) -> list[Case]:
    middle = {"batch_size": model.sizes[1]} | MIXED
    names = ("sgd", "sgd-momentum", "adam", "adafactor", "adamw-8bit")
    return model.cases(
        [
            *(middle | {"optimizer": name} for name in names),
            middle | {"optimizer_implementation": "fused"},
            middle | {"optimizer_implementation": "single-tensor"},
            middle | {"optimizer_in_backward": True},
            middle | {"precision": "bf16-master"},
            middle | {"precision": "bf16-stochastic"},
            middle | {"expandable_segments": True},
            {"batch_size": model.sizes[1], "optimizer": "sgd"},
        ]
    )


def _few(model: Model) -> list[Case]:
    middle, high = ({"batch_size": size} for size in model.sizes[1:])
    return model.cases(
        [
            middle | {"checkpointing": "blocks"},
            middle | {"memory_budget": 0.5},
            middle | {"memory_budget": 0.0},
            middle | {"optimizer": "sgd"},
            middle | {"optimizer": "adafactor"},
            high | {"accumulation_steps": 3},
            middle | {"optimizer_in_backward": True},
            middle | {"precision": "bf16"},
        ]
    )


def _compiled(model: Model) -> list[Case]:
    middle = {"batch_size": model.sizes[1]} | MIXED
    half = {"budget_engine": "compile", "memory_budget": 0.5}
    return model.cases(
        [middle | {"compile": True}, middle | half, middle | half | {"memory_budget": 0.0}],
        group="compile",
    )


def _climb(name: str, batch_size: int) -> list[Case]:
    fields: dict[str, Any] = {"batch_size": batch_size}
    every = [dict(fields := fields | rung) for rung in RUNGS]
    return Model(name=name, sizes=(1, 1, 1)).cases(every, group="ladder")


def _curve(name: str, batch_size: int) -> list[Case]:
    plain = {"batch_size": batch_size} | MIXED
    by_hand = [plain | {"checkpointing": "blocks", "checkpoint_modules": f"every {k}"}
               for k in (1, 2, 4, 8)]  # fmt: skip
    budgets = [plain | {"memory_budget": budget} for budget in BUDGETS]
    return Model(name=name, sizes=(1, 1, 1)).cases([*budgets, *by_hand], group="recompute")


def _again(runs: list[Case]) -> list[Case]:
    return [dataclasses.replace(case, group="again") for case in runs[:NUM_AGAIN]]


def _operators(runs: list[Case]) -> list[Case]:
    return [dataclasses.replace(case, kind=Kind.OPERATORS, group="") for case in runs]


def _verified(models: Iterable[Model]) -> list[Case]:
    every: list[Mapping[str, Any]] = [MIXED, {"memory_budget": 0.3}, {"accumulation_steps": 2}]
    return [
        dataclasses.replace(case, kind=Kind.VERIFY, group="")
        for model in models
        for case in model.cases([{"batch_size": model.sizes[1], **fields} for fields in every])
    ]


def _grown(name: str, batch_size: int, limit: str, **options: Any) -> Case:
    facts: dict[str, Any] = {"kind": Kind.BOUNDARY, "group": "", "setting": limit}
    return Case(workload=name, options=options, config=_mixed(batch_size), **facts)


def _mixed(batch_size: int) -> StepConfig:
    return StepConfig(batch_size=batch_size, precision="bf16-mixed")
