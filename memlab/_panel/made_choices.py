"""`MadeChoices`: workloads with other choices, each made once. No widgets."""

from collections.abc import Mapping
from typing import Any

from memlab.arguments.quoting import shown
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

        key = listed.name, tuple(values.items())
        if key not in self._found:
            try:
                made = listed.chosen(**values)
                # one of this name may be on screen, and have been predicted
                self._found[key] = self._workloads.setdefault(made.name, made)
            except WorkloadError as error:
                self._found[key] = str(error)
        found = self._found[key]
        if isinstance(found, str):
            raise WorkloadError(found)
        return found

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
        if not isinstance(values, Mapping):
            raise WorkloadError(
                f"choices={shown(values)}; allowed is a dict of choices by name, such as "
                "{'rank': 32}, or None for those of the workload itself"
            )
        own = listed.choices.values if listed.choices else {}
        return self.get(listed, {**own, **on_screen, **values}) if values else listed
