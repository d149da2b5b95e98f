"""The search: which steps are predicted, the most promising first.

The search begins with the settings as they are, and adds one setting at a time: first what may make
a step faster (number format, fused optimizer), then what only saves memory. Each such step is
predicted once; its other accumulation steps and budgets are estimated by arithmetic. A technique
that only saves memory makes no step faster, so it is not added to a step that fits. One that by
itself saves none is not tried beside other settings either.

Steps are compared by their cost: their time or, where the time of communication is not known, the
bytes that a rank sends. Steps and estimates wait in one queue, those with the least cost that they
can have first. So the search is over once the next of them costs more than what has been found.
Steps that wait are left out once several in a row have brought no estimate that is faster and fits.

A person waits meanwhile. So if the step as it is does not fit, what saves memory is piled up at
once, with the smallest micro-batches, until something fits. Then an estimate that is faster than
the best so far and most likely fits is predicted before anything else. A search that takes too long
returns what it has found.

Only an exact prediction decides whether a setting fits. Left out: compiled steps, which cannot be
predicted, and channels last.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memlab.config import Sharding, StepConfig
from memlab.prediction.chain import Chain
from memlab.prediction.plans import chain_for
from memlab.prediction.predict import Prediction
from memlab.result import Judgement, Outcome, StepResult
from memlab.running import Ended
from memlab.search.alternatives import (
    ACCUMULATION,
    Alternative,
    Settings,
    alternatives_of,
    can_be_planned,
    cost_of,
    counted,
    in_brief,
    likely_fits,
    may_be_faster,
    may_fit,
    with_settings,
)
from memlab.search.goal import MOST_STEPS, Goal
from memlab.techniques import every
from memlab.techniques.technique import in_words
from memlab.trace import CATEGORIES, Category

# What a search asks of one recorded step: what it tells of others, and what is no use.

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


MOST_IN_VAIN = 8  # steps in a row that are recorded for nothing, once an estimate fits
MOST_TOO_LARGE = (
    3  # exact predictions of a step that do not fit, after which only likely ones are made
)
OTHER_PRODUCTS = "precision"  # of what may be faster only this changes the products of a step


@dataclass(slots=True)
class Found:
    """What the search found.

    Attributes:
        fitting: predicted to fit, the fastest first.
        close: predicted to lie too near to the limit to say, the fastest first.
        tried: every step that was predicted or estimated.
        starts: results of all recorded steps, also those that are refused or change nothing, by the
            settings that were added to the base.
        refused: messages of settings that this model or device refuses, by setting; "" is the base.
        idle: settings that change nothing when they are added to the base.
        is_whole: whether the search ended because no step was left that may be faster.
        waiting: what the time did not allow: steps and estimates, in words, those with the least
            cost that they can have first.
    """

    fitting: list[Alternative] = field(default_factory=list)
    close: list[Alternative] = field(default_factory=list)
    tried: list[Alternative] = field(default_factory=list)
    starts: dict[tuple[str, ...], StepResult] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)
    is_whole: bool = True
    waiting: list[str] = field(default_factory=list)

    def latest(self) -> list[Alternative]:
        """Return what was tried, each config once: an exact prediction instead of its estimate."""
        by_config = {
            one.result.config: one for one in sorted(self.tried, key=lambda one: one.exact)
        }
        return list(by_config.values())


@dataclass(order=True, slots=True)
class _Waiting:
    """A step to record, or an estimate of a recorded one to predict exactly.

    Attributes:
        bound: the least cost that it can have, as far as is known; 0 of what may be faster.
        products: the time of its products, if they are those of the step that it is added to. What
            may be faster is looked at by this: it takes no less.
        number: decides between equal bounds.
        settings: of the step.
        parent: the result of the step with one setting less.
        start: the recorded step, if this is an estimate.
        alternative: the estimate.
    """

    bound: float
    products: float
    number: int
    settings: tuple[Settings, ...] = field(compare=False)
    parent: StepResult | None = field(compare=False, default=None)
    start: Prediction | None = field(compare=False, default=None)
    alternative: Alternative | None = field(compare=False, default=None)


def search(goal: Goal) -> Found:
    """Return the settings that fit, the fastest first."""
    return search_together([goal])[0]


def search_together(goals: Sequence[Goal]) -> list[Found]:
    """Return the settings of several workloads that fit, the fastest first of each.

    The workloads are in one race: what is too slow beside what any of them has found is not
    predicted. So only the steps as they are, which say what the workloads differ by, are predicted
    for each.
    """
    race = _Race(goals[0].most)
    race.searches = [_BestFirst(goal, race) for goal in goals]
    steps = goals[0].steps
    while (waiting := [one for one in race.searches if one.waiting]) and not steps.is_over:
        min(waiting, key=lambda one: one.waiting[0]).look_at_next()
    return [one.ended() for one in race.searches]


class _Race:
    """What several searches know of one another.

    Attributes:
        most: how many settings are looked for, of all workloads together.
        searches: one for each workload.
        numbers: of what waits, in the order in which it was found.
        least_cost: of the estimates that fit.
        recorded: steps, of all workloads together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.searches: list[_BestFirst] = []
        self.numbers = itertools.count()
        self.least_cost = float("inf")
        self.recorded = 0

    @property
    def worst_cost(self) -> float:
        """The cost that a further setting has to beat; infinite while some are missing."""
        costs = sorted(one.cost for search in self.searches for one in search.found.fitting)
        return costs[self.most - 1] if len(costs) >= self.most else float("inf")

    @property
    def fastest(self) -> Alternative | None:
        """The fastest step that fits, if one does."""
        fitting = (search.found.fitting[0] for search in self.searches if search.found.fitting)
        return min(fitting, key=lambda one: one.rank, default=None)


