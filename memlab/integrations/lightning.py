"""Lightning's `Trainer`: what it has kept of its arguments, and the parts of a LightningModule.

A Trainer holds no batch size; it is that of the module's own `train_dataloader`, or of the loader
that is passed beside it.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab._util.units import printable, shown
from memlab.errors import ConfigError, WorkloadError
from memlab.integrations.reading import (
    NO_WORKLOAD,
    SHARDING,
    TABLES,
    ImportedTraining,
    KeptSamples,
    SourceReading,
    first_samples,
    ignore,
    is_on_cpu,
    num_trainable_of,
    of_lightning,
    read_optimizer,
    take_mixed,
    take_ranks,
)
from memlab.techniques.precision import number_formats
from memlab.workload import Workload

# A LightningModule as a workload: its `training_step` is the loss, a copy of it the model.

TABLE = TABLES["lightning"]
LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric")
DEFAULT_BATCH = 8


class LossOfModule(torch.nn.Module):
    """Runs the `training_step` of a LightningModule as its forward, so that it can be compiled.

    Attributes:
        module: the copy that is trained.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        parameters = inspect.signature(module.training_step).parameters
        self.takes_index = "batch_idx" in parameters or len(parameters) > 1

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        step: Any = self.module.training_step
        found = step(batch, 0) if self.takes_index else step(batch)
        loss: torch.Tensor = found["loss"] if isinstance(found, Mapping) else found
        return loss


@dataclass(frozen=True, slots=True)
class CopiedLightningModule:
    """`build_model` of a workload: a copy of a LightningModule that logs nothing.

    Attributes:
        module: as it was given; never changed.
    """

    module: Any

    def __call__(self) -> LossOfModule:
        """Return a new copy on the CPU, without gradients and without a Trainer."""
        return LossOfModule(copied(self.module))

    def __repr__(self) -> str:
        """Return the class of the module, which may print itself over pages."""
        return f"CopiedLightningModule({type(self.module).__name__})"


