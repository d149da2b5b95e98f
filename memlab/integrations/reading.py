"""`SourceReading`: collects what becomes of each field while a source is read.

A field that no rule names is reported as not imported, so none can be lost without a word. Which
fields of a library need no code is a table, `fields.json`: those that do not concern the step,
those that memlab has nothing for, with the values that mean nothing, and its names of optimizers.
"""

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memlab._util.checks import count
from memlab._util.tables import columns_table, facts_table
from memlab._util.units import is_a, printable, shown
from memlab.config import Optimizer, StepConfig
from memlab.errors import WorkloadError
from memlab.techniques.optimizers import optimizers
from memlab.workload import Workload

# `ImportedTraining`: what became of a configured trainer or of a config file.


class FieldStatus(StrEnum):
    """What became of a field of the source."""

    IMPORTED = "imported"
    NOT_CONCERNED = "not concerned"
    NOT_IMPORTED = "not imported"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceField:
    """One field of a trainer or of a config file.

    Attributes:
        name: as the source names it; parts of a nested config are joined by dots.
        value: as the source has it. Tokens are hidden.
        status: see `FieldStatus`.
        became: what memlab has for it, such as "batch_size=32"; for a field that is not imported,
            what the config has in its place. Empty if there is nothing.
        why: a sentence; empty where `became` says everything.
    """

    name: str
    value: Any
    status: FieldStatus
    became: str = ""
    why: str = ""

    def __str__(self) -> str:
        """Return the field, what became of it, and why, in one line."""
        became = f" -> {self.became}" if self.became else ""
        why = f": {self.why}" if self.why else ""
        return f"{self.name}={shown(self.value)}, {self.status}{became}{why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedTraining:
    """A training step as a trainer or a config file describes it.

    Attributes:
        source: what was read, in words.
        config: the step that the source describes, as far as memlab can express it.
        workload: model, batch and loss; None if the source has no model or no data, or computes
            its loss in code that memlab cannot take. A field that is not imported says which.
        fields: every field of the source, in its order.
    """

    source: str
    config: StepConfig
    workload: Workload | None
    fields: tuple[SourceField, ...]

    @property
    def not_imported(self) -> tuple[SourceField, ...]:
        """The fields that the config and the workload do not express, each with the reason."""
        return tuple(each for each in self.fields if each.status is FieldStatus.NOT_IMPORTED)

    def __str__(self) -> str:
        """Return the config, how many fields were imported, and which were not."""
        counts = Counter(each.status for each in self.fields)
        names = ", ".join(each.name for each in self.not_imported)
        without = "" if self.workload else ", without a workload"
        return (
            f"{self.source}: {self.config}{without}; {counts[FieldStatus.IMPORTED]} fields "
            f"imported, {counts[FieldStatus.NOT_CONCERNED]} do not concern the step, "
            f"{counts[FieldStatus.NOT_IMPORTED]} not imported{f' ({names})' if names else ''}"
        )

    def _repr_html_(self) -> str:
        """Return tables of the config and of all fields for notebooks."""
        others = [each for each in self.fields if each.status is FieldStatus.NOT_CONCERNED]
        told = [each for each in self.fields if each.status is FieldStatus.IMPORTED]
        summary = facts_table(self.source, {
            "config": str(self.config),
            "workload": "none" if self.workload is None else self.workload.name,
            "not concerned": ", ".join(each.name for each in others),
        })  # fmt: skip
        rows = [
            (each.name, shown(each.value), str(each.status), each.became, each.why)
            for each in (*self.not_imported, *told)
        ]
        return summary + columns_table(("field", "value", "status", "memlab has", "why"), rows)


TABLES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("fields.json").read_text(encoding="utf-8")
)
UNKNOWN = "memlab does not know this field"
IT_IS_OFF = "it is off"
SHARDING = (
    "training on several devices is not imported: the config is the step of one process, which "
    "holds the whole model; pass world_size, the number of ranks, to import it"
)
NO_WORKLOAD = "there is no workload; another field that is not imported says why"
SECRET = ("token", "api_key", "password")


