"""Weights wait in the host's memory; each is on the device while its module runs.

Forward: a module's own weights come when it is called and are gone when it returns. Backward: an
operator that saved a weight gets a copy, which dies with its use. Update: one weight at a time
comes, is updated and goes back. The next weight comes while the one before it is used. Gradients
are on the device; with an optimizer in backward one at a time.

A weight that code outside of its module reads is learned by the module at work; where none is, it
is there until the forward or the backward ends. Small ones stay, as do those that share memory,
those of an RNN, which cuDNN wants in one block, and those inside of a compiled module. Away, a
weight is one NaN seen as its shape, which is what code finds that reads it unseen, from C++.

An exported script holds this file as it stands, below `offloading` and `weight_reads`, so it
imports nothing of memlab but these. **No card has run it yet.** Left out: models over several
devices.
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
    """The weights of a model that wait in the host's memory; puts the rest on the device.

    Args:
        model: on the CPU, its weights in the format and layout that they are trained in.
        device: that it is trained on.
        stay: parameters that stay on the device.

    Attributes:
        nbytes: held in the host's memory.
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
        self.nbytes = sum(weight.host.nbytes for weight in self._of.values())
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
        """Around a forward and its loss: see who reads a weight that is away."""
        self._here.clear()
        self._begin_pass()
        try:
            with WeightReads(self._read):
                yield
        finally:
            self._begin_pass()

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around a backward: the same, for hooks, recomputes and whatever else runs in it."""
        try:
            with WeightReads(self._read):
                yield
        finally:
            self._give_back()

    def weight_in(self, saved: torch.Tensor) -> "_Weight | None":
        """Return the weight that a tensor on the device is, or is a view of; None for others."""
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
        """Have a parameter on the device while it is updated; the host keeps what it becomes."""
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
        """Make the model whole again, on the CPU, for its weights to be saved or read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the last update may be on its way
        for parameter, weight in self._of.items():
            parameter.data = weight.host
        self._of.clear()
        self._reads.clear()
        for module in self.model.modules():
            if hasattr(module.forward, "before"):
                module.forward = module.forward.before
        self.model.cpu()

    def _with_weights(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module's forward, around which its weights are on the device."""
        is_method = isinstance(forward, MethodType)
        function: Any = getattr(forward, "__func__", forward)

        @functools.wraps(function)  # libraries ask for the arguments that it takes
        def run(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if own is not module and self._reads.get(module):
                raise RuntimeError(
                    f"this {type(own).__name__} is a copy of one whose weights wait in the host's "
                    "memory, and has none; copy the model before a step is built of it, or use "
                    "offload_parameters=False"
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
        # a method goes with a copy of the module, as a function would not
        return MethodType(run, module) if is_method else functools.partial(run, module)

    def _fetch_ahead(self, weight: "_Weight") -> None:
        """Begin to fetch what came after this weight the last time."""
        at = len(self._used)
        self._used.append(weight)
        if self._expected[at : at + 1] != [weight]:
            self._expected = []  # another order than the last time, which tells nothing then
        for following in self._expected[at + 1 : at + 2]:
            following.come()

    def _begin_pass(self) -> None:
        """Begin a forward or a backward, in turn."""
        self._give_back()
        self._expected, self._of_next_pass, self._used = self._of_next_pass, self._used, []
        for weight in self._of.values():
            weight.forget()

    def _give_back(self) -> None:
        for weight in self._borrowed:
            weight.leave()
        self._borrowed.clear()

    def _read(self, parameter: Any, *, may_write: bool) -> None:
        """Have a weight there that is read from outside of its module."""
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
        """Remember which memory of the device a weight is in."""
        with torch._C.DisableTorchFunction():  # no read of its values
            storage = weight.parameter.untyped_storage()
        self._here[storage._cdata] = weakref.ref(storage), weight


class _Weight:
    """A weight in the host's memory, and on the device while someone uses it or is about to."""

    def __init__(
        self, owner: OffloadedWeights, parameter: nn.Parameter, host: torch.Tensor, away: Any
    ) -> None:
        self.owner, self.parameter, self.host, self.away = owner, parameter, host, away
        self.users, self.version, self.is_changed = 0, 0, False
        self.copy: torch.Tensor | None = None
        self.event: Any = None
        _set(parameter, away)

    def host_view(self, saved: torch.Tensor) -> torch.Tensor | None:
        """Return the same view of it in the host's memory; None if that would be another tensor."""
        if saved.is_conj() or saved.is_neg() or saved.dtype != self.host.dtype:
            return None
        return self.host.as_strided(saved.shape, saved.stride(), saved.storage_offset())

    def come(self) -> None:
        """Begin to copy it to the device, if it is not there."""
        if self.copy is None:
            device = self.away.device
            with torch.no_grad(), torch._C.DisableTorchFunction():
                copy = torch.empty_like(self.host, device=device)
                self.event = copy_on(streams_of(device)[1], copy, self.host)
                self.copy = copy

    def enter(self) -> None:
        """Have it on the device for one user more."""
        if not self.users:
            self.come()
            wait_for(self.event, self.away.device)
            _set(self.parameter, self.copy)
            self.version, self.is_changed = self.parameter._version, False
            self.owner.is_here(self)
        self.users += 1

    def leave(self, *, is_changed: bool = False) -> None:
        """Give the device's memory back after the last user, and keep what was changed."""
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
        """Drop a copy that was fetched ahead and that nobody came for."""
        if self.copy is not None and not self.users:
            wait_for(self.event, self.away.device)  # its memory may be given to another tensor now
            self.copy = None


def _set(parameter: nn.Parameter, data: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunction():  # no read of its values
        parameter.data = data  # type: ignore[assignment]


def _moved_to_the_host(
    model: nn.Module, device: torch.device, stay: set[int], closed: set[nn.Module]
) -> tuple[list[tuple[nn.Module, str, int]], dict[int, torch.Tensor]]:
    """Return where the weights are that are moved, each with a key, and by it their values."""
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
            # dense, as the copies on the device will be
            host = torch.empty_like(parameter.data, device="cpu", pin_memory=is_pinned)
            hosts[key] = host.copy_(parameter.data)
            parameter.data = parameter.data.new_empty(0)  # one after another, not all twice
    return places, hosts


def _movable(model: nn.Module, stay: set[int], closed: set[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that are worth moving and can be moved by themselves."""
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
        and sharing[parameter.untyped_storage()._cdata] == 1
    ]


def _compiled_parts(model: nn.Module) -> set[nn.Module]:
    """Return the modules that TorchScript or torch.compile calls by itself."""
    return {
        part
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")
        for part in module.modules()
    }
