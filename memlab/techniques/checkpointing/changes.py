"""`Changes`: what the forwards of one module have changed so far, and where else they could.

The idea. A forward may write to any place that its code can reach: a list that an attribute holds,
a global, a class attribute (`mutable_state.py`). A walk finds these places, and takes as
long as a small block takes to run; reading what they hold takes a tenth of that. So a walk is made
in the first two forwards, and again when a place comes to hold an object that no walk has seen.
Between walks each forward reads the known places, and compares what they hold by identity.

An example. A layer has an empty dict, `self.cache`; its first forward puts a list into it, to which
every forward appends a number:

    forward   finds its places by         after it
    1         a walk: the dict            the dict holds a list that is unknown: a walk is due
    2         a walk: dict and list       the list holds another number, which has no places
    3         reading dict and list       the list has changed once more

What the arguments of a call can reach is walked in the first two forwards too, and later only if
those have changed some of it: arguments are others in each call.

Left out: an array of a MiB or more is read in the first two forwards, and later only if it changed
in these.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import MODULES, PARAMETERS, is_wrapper, storage_key
from memlab.devices.generators import (
    autocast_of,
    marks_of_draws,
    same_autocast,
    set_random,
    states_in_python,
    states_of_random,
)
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing.blocks import OFF
from memlab.techniques.checkpointing.mutable_state import (
    ATOMS,
    MISSING,
    OF_TORCH,
    PythonPlace,
    Reachable,
    are_same,
    is_same,
)
from memlab.techniques.checkpointing.watched import (
    SeenTensors,
    Watched,
    values_put_back,
    version,
    watch,
)

PLAIN = ATOMS | {torch.Tensor, nn.Parameter}
HOOKS = frozenset(name for name in OF_TORCH if "hook" in name)
NUM_WALKS = 2  # what a first forward makes, a second one fills


class Changes:
    """What is known of a module from one forward to the next.

    Attributes:
        path: of the module in its model, for messages.
        module: the module itself.
        parts: the module and all modules within it.
        seen: of the tensors that its forwards can reach.
        own_devices: of its parameters.
        is_first: whether no forward has ended yet.
        draws_in_python: whether its forwards draw random numbers of NumPy or Python.
        is_recompute_walked: whether the walk of the first recompute has been made.
        places: what it can reach, for the next forward to read; None if a walk is due.
        large: by key, the changed places that take long to read.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.parts = path, module, list(module.modules())
        self.seen = SeenTensors()
        self.own_devices = {p.device for p in module.parameters()}
        self.is_first = True
        self.draws_in_python = True  # until a first call has shown that it does not
        self.is_recompute_walked = False
        self.places: list[PythonPlace] | None = None
        self.large: dict[Any, PythonPlace] = {}
        self._num_walks = NUM_WALKS  # left to do, of forwards
        self._given_changed = False
        self._last: list[tuple[Any, ...]] = []  # what each place held after a forward
        self._held: list[tuple[Any, ...]] = []  # what attributes and registries of modules held
        self._has_large = False  # whether places that take long to read are among those known
        self._known: dict[int, Any] = {}  # what the last walk has seen

    @property
    def is_given_walked(self) -> bool:
        """Whether the next forward walks through what its arguments hold."""
        return self._num_walks > 0 or self._given_changed

    def note_given(self) -> None:
        """Remember that a forward has changed what its arguments hold."""
        self._given_changed = True

    def walk(self) -> list[PythonPlace]:
        """Find every place that the module's forward can reach, and return them."""
        found = Reachable([(self.path, self.module)], self.parts)
        if found.unreadable:
            self.refuse(
                f"its forward can reach {found.unreadable[0]}, which does not tell how far it has "
                "come; keep a list and a number in its place"
            )
        self.seen.learn(found.tensors, self.parts, found.names)
        self.places, self._last = found.places, [()] * len(found.places)
        self._has_large = True

        held = [vars(part).values() for part in self.parts]
        read = [place.read() for place in found.places]  # some of it is code that none calls
        self._known = {
            id(value): value
            for values in (*held, *read, found.seen)
            for value in values
            if not isinstance(value, torch.Tensor | tuple | frozenset)  # tensors are not to be held
        }
        return found.places

    def read_places(
        self, attributes: list[tuple[Any, ...]]
    ) -> tuple[list[PythonPlace], list[tuple[Any, ...]]]:
        """Return the places that a forward can reach, and what they hold now.

        Args:
            attributes: what each module's attributes hold.
        """
        hooks = [
            tuple(held.values())
            for part in self.parts
            for name, held in vars(part).items()
            if name in HOOKS and isinstance(held, dict) and held
        ]
        places = self._find_places([*attributes, *hooks])
        contents = [place.read() for place in places]
        if are_same(contents, self._last):
            return places, contents

        for held, last in zip(contents, self._last, strict=True):
            if not is_same(held, last) and self._has_unknown(held):
                places = self.walk()
                return places, [place.read() for place in places]
        return places, contents

    def _find_places(self, held: list[tuple[Any, ...]]) -> list[PythonPlace]:
        """Return the places to read: those of the last walk, unless something is new since.

        Args:
            held: what the modules' attributes and registries hold.
        """
        is_learning = self._num_walks > 0
        self._num_walks -= is_learning
        is_known = are_same(held, self._held) or not any(map(self._has_unknown, held))
        self._held = [_lasting(contents) for contents in held]
        if is_learning or self.places is None or not is_known:
            return self.walk()

        if self._has_large:
            self._has_large = False
            self.places = [
                place for place in self.places if not place.is_large or place.key in self.large
            ]
            self._last = [()] * len(self.places)
        return self.places

    def remember(self, places: list[PythonPlace], contents: list[tuple[Any, ...]]) -> None:
        """Remember what places hold after a forward; forget them if it has put others there."""
        # other places were found by a call inside of this one
        if self.places is not places or are_same(contents, self._last):
            return
        for at, (held, last) in enumerate(zip(contents, self._last, strict=True)):
            if not is_same(held, last):
                if self._has_unknown(held):
                    self.places = None  # or what was replaced would be held until the next call
                    return
                self._last[at] = _lasting(held)

    def _has_unknown(self, contents: tuple[Any, ...]) -> bool:
        """Return whether the contents hold an object that the last walk has not seen."""
        for value in contents:
            if type(value) in PLAIN or value is MISSING or self._known.get(id(value)) is value:
                continue
            if isinstance(value, tuple | frozenset):
                if self._has_unknown(tuple(value)):
                    return True
            elif not isinstance(value, torch.Tensor):
                return True
        return False

    def refuse(self, what: str) -> None:
        """Raise UnsupportedError for what cannot be put back."""
        raise UnsupportedError(
            f"{self.path} cannot be recomputed: {what}, or leave the module out by "
            "checkpoint_modules"
            if ";" in what
            else f"{self.path} cannot be recomputed: {what}; leave the module out by "
            "checkpoint_modules"
        )

    def refuse_as_later(self, what: str) -> None:
        """Raise UnsupportedError for what a first forward did not do."""
        raise UnsupportedError(
            f"{self.path} {what} in this forward and did not in its first, so that it cannot be "
            "recomputed exactly; leave it out by checkpoint_modules"
        )