class _BestFirst:
    """The search of one workload: what was found, what waits, how long nothing faster has come.

    Attributes:
        in_vain: steps recorded since the least cost of estimates that fit was last improved.
        bias: the least factor by which exact predictions were above their estimates, by the
            settings of the step; those of single samples apart, which are estimated less well.
        too_large: exact predictions of a step that did not fit, by its settings.
        best_of: the fastest alternative of a step that fits, by the settings of the step.
    """

    def __init__(self, goal: Goal, race: _Race) -> None:
        self.goal, self.race = goal, race
        self.found = Found()
        self.waiting = [_Waiting(0.0, 0.0, next(race.numbers), ())]
        self.in_vain = 0
        self.bias: dict[tuple[tuple[str, ...], bool], float] = {}
        self.too_large: Counter[tuple[str, ...]] = Counter()
        self.best_of: dict[tuple[str, ...], Alternative] = {}

    def look_at_next(self) -> None:
        """Look at what waits with the least bound."""
        one = heapq.heappop(self.waiting)
        is_first = not one.settings and one.alternative is None
        if not is_first and (self._is_too_slow(one) or self._is_done(one)):
            return
        if one.alternative is not None:
            self._confirm(one, one.alternative)
        elif not is_first and self._is_needless(one):
            return
        elif not is_first and (self._is_enough(one) or self._is_idle_saver(one)):
            self.found.is_whole = False
        else:
            self._record(one)

    def ended(self) -> Found:
        """Return what was found, once nothing waits."""
        self.goal.steps.number = 0
        found, worst = self.found, self.race.worst_cost
        left = [one for one in sorted(self.waiting) if not self._is_too_slow(one)]
        left = [one for one in left if not self._is_needless(one) and not self._is_done(one)]
        found.waiting = list(dict.fromkeys(map(_in_words, left)))
        found.is_whole &= not left
        close = [
            one
            for one in found.close
            if one.cost <= worst or self._may_be_of_a_faster_format(one.result)
        ]
        found.close = sorted(close, key=lambda one: one.rank)
        return found

    def _is_too_slow(self, one: _Waiting) -> bool:
        """Return whether enough was found that is faster than a step or an estimate can be."""
        if max(one.bound, one.products) <= self.race.worst_cost:
            return False
        alternative = one.alternative
        return alternative is None or not self._may_be_of_a_faster_format(alternative.result)

    def _may_be_of_a_faster_format(self, result: StepResult) -> bool:
        """Return whether a number format without a setting that fits may be the fastest here."""
        formats = {fits.result.config.precision for fits in self.found.fitting}
        is_of_another = self.goal.each_format and result.config.precision not in formats
        fastest = self.race.fastest
        return is_of_another and fastest is not None and may_be_faster(result, fastest.result)

    def _is_enough(self, one: _Waiting) -> bool:
        """Return whether a step is left out, because those before it have brought nothing."""
        is_in_vain = one.bound > 0.0 and self.in_vain >= MOST_IN_VAIN
        is_in_vain = is_in_vain and self.race.least_cost < float("inf")
        return self.race.recorded >= MOST_STEPS or is_in_vain

    def _is_needless(self, one: _Waiting) -> bool:
        """Return whether a step saves memory for a time that is not known, and something fits."""
        return not self.goal.space.has_times and one.bound > 0.0 and bool(self.found.fitting)

    def _is_done(self, one: _Waiting) -> bool:
        """Return whether a step was recorded already, before its turn had come."""
        return one.alternative is None and key_of(one.settings) in self.found.starts

    def _is_idle_saver(self, one: _Waiting) -> bool:
        """Return whether a step adds what only saves memory, and saves none by itself."""
        return one.bound > 0.0 and _name_of_last(one.settings) in self.found.idle

    def _record(self, one: _Waiting) -> None:
        """Predict a step; what it says of others waits from now on."""
        goal, race = self.goal, self.race
        self._begin(one.settings)
        predicted = _predicted(goal, one, self.found)
        self.in_vain += 1
        if predicted is None or predicted.result.outcome is not Outcome.OK:
            return

        if not one.settings:
            self._dive(predicted)
        alternatives = [Alternative(settings=one.settings, result=predicted.result, exact=True)]
        if not goal.steps.is_over:
            alternatives = alternatives_at(goal, one.settings, predicted)
        self.found.tried += alternatives
        self._confirm_known(one.settings, predicted, alternatives)
        self._confirm_likely(one.settings, predicted, alternatives)
        for alternative in alternatives:
            cost = alternative.cost
            is_known = goal.known.cost_of(alternative) is not None
            if not is_known and self._may_fit(one.settings, predicted, alternative):
                self._wait(cost, 0.0, one.settings, None, predicted, alternative)
            if cost < race.least_cost and likely_fits(alternative, goal.limit_bytes):
                race.least_cost, self.in_vain = cost, 0

        fits = exact(goal, predicted, alternatives[0]).fit is Judgement.FITS
        bound = (cost_of(predicted.result) or 0.0) / SAME_TIME
        is_full = has_too_large_states(goal, predicted.result)
        products = predicted.forecast.products_seconds if predicted.forecast else 0.0
        for settings in goal.space.with_one_more(one.settings, savers=not fits):
            if not (_name_of_last(settings) in self.found.refused or self._refuses(settings)):
                is_faster = goal.space.is_faster(settings[-1])
                if is_full and not is_faster and not goal.space.frees_states(settings[-1]):
                    continue
                is_known = len(settings) > 1 or len(race.searches) > 1
                is_same = is_known and OTHER_PRODUCTS not in settings[-1]
                self._wait(
                    0.0 if is_faster else bound,
                    products if is_faster and is_same else 0.0,
                    settings,
                    predicted.result,
                )

    def _begin(self, settings: tuple[Settings, ...]) -> None:
        """Say which step is recorded next."""
        goal, race = self.goal, self.race
        race.recorded += 1
        goal.steps.number = race.recorded
        goal.steps.settings = " and ".join(in_words(one) for one in settings)
        goal.steps.workload = goal.workload.name if len(race.searches) > 1 else ""

    def _dive(self, start: Prediction) -> None:
        """Find something that fits soon, if the step as it is does not and nothing else was found.

        That is a number of micro-batches, or the smallest ones with what saves memory piled up
        until it is enough; what saves nothing is taken off again. The step of what fits is then the
        next to be recorded, for other micro-batches and budgets.
        """
        if self.race.fastest is not None:
            return
        goal, space = self.goal, self.goal.space
        plain = replace(space, budgets=())
        divided = list(alternatives_of(start, (), plain, None, goal.target.kind))
        if exact(goal, start, divided[0]).fit is Judgement.FITS or not space.has_times:
            return  # without times what saves memory is tried only if no strategy fits by itself
        self._confirm_likely((), start, divided)
        smallest = {ACCUMULATION: max(space.accumulation_steps)}
        chosen = tuple[Settings, ...]()
        least = min(counted(one.result).nbytes for one in divided)
        for group in sorted(space.savers, key=_leaves_plans):
            if self.race.fastest is not None or goal.steps.is_over:
                return
            piled = ((*chosen, one) for one in group)
            added = next((one for one in piled if not self._refuses((*one, smallest))), None)
            if added is None:
                continue
            own = (*added, smallest) if smallest[ACCUMULATION] > 1 else added
            self._begin(own)
            config = with_settings(space.base, own)
            found = goal.known.predicted(
                goal.workload, config, goal.device, goal.options, every_rank=False
            )
            if found.forecast is None or counted(found.result).nbytes > SAME_PEAK * least:
                continue
            chosen, least = added, counted(found.result).nbytes
            result = found.forecast.against_limit(found.result, goal.limit_bytes)
            self._note(key_of(added), Alternative(settings=own, result=result, exact=True))
            if result.fit is Judgement.FITS:
                self._wait(-1.0, 0.0, added)  # before all else

    def _refuses(self, settings: tuple[Settings, ...]) -> bool:
        """Return whether a step is known to be refused, by its settings alone."""
        config = with_settings(self.goal.space.base, settings)
        own, kind = self.goal.workload.make_optimizer is not None, self.goal.target.kind
        return every.is_refused(config, kind, own_optimizer=own)

    def _confirm_likely(
        self,
        settings: tuple[Settings, ...],
        start: Prediction,
        alternatives: Sequence[Alternative],
    ) -> None:
        """Predict the fastest that most likely fits, if it is faster than the best so far."""
        best = self.race.fastest
        if self.goal.steps.is_over:
            return
        likely = [one for one in alternatives if likely_fits(one, self.goal.limit_bytes)]
        one = min(likely, key=lambda one: one.rank, default=None)
        if one is not None and (best is None or one.cost < best.cost / SAME_TIME):
            waiting = _Waiting(one.cost, 0.0, next(self.race.numbers), settings, None, start, one)
            self._confirm(waiting, one)

    def _wait(
        self, bound: float, products: float, settings: tuple[Settings, ...], *rest: Any
    ) -> None:
        number = next(self.race.numbers)
        heapq.heappush(self.waiting, _Waiting(bound, products, number, settings, *rest))

    def _confirm_known(
        self,
        settings: tuple[Settings, ...],
        start: Prediction,
        alternatives: Sequence[Alternative],
    ) -> None:
        """Look at what was predicted exactly before, the fastest first, until one fits.

        This costs no prediction, and may save those of estimates that wait.
        """
        cost_of = self.goal.known.cost_of
        known = [(cost, one) for one in alternatives if (cost := cost_of(one)) is not None]
        for cost, one in sorted(known, key=lambda pair: pair[0]):
            waiting = _Waiting(cost, 0.0, next(self.race.numbers), settings, None, start, one)
            best = self.best_of.get(key_of(settings))
            if self._is_too_slow(waiting) or (best is not None and best.cost <= cost):
                return
            self._confirm(waiting, one)

    def _may_fit(
        self, settings: tuple[Settings, ...], start: Prediction, alternative: Alternative
    ) -> bool:
        """Return whether an alternative is worth an exact prediction, or has one already."""
        goal, config, key = self.goal, alternative.result.config, key_of(settings)
        if alternative.exact or config in goal.known.predictions:
            return True
        asked = goal.limit_bytes, key, goal.space.accumulation_steps, goal.space.budgets, config
        if asked in goal.known.too_large:
            return False
        is_hopeless = self.too_large[key] >= MOST_TOO_LARGE
        if is_hopeless and not likely_fits(alternative, goal.limit_bytes):
            self.found.is_whole = False
            goal.known.too_large.add(asked)
            return False
        bias = self.bias.get((key, alternative.is_single))
        if may_fit(alternative, start.result, goal.limit_bytes, bias):
            return True
        goal.known.too_large.add(asked)
        return False

    def _confirm(self, one: _Waiting, alternative: Alternative) -> None:
        """Predict an estimate exactly, unless one of the same step fits that is as fast.

        One that is estimated to be faster by so little that it counts as the same time is not worth
        a prediction. Most estimates are too fast, since they leave out what adds to gradients.
        """
        goal, key = self.goal, key_of(one.settings)
        assert one.start is not None
        best = self.best_of.get(key)
        is_slower = best is not None and best.cost <= SAME_TIME * one.bound
        is_slower = is_slower and not alternative.exact  # which costs no prediction
        if is_slower or not self._may_fit(one.settings, one.start, alternative):
            return
        result = exact(goal, one.start, alternative)
        if result.outcome is not Outcome.OK:
            return
        self._learn(key, alternative, counted(result).nbytes)
        if not alternative.exact and result.fit is not Judgement.FITS:
            self.too_large[key] += 1
        self._note(key, Alternative(settings=alternative.settings, result=result, exact=True))

    def _note(self, key: tuple[str, ...], sure: Alternative) -> None:
        """Note an exact prediction of a step with these settings."""
        found, best = self.found, self.best_of.get(key)
        if sure.result.config not in {one.result.config for one in found.tried if one.exact}:
            found.tried.append(sure)
        if sure.result.fit is Judgement.TOO_CLOSE:
            found.close.append(sure)
        if sure.result.fit is Judgement.FITS and (best is None or sure.rank < best.rank):
            self.best_of[key] = sure
            found.fitting = sorted(self.best_of.values(), key=lambda one: one.rank)
            fastest = self.race.fastest
            assert fastest is not None
            self.goal.steps.found(in_brief(fastest.result))

    def _learn(self, key: tuple[str, ...], alternative: Alternative, nbytes: int) -> None:
        """Note what an exact prediction says of other estimates of the same step."""
        if not alternative.exact:
            of_which = key, alternative.is_single
            factor = max(1.0, nbytes / counted(alternative.result).nbytes)
            self.bias[of_which] = min(factor, self.bias.get(of_which, factor))


