"""transformers: every class of its auto mappings, with its default configuration made small.

Left out: mappings whose inputs a rule cannot make (boxes, questions about pictures, time series).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe
from benchmarks.wild_models.shrinking import shrunk

torchvision_operators.declare()

LENGTH, IMAGE, SAMPLES, FRAMES = 16, 64, 6400, 64
FIRST_TOKEN, LAST_TOKEN = 5, 95  # below the special tokens of a small vocabulary

Inputs = Callable[[Any, type[nn.Module], int], dict[str, torch.Tensor]]


def names() -> list[str]:
    """Return "TASK/model type/class" of every class that a task's mapping names."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in TASKS:
        for model_type, classes in getattr(modeling_auto, f"MODEL_{task}_NAMES").items():
            for name in [classes] if isinstance(classes, str) else classes:
                found.setdefault(name, f"{task}/{model_type}/{name}")
    return list(found.values())


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it with everything shrunk, with only depth and vocabulary shrunk, and less deep."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    task, model_type, class_name = name.split("/")
    model_class = getattr(transformers, class_name)
    config_class = getattr(model_class, "config_class", None) or CONFIG_MAPPING[model_type]
    for level in range(3):
        config = shrunk(config_class, level)
        yield Recipe(
            build=partial(model_class, config),
            batch=partial(TASKS[task], config, model_class),
        )


def _text(config: Any, _: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (n, LENGTH))
    end = _find(config, "eos_token_id")
    if isinstance(end, int):
        ids[:, -1] = end  # some heads read the last token of a text
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _language(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    inputs = _text(config, model, n)
    return inputs | {"labels": inputs["input_ids"].clone()}


def _text_classes(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    return _text(config, model, n) | {"labels": torch.randint(2, (n,))}


def _tokens(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    return _text(config, model, n) | {"labels": torch.randint(2, (n, LENGTH))}


def _answers(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    places = {f"{end}_positions": torch.randint(LENGTH, (n,)) for end in ("start", "end")}
    return _text(config, model, n) | places


def _image(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    size = _find(config, "image_size") or IMAGE
    height, width = (size, size) if isinstance(size, int) else size
    channels = _find(config, "num_channels") or 3
    return {"pixel_values": torch.randn(n, channels, height, width)}


def _image_classes(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    return _image(config, model, n) | {"labels": torch.randint(2, (n,))}


def _pixels(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    inputs = _image(config, model, n)
    return inputs | {"labels": torch.randint(2, (n, *inputs["pixel_values"].shape[-2:]))}


def _image_and_text(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    return _text(config, model, n) | _image(config, model, n)


def _video(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    pixels = _image(config, model, n)["pixel_values"]
    frames = _find(config, "num_frames") or 4
    return {
        "pixel_values": pixels.unsqueeze(1).repeat(1, frames, 1, 1, 1),
        "labels": torch.randint(2, (n,)),
    }


def _audio(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    name = model.main_input_name
    if name == "input_values" and not hasattr(config, "num_mel_bins"):
        return {name: torch.randn(n, SAMPLES)}
    features = _find(config, "num_mel_bins") or _find(config, "input_feat_per_channel") or 80
    positions = _find(config, "max_source_positions")
    if positions:
        return {name: torch.randn(n, features, 2 * positions)}
    frames = _find(config, "max_length") or FRAMES
    return {name: torch.randn(n, frames, features)}


def _audio_classes(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    return _audio(config, model, n) | {"labels": torch.randint(2, (n,))}


def _audio_text(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    return _audio(config, model, n) | {"labels": torch.randint(FIRST_TOKEN, LAST_TOKEN, (n, 4))}


def _any(config: Any, model: type[nn.Module], n: int) -> dict[str, torch.Tensor]:
    name = getattr(model, "main_input_name", "input_ids")
    by_name: dict[str, Inputs] = {
        "pixel_values": _image, "input_values": _audio, "input_features": _audio,
    }  # fmt: skip
    return by_name.get(name, _text)(config, model, n)


def _find(config: Any, name: str) -> Any:
    """Return a setting of the configuration, or of one that it holds."""
    if getattr(config, name, None) is not None:
        return getattr(config, name)
    for part in vars(config).values():
        if hasattr(part, "to_dict"):
            found = _find(part, name)
            if found is not None:
                return found
    return None


TASKS: dict[str, Inputs] = {
    "FOR_CAUSAL_LM_MAPPING": _language,
    "FOR_MASKED_LM_MAPPING": _language,
    "FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": _language,
    "FOR_SEQUENCE_CLASSIFICATION_MAPPING": _text_classes,
    "FOR_TOKEN_CLASSIFICATION_MAPPING": _tokens,
    "FOR_QUESTION_ANSWERING_MAPPING": _answers,
    "FOR_IMAGE_CLASSIFICATION_MAPPING": _image_classes,
    "FOR_SEMANTIC_SEGMENTATION_MAPPING": _pixels,
    "FOR_DEPTH_ESTIMATION_MAPPING": _image,
    "FOR_OBJECT_DETECTION_MAPPING": _image,
    "FOR_MASKED_IMAGE_MODELING_MAPPING": _image,
    "FOR_VIDEO_CLASSIFICATION_MAPPING": _video,
    "FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING": _image_and_text,
    "FOR_AUDIO_CLASSIFICATION_MAPPING": _audio_classes,
    "FOR_CTC_MAPPING": _audio_text,
    "FOR_SPEECH_SEQ_2_SEQ_MAPPING": _audio_text,
    "MAPPING": _any,
}
