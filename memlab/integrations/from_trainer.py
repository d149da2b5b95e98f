"""`from_trainer`: from a trainer, its arguments or a config file to an `ImportedTraining`.

An object says by the names of its classes which library it comes from, so no library is imported.
The files of this room read trainers; config files of accelerate and DeepSpeed are read here.
accelerate's file says where a script runs and in which precision; the batch size, the optimizer and
the model are in the script itself. The step of DeepSpeed's config is that of one process:
`train_batch_size` counts the samples of all processes, so the micro-batch and the accumulation say
what one of them trains. What is "auto" is filled in when training begins.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memlab._util.checks import anything, checked
from memlab._util.units import is_a, printable, shown
from memlab.config import CompileMode
from memlab.errors import ConfigError, MemlabError
from memlab.integrations.lightning import read_lightning
from memlab.integrations.reading import (
    OF_FILE,
    SHARDING,
    TABLES,
    FoundSharding,
    ImportedTraining,
    SourceReading,
    flattened,
    hyperparameter,
    of_fsdp,
    of_stage,
    take_mixed,
    take_ranks,
    usual_value,
)
from memlab.integrations.transformers_trainer import (
    read_arguments,
    read_trainer,
    read_trl,
    values_of,
)

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
            return read_config(source, world_size)
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


# Config files, by their paths, and such configs as dicts.

YAML = (".yaml", ".yml")
MOST_BYTES = 2**24  # of a config file; a larger one is something else


def read_config(source: Any, world_size: int | None) -> ImportedTraining:
    """Return the step that a config file, by its path, or such a config as a dict describes.

    Args:
        source: a path or a mapping.
        world_size: number of ranks; None reads the step of one of them.

    Raises:
        ConfigError: there is no such file, or it is broken or holds something else.
    """
    if is_a(source, Mapping):
        config, named = source, "a dict"
    else:
        path = _path(source)
        config, named = _parsed(path), path.name
    if not config or not is_a(config, Mapping):
        raise ConfigError(
            f"source={shown(source)} holds no fields; pass a config file of accelerate or DeepSpeed"
        )

    names = {str(name) for name in config}
    accelerates, deepspeeds = (set(TABLES[each]["marks"]) for each in ("accelerate", "deepspeed"))
    if names & (accelerates - deepspeeds):
        return read_accelerate(config, f"accelerate config, {printable(named)}", world_size)
    if names & deepspeeds:
        return read_deepspeed(config, f"DeepSpeed config, {printable(named)}", world_size)
    raise ConfigError(
        f"source={shown(source)} has the fields {shown(sorted(names)[:5])}, and none that a config "
        f"of accelerate or DeepSpeed begins with; {ALLOWED}"
    )


def _path(source: Any) -> Path:
    try:
        path = Path(os.path.expanduser(os.fsdecode(source)))
        is_file, size = path.is_file(), path.stat().st_size if path.is_file() else 0
    except Exception:  # a null byte, or a person's own class, which may raise anything
        raise ConfigError(f"source={shown(source)} is no path; {ALLOWED}") from None
    if not is_file:
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"source={shown(source)} {what}; pass the path of a config file")
    if size > MOST_BYTES:
        raise ConfigError(f"source={shown(source)} has {size} bytes, too many for a config file; "
                          "pass the config file itself")  # fmt: skip
    return path


def _parsed(path: Path) -> Any:
    """Return what a config file holds.

    Raises:
        ConfigError: it cannot be read, or is broken; the message says where.
    """
    source = f"source={shown(str(path))}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source} cannot be read: {printable(str(error))}; pass a JSON or YAML file"
        ) from error

    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith("{")
    if path.suffix.lower() not in YAML:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            if is_json:
                said = f"{source} is not valid JSON: {printable(str(error))}; repair the file"
                raise ConfigError(said) from error
    try:
        import yaml  # an optional package
    except ImportError:
        raise ConfigError(f"{source} is YAML, which needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = f"{source} is not valid YAML: {printable(str(error))}; repair the file"
        raise ConfigError(said) from error


# accelerate's file, as `accelerate config` writes it.

FILLED_IN = "the script or the Trainer fills it in"
SINGLE = ("NO", "no", "No", False, None)
NO_BATCH = "accelerate's file has no batch size; it is that of the script, here memlab's default"


def read_accelerate(
    config: Mapping[str, Any], source: str, world_size: int | None = None
) -> ImportedTraining:
    """Return the step that a config file of accelerate describes."""
    reading = SourceReading(flattened(config))
    values = reading.values
    reading.use_table("accelerate")
    _read_accelerates_precision(reading)
    _read_dynamo(reading)
    _read_accumulation(reading)
    if values.get("distributed_type") in SINGLE:
        reading.skip("distributed_type", "one process holds the whole model, as in memlab")
    else:
        reading.leave("distributed_type", SHARDING)
    if values.get("fsdp_config.fsdp_activation_checkpointing") is True:
        reading.take("fsdp_config.fsdp_activation_checkpointing",
                     "the blocks that memlab finds stand for FSDP's units",
                     checkpointing="blocks", model_cache=False)  # fmt: skip
    for name, value in values.items():
        if name.endswith("_config") and value in (None, {}):
            reading.skip(name)

    size = max(8, reading.settings.get("accumulation_steps", 1))
    reading.leave(reading.add("batch size", None), NO_BATCH, batch_size=size)
    if world_size is not None:
        take_ranks(reading, world_size, _sharding_of_accelerate(values, world_size))
    return reading.finish(source)


def _read_accelerates_precision(reading: SourceReading) -> None:
    values = reading.values
    if values.get("fp16") is True and "mixed_precision" not in values:  # accelerate before 0.7
        take_mixed(reading, "fp16", "fp16-mixed", ())
        return

    reading.skip("fp16")
    name = str(values.get("mixed_precision", "no")).lower()
    backend = str(values.get("fp8_config.backend", "AO")).upper()
    if name in ("no", "false", "none"):  # YAML reads an unquoted no as False
        reading.take("mixed_precision", "the formats of the model stay", precision="as-built")
    elif name in ("bf16", "fp16"):
        take_mixed(reading, "mixed_precision", f"{name}-mixed", ())
    elif name == "fp8" and backend == "AO":
        take_mixed(reading, "mixed_precision", "fp8-mixed", (), "with torchao, one scale a tensor")
    elif name == "fp8":
        why = f"memlab has no precision like 'fp8' (of {backend})"
        reading.leave("mixed_precision", why, precision="as-built")
    else:
        why = f"memlab does not know the precision {shown(name)}"
        reading.leave("mixed_precision", why, precision="as-built")
    if reading.settings["precision"] == "fp8-mixed":
        reading.take("fp8_config.backend", precision="fp8-mixed")


def _read_dynamo(reading: SourceReading) -> None:
    values = reading.values
    nested, flat = "dynamo_config.dynamo_backend", "dynamo_backend"
    name = nested if nested in values else flat
    backend = str(values.get(name, "no")).upper()
    if backend in ("INDUCTOR", "NO", "FALSE", "NONE"):
        reading.switch(name, backend == "INDUCTOR", compile=True)
    else:
        reading.leave(name, f"memlab compiles with Inductor, not with {backend}", compile=False)

    mode = values.get("dynamo_config.dynamo_mode")
    if reading.settings.get("compile", False) and mode in list(CompileMode):
        reading.take("dynamo_config.dynamo_mode", compile_mode=mode)
    else:
        why = "memlab has no such mode"
        reading.leave_unless((None, "default"), "dynamo_config.dynamo_mode", why)


def _read_accumulation(reading: SourceReading) -> None:
    """Report accumulation and clipping, which a file has for DeepSpeed or at its top."""
    part = "deepspeed_config."
    steps = "gradient_accumulation_steps"
    for name in (steps, f"{part}{steps}", f"{part}gradient_clipping"):
        value = reading.values.get(name)
        if value in (None, "auto"):
            reading.leave_unless((None,), name, FILLED_IN)
        elif name.endswith(steps):
            reading.take(name, accumulation_steps=reading.whole_number(name, 1))
        else:
            reading.switch(name, value, max_grad_norm=value)


def _sharding_of_accelerate(values: Mapping[str, Any], world_size: int) -> FoundSharding:
    """Return the sharding of accelerate's config file, by its flattened names."""
    names: tuple[str, ...] = ("distributed_type", "num_processes")
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
        names = (*names, f"{part}zero_stage")
        return of_stage(stage, is_offloaded=any(map(_is_used, devices)), names=names)
    if kind != "FSDP":
        why = f"memlab has no sharding like distributed_type={shown(kind)}"
        return FoundSharding(sharding=None, why=why, names=names)

    part = "fsdp_config.fsdp_"
    own = {name.removeprefix(part): value for name, value in values.items() if part in name}
    told = own.get("reshard_after_forward", own.get("sharding_strategy", True))
    options = ("reshard_after_forward", "sharding_strategy", "version", "offload_params")
    names = (*names, *[f"{part}{name}" for name in options])
    return of_fsdp(told, is_offloaded=own.get("offload_params") is True, names=names)


