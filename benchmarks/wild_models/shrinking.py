"""A configuration of transformers made small by what its settings are called.

Level 0 shrinks depth, widths, heads, vocabulary, experts and images; level 1 leaves the widths and
heads; level 2 only makes the model less deep.
"""

import re
from typing import Any

WIDTH, HEADS, VOCABULARY, IMAGE, EXPERTS = 64, 2, 128, 64, 4
DEPTH = re.compile(r"(num_|n_)?(\w+_)?(layers?|depth|blocks)$|num_\w*layers\w*$")
HEAD_COUNT = re.compile(r"(num|n)_?(\w+_)?heads?$|\w*_attention_heads$")
HEAD_WIDTH = re.compile(r"\w+_head_dim$|\w*_rank$")
WIDTHS = re.compile(r"\w*(hidden_size|_dim|d_model|n_embd|embed_dim|ffn_dim|intermediate_size"
                    r"|d_ff|n_inner|d_inner|embedding_size|projection_size)$|dim$")  # fmt: skip
NO_WIDTH = re.compile(r"(image|patch|window|kernel|rotary|pos|time|state|conv)")
WIDTH_LIST = re.compile(r"\w*(sizes|dims|dim|channels)$")
NO_LIST = re.compile(r"(patch|image|window|kernel|stride|conv|feature|out_)")


def shrunk(config_class: Any, level: int) -> Any:
    """Return a small configuration of this class."""
    return config_class(**_settings(config_class().to_dict(), level))


def _settings(settings: dict[str, Any], level: int) -> dict[str, Any]:
    """Return the settings with small values; parts that are configurations are shrunk alone."""
    width = next((settings[k] for k in ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
                  if isinstance(settings.get(k), int)), WIDTH)  # fmt: skip
    shared = max(1, width // WIDTH)  # one divisor, so that what must be equal stays equal
    depths = {v for k, v in settings.items() if isinstance(v, int) and DEPTH.match(k)}

    small = {}
    for key, value in settings.items():
        if key in ("model_type", "transformers_version", "architectures", "dtype"):
            continue
        if isinstance(value, dict) and "model_type" in value:
            small[key] = _settings(value, level) | {"model_type": value["model_type"]}
        elif isinstance(value, bool) or value is None:
            small[key] = value
        elif isinstance(value, int):
            small[key] = _number(key, value, level, shared, settings)
        elif isinstance(value, list) and value:
            small[key] = _list(key, value, level, depths)
        else:
            small[key] = value
    return small


def _number(key: str, value: int, level: int, shared: int, settings: dict[str, Any]) -> int:
    if DEPTH.match(key):
        return min(value, 2)
    if level == 2:
        return value

    if key.endswith("vocab_size"):
        return min(value, VOCABULARY)
    if key.endswith("_token_id") or key.endswith("_token_index"):
        return min(value, VOCABULARY - 1)
    if key == "image_size":
        return min(value, IMAGE)
    if key in ("max_source_positions", "max_length"):
        return min(value, 64)
    if "position" in key and value > 512:
        return 512
    if "expert" in key and "size" not in key:
        return min(value, 2 if "per" in key else EXPERTS)
    if key in ("n_group", "topk_group", "num_expert_group"):
        return 1
    if level == 1:
        return value

    if HEAD_COUNT.match(key):
        if "key_value" in key or "kv" in key:
            heads = settings.get("num_attention_heads", value)
            return HEADS if not isinstance(heads, int) or value >= heads else 1
        return min(value, HEADS)
    if key == "head_dim":
        return WIDTH // HEADS
    if HEAD_WIDTH.match(key):
        return min(value, 16)
    if WIDTHS.match(key) and not NO_WIDTH.match(key) and value >= WIDTH:
        return max(8, value // shared // 8 * 8)
    return value


def _list(key: str, value: list[Any], level: int, depths: set[int]) -> list[Any]:
    numbers = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    if numbers and key in ("depths", "layers", "num_blocks", "layer_depths"):
        return [min(item, 2 if index == 0 else 1) for index, item in enumerate(value)]
    if len(value) in depths and len(value) > 2:
        return value[:2]  # one entry a layer
    if level == 2:
        return value
    if numbers and key == "image_size":
        return [min(item, IMAGE) for item in value]
    if numbers and key.endswith("_token_id"):
        return [min(item, VOCABULARY - 1) for item in value]
    if level == 0 and numbers and WIDTH_LIST.match(key) and not NO_LIST.search(key):
        return [max(8, item // 4 // 8 * 8) if item >= 32 else item for item in value]
    return value