class SourceReading:
    """The fields of one source, and the settings of memlab that they have given so far.

    Attributes:
        values: the fields that the source has, by name.
        settings: fields of `StepConfig`.
        is_complete: False if the loss or the data cannot be taken, so that there is no workload.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.settings: dict[str, Any] = {}
        self.is_complete = True
        self._reported: dict[str, SourceField] = {}

    def add(self, name: str, value: Any) -> str:
        """Add a part of the source that is no field, such as a data set, and return its name."""
        self.values[name] = value
        return name

    def take(self, name: str, why: str = "", **settings: Any) -> None:
        """Report a field as imported into these settings."""
        self.settings |= settings
        self._report(name, FieldStatus.IMPORTED, _written(settings), why)

    def take_into(self, part: str, name: str, why: str = "") -> None:
        """Report a field as imported into a part of the workload, such as "make_batch"."""
        self._report(name, FieldStatus.IMPORTED, f"workload.{part}", why)

    def same(self, name: str, became: str) -> None:
        """Report a field whose value is what memlab has anyway."""
        self._report(name, FieldStatus.IMPORTED, became, "memlab has the same value")

    def leave(self, name: str, why: str, **instead: Any) -> None:
        """Report a field as not imported, and set what stands in its place."""
        self.settings |= instead
        self._report(name, FieldStatus.NOT_IMPORTED, _written(instead), why)

    def skip(self, name: str, why: str = IT_IS_OFF) -> None:
        """Report a field as one that does not concern the step."""
        self._report(name, FieldStatus.NOT_CONCERNED, "", why)

    def switch(self, name: str, is_on: object, **settings: Any) -> None:
        """Report a field as imported into these settings if it is on, and else as off."""
        if is_on:
            self.take(name, **settings)
        else:
            self.skip(name)

    def use_table(self, library: str) -> None:
        """Report the fields of a library that need no code, as `fields.json` says.

        A name that ends in a dot stands for a part of a nested config and all that is in it.
        """
        table = TABLES[library]
        for row in table["not concerned"]:
            for name in self._named(row["fields"]):
                self.skip(name, row["why"])
        for row in table["not imported"]:
            for field, off in row["fields"].items():
                for name in self._named([field]):
                    self.leave_unless(off, name, row["why"])

    def _named(self, fields: Iterable[str]) -> list[str]:
        """Return the names that the source has of these fields."""
        return [
            name
            for field in fields
            for name in self.values
            if name == field.rstrip(".") or (field.endswith(".") and name.startswith(field))
        ]

    def leave_unless(self, off: Iterable[Any], name: str, why: str) -> None:
        """Report a field as not imported unless it has one of the values that mean nothing."""
        if name in self.values:
            value = self.values[name]
            is_off = any(value is each or (type(value) is type(each) and value == each)
                         for each in off)  # fmt: skip
            if is_off:
                self.skip(name)
            else:
                self.leave(name, why)

    @property
    def left(self) -> list[str]:
        """The names of the fields that are reported as not imported so far."""
        found = self._reported.items()
        return [name for name, field in found if field.status is FieldStatus.NOT_IMPORTED]

    def whole_number(self, name: str, otherwise: int) -> int:
        """Return a field that must be a whole number of at least 1.

        Raises:
            ConfigError: it is another value; the message names the field of the source.
        """
        value = self.values.get(name)
        return otherwise if value is None else count(1)(name, value)

    def finish(self, source: str, workload: Workload | None = None) -> ImportedTraining:
        """Return the result. A field that nothing has reported is reported as unknown."""
        for name in self.values.keys() - self._reported.keys():
            self._report(name, FieldStatus.NOT_IMPORTED, "", UNKNOWN)
        return ImportedTraining(
            source=source,
            config=StepConfig(**self.settings),
            workload=workload if self.is_complete else None,
            fields=tuple(self._reported[name] for name in self.values),
        )

    def _report(self, name: str, status: FieldStatus, became: str, why: str) -> None:
        if name not in self.values:
            return
        value = self.values[name]
        if value is not None and name.endswith(SECRET):
            value = "(hidden)"
        self._reported[name] = SourceField(
            name=name, value=value, status=status, became=became, why=why
        )


def _written(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def flattened(config: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    """Return the leaves of a nested config by names that are joined by dots.

    >>> flattened({"fp16": {"enabled": True}, "steps": 2, "amp": {}})
    {'fp16.enabled': True, 'steps': 2, 'amp': {}}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


