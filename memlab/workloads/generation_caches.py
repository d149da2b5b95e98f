"""What a causal language model of transformers needs to generate: a cache, and room for tokens."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from memlab.errors import UnsupportedError

CACHE_ARGUMENTS = ("past_key_values", "cache")  # the second one since transformers 5.24


def generating_model(model: nn.Module) -> Any:
    """Return the model of transformers whose forward generates, without what peft put around it.

    Raises:
        UnsupportedError: the model cannot generate with a cache; the message says why.
    """
    adapted = getattr(model, "active_peft_config", None)
    if getattr(adapted, "is_prompt_learning", False):
        raise UnsupportedError(
            "generate: prefix and prompt tuning add virtual tokens to each prompt, which is not "
            "implemented; use adapter='lora', or leave generate out"
        )
    base: Any = model
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    name = type(model).__name__
    if not callable(getattr(base, "generate", None)) or not hasattr(base, "config"):
        raise UnsupportedError(
            f"generate: {name} has no method generate(); use a causal language model of "
            "transformers, such as memlab.workloads.get('gpt-small'), or leave generate out"
        )
    if getattr(base.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"generate: {name} has an encoder and a decoder, whose two caches are not implemented; "
            "use a causal language model, or leave generate out"
        )
    if cache_argument(base) is None:
        raise UnsupportedError(
            f"generate: {name} takes no cache of keys and values ({' or '.join(CACHE_ARGUMENTS)}); "
            "use a model with attention in all layers, or leave generate out"
        )
    return base


def cache_argument(base: Any) -> str | None:
    """Return the argument of a model's forward that takes the cache, None if there is none."""
    accepted = inspect.signature(base.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in accepted), None)


def check_positions(base: Any, num_tokens: int) -> None:
    """Raise UnsupportedError if a model has fewer positions than tokens are asked for."""
    config = base.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and num_tokens > most:
        raise UnsupportedError(
            f"generate: prompt_tokens + new_tokens = {num_tokens}, and {type(base).__name__} has "
            f"{most} positions; allowed are at most {most} tokens together"
        )


def check_window(base: Any, prompt_tokens: int, num_tokens: int) -> None:
    """Raise UnsupportedError if layers stop to grow in the middle of a generation.

    Layers with a sliding window keep no more than that, so later tokens do not follow from the
    first ones.
    """
    config = base.config.get_text_config(decoder=True)
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or getattr(
        config, "attention_chunk_size", None
    )
    is_whole = layers is not None and all(kind == "full_attention" for kind in layers)
    if window and not is_whole and prompt_tokens < window <= num_tokens:
        raise UnsupportedError(
            f"generate: layers of {type(base).__name__} have a sliding window of {window} tokens, "
            f"which a prompt of {prompt_tokens} fills in the middle of the generation; use "
            f"prompt_tokens={window} or more, fewer new_tokens, or memlab.measure_run"
        )


def key_value_cache(base: Any, kind: str, num_tokens: int, precision: str) -> Any:
    """Return an empty cache as `generate` makes it, "dynamic" or "static".

    Args:
        base: the model.
        kind: of the cache.
        num_tokens: of a prompt and its continuation.
        precision: of the step, for a message.
    """
    from transformers import DynamicCache, StaticCache  # seconds, and only then needed

    class OneFormatCache(StaticCache):
        """A static cache that says what it cannot hold; fake tensors would not fail."""

        def update(
            self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            """Write keys and values of a layer."""
            _check_formats(key_states, value_states, precision)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    config = base.config.get_text_config(decoder=True)
    if kind == "static":
        return OneFormatCache(config=config, max_cache_len=num_tokens)
    return DynamicCache(config=config)


def _check_formats(keys: Any, values: Any, precision: str) -> None:
    """Raise UnsupportedError if keys and values have not one format.

    Under autocast rotary embeddings make keys in fp32, and values stay in 16 bits. A static cache
    makes both rooms in the format of the keys, and `index_copy_` refuses another.
    """
    if keys.dtype == values.dtype:
        return
    formats = [str(each.dtype).removeprefix("torch.") for each in (keys, values)]
    raise UnsupportedError(
        f"generate: with precision={precision!r} this model makes keys in {formats[0]} and values "
        f"in {formats[1]}, and a static cache takes one format; use cache='dynamic', or a "
        "precision without autocast, such as 'bf16'"
    )
