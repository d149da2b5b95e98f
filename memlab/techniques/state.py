"""`State`: what a module's forward begins with beside its inputs, noted for a recompute.

Random numbers of torch, NumPy and `random`; autocast; buffers that the forward changes; the plain
attributes of its modules, lists, dicts and generators among them by value. Which of them a module
changes is learnt in its first call, and a later call that does otherwise is refused. Left out: what
objects of other kinds hold, and what lies outside of the module; `memlab.verify` finds both.
"""

import contextlib
import copy
import ctypes
import operator
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from memlab.errors import UnsupportedError

OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
OF_PYTHON = (list, set, deque, dict, OrderedDict, defaultdict, Counter)
BY_VALUE = (*OF_PYTHON, np.ndarray, random.Random, np.random.Generator, np.random.RandomState)
Autocast = tuple[str, torch.dtype, bool, bool]  # arguments of torch.autocast
MT19937_BYTES = 4 * 624 + 4  # its key and its position, numpy/random/src/mt19937/mt19937.h


class Changes:
    """What the forwards of one module change, as far as they have told."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.parts = path, module, list(module.modules())
        self.buffers: list[tuple[nn.Module, str]] | None = None  # not known yet
        self.silent: set[tuple[nn.Module, str]] = set()  # change, and do not say so
        self.draws_in_python = True  # until a first call has shown that it does not
        self.by_value: list[tuple[dict[str, Any], str]] = []
        self.seen: list[Any] | None = None  # names and types that `by_value` was found for
        self.own_devices = {p.device for p in module.parameters()}

    def find_by_value(self) -> list[tuple[dict[str, Any], str]]:
        """Return the attributes that are kept by value."""
        seen = [(tuple(own), *map(type, own.values())) for own in map(vars, self.parts)]
        if self.seen != seen:
            self.seen = seen
            self.by_value = [
                (vars(part), name)
                for part in self.parts
                for name, value in vars(part).items()
                if name not in OF_TORCH and _is_by_value(value)
            ]
        return self.by_value

    def check(self, what: str) -> None:
        """Raise UnsupportedError for what a first forward did not do."""
        raise UnsupportedError(
            f"{self.path} {what} in this forward and did not in its first, so that it cannot be "
            "recomputed exactly; leave it out by checkpoint_modules"
        )


class State:
    """The state that one call begins with.

    Args:
        changes: of the module.
        devices: of the call's inputs.
    """

    def __init__(self, changes: Changes, devices: Iterable[torch.device]) -> None:
        self.changes = changes
        self.buffers: dict[tuple[nn.Module, str], torch.Tensor] = {}
        every = {torch.device("cpu"), *devices, *changes.own_devices}
        self.devices = [device for device in every if device.type != "meta"]
        self.autocast = _autocast(self.devices)
        self.random: dict[torch.device, bytes] = {}
        self.in_python: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the state, run the forward, keep what it changed as it was before."""
        changes = self.changes
        self.values = [
            tuple(map(_held, *zip(*vars(p).items(), strict=True))) for p in changes.parts
        ]
        self.names = [tuple(vars(part)) for part in changes.parts]
        held = [(what, tensor, tensor._version) for what, tensor in _unrestored(changes.parts)]
        self.copies = [
            (attributes, name, _value(attributes[name]))
            for attributes, name in changes.find_by_value()
        ]
        is_first = changes.buffers is None
        in_python = _in_python() if changes.draws_in_python else None
        marks = _marks()
        before = _random(self.devices)
        every = dict(_buffers(changes.parts))
        versions = [buffer._version for buffer in every.values()]
        wanted = every if is_first else changes.buffers or ()
        self.buffers = {place: every[place].detach().clone() for place in wanted}
        yield
        after = _random(self.devices)
        self.random = {d: s for d, s in before.items() if s != after[d]}
        self._judge_python(in_python, _marks() != marks, is_first)
        self._judge_buffers(every, versions, is_first)
        for what, tensor, version in held:
            if tensor._version != version:
                raise UnsupportedError(
                    f"{changes.path} cannot be recomputed: its forward changes {what} in place, "
                    "which a recompute would do once more; make that tensor a buffer, or leave "
                    "the module out by checkpoint_modules"
                )

    def _judge_python(self, before: Any, has_drawn: bool, is_first: bool) -> None:
        if is_first:
            self.changes.draws_in_python = has_drawn or repr(before) != repr(_in_python())
        elif has_drawn and not self.changes.draws_in_python:
            self.changes.check("draws random numbers of NumPy or Python")
        self.in_python = before if self.changes.draws_in_python else None

    def _judge_buffers(
        self,
        every: dict[tuple[nn.Module, str], torch.Tensor],
        versions: list[int],
        is_first: bool,
    ) -> None:
        after = dict(_buffers(self.changes.parts))
        if is_first and len(list(self.changes.module.modules())) > len(self.changes.parts):
            raise UnsupportedError(
                f"{self.changes.path} cannot be recomputed: its first forward makes modules of its "
                "own; make them in its constructor, or leave it out by checkpoint_modules"
            )
        if is_first:  # what writes to .data, and kernels of norms, leave the version as it is
            self.changes.silent = {p for p, b in every.items() if _has_changed(self.buffers[p], b)}
        changed = [
            place
            for (place, buffer), version in zip(every.items(), versions, strict=True)
            if after.get(place) is not buffer
            or buffer._version != version
            or _is_running_statistic(*place)  # its kernel changes it and does not say so
            or place in self.changes.silent
        ]
        late = [place for place in changed if place not in self.buffers]
        if late:
            self.changes.check(f"changes its buffer {late[0][1]!r}")
        if is_first:
            self.changes.buffers = changed
        self.buffers = {place: self.buffers[place] for place in changed}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run a recompute from the noted state and leave everything as it is now."""
        parts = self.changes.parts
        buffers = {(module, name): module._buffers[name] for module, name in self.buffers}
        values = [tuple(vars(part).values()) for part in parts]
        names = [tuple(vars(part)) for part in parts]
        generators = _random(self.random)
        in_python = _in_python() if self.in_python else None
        _set_attributes(parts, self.names, self.values)
        for attributes, name, noted in self.copies:
            attributes[name] = _value(noted)  # a kept graph may need them once more
        for (module, name), before in self.buffers.items():
            module._buffers[name] = before.clone()
        _set_random(self.random, self.in_python)
        try:
            with _same_autocast(self.autocast):
                yield
        finally:
            _set_random(generators, in_python)
            for (module, name), buffer in buffers.items():
                module._buffers[name] = buffer
            _set_attributes(parts, names, values)


def _buffers(parts: list[nn.Module]) -> Iterator[tuple[tuple[nn.Module, str], torch.Tensor]]:
    """Yield every buffer of modules by where it is."""
    for part in parts:
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield (part, name), buffer


def _is_running_statistic(module: nn.Module, name: str) -> bool:
    return isinstance(module, _NormBase) and module.training and name.startswith("running_")


def _unrestored(parts: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what no recompute puts back, so that no forward may change it in place."""
    for part in parts:
        for parameter in part._parameters.values():
            if parameter is not None and not parameter.requires_grad:
                yield "a frozen parameter", parameter
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield f"its attribute {name!r}", value


