"""`Plan`: which modules of a model are recomputed, and which outputs each of them keeps.

A plan is made from a recorded step (`memlab.planning.chain`) and applied by `build_step`. It
identifies operators by their overload and their number within one call of the module. So it is
valid for every micro-batch of its model, and for no other model.
"""

from dataclasses import dataclass

Instance = tuple[str, int]
"""The overload of an operator ("aten.mm.default"), and its number among those of one call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A module whose activations are dropped in forward and recomputed in backward.

    Attributes:
        path: of the module.
        keep: operators whose outputs are kept for backward, so that they do not run again.
    """

    path: str
    keep: frozenset[Instance] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is recomputed, and its estimated cost.

    Attributes:
        regions: the modules that are recomputed; none in the plain step.
        saved_bytes: bytes of activations of a micro-batch that are held for backward.
        plain_saved_bytes: the same for the plain step.
        peak_bytes: most bytes allocated at once, estimated from the recorded plain step.
        recompute_seconds: time that running operators again adds; None if times are not known.
    """

    regions: tuple[Region, ...]
    saved_bytes: int
    plain_saved_bytes: int
    peak_bytes: int
    recompute_seconds: float | None

    @property
    def share(self) -> float:
        """The share of the plain step's activations that is held, which a budget limits."""
        return self.saved_bytes / self.plain_saved_bytes if self.plain_saved_bytes else 1.0
