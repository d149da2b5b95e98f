"""The language models that `finetune` knows by name: the sizes in their published configs."""

from collections.abc import Mapping
from typing import Any

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
