"""`State`: what the forward of a module begins with beside its inputs, noted for its recompute.

The idea. A recompute must do exactly what the forward did, though it runs later: when random
numbers have been drawn, buffers have changed, hooks have been installed. So before each forward we
note all that it could read or change. After it we look at what it did change, and keep only that,
as it was before. The recompute begins by putting that back, and ends by putting everything as it
found it:

    forward      note everything -> run -> compare -> keep what changed, as it was before
    backward     put that back -> run again -> put back what was there just now

What is noted, and who finds it:

    random numbers of torch, NumPy and `random`         devices/generators.py
    autocast, context variables                         here
    tensors that are changed in place                   watched.py
    attributes and registries (hooks) of its modules    here
    whatever else its code can reach: lists, dicts,     reachable.py finds these places once,
    closures, globals, class attributes, arrays         places.py reads and writes each of them

An example. A forward that counts its calls, `self.calls += 1`, and drops out less with each of
them: the third forward begins with `calls` 2 and a generator in state G. It ends with 3 and another
state, so 2 and G are kept. Its recompute, after a fourth forward, finds 4; it sets 2 and G, runs,
and sets 4 and the generator's present state again.

Finding the places takes a walk through all that the module's code can reach, as long as a small
block takes to run. So it is made in the first two forwards, and again when a place comes to hold an
object that no walk has seen. Between walks each forward reads the known places, and compares what
they hold by identity.

What changes and cannot be put back is refused by name. Left out: what no walk can see, such as
files and C extensions, and an array of a MiB or more that a forward begins to change later than in
its second call; `memlab.verify` finds such a change if three updates show it.
"""

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memlab.devices.generators import (
    autocast_of,
    marks_of_draws,
    same_autocast,
    set_random,
    states_in_python,
    states_of_random,
)
from memlab.errors import UnsupportedError
from memlab.techniques.recompute.model_cache import OFF
from memlab.techniques.recompute.places import ATOMS, MISSING, PythonPlace, are_same, is_same
from memlab.techniques.recompute.reachable import OF_TORCH, Reachable
from memlab.techniques.recompute.watched import (
    SeenTensors,
    Watched,
    has_own_memory,
    put,
    version,
    watch,
)
from memlab.torch_private import pytree
from memlab.torch_private.modules import MODULES, PARAMETERS

PLAIN = ATOMS | {torch.Tensor, nn.Parameter}
REGISTRIES = tuple(sorted(OF_TORCH))
HOOKS = frozenset(name for name in OF_TORCH if "hook" in name)
NO_CACHE = f", as a cache does; use {OFF} if the model's config has use_cache, or give it none"
NUM_WALKS = 2  # what a first forward makes, a second one fills


