"""The card that a person's script finds: `torch.cuda`, and the word "cuda", over fake tensors.

A script says "cuda" wherever it means its card, and asks `torch.cuda` about it. Tensors of the card
that is not there lie on another device (`fake_cuda.py`). So the word is translated where it passes
between the script and PyTorch, in both directions:

    script                                PyTorch
    torch.zeros(4, device="cuda")         device is the stand-in: `_Named` sees every function
    x.device, x.is_cuda                   "cuda:0", True: unless code of torch itself asks
    torch.autocast("cuda")                that of the stand-in
    torch.cuda.memory_allocated()         `LiveAllocator`, which serves each tensor as it is made

Code of torch itself, such as its optimizers, asks for `device` too, and gets the stand-in's name.
Left out: graphs of CUDA are refused.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memlab._util.functions import replaced
from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import DRIVER_VERSION, ENGINE, RAW_STREAM, FakeTensor
from memlab._util.units import format_bytes
from memlab.devices.cards import Card
from memlab.memory.replay import BLOCK_BYTES, Allocator, AllocatorSettings
from memlab.tracing import card_answers
from memlab.tracing.fake_cuda import NAME, NEWEST
from memlab.tracing.recording import StreamEvent, Streams

CUDA = re.compile(r"cuda(:\d+)?")
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {capacity} of "
    "which {free} is free. Including non-PyTorch memory, this process has {used} memory in use. Of "
    "the allocated memory {allocated} is allocated by PyTorch, and {unallocated} is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
    "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)  # as c10/cuda/CUDACachingAllocator.cpp has it in torch 2.11 to 2.13


class LiveAllocator:
    """The caching allocator of the card, which serves a run as it goes on.

    Workspaces of kernels are not served: they are known once the run has ended.

    Args:
        capacity: bytes that it may reserve; None for no limit.
        expandable_segments: as in `AllocatorSettings`.
    """

    def __init__(self, capacity: int | None, *, expandable_segments: bool = False) -> None:
        self.capacity, self._is_expandable = capacity, expandable_segments
        self.restart()

    def restart(self) -> None:
        """Begin again without any block."""
        self._allocator = Allocator(
            AllocatorSettings(expandable_segments=self._is_expandable, limit_bytes=self.capacity)
        )
        self.allocated = self.peak_allocated = self.peak_reserved = 0

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return self._allocator.reserved * BLOCK_BYTES

    def take(self, block: int, nbytes: int, stream: int) -> None:
        """Serve a block.

        Raises:
            OutOfMemoryError: with the words of PyTorch.
        """
        if not nbytes:
            return
        held = self._allocator.take(block, nbytes, stream)
        if held is None:
            raise torch.OutOfMemoryError(self._words(nbytes))
        self.allocated += held
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, block: int) -> None:
        """Take a block back; one that was never served is none."""
        self.allocated -= self._allocator.free(block)

    def empty_cache(self) -> None:
        """Give back what is cached."""
        self._allocator.flush()

    def restrict(self, fraction: float) -> None:
        """Reserve at most a part of the capacity from now on."""
        if self.capacity is not None:
            self._allocator.restrict(int(fraction * self.capacity))

    def reset_peaks(self) -> None:
        """Look for peaks from now on."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _words(self, asked: int) -> str:
        capacity = self.capacity or 0
        return OUT_OF_MEMORY.format(
            asked=format_bytes(asked),
            capacity=format_bytes(capacity),
            free=format_bytes(max(capacity - self.reserved, 0)),
            used=format_bytes(self.reserved),
            allocated=format_bytes(self.allocated),
            unallocated=format_bytes(self.reserved - self.allocated),
        )


