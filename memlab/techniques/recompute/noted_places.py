"""`NotedPlaces`: what a call changes in lists, dicts, closures and globals, and putting it back.

A place is anything of Python that a forward can write to (`places.py`). Every place that the call
can reach is read before it and after it, and what has changed is kept as it was before.
"""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch

from memlab.techniques.recompute.changes import Changes
from memlab.techniques.recompute.model_cache import OFF
from memlab.techniques.recompute.places import PythonPlace, are_same, is_same
from memlab.techniques.recompute.reachable import Reachable
from memlab.techniques.recompute.watched import version
from memlab.techniques.recompute.without_graphs import without_graph
from memlab.torch_private import pytree

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
            of_given = {id(place.holder) for place in given.places}
            self._keep_changed(places, before, after, of_given)
        changes.remember(own, after[len(given.places) :])

    def _keep_changed(
        self,
        places: list[PythonPlace],
        before: list[tuple[Any, ...]],
        after: list[tuple[Any, ...]],
        of_given: set[int],
    ) -> None:
        """Keep what changed places held before, or refuse the change.

        Args:
            places: all that were read.
            before: what each held before the forward.
            after: what each holds now.
            of_given: ids of the holders that the arguments reach.
        """
        changes = self._changes
        changed = {
            id(place.holder): (place, held, now)
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
            noted = {id(place.holder) for place, _ in self._changed}
            places = [place for place in places if id(place.holder) not in noted]
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
