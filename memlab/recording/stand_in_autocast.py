"""Autocast on the device that stands in for CUDA, with CUDA's lists of operators.

The lists say which operators run in the lower format and which in fp32. A cache casts each weight
only once until autocast ends. Source: AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE and AT_FORALL_PROMOTE of
ATen/autocast_mode.h (torch 2.11 to 2.14). Left out: `binary_cross_entropy`, which raises on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab.torch_private.dispatch import without_key
from memlab.torch_private.operators import has_kernel_for, schema_of
from memlab.torch_private.python_device import registered_name
from memlab.torch_private.tensors import is_view

aten = torch.ops.aten
Kernel = Callable[..., Any]
KEY = "AutocastPrivateUse1"
CUDA_KEY = "AutocastCUDA"  # builds without CUDA have its kernels of autocast too

LOWER = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""
FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
linalg_matrix_sqrth
"""
FP32_BY_DTYPE = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
# overloads of `norm`, and those that take a format for their output
NORMS = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}

_cast_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def register() -> tuple[torch.library.Library, ...]:
    """Register the lists. They are in effect as long as the returned objects are alive."""
    fallthrough = torch.library.Library("_", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, KEY)
    library = torch.library.Library("aten", "IMPL")
    lists = ((LOWER, _lower), (FP32, _fp32), (FP32_BY_DTYPE, _by_dtype), (WIDEST, _widest))
    for names, wrap in lists:
        for name in names.split():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(aten, packet, None), overload or "default", None)
            # an older torch lacks some of them, or casts them on other devices only
            if operator is not None and has_kernel_for(f"aten::{name}", CUDA_KEY):
                library.impl(name, wrap(operator), KEY)
    for name, overload in NORMS.items():
        library.impl(f"norm.{name}", _norm(getattr(aten.norm, overload)), KEY)
    return fallthrough, library


@contextlib.contextmanager
def cache() -> Iterator[None]:
    """Cache the cast of each weight until autocast ends."""
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _cast_weights.clear()
        clear()

    torch.clear_autocast_cache = clear_both
    try:
        yield
    finally:
        _cast_weights.clear()
        torch.clear_autocast_cache = clear


def lower_dtype(device_type: str) -> torch.dtype | None:
    """Return the lower format of autocast; None while autocast is off."""
    is_on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def without_autocast() -> Any:
    """Return a guard under which operators dispatch past autocast."""
    return without_key(KEY)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return floating-point tensors, also in lists, in this format; fp64 stays as it is."""
    if isinstance(value, list | tuple):
        return [cast(item, dtype) for item in value]
    eligible = isinstance(value, torch.Tensor) and value.is_floating_point()
    eligible = eligible and value.device.type == registered_name()
    if not eligible or value.dtype in (dtype, torch.float64):
        return value
    is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf
    if not is_weight or not torch.is_autocast_cache_enabled() or is_view(value):
        return value.to(dtype)
    if id(value) not in _cast_weights:
        _cast_weights[id(value)] = (value, value.to(dtype))
    return _cast_weights[id(value)][1]


def _casting(operator: Any, dtype_of: Callable[[Any], torch.dtype]) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            dtype = dtype_of(args)
            return operator(
                *(cast(a, dtype) for a in args), **{k: cast(v, dtype) for k, v in kwargs.items()}
            )

    return kernel


def _lower(operator: Any) -> Kernel:
    return _casting(operator, lambda _: _lower_dtype())


def _fp32(operator: Any) -> Kernel:
    return _casting(operator, lambda _: torch.float32)


def _widest(operator: Any) -> Kernel:
    def widest(args: Any) -> torch.dtype:
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        wide = any(t.dtype is torch.float32 for t in tensors)
        return torch.float32 if wide else _lower_dtype()

    return _casting(operator, widest)


def _lower_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(registered_name())


def _norm(with_dtype: Any) -> Kernel:
    def kernel(x: torch.Tensor, *args: Any) -> Any:
        is_wide = x.dtype is torch.float64 or not x.is_floating_point()
        with without_autocast():
            return with_dtype(x, *args, dtype=x.dtype if is_wide else torch.float32)

    return kernel


def _by_dtype(operator: Any) -> Kernel:
    names = [a.name for a in schema_of(operator).arguments if not a.kwarg_only]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            narrow = args[0].is_floating_point() and args[0].dtype.itemsize < 4
            given = kwargs.get("dtype")
            if "dtype" in names and len(args) > (at := names.index("dtype")):
                given = args[at]
            if given is None and narrow:
                kwargs["dtype"] = torch.float32
            return operator(*args, **kwargs)

    return kernel
