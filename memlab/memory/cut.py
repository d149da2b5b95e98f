"""`Cut`: modules of a recorded plain step, none inside another, and what recomputing some costs.

An estimate rearranges the allocations and frees of the plain step in numpy, in a millisecond, so
that hundreds of choices can be compared. Left out: what `memlab.memory.what_if` leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab.memory.what_if import NEVER, Candidate, WhatIf

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

# Time of Python, the least of many runs on a 2-core server with torch 2.13 (`host` of
# benchmarks/recompute_checks.py): for each call of a recomputed module, for each of its operators
# (what autograd saves is packed and unpacked), and for each of them where some are kept (two
# dispatch modes count them: in forward, and when they run again).
REGION_SECONDS, HOOK_SECONDS, DISPATCH_SECONDS = 450e-6, 11e-6, 17e-6


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a choice costs.

    Attributes:
        saved_bytes: activations of one micro-batch that are held when its forward ends.
        peak_bytes: most allocated at once in the step.
        recompute_seconds: of operators that run again.
        seconds: of these and of Python, which keeps, finds and counts.
    """

    saved_bytes: int
    peak_bytes: int
    recompute_seconds: float
    seconds: float


class Cut:
    """Modules none of which is inside another, and what choices among them cost.

    Args:
        told: the recorded step.
        candidates: the modules, in order.
    """

    def __init__(self, told: WhatIf, candidates: Sequence[Candidate]) -> None:
        self.told, self.candidates = told, list(candidates)
        self.spans = [(i, span) for i, c in enumerate(self.candidates) for span in c.spans]
        self._attribute()
        self._find_recomputes()
        self._find_transients()
        self._find_kept()

    def _attribute(self) -> None:
        """Find for each activation the call that makes it, and those that it is held for."""
        told, count = self.told, len(self.told.activations)
        span_of = np.full(len(told.recording.operators), NEVER)
        for at, (_, span) in enumerate(self.spans):
            span_of[span.first : span.end] = at
        self.producer = span_of[told.birth_operator]
        self.is_held_inside = np.zeros(count, bool)
        pairs: list[tuple[int, int, int]] = []  # activation, call that it is held for, until when
        for at in range(count):
            own = int(self.producer[at])
            outside: dict[int, int] = {}
            for forward, row in told.holders[at].items():
                call = int(span_of[forward])
                if call == own != NEVER:
                    self.is_held_inside[at] = True
                else:
                    outside[call] = max(outside.get(call, 0), row)
            if not told.holders[at]:  # saved, and never read again
                self.is_held_inside[at] = own != NEVER
                if own == NEVER:
                    outside[NEVER] = int(told.deaths[told.activations[at]])
            for user in told.users[at]:
                call = int(span_of[user])
                if call not in (own, NEVER):
                    outside.setdefault(call, 0)  # an argument: held if that call is recomputed
            pairs += [(at, call, row) for call, row in outside.items()]
        self._pairs = np.array(pairs, np.int64).reshape(-1, 3).T

    def _find_recomputes(self) -> None:
        """Find when each activation is born again, should the call that makes it be recomputed."""
        told, spans = self.told, [span for _, span in self.spans]
        first = np.array([span.first for span in spans] + [0])
        stop = np.array([span.stop for span in spans] + [0])
        self._done = np.array([span.done for span in spans] + [0], np.float64)
        backward = np.array([span.backward for span in spans] + [0], np.float64)[self.producer]
        begin, end = told.starts[first], told.ends[np.maximum(stop - 1, 0)]
        self._births = told.births[told.activations].astype(np.float64)
        self._deaths = told.deaths[told.activations].astype(np.float64)
        share = (self._births - begin[self.producer]) / np.maximum(end - begin, 1)[self.producer]
        self._reborn = backward - 1 + 0.9 * share
        self._redeath = np.where(self.is_held_inside, self._deaths, backward - 0.05)
        self._runs_again = told.birth_operator < stop[self.producer]

    def _find_transients(self) -> None:
        """Find what each call's recompute holds for a moment, and its copies of state."""
        told = self.told
        parts: list[tuple[Any, Any, Any, Any]] = []  # row, bytes, by which operator, of which call
        state = np.zeros(len(self.spans), np.int64)
        for at, (_, span) in enumerate(self.spans):
            low, high = told.starts[span.first], told.ends[max(span.stop - 1, span.first)]
            rows = np.arange(low, high)
            rows = rows[~told.is_activation[told.block[rows]]]
            positions = span.backward - 1 + 0.9 * (rows - low) / max(high - low, 1)
            maker = told.made_by[told.block[rows]]
            parts.append((positions, told.row_bytes[rows], maker, np.full(len(rows), at)))
            state[at] = told.own[list(span.state)].sum()
            during = np.array([low, span.done, span.backward - 1, span.backward - 0.05])
            copies = state[at] * np.array([1, -1, 1, -1])
            parts.append((during, copies, np.full(4, NEVER), np.full(4, at)))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else None
        self._transients = columns or [np.zeros(0), *(np.zeros(0, np.int64) for _ in range(3))]
        lows = np.array([told.starts[span.first] for _, span in self.spans])
        self._state = [
            np.where((lows <= end) & (self._done[:-1] > end), state, 0) for end in told.forward_ends
        ]

    def _find_kept(self) -> None:
        """Find what the plain step frees in forward, and a call that keeps it holds for longer."""
        told = self.told
        rows: list[tuple[float, ...]] = []  # operator, from when, until when, bytes, micro-batch
        for candidate in self.candidates:
            for operators in (item.operators for item in candidate.items):
                for number, span in zip(operators, candidate.spans, strict=True):
                    for block in told.outputs[number]:
                        death = told.deaths[block]
                        if block not in told.index and told.births[block] >= 0:
                            end = int(np.searchsorted(told.forward_ends, death))
                            until, size = span.backward - 0.05, int(told.own[block])
                            rows.append((number, death, until, size, end))
        self._kept = np.array(rows, np.float64).reshape(-1, 5)

    def evaluate(self, kept: Sequence[frozenset[int] | None]) -> Estimate:
        """Return the cost of a choice: for each module None, or the operators that it keeps."""
        positions, nbytes, saved = self._events(kept)
        order = np.argsort(positions, kind="stable")
        live = np.cumsum(nbytes[order])
        peak = self.told.standing + int(live.max(initial=0))
        operators = total = 0.0
        for candidate, keep in zip(self.candidates, kept, strict=True):
            if keep is not None:
                seconds = candidate.seconds - sum(float(self.told.seconds[o]) for o in keep)
                operators += seconds
                total += self.total_seconds(candidate, seconds, keeps=bool(keep))
        return Estimate(saved, peak, operators, total)

    def total_seconds(self, candidate: Candidate, seconds: float, *, keeps: bool) -> float:
        """Return the time of a recomputed module with that of Python.

        On a card both run at once: what takes longer counts.
        """
        each = HOOK_SECONDS + (DISPATCH_SECONDS if keeps else 0.0)
        host = len(candidate.spans) * REGION_SECONDS + candidate.num_operators * each
        return max(seconds, host) if self.told.hides_host else seconds + host

    def _events(
        self, kept: Sequence[frozenset[int] | None]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], int]:
        """Return every allocation and free of the step: at which row, how many bytes; what is held.

        A recompute lies between the row before its backward and that, in the order of the forward.
        """
        told = self.told
        sizes = told.own[told.activations]
        is_again = np.array([kept[i] is not None for i, _ in self.spans] + [False])
        keeps = np.zeros(len(told.recording.operators) + 1, bool)  # the last stands for none
        keeps[[number for keep in kept if keep for number in keep]] = True
        is_of_again = is_again[self.producer]
        is_kept = keeps[told.birth_operator] & is_of_again
        # what stays from forward on, for others or for a call that is not recomputed
        until = np.where(self.is_held_inside & ~is_of_again, self._deaths, told.last_use + 0.5)
        at, span, row = self._pairs
        np.maximum.at(until, at, np.where(is_again[span], self._done[span], row))
        until = np.where(is_kept, self._deaths, until)
        again = is_of_again & ~is_kept & self._runs_again & (until < self._reborn)
        rows, changes, maker, call = self._transients
        runs = is_again[call] & ~keeps[maker]
        _, death, end, size, where = self._kept[keeps[self._kept[:, 0].astype(np.int64)]].T
        longer = size.astype(np.int64)
        positions = (
            *(told.other_rows, self._births, until, self._reborn[again], self._redeath[again]),
            *(rows[runs], death, end),
        )
        nbytes = (
            *(told.other_bytes, sizes, -sizes, sizes[again], -sizes[again]),
            *(changes[runs], longer, -longer),
        )
        saved = [
            int(sizes[(self._births <= end) & (until > end)].sum())
            + int(state[is_again[:-1]].sum())
            + int(longer[where == index].sum())
            for index, (end, state) in enumerate(zip(told.forward_ends, self._state, strict=True))
        ]
        return np.concatenate(positions), np.concatenate(nbytes), max(saved)
