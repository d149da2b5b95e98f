"""`Cut`: modules of a recorded plain step, none inside another, and what recomputing some costs.

`what_if.py` explains the idea; this file moves the allocations and frees. A choice says for each
module None (as in the plain step) or the set of operators whose outputs it keeps, which may be
empty (everything is recomputed). With its example of three blocks:

    (None, None, None)               the plain step           6 MiB held, peak 8 MiB
    ({}, None, None)                 the first block again    5 MiB held, peak 7 MiB
    ({}, {}, {})                     all of them              3 MiB held, peak 7 MiB

What happens to each block of memory, in the order in which `__init__` finds it:

- `_attribute`: the call that makes an activation, and the other calls that it is held for. An
  activation stays as long as one of those is not recomputed, or takes it as its input.
- `_find_recomputes`: when it is made again, should the call that makes it be recomputed.
- `_find_transients`: what a recompute holds for a moment, as the forward did.
- `_find_kept`: what the plain step frees in forward, and a call that keeps it holds until backward.
- `_find_inputs`: what the plain step frees in forward, and a recomputed call needs as its input.

`evaluate` then collects these as (position, bytes) pairs, sorts them by position and adds them up:
the highest sum is the peak. `around` gives the step in which some modules are recomputed already,
so that modules inside of them can be chosen too.

Left out: what `what_if.py` leaves out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab.costs.host import python_seconds
from memlab.planning.what_if import NEVER, Candidate, WhatIf

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

NEXT = 1e-7  # rows, between those of a recompute
INNER_WINDOW = (0.1, 0.04)  # a recompute inside another comes after that, before its backward


@dataclass(frozen=True, slots=True)
class ChoiceCost:
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


@dataclass(frozen=True, slots=True)
class _Lives:
    """What a choice does: to calls, and one more that is none; to operators; to activations."""

    is_again: npt.NDArray[np.bool_]
    keeps: npt.NDArray[np.bool_]
    is_of_again: npt.NDArray[np.bool_]
    until: npt.NDArray[np.float64]
    again: npt.NDArray[np.bool_]


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
        self._find_inputs()

    def _attribute(self) -> None:
        """Find for each activation the call that makes it, and those that it is held for."""
        told, count = self.told, len(self.told.activations)
        span_of = np.full(len(told.recording.operators), NEVER)
        for at, (_, span) in enumerate(self.spans):
            span_of[span.first : span.end] = at
        self.producer = span_of[told.birth_operator]
        self.is_held_inside = np.zeros(count, bool)
        pairs: list[tuple[int, int, float]] = []  # activation, call that it is held for, until when
        for at in range(count):
            own = int(self.producer[at])
            outside: dict[int, float] = {}
            for forward, row in told.holders[at].items():
                call = int(span_of[forward])
                if call == own != NEVER:
                    self.is_held_inside[at] = True
                else:
                    outside[call] = max(outside.get(call, 0), row)
            if not told.holders[at]:  # saved, and never read again
                self.is_held_inside[at] = own != NEVER
                if own == NEVER:
                    outside[NEVER] = float(told.death_at[at])
            for user in told.users[at]:
                call = int(span_of[user])
                if call not in (own, NEVER):
                    outside.setdefault(call, 0)  # an argument: held if that call is recomputed
            pairs += [(at, call, row) for call, row in outside.items()]
        at_and_call, rows = [pair[:2] for pair in pairs], [row for *_, row in pairs]
        self._pairs = np.array(at_and_call, np.int64).reshape(-1, 2).T, np.array(rows, np.float64)

    def _find_recomputes(self) -> None:
        """Find when each activation is born again, should the call that makes it be recomputed."""
        told, spans = self.told, [span for _, span in self.spans]
        first = np.array([span.first for span in spans] + [0])
        stop = np.array([span.stop for span in spans] + [0])
        self._done = np.array([span.done for span in spans] + [0], np.float64)
        backward = np.array([span.backward for span in spans] + [0], np.float64)[self.producer]
        self._births, self._deaths = told.birth_at, told.death_at
        before, width = told.window
        begin, length = self._forwards(first, stop)
        share = (self._births - begin[self.producer]) / length[self.producer]
        self._reborn = backward - before + width * share
        self._redeath = np.where(self.is_held_inside, self._deaths, backward - 0.05)
        self._runs_again = told.birth_operator < stop[self.producer]

    def _forwards(
        self, first: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return where the forwards of calls begin in the step, and how long they take, in rows."""
        told = self.told
        low = told.starts[first]
        high = np.maximum(told.ends[np.maximum(stop - 1, first)] - 1, low)
        begin = told.position[np.minimum(low, len(told.position) - 1)]
        end = told.position[np.minimum(high, len(told.position) - 1)]
        return begin, np.where(end > begin, end - begin, 1.0) * (1 + 1 / np.maximum(high - low, 1))

    def _find_transients(self) -> None:
        """Find what each call's recompute holds for a moment, and its copies of state."""
        told, (before, width) = self.told, self.told.window
        parts: list[tuple[Any, Any, Any, Any]] = []  # row, bytes, by which operator, of which call
        state = np.zeros(len(self.spans), np.int64)
        for at, (_, span) in enumerate(self.spans):
            low, high = told.starts[span.first], told.ends[max(span.stop - 1, span.first)]
            rows = np.arange(low, high)
            rows = rows[~told.is_activation[told.block[rows]]]
            rows = rows[told.births[told.block[rows]] >= low]  # what it is given is not made again
            changes, block = told.row_bytes[rows], told.block[rows]
            positions = span.backward - before + width * (rows - low) / max(high - low, 1)
            left = block[told.deaths[block] >= high]  # freed by what does not run again
            ends = np.full(len(left), span.backward - before + width)
            maker = told.made_by[np.concatenate((block, left))]
            positions, changes = np.append(positions, ends), np.append(changes, -told.own[left])
            parts.append((positions, changes, maker, np.full(len(maker), at)))
            state[at] = told.own[list(span.state)].sum()
            begin = told.position[low]
            during = np.array([begin, span.done, span.backward - before, span.backward - 0.05])
            copies = state[at] * np.array([1, -1, 1, -1])
            parts.append((during, copies, np.full(4, NEVER), np.full(4, at)))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else None
        self._transients = columns or [np.zeros(0), *(np.zeros(0, np.int64) for _ in range(3))]
        lows = np.array([told.position[told.starts[span.first]] for _, span in self.spans])
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

    def _find_inputs(self) -> None:
        """Find what the plain step frees in forward, and a recomputed call holds as its input."""
        told = self.told
        rows: list[tuple[float, ...]] = []  # call, from when, until when, bytes, micro-batch
        for call, (_, span) in enumerate(self.spans):
            for block in told.passing(span):
                death = told.deaths[block]
                end = int(np.searchsorted(told.forward_ends, told.position[death]))
                until, size = float(self._done[call]), int(told.own[block])
                rows.append((call, told.position[death], until, size, end))
        self._inputs = np.array(rows, np.float64).reshape(-1, 5)

    def _held_inputs(
        self, lives: _Lives
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return when inputs of recomputed calls are held longer; bytes; in which micro-batch."""
        chosen = self._inputs[lives.is_again[self._inputs[:, 0].astype(np.int64)]]
        _, start, until, size, end = chosen.T
        nbytes = size.astype(np.int64)
        return np.concatenate((start, until)), np.concatenate((nbytes, -nbytes)), end

    def evaluate(self, kept: Sequence[frozenset[int] | None]) -> ChoiceCost:
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
        return ChoiceCost(saved, peak, operators, total)

    def total_seconds(self, candidate: Candidate, seconds: float, *, keeps: bool) -> float:
        """Return the time of a recomputed module with that of Python.

        On a card both run at once: what takes longer counts.
        """
        host = python_seconds(len(candidate.spans), candidate.num_operators, keeps=keeps)
        return max(seconds, host) if self.told.hides_host else seconds + host

    def around(self, chosen: Sequence[int]) -> WhatIf:
        """Return the step once these modules are recomputed, for a `Cut` of modules inside them.

        What they hold lives twice: for a moment in forward, and from their recompute on, which is
        the forward of the modules inside them.
        """
        told = copy.copy(self.told)
        nothing: frozenset[int] = frozenset()
        choice = [nothing if i in chosen else None for i in range(len(self.candidates))]
        lives = self._lives(choice)
        is_of_again, sizes = lives.is_of_again, told.own[told.activations]
        rows, changes, _, call = self._transients
        runs = lives.is_again[call]
        gone = sizes[is_of_again]
        held_at, held_bytes, _ = self._held_inputs(lives)
        ends = self._births[is_of_again], lives.until[is_of_again], rows[runs], held_at
        told.other_rows = np.concatenate((told.other_rows, *ends))
        told.other_bytes = np.concatenate(
            (told.other_bytes, gone, -gone, changes[runs], held_bytes)
        )
        saved = self._saved(lives, np.where(is_of_again, sizes, 0))
        told.also_saved = told.also_saved + np.array(saved)
        told.window = INNER_WINDOW
        told.position = self._moved(lives.is_again)
        told.birth_at = np.where(lives.again, self._reborn, self._births)
        told.death_at = np.where(lives.again, self._redeath, self._deaths)
        self._divide(told, lives)
        stays = ~is_of_again | lives.again
        told.activations, told.birth_operator = told.activations[stays], told.birth_operator[stays]
        told.birth_at, told.death_at = told.birth_at[stays], told.death_at[stays]
        told.last_use = told.last_use[stays]
        told.users = [users for users, has in zip(told.users, stays, strict=True) if has]
        told.holders = [holders for holders, has in zip(told.holders, stays, strict=True) if has]
        return told

    def _moved(self, is_again: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Return where the rows of the forward lie, those of recomputed calls before backward."""
        told, (before, width) = self.told, self.told.window
        position = told.position.copy()
        for (_, span), moves in zip(self.spans, is_again, strict=False):
            if moves:
                low, high = told.starts[span.first], told.ends[span.end - 1]
                share = np.arange(high - low) / max(high - low, 1)
                position[low:high] = span.backward - before + width * share
        return position

    def _divide(self, told: WhatIf, lives: _Lives) -> None:
        """Leave to each side of the recomputed calls its own uses of activations."""
        calls = [span for (_, span), has in zip(self.spans, lives.is_again, strict=False) if has]
        span_of = np.full(len(told.recording.operators), NEVER)
        for at, span in enumerate(calls):
            span_of[span.first : span.end] = at
        made_in = span_of[told.birth_operator]
        last_use, users, holders = self.told.last_use.copy(), [], []
        for at, own in enumerate(made_in):
            here = {user for user in self.told.users[at] if span_of[user] == own}
            for call in {int(span_of[u]) for u in self.told.users[at]} - {NEVER, int(own)}:
                last_use[at] = max(last_use[at], calls[call].done)
            if own != NEVER:
                uses = [told.position[max(told.ends[user] - 1, 0)] for user in here]
                last_use[at] = max([told.birth_at[at], *uses]) + NEXT
            users.append(here)
            of = {f: row for f, row in self.told.holders[at].items() if span_of[f] == own}
            holders.append(of)
        told.last_use, told.users, told.holders = last_use, users, holders

    def _lives(self, kept: Sequence[frozenset[int] | None]) -> _Lives:
        """Return how long each activation lives from forward on, and which are made again."""
        told = self.told
        is_again = np.array([kept[i] is not None for i, _ in self.spans] + [False])
        keeps = np.zeros(len(told.recording.operators) + 1, bool)  # the last stands for none
        keeps[[number for keep in kept if keep for number in keep]] = True
        is_of_again = is_again[self.producer]
        is_kept = keeps[told.birth_operator] & is_of_again
        # what stays from forward on, for others or for a call that is not recomputed
        until = np.where(self.is_held_inside & ~is_of_again, self._deaths, told.last_use)
        (at, span), row = self._pairs
        np.maximum.at(until, at, np.where(is_again[span], self._done[span], row))
        until = np.where(is_kept, self._deaths, until)
        again = is_of_again & ~is_kept & self._runs_again & (until < self._reborn)
        return _Lives(is_again, keeps, is_of_again, until, again)

    def _events(
        self, kept: Sequence[frozenset[int] | None]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], int]:
        """Return every allocation and free of the step: at which row, how many bytes; what is held.

        A recompute lies between the row before its backward and that, in the order of the forward.
        """
        told, lives = self.told, self._lives(kept)
        sizes = told.own[told.activations]
        again = lives.again
        rows, changes, maker, call = self._transients
        runs = lives.is_again[call] & ~lives.keeps[maker]
        _, death, end, size, where = self._kept[lives.keeps[self._kept[:, 0].astype(np.int64)]].T
        longer = size.astype(np.int64)
        held_at, held_bytes, _ = self._held_inputs(lives)
        positions = (
            *(told.other_rows, self._births, lives.until, self._reborn[again]),
            *(self._redeath[again], rows[runs], death, end, held_at),
        )
        nbytes = (
            *(told.other_bytes, sizes, -sizes, sizes[again], -sizes[again]),
            *(changes[runs], longer, -longer, held_bytes),
        )
        saved = [
            held + int(longer[where == index].sum()) + int(told.also_saved[index])
            for index, held in enumerate(self._saved(lives, sizes))
        ]
        return np.concatenate(positions), np.concatenate(nbytes), max(saved)

    def _saved(self, lives: _Lives, sizes: npt.NDArray[np.int64]) -> list[int]:
        """Return what is held at the end of each forward, with inputs and copies of state."""
        _, held, of = self._held_inputs(lives)
        return [
            int(sizes[(self._births <= end) & (lives.until > end)].sum())
            + int(held[: len(of)][of == index].sum())
            + int(state[lives.is_again[:-1]].sum())
            for index, (end, state) in enumerate(
                zip(self.told.forward_ends, self._state, strict=True)
            )
        ]