def _has_changed(before: torch.Tensor, buffer: torch.Tensor) -> bool:
    if isinstance(buffer, FakeTensor) or buffer.is_meta:
        return False  # it has no values
    return not torch.equal(before, buffer.detach())


def _held(name: str, value: Any) -> Any:
    """Return what is held of an attribute; None where a copy is."""
    return None if name not in OF_TORCH and _is_by_value(value) else _without_graph(value)


def _without_graph(value: Any) -> Any:
    """Return a value, of a result of autograd its numbers: each graph would hold the one before."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _is_by_value(value: Any) -> bool:
    return isinstance(value, torch.Generator) or type(value) in BY_VALUE


def _value(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) in OF_PYTHON:
        copied: Any = copy.copy(value)
        if isinstance(value, dict):
            dict.update(copied, {key: _value(item) for key, item in value.items()})
        elif not isinstance(value, set):
            for at, item in enumerate(value):
                copied[at] = _value(item)
        return copied
    return copy.deepcopy(value) if type(value) in BY_VALUE else _without_graph(value)


def _set_attributes(
    parts: list[nn.Module], names: list[tuple[str, ...]], values: list[tuple[Any, ...]]
) -> None:
    """Give modules the attributes that they had, but for those of torch itself."""
    for part, own_names, own_values in zip(parts, names, values, strict=True):
        now = vars(part)
        if tuple(now) == own_names and all(map(operator.is_, now.values(), own_values)):
            continue
        for name in now.keys() - set(own_names) - OF_TORCH:
            del now[name]
        now.update(
            (name, value)
            for name, value in zip(own_names, own_values, strict=True)
            if name not in OF_TORCH
        )


def _random(devices: Iterable[torch.device]) -> dict[torch.device, bytes]:
    """Return the states of torch's generators: as bytes, which are no tensor that is held."""
    return {device: _bytes(_of_device(device).get_rng_state()) for device in devices}


def _of_device(device: torch.device) -> Any:
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


def _bytes(state: torch.Tensor) -> bytes:
    # by address: over fake tensors, where nothing is drawn, no operator takes a real one
    return ctypes.string_at(state.data_ptr(), state.numel())


def _in_python() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _marks() -> tuple[Any, ...]:
    """Return what moves with every draw of NumPy's or Python's own generator, in microseconds.

    But for the second of two normal numbers of NumPy, which were drawn together.
    """
    _, words, gauss = random.getstate()
    source = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(source, np.random.MT19937):
        numpy: Any = ctypes.string_at(source.ctypes.state_address, MT19937_BYTES)
    else:
        numpy = repr(source.state)
    return words[0], words[-1], gauss, numpy


def _set_random(states: dict[torch.device, bytes], in_python: Any) -> None:
    for device, state in states.items():
        _of_device(device).set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    if in_python is not None:
        random.setstate(in_python[0])
        np.random.set_state(in_python[1])


def _autocast(devices: Iterable[torch.device]) -> list[Autocast]:
    """Return for each type of device its format of autocast, and whether that is on."""
    has_cache = torch.is_autocast_cache_enabled()
    return [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), has_cache)
        for kind in sorted({device.type for device in devices})
        if torch.amp.is_autocast_available(kind)
    ]


@contextlib.contextmanager
def _same_autocast(noted: list[Autocast]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, dtype, enabled, has_cache in noted:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled, has_cache))
        yield