# DeepSpeed's config, a JSON file or a dict.

AUTO = '"auto" is filled in when training begins: pass the Trainer or the TrainingArguments too'
UNSAID_CLIPPING = (
    "it is not given, and DeepSpeed then clips at 1 from 0.19.3 on; with an older one use "
    "max_grad_norm=None"
)
PRECISIONS = ("fp16", "bf16", "bfloat16", "torch_autocast")
SCALER = "memlab's scaler has PyTorch's defaults; it changes neither memory nor time"
USUAL = [("bias_correction", True), ("momentum", 0), ("momentum", 0.9)]
OPTIMIZERS = {row["name"]: row for row in TABLES["deepspeed"]["optimizers"]}


def read_deepspeed(
    config: Mapping[str, Any], source: str, world_size: int | None = None
) -> ImportedTraining:
    """Return the step that a config of DeepSpeed describes."""
    reading = SourceReading(flattened(config))
    values = reading.values
    reading.use_table("deepspeed")
    for name in reading.left:
        if values[name] == "auto" and not name.startswith("zero_optimization"):
            reading.leave(name, AUTO)
    _read_batch(reading, world_size or 1)
    _read_precision(reading)
    _read_optimizer(reading)
    _read_clipping(reading)
    for name in values:
        part, _, rest = name.partition(".")
        if values.get(f"{part}.enabled") is False:
            reading.skip(name, f"{part} is not enabled")
        elif part not in PRECISIONS or rest in ("enabled", "dtype"):
            continue
        elif _is_on(reading, part):
            reading.leave(name, SCALER if part == "fp16" else f"memlab has no {rest}")
        else:
            reading.skip(name, f"{part} is not enabled")
    take_ranks(reading, world_size, _sharding_of_deepspeed(values))
    return reading.finish(source)


