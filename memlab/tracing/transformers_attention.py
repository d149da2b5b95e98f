"""flash_attn as transformers calls it on a card, on the device that stands in for CUDA.

`attention="flash_attention_2"` needs the package flash_attn, which is built for a card. Inside this
context transformers is told that it is there, and finds functions that run PyTorch's own operator
for the same kernels: flash_attn's `fwd` and `bwd` (csrc/flash_attn/flash_api.cpp), which PyTorch
has a copy of. For backward both save queries, keys, values, the output and one fp32 number a token
and head. What `bwd` allocates inside itself is in `cost_model/cuda_kernels.py`.

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
from types import FunctionType, ModuleType
from typing import Any

import torch

from memlab._util.functions import replaced
from memlab.config import Attention
from memlab.errors import UnsupportedError
from memlab.tracing.attention_kernels import FLASH_HEAD_DIM, HALF, flash
from memlab.tracing.triton_launches import launched

UTILITIES = "transformers.modeling_flash_attention_utils"
MATRIX = "FLASH_ATTENTION_COMPATIBILITY_MATRIX"
AVAILABLE = "is_flash_attn_2_available"


@contextlib.contextmanager
def flash_attn_as_on_card(attention: Attention) -> Iterator[None]:
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


# PyTorch's flex_attention as transformers compiles it for a card, on the device that stands
# in.
#
# `attention="flex_attention"` runs one kernel that torch.compile makes (Triton), for masks
# that are code. While a step is recorded nothing is compiled. Functions here stand for what
# transformers compiles, and allocate what PyTorch's compiled code does, for queries of
# (samples, heads, tokens, size):
#
#     forward    output, as the queries     kept for backward, with queries, keys and values
# logsumexp, fp32            one number a token and head, kept for backward largest scores,
# fp32       as many numbers, free after the kernel logsumexp in base e        as many
# numbers, which transformers casts and drops backward   gradient of the logsumexp  zeros,
# since nothing uses it delta, fp32                one number a token and head gradients of
# all three     heads that share keys add to one gradient of few heads
#
# Autocast casts queries, keys and values before the kernel; the casts are kept instead of
# what was cast. A mask is a `BlockMask`: for each block of 128 x 128 four int32 numbers,
# and never a matrix of tokens x tokens, since the compiled code adds up each block as it
# computes it.
#
# Source, in torch 2.13: `flex_attention` and `flex_attention_backward` in
# _inductor/kernel/flex/flex_attention.py, `FlexAttentionAutogradOp` and the kernels for
# autocast in _higher_order_ops/flex_attention.py, `create_block_mask` in
# nn/attention/flex_attention.py.
#
# Left out: candidates that the first call times; what sorting the blocks of a mask takes on
# the way; the split sums of queries of less than 128 tokens, which PyTorch gives to another
# kernel; the time. Transformers leaves padding out where a mask has any; a prediction takes
# masks to be full.

INTEGRATION, MASKS = "transformers.integrations.flex_attention", "transformers.masking_utils"
COMPILED, MAKES_MASK = "compile_friendly_flex_attention", "create_block_mask"
PYTORCHS = "torch.nn.attention.flex_attention"
LEAST_HEAD_DIM = 16  # "tl.dot does not support embedding size less than 16"
BASE_E = 0.6931471805599453  # the kernel computes in base 2: times log(2)


@contextlib.contextmanager
def flex_attention_as_on_card(attention: str) -> Iterator[None]:
    """Have transformers, if it is there, run what stands for the compiled kernel.

    Raises:
        UnsupportedError: this version of transformers compiles it in another way.
    """
    if attention != "flex_attention" or importlib.util.find_spec("transformers") is None:
        yield
        return

    integration: Any = importlib.import_module(INTEGRATION)
    masks: Any = importlib.import_module(MASKS)
    if not (hasattr(integration, COMPILED) and hasattr(masks, MAKES_MASK)):
        version = importlib.import_module("transformers").__version__
        raise UnsupportedError(
            f"attention='flex_attention' cannot be predicted with transformers {version}, which "
            "compiles it in a way that memlab does not know; measure it on the card, or install "
            "transformers 5.23"
        )
    stand_ins = (
        (integration, COMPILED, _compiled),
        (integration, MAKES_MASK, _block_mask),
        (masks, MAKES_MASK, _block_mask),
    )
    with replaced(stand_ins):
        yield


def _compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    training: bool = False,
    *,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Any = None,
    return_aux: Any = None,
    return_lse: bool = False,
) -> Any:
    """Stand for the compiled `flex_attention`, with the arguments that transformers gives it."""
    least = min(query.size(-1), value.size(-1))
    if least < LEAST_HEAD_DIM:
        raise UnsupportedError(
            f"attention='flex_attention' with heads of {least} numbers: PyTorch's kernel takes "
            f"{LEAST_HEAD_DIM} at least; use attention='sdpa'"
        )
    if any(tensor.requires_grad for tensor in _tensors_in(score_mod)):
        raise UnsupportedError(
            "attention='flex_attention' with a bias of positions that is trained cannot be "
            "predicted: memlab does not know what its gradient takes; use attention='as-built'"
        )
    query, key, value = _cast(query, key, value)
    launched(PYTORCHS, "flex_attention")
    # the mask and a bias are kept as long as the graph is
    kernel: Any = _CompiledFlex
    out, logsumexp = kernel.apply(query, key, value, (score_mod, block_mask))
    if return_aux is not None:
        kind = importlib.import_module(PYTORCHS).AuxOutput
        return out, kind(lse=logsumexp if return_aux.lse else None, max_scores=None)
    return (out, logsumexp) if return_lse else out


def _tensors_in(function: Any) -> list[torch.Tensor]:
    """Return the tensors that a function uses and is not given."""
    cells = (function.__closure__ or ()) if isinstance(function, FunctionType) else ()
    values = []
    for cell in cells:
        with contextlib.suppress(ValueError):  # a cell without a value
            values.append(cell.cell_contents)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _cast(*given: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values as autocast casts them for the kernel."""
    kind = given[0].device.type
    if torch.is_autocast_enabled(kind) and _is_cast_by_autocast():
        return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in given]

    formats = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in given})
    if len(formats) > 1:
        raise UnsupportedError(
            f"attention='flex_attention' with queries, keys and values in {' and '.join(formats)}: "
            "the backward of this PyTorch takes one format; use precision='bf16', or "
            "attention='sdpa'"
        )
    return list(given)


