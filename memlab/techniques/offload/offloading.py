"""Offload activations saved for backward, and the optimizer's state, to host memory.

Autograd passes each tensor that it saves to a hook. Only there does moving the tensor free memory:
if the model itself copied it (`.cpu()`, later `.cuda()`), autograd would still hold the original.

On CUDA the copies run on two streams of their own, from and to pinned memory. A tensor stays on the
device until its copy is complete, and the next tensor that backward will need is fetched ahead. So
the copies overlap with kernels and cost no time if the bus is fast enough. With a fraction below 1,
the offloaded tensors are spread over the whole forward, to give their copies time. Buffers are
never moved; parameters are moved only by `memlab.techniques.offload.weight_offloading`.

This file imports nothing from memlab, because an exported script contains a copy of it. It is
written against CUDA's documented interfaces, and **no card has run it yet**. Left out: graphs that
are kept and run twice at once, and models on several devices.
"""

import contextlib
import functools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

SMALLEST_BYTES = 1 << 18  # 256 KiB takes 10 us at 25 GB/s, about as long as starting a copy
NUM_WAITING = 2  # tensors that stay on the device while they are copied to the host


class Offloader(saved_tensors_hooks):
    """A context around a forward. Tensors that autograd saves in it go to host memory.

    Args:
        model: its parameters and buffers are not copied.
        fraction: share of the saved bytes that is offloaded; 0 is none.
        weights: the offloaded weights of the model, if there are any.

    Attributes:
        host_bytes: bytes held in host memory now.
        peak_host_bytes: the most bytes held in host memory so far.
        most_of_size: the most blocks of each size held in host memory so far.
    """

    def __init__(self, model: nn.Module, fraction: float = 1.0, weights: Any = None) -> None:
        super().__init__(self._send, self._fetch)
        self.model, self.fraction, self.weights = model, fraction, weights
        self.host_bytes = self.peak_host_bytes = 0
        self.num_of_size, self.most_of_size = Counter[int](), Counter[int]()
        self._seen_bytes = self._sent_bytes = 0
        self._stay: set[int] = set()
        self._order: list[weakref.ref[_Moved]] = []
        self._waiting: deque[_Moved] = deque()
        self._known: dict[Any, tuple[weakref.ref[Any], weakref.ref[_Moved] | None]] = {}
        self._inside = contextlib.ExitStack()
        self._gathered: set[int] = set()  # memory of whole parameters, used again in every step
        myself = weakref.ref(self)
        for module in model.modules():
            if hasattr(module, "unshard"):  # a unit of `fully_shard`
                module.register_forward_pre_hook(functools.partial(_note_gathered, myself))

    def __enter__(self) -> None:
        """Begin a forward."""
        self._order, self._seen_bytes, self._sent_bytes = [], 0, 0
        tensors = (*self.model.parameters(), *self.model.buffers())
        self._stay = {tensor.untyped_storage()._cdata for tensor in tensors} | self._gathered
        self._inside.enter_context(_Writes(self._before_a_write))
        if self.weights is not None:
            self._inside.enter_context(self.weights.in_forward())
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        """End a forward. A tensor still on the device stays: backward needs the last ones first."""
        super().__exit__(*args)
        self._inside.close()
        self._waiting.clear()
        self._known.clear()

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Return the context of a backward, in which hooks and recomputes may read weights."""
        if self.weights is None:
            yield
            return
        with self.weights.in_backward(), saved_tensors_hooks(self._keep, self._fetch):
            yield

    @torch.no_grad()
    def _keep(self, tensor: torch.Tensor) -> Any:
        """Return what autograd saves for a tensor during backward: only weights are offloaded."""
        weight = self.weights.weight_in(tensor)
        host = None if weight is None else weight.host_view(tensor)
        return tensor if host is None else self._moved(tensor, host, weight.parameter)

    def _before_a_write(self) -> None:
        """Finish all copies before a tensor is changed in place, and forget known tensors."""
        for moved in self._waiting:
            moved.leave()
        self._waiting.clear()
        self._known.clear()

    @torch.no_grad()
    def _send(self, tensor: torch.Tensor) -> Any:
        """Return what autograd saves for a tensor: its offloaded copy, or the tensor itself."""
        weight = None if self.weights is None else self.weights.weight_in(tensor)
        if weight is not None:
            host = weight.host_view(tensor)
            return tensor if host is None else self._moved(tensor, host, weight.parameter)
        storage = tensor.untyped_storage()
        if storage._cdata in self._stay or not _is_worth_it(tensor):
            return tensor
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage._cdata, *layout)
        if key in self._known:  # several operators save the same tensor
            known, saved = self._known[key]
            moved = None if saved is None else saved()
            if known() is storage and (saved is None or moved is not None):
                return tensor if moved is None else moved
        if not self._is_its_turn(tensor.nbytes):
            self._known[key] = weakref.ref(storage), None
            return tensor
        moved = self._moved(tensor.detach())
        self._known[key] = weakref.ref(storage), weakref.ref(moved)
        self._waiting.append(moved)
        if len(self._waiting) > NUM_WAITING:
            self._waiting.popleft().leave()
        return moved

    def _is_its_turn(self, nbytes: int) -> bool:
        """Return whether to offload the next tensor, to keep the share of bytes at `fraction`."""
        self._seen_bytes += nbytes
        goes = self._sent_bytes + nbytes / 2 <= self.fraction * self._seen_bytes
        self._sent_bytes += nbytes * goes
        return goes

    def _moved(
        self, tensor: torch.Tensor, host: torch.Tensor | None = None, parameter: Any = None
    ) -> "_Moved":
        moved = _Moved(self, tensor, len(self._order), host, parameter)
        self._order.append(weakref.ref(moved))
        return moved

    @torch.no_grad()
    def _fetch(self, saved: Any) -> torch.Tensor:
        """Return a saved tensor to backward, and begin to fetch the one saved before it."""
        if not isinstance(saved, _Moved):
            assert isinstance(saved, torch.Tensor)
            return saved
        tensor = saved.take()
        for reference in reversed(self._order[: saved.number]):
            before = reference()
            if before is not None:
                before.come()
                break
        return tensor


def _note_gathered(offloader: "weakref.ref[Offloader]", unit: nn.Module, _: Any) -> None:
    """Remember the memory of parameters that ranks have gathered, which is freed after the forward.

    A copy of them would be read when it is gone, and backward gathers them again in any case.
    """
    if (found := offloader()) is not None:
        here = {parameter.untyped_storage()._cdata for parameter in unit.parameters()}
        found._gathered |= here
        found._stay |= here


class _Writes(TorchFunctionMode):
    """Calls a function before a tensor is changed in place, since autograd's hooks are not told."""

    def __init__(self, before_a_write: Callable[[], None]) -> None:
        super().__init__()
        self.before_a_write = before_a_write

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        is_operator = name.startswith("__") and not name.startswith(("__i", "__set"))
        if (name.endswith("_") and not is_operator) or kwargs.get("inplace") or "out" in kwargs:
            self.before_a_write()
        return func(*args, **kwargs)