class _Named(TorchFunctionMode):
    """Translates the word "cuda" in what a script gives to PyTorch, and asks of tensors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        own: Any = torch.Tensor
        self._answers: dict[Any, Callable[..., Any]] = {
            own.is_cuda.__get__: self._is_on_card,
            own.type: self._typed,
            own.pin_memory: lambda x, device=None: x,
            own.is_pinned: lambda x, device=None: x.device.type == "cpu",
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = tuple(map(self.translated, args))
        kwargs = {name: self.translated(value) for name, value in (kwargs or {}).items()}
        return self._answers.get(func, func)(*args, **kwargs)

    def translated(self, value: Any) -> Any:
        """Return the stand-in for the word or the device "cuda", and anything else as it is."""
        is_word = isinstance(value, str) and value.startswith("cuda") and CUDA.fullmatch(value)
        is_device = isinstance(value, torch.device) and value.type == "cuda"
        return self.device if is_word or is_device else value

    def _is_on_card(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type

    def made_by_default(self, own: Callable[[Any], None], kind: Any) -> None:
        """Do what `set_default_tensor_type` does: a type of the card also says where tensors lie.

        The old constructor `torch.Tensor(...)` sees no mode.
        """
        kind = _old_type(kind)
        if not isinstance(kind, _OldType):
            if "__new__" in vars(torch.Tensor):
                self.end()
            own(kind)
            return
        torch.set_default_dtype(kind.on_host.dtype)
        torch.set_default_device("cuda")
        tensor: Any = torch.Tensor
        if "__new__" not in vars(tensor):
            construct = tensor.__new__

            def new(cls: type, *given: Any, **named: Any) -> Any:
                made = construct(cls, *given, **named)
                return made.to(self.device) if cls is tensor else made

            tensor.__new__ = staticmethod(new)

    def end(self) -> None:
        """Put back where tensors lie of which no device is said."""
        torch.set_default_device(None)
        if "__new__" in vars(torch.Tensor):
            del torch.Tensor.__new__

    def _typed(self, tensor: Any, dtype: Any = None, *more: Any, **options: Any) -> Any:
        """Return a tensor of a type, or the name of its own, as before PyTorch had devices."""
        dtype = _old_type(dtype)
        if isinstance(dtype, _OldType):
            return tensor.to(self.device, dtype.on_host.dtype)
        found = tensor.type(dtype, *more, **options)
        return found.replace(f"torch.{NAME}.", "torch.cuda.") if dtype is None else found


@contextlib.contextmanager
def found_by_script(
    device: torch.device, card: Card | None, allocator: LiveAllocator, streams: Streams
) -> Iterator[None]:
    """Let code outside of torch find a card under the name "cuda", inside this context.

    Args:
        device: that stands in for it, which may be the host.
        card: whose properties `torch.cuda` tells; None for one that is not known.
        allocator: whose numbers it tells.
        streams: of the recording.
    """
    named = _Named(device)
    with contextlib.ExitStack() as stack:
        stack.callback(named.end)
        stack.enter_context(replaced(_replaced(named, card, allocator, streams)))
        stack.enter_context(named)
        yield


# what the wheel of torch 2.9 for CUDA 12.8 brings; scripts only ask whether it is new enough
CUDA_VERSION, CUDNN_VERSION, NCCL_VERSION, DRIVER = "12.8", 91002, (2, 27, 5), 12080
OLD_TYPES = ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor",
             "CharTensor", "ShortTensor", "IntTensor", "LongTensor", "BoolTensor")  # fmt: skip


def _replaced(
    named: _Named, card: Card | None, allocator: LiveAllocator, streams: Streams
) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced: where it is, its name, and what is there instead."""
    cuda: Any = torch.cuda
    here = named.device.type
    answers = _answers(card, allocator, streams)
    for holder in (cuda, cuda.memory, cuda.random):
        yield from (
            (holder, name, value) for name, value in answers.items() if hasattr(holder, name)
        )
    for name in OLD_TYPES:
        yield cuda, name, _OldType(name, (), {"on_host": getattr(torch, name)})
    yield (
        torch,
        "set_default_tensor_type",
        functools.partial(named.made_by_default, torch.set_default_tensor_type),
    )
    set_device = torch.set_default_device
    yield torch, "set_default_device", lambda device: set_device(named.translated(device))
    yield torch, "Generator", _Generator
    # a prediction around this one has a `cuda` of its own, which no mode sees
    yield torch.Tensor, "cuda", lambda x, device=None, non_blocking=False, **_: x.to(named.device)
    yield torch.nn.DataParallel, "forward", _on_the_only_card
    yield torch.version, "cuda", CUDA_VERSION
    yield *DRIVER_VERSION, lambda: DRIVER
    yield torch.backends.cudnn, "version", lambda: CUDNN_VERSION
    yield cuda.nccl, "version", lambda: NCCL_VERSION
    yield *ENGINE, functools.partial(_run_in, named, getattr(*ENGINE))
    yield *RAW_STREAM, lambda device=None: 0
    yield torch.backends.cuda, "is_built", lambda: True
    yield torch.backends.cudnn, "is_available", lambda: True
    yield torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
    yield torch.accelerator, "is_available", lambda: True
    own: Any = FakeTensor
    yield own, "device", property(functools.partial(_device_of, own.device.fget))

    # autocast asks and sets by the name of a device, and PyTorch's functions for it see no mode
    kind: Any = torch.amp.autocast_mode.autocast
    init = kind.__init__
    yield (
        kind,
        "__init__",
        lambda self, device_type, *more, **options: init(
            self, here if device_type == "cuda" else device_type, *more, **options
        ),
    )
    for name in ("get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype",
                 "is_autocast_enabled"):  # fmt: skip
        yield torch, name, functools.partial(_by_name, getattr(torch, name), here)