# Batches from the first samples of a data set, put together as the trainer's loader would.
#
# The samples are read once, while a trainer is imported, so that a batch is the same each
# time and a worker does not need the data set. A batch of more samples repeats them in
# order.

MOST_KEPT = 64  # samples, if one update has no more
TOKENS = "input_ids"
COUNTED = {"labels": -100, "completion_mask": 0, "assistant_masks": 0}
"""Columns that say which tokens count in the loss, with the value of those that do not."""
WHICH = "memlab_samples"  # in a batch of joined samples: the number of the first, and how many


@dataclass(frozen=True, slots=True)
class KeptSamples:
    """`make_batch` of a workload: n samples, collated.

    Some collators join samples into rows of their own. Examples are sequences that are laid end to
    end in one row, and pairs of which the first halves come before all second halves. Such a batch
    is divided by collating its samples again, so that it says which they are.

    Attributes:
        samples: the first of the data set.
        collate: the trainer's own.
        length: to which each sample is cut or repeated; None leaves them as they are.
        joins: whether the collator joins samples.
    """

    samples: list[Any]
    collate: Callable[[list[Any]], Any]
    length: int | None = None
    joins: bool = False

    def __call__(self, n: int) -> Any:
        """Return a batch of n samples; a mapping becomes a dict."""
        return self._of(0, n)

    def count(self, batch: Any) -> int:
        """Return the number of samples in a joined batch: `count_samples` of the workload."""
        number: int = batch[WHICH][1]
        return number

    def split(self, batch: Any, sizes: list[int]) -> list[Any]:
        """Return joined batches of these numbers of samples: `split_batch` of the workload."""
        firsts = itertools.accumulate(sizes, initial=batch[WHICH][0])
        return [self._of(first, size) for first, size in zip(firsts, sizes, strict=False)]

    def _of(self, first: int, n: int) -> Any:
        """Return a batch of the n samples from number `first` on."""
        chosen = [self.samples[i % len(self.samples)] for i in range(first, first + n)]
        if self.length is not None:
            chosen = [resized(each, self.length) for each in chosen]
        # some collators write into the samples
        batch = self.collate([copy.copy(each) for each in chosen])
        if not isinstance(batch, Mapping):
            return batch
        return {**batch, WHICH: (first, n)} if self.joins else dict(batch)

    def __repr__(self) -> str:
        """Return how many samples there are, not the samples."""
        return f"KeptSamples({len(self.samples)} samples)"


@dataclass(frozen=True, slots=True)
class KeptColumns:
    """A collator that first drops what the model does not take.

    Attributes:
        collate: the trainer's own.
        columns: the names that stay.
    """

    collate: Callable[[list[Any]], Any]
    columns: frozenset[str]

    def __call__(self, samples: list[Any]) -> Any:
        """Return the samples without the other columns, collated."""
        return self.collate([
            {name: value for name, value in each.items() if name in self.columns}
            if isinstance(each, Mapping)
            else each
            for each in samples
        ])  # fmt: skip


def length_of(sample: Any) -> int:
    """Return how many tokens a sample has; 0 if it has no column of tokens."""
    tokens: Any = sample.get(TOKENS) if isinstance(sample, Mapping) else None
    return len(tokens) if _is_column(tokens) else 0