class _Moved:
    """A tensor in host memory; it is on the device too while it is copied or about to be used."""

    here: torch.Tensor | None = None
    event: Any = None
    own_bytes = 0  # bytes of host memory that were allocated for it

    def __init__(
        self,
        owner: Offloader,
        tensor: torch.Tensor,
        number: int,
        host: torch.Tensor | None = None,
        parameter: Any = None,
    ) -> None:
        self.owner, self.number, self.device = owner, number, tensor.device
        self.parameter = parameter
        self.version = 0 if parameter is None else parameter._version
        if host is not None:
            self.host = host
            return
        out, _ = streams_of(tensor.device)
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=out is not None)
        self.here, self.event = tensor, copy_on(out, self.host, tensor)
        self.own_bytes = self.host.nbytes
        owner.host_bytes += self.own_bytes
        owner.peak_host_bytes = max(owner.peak_host_bytes, owner.host_bytes)
        owner.num_of_size[self.own_bytes] += 1
        owner.most_of_size |= owner.num_of_size

    def __del__(self) -> None:
        # its memory may go to another tensor, which must not write before the copy has read it
        self.leave()
        if self.own_bytes:
            self.owner.host_bytes -= self.own_bytes
            self.owner.num_of_size[self.own_bytes] -= 1

    def leave(self) -> None:
        """Free the device memory once the copy to the host is complete."""
        if self.here is not None:
            wait_for(self.event, self.device)
        self.here = None

    def come(self) -> None:
        """Begin to copy it back, if it is not on the device."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.device)
            self.event = copy_on(streams_of(self.device)[1], self.here, self.host)

    def take(self) -> torch.Tensor:
        """Return the tensor on the device for the next operator, and drop the reference to it."""
        if self.parameter is not None and self.parameter._version != self.version:
            raise RuntimeError(
                "a weight that backward needs has been modified by an inplace operation after its "
                "forward"
            )
        self.come()
        wait_for(self.event, self.device)
        tensor, self.here = self.here, None
        assert tensor is not None
        return tensor


@functools.cache
def streams_of(device: torch.device) -> tuple[Any, Any]:
    """Return the streams for copies to the host and back; None for a device without streams."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def copy_on(stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
    """Copy, on a stream if there is one; return the event that marks the end of the copy."""
    if stream is None:
        target.copy_(source)
        return None
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return stream.record_event()


def wait_for(event: Any, device: torch.device) -> None:
    """Make all work that is queued on a device from now on wait for an event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def is_large(tensor: torch.Tensor) -> bool:
    """Return whether copying a tensor takes longer than starting the copy."""
    return tensor.nbytes >= SMALLEST_BYTES


def _is_worth_it(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "cpu" and is_large(tensor)


def offload_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Keep an optimizer's state in host memory, except that of the parameter being updated."""
    return update_one_by_one(optimizer, _state_on_the_device)


def update_one_by_one(
    optimizer: torch.optim.Optimizer,
    around: Callable[[Any, torch.Tensor], contextlib.AbstractContextManager[None]],
) -> torch.optim.Optimizer:
    """Make an optimizer update one parameter at a time, each inside of a context.

    Its `step` stays a method, which learning rate schedules need.
    """
    update = optimizer.step

    def step(self: torch.optim.Optimizer, closure: None = None) -> None:
        groups = [(group, group["params"]) for group in self.param_groups]
        for group, _ in groups:
            group["params"] = []
        try:
            for group, parameters in groups:
                for parameter in parameters:
                    if parameter.grad is not None:
                        group["params"] = [parameter]
                        with around(self, parameter):
                            update()
                group["params"] = []
        finally:
            for group, parameters in groups:
                group["params"] = parameters

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


@contextlib.contextmanager
def _state_on_the_device(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> Iterator[None]:
    """Move the state of one parameter to its device, and back to host memory afterwards."""
    state = optimizer.state.get(parameter, {})
    _move(state, parameter.device, pinned=False)
    try:
        yield
    finally:
        state = optimizer.state.get(parameter, {})
        _move(state, torch.device("cpu"), pinned=parameter.device.type == "cuda")


def _move(state: dict[str, Any], device: torch.device, *, pinned: bool) -> None:
    for name, value in state.items():
        # a step counter is a scalar that optimizers keep on the host anyway
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            moved = torch.empty_like(value, device=device, pin_memory=pinned)
            state[name] = moved.copy_(value)