def _is_cast_by_autocast() -> bool:
    """Return whether this PyTorch has a kernel of flex_attention for autocast."""
    importlib.import_module(PYTORCHS)  # it registers the operator
    kernels = torch.ops.higher_order.flex_attention.py_kernels
    return any(str(key).endswith("AutocastCUDA") for key in kernels)


class _CompiledFlex(torch.autograd.Function):
    """The compiled forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, held: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = query.shape[:-1]  # (samples, heads, tokens)
        out = _in_order_of(query, value.size(-1))
        logsumexp, largest = (query.new_empty(numbers, dtype=torch.float32) for _ in range(2))
        del largest
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.held = held
        return out, logsumexp * BASE_E

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, logsumexp = ctx.saved_tensors
        launched(PYTORCHS, "flex_attention_backward")
        delta = torch.empty_like(logsumexp)
        gradients = tuple(_in_order_of(given, given.size(-1)) for given in (query, value, key))
        del delta
        of_query, of_value, of_key = gradients
        return of_query, of_key, of_value, None


def _in_order_of(like: torch.Tensor, size: int) -> torch.Tensor:
    """Return an empty tensor whose dimensions lie in memory in the order of another's.

    (samples, heads, tokens, any) -> (samples, heads, tokens, size), dense
    """
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: -strides[dim])
    shape = (*like.shape[:-1], size)
    dense = like.new_empty([shape[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(like.dim())])


def _block_mask(
    mask_mod: Any,
    B: int | None,  # noqa: N803 (torch's names)
    H: int | None,  # noqa: N803
    Q_LEN: int,  # noqa: N803
    KV_LEN: int,  # noqa: N803
    device: Any = None,
    BLOCK_SIZE: int = 128,  # noqa: N803
    _compile: bool = False,
) -> Any:
    """Stand for the compiled `create_block_mask`: the numbers of blocks, and which they are."""
    rows, columns = -(-Q_LEN // BLOCK_SIZE), -(-KV_LEN // BLOCK_SIZE)
    sizes = (B or 1, H or 1)

    def numbers(*blocks: int) -> torch.Tensor:
        return torch.empty(*sizes, *blocks, dtype=torch.int32, device=device)

    return importlib.import_module(PYTORCHS).BlockMask(
        seq_lengths=(Q_LEN, KV_LEN),
        kv_num_blocks=numbers(rows),
        kv_indices=numbers(rows, columns),
        full_kv_num_blocks=numbers(rows),
        full_kv_indices=numbers(rows, columns),
        q_num_blocks=numbers(columns),
        q_indices=numbers(columns, rows),
        full_q_num_blocks=numbers(columns),
        full_q_indices=numbers(columns, rows),
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=mask_mod,
    )