def resized(sample: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a sample of this many tokens: its own, cut or repeated, in all columns of its length.

    If no token of the first ones counts in the loss, which then would be a mean over none, it is
    the last ones that stay.

    >>> resized({"input_ids": [1, 2, 3], "labels": [-100, 5, 6], "id": 7}, 4)
    {'input_ids': [1, 2, 3, 1], 'labels': [-100, 5, 6, -100], 'id': 7}
    >>> resized({"input_ids": [1, 2, 3], "labels": [-100, -100, 6]}, 2)
    {'input_ids': [2, 3], 'labels': [-100, 6]}
    """
    own = length_of(sample)
    columns = {k: v for k, v in sample.items() if _is_column(v) and len(v) == own}
    first = 0
    for name, ignored in COUNTED.items():
        if name in columns and all(int(each) == ignored for each in columns[name][:length]):
            first = max(0, own - length)
    made = {name: _taken(column, first, length) for name, column in columns.items()}
    return {**sample, **made, **({"length": length} if "length" in sample else {})}


def _is_column(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 1
    return isinstance(value, list | tuple)


def _taken(column: Any, first: int, length: int) -> Any:
    """Return so many values of a column, which is repeated if it has fewer."""
    own = len(column)
    if length <= own:
        return column[first : first + length]
    times = -(-length // own)
    if isinstance(column, torch.Tensor):
        return column.repeat(times)[:length]
    if isinstance(column, np.ndarray):
        return np.tile(column, times)[:length]
    return (column * times)[:length]


def first_samples(dataset: Any, batch_size: int) -> list[Any]:
    """Return the first samples of a data set: as many as an update needs, and at least 64.

    Raises:
        WorkloadError: it has none, or cannot be read; the message says what it raised.
    """
    most = max(batch_size, MOST_KEPT)
    try:
        is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if is_indexed:
            found = [dataset[i] for i in range(min(most, len(dataset)))]
        else:
            found = list(itertools.islice(iter(dataset), most))
    except Exception as error:  # a person's own data set may raise anything
        raise WorkloadError(
            f"the data set ({type(dataset).__name__}) cannot be read: {type(error).__name__}: "
            f"{printable(str(error))}; pass a trainer whose data can be read here"
        ) from error

    if not found:
        raise WorkloadError(
            f"the data set ({type(dataset).__name__}) has no samples; pass a trainer with at least "
            "one"
        )
    return found


# Of models that are copied.


def ignore(*_: Any, **__: Any) -> None:
    """Do nothing: what a model or a trainer logs is not wanted here."""


def num_trainable_of(model: torch.nn.Module) -> int:
    """Return how many parameters of a model require a gradient."""
    return sum(each.requires_grad for each in model.parameters())


def is_on_cpu(model: torch.nn.Module) -> bool:
    """Return whether a worker that sees no card can read a model."""
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


# How the precisions of trainers become those of memlab.
#
# Trainers autocast over whatever formats the weights have. memlab's mixed precisions cast
# the weights to fp32 first, so both are the same only for a model of fp32 weights.

FP32_FORMATS = ("float32", "float64")
FLOATS = ("float32", "float64", "bfloat16", "float16")
CHECK_FORMATS = "the same step if the model's weights are fp32"


def take_mixed(
    reading: SourceReading, name: str, precision: str, formats: Sequence[str], why: str = ""
) -> None:
    """Import a mixed precision, unless the weights of the model are in a narrower format.

    Args:
        reading: what the field belongs to.
        name: the field of the source.
        precision: that of memlab.
        formats: the formats of the model's parameters by torch's names; empty without a model.
        why: what else a reader must know.
    """
    narrow = [each for each in formats if each in FLOATS and each not in FP32_FORMATS]
    if narrow:
        reading.leave(
            name,
            f"the model has weights of {' and '.join(narrow)}, which precision={precision!r} would "
            "cast to fp32; the config keeps the formats of the model, without autocast",
            precision="as-built",
        )
        return

    said = [text for text in (why, "" if formats else CHECK_FORMATS) if text]
    reading.take(name, "; ".join(said), precision=precision)


def take_tf32(reading: SourceReading, name: str, formats: Sequence[str]) -> None:
    """Import TF32 for a step that multiplies in fp32."""
    if reading.settings.get("precision", "as-built") != "as-built":
        precision = reading.settings["precision"]
        reading.leave(
            name, f"a config has one precision, which is {precision!r}; few products are in fp32"
        )
    elif any(each != "float32" for each in formats):
        reading.leave(name, "the model has weights that are not fp32, which 'tf32' would cast")
    else:
        reading.take(name, "" if formats else CHECK_FORMATS, precision="tf32")


# How an optimizer that is already built becomes an optimizer of memlab, by its class.

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
WEIGHT_DECAY = {"adamw": 0.01, "adamw-8bit": 0.01}  # of PyTorch; 0 for the others
HYPERPARAMETER = (
    "memlab runs an optimizer with PyTorch's own defaults; memory, time and gradients of a step do "
    "not depend on it"
)
COPIES_TO_DECAY = ("sgd", "sgd-momentum", "adam")  # they add it to a copy of the gradients
COPIED = (
    "memlab runs this optimizer without weight decay, which adds it to a copy of the gradients: an "
    "update of the source may hold as much as all gradients more"
)
OF_TORCH = TABLES["torch"]


def settings_of(optimizer: Any) -> dict[str, str] | None:
    """Return the settings of memlab for an optimizer; None if memlab has none like it.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> settings_of(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9))
    {'optimizer': 'sgd-momentum', 'optimizer_implementation': 'default'}
    """
    kind = type(optimizer)
    defaults = getattr(optimizer, "defaults", {})
    if kind.__module__.partition(".")[0] not in OF_TORCH["packages"]:
        return None

    if kind.__name__ == "SGD":
        name = "sgd-momentum" if defaults.get("momentum") else "sgd"
    elif kind.__name__ in OF_TORCH["classes"]:
        name = OF_TORCH["classes"][kind.__name__]
    else:
        return None

    return {"optimizer": name, "optimizer_implementation": _implementation(defaults)}


def read_optimizer(reading: SourceReading, name: str, optimizer: Any, num_trainable: int) -> None:
    """Report an optimizer, and each of the values that it was made with.

    Args:
        reading: of the source.
        name: of the optimizer in it.
        optimizer: itself.
        num_trainable: how many parameters of its model require a gradient.
    """
    import torch

    reading.add(name, type(optimizer).__name__)
    found = settings_of(optimizer) if is_a(optimizer, torch.optim.Optimizer) else None
    if found is None:
        reading.leave(
            name,
            f"memlab has no optimizer like {type(optimizer).__name__}; the config has the default",
            optimizer="adamw",
        )
        return

    reading.take(name, **found)
    groups = optimizer.param_groups
    if (num_updated := sum(len(group["params"]) for group in groups)) != num_trainable:
        reading.leave(
            name,
            f"it updates {num_updated} parameters of {num_trainable}; memlab updates all, so set "
            "requires_grad=False for the others",
            **found,
        )
    if len(groups) > 1:
        reading.leave(reading.add(f"{name}.param_groups", len(groups)), HYPERPARAMETER)
    for option, value in optimizer.defaults.items():
        if option in ("foreach", "fused", "params"):
            continue
        part = reading.add(f"{name}.{option}", value)
        _read_option(reading, part, option, value, found["optimizer"])


def hyperparameter(reading: SourceReading, name: str, usual: Any) -> None:
    """Report a learning rate, a decay or the like, which memlab has at PyTorch's default."""
    if name not in reading.values:
        return
    value = reading.values[name]
    if isinstance(value, list):
        value = tuple(value)
    if value == usual:
        reading.same(name, f"optimizer={reading.settings.get('optimizer', 'adamw')}")
    else:
        reading.leave(name, f"{HYPERPARAMETER} (here {usual})")


