"""`State`: what a module's forward begins with beside its inputs, noted for a recompute.

Random numbers of torch, NumPy and `random`; autocast; context variables; buffers that the forward
changes; torch's registries and the plain attributes of its modules; and whatever else the forward
was seen to change in Python, by the walks of `memlab.techniques.reachable`. Which buffers and other
objects a module changes is learnt in its first calls. What cannot be put back is refused. Left out:
what no walk can see, such as files and C extensions; `memlab.verify` finds it.
"""

import contextlib
import contextvars
import copy
import operator
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from memlab.errors import UnsupportedError
from memlab.techniques.generators import (
    autocast_of,
    marks_of_draws,
    same_autocast,
    set_random,
    states_in_python,
    states_of_random,
)
from memlab.techniques.model_cache import OFF
from memlab.techniques.reachable import ATOMS, MISSING, OF_TORCH, Place, Reachable, is_same

OF_PYTHON = (list, set, deque, dict, OrderedDict, defaultdict, Counter)
BY_VALUE = (*OF_PYTHON, np.ndarray, random.Random, np.random.Generator, np.random.RandomState)
REGISTRIES = tuple(sorted(OF_TORCH))
NO_CACHE = f", as a cache does; use {OFF} if the model's config has use_cache, or give it none"
NUM_WALKS = 2  # what a first forward makes, a second one fills


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
        self.num_walks = NUM_WALKS  # left to do, of forwards
        self.is_recompute_walked = False
        self.changes_given = False  # what its arguments hold
        self.places: dict[int, Place] = {}  # reachable, and changed by a forward or a recompute

    def walked(self, *given: tuple[str, Any]) -> list[Place]:
        """Return every place that the module's forward can reach."""
        return Reachable([(self.path, self.module), *given], self.parts).places

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

    def refuse(self, what: str) -> None:
        """Raise UnsupportedError for what cannot be put back."""
        raise UnsupportedError(
            f"{self.path} cannot be recomputed: {what}, or leave the module out by "
            "checkpoint_modules"
            if ";" in what
            else f"{self.path} cannot be recomputed: {what}; leave the module out by "
            "checkpoint_modules"
        )

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
        tensors: of the call's arguments.
        given: the arguments themselves, of any structure.
    """

    def __init__(self, changes: Changes, tensors: list[torch.Tensor], given: Any = ()) -> None:
        self.changes, self.given = changes, given
        self.inputs = {id(tensor) for tensor in tensors}
        self.buffers: dict[tuple[nn.Module, str], torch.Tensor] = {}
        every = {torch.device("cpu"), *(t.device for t in tensors), *changes.own_devices}
        self.devices = [device for device in every if device.type != "meta"]
        self.autocast = autocast_of(self.devices)
        self.random: dict[torch.device, bytes] = {}
        self.in_python: tuple[Any, Any] | None = None
        self.context: dict[contextvars.ContextVar[Any], Any] = {}
        self.places: list[tuple[Place, Any]] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the state, run the forward, keep what it changed as it was before."""
        changes = self.changes
        self.values = [
            tuple(map(_held, *zip(*vars(p).items(), strict=True))) for p in changes.parts
        ]
        self.names = [tuple(vars(part)) for part in changes.parts]
        self.registries = _registries(changes.parts)
        self.own_forward = vars(changes.module).get("forward")
        held = [(what, tensor, tensor._version) for what, tensor in _unrestored(changes.parts)]
        trainable = [p.requires_grad for p in changes.module.parameters()]
        self.copies = [
            (attributes, name, _value(attributes[name]))
            for attributes, name in changes.find_by_value()
        ]
        is_first = changes.buffers is None
        in_python = states_in_python() if changes.draws_in_python else None
        marks = marks_of_draws()
        context = contextvars.copy_context()
        before = states_of_random(self.devices)
        every = dict(_buffers(changes.parts))
        versions = [buffer._version for buffer in every.values()]
        wanted = every if is_first else changes.buffers or ()
        self.buffers = {place: every[place].detach().clone() for place in wanted}
        with self._places_noted():
            yield
        after = states_of_random(self.devices)
        self.random = {d: s for d, s in before.items() if s != after[d]}
        self._judge_python(in_python, marks_of_draws() != marks, is_first)
        self._judge_modules()
        self._judge_buffers(every, versions, is_first)
        self._judge_context(context)
        for what, tensor, version in held:
            if tensor._version != version:
                raise UnsupportedError(
                    f"{changes.path} cannot be recomputed: its forward changes {what} in place, "
                    "which a recompute would do once more; make that tensor a buffer, or leave "
                    "the module out by checkpoint_modules"
                )
        if trainable != [p.requires_grad for p in changes.module.parameters()]:
            changes.refuse("its forward sets requires_grad of a parameter")

    @contextlib.contextmanager
    def _places_noted(self) -> Iterator[None]:
        """Note what is held wherever the forward may write, and keep it where it did."""
        changes = self.changes
        is_walked = changes.num_walks > 0
        changes.num_walks -= is_walked
        is_given_walked = is_walked or changes.changes_given  # it is given others each time
        given = Reachable([("its argument", self.given)] if is_given_walked else [])
        self.given = None
        inner = [(w, t) for w, t in given.tensors if id(t) not in self.inputs]
        versions = [_version(tensor) for _, tensor in inner]
        of_given = {id(place.holder) for place in given.places}
        own = changes.walked() if is_walked else list(changes.places.values())
        places = given.places + [place for place in own if id(place.holder) not in of_given]
        before = [place.read() for place in places]
        yield
        for (where, tensor), version in zip(inner, versions, strict=True):
            if _version(tensor) != version:
                changes.refuse(f"its forward changes {where} in place{NO_CACHE}")
        changed = [
            (place, contents)
            for place, contents in zip(places, before, strict=True)
            if not is_same(contents, place.read())
        ]
        changes.changes_given |= any(id(place.holder) in of_given for place, _ in changed)
        for place, contents in changed:
            if place.is_local:
                changes.refuse(f"its forward changes {place.where}, which belongs to its thread")
            if id(place.holder) in of_given and _keeps_results(place.read(), contents):
                changes.refuse(f"its forward adds results to {place.where}{NO_CACHE}")
        changes.places |= {
            id(place.holder): place for place, _ in changed if id(place.holder) not in of_given
        }
        self.places = [(place, _detached(contents)) for place, contents in changed]

    def _judge_modules(self) -> None:
        """Refuse a forward that changes what a model is made of."""
        changes = self.changes
        own = vars(changes.module)
        if own.get("forward") is not self.own_forward:
            changes.refuse("its forward replaces the forward of its own module")
        for part, before in zip(changes.parts, self.registries, strict=True):
            for name, what in (("_modules", "modules"), ("_parameters", "parameters")):
                held = dict(before.get(name, ()))
                now = vars(part)[name]
                if held.keys() != now.keys() or any(held[key] is not now[key] for key in held):
                    changes.refuse(
                        f"its forward makes, replaces or removes {what} of its own; do that in "
                        "its constructor"
                    )

    def _judge_context(self, before: contextvars.Context) -> None:
        for variable, value in contextvars.copy_context().items():
            if before.get(variable, MISSING) is not value and type(value) not in ATOMS:
                self.changes.refuse(f"its forward leaves another {variable.name!r} in its context")
        self.context = {var: value for var, value in before.items() if type(value) in ATOMS}

    def _judge_python(self, before: Any, has_drawn: bool, is_first: bool) -> None:
        if is_first:
            self.changes.draws_in_python = has_drawn or repr(before) != repr(states_in_python())
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
    def restored(self) -> Iterator[Callable[..., Any]]:
        """Go back to the noted state for a recompute, and leave everything as it is now.

        Yields:
            What calls a function with its arguments in the context variables of the forward.
        """
        context = contextvars.copy_context()  # what is set in it is forgotten with it
        for variable, value in self.context.items():
            context.run(variable.set, value)
        with self._modules_restored(), self._places_restored():
            yield context.run

    @contextlib.contextmanager
    def _modules_restored(self) -> Iterator[None]:
        parts = self.changes.parts
        values = [tuple(vars(part).values()) for part in parts]
        names = [tuple(vars(part)) for part in parts]
        registries = _registries(parts)
        generators = states_of_random(self.random)
        in_python = states_in_python() if self.in_python else None
        _set_attributes(parts, self.names, self.values)
        _set_registries(parts, self.registries)
        for attributes, name, noted in self.copies:
            attributes[name] = _value(noted)  # a kept graph may need them once more
        for (module, name), before in self.buffers.items():
            module._buffers[name] = before.clone()
        set_random(self.random, self.in_python)
        try:
            with same_autocast(self.autocast):
                yield
        finally:
            set_random(generators, in_python)
            _set_registries(parts, registries)
            _set_attributes(parts, names, values)

    @contextlib.contextmanager
    def _places_restored(self) -> Iterator[None]:
        """Put back what the forward changed, and afterwards what the recompute did."""
        changes = self.changes
        places = {id(place.holder): place for place, _ in self.places}
        if not changes.is_recompute_walked:  # it may do what its forward did not
            changes.is_recompute_walked = True
            places = {id(place.holder): place for place in changes.walked()} | places
        now = [(place, place.read()) for place in places.values()]
        for place, contents in self.places:
            place.write(contents)
        try:
            yield
        finally:
            for place, contents in now:
                if not is_same(contents, place.read()):
                    changes.places[id(place.holder)] = place
                    place.write(contents)


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
            if parameter is not None:
                yield (
                    f"a {'trainable' if parameter.requires_grad else 'frozen'} parameter",
                    parameter,
                )
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


def _registries(parts: list[nn.Module]) -> list[dict[str, tuple[Any, ...]]]:
    """Return what torch's own registries of each module hold: hooks, buffers and the like."""
    return [
        {
            name: tuple(held.items())
            for name in REGISTRIES
            if (held := vars(part).get(name)) and isinstance(held, dict)
        }
        for part in parts
    ]


def _set_registries(parts: list[nn.Module], registries: list[dict[str, tuple[Any, ...]]]) -> None:
    for part, noted, now in zip(parts, registries, _registries(parts), strict=True):
        for name in REGISTRIES:
            before = noted.get(name, ())
            if not is_same(before, now.get(name, ())):
                held = vars(part)[name]
                held.clear()
                held.update(before)


def _keeps_results(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether a place came to hold tensors that have a graph, as a cache does."""
    known = {id(tensor) for tensor in pytree.tree_leaves(before)}
    new = (leaf for leaf in pytree.tree_leaves(now) if id(leaf) not in known)
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in new)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _detached(contents: Any) -> Any:
    """Return contents of a place without the graphs of results, which would hold one another."""
    return tuple(
        _detached(item) if type(item) is tuple else _without_graph(item) for item in contents
    )
