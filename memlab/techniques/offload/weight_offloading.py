"""Offload weights to host memory. Each weight is on the device only while its module runs.

- Forward: a module's own weights are copied to the device when it is called, and that copy is freed
  when it returns.
- Backward: an operator that saved a weight gets a copy, which is freed after its use.
- Update: one weight at a time is copied to the device, updated and copied back.

The next weight is fetched while the current one is used. Gradients are on the device; with an
optimizer in backward only one at a time.

If other code reads a weight, the weight is fetched, and from then on it also comes with the module
that was running. If no module was running, it stays until the forward or the backward ends. Some
weights always stay on the device: small ones, those that share memory, quantized ones, those of an
RNN (cuDNN wants them in one block) and those inside of a compiled module.

While a weight is offloaded, its parameter is a single NaN expanded to the weight's shape. Code that
reads it in a way that memlab cannot see (from C++) therefore gets NaN, not stale values.

This file imports nothing from memlab but `offloading` and `weight_reads`, because an exported
script contains a copy of it, after these two. **No card has run it yet.** Left out: models on
several devices.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from memlab.techniques.offload.offloading import copy_on, is_large, streams_of, wait_for
from memlab.techniques.offload.weight_reads import WeightReads


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
