"""Which modules lie inside others, by their paths.

An exported script holds this file as it stands, so it imports nothing of memlab.
"""

from collections.abc import Iterable


def is_inside(path: str, others: Iterable[str]) -> bool:
    """Return whether the path of a module lies below one of the others."""
    return any(path.startswith(f"{other}.") for other in others)