def copied(module: Any) -> Any:
    """Return a copy of a LightningModule on the CPU, without a Trainer and without logging."""
    # a memo that knows the Trainer already makes the copy refer to None in its place
    trainer = getattr(module, "_trainer", None)
    memo = {} if trainer is None else {id(trainer): None}
    made = copy.deepcopy(module, memo).to("cpu")
    made.zero_grad(set_to_none=True)
    made.log = made.log_dict = ignore
    if _is_overridden(module, "configure_model"):
        made.configure_model()
    return made


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch: `compute_loss` of a workload whose model returns it."""
    loss: torch.Tensor = model(batch)
    return loss


def read_module(reading: SourceReading, module: Any, dataloader: Any) -> Workload | None:
    """Report a LightningModule and its loader, and return the workload that they make."""
    if module is None:
        reading.add("module", None)
        reading.leave("module", "there is no model: pass from_trainer(trainer, module)")
        _read_batch_size(reading, dataloader)
        return None

    reading.add("module", type(module).__name__)
    _read_hooks(reading, module)
    _read_optimizers(reading, module)
    loader = dataloader if dataloader is not None else _own_loader(reading, module)
    batch_size = _read_batch_size(reading, loader)
    if batch_size is None or not reading.is_complete:
        reading.leave("module", NO_WORKLOAD)
        return None
    reading.take_into("build_model", "module", "copied for each run, never changed")

    samples = first_samples(loader.dataset, batch_size)
    reading.take_into(
        "make_batch",
        "dataloader",
        f"the first {len(samples)} samples of its data set, in their order, as often as a batch "
        "needs them",
    )
    return Workload(
        name=type(module).__name__,
        build_model=CopiedLightningModule(module if is_on_cpu(module) else copied(module)),
        make_batch=KeptSamples(samples, loader.collate_fn),
        compute_loss=loss_of,
    )


def _is_overridden(module: Any, name: str) -> bool:
    owner = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in (*LIBRARIES, "torch")


def _read_hooks(reading: SourceReading, module: Any) -> None:
    """Report what a module does in a step apart from its training_step."""
    reading.add("module.training_step", f"{type(module).__name__}.training_step")
    if module.automatic_optimization and _is_overridden(module, "training_step"):
        reading.take_into("compute_loss", "module.training_step", "what it logs is left out")
    else:
        reading.is_complete = False
        reading.leave(
            "module.training_step",
            "the module optimizes by itself (automatic_optimization=False) or has no "
            "training_step, so there is no workload; write a memlab.Workload with its loss",
        )
    for name in TABLE["hooks"]:
        if not _is_overridden(module, name):
            continue
        part = f"module.{name}"
        reading.add(part, f"{type(module).__name__}.{name}")
        if name in TABLE["harmless hooks"]:
            reading.skip(part, "it does not run within a step")
        else:
            reading.leave(part, "memlab does not call hooks; what this one does is missing")


def _read_optimizers(reading: SourceReading, module: Any) -> None:
    """Report the optimizer that a copy of the module configures."""
    name = "module.configure_optimizers"
    try:
        own = copied(module)
        found = own.configure_optimizers()
    except Exception as error:  # a person's own method may raise anything without its Trainer
        reading.add(name, f"{type(error).__name__}: {printable(str(error))}")
        reading.leave(name, "it raised this without a Trainer; the config has the default",
                      optimizer="adamw")  # fmt: skip
        return

    optimizers, has_schedule = _optimizers_of(found)
    if len(optimizers) == 1:
        read_optimizer(reading, "module.optimizer", optimizers[0], num_trainable_of(own))
    else:
        reading.add(name, ", ".join(type(each).__name__ for each in optimizers) or "none")
        reading.leave(
            name,
            f"memlab has one optimizer for all parameters, not {len(optimizers)}; the config has "
            "the default",
            optimizer="adamw",
        )
    if has_schedule:
        reading.add("module.lr_scheduler", "configured")
        reading.leave(
            "module.lr_scheduler",
            "memlab has no schedules of this kind; memory and time of a step do not depend on it",
        )


def _optimizers_of(found: Any) -> tuple[list[Any], bool]:
    """Return what `configure_optimizers` has returned, and whether it has a schedule."""
    if isinstance(found, Mapping):
        return [found["optimizer"]], "lr_scheduler" in found
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
        return found[0], bool(found[1])
    if isinstance(found, list | tuple):
        parts = [_optimizers_of(each) for each in found]
        return [each for part, _ in parts for each in part], any(flag for _, flag in parts)
    return ([] if found is None else [found]), False


def _own_loader(reading: SourceReading, module: Any) -> Any:
    if not _is_overridden(module, "train_dataloader"):
        return None
    try:
        return copied(module).train_dataloader()
    except Exception as error:  # a person's own method may raise anything without its Trainer
        raise WorkloadError(
            f"train_dataloader of {type(module).__name__} raised {type(error).__name__}: "
            f"{printable(str(error))}; pass dataloader=... to from_trainer"
        ) from error


def _read_batch_size(reading: SourceReading, loader: Any) -> int | None:
    """Report the loader; return the samples of an update, or None if it does not say."""
    steps = reading.whole_number("accumulate_grad_batches", 1)
    reading.take("accumulate_grad_batches", accumulation_steps=steps)
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    reading.add("dataloader", None if loader is None else type(loader).__name__)
    if isinstance(loader, torch.utils.data.DataLoader) and size:
        reading.add("dataloader.batch_size", size)
        reading.take(
            "dataloader.batch_size", f"{size} x {steps} in one update of one process",
            batch_size=size * steps,
        )  # fmt: skip
        reading.skip("dataloader", "the module has the samples")
        return int(size) * steps

    total = max(DEFAULT_BATCH, steps)
    why = (
        "a Trainer holds no data: pass from_trainer(trainer, module, dataloader=...)"
        if loader is None
        else "it does not say how many samples a batch has, or is no torch DataLoader"
    )
    reading.leave("dataloader", f"{why}; the batch size is memlab's default", batch_size=total)
    return None


NOT_KEPT = "(not kept by the Trainer)"
OWN_STATISTICS = "the Trainer does not keep it; in memlab BatchNorm sees the samples of one rank"


def read_lightning(
    trainer: Any, module: Any, dataloader: Any, library: str, world_size: int | None = None
) -> ImportedTraining:
    """Return the step of a Lightning Trainer, with a workload if there are a module and data.

    Raises:
        ConfigError: the Trainer has been run.
        WorkloadError: the module is no LightningModule, or its data cannot be read.
    """
    if getattr(trainer, "global_step", 0):
        raise ConfigError(
            f"source={shown(trainer)} has been run; pass a Trainer that has been built and not run"
        )
    if module is not None and not _is_lightning_module(module):
        raise WorkloadError(
            f"module={shown(type(module).__name__)} is not a LightningModule; pass the module that "
            "trainer.fit would be given"
        )

    reading = SourceReading(_arguments(trainer))
    reading.use_table("lightning")
    formats = () if module is None else number_formats(module)
    _read_precision(reading, trainer, formats)
    _read_clipping(reading)
    _read_devices(reading, trainer)
    _read_callbacks(reading, trainer)
    _read_switches(reading, trainer)

    workload = read_module(reading, module, dataloader)
    if world_size is not None:
        take_ranks(reading, world_size, of_lightning(trainer, world_size))
    return reading.finish(f"Trainer of {library}", workload)


def _is_lightning_module(module: Any) -> bool:
    return isinstance(module, torch.nn.Module) and any(
        kind.__name__ == "LightningModule" for kind in type(module).__mro__
    )


def _arguments(trainer: Any) -> dict[str, Any]:
    """Return every argument that a Trainer can be given, with the value that it has kept."""
    names = [name for name in inspect.signature(type(trainer).__init__).parameters
             if name not in ("self", "args", "kwargs")]  # fmt: skip
    found = {}
    for name in names:
        value = getattr(trainer, name, NOT_KEPT)
        plain = value is None or isinstance(value, bool | int | float | str)
        found[name] = value if plain else _in_words(value)
    found["devices"] = getattr(trainer, "num_devices", NOT_KEPT)
    found["detect_anomaly"] = getattr(trainer, "_detect_anomaly", NOT_KEPT)
    return found


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(type(each).__name__ for each in value) or "none"
    return str(getattr(value, "value", type(value).__name__))


def _read_precision(reading: SourceReading, trainer: Any, formats: tuple[str, ...]) -> None:
    name = str(reading.values["precision"])
    plugin = type(trainer.precision_plugin)
    mixed, others = TABLE["mixed precisions"], TABLE["other precisions"]
    if plugin.__module__.partition(".")[0] not in LIBRARIES:
        reading.leave("precision", f"memlab cannot know what {plugin.__name__} does to numbers")
    elif name in mixed:
        take_mixed(reading, "precision", mixed[name], formats)
    elif name in others:
        why = "the formats of the module stay" if others[name] == "as-built" else ""
        reading.take("precision", why, precision=others[name])
    else:
        reading.leave("precision", f"memlab has no precision like {name!r}", precision="as-built")


def _read_clipping(reading: SourceReading) -> None:
    bound, algorithm = (reading.values.get(f"gradient_clip_{n}") for n in ("val", "algorithm"))
    if not bound:
        reading.take("gradient_clip_val", "gradients are not clipped", max_grad_norm=None)
        reading.skip("gradient_clip_algorithm")
    elif algorithm in (None, "norm"):
        reading.take("gradient_clip_val", max_grad_norm=float(bound))
        reading.take("gradient_clip_algorithm", max_grad_norm=float(bound))
    else:
        why = "memlab clips by the total norm of the gradients, not by value; the config does not"
        reading.leave("gradient_clip_val", why, max_grad_norm=None)
        reading.leave("gradient_clip_algorithm", why, max_grad_norm=None)


def _read_devices(reading: SourceReading, trainer: Any) -> None:
    is_single = type(trainer.strategy).__name__ == "SingleDeviceStrategy"
    if is_single:
        reading.skip("strategy", "one device holds the whole model, as in memlab")
    else:
        reading.leave("strategy", SHARDING)
    if is_single:
        reading.skip("sync_batchnorm", "there is one process")
    else:
        reading.leave("sync_batchnorm", OWN_STATISTICS)


def _read_callbacks(reading: SourceReading, trainer: Any) -> None:
    acting = [type(each).__name__ for each in trainer.callbacks
              if type(each).__name__ not in TABLE["observers"]]  # fmt: skip
    if acting:
        reading.leave("callbacks", f"memlab calls no callbacks: {', '.join(acting)} may change a "
                                   "step")  # fmt: skip
    else:
        reading.skip("callbacks", "it is about logging, evaluation, saving or reports")


def _read_switches(reading: SourceReading, trainer: Any) -> None:
    """Report the switches of PyTorch that a Trainer sets when it is built."""
    if torch.backends.cudnn.benchmark:
        reading.leave("benchmark", "memlab's worker chooses kernels without torch's benchmark")
    else:
        reading.skip("benchmark")
    if torch.are_deterministic_algorithms_enabled():
        reading.leave("deterministic", "memlab does not switch to deterministic kernels")
    else:
        reading.skip("deterministic")
