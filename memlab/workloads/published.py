"""Models by the names that people write: other spellings, published names, hubs, and timm.

A name is compared by its letters and numbers alone: "meta-llama/Llama-3.2-1B" and "llama_3.2_1b"
are one. An owner has to be the one who published the model. What is published stands in
`published.toml`. The config of another name is read from Hugging Face's hub only if a person allows
it; weights and code never are.
"""

import difflib
import functools
import importlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab._util.units import MAX_SHOWN, printable, shown
from memlab.errors import WorkloadError
from memlab.workload import SampleSize, Workload
from memlab.workloads.data import zoo_import

# The language models that `finetune` knows by name: the sizes in their published configs.

LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
LLAMA_2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
QWEN = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
}

BASES: Mapping[str, Mapping[str, Any]] = {
    # for a CPU: a step takes a moment
    "llama-tiny": {
        **LLAMA_2, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 344,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "llama-1b": {  # Llama 3.2
        **LLAMA_3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "tie_word_embeddings": True,
    },
    "llama-3b": {
        **LLAMA_3, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "tie_word_embeddings": True,
    },
    "llama-8b": {  # Llama 3 and 3.1
        **LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-7b": {  # Llama 2
        **LLAMA_2, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-13b": {
        **LLAMA_2, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "mistral-7b": {
        "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": None,
    },
    "qwen-0.5b": {  # Qwen 2.5
        **QWEN, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen-7b": {
        **QWEN, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Values of configs of transformers, by name."""


ALLOWED = "MEMLAB_FROM_HUB"  # an environment variable: "1" allows a hub without an argument
TIMM = "timm/"
TUNED = re.compile(r"[-_](instruct|chat|it|hf|bf16)(?=[-_]|$)", re.IGNORECASE)  # of one size
OWNED = re.compile(r"^.*/(?=[^/]*[A-Za-z])")  # a number after a slash is the size of a patch


@functools.cache
def _published() -> Mapping[str, Mapping[str, Any]]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = tomllib.loads(text)
    return found


def config_named(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return a published name in its usual spelling with its config; None if it is none."""
    configs = _published()["config"]
    found = known_as(name, configs)
    return None if found is None else (found, dict(configs[found]))


def known_as(name: str, names: Iterable[str]) -> str | None:
    """Return the one of memlab's names that is meant; None if none is.

    >>> known_as("meta-llama/Llama-3.2-1B-Instruct", ["llama-1b", "llama-3b"])
    'llama-1b'
    >>> known_as("ViT-L/16", ["vit-large"]), known_as("resnet50", ["resnet-50"])
    ('vit-large', 'resnet-50')
    """
    names = list(names)
    same = {_letters(also): own for also, own in _published()["same"].items() if own in names}
    own, base = _letters(name), _letters(TUNED.sub("", name))
    if owner := OWNED.match(name):
        published = map(_letters, _published()["owner"].get(owner[0][:-1].lower(), ()))
        if not {own, base} & set(published):
            return None
    # of memlab's own names none says its version, so a name that adds to it may be of another
    return {**same, **{_letters(each): each for each in names}}.get(own) or same.get(base)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return known names that look like this one, as the end of a sentence; "" if none does."""
    names = list(names)
    same = [also for also, own in _published()["same"].items() if own in names]
    every = [*names, *_published()["config"], *same]
    plain = {_letters(each): each for each in reversed(every)}
    near = difflib.get_close_matches(_letters(name[:MAX_SHOWN]), plain, n=3, cutoff=0.75)
    return f" (did you mean {' or '.join(repr(plain[each]) for each in near)}?)" if near else ""


def _letters(name: str) -> str:
    parts = re.split(r"(?<=\d)[^a-z0-9]+(?=\d)", OWNED.sub("", name).lower())
    return ".".join(re.sub(r"[^a-z0-9]", "", part) for part in parts)  # "3-21b" is not "3.2-1b"


def is_hub_name(name: str) -> bool:
    """Return whether a text may be the name of a model on a hub: "owner/name" or "name"."""
    return re.fullmatch(r"([\w.-]+/)?[\w.-]+", name) is not None and not name.endswith(".json")


def is_allowed(from_hub: bool) -> bool:
    """Return whether a person lets configs be read from a hub."""
    return from_hub or os.environ.get(ALLOWED) == "1"


def is_of_hub(name: str, from_hub: bool) -> bool:
    """Return whether a person lets the config of this name, which says an owner, be read there."""
    return OWNED.match(name) is not None and is_allowed(from_hub)


def unknown(name: str, names: Iterable[str]) -> str:
    """Return what to do about a name that is none of these, and of no file."""
    known = list(names)
    return (
        f"{shown(name)} is no file, and no model that memlab knows by name{nearest(name, known)}: "
        f"these are {', '.join(map(repr, known))}, and published names; if it is a model on "
        "Hugging Face's hub, allow its config to be read from there with from_hub=True "
        f"(--from-hub, or {ALLOWED}=1), or pass the path of a config of transformers"
    )


def config_of_hub(name: str, from_hub: bool) -> dict[str, Any]:
    """Return the config of a model on Hugging Face's hub, or in its cache on this machine.

    Raises:
        WorkloadError: that is not allowed, or cannot be read; the message says what to do.
    """
    if not is_allowed(from_hub):
        raise WorkloadError(unknown(name, BASES))
    transformers = zoo_import("transformers")
    try:
        found = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        values: dict[str, Any] = json.loads(found.to_json_string(use_diff=False))
    except Exception as error:  # whatever the hub and transformers say of a name
        why = printable(" ".join(str(error).split()))[:200]
        raise WorkloadError(
            f"the config of {shown(name)} cannot be read from the hub ({type(error).__name__}: "
            f"{why}); check the name and the network, log in with `hf auth login` if the model is "
            "gated, or download its config.json and pass the path"
        ) from None
    return values


def timm_workload(name: str, image_size: int | None) -> Workload:
    """Return the classification of random images with a model of timm, without its weights.

    Raises:
        WorkloadError: timm is not installed or has no such model, or it takes no such image.
    """
    try:
        timm = importlib.import_module("timm")
        known = timm.list_models()
    except Exception as error:  # its torchvision may be one for another torch
        raise WorkloadError(
            f"{shown(name)} is a model of timm, which cannot be imported ({type(error).__name__}: "
            f"{printable(str(error))[:100]}); run: pip install timm"
        ) from None
    own = name.removeprefix(TIMM)
    if own not in known:
        near = difflib.get_close_matches(own[:MAX_SHOWN], known, n=3)
        hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
        raise WorkloadError(
            f"timm {timm.__version__} has no model {shown(own)}{hint}; allowed is one of "
            "timm.list_models()"
        )
    entry = timm.get_pretrained_cfg(own)
    channels, size, _ = entry.input_size
    is_fixed = bool(entry.fixed_input_size)
    return _of_timm(image_size or size, name=own, channels=channels, is_fixed=is_fixed)


def _of_timm(size: int, *, name: str, channels: int, is_fixed: bool) -> Workload:
    sample_size = SampleSize(
        name="image size", unit="pixels", value=size, dimensions=2,
        offered=tuple(sorted({max(1, size // 2), size, 2 * size})),
        make_workload=functools.partial(_of_timm, name=name, channels=channels, is_fixed=is_fixed),
    )  # fmt: skip
    options = {"img_size": size} if is_fixed else {}
    return Workload(
        name=f"{TIMM}{name}, {sample_size}",
        build_model=functools.partial(_timm_model, name, options),
        make_batch=functools.partial(_images, channels, size),
        compute_loss=_cross_entropy,
        sample_size=sample_size,
    )


def _timm_model(name: str, options: Mapping[str, Any]) -> nn.Module:
    create: Callable[..., nn.Module] = zoo_import("timm").create_model
    return create(name, pretrained=False, num_classes=1000, **options)


def _images(channels: int, size: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(n, channels, size, size), torch.randint(1000, (n,))


def _cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
