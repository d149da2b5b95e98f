"""Find the costs of operators that must be taken again, and delete those that were wrong.

A cost is doubted if a measured run contradicts it, and due if its time was taken on a busy machine.
"""

import time
from collections.abc import Mapping

from memlab.costs.cost_store import Store
from memlab.operators.cost import STEADY, OperatorCost
from memlab.operators.signatures import Signature

Costs = Mapping[Signature, OperatorCost]

# load on a machine lasts for minutes, so costs from the same time are probably wrong as well
NEAR_SECONDS = 600.0
AGAIN_AFTER_SECONDS = 60.0  # since a time of a busy machine: its load is probably still there


def doubted(known: Costs, before: float | None) -> dict[Signature, OperatorCost]:
    """Return the costs that were taken before a date, or that have no date; none if it is None.

    A cost with a date in the future counts as one without a date, since a clock was wrong.
    """
    if before is None:
        return {}
    now = time.time()
    return {
        signature: cost
        for signature, cost in known.items()
        if cost.taken_at is None or not before <= cost.taken_at <= now
    }


def is_due(cost: OperatorCost) -> bool:
    """Return whether a time was taken on a busy machine, long enough ago for that to have ended."""
    return cost.is_noisy and time.time() - (cost.taken_at or 0.0) > AGAIN_AFTER_SECONDS


def forget_others(store: Store, old: Costs, new: Costs, before: float) -> None:
    """Delete costs that were taken at about the same time as costs that were shown to be wrong.

    Args:
        store: already holds the new costs.
        old: the doubted costs.
        new: the costs of the same operators now.
        before: the date before which costs were doubted; later ones are kept.
    """
    wrong = {
        cost.taken_at or 0.0
        for signature, cost in old.items()
        if (again := new.get(signature)) is not None and _is_wrong(cost, again)
    }
    store.forget_near(wrong, within_seconds=NEAR_SECONDS, before=before)


def _is_wrong(old: OperatorCost, new: OperatorCost) -> bool:
    """Return whether a time was far off. Noise only adds, so a faster time is always right."""
    if old.seconds is None or new.seconds is None:
        return False
    if old.seconds > STEADY * new.seconds:
        return True
    return new.seconds > STEADY * old.seconds and not new.is_noisy
