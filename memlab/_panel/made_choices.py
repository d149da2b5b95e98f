"""`MadeChoices`: workloads with other choices, each made once. No widgets."""

from collections.abc import Mapping
from typing import Any

from memlab.arguments.quoting import shown
from memlab.arguments.variants import have_same_values
from memlab.errors import WorkloadError
from memlab.workload import Value, Workload

Chosen = tuple[str, tuple[tuple[str, Value], ...]]  # the name of a workload, and choices


class MadeChoices:
    """Makes workloads with other choices, and keeps them.

    Args:
        workloads: by name; those that are made are added.
    """

    def __init__(self, workloads: dict[str, Workload]) -> None:
        self._workloads = workloads
        self._found: dict[Chosen, Workload | str] = {}  # or why there is none

    def get(self, listed: Workload, values: Mapping[str, Value]) -> Workload:
        """Return a workload of the list with these choices.

        Raises:
            WorkloadError: it cannot have them.
        """
        if listed.choices is not None and dict(listed.choices.values) == values:
            return listed

        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        try:
            key = listed.name, tuple(values.items())
            hash(key)
        except TypeError:  # of a kind that no control can show
            raise WorkloadError(
                f"choices={shown(values)}; allowed is a text, an int, True, False or None for each "
                "name, or a list of texts"
            ) from None
        if key not in self._found:
            try:
                self._found[key] = self._kept(listed.chosen(**values))
            except WorkloadError as error:
                self._found[key] = str(error)
        found = self._found[key]
        if isinstance(found, str):
            raise WorkloadError(found)
        return found

    def _kept(self, made: Workload) -> Workload:
        """Return the workload of this name, which may be on screen and have been predicted."""
        kept = self._workloads.setdefault(made.name, made)
        if kept is not made and (
            made.choices is None or not have_same_values(kept.choices, made.choices)
        ):
            raise WorkloadError(
                f"make_workload gives another choice the same name, {made.name}; let the name say "
                "the choices"
            )
        return kept

    def checked(self, listed: Workload, values: Any, on_screen: Mapping[str, Value]) -> Workload:
        """Return a workload with choices that code asks for; None for its own.

        Args:
            listed: a workload of the list.
            values: some choices by name.
            on_screen: those of the others; empty for those of the workload itself.

        Raises:
            WorkloadError: they are no choices by name, or the workload cannot have them.
        """
        if values is None:
            return listed
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise WorkloadError(
                f"choices={shown(values)}; allowed is a dict of choices by name, such as "
                "{'rank': 32}, or None for those of the workload itself"
            )
        own = listed.choices.values if listed.choices else {}
        return self.get(listed, {**own, **on_screen, **values}) if values else listed