def usual_value(option: str, optimizer: str) -> Any:
    """Return what memlab's optimizer has for a learning rate, a decay, betas or eps."""
    return {
        "lr": optimizers.KINDS[Optimizer(optimizer)].learning_rate,
        "weight_decay": WEIGHT_DECAY.get(optimizer, 0.0),
        "betas": ADAM_BETAS,
        "eps": ADAM_EPS,
        "dampening": 0,
    }.get(option)


def _read_option(
    reading: SourceReading, part: str, option: str, value: Any, optimizer: str
) -> None:
    if option == "decoupled_weight_decay" or (option == "momentum" and value in (0, 0.9)):
        reading.same(part, f"optimizer={optimizer}")
    elif option == "momentum":
        reading.leave(part, f"{HYPERPARAMETER} (here 0.9)")
    elif option == "weight_decay" and value and optimizer in COPIES_TO_DECAY:
        reading.leave(part, f"{COPIED} (here 0)")
    elif option in OF_TORCH["without effect on memory"]:
        hyperparameter(reading, part, usual_value(option, optimizer))
    else:
        off = [False if option in OF_TORCH["switches"] else None]
        reading.leave_unless(off, part, "memlab's optimizers have no such option")


def _implementation(defaults: dict[str, Any]) -> str:
    if defaults.get("fused"):
        return "fused"
    if defaults.get("foreach"):
        return "foreach"
    return "single-tensor" if defaults.get("foreach") is False else "default"