class Changes:
    """What the forwards of one module change, as far as they have told."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.parts = path, module, list(module.modules())
        self.is_first = True
        self.seen = SeenTensors()  # of tensors that forwards may change
        self.draws_in_python = True  # until a first call has shown that it does not
        self.own_devices = {p.device for p in module.parameters()}
        self.num_walks = NUM_WALKS  # left to do, of forwards
        self.is_recompute_walked = False
        self.changes_given = False  # what its arguments hold
        self.places: list[PythonPlace] | None = None  # reachable; None if a walk is due
        self.last: list[tuple[Any, ...]] = []  # what each held after a forward
        self.held: list[tuple[Any, ...]] = []  # what attributes and registries of modules held
        self.has_large = False  # whether some of them take long to read
        self.large: dict[int, PythonPlace] = {}  # those that take long to read, and change
        self.known: dict[int, Any] = {}  # what the walk has seen

    def walk(self) -> list[PythonPlace]:
        """Find every place that the module's forward can reach, and return them."""
        found = Reachable([(self.path, self.module)], self.parts)
        if found.unreadable:
            self.refuse(
                f"its forward can reach {found.unreadable[0]}, which does not tell how far it has "
                "come; keep a list and a number in its place"
            )
        self.seen.learn(found.tensors, self.parts, found.names)
        self.places, self.last = found.places, [()] * len(found.places)
        self.has_large = True
        held = [vars(part).values() for part in self.parts]
        read = [place.read() for place in found.places]  # some of it is code that none calls
        self.known = {
            id(value): value
            for values in (*held, *read, found.seen)
            for value in values
            if not isinstance(value, torch.Tensor | tuple | frozenset)  # tensors are not to be held
        }
        return found.places

    def has_unknown(self, contents: tuple[Any, ...]) -> bool:
        """Return whether the contents hold an object that the last walk has not seen."""
        for value in contents:
            if type(value) in PLAIN or value is MISSING or self.known.get(id(value)) is value:
                continue
            if isinstance(value, tuple | frozenset):
                if self.has_unknown(tuple(value)):
                    return True
            elif not isinstance(value, torch.Tensor):
                return True
        return False

    def find_places(self, held: list[tuple[Any, ...]]) -> list[PythonPlace]:
        """Return the places to read: those of the last walk, unless something is new since.

        Args:
            held: what the modules' attributes and registries hold.
        """
        is_learning = self.num_walks > 0
        self.num_walks -= is_learning
        is_known = are_same(held, self.held) or not any(map(self.has_unknown, held))
        self.held = [_lasting(contents) for contents in held]
        if is_learning or self.places is None or not is_known:
            return self.walk()
        if self.has_large:
            self.has_large = False
            self.places = [
                place
                for place in self.places
                if not place.is_large or id(place.holder) in self.large
            ]
            self.last = [()] * len(self.places)
        return self.places

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
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        every = {torch.device("cpu"), *(t.device for t in tensors), *changes.own_devices}
        self.devices = [device for device in every if device.type != "meta"]
        self.autocast = autocast_of(self.devices)
        self.random: dict[torch.device, bytes] = {}
        self.in_python: tuple[Any, Any] | None = None
        self.context: dict[contextvars.ContextVar[Any], Any] = {}
        self.places: list[tuple[PythonPlace, Any]] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the state, run the forward, keep what it changed as it was before."""
        changes = self.changes
        self.values = [tuple(map(_without_graph, vars(part).values())) for part in changes.parts]
        self.names = [tuple(vars(part)) for part in changes.parts]
        self.registries = _registries(changes.parts)
        self.own_forward = vars(changes.module).get("forward")
        trainable = [p.requires_grad for p in changes.module.parameters()]
        in_python = states_in_python() if changes.draws_in_python else None
        marks = marks_of_draws()
        context = contextvars.copy_context()
        before = states_of_random(self.devices)
        with self._places_noted():
            watched = watch(changes.seen, changes.parts, self.inputs)
            yield
        after = states_of_random(self.devices)
        self.random = {d: s for d, s in before.items() if s != after[d]}
        self._judge_python(in_python, marks_of_draws() != marks, changes.is_first)
        self._judge_modules()
        self._take_replaced_apart()
        self._judge_context(context)
        self._judge_tensors(watched)
        if trainable != [p.requires_grad for p in changes.module.parameters()]:
            changes.refuse("its forward sets requires_grad of a parameter")
        changes.is_first = False

    @contextlib.contextmanager
    def _places_noted(self) -> Iterator[None]:
        """Note what is held wherever the forward may write, and keep it where it did."""
        changes = self.changes
        is_given_walked = changes.num_walks > 0 or changes.changes_given  # others each time
        given = Reachable([("its argument", self.given)] if is_given_walked else [])
        self.given = None
        inner = [(w, t) for w, t in given.tensors if id(t) not in self.inputs]
        versions = [version(tensor) for _, tensor in inner]
        of_given = {id(place.holder) for place in given.places}
        own, contents = self._own_places()
        before = [place.read() for place in given.places] + contents
        places = given.places + own
        yield
        for (where, tensor), earlier in zip(inner, versions, strict=True):
            if version(tensor) != earlier:
                changes.refuse(f"its forward changes {where} in place{NO_CACHE}")
        after = [place.read() for place in places]
        if are_same(before, after):
            self._end(own, after[len(given.places) :])
            return
        changed = {
            id(place.holder): (place, held, now)
            for place, held, now in zip(places, before, after, strict=True)
            if not is_same(held, now)
        }
        changes.changes_given |= not of_given.isdisjoint(changed)
        for key, (place, held, now) in changed.items():
            if place.fixed:
                changes.refuse(f"its forward changes {place.where}, {place.fixed}")
            if key in of_given and _keeps_results(now, held):
                changes.refuse(f"its forward adds results to {place.where}{NO_CACHE}")
            if place.is_large:
                changes.large[key] = place
        self.places = [(place, _detached(held)) for place, held, _ in changed.values()]
        self._end(own, after[len(given.places) :])

    def _own_places(self) -> tuple[list[PythonPlace], list[tuple[Any, ...]]]:
        """Return the places of the module itself, and what they hold."""
        changes = self.changes
        hooks = [
            tuple(held.values())
            for part in changes.parts
            for name, held in vars(part).items()
            if name in HOOKS and isinstance(held, dict) and held
        ]
        places = changes.find_places([*self.values, *hooks])
        contents = [place.read() for place in places]
        if not are_same(contents, changes.last):
            for held, last in zip(contents, changes.last, strict=True):
                if not is_same(held, last) and changes.has_unknown(held):
                    places = changes.walk()
                    return places, [place.read() for place in places]
        return places, contents

    def _end(self, places: list[PythonPlace], contents: list[tuple[Any, ...]]) -> None:
        """Remember what places hold now; forget them if a forward has put others there."""
        changes = self.changes
        # other places were found by a call inside of this one
        if changes.places is not places or are_same(contents, changes.last):
            return
        for at, (held, last) in enumerate(zip(contents, changes.last, strict=True)):
            if not is_same(held, last):
                if changes.has_unknown(held):
                    changes.places = None  # or what was replaced would be held until the next call
                    return
                changes.last[at] = _lasting(held)

    def _judge_modules(self) -> None:
        """Refuse a forward that changes what a model is made of."""
        changes = self.changes
        own = vars(changes.module)
        if own.get("forward") is not self.own_forward:
            changes.refuse("its forward replaces the forward of its own module")
        for part, before in zip(changes.parts, self.registries, strict=True):
            for name, what in ((MODULES, "modules"), (PARAMETERS, "parameters")):
                now = vars(part)[name]
                if not is_same(before.get(name, ()), (*now, *now.values())):
                    changes.refuse(
                        f"its forward makes, replaces or removes {what} of its own; do that in "
                        "its constructor"
                    )

    def _take_replaced_apart(self) -> None:
        """Let go of the graphs in attributes that were replaced: each would hold the one before."""
        for at, part in enumerate(self.changes.parts):
            now, before = vars(part), self.values[at]
            if not are_same([tuple(now.values())], [before]):
                self.values[at] = tuple(
                    value if now.get(name) is value else _without_graphs(value)
                    for name, value in zip(self.names[at], before, strict=True)
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

    def _judge_tensors(self, watched: list[Watched]) -> None:
        """Keep the values before of tensors that were changed in place, or refuse the change."""
        changed = self.changes.seen.judge(watched)
        for tensor in changed:
            if tensor.is_fixed:
                self.changes.refuse(
                    f"its forward changes {tensor.what} in place, which a recompute would do once "
                    "more; make that tensor a buffer"
                )
            if tensor.before is None:
                self.changes.check(f"changes {tensor.what}")
        self.tensors = [(w.tensor, w.before) for w in changed if w.before is not None]

    @contextlib.contextmanager
    def restored(self) -> Iterator[Callable[..., Any]]:
        """Go back to the noted state for a recompute, and leave everything as it is now.

        Yields:
            What calls a function with its arguments in the context variables of the forward.
        """
        context = contextvars.copy_context()  # what is set in it is forgotten with it
        for variable, value in self.context.items():
            context.run(variable.set, value)
        with self._modules_restored(), self._places_restored(), self._tensors_restored():
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
        if not changes.is_recompute_walked:  # it may do what its forward did not
            changes.is_recompute_walked = True
            changes.walk()
        places = list(changes.places or ())
        if self.places:
            noted = {id(place.holder) for place, _ in self.places}
            places = [place for place in places if id(place.holder) not in noted]
            places += [place for place, _ in self.places]
        before = [place.read() for place in places]
        for place, contents in self.places:
            place.write(contents)
        try:
            yield
        finally:
            after = [place.read() for place in places]
            if not are_same(before, after):
                for place, held, now in zip(places, before, after, strict=True):
                    if not is_same(held, now):
                        if place.fixed:
                            changes.refuse(
                                f"running again, it changes {place.where}, {place.fixed}"
                            )
                        place.write(held)

    @contextlib.contextmanager
    def _tensors_restored(self) -> Iterator[None]:
        """Put back the values of tensors: in their own memory where others may look into it."""
        is_looked_into = self.changes.seen.writes_unseen
        now = [
            _given_memory(tensor, before)
            if has_own_memory(tensor) and not is_looked_into
            else _given_values(tensor, before)
            for tensor, before in self.tensors
        ]
        try:
            yield
        finally:
            for put_back in now:
                put_back()


def _given_memory(tensor: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
    """Give a tensor a copy of these values as its memory; return what gives it its own again."""
    own = tensor.data
    tensor.data = values.clone()

    def put_back() -> None:
        tensor.data = own

    return put_back


def _given_values(tensor: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
    """Write these values into a tensor; return what writes those that it has now."""
    own = tensor.detach().clone()
    put(tensor, values)
    return functools.partial(put, tensor, own)


def _without_graph(value: Any) -> Any:
    """Return a value, of a result of autograd its numbers: each graph would hold the one before."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _without_graphs(value: Any) -> Any:
    """Return a value; of a container that holds results of autograd a copy without their graphs."""
    if type(value) in (list, tuple):
        items = [_without_graphs(item) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) is dict:
        copied = {key: _without_graphs(item) for key, item in value.items()}
        return value if all(copied[key] is value[key] for key in copied) else copied
    return _without_graph(value)


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
            name: (*held, *held.values())
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
                half = len(before) // 2
                held.clear()
                held.update(zip(before[:half], before[half:], strict=True))


def _keeps_results(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether a place came to hold tensors that have a graph, as a cache does."""
    known = {id(tensor) for tensor in pytree.tree_leaves(before)}
    new = (leaf for leaf in pytree.tree_leaves(now) if id(leaf) not in known)
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in new)


def _lasting(contents: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return contents to be compared with later ones; none if that would hold a tensor."""
    return () if any(isinstance(value, torch.Tensor) for value in contents) else contents


def _detached(contents: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return contents of a place without the graphs of results, which would hold one another."""
    return tuple(map(_without_graph, contents))
