"""What forward saves for backward waits in the host's memory; so does the optimizer's state.

Autograd gives each tensor that it saves to a hook, which is the one place where moving it frees
memory: a copy that the model makes itself (`.cpu()`, later `.cuda()`) leaves the original saved.
On CUDA the copies run on two streams of their own, from and to pinned memory. A few tensors stay
until their copy is out, and the next one that backward will ask for is fetched ahead, so that time
hides behind the kernels where the bus is fast enough. Of a share below 1, what goes is spread over
the forward, so that its copies have all of it to hide in. Buffers are never moved, and parameters
by `memlab.techniques.offload.weight_offloading` alone.

An exported script holds this file as it stands, so it imports nothing of memlab. It is
written against the documented interfaces of CUDA and **no card has run them yet**. Left out:
graphs that are kept and run twice at once, models spread over several devices.
"""

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

SMALLEST_BYTES = 1 << 18  # 256 KiB: some 10 us on a bus of 25 GB/s, as starting the copy takes
NUM_WAITING = 2  # tensors that stay on the device while they are copied out


class Offloader(saved_tensors_hooks):
    """A context around a forward: what autograd saves in it goes to the host's memory.

    Args:
        model: its parameters and buffers are not copied.
        fraction: of the bytes that go; 0 is none.
        weights: of the model that wait there already, if any do.

    Attributes:
        host_bytes: held in the host's memory now.
        peak_host_bytes: the most that was.
    """

    def __init__(self, model: nn.Module, fraction: float = 1.0, weights: Any = None) -> None:
        super().__init__(self._send, self._fetch)
        self.model, self.fraction, self.weights = model, fraction, weights
        self.host_bytes = self.peak_host_bytes = 0
        self._seen_bytes = self._sent_bytes = 0
        self._stay: set[int] = set()
        self._order: list[weakref.ref[_Moved]] = []
        self._waiting: deque[_Moved] = deque()
        self._known: dict[Any, tuple[weakref.ref[Any], weakref.ref[_Moved] | None]] = {}
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> None:
        """Begin a forward."""
        self._order, self._seen_bytes, self._sent_bytes = [], 0, 0
        tensors = (*self.model.parameters(), *self.model.buffers())
        self._stay = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._inside.enter_context(_Writes(self._before_a_write))
        if self.weights is not None:
            self._inside.enter_context(self.weights.in_forward())
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        """End a forward; what has not left the device by now stays, since backward begins there."""
        super().__exit__(*args)
        self._inside.close()
        self._waiting.clear()
        self._known.clear()

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around a backward, in which hooks and recomputes may read weights, and save them."""
        if self.weights is None:
            yield
            return
        with self.weights.in_backward(), saved_tensors_hooks(self._keep, self._fetch):
            yield

    @torch.no_grad()
    def _keep(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps in place of a tensor in backward: weights go, others stay."""
        weight = self.weights.weight_in(tensor)
        host = None if weight is None else weight.host_view(tensor)
        return tensor if host is None else self._moved(tensor, host, weight.parameter)

    def _before_a_write(self) -> None:
        """Let no tensor be changed before it is out, nor be used again as if it were not."""
        for moved in self._waiting:
            moved.leave()
        self._waiting.clear()
        self._known.clear()

    @torch.no_grad()
    def _send(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps in place of a tensor: where it is, or the tensor itself."""
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
        """Return whether the next tensor goes, for the share of all bytes to be the fraction."""
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
        """Return a saved tensor to backward, and fetch the one that was saved before it."""
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


class _Writes(TorchFunctionMode):
    """Tells that a tensor is about to be changed in place; autograd tells its hooks no version."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        is_operator = name.startswith("__") and not name.startswith(("__i", "__set"))
        if (name.endswith("_") and not is_operator) or kwargs.get("inplace") or "out" in kwargs:
            self.tell()
        return func(*args, **kwargs)


class _Moved:
    """A tensor in the host's memory, and on the device while it leaves or is about to be used."""

    here: torch.Tensor | None = None
    event: Any = None
    own_bytes = 0  # of what is in the host's memory for its sake

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

    def __del__(self) -> None:
        # the block may be given to another tensor, which must not be written before it was read
        self.leave()
        if self.own_bytes:
            self.owner.host_bytes -= self.own_bytes

    def leave(self) -> None:
        """Give the device's memory back, once the copy is out."""
        if self.here is not None:
            wait_for(self.event, self.device)
        self.here = None

    def come(self) -> None:
        """Begin to copy it back, if it is not on the device."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.device)
            self.event = copy_on(streams_of(self.device)[1], self.here, self.host)

    def take(self) -> torch.Tensor:
        """Return it on the device, for the operator that runs next, and hold it no longer."""
        if self.parameter is not None and self.parameter._version != self.version:
            raise RuntimeError(
                "a weight that backward needs has been modified by an inplace operation since its "
                "forward"
            )
        self.come()
        wait_for(self.event, self.device)
        tensor, self.here = self.here, None
        assert tensor is not None
        return tensor


@functools.cache
def streams_of(device: torch.device) -> tuple[Any, Any]:
    """Return the streams of copies out and in, None and None where there are no streams."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def copy_on(stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
    """Copy, on a stream if there is one; return the event after which it is done."""
    if stream is None:
        target.copy_(source)
        return None
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return stream.record_event()


def wait_for(event: Any, device: torch.device) -> None:
    """Let what is queued on a device from now on run after an event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def is_large(tensor: torch.Tensor) -> bool:
    """Return whether copying a tensor takes longer than starting the copy."""
    return tensor.nbytes >= SMALLEST_BYTES


def _is_worth_it(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "cpu" and is_large(tensor)


def offload_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Keep an optimizer's state in the host's memory, but for that of the one it updates."""
    return update_one_by_one(optimizer, _state_on_the_device)


def update_one_by_one(
    optimizer: torch.optim.Optimizer,
    around: Callable[[Any, torch.Tensor], contextlib.AbstractContextManager[None]],
) -> torch.optim.Optimizer:
    """Let an optimizer update each parameter by itself, as it would, inside of a context.

    Its step stays a method, as a schedule asks for.
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
    """Have the state of one parameter on its device, and in the host's memory again thereafter."""
    state = optimizer.state.get(parameter, {})
    _move(state, parameter.device, pinned=False)
    try:
        yield
    finally:
        state = optimizer.state.get(parameter, {})
        _move(state, torch.device("cpu"), pinned=parameter.device.type == "cuda")


def _move(state: dict[str, Any], device: torch.device, *, pinned: bool) -> None:
    for name, value in state.items():
        # a number of steps is no state worth moving, and is kept on the host anyway
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            moved = torch.empty_like(value, device=device, pin_memory=pinned)
            state[name] = moved.copy_(value)
