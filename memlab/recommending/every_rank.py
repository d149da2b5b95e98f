"""The other ranks of what is recommended: the search records of each step the rank that holds most.

With ZeRO-1 every rank holds something else, and with `fully_shard` the last ones may hold less. To
compare settings one rank is enough. Of the settings that are returned all are predicted, as
`memlab.predict` does.
"""

from dataclasses import replace

from memlab.limits.judgement import Judgement
from memlab.recommending.alternatives import Alternative
from memlab.recommending.goal import Goal
from memlab.recommending.search import Found
from memlab.result import Outcome


def with_every_rank(goal: Goal, found: Found) -> Found:
    """Return what a search found, with every rank of the best and of what is too close to say.

    A rank that holds less may reserve a little more, so that the best are judged again.

    Raises:
        Ended: it was cancelled.
    """
    waiting, fitting, close = list(found.fitting), list[Alternative](), list[Alternative]()
    while waiting and len(fitting) < goal.most and not (fitting and goal.steps.is_over):
        one = _whole(goal, waiting.pop(0))
        if one.result.fit is Judgement.FITS:
            fitting.append(one)
        elif one.result.fit is Judgement.TOO_CLOSE:
            close.append(one)
    close += [one if goal.steps.is_over else _whole(goal, one) for one in found.close]

    looked_at = {one.result.config: one for one in (*fitting, *close)}
    return replace(
        found,
        fitting=[*sorted(fitting, key=lambda one: one.rank), *waiting],
        close=sorted(close, key=lambda one: one.rank),
        tried=[looked_at.get(one.result.config, one) for one in found.tried],
    )


def _whole(goal: Goal, one: Alternative) -> Alternative:
    """Return an alternative with every rank; as it is if nothing is missing."""
    config = one.result.config
    if config not in goal.known.of_one_rank:
        return one
    whole = goal.known.predicted(goal.workload, config, goal.device, goal.options)
    if whole.result.outcome is not Outcome.OK or whole.forecast is None:
        return one
    return replace(one, result=whole.forecast.against_limit(whole.result, goal.limit_bytes))
