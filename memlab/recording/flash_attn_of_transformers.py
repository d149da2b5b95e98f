"""flash_attn as transformers calls it on a card, on the device that stands in for CUDA.

`attention="flash_attention_2"` needs the package flash_attn, which is built for a card. Inside this
context transformers is told that it is there, and finds functions that run PyTorch's own operator
for the same kernels: flash_attn's `fwd` and `bwd` (csrc/flash_attn/flash_api.cpp), which PyTorch
has a copy of. For backward both save queries, keys, values, the output and one fp32 number a token
and head. What `bwd` allocates inside itself is in `costs/cuda_kernels.py`.

Transformers leaves padding out where a mask has any; a prediction takes masks to be full. Packed
sequences are taken to have one length, which changes no memory. Left out: windows and soft caps,
which change the time only, and `FLASH_ATTENTION_DETERMINISTIC`, which takes more.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from memlab.config import Attention
from memlab.errors import UnsupportedError
from memlab.recording.stand_in_attention import FLASH_HEAD_DIM, HALF, flash

UTILITIES = "transformers.modeling_flash_attention_utils"
MATRIX = "FLASH_ATTENTION_COMPATIBILITY_MATRIX"
AVAILABLE = "is_flash_attn_2_available"


@contextlib.contextmanager
def as_on_card(attention: Attention) -> Iterator[None]:
    """Have transformers, if it is there, find flash_attn.

    Raises:
        UnsupportedError: this version of transformers looks for it in another way.
    """
    wanted = attention is Attention.FLASH_ATTENTION_2
    if not wanted or importlib.util.find_spec("transformers") is None:
        yield
        return

    utilities: Any = importlib.import_module(UTILITIES)
    if not (hasattr(utilities, MATRIX) and hasattr(utilities, AVAILABLE)):
        version = importlib.import_module("transformers").__version__
        raise UnsupportedError(
            f"attention='flash_attention_2' cannot be predicted with transformers {version}, which "
            "loads flash_attn in a way that memlab does not know; measure it on the card, or "
            "install transformers 5.23"
        )
    entry = getattr(utilities, MATRIX)[2]
    usual, usual_entry = vars(utilities).copy(), entry.copy()
    modules = {name: sys.modules.get(name) for name in ("flash_attn", "flash_attn.bert_padding")}
    there = {
        "general_availability_check": _is_there,
        "supported_devices": ((_is_there, "cuda"),),
        "custom_supported_devices": (),
    }
    entry.update(there)
    setattr(utilities, AVAILABLE, _is_there)
    utilities._loaded_implementation = None
    sys.modules.update(_stand_ins(utilities))
    try:
        yield
    finally:
        entry.clear()
        entry.update(usual_entry)
        vars(utilities).update(usual)
        for name, module in modules.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _is_there(*_: Any, **__: Any) -> bool:
    return True


def _stand_ins(utilities: Any) -> dict[str, ModuleType]:
    """Return the modules that transformers imports, with padding by functions of its own."""
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.__spec__ = ModuleSpec("flash_attn", None, is_package=True)
    padding.__spec__ = ModuleSpec("flash_attn.bert_padding", None)
    functions = {
        "flash_attn_func": _of_samples,
        "flash_attn_varlen_func": _of_packed,
        "flash_attn_with_kvcache": _of_packed,
    }
    vars(package).update(functions)
    vars(padding).update(pad_input=utilities._pad_input, unpad_input=utilities._unpad_input)
    return {"flash_attn": package, "flash_attn.bert_padding": padding}


def _of_samples(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Stand for `flash_attn_func`: (samples, tokens, heads, size) -> the same."""
    for tensor in (q, k, v):
        if tensor.dtype not in HALF:
            name = str(tensor.dtype).removeprefix("torch.")
            raise UnsupportedError(
                f"attention='flash_attention_2' with queries and keys in {name}: flash_attn "
                "computes in fp16 and bf16 only; use precision='bf16-mixed', or attention='sdpa'"
            )
    if q.size(-1) > FLASH_HEAD_DIM:
        raise UnsupportedError(
            f"attention='flash_attention_2' with heads of {q.size(-1)} numbers: flash_attn takes "
            f"{FLASH_HEAD_DIM} at most; use attention='sdpa'"
        )
    given = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v)]
    query, key, value = (tensor.transpose(1, 2) for tensor in given)
    return flash(query, key, value, dropout_p, causal, softmax_scale).transpose(1, 2)


def _of_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Stand for `flash_attn_varlen_func`: (tokens, heads, size) -> the same."""
    count = cu_seqlens_q.numel() - 1
    samples = count if q.size(0) % count == 0 == k.size(0) % count else 1
    query, key, value = (t.unflatten(0, (samples, t.size(0) // samples)) for t in (q, k, v))
    return _of_samples(query, key, value, dropout_p, softmax_scale, causal).flatten(0, 1)