def _lasting(contents: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return contents to be compared with later ones; none if that would hold a tensor."""
    return () if any(isinstance(value, torch.Tensor) for value in contents) else contents


# Results of autograd without their graphs, for what is noted of a call.
#
# A graph holds what it was computed from. So a module that keeps its last output, noted
# before each forward as it is, would hold the graphs of all forwards before, one through
# the other.


def without_graph(value: Any) -> Any:
    """Return a value; of a result of autograd its numbers alone."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def without_graphs(value: Any) -> Any:
    """Return a value; of a container that holds results of autograd a copy without their graphs."""
    if type(value) in (list, tuple):
        items = [without_graphs(item) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) is dict:
        copied = {key: without_graphs(item) for key, item in value.items()}
        return value if all(copied[key] is value[key] for key in copied) else copied
    return without_graph(value)


# `NotedPlaces`: what a call changes in lists, dicts, closures and globals, and putting it
# back.
#
# A place is anything of Python that a forward can write to (`mutable_state.py`). Every place that
# the call can reach is read before it and after it, and what has changed is kept as it was
# before.

NO_CACHE = f", as a cache does; use {OFF} if the model's config has use_cache, or give it none"


class NotedPlaces:
    """The places that one call changes.

    Args:
        changes: of the module.
        given: the call's arguments, of any structure.
        inputs: ids of the tensors among them, which are watched elsewhere.
    """

    def __init__(self, changes: Changes, given: Any, inputs: Collection[int]) -> None:
        self._changes, self._given, self._inputs = changes, given, inputs
        self._changed: list[tuple[PythonPlace, tuple[Any, ...]]] = []  # with what it held before

    @contextlib.contextmanager
    def noted(self, attributes: list[tuple[Any, ...]]) -> Iterator[None]:
        """Note what is held wherever the forward may write, and keep it where it did.

        Args:
            attributes: what each module's attributes hold.
        """
        changes = self._changes
        given = Reachable([("its argument", self._given)] if changes.is_given_walked else [])
        self._given = None
        inner = [(w, t) for w, t in given.tensors if id(t) not in self._inputs]
        versions = [version(tensor) for _, tensor in inner]
        own, contents = changes.read_places(attributes)
        before = [place.read() for place in given.places] + contents

        yield

        for (where, tensor), earlier in zip(inner, versions, strict=True):
            if version(tensor) != earlier:
                changes.refuse(f"its forward changes {where} in place{NO_CACHE}")
        places = given.places + own
        after = [place.read() for place in places]
        if not are_same(before, after):
            of_given = {place.key for place in given.places}
            self._keep_changed(places, before, after, of_given)
        changes.remember(own, after[len(given.places) :])

    def _keep_changed(
        self,
        places: list[PythonPlace],
        before: list[tuple[Any, ...]],
        after: list[tuple[Any, ...]],
        of_given: set[Any],
    ) -> None:
        """Keep what changed places held before, or refuse the change.

        Args:
            places: all that were read.
            before: what each held before the forward.
            after: what each holds now.
            of_given: keys of the places that the arguments reach.
        """
        changes = self._changes
        changed = {
            place.key: (place, held, now)
            for place, held, now in zip(places, before, after, strict=True)
            if not is_same(held, now)
        }
        if not of_given.isdisjoint(changed):
            changes.note_given()
        for key, (place, held, now) in changed.items():
            if place.fixed:
                changes.refuse(f"its forward changes {place.where}, {place.fixed}")
            if key in of_given and _keeps_results(now, held):
                changes.refuse(f"its forward adds results to {place.where}{NO_CACHE}")
            if place.is_large:
                changes.large[key] = place
        self._changed = [
            (place, tuple(map(without_graph, held))) for place, held, _ in changed.values()
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put back what the forward changed, and afterwards what the recompute did."""
        changes = self._changes
        if not changes.is_recompute_walked:  # it may do what its forward did not
            changes.is_recompute_walked = True
            changes.walk()
        places = list(changes.places or ())
        if self._changed:
            noted = {place.key for place, _ in self._changed}
            places = [place for place in places if place.key not in noted]
            places += [place for place, _ in self._changed]
        before = [place.read() for place in places]
        for place, contents in self._changed:
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


def _keeps_results(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether a place came to hold tensors that have a graph, as a cache does."""
    known = {id(tensor) for tensor in pytree.tree_leaves(before)}
    new = (leaf for leaf in pytree.tree_leaves(now) if id(leaf) not in known)
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in new)


# `ModuleAttributes`: what a module's attributes and torch's registries held, and putting it
# back.
#
#     attributes    those that the model sets itself, such as `self.calls`, one by one
# registries    torch's own dicts of each module: hooks of every kind, buffers; their
# contents
#
# Parameters and modules are registries too, and a forward that changes them is refused:
# they are what a model is made of. Another class over the memory of a frozen weight is no
# change.

REGISTRIES = tuple(sorted(OF_TORCH))


class ModuleAttributes:
    """The attributes and registries of a module and all modules in it, as they are now.

    Args:
        parts: the module itself, and then all modules in it.
        with_graphs: note results of autograd as they are; if not, their numbers without the graphs.

    Attributes:
        values: of the attributes of each part.
    """

    def __init__(self, parts: list[nn.Module], *, with_graphs: bool) -> None:
        self._parts = parts
        values = [tuple(vars(part).values()) for part in parts]
        self.values = values if with_graphs else [tuple(map(without_graph, v)) for v in values]
        self._names = [tuple(vars(part)) for part in parts]
        self._registries = _registries(parts)
        self._own_forward = vars(parts[0]).get("forward")

    def check_structure(self, refuse: Callable[[str], None]) -> None:
        """Call `refuse` with why, if what the model is made of has changed since."""
        if vars(self._parts[0]).get("forward") is not self._own_forward:
            refuse("its forward replaces the forward of its own module")
        for part, before in zip(self._parts, self._registries, strict=True):
            for name, what in ((MODULES, "modules"), (PARAMETERS, "parameters")):
                held, now = before.get(name, ()), vars(part)[name]
                now = (*now, *now.values())
                if not is_same(held, now) and not _are_of_same_memory(held, now):
                    refuse(
                        f"its forward makes, replaces or removes {what} of its own; do that in "
                        "its constructor"
                    )

    def let_go_of_graphs(self) -> None:
        """Let go of the graphs in attributes that were replaced: each would hold the one before."""
        for at, part in enumerate(self._parts):
            now, before = vars(part), self.values[at]
            if not are_same([tuple(now.values())], [before]):
                self.values[at] = tuple(
                    value if now.get(name) is value else without_graphs(value)
                    for name, value in zip(self._names[at], before, strict=True)
                )

    def put_back(self) -> None:
        """Give the modules what was noted."""
        _set_attributes(self._parts, self._names, self.values)
        _set_registries(self._parts, self._registries)


def _are_of_same_memory(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether nothing but the classes of frozen parameters has changed.

    FSDP gathers a 4-bit weight of bitsandbytes as a plain tensor, and the layer gives it back its
    class in its forward: another object over the same memory, which FSDP replaces again.
    """
    half = len(now) // 2
    return before[:half] == now[:half] and all(map(_is_of_same_memory, before[half:], now[half:]))


def _is_of_same_memory(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if not (isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)):
        return False
    if before.requires_grad or now.requires_grad:  # its gradient belongs to one object
        return False
    return (
        not is_wrapper(type(before))
        and not is_wrapper(type(now))
        and _memory(before) == _memory(now)
    )


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = storage_key(tensor.untyped_storage())
    return storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


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
    """Return what torch's own registries of each module hold: the names, and then the values."""
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


# `State`: what the forward of a module begins with beside its inputs, noted for its
# recompute.
#
# The idea. A recompute must do exactly what the forward did, though it runs later: when
# random numbers have been drawn, buffers have changed, hooks have been installed. So before
# each forward we note all that it could read or change. After it we look at what it did
# change, and keep only that, as it was before. The recompute begins by putting that back,
# and ends by putting everything as it found it:
#
#     forward      note everything -> run -> compare -> keep what changed, as it was before
#     backward     put that back -> run again -> put back what was there just now
#
# What is noted, and where:
#
#     random numbers of torch, NumPy and `random`        devices/generators.py
#     autocast, context variables                        here
#     tensors that are changed in place                  watched.py
#     attributes and registries (hooks) of its modules   `ModuleAttributes`
#     whatever else its code can reach: lists, dicts,    `NotedPlaces`; `Changes` knows them from
#     closures, globals, class attributes, arrays        one forward to the next, mutable_state.py
#                                                        finds, reads and writes them
#
# An example. A forward that counts its calls, `self.calls += 1`, and drops out less with
# each of them: the third forward begins with `calls` 2 and a generator in state G. It ends
# with 3 and another state, so 2 and G are kept. Its recompute, after a fourth forward,
# finds 4; it sets 2 and G, runs, and sets 4 and the generator's present state again.
#
# What changes and cannot be put back is refused by name. Left out: what no walk can see,
# such as files and C extensions, and an array of a MiB or more that a forward begins to
# change later than in its second call; `memlab.verify` finds such a change if three updates
# show it.


class State:
    """The state that one call begins with.

    Args:
        changes: of the module.
        tensors: of the call's arguments.
        given: the arguments themselves, of any structure.
    """

    def __init__(self, changes: Changes, tensors: list[torch.Tensor], given: Any = ()) -> None:
        self.changes = changes
        self.inputs = {id(tensor) for tensor in tensors}
        self.places = NotedPlaces(changes, given, self.inputs)
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their values before
        every = {torch.device("cpu"), *(t.device for t in tensors), *changes.own_devices}
        self.devices = [device for device in every if device.type != "meta"]
        self.autocast = autocast_of(self.devices)
        self.random: dict[torch.device, bytes] = {}
        self.in_python: tuple[Any, Any] | None = None
        self.context: dict[contextvars.ContextVar[Any], Any] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the state, run the forward, keep what it changed as it was before."""
        changes = self.changes
        self.attributes = ModuleAttributes(changes.parts, with_graphs=False)
        trainable = [p.requires_grad for p in changes.module.parameters()]
        in_python = states_in_python() if changes.draws_in_python else None
        marks = marks_of_draws()
        context = contextvars.copy_context()
        before = states_of_random(self.devices)

        with self.places.noted(self.attributes.values):
            watched = watch(changes.seen, changes.parts, self.inputs)
            yield

        after = states_of_random(self.devices)
        self.random = {d: s for d, s in before.items() if s != after[d]}
        self._judge_python(in_python, marks_of_draws() != marks, changes.is_first)
        self.attributes.check_structure(changes.refuse)
        self.attributes.let_go_of_graphs()
        self._judge_context(context)
        self._judge_tensors(watched)
        if trainable != [p.requires_grad for p in changes.module.parameters()]:
            changes.refuse("its forward sets requires_grad of a parameter")
        changes.is_first = False

    def _judge_context(self, before: contextvars.Context) -> None:
        for variable, value in contextvars.copy_context().items():
            if before.get(variable, MISSING) is not value and type(value) not in ATOMS:
                self.changes.refuse(f"its forward leaves another {variable.name!r} in its context")
        self.context = {var: value for var, value in before.items() if type(value) in ATOMS}

    def _judge_python(self, before: Any, has_drawn: bool, is_first: bool) -> None:
        if is_first:
            self.changes.draws_in_python = has_drawn or repr(before) != repr(states_in_python())
        elif has_drawn and not self.changes.draws_in_python:
            self.changes.refuse_as_later("draws random numbers of NumPy or Python")
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
                self.changes.refuse_as_later(f"changes {tensor.what}")
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
        with self._modules_restored(), self.places.restored():
            in_place = self.changes.seen.writes_unseen  # a walk that has just been made may say so
            with values_put_back(self.tensors, in_place=in_place):
                yield context.run

    @contextlib.contextmanager
    def _modules_restored(self) -> Iterator[None]:
        """Go back to the noted attributes, random numbers and autocast, and return."""
        now = ModuleAttributes(self.changes.parts, with_graphs=True)
        generators = states_of_random(self.random)
        in_python = states_in_python() if self.in_python else None
        self.attributes.put_back()
        set_random(self.random, self.in_python)
        try:
            with same_autocast(self.autocast):
                yield
        finally:
            set_random(generators, in_python)
            now.put_back()
