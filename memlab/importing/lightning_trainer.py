"""Lightning's `Trainer`: what it has kept of its arguments, and the parts of a LightningModule.

A Trainer holds no batch size; it is that of the module's own `train_dataloader`, or of the loader
that is passed beside it.
"""

import inspect
from typing import Any

import torch

from memlab.arguments.quoting import shown
from memlab.errors import ConfigError, WorkloadError
from memlab.importing.imported import ImportedTraining
from memlab.importing.lightning_module import read_module
from memlab.importing.precisions import take_mixed
from memlab.importing.rank_fields import of_lightning, take_ranks
from memlab.importing.reading import SHARDING, SourceReading
from memlab.techniques.precision import number_formats

LENGTH = "it is about how long the training lasts"
REPORTS = "it is about logging, evaluation, saving or reports"
NOT_CONCERNED: dict[str, tuple[str, ...]] = {
    LENGTH: (
        "fast_dev_run", "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time",
        "limit_train_batches", "overfit_batches",
    ),
    REPORTS: (
        "logger", "limit_val_batches", "limit_test_batches", "limit_predict_batches",
        "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps",
        "log_every_n_steps", "enable_checkpointing", "enable_progress_bar",
        "enable_model_summary", "inference_mode", "profiler", "barebones", "default_root_dir",
        "enable_autolog_hparams", "model_registry", "weights_save_path", "track_grad_norm",
    ),
    "it is about how batches are loaded": (
        "reload_dataloaders_every_n_epochs", "use_distributed_sampler", "replace_sampler_ddp",
    ),
    "memlab is given the device when it measures or predicts": ("accelerator",),
    "what they chose is read from the Trainer itself": ("plugins",),
}  # fmt: skip
NOT_KEPT = "(not kept by the Trainer)"
OWN_STATISTICS = "the Trainer does not keep it; in memlab BatchNorm sees the samples of one rank"
OBSERVERS = (
    "DeviceStatsMonitor", "EarlyStopping",
    "LearningRateMonitor", "ModelCheckpoint", "ModelSummary", "OnExceptionCheckpoint",
    "ProgressBar", "RichModelSummary", "RichProgressBar", "SpikeDetection", "ThroughputMonitor",
    "Timer", "TQDMProgressBar",
)  # fmt: skip
FULL = {"bf16-true": "bf16", "16-true": "fp16"}
MIXED = {"bf16-mixed": "bf16-mixed", "16-mixed": "fp16-mixed", "bf16": "bf16-mixed",
         "16": "fp16-mixed"}  # fmt: skip


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
    formats = () if module is None else number_formats(module)
    _read_precision(reading, trainer, formats)
    _read_clipping(reading)
    _read_devices(reading, trainer)
    _read_callbacks(reading, trainer)
    _read_switches(reading, trainer)
    for why, names in NOT_CONCERNED.items():
        reading.skip_all(names, why)

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
    if plugin.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning",
                                                   "lightning_fabric"):  # fmt: skip
        reading.leave("precision", f"memlab cannot know what {plugin.__name__} does to numbers")
    elif name in MIXED:
        take_mixed(reading, "precision", MIXED[name], formats)
    elif name in FULL:
        reading.take("precision", precision=FULL[name])
    elif name in ("32-true", "32"):
        reading.take("precision", "the formats of the module stay", precision="as-built")
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
    for name in ("devices", "num_nodes"):
        reading.leave_unless((1, NOT_KEPT), name, SHARDING)
    if is_single:
        reading.skip("sync_batchnorm", "there is one process")
    else:
        reading.leave("sync_batchnorm", OWN_STATISTICS)


def _read_callbacks(reading: SourceReading, trainer: Any) -> None:
    acting = [type(each).__name__ for each in trainer.callbacks
              if type(each).__name__ not in OBSERVERS]  # fmt: skip
    if acting:
        reading.leave("callbacks", f"memlab calls no callbacks: {', '.join(acting)} may change a "
                                   "step")  # fmt: skip
    else:
        reading.skip("callbacks", REPORTS)


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
    reading.leave_unless((False, NOT_KEPT), "detect_anomaly", "memlab does not look for anomalies")
