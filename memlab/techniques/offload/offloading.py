"""Offload activations saved for backward, and the optimizer's state, to host memory.

Autograd passes each tensor that it saves to a hook. Only there does moving the tensor free memory:
if the model itself copied it (`.cpu()`, later `.cuda()`), autograd would still hold the original.

On CUDA the copies run on two streams of their own, from and to pinned memory. A tensor stays on the
device until its copy is complete, and the next tensor that backward will need is fetched ahead. So
the copies overlap with kernels and cost no time if the bus is fast enough. With a fraction below 1,
the offloaded tensors are spread over the whole forward, to give their copies time. Buffers are
never moved; parameters are moved only by `memlab.techniques.offload.offloading`.

It is plain PyTorch, of which exported scripts contain what they call. It is written against CUDA's
documented interfaces, and **no card has run it yet**. Left out: graphs that are kept and run twice
at once, and models on several devices.
"""

import contextlib
import functools
import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
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


# Detect reads of parameters: a mode that sees every function of torch, in backward too.
#
# PyTorch switches a mode off while the mode handles a function, and so for the whole of
# `Tensor.backward`. Here the autograd engine is called directly, and the mode stays on. It is plain
# PyTorch, of which exported scripts contain what they call. Left out: C++ code that reads a
# parameter without a function of torch, and hooks in a backward of `torch.autograd.grad`.

QUESTIONS = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf",
    "is_cuda", "is_sparse", "is_meta", "is_quantized", "is_mkldnn", "nbytes", "size", "dim",
    "numel", "nelement", "stride", "is_floating_point", "is_complex", "__hash__", "_version",
    "is_inference", "is_nested", "_backward_hooks", "_post_accumulate_grad_hooks",
}  # fmt: skip
"""Attributes and methods that do not read a weight's values."""


