"""`Changes`: what the forwards of one module have changed so far, and where else they could.

The idea. A forward may write to any place that its code can reach: a list that an attribute holds,
a global, a class attribute (`places.py`). A walk finds these places (`reachable.py`), and takes as
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

from typing import Any

import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.recompute.places import ATOMS, MISSING, PythonPlace, are_same, is_same
from memlab.techniques.recompute.reachable import OF_TORCH, Reachable
from memlab.techniques.recompute.watched import SeenTensors

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
        large: by id of the holder, the changed places that take long to read.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.parts = path, module, list(module.modules())
        self.seen = SeenTensors()
        self.own_devices = {p.device for p in module.parameters()}
        self.is_first = True
        self.draws_in_python = True  # until a first call has shown that it does not
        self.is_recompute_walked = False
        self.places: list[PythonPlace] | None = None
        self.large: dict[int, PythonPlace] = {}
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
                place
                for place in self.places
                if not place.is_large or id(place.holder) in self.large
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
