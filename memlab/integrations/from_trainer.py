"""`from_trainer`: from a trainer, its arguments or a config file to an `ImportedTraining`.

An object says by the names of its classes which library it comes from, so no library is imported.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from memlab._util.checks import anything, checked
from memlab._util.units import is_a, printable, shown
from memlab.errors import ConfigError, MemlabError
from memlab.integrations.config_files import read_config
from memlab.integrations.lightning import read_lightning
from memlab.integrations.reading import ImportedTraining
from memlab.integrations.transformers_arguments import read_arguments, read_trl, values_of
from memlab.integrations.transformers_trainer import read_trainer

ALLOWED = (
    "allowed are a transformers Trainer or TrainingArguments (also those of trl), a Lightning "
    "Trainer, the path of a config file of accelerate (YAML, JSON) or DeepSpeed (JSON), or such a "
    "config as a dict"
)
LIGHTNING = ("lightning", "pytorch_lightning")


@checked(source=anything, module=anything, dataloader=anything)
def from_trainer(
    source: Any, module: Any = None, *, dataloader: Any = None, world_size: int | None = None
) -> ImportedTraining:
    """Return the training step that a configured trainer or a config file describes.

    Args:
        source: a transformers `Trainer` or `TrainingArguments`, trl's `SFTTrainer` or `DPOTrainer`,
            a Lightning `Trainer`, the path of a config file of accelerate (YAML or JSON) or
            DeepSpeed (JSON), or such a config as a dict. A trainer must be configured and not run;
            it is not changed.
        module: the LightningModule, for a Lightning Trainer.
        dataloader: the training loader, for a Lightning Trainer whose module has none.
        world_size: number of ranks that the launcher starts; None reads the step of one of them.

    Returns:
        The config, the workload (None without a model or data), and what became of every field.
        With `world_size` the config is sharded as the source says, where memlab has the same.
        Without it the step is that of one process, and `batch_size` counts its samples of one
        update.

    Raises:
        MemlabError: the source is nothing of this kind, a file is missing or broken, or a value is
            not allowed. The message names it and a remedy.

    >>> import memlab
    >>> given = memlab.from_trainer({
    ...     "train_micro_batch_size_per_gpu": 4,
    ...     "gradient_accumulation_steps": 8,
    ...     "gradient_clipping": 1.0,
    ...     "zero_optimization": {"stage": 2},
    ... })
    >>> print(given.config)
    batch_size=32, accumulation_steps=8, max_grad_norm=1.0
    >>> print(given.not_imported[0].name)
    zero_optimization.stage
    """
    try:
        if is_a(source, str | os.PathLike | Mapping):
            _refuse_beside(source, module=module, dataloader=dataloader)
            return read_config(source, world_size, ALLOWED)
        return _read_object(source, module, dataloader, world_size)
    except MemlabError:
        raise
    except Exception as error:  # another version may lack anything; a person's class may raise
        raise ConfigError(
            f"source={shown(type(source).__name__)} cannot be read: {type(error).__name__}: "
            f"{printable(str(error))}; {ALLOWED}"
        ) from error


def _read_object(
    source: Any, module: Any, dataloader: Any, world_size: int | None
) -> ImportedTraining:
    library = _library_of(source, "Trainer")
    if library == "transformers":
        _refuse_beside(source, module=module, dataloader=dataloader)
        return read_trainer(source, _with_version(library), world_size)
    if library in LIGHTNING:
        return read_lightning(source, module, dataloader, _with_version(library), world_size)
    if _library_of(source, "TrainingArguments") == "transformers":
        _refuse_beside(source, module=module, dataloader=dataloader)
        reading = read_arguments(values_of(source), world_size=world_size)
        read_trl(reading, source, has_workload=False)
        return reading.finish(f"{type(source).__name__} of {_with_version('transformers')}")
    raise ConfigError(f"source={shown(source)} is no trainer that memlab knows; {ALLOWED}")


def _library_of(source: Any, name: str) -> str:
    """Return the library whose class of this name an object is an instance of; "" if none."""
    for kind in type(source).__mro__:
        library = kind.__module__.partition(".")[0]
        if kind.__name__ == name and library in ("transformers", *LIGHTNING):
            return library
    return ""


def _with_version(library: str) -> str:
    version = getattr(sys.modules.get(library), "__version__", "")
    return f"{library} {version}".rstrip()


def _refuse_beside(source: Any, **others: Any) -> None:
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"{name}={shown(type(value).__name__)} is for a Lightning Trainer; leave it out "
                f"with source={shown(type(source).__name__)}"
            )
