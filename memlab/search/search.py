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

Only an exact prediction decides whether a setting fits. Left out: compiled steps, whose time is not
known, and channels last.
"""

import heapq
import itertools
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memlab._util.units import format_bytes
from memlab.api import predict_with_size_model
from memlab.config import Sharding, StepConfig
from memlab.devices.cards import Target
from memlab.prediction.budget_frontier import BudgetFrontier
from memlab.prediction.plans import frontier_for
from memlab.prediction.predict import Prediction
from memlab.result import FitStatus, Outcome, StepResult, counted
from memlab.running import Ended, Progress
from memlab.runtime.isolation import OnProgress, predicting, runner
from memlab.runtime.same_step import circumstances_here
from memlab.runtime.sending import Stamp, stamp
from memlab.search.alternatives import (
    ACCUMULATION,
    Alternative,
    Chosen,
    Space,
    alternatives_of,
    can_be_planned,
    cost_of,
    frees_states,
    may_be_faster,
    with_settings,
)
from memlab.techniques import registry
from memlab.techniques.technique import in_words
from memlab.trace import CATEGORIES, STATES
from memlab.workload import Workload

# What searches of this session have predicted: another limit needs no new recording of a
# step.
#
# A prediction does not depend on the limit: its size model judges any. It is used again only
# for the same workload, device, seed and circumstances (`runtime/same_step.py`) and while
# no file of a person's own was edited that this session or a worker had imported or read
# for them.

MOST_KEPT = 2  # workloads with a device


@dataclass(slots=True)
class Known:
    """Predictions of one workload on one device.

    Attributes:
        predictions: by config, without a limit; those that ended without an answer are not kept.
        of_one_rank: configs of whose ranks only the one that holds most was predicted, though
            others hold something else.
        too_large: estimates that were left out as too large: the limit, the settings of the step,
            what was estimated, and the config. The same question then leaves them out again,
            though it knows more of the other estimates from the beginning.
        alternatives: estimates, by the settings of the step and what was estimated.
        stamps: of a person's own files that decided them, here and in the workers.
    """

    predictions: dict[StepConfig, Prediction] = field(default_factory=dict)
    of_one_rank: set[StepConfig] = field(default_factory=set)
    too_large: set[Any] = field(default_factory=set)
    alternatives: dict[Any, list[Alternative]] = field(default_factory=dict)
    stamps: dict[str, Stamp | None] = field(default_factory=dict)

    def predicted(
        self,
        workload: Workload,
        config: StepConfig,
        device: Any,
        options: dict[str, Any],
        *,
        every_rank: bool = True,
    ) -> Prediction:
        """Return a prediction without a limit, made now if there is none.

        Without `every_rank` that of the rank which holds most is enough.

        Raises:
            Ended: it was cancelled.
        """
        cancel: threading.Event | None = options.get("cancel")
        if cancel is not None and cancel.is_set():
            raise Ended(Outcome.CANCELLED, "stopped during the search")
        found = self.predictions.get(config)
        if found is None or (every_rank and config in self.of_one_rank):
            found = predict_with_size_model(
                workload, config, device, **options, every_rank=every_rank
            )
            self.stamps = {**predicting.stamps, **self.stamps}  # an edit meanwhile is one, too
            if found.result.outcome is Outcome.CANCELLED:
                raise Ended(found.result.outcome, found.result.message)
            if found.result.outcome in (Outcome.OK, Outcome.UNSUPPORTED):
                self.predictions[config] = found
                self.of_one_rank.discard(config)
                if not every_rank and not _has_every_rank(found.result):
                    self.of_one_rank.add(config)
        return found

    def cost_of(self, alternative: Alternative) -> float | None:
        """Return the cost of an alternative as it was predicted exactly; None if it was not."""
        known = self.predictions.get(alternative.result.config)
        return None if known is None else cost_of(known.result)


def _has_every_rank(result: StepResult) -> bool:
    known = sum(len(rank.rank_numbers) for rank in result.ranks or ())
    return result.config.world_size in (1, known)


_known: OrderedDict[str, Known] = OrderedDict()


def known_of(workload: Workload, target: Target, seed: int, beside: int = 1) -> Known:
    """Return what is known of a workload on a device; nothing yet if its code cannot be told.

    Args:
        workload: what is trained.
        target: the device.
        seed: of the predictions.
        beside: how many workloads the search has, of which none may push out another.
    """
    key, stamps = circumstances_here([workload, target.name, seed, torch.get_num_threads()])
    if key is None:
        return Known()
    found = _known.setdefault(key, Known())
    if any(stamp(file) != then for file, then in found.stamps.items()):
        found = _known[key] = Known()
    found.stamps = {**stamps, **found.stamps}
    _known.move_to_end(key)
    while len(_known) > max(MOST_KEPT, beside):
        _known.popitem(last=False)
    return found


MOST_STEPS = 40  # that are recorded; each takes one or two seconds
SAME_PEAK = 0.995  # a peak that is not below this share of another one saves nothing
SAME_TIME = 1.02  # times that differ by less than this factor count as equal
MOST_IN_VAIN = 8  # steps in a row that are recorded for nothing, once an estimate fits
MOST_TOO_LARGE = 3  # exact predictions of a step that do not fit; then only likely ones are made
OTHER_PRODUCTS = "precision"  # of what may be faster only this changes the products of a step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BestSoFar(Progress):
    """A setting was found that fits and is the fastest so far; every rank of it was predicted.

    Attributes:
        result: of it, judged by the limit.
        prediction: the same without a limit.
    """

    result: StepResult
    prediction: Prediction


@dataclass(slots=True)
class Race:
    """One call of `recommend`: the searches of one or several workloads, and how far they are.

    The workloads are in one race: what is too slow beside what any of them has found is not
    predicted. So only the steps as they are, which say what the workloads differ by, are predicted
    for each.

    Attributes:
        tell: gets the progress; None for nobody.
        patience: seconds after which the search begins nothing more, if something fits. Without an
            answer it may take twice as long, and a prediction that goes on then is ended. The step
            as it is is predicted however long that takes.
        most: how many settings are looked for, of all workloads together.
        searches: one for each workload.
        started: when the search began.
        has_begun: whether the step as it is was predicted.
        recorded: steps, of all workloads together.
        doing: the step that is recorded, in words; "" outside of the search.
        best: the best so far, in words; "" if nothing fits yet.
        least_cost: of the estimates that fit.
        numbers: of what waits, in the order in which it was found.
    """

    tell: OnProgress | None
    patience: float
    most: int
    searches: "list[WorkloadSearch]" = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    has_begun: bool = False
    recorded: int = 0
    doing: str = ""
    best: str = ""
    least_cost: float = float("inf")
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def run(self) -> None:
        """Look at what waits with the least bound of all searches, until nothing is left."""
        while (waiting := [one for one in self.searches if one.waiting]) and not self.is_over:
            min(waiting, key=lambda one: one.waiting[0]).look_at_next()
        self.doing = ""
        for search in self.searches:
            search.end()

    @property
    def rest_seconds(self) -> float:
        """How long a prediction that begins now may take."""
        seconds = time.monotonic() - self.started
        return 2 * self.patience - seconds if self.has_begun else float("inf")

    @property
    def is_over(self) -> bool:
        """Whether nothing more is begun."""
        return self.rest_seconds <= (self.patience if self.best else 0.0)

    @property
    def worst_cost(self) -> float:
        """The cost that a further setting has to beat; infinite while some are missing."""
        costs = sorted(one.cost for search in self.searches for one in search.fitting)
        return costs[self.most - 1] if len(costs) >= self.most else float("inf")

    @property
    def fastest(self) -> Alternative | None:
        """The fastest step that fits, if one does."""
        fitting = (search.fitting[0] for search in self.searches if search.fitting)
        return min(fitting, key=lambda one: one.rank, default=None)

    def begin(self, workload: Workload, chosen: Chosen) -> None:
        """Note which step is recorded next."""
        self.recorded += 1
        self.say(workload, chosen)

    def say(self, workload: Workload, chosen: Chosen) -> None:
        """Say from now on which step is predicted."""
        of_which = f" of {workload.name}" if len(self.searches) > 1 else ""
        settings = " and ".join(map(in_words, chosen))
        self.doing = f"{of_which}{f' with {settings}' if settings else ''}: "

    def found(self, result: StepResult, prediction: Prediction | None) -> None:
        """Say at once what is the best so far; it is handed over if it was predicted as a whole."""
        peak = counted(result)
        least = format_bytes(min(peak.nbytes, peak.needed_bytes or peak.nbytes))
        time = f"{result.time_words}, " if result.time_words else ""
        self.best = f"{time}{least}, with {result.config}"
        said: dict[str, Any] = {"text": "found one that fits", "fraction": 1.0}
        if prediction is None:
            self(Progress(**said))
        else:
            self(BestSoFar(**said, result=result, prediction=prediction))

    def __call__(self, progress: Progress) -> None:
        """Pass progress on, with how far the search is."""
        if self.tell is None:
            return
        if self.doing:
            most = max(MOST_STEPS, self.recorded)  # each workload has one step at least
            done = (self.recorded - 1 + progress.fraction) / most
            seconds = time.monotonic() - self.started
            best = f"; best so far: {self.best}" if self.best else ""
            progress = replace(
                progress,
                text=f"searching for {seconds:.0f} s, step {self.recorded} of at most {most}"
                f"{self.doing}{progress.text}{best}",
                fraction=min(max(done, seconds / (2 * self.patience)), 1.0),
            )
        self.tell(progress)


@dataclass(order=True, slots=True)
class Waiting:
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
    settings: Chosen = field(compare=False)
    parent: StepResult | None = field(compare=False, default=None)
    start: Prediction | None = field(compare=False, default=None)
    alternative: Alternative | None = field(compare=False, default=None)

    @property
    def name(self) -> str:
        """The setting that was added last; "" of the step as it is."""
        return in_words(self.settings[-1]) if self.settings else ""

    def __str__(self) -> str:
        """Return what it adds to the base."""
        settings = self.alternative.settings if self.alternative else self.settings
        return " and ".join(map(in_words, settings)) or "the step as it is"


Key = tuple[str, ...]
"""Settings that were added to the base, whatever their order."""


def key_of(settings: Chosen) -> Key:
    """Return settings as a key that does not depend on their order."""
    return tuple(sorted(f"{name}={value}" for one in settings for name, value in one.items()))


@dataclass(kw_only=True, slots=True, eq=False)
class WorkloadSearch:
    """What is searched of one workload, and what was found.

    Attributes:
        workload: what is trained.
        space: what may be changed.
        device: as `memlab.predict` takes it.
        target: the same device.
        limit_bytes: that a step may hold, the headroom taken off.
        each_format: whether to find the fastest of each number format too, among the steps that are
            recorded, if it may be the fastest. How the times of two formats compare is the least
            certain of all, and a run can tell.
        seed: set before the model, the batch and each step.
        timeout_seconds: for each prediction.
        cancel: once set, the search ends.
        known: what earlier searches have predicted.
        race: the whole call.
        fitting: predicted to fit, the fastest first.
        close: predicted to lie too near to the limit to say, the fastest first.
        tried: every step that was predicted or estimated.
        starts: results of all recorded steps, also those that are refused or change nothing, by the
            settings that were added to the base.
        refused: messages of settings that this model or device refuses, by setting; "" is the base.
        idle: settings that change nothing when they are added to the base.
        is_whole: whether the search ended because no step was left that may be faster.
        left: what the time did not allow: steps and estimates, in words, those with the least cost
            that they can have first.
        waiting: a heap of what is looked at next.
        in_vain: steps recorded since the least cost of estimates that fit was last improved.
        bias: the least factor by which exact predictions were above their estimates, by the
            settings of the step; those of single samples apart, which are estimated less well.
        too_large: exact predictions of a step that did not fit, by its settings.
        best_of: the fastest alternative of a step that fits, by the settings of the step.
    """

    workload: Workload
    space: Space
    device: Any
    target: Target
    limit_bytes: int
    each_format: bool
    seed: int
    timeout_seconds: float
    cancel: threading.Event | None
    known: Known
    race: Race
    fitting: list[Alternative] = field(default_factory=list)
    close: list[Alternative] = field(default_factory=list)
    tried: list[Alternative] = field(default_factory=list)
    starts: dict[Key, StepResult] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)
    is_whole: bool = True
    left: list[str] = field(default_factory=list)
    waiting: list[Waiting] = field(init=False)
    in_vain: int = 0
    bias: dict[tuple[Key, bool], float] = field(default_factory=dict)
    too_large: Counter[Key] = field(default_factory=Counter)
    best_of: dict[Key, Alternative] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = [Waiting(0.0, 0.0, next(self.race.numbers), ())]

    @property
    def options(self) -> dict[str, Any]:
        """Options of `predict_with_size_model`: the time that is left, and how to tell and stop."""
        left = max(self.race.rest_seconds, 0.1)
        return {
            "seed": self.seed,
            "timeout_seconds": min(self.timeout_seconds, left),
            "on_progress": self.race,
            "cancel": self.cancel,
        }

    def latest(self) -> list[Alternative]:
        """Return what was tried, each config once: an exact prediction instead of its estimate."""
        in_turn = sorted(self.tried, key=lambda one: one.exact)
        return list({one.result.config: one for one in in_turn}.values())

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
            self.is_whole = False
        else:
            self._record(one)

    def end(self) -> None:
        """Note what was not tried, and of what is too close to say only what may be wanted."""
        worst = self.race.worst_cost
        left = [one for one in sorted(self.waiting) if not self._is_too_slow(one)]
        left = [one for one in left if not self._is_needless(one) and not self._is_done(one)]
        self.left = list(dict.fromkeys([*self.left, *map(str, left)]))
        self.is_whole &= not self.left
        close = [
            one
            for one in self.close
            if one.cost <= worst or self._may_be_of_a_faster_format(one.result)
        ]
        self.close = sorted(close, key=lambda one: one.rank)

    def add_every_rank(self) -> None:
        """Predict the other ranks of the best and of what is too close to say; judge them again.

        The search records of each step the rank that holds most. With ZeRO-1 every rank holds
        something else, and with `fully_shard` the last ones may hold less. To compare settings one
        rank is enough; of what is returned all are predicted, as `memlab.predict` does. A rank that
        holds less may reserve a little more.

        Raises:
            Ended: it was cancelled.
        """
        waiting, fitting, close = self.fitting, list[Alternative](), list[Alternative]()
        while waiting and len(fitting) < self.race.most and not (fitting and self.race.is_over):
            one, *waiting = self._whole(waiting[0]), *waiting[1:]
            if one.result.fit is FitStatus.FITS:
                fitting.append(one)
            elif one.result.fit is FitStatus.TOO_CLOSE:
                close.append(one)
        close += [one if self.race.is_over else self._whole(one) for one in self.close]
        looked_at = {one.result.config: one for one in (*fitting, *close)}
        self.fitting = [*sorted(fitting, key=lambda one: one.rank), *waiting]
        self.close = sorted(close, key=lambda one: one.rank)
        self.tried = [looked_at.get(one.result.config, one) for one in self.tried]

    def _whole(self, one: Alternative) -> Alternative:
        """Return an alternative with every rank; as it is if nothing is missing."""
        if one.result.config not in self.known.of_one_rank:
            return one
        whole = self._predicted(one.result.config, every_rank=True)
        if whole.result.outcome is not Outcome.OK or whole.size_model is None:
            return one
        return replace(one, result=self.judged(whole))

    def _predicted(self, config: StepConfig, *, every_rank: bool = False) -> Prediction:
        return self.known.predicted(
            self.workload, config, self.device, self.options, every_rank=every_rank
        )

    def judged(self, predicted: Prediction) -> StepResult:
        """Return the result of a prediction, judged by the limit."""
        size_model, result = predicted.size_model, predicted.result
        return result if size_model is None else size_model.against_limit(result, self.limit_bytes)

    # Whether something that waits is worth a prediction.

    def _is_too_slow(self, one: Waiting) -> bool:
        """Return whether enough was found that is faster than a step or an estimate can be."""
        if max(one.bound, one.products) <= self.race.worst_cost:
            return False
        alternative = one.alternative
        return alternative is None or not self._may_be_of_a_faster_format(alternative.result)

    def _may_be_of_a_faster_format(self, result: StepResult) -> bool:
        """Return whether a number format without a setting that fits may be the fastest here."""
        formats = {fits.result.config.precision for fits in self.fitting}
        is_of_another = self.each_format and result.config.precision not in formats
        fastest = self.race.fastest
        return is_of_another and fastest is not None and may_be_faster(result, fastest.result)

    def _is_enough(self, one: Waiting) -> bool:
        """Return whether a step is left out, because those before it have brought nothing."""
        is_in_vain = one.bound > 0.0 and self.in_vain >= MOST_IN_VAIN
        is_in_vain = is_in_vain and self.race.least_cost < float("inf")
        return self.race.recorded >= MOST_STEPS or is_in_vain

    def _is_needless(self, one: Waiting) -> bool:
        """Return whether a step saves memory for a time that is not known, and something fits."""
        return not self.space.has_times and one.bound > 0.0 and bool(self.fitting)

    def _is_done(self, one: Waiting) -> bool:
        """Return whether a step was recorded already, before its turn had come."""
        return one.alternative is None and key_of(one.settings) in self.starts

    def _is_idle_saver(self, one: Waiting) -> bool:
        """Return whether a step adds what only saves memory, and saves none by itself."""
        return one.bound > 0.0 and one.name in self.idle

    def _refuses(self, settings: Chosen) -> bool:
        """Return whether a step is known to be refused, by its settings alone."""
        config = with_settings(self.space.base, settings)
        own = self.workload.make_optimizer is not None
        return registry.is_refused(config, self.target.kind, own_optimizer=own)

    # Recording a step, and what it says of others.

    def _record(self, one: Waiting) -> None:
        """Predict a step; what it says of others waits from now on."""
        self.race.begin(self.workload, one.settings)
        predicted = self._recorded(one)
        self.in_vain += 1
        if predicted is None or predicted.result.outcome is not Outcome.OK:
            return

        if not one.settings:
            self._dive(predicted)
        alternatives = [Alternative(settings=one.settings, result=predicted.result, exact=True)]
        if not self.race.is_over:
            alternatives = self._alternatives(one.settings, predicted)
        elif len(self.space.accumulation_steps) > 1 or self.space.budgets:
            self.left.append(f"other micro-batches and budgets of {one}")
        self.tried += alternatives
        self._confirm_known(one.settings, predicted, alternatives)
        self._confirm_likely(one.settings, predicted, alternatives)
        for alternative in alternatives:
            cost = alternative.cost
            is_known = self.known.cost_of(alternative) is not None
            if not is_known and self._may_fit(one.settings, predicted, alternative):
                self._wait(self._estimate(cost, one.settings, predicted, alternative))
            if cost < self.race.least_cost and alternative.likely_fits(self.limit_bytes):
                self.race.least_cost, self.in_vain = cost, 0
        self._wait_for_more(one.settings, predicted)

    def _recorded(self, waiting: Waiting) -> Prediction | None:
        """Return the prediction of a step; None if it is refused, or does nothing here."""
        is_alone = len(waiting.settings) <= 1
        predicted = self._predicted(with_settings(self.space.base, waiting.settings))
        self.race.has_begun = True
        result, parent = predicted.result, waiting.parent
        if result.outcome is not Outcome.OK and is_alone and not self.race.is_over:
            self.refused[waiting.name] = result.message
        self.starts[key_of(waiting.settings)] = result
        if result.outcome is Outcome.OK and parent is not None and is_idle(result, parent):
            if is_alone:
                self.idle.add(waiting.name)
            return None
        return predicted

    def _alternatives(self, settings: Chosen, predicted: Prediction) -> list[Alternative]:
        """Return a predicted step as it is, then with other accumulation steps and budgets."""
        config, space = predicted.result.config, self.space
        key = key_of(settings), config, space.accumulation_steps, space.budgets
        if key not in self.known.alternatives:
            frontier = self._frontier(config) if space.budgets and can_be_planned(config) else None
            found = alternatives_of(predicted, settings, space, frontier, self.target.kind)
            self.known.alternatives[key] = list(found)
        return self.known.alternatives[key]

    def _frontier(self, config: StepConfig) -> BudgetFrontier | None:
        def run(function: str, arguments: dict[str, Any]) -> Any:
            timeout_seconds = self.options["timeout_seconds"]
            return runner(True, timeout_seconds, self.race, self.cancel)(function, arguments)

        try:
            return frontier_for(self.workload, config, self.target, seed=self.seed, run=run)
        except Ended as ended:
            if ended.outcome is Outcome.CANCELLED:
                raise
            return None  # it cannot be planned: its other settings are tried without a budget

    def _wait_for_more(self, settings: Chosen, predicted: Prediction) -> None:
        """Let the steps with one setting more wait."""
        result, size_model = predicted.result, predicted.size_model
        bound = (cost_of(result) or 0.0) / SAME_TIME
        products = size_model.products_seconds if size_model else 0.0
        is_full = self._has_too_large_states(result)
        fits = self.judged(predicted).fit is FitStatus.FITS
        for more in self.space.with_one_more(settings, savers=not fits):
            if in_words(more[-1]) in self.refused or self._refuses(more):
                continue
            is_faster = self.space.is_faster(more[-1])
            if is_full and not is_faster and not frees_states(more[-1]):
                continue
            is_known = len(more) > 1 or len(self.race.searches) > 1
            is_same = is_faster and is_known and OTHER_PRODUCTS not in more[-1]
            self._wait(
                Waiting(
                    0.0 if is_faster else bound,
                    products if is_same else 0.0,
                    next(self.race.numbers),
                    more,
                    parent=result,
                )
            )

    def _has_too_large_states(self, result: StepResult) -> bool:
        """Return whether what a rank holds between two steps is above the limit by itself."""
        if self.space.base.sharding is Sharding.NONE or result.timeline is None:
            return False
        columns = [CATEGORIES.index(category) for category in STATES]
        held = result.timeline.bytes_by_category[:, columns].sum(axis=1).min()
        return bool(held > self.limit_bytes)

    def _wait(self, one: Waiting) -> None:
        heapq.heappush(self.waiting, one)

    def _estimate(
        self, cost: float, settings: Chosen, start: Prediction, alternative: Alternative
    ) -> Waiting:
        number = next(self.race.numbers)
        return Waiting(cost, 0.0, number, settings, start=start, alternative=alternative)

    def _dive(self, start: Prediction) -> None:
        """Find something that fits soon, if the step as it is does not and nothing else was found.

        That is a number of micro-batches, or the smallest ones with what saves memory piled up
        until it is enough; what saves nothing is taken off again. The step of what fits is then the
        next to be recorded, for other micro-batches and budgets.
        """
        if self.race.fastest is not None:
            return
        space = self.space
        plain = replace(space, budgets=())
        divided = list(alternatives_of(start, (), plain, None, self.target.kind))
        if self.judged(start).fit is FitStatus.FITS or not space.has_times:
            return  # without times what saves memory is tried only if no strategy fits by itself
        self._confirm_likely((), start, divided)
        smallest = {ACCUMULATION: max(space.accumulation_steps)}
        chosen: Chosen = ()
        least = min(one.nbytes for one in divided)
        for group in sorted(space.savers, key=_leaves_plans):
            if self.race.fastest is not None or self.race.is_over:
                return
            piled = ((*chosen, one) for one in group)
            added = next((one for one in piled if not self._refuses((*one, smallest))), None)
            if added is None:
                continue
            own = (*added, smallest) if smallest[ACCUMULATION] > 1 else added
            self.race.begin(self.workload, own)
            found = self._predicted(with_settings(space.base, own))
            if found.size_model is None or counted(found.result).nbytes > SAME_PEAK * least:
                continue
            chosen, least = added, counted(found.result).nbytes
            result = self.judged(found)
            self._note(key_of(added), Alternative(settings=own, result=result, exact=True))
            if result.fit is FitStatus.FITS:
                self._wait(Waiting(-1.0, 0.0, next(self.race.numbers), added))  # before all else

    # Predicting an estimate exactly, and what that says of others.

    def _confirm_likely(
        self, settings: Chosen, start: Prediction, alternatives: Sequence[Alternative]
    ) -> None:
        """Predict the fastest that most likely fits, if it is faster than the best so far."""
        best = self.race.fastest
        if self.race.is_over:
            return
        likely = [one for one in alternatives if one.likely_fits(self.limit_bytes)]
        one = min(likely, key=lambda one: one.rank, default=None)
        if one is not None and (best is None or one.cost < best.cost / SAME_TIME):
            self._confirm(self._estimate(one.cost, settings, start, one), one)

    def _confirm_known(
        self, settings: Chosen, start: Prediction, alternatives: Sequence[Alternative]
    ) -> None:
        """Look at what was predicted exactly before, the fastest first, until one fits.

        This costs no prediction, and may save those of estimates that wait.
        """
        cost_of = self.known.cost_of
        known = [(cost, one) for one in alternatives if (cost := cost_of(one)) is not None]
        for cost, one in sorted(known, key=lambda pair: pair[0]):
            waiting = self._estimate(cost, settings, start, one)
            best = self.best_of.get(key_of(settings))
            if self._is_too_slow(waiting) or (best is not None and best.cost <= cost):
                return
            self._confirm(waiting, one)

    def _may_fit(self, settings: Chosen, start: Prediction, alternative: Alternative) -> bool:
        """Return whether an alternative is worth an exact prediction, or has one already."""
        config, key, known = alternative.result.config, key_of(settings), self.known
        if alternative.exact or config in known.predictions:
            return True
        space = self.space
        asked = self.limit_bytes, key, space.accumulation_steps, space.budgets, config
        if asked in known.too_large:
            return False
        is_hopeless = self.too_large[key] >= MOST_TOO_LARGE
        if is_hopeless and not alternative.likely_fits(self.limit_bytes):
            self.is_whole = False
            known.too_large.add(asked)
            return False
        bias = self.bias.get((key, alternative.is_single))
        if alternative.may_fit(start.result, self.limit_bytes, bias):
            return True
        known.too_large.add(asked)
        return False

    def _confirm(self, one: Waiting, alternative: Alternative) -> None:
        """Predict an estimate exactly, unless one of the same step fits that is as fast.

        One that is estimated to be faster by so little that it counts as the same time is not worth
        a prediction. Most estimates are too fast, since they leave out what adds to gradients.
        """
        key, start = key_of(one.settings), one.start
        assert start is not None
        best = self.best_of.get(key)
        is_slower = best is not None and best.cost <= SAME_TIME * one.bound
        is_slower = is_slower and not alternative.exact  # which costs no prediction
        if is_slower or not self._may_fit(one.settings, start, alternative):
            return
        if not alternative.exact:
            self.race.say(self.workload, alternative.settings)
            start = self._predicted(alternative.result.config)
        result = self.judged(start)
        if result.outcome is not Outcome.OK:
            return
        if not alternative.exact:
            self._learn(key, alternative, counted(result).nbytes)
            self.too_large[key] += result.fit is not FitStatus.FITS
        self._note(key, Alternative(settings=alternative.settings, result=result, exact=True))

    def _note(self, key: Key, sure: Alternative) -> None:
        """Note an exact prediction of a step with these settings."""
        best = self.best_of.get(key)
        if sure.result.config not in {one.result.config for one in self.tried if one.exact}:
            self.tried.append(sure)
        if sure.result.fit is FitStatus.TOO_CLOSE:
            self.close.append(sure)
        if sure.result.fit is FitStatus.FITS and (best is None or sure.rank < best.rank):
            self.best_of[key] = sure
            self.fitting = sorted(self.best_of.values(), key=lambda one: one.rank)
            fastest = self.race.fastest
            assert fastest is not None
            config = sure.result.config
            is_whole = fastest is sure and config not in self.known.of_one_rank
            predicted = self.known.predictions.get(config) if is_whole else None
            self.race.found(fastest.result, predicted)

    def _learn(self, key: Key, alternative: Alternative, nbytes: int) -> None:
        """Note what an exact prediction says of other estimates of the same step."""
        of_which = key, alternative.is_single
        factor = max(1.0, nbytes / alternative.nbytes)
        self.bias[of_which] = min(factor, self.bias.get(of_which, factor))


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


def _leaves_plans(group: Chosen) -> bool:
    """Return whether settings leave alone what is allocated, or move it over a bus."""
    fields = set(group[0])
    return any(fields & set(t.fields) and not t.changes_plans for t in registry.EVERY)
