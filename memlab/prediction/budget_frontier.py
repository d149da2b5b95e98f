"""`BudgetFrontier`: a plan for every memory budget, from the plain step to the least held.

It is made from one recorded plain step. First choose which modules may be recomputed: a cut, of
which no module is inside another. Then drop outputs of these modules one after another, always
those that cost the least time for their bytes. Each plan of the frontier holds less than the plan
before it, at no higher estimated peak, and is not faster. A greedy choice on the convex hull of
each module's options is enough; no solver is needed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab.cost_model.overlap import HOST_SECONDS, python_seconds
from memlab.prediction.recompute_evaluator import NEVER, Candidate, Item, RecomputeEvaluator
from memlab.techniques.technique import Plan, Region

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

# `RecomputeCandidates`: modules of a recorded plain step, none inside another, and what
# recomputing some costs.
#
# `recompute_evaluator.py` explains the idea; this file moves the allocations and frees. A choice
# says for each module None (as in the plain step) or the set of operators whose outputs it
# keeps, which may be empty (everything is recomputed). With its example of three blocks:
#
#     (None, None, None)               the plain step           6 MiB held, peak 8 MiB
#     ({}, None, None)                 the first block again    5 MiB held, peak 7 MiB
#     ({}, {}, {})                     all of them              3 MiB held, peak 7 MiB
#
# What happens to each block of memory, in the order in which `__init__` finds it:
#
# - `_attribute`: which call makes an activation, and for which other calls it is held. An
#   activation is held as long as one of those calls is not recomputed, or takes it as its
#   input.
# - `_find_recomputes`: when an activation is made again if the call that makes it is
#   recomputed.
# - `_find_transients`: the temporaries of a recompute, which are those of the forward.
# - `_find_kept`: outputs that the plain step frees in forward. A call that keeps one holds
#   it until its backward.
# - `_find_inputs`: inputs that the plain step frees in forward. A recomputed call holds
#   them until its backward.
#
# `evaluate` collects all of these as (position, bytes) pairs, sorts them by position and
# adds them up. The highest sum is the peak. `around` returns the step in which some modules
# are already recomputed, so that modules inside of them can be chosen too.
#
# Left out: the same as in `recompute_evaluator.py`.

NEXT = 1e-7  # in rows; much less than the distance between two rows of a recompute
INNER_WINDOW = (0.1, 0.04)  # an inner recompute runs after the outer one, before its own backward


@dataclass(frozen=True, slots=True)
class ChoiceCost:
    """What a choice costs.

    Attributes:
        saved_bytes: bytes of activations of one micro-batch that are held when its forward ends.
        peak_bytes: the most bytes allocated at once in the step.
        recompute_seconds: time of the operators that run again.
        seconds: the same with the time of Python, which keeps outputs and counts operators; on a
            card what the step takes longer, by kernels or by the host that issues them.
    """

    saved_bytes: int
    peak_bytes: int
    recompute_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Lives:
    """What a choice means for calls, operators and activations.

    Attributes:
        is_recomputed: (calls + 1,), whether a call is recomputed; the last entry is for no call.
        keeps: (operators + 1,), whether the output is kept; the last entry is for no operator.
        is_made_by_recomputed: (activations,), whether a recomputed call makes it.
        lives_until: (activations,), the row at which the tensor from forward is freed.
        is_made_again: (activations,), whether a recompute makes it again.
    """

    is_recomputed: npt.NDArray[np.bool_]
    keeps: npt.NDArray[np.bool_]
    is_made_by_recomputed: npt.NDArray[np.bool_]
    lives_until: npt.NDArray[np.float64]
    is_made_again: npt.NDArray[np.bool_]


class RecomputeCandidates:
    """Modules of which none is inside another, and the cost of recomputing some of them.

    Args:
        step: the recorded step.
        candidates: the modules, in order.
    """

    def __init__(self, step: RecomputeEvaluator, candidates: Sequence[Candidate]) -> None:
        self.step, self.candidates = step, list(candidates)
        self.spans = [(i, span) for i, c in enumerate(self.candidates) for span in c.spans]
        self._attribute()
        self._find_recomputes()
        self._find_transients()
        self._find_kept()
        self._find_inputs()

    def _attribute(self) -> None:
        """Find for each activation the call that makes it, and the calls that it is held for."""
        step, count = self.step, len(self.step.activations)
        span_of = np.full(len(step.recording.operators), NEVER)
        for at, (_, span) in enumerate(self.spans):
            span_of[span.first : span.end] = at
        self.producer = span_of[step.birth_operator]

        self.is_held_inside = np.zeros(count, bool)
        pairs: list[tuple[int, int, float]] = []  # activation, call that it is held for, until when
        for at in range(count):
            own = int(self.producer[at])
            outside: dict[int, float] = {}

            # held because the backward of an operator reads it, in the same call or in another
            for forward, row in step.holders[at].items():
                call = int(span_of[forward])
                if call == own != NEVER:
                    self.is_held_inside[at] = True
                else:
                    outside[call] = max(outside.get(call, 0), row)
            if not step.holders[at]:  # autograd saves it, but no operator reads it in backward
                self.is_held_inside[at] = own != NEVER
                if own == NEVER:
                    outside[NEVER] = float(step.death_at[at])

            # an argument of another call, which holds it only if that call is recomputed
            for user in step.users[at]:
                call = int(span_of[user])
                if call not in (own, NEVER):
                    outside.setdefault(call, 0)
            pairs += [(at, call, row) for call, row in outside.items()]

        at_and_call, rows = [pair[:2] for pair in pairs], [row for *_, row in pairs]
        self._pairs = np.array(at_and_call, np.int64).reshape(-1, 2).T, np.array(rows, np.float64)

    def _find_recomputes(self) -> None:
        """Find when each activation is made again if the call that makes it is recomputed."""
        step, spans = self.step, [span for _, span in self.spans]
        first = np.array([span.first for span in spans] + [0])
        stop = np.array([span.stop for span in spans] + [0])
        self._done = np.array([span.done for span in spans] + [0], np.float64)
        backward = np.array([span.backward for span in spans] + [0], np.float64)[self.producer]
        self._births, self._deaths = step.birth_at, step.death_at

        # an activation has the same place in the recompute as it has in the forward
        before, width = step.window
        begin, length = self._forwards(first, stop)
        share = (self._births - begin[self.producer]) / length[self.producer]
        self._reborn = backward - before + width * share

        self._redeath = np.where(self.is_held_inside, self._deaths, backward - 0.05)
        self._runs_again = step.birth_operator < stop[self.producer]

    def _forwards(
        self, first: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the positions at which the forwards of calls begin, and their lengths, in rows."""
        step = self.step
        low = step.starts[first]
        high = np.maximum(step.ends[np.maximum(stop - 1, first)] - 1, low)
        begin = step.position[np.minimum(low, len(step.position) - 1)]
        end = step.position[np.minimum(high, len(step.position) - 1)]
        return begin, np.where(end > begin, end - begin, 1.0) * (1 + 1 / np.maximum(high - low, 1))

    def _find_transients(self) -> None:
        """Find the temporaries of each call's recompute, and its copies of buffers."""
        step, (before, width) = self.step, self.step.window
        parts: list[tuple[Any, Any, Any, Any]] = []  # row, bytes, by which operator, of which call
        state = np.zeros(len(self.spans), np.int64)

        for at, (_, span) in enumerate(self.spans):
            # rows of the forward that are not about activations or about inputs of the call
            low, high = step.starts[span.first], step.ends[max(span.stop - 1, span.first)]
            rows = np.arange(low, high)
            rows = rows[~step.is_activation[step.block[rows]]]
            rows = rows[step.births[step.block[rows]] >= low]
            changes, block = step.row_bytes[rows], step.block[rows]
            positions = span.backward - before + width * (rows - low) / max(high - low, 1)

            # what later operators would free is freed when the recompute stops
            left = block[step.deaths[block] >= high]
            ends = np.full(len(left), span.backward - before + width)
            maker = step.made_by[np.concatenate((block, left))]
            positions, changes = np.append(positions, ends), np.append(changes, -step.own[left])
            parts.append((positions, changes, maker, np.full(len(maker), at)))

            # a copy of the buffers from forward on, and another one during the recompute
            state[at] = step.own[list(span.state)].sum()
            begin = step.position[low]
            during = np.array([begin, span.done, span.backward - before, span.backward - 0.05])
            copies = state[at] * np.array([1, -1, 1, -1])
            parts.append((during, copies, np.full(4, NEVER), np.full(4, at)))

        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else None
        self._transients = columns or [np.zeros(0), *(np.zeros(0, np.int64) for _ in range(3))]
        lows = np.array([step.position[step.starts[span.first]] for _, span in self.spans])
        self._state = [
            np.where((lows <= end) & (self._done[:-1] > end), state, 0) for end in step.forward_ends
        ]

    def _find_kept(self) -> None:
        """Find outputs that the plain step frees in forward, but that a call may keep longer."""
        step = self.step
        rows: list[tuple[float, ...]] = []  # operator, from when, until when, bytes, micro-batch
        for candidate in self.candidates:
            for operators in (item.operators for item in candidate.items):
                for number, span in zip(operators, candidate.spans, strict=True):
                    for block in step.outputs[number]:
                        death = step.deaths[block]
                        if block not in step.index and step.births[block] >= 0:
                            end = int(np.searchsorted(step.forward_ends, death))
                            until, size = span.backward - 0.05, int(step.own[block])
                            rows.append((number, death, until, size, end))
        self._kept = np.array(rows, np.float64).reshape(-1, 5)

    def _find_inputs(self) -> None:
        """Find inputs that the plain step frees in forward, but a recomputed call holds longer."""
        step = self.step
        rows: list[tuple[float, ...]] = []  # call, from when, until when, bytes, micro-batch
        for call, (_, span) in enumerate(self.spans):
            for block in step.passing(span):
                death = step.deaths[block]
                end = int(np.searchsorted(step.forward_ends, step.position[death]))
                until, size = float(self._done[call]), int(step.own[block])
                rows.append((call, step.position[death], until, size, end))
        self._inputs = np.array(rows, np.float64).reshape(-1, 5)

    def _held_inputs(
        self, lives: _Lives
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return positions, bytes and micro-batches of inputs that recomputed calls hold longer."""
        chosen = self._inputs[lives.is_recomputed[self._inputs[:, 0].astype(np.int64)]]
        _, start, until, size, end = chosen.T
        nbytes = size.astype(np.int64)
        return np.concatenate((start, until)), np.concatenate((nbytes, -nbytes)), end

    def evaluate(self, kept: Sequence[frozenset[int] | None]) -> ChoiceCost:
        """Return the cost of a choice: for each module None, or the operators that it keeps."""
        positions, nbytes, saved = self._events(kept)
        order = np.argsort(positions, kind="stable")
        live = np.cumsum(nbytes[order])
        peak = self.step.held_before + int(live.max(initial=0))

        operators = total = 0.0
        for candidate, keep in zip(self.candidates, kept, strict=True):
            if keep is not None:
                seconds = candidate.seconds - sum(float(self.step.seconds[o]) for o in keep)
                operators += seconds
                total += self.total_seconds(candidate, seconds, keeps=bool(keep))
        return ChoiceCost(saved, peak, operators, total)

    def total_seconds(self, candidate: Candidate, seconds: float, *, keeps: bool) -> float:
        """Return the time of a recomputed module with the time of Python.

        On a card both run at the same time, so the longer one counts.
        """
        if self.step.hides_host:
            return max(seconds, HOST_SECONDS * candidate.num_kernels)
        count = candidate.num_operators
        return seconds + python_seconds(len(candidate.spans), count, keeps=keeps)

    def around(self, chosen: Sequence[int]) -> RecomputeEvaluator:
        """Return the step in which these modules are recomputed, for candidates inside of them.

        Each of their activations is allocated twice: briefly in forward, and again in their
        recompute. For the modules inside of them, that recompute is the forward.
        """
        step = copy.copy(self.step)
        nothing: frozenset[int] = frozenset()
        choice = [nothing if i in chosen else None for i in range(len(self.candidates))]
        lives = self._lives(choice)

        # the first life of these activations, in forward, is fixed: no inner choice changes it
        is_made_by_recomputed, sizes = lives.is_made_by_recomputed, step.own[step.activations]
        rows, changes, _, call = self._transients
        runs = lives.is_recomputed[call]
        gone = sizes[is_made_by_recomputed]
        held_at, held_bytes, _ = self._held_inputs(lives)
        ends = (
            self._births[is_made_by_recomputed],
            lives.lives_until[is_made_by_recomputed],
            rows[runs],
            held_at,
        )
        step.other_rows = np.concatenate((step.other_rows, *ends))
        step.other_bytes = np.concatenate(
            (step.other_bytes, gone, -gone, changes[runs], held_bytes)
        )
        saved = self._saved(lives, np.where(is_made_by_recomputed, sizes, 0))
        step.also_saved = step.also_saved + np.array(saved)

        # their second life, from the recompute on, is what inner choices change
        step.window = INNER_WINDOW
        step.position = self._moved(lives.is_recomputed)
        step.birth_at = np.where(lives.is_made_again, self._reborn, self._births)
        step.death_at = np.where(lives.is_made_again, self._redeath, self._deaths)
        self._divide(step, lives)

        stays = ~is_made_by_recomputed | lives.is_made_again
        step.activations, step.birth_operator = step.activations[stays], step.birth_operator[stays]
        step.birth_at, step.death_at = step.birth_at[stays], step.death_at[stays]
        step.last_use = step.last_use[stays]
        step.users = [users for users, has in zip(step.users, stays, strict=True) if has]
        step.holders = [holders for holders, has in zip(step.holders, stays, strict=True) if has]
        return step

    def _moved(self, is_recomputed: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Return the positions of the forward's rows; recomputed calls move to their backward."""
        step, (before, width) = self.step, self.step.window
        position = step.position.copy()
        for (_, span), moves in zip(self.spans, is_recomputed, strict=False):
            if moves:
                low, high = step.starts[span.first], step.ends[span.end - 1]
                share = np.arange(high - low) / max(high - low, 1)
                position[low:high] = span.backward - before + width * share
        return position

    def _divide(self, step: RecomputeEvaluator, lives: _Lives) -> None:
        """Separate the uses of activations inside of the recomputed calls from those outside."""
        calls = [
            span for (_, span), has in zip(self.spans, lives.is_recomputed, strict=False) if has
        ]
        span_of = np.full(len(step.recording.operators), NEVER)
        for at, span in enumerate(calls):
            span_of[span.first : span.end] = at
        made_in = span_of[step.birth_operator]
        last_use, users, holders = self.step.last_use.copy(), [], []
        for at, own in enumerate(made_in):
            here = {user for user in self.step.users[at] if span_of[user] == own}
            for call in {int(span_of[u]) for u in self.step.users[at]} - {NEVER, int(own)}:
                last_use[at] = max(last_use[at], calls[call].done)
            if own != NEVER:
                uses = [step.position[max(step.ends[user] - 1, 0)] for user in here]
                last_use[at] = max([step.birth_at[at], *uses]) + NEXT
            users.append(here)
            of = {f: row for f, row in self.step.holders[at].items() if span_of[f] == own}
            holders.append(of)
        step.last_use, step.users, step.holders = last_use, users, holders

    def _lives(self, kept: Sequence[frozenset[int] | None]) -> _Lives:
        """Return how long each activation of the forward lives, and which are made again."""
        step = self.step
        # the last entries stand for "no call" and "no operator", whose index is NEVER (-1)
        is_recomputed = np.array([kept[i] is not None for i, _ in self.spans] + [False])
        keeps = np.zeros(len(step.recording.operators) + 1, bool)
        keeps[[number for keep in kept if keep for number in keep]] = True

        is_made_by_recomputed = is_recomputed[self.producer]
        is_kept = keeps[step.birth_operator] & is_made_by_recomputed

        # an activation lives until its last use in forward, or longer if a call holds it
        until = np.where(self.is_held_inside & ~is_made_by_recomputed, self._deaths, step.last_use)
        (at, span), row = self._pairs
        np.maximum.at(until, at, np.where(is_recomputed[span], self._done[span], row))
        until = np.where(is_kept, self._deaths, until)

        is_dropped = is_made_by_recomputed & ~is_kept & self._runs_again
        is_made_again = is_dropped & (until < self._reborn)
        return _Lives(is_recomputed, keeps, is_made_by_recomputed, until, is_made_again)

    def _events(
        self, kept: Sequence[frozenset[int] | None]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], int]:
        """Return positions and bytes of all allocations and frees, and the bytes held at the end.

        A recompute lies between two rows, the last one before its backward and the first one of it.
        """
        step, lives = self.step, self._lives(kept)
        sizes = step.own[step.activations]
        again = lives.is_made_again
        rows, changes, maker, call = self._transients
        runs = lives.is_recomputed[call] & ~lives.keeps[maker]
        _, death, end, size, where = self._kept[lives.keeps[self._kept[:, 0].astype(np.int64)]].T
        longer = size.astype(np.int64)
        held_at, held_bytes, _ = self._held_inputs(lives)
        positions = (
            *(step.other_rows, self._births, lives.lives_until, self._reborn[again]),
            *(self._redeath[again], rows[runs], death, end, held_at),
        )
        nbytes = (
            *(step.other_bytes, sizes, -sizes, sizes[again], -sizes[again]),
            *(changes[runs], longer, -longer, held_bytes),
        )
        saved = [
            held + int(longer[where == index].sum()) + int(step.also_saved[index])
            for index, held in enumerate(self._saved(lives, sizes))
        ]
        return np.concatenate(positions), np.concatenate(nbytes), max(saved)

    def _saved(self, lives: _Lives, sizes: npt.NDArray[np.int64]) -> list[int]:
        """Return the bytes held at the end of each forward, with inputs and copies of buffers."""
        _, held, of = self._held_inputs(lives)
        return [
            int(sizes[(self._births <= end) & (lives.lives_until > end)].sum())
            + int(held[: len(of)][of == index].sum())
            + int(state[lives.is_recomputed[:-1]].sum())
            for index, (end, state) in enumerate(
                zip(self.step.forward_ends, self._state, strict=True)
            )
        ]


