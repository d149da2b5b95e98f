"""A `torch.cuda` replayed on a machine without a card, as PyTorch's documentation describes it.

Tensors that are asked for on "cuda" are made on the CPU, and counted: each storage from when it is
returned by an operator until it is freed, rounded to 512 bytes as the caching allocator does. So a
whole step runs, its statistics move, and a limit is run into. What is replayed has the names, keys
and units of the documentation ("CUDA semantics, memory management"; `torch.cuda.memory_stats`:
"allocated_bytes.all.peak" and the like in bytes; events: milliseconds). A name that is not replayed
raises, so that no step of memlab's own meets a real function unnoticed. Left out: kernel workspace,
fragmentation, and times of a card.
"""

import contextlib
import itertools
import sys
import time
import types
import weakref
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memlab._util.units import GIB, MIB
from memlab.runtime.serving import rehearse

ROUNDING, SEGMENT = 512, 2 * MIB
CPU = torch.device("cpu")
# what PyTorch itself asks of its module in a step, besides private names
OF_PYTORCH = {"amp", "is_current_stream_capturing"}


class ReplayedCuda(types.ModuleType):
    """The module, and one card with its allocator.

    Attributes:
        total_bytes: of the card.
        others_bytes: that other programs hold.
        most_bytes: most that this process may reserve.
        calls: names of the functions that were called.
        broken: an error that every call raises from now on; None for none.
    """

    def __init__(self, name="NVIDIA GeForce RTX 4090", total_bytes=24 * GIB, others_bytes=0):
        super().__init__("torch.cuda")
        self.total_bytes, self.others_bytes = total_bytes, others_bytes
        self.most_bytes = total_bytes
        self.title, self.calls, self.broken = name, set(), None
        self.live, self.reserved, self.peaks = 0, 0, [0, 0]
        self.seen, self.numbers = {}, itertools.count()
        self.memory = SimpleNamespace(_set_allocator_settings=self._set_allocator_settings)
        self.Stream, self.Event = Stream, Event

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if not name.startswith("_") and callable(value):
            super().__getattribute__("calls").add(name)
        return value

    def __getattr__(self, name):
        if name in OF_PYTORCH or name.startswith("_"):
            return getattr(REAL, name)
        raise AttributeError(f"torch.cuda.{name} is not replayed")

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def init(self):
        self._check()

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        """There is one card."""

    def get_device_name(self, device=None):
        return self.title

    def get_device_properties(self, device=None):
        return SimpleNamespace(
            name=self.title, total_memory=self.total_bytes, major=8, minor=9,
            multi_processor_count=128,
        )  # fmt: skip

    def is_bf16_supported(self, including_emulation=True):
        return True

    def mem_get_info(self, device=None):
        """Return free and total bytes, as cudaMemGetInfo."""
        self._check()
        return self.total_bytes - self.others_bytes - self.reserved, self.total_bytes

    def synchronize(self, device=None):
        self._check()

    def empty_cache(self):
        self.reserved = -(-self.live // SEGMENT) * SEGMENT

    def memory_allocated(self, device=None):
        return self.live

    def memory_reserved(self, device=None):
        return self.reserved

    def max_memory_allocated(self, device=None):
        return self.peaks[0]

    def max_memory_reserved(self, device=None):
        return self.peaks[1]

    def reset_peak_memory_stats(self, device=None):
        self.peaks = [self.live, self.reserved]

    def memory_stats(self, device=None):
        return {
            "allocated_bytes.all.current": self.live, "allocated_bytes.all.peak": self.peaks[0],
            "reserved_bytes.all.current": self.reserved, "reserved_bytes.all.peak": self.peaks[1],
            "num_alloc_retries": 0, "num_ooms": 0,
        }  # fmt: skip

    def set_per_process_memory_fraction(self, fraction, device=None):
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self.most_bytes = int(fraction * self.total_bytes)

    def manual_seed_all(self, seed):
        """Draw on the CPU, whose generator is seeded by itself."""

    manual_seed = manual_seed_all

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        """Leave the CPU's generator to its own functions."""

    def current_stream(self, device=None):
        return Stream(device)

    def stream(self, stream):
        return contextlib.nullcontext()

    def device(self, device):
        return contextlib.nullcontext()

    def _set_allocator_settings(self, settings):
        self.calls.add(settings)

    def _check(self):
        if self.broken is not None:
            raise self.broken

    def holds(self, tensor):
        """Return whether a tensor is on the card."""
        return tensor.untyped_storage()._cdata in self.seen

    def count(self, tensor):
        """Count the storage of a tensor from now until it is freed."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage._cdata in self.seen:
            return
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING
        self._check()
        if self.live + size > min(self.most_bytes, self.total_bytes - self.others_bytes):
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU 0 has a total "
                f"capacity of {self.total_bytes / GIB:.2f} GiB of which 0 bytes is free."
            )
        self.live += size
        self.reserved = max(self.reserved, -(-self.live // SEGMENT) * SEGMENT)
        self.peaks = [max(self.peaks[0], self.live), max(self.peaks[1], self.reserved)]
        self.seen[storage._cdata] = size
        weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key):
        self.live -= self.seen.pop(key)


class Stream:
    """A stream whose work is done as soon as it is asked for."""

    def __init__(self, device=None, priority=0):
        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream):
        assert isinstance(stream, Stream)

    def wait_event(self, event):
        assert event.at is not None, "the event was not recorded"

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self):
        return False

    def synchronize(self):
        """Nothing to wait for."""


class Event:
    """An event; `elapsed_time` is in milliseconds and needs `enable_timing`."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.is_timing, self.at = enable_timing, None

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        assert self.at is not None

    def query(self):
        return True

    def elapsed_time(self, end):
        if not (self.is_timing and end.is_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 1e3 * max(end.at - self.at, 1e-7)


def is_cuda(value):
    """Return whether an argument names a card."""
    if isinstance(value, str):
        return value.split(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


def tensors_in(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device == CPU]


class _Counted(TorchDispatchMode):
    """Counts what operators return whose arguments are on the card."""

    def __init__(self, cuda):
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(map(self.cuda.holds, tensors_in([args, kwargs]))):
            for tensor in tensors_in(out):
                self.cuda.count(tensor)
        return out


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a card; what moves between the two is copied."""

    def __init__(self, cuda):
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "record_stream":
            return None
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        is_asked = any(map(is_cuda, [*args[1:], *kwargs.values()]))
        args = tuple(CPU if is_cuda(value) else value for value in args)
        kwargs = {key: CPU if is_cuda(value) else value for key, value in kwargs.items()}
        out = func(*args, **kwargs)
        if not is_asked:
            return out
        if name == "to" and not self.cuda.holds(args[0]) and out is args[0]:
            out = out.detach().clone() if not out.requires_grad else out.clone()
        for tensor in tensors_in(out):
            self.cuda.count(tensor)
        return out


REAL = torch.cuda


@contextlib.contextmanager
def replayed(monkeypatch, cuda):
    """Run with this card in the machine, and no NVML."""
    rehearse(is_predicting=False)  # what PyTorch imports in a first step asks its own module
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    module_of = getattr(torch.get_device_module, "__wrapped__", torch.get_device_module)
    monkeypatch.setattr(torch, "get_device_module", module_of)  # PyTorch remembers the real one
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    accelerator = lambda check_available=False: torch.device("cuda")  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.accelerator, "synchronize", cuda.synchronize)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    with _OnCpu(cuda), _Counted(cuda):
        yield cuda
