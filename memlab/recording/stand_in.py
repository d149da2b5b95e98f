"""A stand-in for CUDA on machines without a card: tensors that dispatch like CUDA tensors.

Fake `cuda` tensors abort a process that has no GPU. So fake tensors are on PyTorch's device for
backends written in Python instead. There dropout uses the fused kernel with a bool mask, and
optimizers use their foreach implementation, as on CUDA. PyTorch chooses some kernels by the name of
the device; these are registered here: functions that CUDA does not take apart
(`cuda_functions.py`), autocast's lists, the kernels of scaled dot-product attention and of softmax,
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

from memlab.devices.card import Card
from memlab.recording import (
    card_answers,
    cuda_functions,
    stand_in_attention,
    stand_in_autocast,
    stand_in_kernels,
    triton_launches,
)
from memlab.recording.streams import StreamEvent, Streams
from memlab.torch_private import python_device
from memlab.torch_private.operators import has_kernel_for

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
    for name in cuda_functions.fused():
        library.impl(name, _without_values, "PrivateUse1")
    library.impl(
        "scaled_dot_product_attention", stand_in_attention.attention, "AutogradPrivateUse1"
    )

    for name in ("softmax", "log_softmax"):
        library.impl(f"{name}.int", stand_in_kernels.softmax(name), "AutogradPrivateUse1")

    for name in stand_in_kernels.MODES:
        kernel = stand_in_kernels.recurrent(name)
        library.impl(f"{name}.input", kernel, "AutogradPrivateUse1")
        library.impl(f"{name}.input", kernel, stand_in_autocast.KEY)
        on_packed = stand_in_kernels.recurrent_on_packed(name)
        library.impl(f"{name}.data", on_packed, "AutogradPrivateUse1")
        library.impl(f"{name}.data", on_packed, stand_in_autocast.KEY)

    library.impl("_cudnn_rnn_backward", stand_in_kernels.recurrent_backward, "Meta")
    if not has_kernel_for("aten::_fused_sgd_", "Meta"):
        library.impl(
            "_fused_sgd_", lambda *_, **__: None, "Meta"
        )  # torch 2.13 has all but this one

    # torch keeps no reference of its own
    _KEPT.extend((*registered, library, *stand_in_autocast.register()))
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
    formats = stand_in_kernels.cudnn_memory_format()

    # a thread of autograd for this device would free the last gradients at a time of its own
    in_one_thread = torch.autograd.set_multithreading_enabled(False)
    as_on_cuda = python_device.fake_kernels_told(_kind)
    with in_one_thread, as_on_cuda, python_device.moved_by_operators():
        kernels = stand_in_attention.kernels_of(capability)
        with stand_in_autocast.cache(), formats, kernels, _errors_of_backward():
            stand_in = device()
            _module.capability, _module.card = capability or NEWEST, card
            try:
                with triton_launches.left_out(NAME, card_answers.Driver(card, stand_in)):
                    yield stand_in
            finally:
                _module.capability, _module.card = NEWEST, None