def _run_in(mode: TorchFunctionMode, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a backward in a mode: it may call code of a person, as a recompute does."""
    with mode:
        return own(*args, **kwargs)


def _by_name(own: Any, here: str, *given: Any) -> Any:
    """Call a function of autocast for the stand-in where it is called for "cuda", or for none."""
    if not given or isinstance(given[0], bool):
        return own(here, *given)
    return own(here if given[0] == "cuda" else given[0], *given[1:])


def _answers(card: Card | None, allocator: LiveAllocator, streams: Streams) -> dict[str, Any]:
    """Return what `torch.cuda` says and does, by name."""
    capability = NEWEST if card is None else card.compute_capability or NEWEST
    total = allocator.capacity if card is None else card.memory_bytes

    def info(device: Any = None) -> tuple[int, int]:
        room = total or 0
        return max(room - allocator.reserved, 0), room

    def statistics(device: Any = None) -> dict[str, int]:
        found = {
            "allocated_bytes.all.current": allocator.allocated,
            "allocated_bytes.all.peak": allocator.peak_allocated,
            "reserved_bytes.all.current": allocator.reserved,
            "reserved_bytes.all.peak": allocator.peak_reserved,
        }
        return _Statistics(found)

    def nothing() -> Callable[..., None]:
        """Return what does nothing: no kernel runs, and there is one card."""
        return lambda *_, **__: None  # one for each name: TorchDynamo has a rule for each

    def at_most(fraction: float, device: Any = None) -> None:
        allocator.restrict(fraction)

    quiet = {
        name: nothing()
        for name in (
            "init", "synchronize", "set_device", "ipc_collect", "manual_seed", "manual_seed_all",
            "seed", "seed_all", "set_rng_state", "set_rng_state_all",
            "reset_accumulated_memory_stats", "_lazy_init", "set_stream",
        )
    }  # fmt: skip
    state = torch.zeros(16, dtype=torch.uint8)
    return quiet | {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: card.title if card else "CUDA card",
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: card_answers.properties(card),
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "is_bf16_supported": lambda including_emulation=True: including_emulation
        or capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": info,
        "memory_allocated": lambda device=None: allocator.allocated,
        "max_memory_allocated": lambda device=None: allocator.peak_allocated,
        "memory_reserved": lambda device=None: allocator.reserved,
        "max_memory_reserved": lambda device=None: allocator.peak_reserved,
        "memory_cached": lambda device=None: allocator.reserved,
        "max_memory_cached": lambda device=None: allocator.peak_reserved,
        "memory_stats": statistics,
        "memory_summary": lambda device=None, abbreviated=False: str(dict(statistics())),
        "memory_snapshot": lambda *_, **__: [],
        "reset_peak_memory_stats": lambda device=None: allocator.reset_peaks(),
        "reset_max_memory_allocated": lambda device=None: allocator.reset_peaks(),
        "empty_cache": lambda: allocator.empty_cache(),
        "set_per_process_memory_fraction": at_most,
        "get_rng_state": lambda device=None: state,
        "get_rng_state_all": lambda: [state],
        "device": _Device,
        "Stream": _class_of("Stream", streams.made),
        "Event": _class_of("Event", functools.partial(_TimedEvent, streams)),
        "current_stream": lambda device=None: streams.current,
        "default_stream": lambda device=None: streams.numbered(0),
        "stream": streams.using,
        "utilization": lambda device=None: 0,
        "nvtx": SimpleNamespace(range_push=nothing(), range_pop=nothing(), mark=nothing(),
                                range=lambda *_, **__: contextlib.nullcontext()),
    }  # fmt: skip


class _Generator(torch.Generator):
    """`torch.Generator("cuda")`: numbers of the card have no values, so it is one of the host."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # it is a property there too
        """The device that it was asked for."""
        return self._device


class _OldType(type):
    """`torch.cuda.FloatTensor` and its like: each makes tensors on the card, or names their type.

    Attributes:
        on_host: the same type of the host.
    """

    on_host: Any

    def __call__(cls, *given: Any) -> torch.Tensor:
        """Return a tensor of this size, or with these numbers."""
        made: torch.Tensor = cls.on_host(*given).to("cuda")
        return made

    def __instancecheck__(cls, value: Any) -> bool:
        """Return whether this is a tensor of the type."""
        is_tensor = isinstance(value, torch.Tensor) and value.is_cuda
        return is_tensor and value.dtype == cls.on_host.dtype


def _old_type(kind: Any) -> Any:
    """Return a type of the card for its name, and anything else as it is."""
    is_name = isinstance(kind, str) and kind.startswith("torch.cuda.")
    return getattr(torch.cuda, kind.rpartition(".")[2]) if is_name else kind


def _on_the_only_card(parallel: Any, *inputs: Any, **options: Any) -> Any:
    """Run a `DataParallel` of one card: its inputs go there, and nothing is divided."""
    inputs, options = pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, (inputs, options))
    return parallel.module(*inputs, **options)


def _class_of(name: str, make: Callable[[], Any]) -> type:
    """Return a class, which annotations may name, whose calls return what `make` returns."""
    return type(name, (), {"__new__": lambda cls, *_, **__: make()})


class _Statistics(dict[str, int]):
    """What is not counted here is 0."""

    def __missing__(self, name: str) -> int:
        return 0


class _TimedEvent(StreamEvent):
    """An event that a script takes the time with; there is none between two."""

    def elapsed_time(self, other: StreamEvent) -> float:
        """Return the milliseconds between two events."""
        return 1.0

    def query(self) -> bool:
        """Return whether the event is reached."""
        return True


class _Device(contextlib.nullcontext[None]):
    """`with torch.cuda.device(0)`: there is one card."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


def _device_of(own: Any, tensor: Any) -> torch.device:
    """Return the device of a tensor, under the name that the code which asks knows it by."""
    device: torch.device = own(tensor)
    if device.type != NAME or _is_ours(sys._getframe(1).f_globals.get("__name__", "")):
        return device
    return torch.device("cuda", device.index or 0)


@functools.cache
def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("torch", "memlab")
