"""Workloads from a config of transformers: the model with random weights, and made-up batches.

The model is what `AutoModel....from_config` builds, in the number format that the config names. Its
loss is its own. Tokens, pixels and labels are random, since what they say costs nothing. Nothing is
downloaded but a config that a person asks for, and no code that a config names is run.
"""

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab._util.checks import anything, checked, count, optional_count
from memlab._util.units import is_a, printable, shown
from memlab.errors import MemlabError, WorkloadError
from memlab.workload import SampleSize, Workload
from memlab.workloads.data import zoo_import
from memlab.workloads.published import (
    TIMM,
    config_named,
    config_of_hub,
    is_hub_name,
    is_of_hub,
    timm_workload,
)

CONFIG_FILE = "config.json"
LONGEST_BY_DEFAULT = 1024  # tokens; models take up to millions
USUAL_IMAGE = 224  # pixels, of a model that takes any size
ROUNDED = 64  # position tables of RoBERTa have two places more than tokens
OWN_CODE = ("auto_map", "transformers_version", "_name_or_path", "name_or_path")
FACTORS = (0.25, 0.5, 1, 2, 4)  # of the size, which a slider offers

TASKS = {  # the first that has a model is taken, where a config names no architecture
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
"""Classes that build a model for a task that memlab makes batches for, and their tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfiguredModel:
    """A model of transformers, and the batches it takes.

    Attributes:
        auto_class: of `TASKS`.
        values: what the config file holds.
        size: tokens of a sample, or pixels along each side of an image.
    """

    auto_class: str
    values: Mapping[str, Any]
    size: int

    def config(self) -> Any:
        """Return the config."""
        return _transformers().AutoConfig.for_model(**self.values)

    def build(self) -> nn.Module:
        """Return the model, randomly initialised."""
        found = getattr(_transformers(), self.auto_class)
        model: nn.Module = found.from_config(self.config(), trust_remote_code=False)
        return model

    def batch(self, n: int) -> dict[str, torch.Tensor]:
        """Return n samples: pixels or tokens, and labels."""
        config = self.config()
        if self.auto_class == "AutoModelForImageClassification":
            channels = getattr(config, "num_channels", 3)
            pixels = torch.rand(n, channels, self.size, self.size)
            return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (n,))}

        tokens = torch.randint(config.get_text_config().vocab_size, (n, self.size))
        labels = tokens
        if self.auto_class == "AutoModelForSequenceClassification":
            labels = torch.randint(config.num_labels, (n,))
        elif self.auto_class == "AutoModelForTokenClassification":
            labels = torch.randint(config.num_labels, (n, self.size))
        return {"input_ids": tokens, "labels": labels.clone()}


@checked(path=anything, tokens=optional_count, image_size=optional_count)
def from_config(
    path: str | os.PathLike[str],
    *,
    tokens: int | None = None,
    image_size: int | None = None,
    from_hub: bool = False,
) -> Workload:
    """Return a workload of the model that a config of transformers describes.

    Language models, classifiers of texts and tokens, and classifiers of images are known. The task
    is that of the first of the config's `architectures`.

    Args:
        path: of a JSON file, or of a folder with a `config.json`; or the name of a published model,
            such as "bert-base-uncased", or of a model of timm, such as "timm/resnet50".
        tokens: of a sample; None is as many as the model takes, at most 1024.
        image_size: pixels along each side of an image; None is what the config says, or 224.
        from_hub: whether the config of a name such as "owner/model", or of one that memlab does not
            know, is read from Hugging Face's hub, or its cache; so it is if MEMLAB_FROM_HUB is "1".

    Raises:
        WorkloadError: the file is no such config, or of a model that memlab makes no batches for;
            the message says what to do.

    >>> import memlab, pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "tiny.json"
    >>> path.write_text('{"model_type": "gpt2", "n_layer": 1, "vocab_size": 50257}') > 0
    True
    >>> memlab.workloads.from_config(path, tokens=64).name
    'tiny, sequence length 64'
    """
    name = str.__str__(path) if isinstance(path, str) and not os.path.exists(path) else ""
    if name.startswith(TIMM):
        if tokens is not None:
            raise WorkloadError(f"tokens={tokens} does nothing for {shown(name)}; use image_size")
        return timm_workload(name, image_size)
    label, model = model_of(path, tokens, image_size, from_hub=from_hub)
    return _sized(model.size, label=label, model=model)


def model_of(
    path: Any,
    tokens: int | None = None,
    image_size: int | None = None,
    *,
    from_hub: bool = False,
) -> tuple[str, ConfiguredModel]:
    """Return a name for the model that a config describes, and the model.

    Raises:
        WorkloadError: as `from_config`.
    """
    named = _named(path, from_hub)
    file = Path(named[0]) if named else _file_of(path)
    values = _checked_values(file, named[1]) if named else _values_of(file)
    config = _config_of(file, values)
    auto_class = _task_of(file, values)
    is_image = auto_class == "AutoModelForImageClassification"
    given, other = (image_size, tokens) if is_image else (tokens, image_size)
    if other is not None:
        names = ("tokens", "image_size") if is_image else ("image_size", "tokens")
        raise WorkloadError(
            f"{names[0]}={other} does nothing for {file}, whose samples are "
            f"{'images' if is_image else 'texts'}; use {names[1]}"
        )

    size = given or (_image_size(config) if is_image else _num_tokens(config))
    if is_image and hasattr(config, "image_size"):
        values = {**values, "image_size": size}
    label = file.parent.name if file.name == CONFIG_FILE and file.parent.name else file.stem
    label = named[0] if named else label
    return label, ConfiguredModel(auto_class=auto_class, values=values, size=size)


def _sized(size: int, *, label: str, model: ConfiguredModel) -> Workload:
    """Return the workload with samples of this size, which its name says."""
    is_image = model.auto_class == "AutoModelForImageClassification"
    values = model.values
    if is_image and "image_size" in values:
        values = {**values, "image_size": size}
    model = replace(model, values=values, size=size)
    words = ("image size", "pixels", 2) if is_image else ("sequence length", "tokens", 1)
    sample_size = SampleSize(
        name=words[0],
        unit=words[1],
        value=size,
        dimensions=words[2],
        offered=offered_sizes(size),
        make_workload=partial(_sized, label=label, model=model),
    )
    return Workload(
        name=f"{label}, {sample_size}",
        build_model=model.build,
        make_batch=model.batch,
        compute_loss=own_loss,
        sample_size=sample_size,
    )


def offered_sizes(size: int) -> tuple[int, ...]:
    """Return the sizes of samples that a slider offers around one."""
    return tuple(sorted({max(1, int(factor * size)) for factor in FACTORS}))


def _transformers() -> Any:
    return zoo_import("transformers")


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that a model of transformers computes by itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def _named(path: Any, from_hub: bool) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the config of what is no path; None of a path.

    Raises:
        WorkloadError: as `config_of_hub`.
    """
    if not is_a(path, str):
        return None
    name = str.__str__(path)
    if not is_hub_name(name) or os.path.exists(name):
        return None
    known = None if is_of_hub(name, from_hub) else config_named(name)
    return known or (name, config_of_hub(name, from_hub))


def _file_of(path: Any) -> Path:
    try:
        if callable(getattr(path, "save_pretrained", None)):
            raise WorkloadError(
                f"path is an object of {type(path).__name__}; allowed is a JSON file, or a folder "
                "with one: write it by config.save_pretrained(folder), and pass the folder"
            )
        found = Path(os.fsdecode(path)).expanduser()
        file = found / CONFIG_FILE if found.is_dir() else found
        is_there = file.is_file()
    except WorkloadError:
        raise
    except Exception as error:  # a person's own class may raise anything
        raise WorkloadError(f"path={shown(path)} names no file ({type(error).__name__})") from None
    if not is_there:
        what = f"holds no {CONFIG_FILE}" if found.is_dir() else "is no file"
        raise WorkloadError(
            f"{shown(str(path))} {what}; allowed is a config of transformers, or a folder with a "
            f"{CONFIG_FILE}"
        )
    return file


def _values_of(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_hook=_number_or_self)
    except (OSError, ValueError, RecursionError) as error:
        why = printable(str(error))[:200]
        raise WorkloadError(
            f"{file} is no JSON ({why}); allowed is a config of transformers"
        ) from None
    return _checked_values(file, values)


def _checked_values(file: Path, values: Any) -> dict[str, Any]:
    if not is_a(values, dict) or not is_a(values.get("model_type"), str):
        raise WorkloadError(
            f"{file} has no model_type, so it is no config of transformers; pass what "
            "model.config.save_pretrained(folder) writes"
        )
    return {name: value for name, value in values.items() if name not in OWN_CODE}


def _number_or_self(found: dict[str, Any]) -> Any:
    """Return an object of JSON, or the number that transformers writes as one: an infinite one."""
    is_one = list(found) == ["__float__"] and isinstance(found["__float__"], str)
    return float(found["__float__"]) if is_one else found


def _config_of(file: Path, values: Mapping[str, Any]) -> Any:
    transformers = _transformers()
    kind, known = values["model_type"], zoo_import("transformers.models.auto").CONFIG_MAPPING
    if kind not in known:
        near = difflib.get_close_matches(kind[:80], list(known.keys()), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise WorkloadError(
            f"{file}: model_type={shown(kind)} is unknown to transformers "
            f"{transformers.__version__}{hint}; update transformers, or write a function that "
            "returns a memlab.Workload"
        )
    try:
        return transformers.AutoConfig.for_model(**values)
    except Exception as error:  # whatever a config of transformers says of wrong values
        why = printable(" ".join(str(error).split()))[:300]
        raise WorkloadError(f"{file} is refused by transformers: {why}") from None


def _task_of(file: Path, values: Mapping[str, Any]) -> str:
    """Return the class of `TASKS` that builds the model."""
    tables = zoo_import("transformers.models.auto.modeling_auto")
    named = values.get("architectures") or []
    named = [each for each in named if is_a(each, str)] if is_a(named, list) else []
    models = {task: getattr(tables, table) for task, table in TASKS.items()}
    kind = values["model_type"]
    fitting = [
        task
        for task, table in models.items()
        if (named[0] in _names(table.values()) if named else kind in table)
    ]
    if not fitting:
        what = shown(named[0]) if named else f"a model of type {shown(kind)}"
        raise WorkloadError(
            f"{file} describes {what}, for which memlab makes no batches; write a function that "
            "returns a memlab.Workload, and name it as package.module:function"
        )
    return fitting[0]


def _names(values: Iterable[Any]) -> set[str]:
    """Return the names of a table, in which a model may have several."""
    return {name for each in values for name in ((each,) if is_a(each, str) else each)}


def _num_tokens(config: Any) -> int:
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    try:
        most = min(count(1)("max_position_embeddings", most), LONGEST_BY_DEFAULT)
    except MemlabError:  # it has none, as T5
        return LONGEST_BY_DEFAULT // 2
    return most // ROUNDED * ROUNDED or most


def _image_size(config: Any) -> int:
    size: Any = getattr(config, "image_size", USUAL_IMAGE)
    size = size[0] if is_a(size, list | tuple) and size else size
    return size if is_a(size, int) and size > 0 else USUAL_IMAGE
