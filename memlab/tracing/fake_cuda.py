"""A stand-in for CUDA on machines without a card: tensors that dispatch like CUDA tensors.

Fake `cuda` tensors abort a process that has no GPU. So fake tensors are on PyTorch's device for
backends written in Python instead. There dropout uses the fused kernel with a bool mask, and
optimizers use their foreach implementation, as on CUDA. PyTorch chooses some kernels by the name of
the device; these are registered here: functions that CUDA does not take apart
(`card_answers.py`), autocast's lists, the kernels of scaled dot-product attention and of softmax,
and cuDNN's RNN. Registering affects the whole process and cannot be undone, so a process that
measures on a card must not do it.

Files that use Triton, and a person's own, take it for CUDA (`triton_launches.py`). Left out: what
other files do if `device.type == "cuda"`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memlab._util.torch_private import python_device
from memlab._util.torch_private.python_device import convolutions_stored_as, registered_name
from memlab._util.torch_private.tensors import has_kernel_for, is_view, schema_of, without_key
from memlab.devices.cards import Card
from memlab.tracing import attention_kernels, card_answers, triton_launches
from memlab.tracing.recording import StreamEvent, Streams

# Autocast on the device that stands in for CUDA, with CUDA's lists of operators.
#
# The lists say which operators run in the lower format and which in fp32. A cache casts
# each weight only once until autocast ends. Source: AT_FORALL_LOWER_PRECISION_FP,
# AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE and
# AT_FORALL_PROMOTE of ATen/autocast_mode.h (torch 2.11 to 2.14). Left out:
# `binary_cross_entropy`, which raises on CUDA.

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


# Choose the kernel that CUDA would choose, on the device that stands in for it.
#
# There is such a choice for softmax, RNNs and convolutions; that for attention is in
# `attention_kernels.py`. Left out: the flat buffer for the weights of a cuDNN RNN. Here
# each weight has a block of its own, which differs by rounding only.


def softmax(name: str) -> Callable[..., torch.Tensor]:
    """Return `softmax` or `log_softmax`: CUDA's kernel reads fp16 and writes fp32 by itself.

    Source: `softmax` and `log_softmax` in ATen/native/SoftMax.cpp.
    """
    whole = getattr(aten, f"_{name}")

    def kernel(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        is_widened = x.dtype is torch.float16 and dtype is torch.float32
        given = x if dtype is None or is_widened else x.to(dtype)
        out: torch.Tensor = whole(given, dim, is_widened)
        return out

    return kernel


MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t


def recurrent(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the kernel of a whole RNN: cuDNN's, over all layers and time steps at once."""

    def kernel(
        x: torch.Tensor,
        hx: Any,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        rest = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return _cudnn_rnn(name, x, hx, params, *rest, [])

    return kernel


def _cudnn_rnn(
    name: str,
    x: torch.Tensor,
    hx: Any,
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: list[int],
) -> tuple[torch.Tensor, ...]:
    hidden, cell = hx if name == "lstm" else (hx, None)
    size = (hidden if cell is None else cell).size(2)
    projected = hidden.size(2) if hidden.size(2) != size else 0
    stride = (4 if has_biases else 2) + (1 if projected else 0)
    dtype = lower_dtype(x.device.type)

    with without_autocast():
        given = (x, params, hidden, cell)
        x, weights, hx, cx = given if dtype is None else [cast(v, dtype) for v in given]
        no_buffer = torch.empty(0, dtype=x.dtype, device=x.device)
        out, hy, cy, _, _ = aten._cudnn_rnn(
            x, weights, stride, no_buffer, hx, cx, MODES[name], size, projected, num_layers,
            batch_first, dropout, train, bidirectional, batch_sizes, None,
        )  # fmt: skip
    return (out, hy) if cell is None else (out, hy, cy)


def recurrent_on_packed(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return cuDNN's kernel of a whole RNN over packed sequences, (elements, features)."""

    def kernel(
        x: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:
        rest = (has_biases, num_layers, dropout, train, bidirectional, False)
        return _cudnn_rnn(name, x, hx, params, *rest, batch_sizes.tolist())

    return kernel


def recurrent_backward(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the gradients of cuDNN's RNN, for which PyTorch has no fake implementation.

    Source: `_cudnn_rnn_backward` in ATen/native/cudnn/RNN.cpp, where the gradients of the weights
    are views of one buffer; here each has its own.
    """
    grad_cx = torch.empty_like(hx if cx is None else cx)
    return torch.empty_like(x), torch.empty_like(hx), grad_cx, [
        torch.empty_like(w) for w in weight
    ]  # fmt: skip


@contextlib.contextmanager
def cudnn_memory_format() -> Iterator[None]:
    """Let convolutions return channels-last where cuDNN would.

    It does so if the input or the weight is channels-last. Source:
    `cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h.
    """

    def suggested(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
        if form is None or x.dtype is torch.float64:
            return torch.contiguous_format
        is_last = any(_is_stored_as(t, form) for t in (x, weight))
        return form if is_last else torch.contiguous_format

    with convolutions_stored_as(suggested):
        yield


def _is_stored_as(tensor: torch.Tensor, form: torch.memory_format) -> bool:
    """Return `suggest_memory_format() == form`; a tensor in both formats counts as contiguous."""
    return tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()


NAME = "cudalike"
NEWEST = (9, 0)  # the compute capability of a card that has every kernel
STATE = torch.zeros(16, dtype=torch.uint8)  # of the generator, Philox: seed and offset


class _Module:
    """The functions that torch expects of a device's module.

    Attributes:
        streams: of the recording that goes on.
        capability: of the card that it is recorded for.
        card: this card; None if it is not known.
    """

    def __init__(self) -> None:
        self.streams = Streams()
        self.capability = NEWEST
        self.card: Card | None = None

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Draw nothing: no value is ever computed."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return STATE

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Draw nothing: no value is ever computed."""

    def __getattr__(self, name: str) -> Any:
        raise card_answers.not_known(f"torch.cuda.{name}")

    def empty_cache(self) -> None:
        """Give nothing back: the allocator is replayed afterwards."""

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.capability

    def get_device_properties(self, device: Any = None) -> card_answers.Properties:
        return card_answers.properties(self.card)

    def get_device_name(self, device: Any = None) -> str:
        return card_answers.properties(self.card).name

    def is_bf16_supported(self, *_: Any, **__: Any) -> bool:
        return self.capability >= (8, 0)

    def memory_allocated(self, device: Any = None) -> int:
        """Return nothing of what the step holds: it is only counted afterwards."""
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def set_device(self, device: Any) -> None:
        """Stay on the only card."""

    ipc_collect = reset_peak_memory_stats = manual_seed = set_device

    @property
    def amp(self) -> Any:
        return SimpleNamespace(
            autocast=functools.partial(torch.autocast, NAME),
            GradScaler=functools.partial(torch.amp.GradScaler, NAME),
        )

    def synchronize(self, device: Any = None) -> None:
        """Wait for nothing: no kernel runs."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def device(self, device: Any = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def Stream(self, *_: Any, **__: Any) -> Any:  # noqa: N802 (torch's name)
        return self.streams.made()

    def Event(self, *_: Any, **__: Any) -> StreamEvent:  # noqa: N802 (torch's name)
        return StreamEvent(self.streams)

    def current_stream(self, device: Any = None) -> Any:
        return self.streams.current

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return self.streams.using(stream)


_module = _Module()


@contextlib.contextmanager
def issued_on(streams: Streams) -> Iterator[None]:
    """Use these streams as those of the device."""
    before, _module.streams = _module.streams, streams
    try:
        yield
    finally:
        _module.streams = before


class _Guard(python_device.DeviceGuard):
    """Answers autograd's question about the current device, also while an error ends a backward.

    An error that Python code raises in backward is then still pending in the interpreter. Because
    of it, C++ code that must not fail would reject Python's answer and abort the process
    (`PythonDeviceGuard::exchangeStream` of torch/csrc/acc/Module.cpp, torch 2.13). So the error is
    taken and kept here, and `_errors_of_backward` raises it once the backward has ended.
    """

    def type_(self) -> Any:
        try:
            _raise_pending()
        except BaseException as error:
            _taken.append(error)
        return python_device.DEVICE_TYPE


_taken: list[BaseException] = []
# after a call of any C function of Python, ctypes raises an error that is pending
_raise_pending = ctypes.pythonapi.PyErr_Occurred


@contextlib.contextmanager
def _errors_of_backward() -> Iterator[None]:
    """Raise the error taken from a backward, which itself ends with an empty SystemError."""
    _taken.clear()
    try:
        yield
    except SystemError as error:
        if not _taken:
            raise
        raise _taken[-1] from error
    finally:
        _taken.clear()  # it holds the frames of a whole run


def _without_values(*_: Any, **__: Any) -> None:
    """Stand for a kernel of CUDA: fake tensors get their shapes from PyTorch's fake kernels."""
    raise NotImplementedError("the device that stands in for CUDA has no values to compute with")


@functools.cache
def device() -> torch.device:
    """Return the device that stands in for CUDA, registered at the first call."""
    registered = (_module, python_device.Hook(), _Guard())
    python_device.register(NAME, *registered)
    library = torch.library.Library("aten", "IMPL")
    for name in card_answers.fused():
        library.impl(name, _without_values, "PrivateUse1")
    library.impl("scaled_dot_product_attention", attention_kernels.attention, "AutogradPrivateUse1")

    for name in ("softmax", "log_softmax"):
        library.impl(f"{name}.int", softmax(name), "AutogradPrivateUse1")

    for name in MODES:
        kernel = recurrent(name)
        library.impl(f"{name}.input", kernel, "AutogradPrivateUse1")
        library.impl(f"{name}.input", kernel, KEY)
        on_packed = recurrent_on_packed(name)
        library.impl(f"{name}.data", on_packed, "AutogradPrivateUse1")
        library.impl(f"{name}.data", on_packed, KEY)

    library.impl("_cudnn_rnn_backward", recurrent_backward, "Meta")
    if not has_kernel_for("aten::_fused_sgd_", "Meta"):
        library.impl(
            "_fused_sgd_", lambda *_, **__: None, "Meta"
        )  # torch 2.13 has all but this one

    # torch keeps no reference of its own
    _KEPT.extend((*registered, library, *register()))
    return torch.device(NAME, 0)


_KEPT: list[Any] = []


def _kind(own: Callable[[Any], str], tensor: Any) -> str:
    """Return "cuda" for tensors of this device, by which fake kernels choose sizes and strides."""
    kind = own(tensor)
    return "cuda" if kind == NAME else kind


@contextlib.contextmanager
def as_cuda(
    capability: tuple[int, int] | None = None, card: Card | None = None
) -> Iterator[torch.device]:
    """Yield the device, and make torch behave as on CUDA while a run is recorded on it.

    Args:
        capability: compute capability of the card; None for a card that has every kernel.
        card: what code that asks for the card's processors is told of; None to refuse it.
    """
    formats = cudnn_memory_format()

    # a thread of autograd for this device would free the last gradients at a time of its own
    in_one_thread = torch.autograd.set_multithreading_enabled(False)
    as_on_cuda = python_device.fake_kernels_told(_kind)
    with in_one_thread, as_on_cuda, python_device.moved_by_operators():
        kernels = attention_kernels.kernels_of(capability)
        with cache(), formats, kernels, _errors_of_backward():
            stand_in = device()
            _module.capability, _module.card = capability or NEWEST, card
            try:
                with triton_launches.left_out(NAME, card_answers.Driver(card, stand_in)):
                    yield stand_in
            finally:
                _module.capability, _module.card = NEWEST, None
