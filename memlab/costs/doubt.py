"""Which costs of operators are to be found again, and what that has shown of others.

A cost is doubted if a measured run speaks against it, and due if its time was taken on a busy
machine.
"""

import time
from collections.abc import Mapping

from memlab.costs.cost_store import Store
from memlab.operators.cost import STEADY, OperatorCost
from memlab.operators.signatures import Signature

Costs = Mapping[Signature, OperatorCost]

# a load lasts for minutes: what else was learned then is as doubtful as what was shown to be wrong
NEAR_SECONDS = 600.0
AGAIN_AFTER_SECONDS = 60.0  # since a time of a busy machine: its load is probably still there


def doubted(known: Costs, before: float | None) -> dict[Signature, OperatorCost]:
    """Return the costs that were taken before a date, or that do not say when; none without one.

    A date in the future says nothing: the clock was wrong then, or is now.
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
    """Delete what was learned at about the same time as costs that have shown to be wrong.

    Args:
        store: that holds the new costs already.
        old: costs that were doubted.
        new: what the same operators cost now.
        before: the date that they were doubted by; what was learned later stays.
    """
    wrong = {
        cost.taken_at or 0.0
        for signature, cost in old.items()
        if (again := new.get(signature)) is not None and _is_wrong(cost, again)
    }
    store.forget_near(wrong, within_seconds=NEAR_SECONDS, before=before)


def _is_wrong(old: OperatorCost, new: OperatorCost) -> bool:
    """Return whether a time was far off, as far as one of now can tell: noise only adds to it."""
    if old.seconds is None or new.seconds is None:
        return False
    if old.seconds > STEADY * new.seconds:
        return True
    return new.seconds > STEADY * old.seconds and not new.is_noisy
