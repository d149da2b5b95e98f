"""What a search asks of one recorded step: what it tells of others, and what is no use."""

from memlab.config import Sharding, StepConfig
from memlab.planning.chain import Chain
from memlab.planning.plans import chain_for
from memlab.predicting.predict import Prediction
from memlab.recommending.alternatives import Alternative, alternatives_of, cost_of
from memlab.recommending.goal import Goal
from memlab.recommending.space import Settings, can_be_planned
from memlab.result import Outcome, StepResult
from memlab.running import Ended
from memlab.techniques.technique import in_words
from memlab.trace import CATEGORIES, Category

STATES = (Category.PARAMETERS, Category.BUFFERS, Category.OPTIMIZER_STATE)
SAME_PEAK = 0.995  # a peak that is not below this share of another one saves nothing
SAME_TIME = 1.02  # times that differ by less than this factor count as equal


def key_of(settings: tuple[Settings, ...]) -> tuple[str, ...]:
    """Return settings as a key that does not depend on their order."""
    return tuple(sorted(f"{name}={value}" for one in settings for name, value in one.items()))


def has_too_large_states(goal: Goal, result: StepResult) -> bool:
    """Return whether what a rank holds between two steps is above the limit by itself."""
    if goal.space.base.sharding is Sharding.NONE or result.timeline is None:
        return False
    columns = [CATEGORIES.index(category) for category in STATES]
    held = result.timeline.bytes_by_category[:, columns].sum(axis=1).min()
    return bool(held > goal.limit_bytes)


def is_idle(result: StepResult, parent: StepResult) -> bool:
    """Return whether one more setting saves neither memory nor what steps are compared by."""
    costs = cost_of(result), cost_of(parent)
    if costs[0] and costs[1] and costs[0] < costs[1] / SAME_TIME:
        return False
    pairs = (
        (result.peak_allocated_bytes, parent.peak_allocated_bytes),
        (result.peak_reserved_bytes, parent.peak_reserved_bytes),
        (result.needed_bytes, parent.needed_bytes),
    )
    return not any(
        now < SAME_PEAK * then for now, then in pairs if now is not None and then is not None
    )


def alternatives_at(
    goal: Goal, settings: tuple[Settings, ...], predicted: Prediction
) -> list[Alternative]:
    """Return a predicted step as it is, then with other accumulation steps and budgets."""
    config, space = predicted.result.config, goal.space

    def make() -> list[Alternative]:
        chain = _chain(goal, config) if space.budgets and can_be_planned(config) else None
        return list(alternatives_of(predicted, settings, space, chain, goal.target.kind))

    key = key_of(settings), config, space.accumulation_steps, space.budgets
    return goal.known.estimated(key, make)


def _chain(goal: Goal, config: StepConfig) -> Chain | None:
    try:
        return chain_for(goal.workload, config, goal.target, seed=goal.seed, run=goal.run)
    except Ended as ended:
        if ended.outcome is Outcome.CANCELLED:
            raise
        return None  # this model cannot be planned: its other settings are tried without a budget


def exact(goal: Goal, start: Prediction, alternative: Alternative) -> StepResult:
    """Return the exact prediction of an alternative, judged by the limit."""
    found = start
    if not alternative.exact:
        config = alternative.result.config
        goal.steps.settings = " and ".join(map(in_words, alternative.settings))
        found = goal.known.predicted(
            goal.workload, config, goal.device, goal.options, every_rank=False
        )
    if found.forecast is None:
        return found.result
    return found.forecast.against_limit(found.result, goal.limit_bytes)