class WeightReads(TorchFunctionMode):
    """Calls `on_read` for every parameter whose values a function of torch is about to read.

    A read of `.data` counts as a possible write, because a write through it changes no version.
    """

    def __init__(self, on_read: Callable[..., None]) -> None:
        super().__init__()
        self.on_read = on_read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attribute = func.__name__ in ("__get__", "__set__")
        name = func.__self__.__name__ if is_attribute else func.__name__
        if name not in QUESTIONS:
            for given in (*args, *(kwargs or {}).values()):
                for part in given if isinstance(given, list | tuple) else (given,):
                    if isinstance(part, nn.Parameter):
                        self.on_read(part, may_write=name == "data")
        if func in (torch.Tensor.backward, torch.autograd.backward):
            with self:  # a mode is off while it handles a function
                return _backward(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _backward(
    tensors: Any,
    gradients: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **others: Any,
) -> None:
    """Do what `torch.autograd.backward` does, by calling the engine, which bypasses modes."""
    gradients = others.get("gradient", others.get("grad_tensors", gradients))
    tensors, gradients, inputs = (
        () if given is None else (given,) if isinstance(given, torch.Tensor) else tuple(given)
        for given in (tensors, gradients, inputs)
    )
    every = itertools.zip_longest(tensors, gradients)
    torch.autograd.Variable._execution_engine.run_backward(
        tensors,
        tuple(
            torch.ones_like(tensor) if gradient is None and tensor.requires_grad else gradient
            for tensor, gradient in every
        ),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs,
        allow_unreachable=True,
        accumulate_grad=True,
    )


# Offload weights to host memory. Each weight is on the device only while its module runs.
#
# - Forward: a module's own weights are copied to the device when it is called, and that
#   copy is freed when it returns.
# - Backward: an operator that saved a weight gets a copy, which is freed after its use.
# - Update: one weight at a time is copied to the device, updated and copied back.
#
# The next weight is fetched while the current one is used. Gradients are on the device;
# with an optimizer in backward only one at a time.
#
# If other code reads a weight, the weight is fetched, and from then on it also comes with
# the module that was running. If no module was running, it stays until the forward or the
# backward ends. Some weights always stay on the device: small ones, those that share
# memory, quantized ones, those of an RNN (cuDNN wants them in one block) and those inside
# of a compiled module.
#
# While a weight is offloaded, its parameter is a single NaN expanded to the weight's shape.
# Code that reads it in a way that memlab cannot see (from C++) therefore gets NaN, not
# stale values.
#
# It is plain PyTorch, of which exported scripts contain what they call. **No card has run it yet.**
# Left out: models on several devices.


class OffloadedWeights:
    """The offloaded weights of a model. Making it moves everything else to the device.

    Args:
        model: on the CPU, its weights in the format and layout that they are trained in.
        device: the device that it is trained on.
        stay: parameters that stay on the device.

    Attributes:
        sizes: bytes of each weight in host memory.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, stay: Iterable[nn.Parameter] = ()
    ) -> None:
        self.model, self.device = model, device
        closed = _compiled_parts(model)
        places, hosts = _moved_to_the_host(model, device, {id(p) for p in stay}, closed)
        model.to(device)
        self._of: dict[nn.Parameter, _Weight] = {}
        self._reads: dict[nn.Module, list[_Weight]] = {}
        nothing: dict[torch.dtype, torch.Tensor] = {}
        for module, name, key in places:
            parameter = module._parameters[name]
            assert parameter is not None
            if parameter not in self._of:
                host = hosts[key]
                nan = torch.full((), torch.nan, dtype=host.dtype, device=device)
                away = nothing.setdefault(host.dtype, nan).expand(host.shape)
                self._of[parameter] = _Weight(self, parameter, host, away)
            self._reads.setdefault(module, []).append(self._of[parameter])
        self.sizes = [weight.host.nbytes for weight in self._of.values()]
        self._running: list[tuple[nn.Module, list[_Weight]]] = []
        self._borrowed: list[_Weight] = []  # until the pass ends
        self._used: list[_Weight] = []  # in the pass that is under way: a forward, a backward
        self._expected: list[_Weight] = []  # in it, from the last pass of its kind
        self._of_next_pass: list[_Weight] = []
        self._here: dict[int, tuple[weakref.ref[Any], _Weight]] = {}
        for module in model.modules():
            if module not in closed:
                module.forward = self._with_weights(module, module.forward)

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Return the context of a forward and its loss, which sees reads of offloaded weights."""
        self._here.clear()
        self._begin_pass()
        try:
            with WeightReads(self._read):
                yield
        finally:
            self._begin_pass()

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Return the context of a backward, which sees reads by hooks, recomputes and the like."""
        try:
            with WeightReads(self._read):
                yield
        finally:
            self._give_back()

    def weight_in(self, saved: torch.Tensor) -> "_Weight | None":
        """Return the weight of which a tensor on the device is a copy or a view, or None."""
        storage = saved.untyped_storage()
        known, weight = self._here.get(storage._cdata, (None, None))
        return weight if known is not None and known() is storage else None

    def value_of(self, parameter: Any) -> torch.Tensor:
        """Return a parameter's values, wherever they are."""
        weight = self._of.get(parameter)
        values: torch.Tensor = parameter if weight is None or weight.users else weight.host
        return values

    @contextlib.contextmanager
    def on_the_device(self, _: Any, parameter: Any) -> Iterator[None]:
        """Hold a parameter on the device while it is updated, then copy it back to the host."""
        weight = self._of.get(parameter)
        if weight is None:
            yield
            return
        weight.enter()
        try:
            yield
        finally:
            weight.leave(is_changed=True)

    def restore(self) -> None:
        """Put all weights back into the model, on the CPU, so that they can be saved or read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the last copy to the host may still be running
        for parameter, weight in self._of.items():
            parameter.data = weight.host
        self._of.clear()
        self._reads.clear()
        for module in self.model.modules():
            if hasattr(module.forward, "before"):
                module.forward = module.forward.before
        self.model.cpu()

    def _with_weights(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that holds the module's weights on the device while it runs."""
        is_method = isinstance(forward, MethodType)
        function: Any = getattr(forward, "__func__", forward)

        @functools.wraps(function)  # libraries inspect its signature
        def run(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if own is not module and self._reads.get(module):
                raise RuntimeError(
                    f"this {type(own).__name__} is a copy of a module whose weights are offloaded, "
                    "and has no weights of its own; copy the model before a step is built of it, "
                    "or use offload_parameters=False"
                )
            here: list[_Weight] = []
            self._running.append((module, here))
            try:
                for weight in tuple(self._reads.get(module, ())):
                    weight.enter()
                    here.append(weight)
                    self._fetch_ahead(weight)
                return function(own, *args, **kwargs) if is_method else function(*args, **kwargs)
            finally:
                self._running.pop()
                for weight in here:
                    weight.leave()

        run.before = forward  # type: ignore[attr-defined]
        # copying a module copies a method along with it, which a plain function would not allow
        return MethodType(run, module) if is_method else functools.partial(run, module)

    def _fetch_ahead(self, weight: "_Weight") -> None:
        """Begin to fetch the weight that followed this one in the last pass."""
        at = len(self._used)
        self._used.append(weight)
        if self._expected[at : at + 1] != [weight]:
            self._expected = []  # the order has changed, so the last pass predicts nothing
        for following in self._expected[at + 1 : at + 2]:
            following.come()

    def _begin_pass(self) -> None:
        """Begin a forward or a backward; the two alternate."""
        self._give_back()
        self._expected, self._of_next_pass, self._used = self._of_next_pass, self._used, []
        for weight in self._of.values():
            weight.forget()

    def _give_back(self) -> None:
        for weight in self._borrowed:
            weight.leave()
        self._borrowed.clear()

    def _read(self, parameter: Any, *, may_write: bool) -> None:
        """Fetch a weight that code outside of its module reads."""
        weight = self._of.get(parameter)
        if weight is None:
            return
        if not weight.users:
            weight.enter()
            if self._running:
                module, here = self._running[-1]
                self._reads.setdefault(module, []).append(weight)
                here.append(weight)
            else:
                self._borrowed.append(weight)
        weight.is_changed |= may_write

    def is_here(self, weight: "_Weight") -> None:
        """Remember which storage on the device holds a weight."""
        with torch._C.DisableTorchFunction():  # no read of its values
            storage = weight.parameter.untyped_storage()
        self._here[storage._cdata] = weakref.ref(storage), weight


class _Weight:
    """A weight in host memory, with a copy on the device while it is used or about to be used."""

    def __init__(
        self, owner: OffloadedWeights, parameter: nn.Parameter, host: torch.Tensor, away: Any
    ) -> None:
        self.owner, self.parameter, self.host, self.away = owner, parameter, host, away
        self.users, self.version, self.is_changed = 0, 0, False
        self.copy: torch.Tensor | None = None
        self.event: Any = None
        _set(parameter, away)

    def host_view(self, saved: torch.Tensor) -> torch.Tensor | None:
        """Return the same view of the weight in host memory; None if no view can be the same."""
        if saved.is_conj() or saved.is_neg() or saved.dtype != self.host.dtype:
            return None
        return self.host.as_strided(saved.shape, saved.stride(), saved.storage_offset())

    def come(self) -> None:
        """Begin to copy the weight to the device, if it is not there."""
        if self.copy is None:
            device = self.away.device
            with torch.no_grad(), torch._C.DisableTorchFunction():
                copy = torch.empty_like(self.host, device=device)
                self.event = copy_on(streams_of(device)[1], copy, self.host)
                self.copy = copy

    def enter(self) -> None:
        """Add a user; for the first one the weight is copied to the device."""
        if not self.users:
            self.come()
            wait_for(self.event, self.away.device)
            _set(self.parameter, self.copy)
            self.version, self.is_changed = self.parameter._version, False
            self.owner.is_here(self)
        self.users += 1

    def leave(self, *, is_changed: bool = False) -> None:
        """Remove a user. Changes are copied to the host; after the last user the copy is freed."""
        self.users -= 1
        is_changed = is_changed or (self.is_changed and not self.users)
        if is_changed or self.parameter._version != self.version:
            self.version = self.parameter._version
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.host.copy_(self.parameter.data, non_blocking=True)
        if not self.users:
            _set(self.parameter, self.away)
            self.copy = None

    def forget(self) -> None:
        """Free a copy that was fetched ahead and not used."""
        if self.copy is not None and not self.users:
            wait_for(self.event, self.away.device)  # its memory may go to another tensor
            self.copy = None


def _set(parameter: nn.Parameter, data: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunction():  # no read of its values
        parameter.data = data  # type: ignore[assignment]


def _moved_to_the_host(
    model: nn.Module, device: torch.device, stay: set[int], closed: set[nn.Module]
) -> tuple[list[tuple[nn.Module, str, int]], dict[int, torch.Tensor]]:
    """Return the places of offloaded weights, each with a key, and their values by that key."""
    found = {id(parameter) for parameter in _movable(model, stay, closed)}
    places = [
        (module, name, id(parameter))
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in found
    ]
    hosts: dict[int, torch.Tensor] = {}
    is_pinned = device.type == "cuda"
    for module, name, key in places:
        parameter = module._parameters[name]
        if key not in hosts and parameter is not None:
            # dense, like the copies on the device
            host = torch.empty_like(parameter.data, device="cpu", pin_memory=is_pinned)
            hosts[key] = host.copy_(parameter.data)
            parameter.data = parameter.data.new_empty(
                0
            )  # free each, so that only one is held twice
    return places, hosts


def _movable(model: nn.Module, stay: set[int], closed: set[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that are large enough and can be moved one by one."""
    for module in model.modules():
        if module in closed or isinstance(module, nn.RNNBase):
            stay = stay | {id(parameter) for parameter in module.parameters()}
    parameters = list(model.parameters())
    sharing = Counter(parameter.untyped_storage()._cdata for parameter in parameters)
    return [
        parameter
        for parameter in parameters
        if id(parameter) not in stay
        and is_large(parameter)
        and parameter.layout is torch.strided
        and (parameter.is_floating_point() or parameter.is_complex())
        and not hasattr(type(parameter), "__tensor_flatten__")  # made of other tensors
        and sharing[parameter.untyped_storage()._cdata] == 1
    ]


def _compiled_parts(model: nn.Module) -> set[nn.Module]:
    """Return the modules that TorchScript or torch.compile calls directly."""
    return {
        part
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")
        for part in module.modules()
    }
