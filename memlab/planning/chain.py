"""`Chain`: a plan for every memory budget, from the plain step down to the least that can be held.

It is made from one recorded plain step. First choose which modules may be recomputed: a cut, of
which no module is inside another. Then drop outputs of these modules one after another, always
those that cost the least time for their bytes. Each plan of the chain holds less than the plan
before it, at no higher estimated peak, and is not faster. A greedy choice on the convex hull of
each module's options is enough; no solver is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memlab.plan import Plan, Region
from memlab.planning.cut import ChoiceCost, Cut
from memlab.planning.what_if import Candidate, Item, WhatIf

MOST_CUTS = 12
MOST_NESTED = 4  # choices of one cut inside another
MOST_PLANS = 48  # of one cut, of one kind
LEAST_STEP = 0.005  # between two plans, as a share of the plain step's activations
NEAR = 1.02  # peaks within this factor of the least are as good
SAME = 1.0005  # peaks within this factor count as equal, since estimates are not more exact
Kept = tuple[frozenset[int] | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
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

    cut: Cut
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


def chain_of(step: WhatIf) -> Chain:
    """Return the plans for a recorded plain step, the plain one among them."""
    candidates = {candidate.path: candidate for candidate in step.candidates()}
    cuts = [Cut(step, cut) for cut in _cuts(candidates, step.recording.repeated)] or [Cut(step, [])]
    plain = _choice(cuts[0], (None,) * len(cuts[0].candidates))
    found = [plain]

    for cut in cuts:
        found += [_choice(cut, kept) for kept in _thinned(list(_descent(cut)))]
        found += [_choice(cut, kept) for kept in _thinned(list(_whole(len(cut.candidates))))]

    found += list(_nested(cuts, min(choice.cost.peak_bytes for choice in found)))
    all_blocks = cuts[0].evaluate([frozenset()] * len(cuts[0].candidates))
    choices = _monotonic(found, all_blocks.peak_bytes)
    return Chain(plans=tuple(_plan(step, choice, plain.cost) for choice in choices))


def _choice(cut: Cut, kept: Kept) -> _Choice:
    return _Choice(cut=cut, kept=kept, cost=cut.evaluate(kept))


def _nested(cuts: Sequence[Cut], least: int) -> Iterator[_Choice]:
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
    outer: Cut, around: Sequence[int], candidates: Sequence[Candidate], least: int
) -> _Choice | None:
    """Return the choice that recomputes some outer modules and all candidates, some inside them.

    None if its peak is not below `least`.
    """
    nothing: frozenset[int] = frozenset()
    cut = Cut(outer.around(around), candidates)
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


def _spared(step: WhatIf, around: Candidate, inner: Sequence[Candidate]) -> float:
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


def _descent(cut: Cut) -> Iterator[Kept]:
    """Yield choices that hold less and less: the cheapest move first, then earlier modules."""
    moves = [move for at, c in enumerate(cut.candidates) for move in _ladder(at, c, cut)]
    kept: list[frozenset[int] | None] = [None] * len(cut.candidates)
    for move in sorted(moves, key=lambda move: move.price):
        kept[move.candidate] = move.kept
        yield tuple(kept)


def _ladder(at: int, candidate: Candidate, cut: Cut) -> list[_Move]:
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


def _plan(step: WhatIf, choice: _Choice, plain: ChoiceCost) -> Plan:
    cost = choice.cost
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
        recompute_seconds=cost.recompute_seconds if step.knows_times else None,
    )


def _instances(candidate: Candidate, keep: frozenset[int]) -> frozenset[tuple[str, int]]:
    items: list[Item] = candidate.items
    return frozenset(item.instance for item in items if item.operators[0] in keep)