def _read_batch(reading: SourceReading, num_ranks: int) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = [reading.values.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if value == "auto":
            reading.leave(name, AUTO)
    total, micro, steps = (
        None if value in (None, "auto") else reading.whole_number(name, 1)
        for name, value in zip(names, values, strict=True)
    )
    if total is not None and total % num_ranks == 0:
        total //= num_ranks  # of one process, as all that follows
    if steps is None and micro is not None and total is not None and total % micro == 0:
        size, steps = total, total // micro
        why = f"{steps} micro-batches of {micro}, as if there were one process"
        reading.take(names[0], why, batch_size=total)
        reading.take(names[1], why, accumulation_steps=steps)
        reading.settings["accumulation_steps"] = steps
    elif micro is None and total is not None:
        size = total
        reading.take(names[0], "as if there were one process", batch_size=total)
    else:
        size = (micro or 8) * (steps or 1)
        why = f"{micro or 8} x {steps or 1} in one update of one process"
        if micro is not None:
            reading.take(names[1], why, batch_size=size)
        if total is not None and total == size:
            reading.take(names[0], batch_size=size)
        elif total is not None:
            reading.leave(names[0], f"it counts the samples of all processes; {SHARDING}",
                          batch_size=size)  # fmt: skip
    reading.settings["batch_size"] = size
    if steps is not None:
        reading.take(names[2], accumulation_steps=steps)
    if total is None and micro is None:
        why = "no batch size is given; it is memlab's default"
        reading.leave(reading.add("batch size", None), why, batch_size=size)


def _is_on(reading: SourceReading, part: str) -> bool:
    return reading.values.get(f"{part}.enabled") is True


def _read_precision(reading: SourceReading) -> None:
    for part in ("bf16", "bfloat16"):
        name = f"{part}.enabled"
        if _is_on(reading, part):
            reading.take(
                name,
                "DeepSpeed keeps fp32 weights beside those in bf16, as bf16-master does; it also "
                "adds micro-batches up in fp32 unless ZeRO shards gradients",
                precision="bf16-master",
            )
        else:
            reading.leave_unless((None, False), name, AUTO)
    if _is_on(reading, "fp16"):
        reading.leave(
            "fp16.enabled",
            "DeepSpeed keeps fp16 weights and fp32 copies of them; memlab has fp32 weights with "
            "autocast to fp16 and a loss scaler instead",
            precision="fp16-mixed",
        )
    else:
        reading.leave_unless((None, False), "fp16.enabled", AUTO)
    if _is_on(reading, "torch_autocast"):
        kind = str(reading.values.get("torch_autocast.dtype", "bfloat16"))
        precision = "fp16-mixed" if kind in ("float16", "half", "fp16") else "bf16-mixed"
        take_mixed(reading, "torch_autocast.enabled", precision, ())
        if "torch_autocast.dtype" in reading.values:
            reading.take("torch_autocast.dtype", precision=precision)
    else:
        reading.leave_unless((None, False), "torch_autocast.enabled", AUTO)


def _read_optimizer(reading: SourceReading) -> None:
    values = reading.values
    kind = str(values.get("optimizer.type")).lower()
    found = OPTIMIZERS.get(kind)
    settings: dict[str, str] = {"optimizer": "adamw"} if found is None else found["settings"]
    if found is None:
        why = "memlab has no such optimizer; the config has the default"
        reading.leave("optimizer.type", why, **settings)
    else:
        why = found["why"]
        if kind == "adam" and values.get("optimizer.params.adam_w_mode") is False:
            settings, why = {"optimizer": "adam", "optimizer_implementation": "fused"}, ""
        if kind == "sgd" and values.get("optimizer.params.momentum"):
            settings = {"optimizer": "sgd-momentum"}
        if values.get("optimizer.params.torch_adam") is True:
            settings = {**settings, "optimizer_implementation": "default"}
        reading.take("optimizer.type", why, **settings)

    optimizer = settings["optimizer"]
    for name in [n for n in values if n.startswith("optimizer.params.")]:
        option = name.rpartition(".")[2]
        if values[name] == "auto":
            reading.leave(name, AUTO)
        elif option in ("lr", "weight_decay", "betas", "eps"):
            hyperparameter(reading, name, usual_value(option, optimizer))
        elif option in ("adam_w_mode", "torch_adam"):
            reading.take(name, **settings)
        elif (option, values[name]) in USUAL:
            reading.same(name, f"optimizer={optimizer}")
        else:
            reading.leave(name, "memlab's optimizers have no such option")


def _read_clipping(reading: SourceReading) -> None:
    if "gradient_clipping" not in reading.values:
        reading.take(reading.add("gradient_clipping", None), UNSAID_CLIPPING, max_grad_norm=1.0)
        return

    bound = reading.values["gradient_clipping"]
    if bound == "auto":
        reading.leave("gradient_clipping", AUTO)
    elif not bound:
        reading.skip("gradient_clipping", "DeepSpeed does not clip")
    else:
        reading.take("gradient_clipping", max_grad_norm=bound)


def _sharding_of_deepspeed(values: Mapping[str, Any]) -> FoundSharding:
    """Return the sharding of DeepSpeed's config, by its flattened names."""
    part = "zero_optimization."
    devices = (
        values.get(f"{part}{name}.device") for name in ("offload_optimizer", "offload_param")
    )
    stage = values.get(f"{part}stage", 0)
    return of_stage(stage, is_offloaded=any(map(_is_used, devices)), names=(f"{part}stage",))


def _is_used(device: Any) -> bool:
    return device not in (None, "none")
