"""Find modules that are inside of others, by their paths.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

from collections.abc import Iterable


def is_inside(path: str, others: Iterable[str]) -> bool:
    """Return whether a module is inside of one of the others, by its path."""
    return any(path.startswith(f"{other}.") for other in others)
