"""peft: every method over small language models, whose base is fp32 or bf16."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe, arguments
from benchmarks.wild_models.shrinking import shrunk

torchvision_operators.declare()

LENGTH, FIRST, LAST = 16, 5, 95
BASES = {
    "gpt2": ("GPT2LMHeadModel", "CAUSAL_LM"),
    "llama": ("LlamaForCausalLM", "CAUSAL_LM"),
    "opt": ("OPTForCausalLM", "CAUSAL_LM"),
    "bert": ("BertForSequenceClassification", "SEQ_CLS"),
    "t5": ("T5ForConditionalGeneration", "SEQ_2_SEQ_LM"),
}


def names() -> list[str]:
    """Return "method/base model/number format of the base"."""
    import peft

    return [
        f"{method.value}/{base}/{dtype}"
        for method in peft.PEFT_TYPE_TO_CONFIG_MAPPING
        for base in BASES
        for dtype in ("float32", "bfloat16")
    ]


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it with its default targets, and with all linear layers."""
    method, base, dtype = name.split("/")
    for targets in ({}, {"target_modules": "all-linear"}):
        build = partial(_build, method, base, getattr(torch, dtype), targets)
        yield Recipe(build=build, batch=partial(_batch, base))


def _build(method: str, base: str, dtype: torch.dtype, targets: dict[str, Any]) -> nn.Module:
    import peft
    import transformers

    class_name, task = BASES[base]
    model_class = getattr(transformers, class_name)
    model = model_class(shrunk(model_class.config_class, 0)).to(dtype)
    config_class = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(method)]
    rules = {
        "task_type": task, "r": 4, "num_virtual_tokens": 4, "total_step": 10, "adapter_len": 4,
        "adapter_layers": 1, "num_transformer_submodules": None, "encoder_hidden_size": 32,
        "token_indices": [7, 8], "cpt_token_ids": [7, 8, 9], "cpt_mask": [1, 1, 1],
        "cpt_tokens_type_mask": [1, 2, 3], "oft_block_size": 8, "boft_block_size": 4,
    }  # fmt: skip
    return peft.get_peft_model(model, config_class(**arguments(config_class, rules), **targets))


def _batch(base: str, n: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(FIRST, LAST, (n, LENGTH))
    labels = torch.randint(2, (n,)) if base == "bert" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