# Fields about several ranks: which sharding of memlab means the same, for each library.
#
# How many ranks there are is said by the launcher, not by a trainer's arguments. So
# sharding is imported only where `from_trainer` is given `world_size`. FSDP1 becomes FSDP2,
# which shards the same tensors. Left out: hybrid sharding, whose groups follow the
# machines, and DeepSpeed's offloading.

BLOCKS = "the blocks that memlab finds stand for FSDP's units"
OFFLOADED = "memlab reads no settings of DeepSpeed's offloading: set offload_optimizer yourself"
HYBRID = "the groups of hybrid sharding follow the machines: set sharding='hybrid' and its group"
OF_FILE = "memlab.from_trainer of the DeepSpeed file itself says what it holds"
OF_MODULE = (
    "configure_model of the module says how it is sharded: set the sharding of the config yourself"
)
KINDS = TABLES["torch"]["fsdp"]
"""By what FSDP is told: the strategy's name, accelerate's number of it, or FSDP2's switch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSharding:
    """The sharding that a source describes.

    Attributes:
        sharding: of memlab; None if none means the same.
        why: a sentence; required if there is none.
        names: the fields that say so, as far as the source has them.
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
        return of_fsdp(told, is_offloaded=is_offloaded, names=names, averages_late=False)
    why = OF_MODULE if kind == "ModelParallelStrategy" else f"memlab has no sharding like {kind}"
    return FoundSharding(sharding=None, why=why, names=names)


def of_fsdp(told: Any, *, is_offloaded: bool, **rest: Any) -> FoundSharding:
    """Return the sharding of what FSDP is told, as a key of `KINDS`."""
    kind = KINDS.get(str(told).lower())
    if kind == "ddp" and is_offloaded:
        return FoundSharding(sharding=None, why="memlab offloads no replicas", **rest)
    if kind is None:
        why = HYBRID if "hybrid" in str(told).lower() else f"memlab has nothing like {shown(told)}"
        return FoundSharding(sharding=None, why=why, **rest)
    return FoundSharding(sharding=kind, why=BLOCKS, is_offloaded=is_offloaded, **rest)


def of_stage(stage: Any, *, is_offloaded: bool, names: tuple[str, ...]) -> FoundSharding:
    """Return the sharding of a stage of DeepSpeed's ZeRO."""
    if is_offloaded:
        return FoundSharding(sharding=None, why=OFFLOADED, names=names)
    found = {"0": "ddp"} | {str(n): f"deepspeed-zero{n}" for n in (1, 2, 3)}
    sharding = found.get(str(stage))
    why = "" if sharding else f"memlab has no stage {shown(stage)} of ZeRO"
    is_late = str(stage) in ("0", "1")  # stages 2 and 3 divide gradients in each backward
    return FoundSharding(sharding=sharding, why=why, names=names, averages_late=is_late)
