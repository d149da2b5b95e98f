"""Weights wait in the host's memory; each is on the device while its module runs.

Forward: a module's own weights come when it is called and are gone when it returns. Backward: an
operator that saved a weight gets a copy, which dies with its use. Update: one weight at a time
comes, is updated and goes back. The next weight comes while the one before it is used. Gradients
are on the device; with an optimizer in backward one at a time.

A weight that code outside of its module reads is learned by the module at work, and stays on the
device where there is none. Small ones stay, as do those that share memory and those of an RNN,
which cuDNN wants in one block. Away, a weight is one NaN seen as its shape: what reads it unseen
fails loudly.

`OffloadedWeights` is plain PyTorch and goes into exported scripts as it stands, below
`memlab.techniques.offloading`. **No card has run it yet.** Left out: models over several devices,
and what a forward writes into its weight through `.data`, which is lost.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memlab.techniques import offloading
from memlab.techniques.offloading import copy_on, streams_of, wait_for

QUESTIONS = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf",
    "is_cuda", "is_sparse", "is_meta", "is_quantized", "is_mkldnn", "nbytes", "size", "dim",
    "numel", "nelement", "stride", "is_floating_point", "is_complex", "__hash__", "_version",
}  # fmt: skip
"""Attributes and methods that ask nothing of a weight's values."""


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
        self.model = model
        found = _movable(model, {id(parameter) for parameter in stay})
        hosts = {id(parameter): _on_the_host(parameter, device) for parameter in found}
        places = [
            (module, name, id(parameter))
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in hosts
        ]
        for moving in found:
            moving.data = moving.data.new_empty(0)
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
        self._used: list[_Weight] = []  # in the pass that is under way: a forward, a backward
        self._expected: list[_Weight] = []  # in it, from the last pass of its kind
        self._of_next_pass: list[_Weight] = []
        self._here: dict[int, tuple[weakref.ref[Any], _Weight]] = {}
        for module in model.modules():
            module.forward = self._with_weights(module, module.forward)

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Around a forward and its loss: see who reads a weight that is away."""
        self._here.clear()
        self._begin_pass()
        try:
            with _Reads(self._read):
                yield
        finally:
            self._begin_pass()

    def owns(self, saved: torch.Tensor) -> bool:
        """Return whether a tensor on the device is one of the weights, or a view of one."""
        storage = saved.untyped_storage()
        known = self._here.get(storage._cdata)
        return known is not None and known[0]() is storage

    def host_copy_of(self, saved: torch.Tensor) -> torch.Tensor | None:
        """Return in the host's memory what `owns` was true of; None if its weight stays here."""
        weight = self._here[saved.untyped_storage()._cdata][1]
        if weight.stays:
            return None
        return weight.host.as_strided(saved.shape, saved.stride(), saved.storage_offset())

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
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the last update may be on its way
        for parameter, weight in self._of.items():
            parameter.data = weight.host
        self.model.cpu()

    def _with_weights(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module's forward, around which its weights are on the device."""

        @functools.wraps(forward)  # libraries ask for the arguments that it takes
        def run(*args: Any, **kwargs: Any) -> Any:
            here: list[_Weight] = []
            self._running.append((module, here))
            try:
                for weight in tuple(self._reads.get(module, ())):
                    weight.enter()
                    here.append(weight)
                    self._fetch_ahead(weight)
                return forward(*args, **kwargs)
            finally:
                self._running.pop()
                for weight in here:
                    weight.leave()

        return run

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
        self._expected, self._of_next_pass, self._used = self._of_next_pass, self._used, []
        for weight in self._of.values():
            weight.forget()

    def _read(self, parameter: Any) -> None:
        """Have a weight there that is read from outside of its module."""
        weight = self._of.get(parameter)
        if weight is None or weight.users:
            return
        weight.enter()
        weight.stays = not self._running
        if self._running:
            module, here = self._running[-1]
            self._reads.setdefault(module, []).append(weight)
            here.append(weight)

    def is_here(self, weight: "_Weight") -> None:
        """Remember which memory of the device a weight is in."""
        storage = weight.parameter.untyped_storage()
        self._here[storage._cdata] = weakref.ref(storage), weight


class _Reads(TorchFunctionMode):
    """Tells of every parameter whose values a function of torch is about to read."""

    def __init__(self, tell: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__ if func.__name__ != "__get__" else func.__self__.__name__
        if name not in QUESTIONS:
            for given in (*args, *(kwargs or {}).values()):
                for part in given if isinstance(given, list | tuple) else (given,):
                    if isinstance(part, nn.Parameter):
                        self.tell(part)
        return func(*args, **(kwargs or {}))


class _Weight:
    """A weight in the host's memory, and on the device while someone uses it or is about to."""

    def __init__(
        self, owner: OffloadedWeights, parameter: nn.Parameter, host: torch.Tensor, away: Any
    ) -> None:
        self.owner, self.parameter, self.host, self.away = owner, parameter, host, away
        self.users, self.version, self.stays = 0, 0, False
        self.copy: torch.Tensor | None = None
        self.event: Any = None
        _set(parameter, away)

    def come(self) -> None:
        """Begin to copy it to the device, if it is not there."""
        if self.copy is None:
            device = self.away.device
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.copy = torch.empty_like(self.host, device=device)
                self.event = copy_on(streams_of(device)[1], self.copy, self.host)

    def enter(self) -> None:
        """Have it on the device for one user more."""
        self.users += 1
        if self.users > 1:
            return
        self.come()
        wait_for(self.event)
        _set(self.parameter, self.copy)
        self.version = self.parameter._version
        self.owner.is_here(self)

    def leave(self, *, is_changed: bool = False) -> None:
        """Give the device's memory back after the last user, and keep what was changed."""
        self.users -= 1
        if self.users:
            return
        assert self.copy is not None
        if is_changed or self.parameter._version != self.version:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.host.copy_(self.copy, non_blocking=True)
        _set(self.parameter, self.away)
        self.copy = None

    def forget(self) -> None:
        """Drop a copy that was fetched ahead and that nobody came for."""
        if self.copy is not None and not self.users:
            wait_for(self.event)  # its memory may be given to another tensor now
            self.copy = None


def _set(parameter: nn.Parameter, data: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunction():  # no read of its values
        parameter.data = data  # type: ignore[assignment]


def _movable(model: nn.Module, stay: set[int]) -> list[nn.Parameter]:
    """Return the parameters that are worth moving and can be moved by themselves."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            stay = stay | {id(parameter) for parameter in module.parameters()}
    parameters = list(model.parameters())
    sharing = Counter(parameter.untyped_storage()._cdata for parameter in parameters)
    return [
        parameter
        for parameter in parameters
        if id(parameter) not in stay
        and parameter.nbytes >= offloading.SMALLEST_BYTES
        and parameter.layout is torch.strided
        and (parameter.is_floating_point() or parameter.is_complex())
        and sharing[parameter.untyped_storage()._cdata] == 1
    ]


def _on_the_host(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Return the values of a parameter in the host's memory, pinned for a card."""
    host = parameter.data
    if device.type != "cuda":
        return host
    return torch.empty_like(host, device="cpu", pin_memory=True).copy_(host)
