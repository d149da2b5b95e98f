"""`WhatIf`: a recorded plain step, and what it would hold if these modules were recomputed.

Nothing is run: the trace of the plain step is rearranged. An activation that a checkpointed module
no longer holds dies at its last use in forward and is born again when the module is recomputed,
just before the first operator of its backward; what its forward allocates for a moment is there
once more. Left out: memory that Python holds longer than operators use it, and the few bytes of
saved random states, so this ranks plans, and `memlab.predict` of the plan's own step gives numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memlab.memory.operators import call_of
from memlab.memory.program import Program
from memlab.plan import Instance
from memlab.techniques import policies
from memlab.trace import Phase

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

STEP = 1
NEVER = -1


@dataclass(slots=True, eq=False)
class Span:
    """One call of a module in the recorded forward, and its backward.

    Attributes:
        first: number of its first operator.
        end: number after its last one.
        stop: number after the last operator that runs again: autograd saves nothing later.
        backward: row at which its backward begins.
        done: row after its backward.
    """

    first: int
    end: int
    stop: int = NEVER
    backward: int = NEVER
    done: int = NEVER


@dataclass(slots=True, eq=False)
class Item:
    """An operator of a module whose output can be kept: what that takes and what it spares."""

    instance: Instance
    operators: list[int]
    nbytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class Candidate:
    """A module that can be recomputed.

    Attributes:
        path: of the module.
        spans: its calls.
        nbytes: of activations that are born in its calls and held for backward.
        items: what can be kept of it.
        seconds: of running it again, all of it.
    """

    path: str
    spans: list[Span]
    nbytes: int = 0
    items: list[Item] = field(default_factory=list)
    seconds: float = 0.0


class WhatIf:
    """The activations of a recorded plain step, and who holds them.

    Args:
        program: recorded with `memory_budget=1.0`, with its signatures.
        own: int64, (blocks,), bytes of every block as recorded.
        seconds: float64, (operators,); None where times are not known.
    """

    def __init__(
        self,
        program: Program,
        own: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.float64] | None,
    ) -> None:
        recording, layout = program.recording, program.layout
        self.recording, self.own = recording, own
        count = len(recording.operators)
        self.seconds = np.zeros(count) if seconds is None else seconds
        self.knows_times = seconds is not None
        steps = np.array([i.step == STEP for i in recording.intervals])[layout.interval]
        in_step = np.flatnonzero(steps)
        self.block, self.operator = layout.block, layout.operator
        self.row_bytes = np.where(layout.is_birth, own[layout.block], -own[layout.block])
        self.standing = int(self.row_bytes[: in_step[0]].sum())
        self.starts = np.searchsorted(layout.operator, np.arange(1, count + 1), "left")
        self.ends = np.searchsorted(layout.operator, np.arange(1, count + 1), "right")
        self.outputs: dict[int, list[int]] = defaultdict(list)
        for number, block in enumerate(recording.blocks):
            self.outputs[block.operator].append(number)
        self._find_activations(program)
        others = in_step[~np.isin(layout.block[in_step], self.activations)]
        self.other_rows, self.other_bytes = others.astype(np.float64), self.row_bytes[others]
        self._find_holders()

    def _find_activations(self, program: Program) -> None:
        """Find what is born in a forward of the step and outlives it."""
        layout, recording = program.layout, self.recording
        phase = [i.phase if i.step == STEP else None for i in recording.intervals]
        is_forward = np.array([p is Phase.FORWARD for p in phase])
        self.is_forward = is_forward[np.array([o.interval for o in recording.operators])]
        num_blocks = int(layout.block.max()) + 1
        births, deaths = np.full(num_blocks, NEVER), np.full(num_blocks, NEVER)
        rows = np.arange(len(layout.block))
        births[layout.block[layout.is_birth]] = rows[layout.is_birth]
        deaths[layout.block[~layout.is_birth]] = rows[~layout.is_birth]
        self.births, self.deaths = births, deaths
        born_in, died_in = layout.interval[births], layout.interval[deaths]
        (self.activations,) = np.nonzero(
            (births >= 0) & (deaths >= 0) & is_forward[born_in] & (died_in != born_in)
        )
        self.index = {int(block): at for at, block in enumerate(self.activations)}
        self.made_by = np.where(births >= 0, layout.operator[births] - 1, NEVER).astype(np.int64)
        self.birth_operator = self.made_by[self.activations]
        ends = [np.flatnonzero(layout.interval == i) for i in np.flatnonzero(is_forward)]
        self.forward_ends = np.array([rows[-1] for rows in ends if len(rows)])

    def _find_holders(self) -> None:
        """Find the last use of each activation in forward, and which operators it is held for."""
        self.last_use = self.births[self.activations].astype(np.float64)
        self.users: list[set[int]] = [set() for _ in self.activations]
        self.holders: list[dict[int, int]] = [{} for _ in self.activations]
        self.written: set[int] = set()  # in place, after their birth
        self.backward_of: dict[int, list[int]] = defaultdict(list)
        for number, operator in enumerate(self.recording.operators):
            if self.is_forward[number]:
                for block in operator.reads:
                    if (at := self.index.get(block)) is not None:
                        self.users[at].add(number)
                        self.last_use[at] = max(self.last_use[at], self.ends[number] - 1)
                self.written.update(operator.writes)
            elif operator.forward >= 0 and self.is_forward[operator.forward]:
                self.backward_of[operator.forward].append(number)
                for block in operator.reads:
                    if (at := self.index.get(block)) is not None:
                        self.holders[at][operator.forward] = int(self.ends[number])

    def candidates(self) -> list[Candidate]:
        """Return every module that can be recomputed, in the order of their first calls.

        The model itself cannot: its recompute would be the whole forward once more.
        """
        spans: dict[str, list[Span]] = defaultdict(list)
        paths = list(self.recording.modules)
        for call in self.recording.calls:
            if call.end > call.first and self.is_forward[call.first]:
                spans[paths[call.module]].append(Span(call.first, call.end))
        spans.pop(self.recording.root, None)
        found = (self._candidate(path, calls) for path, calls in spans.items())
        return [candidate for candidate in found if candidate is not None]

    def _candidate(self, path: str, spans: list[Span]) -> Candidate | None:
        for span in spans:
            inside = range(span.first, span.end)
            backward = [number for f in inside for number in self.backward_of.get(f, ())]
            saving = [f for f in inside if self._saves(f)]
            if not backward or not saving or self._changes_its_inputs(span):
                return None
            # what an operator saves of its arguments is saved before its kernel runs
            span.stop = saving[-1] + self._saves_its_output(saving[-1])
            span.backward = int(self.starts[min(backward)])
            span.done = int(self.ends[max(backward)])
        candidate = Candidate(path, spans)
        for span in spans:
            born = (self.birth_operator >= span.first) & (self.birth_operator < span.end)
            candidate.nbytes += int(self.own[self.activations[born]].sum())
            candidate.seconds += float(self.seconds[span.first : span.stop].sum())
        candidate.items = self._items(spans)
        return candidate

    def _saves(self, forward: int) -> bool:
        """Return whether the backward of an operator reads more than gradients."""
        return any(not self._is_of_backward(block) for block in self._read_back(forward))

    def _saves_its_output(self, forward: int) -> bool:
        blocks = self.recording.blocks
        return any(blocks[block].operator == forward for block in self._read_back(forward))

    def _read_back(self, forward: int) -> Iterator[int]:
        for number in self.backward_of.get(forward, ()):
            yield from self.recording.operators[number].reads

    def _is_of_backward(self, block: int) -> bool:
        operator = self.recording.operators[self.recording.blocks[block].operator]
        return self.recording.intervals[operator.interval].phase is Phase.BACKWARD

    def _changes_its_inputs(self, span: Span) -> bool:
        """Return whether it writes in place what is born outside of it, in this step."""
        return any(
            block in self.index or self._is_of_forward(block)
            for number in range(span.first, span.end)
            for block in self.recording.operators[number].writes
            if not span.first <= self.recording.blocks[block].operator < span.end
        )

    def _is_of_forward(self, block: int) -> bool:
        return bool(self.is_forward[self.recording.blocks[block].operator])

    def _items(self, spans: Sequence[Span]) -> list[Item]:
        """Return what can be kept; nothing where the calls do not run the same operators."""
        every = [self._instances(span) for span in spans]
        if any(instances.keys() != every[0].keys() for instances in every):
            return []
        items = []
        for instance in every[0]:
            operators = [instances[instance] for instances in every]
            runs_again = all(o < span.stop for o, span in zip(operators, spans, strict=True))
            if runs_again and all(map(self._can_be_kept, operators)):
                nbytes = sum(int(self.own[b]) for o in operators for b in self.outputs[o])
                seconds = float(self.seconds[operators].sum())
                items.append(Item(instance, operators, nbytes, seconds))
        return items

    def _can_be_kept(self, number: int) -> bool:
        signature, blocks = self.recording.operators[number].signature, self.outputs[number]
        if signature is None or not blocks or any(b in self.written for b in blocks):
            return False
        try:
            func, args, kwargs = call_of(signature, lambda spec: torch.empty(0, device="meta"))
        except AttributeError:  # an operator that only another process knows
            return False
        return policies.can_be_kept(func, policies.values_of(func, args, kwargs))

    def _instances(self, span: Span) -> dict[Instance, int]:
        counts: dict[str, int] = defaultdict(int)
        found = {}
        for number in range(span.first, span.end):
            signature = self.recording.operators[number].signature
            if signature is not None:
                found[signature[0], counts[signature[0]]] = number
                counts[signature[0]] += 1
        return found


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a choice costs.

    Attributes:
        saved_bytes: activations of one micro-batch that are held when its forward ends.
        peak_bytes: most allocated at once in the step.
        recompute_seconds: of operators that run again.
    """

    saved_bytes: int
    peak_bytes: int
    recompute_seconds: float


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
        self._find_transients()

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

    def _find_transients(self) -> None:
        """Find what each call's forward allocates for a moment, as it is once more."""
        told = self.told
        self._transients = []
        for _, span in self.spans:
            rows = np.arange(told.starts[span.first], told.ends[max(span.stop - 1, span.first)])
            blocks = told.block[rows]
            is_activation = np.isin(blocks, told.activations)
            rows = rows[~is_activation]
            low = told.starts[span.first]
            high = told.ends[max(span.stop - 1, span.first)]
            positions = span.backward - 1 + 0.9 * (rows - low) / max(high - low, 1)
            maker = told.made_by[told.block[rows]]
            self._transients.append((positions, told.row_bytes[rows], maker))

    def evaluate(self, kept: Sequence[frozenset[int] | None]) -> Estimate:
        """Return the cost of a choice: for each module None, or the operators that it keeps."""
        positions, nbytes, saved = self._events(kept)
        order = np.argsort(positions, kind="stable")
        live = np.cumsum(nbytes[order])
        seconds = 0.0
        for candidate, keep in zip(self.candidates, kept, strict=True):
            if keep is not None:
                seconds += candidate.seconds - sum(float(self.told.seconds[o]) for o in keep)
        return Estimate(saved, self.told.standing + int(live.max(initial=0)), seconds)

    def _events(
        self, kept: Sequence[frozenset[int] | None]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], int]:
        """Return every allocation and free of the step: at which row, how many bytes; what is held.

        A recompute lies between the row before its backward and that, in the order of the forward.
        """
        told = self.told
        sizes = told.own[told.activations]
        is_again = np.array([kept[i] is not None for i, _ in self.spans] + [False])
        keeping = {o for keep in kept if keep for o in keep}
        held_inside = self.is_held_inside & ~is_again[self.producer]
        # what stays from forward on, for others or for a call that is not recomputed
        until = told.last_use + 0.5
        death = told.deaths[told.activations].astype(np.float64)
        until = np.where(held_inside, death, until)
        at, span, row = self._pairs
        done = np.array([s.done for _, s in self.spans] + [0], np.float64)
        np.maximum.at(until, at, np.where(is_again[span], done[span], row))
        is_kept = np.isin(told.birth_operator, list(keeping)) & is_again[self.producer]
        until = np.where(is_kept, death, until)
        first = np.array([s.first for _, s in self.spans] + [0])
        stop = np.array([s.stop for _, s in self.spans] + [0])
        backward = np.array([s.backward for _, s in self.spans] + [0], np.float64)
        begin, end = told.starts[first], told.ends[np.maximum(stop - 1, 0)]
        births = told.births[told.activations].astype(np.float64)
        share = (births - begin[self.producer]) / np.maximum(end - begin, 1)[self.producer]
        again = is_again[self.producer] & ~is_kept & (told.birth_operator < stop[self.producer])
        reborn = backward[self.producer] - 1 + 0.9 * share
        redeath = np.where(self.is_held_inside, death, backward[self.producer] - 0.05)
        again &= until < reborn
        until = np.where(
            is_again[self.producer] & ~again, np.maximum(until, death * is_kept), until
        )
        positions = [told.other_rows, births, until, reborn[again], redeath[again]]
        nbytes = [told.other_bytes, sizes, -sizes, sizes[again], -sizes[again]]
        for (i, _), (rows, changes, maker) in zip(self.spans, self._transients, strict=True):
            keep = kept[i]
            if keep is not None:
                runs = ~np.isin(maker, list(keep))
                positions.append(rows[runs])
                nbytes.append(changes[runs])
        alive = [(births <= end) & (until > end) for end in told.forward_ends]
        saved = [int(sizes[mask].sum()) for mask in alive]
        for number in sorted(keeping):
            for block in told.outputs[number]:
                self._keep_longer(number, block, positions, nbytes, saved)
        return np.concatenate(positions), np.concatenate(nbytes), max(saved)

    def _keep_longer(
        self, number: int, block: int, positions: list[Any], nbytes: list[Any], saved: list[int]
    ) -> None:
        """Hold what the plain step frees in forward until the recompute has used it."""
        told = self.told
        if block in told.index or told.births[block] < 0:
            return
        span = next(span for _, span in self.spans if span.first <= number < span.end)
        size, death = int(told.own[block]), told.deaths[block]
        positions.append(np.array([death, span.backward - 0.05]))
        nbytes.append(np.array([size, -size]))
        saved[int(np.searchsorted(told.forward_ends, death))] += size
