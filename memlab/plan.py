"""`Plan`: which modules of a model are checkpointed, and what each of them keeps all the same.

A plan is made from a trace (`memlab.planning.chain`) and carried out by `build_step`. It names
operators by overload and by their number within one call of the module, so that it holds for every
micro-batch of the model that it was made for, and for no other model.
"""

from dataclasses import dataclass

Instance = tuple[str, int]
"""An operator by overload ("aten.mm.default"), and its number among those of one call."""


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
    """What is recomputed, and what that is predicted to cost.

    Attributes:
        regions: the modules that are checkpointed; none in the plain step.
        saved_bytes: activations of a micro-batch that are held for backward, predicted.
        plain_saved_bytes: of the plain step.
        peak_bytes: most allocated at once in the step, estimated from the trace of the plain step.
        recompute_seconds: what running operators again adds to a step; None if times are not known.
    """

    regions: tuple[Region, ...]
    saved_bytes: int
    plain_saved_bytes: int
    peak_bytes: int
    recompute_seconds: float | None

    @property
    def share(self) -> float:
        """The share of the plain step's activations that is held: what a budget limits."""
        return self.saved_bytes / self.plain_saved_bytes if self.plain_saved_bytes else 1.0
