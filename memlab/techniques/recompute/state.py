"""`State`: what the forward of a module begins with beside its inputs, noted for its recompute.

The idea. A recompute must do exactly what the forward did, though it runs later: when random
numbers have been drawn, buffers have changed, hooks have been installed. So before each forward we
note all that it could read or change. After it we look at what it did change, and keep only that,
as it was before. The recompute begins by putting that back, and ends by putting everything as it
found it:

    forward      note everything -> run -> compare -> keep what changed, as it was before
    backward     put that back -> run again -> put back what was there just now

What is noted, and in which file:

    random numbers of torch, NumPy and `random`         devices/generators.py
    autocast, context variables                         here
    tensors that are changed in place                   watched.py
    attributes and registries (hooks) of its modules    module_attributes.py
    whatever else its code can reach: lists, dicts,     noted_places.py; changes.py knows them from
    closures, globals, class attributes, arrays         one forward to the next, reachable.py finds
                                                        them, places.py reads and writes each

An example. A forward that counts its calls, `self.calls += 1`, and drops out less with each of
them: the third forward begins with `calls` 2 and a generator in state G. It ends with 3 and another
state, so 2 and G are kept. Its recompute, after a fourth forward, finds 4; it sets 2 and G, runs,
and sets 4 and the generator's present state again.

What changes and cannot be put back is refused by name. Left out: what no walk can see, such as
files and C extensions, and an array of a MiB or more that a forward begins to change later than in
its second call; `memlab.verify` finds such a change if three updates show it.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab.devices.generators import (
    autocast_of,
    marks_of_draws,
    same_autocast,
    set_random,
    states_in_python,
    states_of_random,
)
from memlab.techniques.recompute.changes import Changes
from memlab.techniques.recompute.module_attributes import ModuleAttributes
from memlab.techniques.recompute.noted_places import NotedPlaces
from memlab.techniques.recompute.places import ATOMS, MISSING
from memlab.techniques.recompute.watched import Watched, values_put_back, watch


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