MOST_CUTS = 12
MOST_NESTED = 4  # choices of one cut inside another
MOST_PLANS = 48  # of one cut, of one kind
LEAST_STEP = 0.005  # between two plans, as a share of the plain step's activations
NEAR = 1.02  # peaks within this factor of the least are as good
SAME = 1.0005  # peaks within this factor count as equal, since estimates are not more exact
Kept = tuple[frozenset[int] | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetFrontier:
    """Plans, the plain step first; each holds less than the one before it."""

    plans: tuple[Plan, ...]

    def pick(self, budget: float) -> Plan:
        """Return the fastest plan within a budget; if there is none, the plan that holds least."""
        return next((plan for plan in self.plans if plan.share <= budget), self.plans[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """Modules, what each of them keeps (None: it is not recomputed), and the cost.

    `around` are further modules that are recomputed, with some of the others inside them.
    """

    cut: RecomputeCandidates
    kept: Kept
    cost: ChoiceCost
    around: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class _Move:
    """One step from keeping more of a module to keeping less."""

    candidate: int
    kept: frozenset[int]
    nbytes: float
    seconds: float

    @property
    def price(self) -> float:
        """Seconds for each byte that is saved."""
        return self.seconds / self.nbytes


def frontier_of(step: RecomputeEvaluator) -> BudgetFrontier:
    """Return the plans for a recorded plain step, the plain one among them."""
    candidates = {candidate.path: candidate for candidate in step.candidates()}
    cuts = [
        RecomputeCandidates(step, cut) for cut in _cuts(candidates, step.recording.repeated)
    ] or [RecomputeCandidates(step, [])]
    plain = _choice(cuts[0], (None,) * len(cuts[0].candidates))
    found = [plain]

    for cut in cuts:
        found += [_choice(cut, kept) for kept in _thinned(list(_descent(cut)))]
        found += [_choice(cut, kept) for kept in _thinned(list(_whole(len(cut.candidates))))]

    found += list(_nested(cuts, min(choice.cost.peak_bytes for choice in found)))
    all_blocks = cuts[0].evaluate([frozenset()] * len(cuts[0].candidates))
    choices = _monotonic(found, all_blocks.peak_bytes)
    return BudgetFrontier(plans=tuple(_plan(step, choice, plain.cost) for choice in choices))


def _choice(cut: RecomputeCandidates, kept: Kept) -> _Choice:
    return _Choice(cut=cut, kept=kept, cost=cut.evaluate(kept))


def _nested(cuts: Sequence[RecomputeCandidates], least: int) -> Iterator[_Choice]:
    """Yield choices with recomputed modules inside others, where that lowers the peak."""
    for outer, inner in itertools.permutations(cuts, 2):
        of = {candidate.path: candidate for candidate in inner.candidates}
        paths = {path for path in of for path in _around(path)}
        around = [at for at, c in enumerate(outer.candidates) if c.path in paths]
        if not around or len(of) <= len(outer.candidates):
            continue

        for share in range(MOST_NESTED, 0, -1):
            number = len(around) * share // MOST_NESTED
            choice = _inside(outer, around[:number], inner.candidates, least)
            if choice is None:
                break
            yield choice


def _inside(
    outer: RecomputeCandidates, around: Sequence[int], candidates: Sequence[Candidate], least: int
) -> _Choice | None:
    """Return the choice that recomputes some outer modules and all candidates, some inside them.

    None if its peak is not below `least`.
    """
    nothing: frozenset[int] = frozenset()
    cut = RecomputeCandidates(outer.around(around), candidates)
    kept = (nothing,) * len(candidates)
    cost, chosen = cut.evaluate(kept), tuple(outer.candidates[at] for at in around)
    if cost.peak_bytes >= least:
        return None

    seconds = [c.seconds - _spared(outer.step, c, candidates) for c in chosen]
    again = sum(seconds)
    whole = sum(
        outer.total_seconds(*each, keeps=False) for each in zip(chosen, seconds, strict=True)
    )
    cost = replace(
        cost,
        recompute_seconds=cost.recompute_seconds + again,
        seconds=cost.seconds + whole,
    )

    return _Choice(cut=cut, kept=kept, cost=cost, around=chosen)


def _spared(step: RecomputeEvaluator, around: Candidate, inner: Sequence[Candidate]) -> float:
    """Return the time saved because an outer recompute ends at its last inner module's input."""
    spared = 0.0
    for span in around.spans:
        inside = [s for c in inner for s in c.spans if span.first <= s.first < span.end]
        own = [f for f in span.saving if not any(s.first <= f < s.end for s in inside)]
        stop = max([f + 1 for f in own] + [s.first for s in inside])
        spared += float(step.seconds[stop : span.stop].sum())

    return spared


def _monotonic(found: Sequence[_Choice], most_bytes: int) -> list[_Choice]:
    """Return choices that each hold less than the one before, at no higher peak, and not faster.

    The last choice has the lowest peak of all; among choices with about that peak, it holds least.
    Only the last one may have modules inside others. The estimates of such choices are up to 6 %
    too high, so of two of them the second might really peak higher than the first.

    Args:
        found: all choices, the plain step first.
        most_bytes: a peak that the last choice may have even if another has a lower one.
    """
    plain = found[0].cost
    least = min(choice.cost.peak_bytes for choice in found)
    least = max(least, min(int(NEAR * least), most_bytes, plain.peak_bytes))
    end = min(
        (choice for choice in found if choice.cost.peak_bytes <= SAME * least),
        key=lambda choice: (choice.cost.saved_bytes, choice.cost.seconds),
    )
    # from fast to slow, a choice is taken if it continues all the monotonic series
    plans, lowest = [found[0]], plain.peak_bytes
    flat = (choice for choice in found if not choice.around)

    for choice in sorted(flat, key=lambda choice: choice.cost.seconds):
        cost, last = choice.cost, plans[-1].cost
        falls = last.saved_bytes - cost.saved_bytes >= LEAST_STEP * plain.saved_bytes
        above = cost.saved_bytes > end.cost.saved_bytes
        above = above and SAME * cost.peak_bytes >= end.cost.peak_bytes
        slower = last.recompute_seconds <= cost.recompute_seconds <= end.cost.recompute_seconds
        slower = slower and cost.seconds <= end.cost.seconds

        if falls and above and slower and cost.peak_bytes <= SAME * lowest:
            plans.append(choice)
            lowest = min(lowest, cost.peak_bytes)

    return plans if end is found[0] else [*plans, end]


def _whole(count: int) -> Iterator[Kept]:
    """Yield choices that a person makes by hand: the first n blocks, and every n-th block."""
    nothing: frozenset[int] = frozenset()
    for number in range(count, 0, -1):
        yield (nothing,) * number + (None,) * (count - number)
        yield tuple(None if at % number else nothing for at in range(count))


def _thinned(descent: list[Kept]) -> list[Kept]:
    """Return at most `MOST_PLANS` of these choices, including the last one."""
    step = -(-len(descent) // MOST_PLANS)
    return descent[::-1][:: max(step, 1)][::-1]


def _descent(cut: RecomputeCandidates) -> Iterator[Kept]:
    """Yield choices that hold less and less: the cheapest move first, then earlier modules."""
    moves = [move for at, c in enumerate(cut.candidates) for move in _ladder(at, c, cut)]
    kept: list[frozenset[int] | None] = [None] * len(cut.candidates)
    for move in sorted(moves, key=lambda move: move.price):
        kept[move.candidate] = move.kept
        yield tuple(kept)


def _ladder(at: int, candidate: Candidate, cut: RecomputeCandidates) -> list[_Move]:
    """Return the moves of the convex hull from keeping all to recomputing all, cheapest first."""
    items = sorted(candidate.items, key=lambda item: item.nbytes / max(item.seconds, 1e-12))
    points: list[tuple[float, float, frozenset[int]]] = []  # bytes held, seconds, what is kept
    keep: frozenset[int] = frozenset()
    nbytes, seconds = 0.0, candidate.seconds
    points.append((nbytes, cut.total_seconds(candidate, seconds, keeps=False), keep))

    for item in items:
        keep |= set(item.operators)
        nbytes, seconds = nbytes + item.nbytes, seconds - item.seconds
        points.append((nbytes, cut.total_seconds(candidate, seconds, keeps=True), keep))

    return _hull(at, points, float(candidate.nbytes))


def _hull(
    at: int, points: Sequence[tuple[float, float, frozenset[int]]], plain_bytes: float
) -> list[_Move]:
    moves: list[_Move] = []
    here_bytes, here_seconds = plain_bytes, 0.0
    while True:
        below = [point for point in points if point[0] < here_bytes]
        if not below:
            return moves
        to = min(below, key=lambda p: (max(p[1] - here_seconds, 0.0) / (here_bytes - p[0]), p[0]))
        moves.append(_Move(at, to[2], here_bytes - to[0], max(to[1] - here_seconds, 0.0)))
        here_bytes, here_seconds = to[0], max(to[1], here_seconds)


def _cuts(candidates: dict[str, Candidate], blocks: Sequence[str]) -> Iterator[list[Candidate]]:
    """Yield cuts: the repeated blocks, then the largest modules that hold at most some bytes."""
    named = [candidates[path] for path in blocks if path in candidates]
    if named:
        yield named

    sizes = sorted({c.nbytes // max(len(c.spans), 1) for c in candidates.values()}, reverse=True)
    seen = {tuple(c.path for c in named)}
    for most in sizes[:: max(len(sizes) // MOST_CUTS, 1)]:
        small = {path: c for path, c in candidates.items() if 0 < c.nbytes // len(c.spans) <= most}
        cut = [c for path, c in small.items() if not _is_inside(path, small)]
        key = tuple(c.path for c in cut)
        if cut and key not in seen:
            seen.add(key)
            yield cut


def _is_inside(path: str, others: dict[str, Candidate]) -> bool:
    return any(around in others for around in _around(path))


def _around(path: str) -> list[str]:
    """Return the paths of the modules that contain this one."""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _plan(step: RecomputeEvaluator, choice: _Choice, plain: ChoiceCost) -> Plan:
    cost = choice.cost
    seconds = cost.seconds if step.hides_host else cost.recompute_seconds
    regions = [
        Region(path=c.path, keep=_instances(c, keep))
        for c, keep in zip(choice.cut.candidates, choice.kept, strict=True)
        if keep is not None
    ]

    return Plan(
        regions=(*(Region(path=c.path) for c in choice.around), *regions),
        saved_bytes=cost.saved_bytes,
        plain_saved_bytes=plain.saved_bytes,
        peak_bytes=cost.peak_bytes,
        recompute_seconds=seconds if step.knows_times else None,
    )


def _instances(candidate: Candidate, keep: frozenset[int]) -> frozenset[tuple[str, int]]:
    items: list[Item] = candidate.items
    return frozenset(item.instance for item in items if item.operators[0] in keep)