def _predicted(goal: Goal, waiting: _Waiting, found: Found) -> Prediction | None:
    """Return the prediction of a step; None if it is refused, or does nothing here."""
    config = with_settings(goal.space.base, waiting.settings)
    name = _name_of_last(waiting.settings)
    is_alone = len(waiting.settings) <= 1
    predicted = goal.known.predicted(
        goal.workload, config, goal.device, goal.options, every_rank=False
    )
    goal.steps.has_begun = True
    result, parent = predicted.result, waiting.parent
    if result.outcome is not Outcome.OK and is_alone and not goal.steps.is_over:
        found.refused[name] = result.message
    found.starts[key_of(waiting.settings)] = result
    if result.outcome is Outcome.OK and parent is not None and is_idle(result, parent):
        if is_alone:
            found.idle.add(name)
        return None
    return predicted


def _leaves_plans(group: tuple[Settings, ...]) -> bool:
    """Return whether settings leave alone what is allocated, or move it over a bus."""
    fields = set(group[0])
    return any(fields & set(t.fields) and not t.changes_plans for t in every.EVERY)


def _in_words(one: _Waiting) -> str:
    """Return what a step or an estimate adds to the base."""
    settings = one.alternative.settings if one.alternative else one.settings
    return " and ".join(map(in_words, settings)) or "the step as it is"


def _name_of_last(settings: tuple[Settings, ...]) -> str:
    return in_words(settings[-1]) if settings else ""
