"""`RecomputeEvaluator`: what a plain step would hold if modules of it were recomputed.

The idea. The plain step has been recorded, so we know when each block of memory is allocated, when
it is freed, and which operators read it. Recomputing a module changes only one thing: blocks that
only this module holds are freed early, and allocated again just before the module's backward. So
the memory of any choice of modules follows from moving allocations and frees of the one recorded
step. Nothing runs, and evaluating a choice takes a millisecond.

Time is counted in rows: each allocation and each free is one row. This is one block of memory, made
inside a module whose forward takes rows 10 to 20 and whose backward begins at row 70:

    row              10        20                   69  70        80
    plain             |=====================================|          freed in backward
    recomputed        |====|                          |=====|          freed at its last use in
                                                                       forward, and made again

A recompute has no rows of its own in the plain step. It lies between two rows, so positions are
floats: a recompute begins `window[0]` rows before the backward and takes `window[1]` rows.

An example, which `tests/pure/test_recompute_evaluator.py` runs. A model multiplies its batch of
1 MiB by a weight and passes it through three blocks of two GELUs each. A GELU keeps its input for
backward:

    batch -> x0 -> [gelu h1 gelu] -> x1 -> [gelu h2 gelu] -> x2 -> [gelu h3 gelu] -> x3 -> sum

- The plain step holds x0, h1, x1, h2, x2, h3 when its forward ends: 6 MiB.
- With all three blocks recomputed it holds only the inputs of the blocks, x0, x1 and x2: 3 MiB.
  Before the backward of the last block, h3 is made again. x3 is not made again, because the
  recompute stops at the last operator that saves something (`Span.stop`), which saves its input.
- The peak falls only from 8 to 7 MiB. In the plain step it is at the end of the forward (the batch,
  these six and x3). With recompute it is in the first backward (the batch, x0, x1, x2, h3 and two
  gradients).

This file finds what holds each activation, and which modules can be recomputed (`candidates`). An
activation has `holders`, the forward operators whose backward reads it, and `users`, the operators
that read it in forward. `budget_frontier.py` moves the allocations and chooses the modules.

Left out: memory that Python holds longer than operators use it, and the few bytes of saved random
states. So these numbers only rank plans. `memlab.predict` computes the real numbers of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from memlab.devices.operators import Signature, TensorSpec, call_of
from memlab.techniques.checkpointing import policies
from memlab.techniques.technique import Instance
from memlab.trace import Phase
from memlab.tracing.program import Program

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

STEP = 1
NEVER = -1
WINDOW = (1.0, 0.9)


@dataclass(slots=True, eq=False)
class Span:
    """One call of a module in the recorded forward, and its backward.

    Attributes:
        first: number of its first operator.
        end: number after its last operator.
        stop: number after the last operator that runs again; autograd saves nothing after it.
        backward: row at which its backward begins.
        done: row after its backward.
        saving: operators for which autograd saves a tensor.
        state: buffers that it changes. A recomputed call copies them twice: in forward, and before
            it runs again.
    """

    first: int
    end: int
    stop: int = NEVER
    backward: int = NEVER
    done: int = NEVER
    saving: tuple[int, ...] = ()
    state: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Item:
    """An operator of a module whose output can be kept: the bytes it takes, the time it saves."""

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
        nbytes: bytes of activations that its calls make and that are held for backward.
        items: operators whose outputs can be kept.
        seconds: time of running all of it again and of copying its buffers.
        num_operators: number of operators that run again, copies of buffers included.
        num_kernels: number of those among them that take any time.
    """

    path: str
    spans: list[Span]
    nbytes: int = 0
    items: list[Item] = field(default_factory=list)
    seconds: float = 0.0
    num_operators: int = 0
    num_kernels: int = 0


class RecomputeEvaluator:
    """The activations of a recorded plain step, and what holds them.

    `RecomputeCandidates.around` makes a changed copy of it, in which some modules are recomputed.
    These attributes are what it changes:

    - `position`: (rows,), the position of each row in the step;
    - `birth_at`, `death_at`, `last_use`: (activations,), when each is allocated, freed and last
      used in forward;
    - `also_saved`: (micro-batches,), bytes held at the end of each forward in addition;
    - `window`: how many rows before its backward a recompute begins, and how many it takes.

    Args:
        program: recorded with `memory_budget=1.0`, with its signatures.
        own: int64, (blocks,), bytes of every block as recorded.
        seconds: float64, (operators,); None if times are not known.
        hides_host: whether operators run on a card while Python continues.
    """

    def __init__(
        self,
        program: Program,
        own: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.float64] | None,
        *,
        hides_host: bool = False,
    ) -> None:
        recording, layout = program.recording, program.layout
        self._keepable: dict[Signature, bool] = {}
        self.recording, self.own, self.window = recording, own, WINDOW
        count = len(recording.operators)
        self.seconds = np.zeros(count) if seconds is None else seconds
        self.knows_times, self.hides_host = seconds is not None, hides_host

        steps = np.array([i.step == STEP for i in recording.intervals])[layout.interval]
        in_step = np.flatnonzero(steps)
        self.block, self.operator = layout.block, layout.operator
        self.row_bytes = np.where(layout.is_birth, own[layout.block], -own[layout.block])
        self.held_before = int(self.row_bytes[: in_step[0]].sum())

        # the rows of operator i are starts[i] to ends[i]
        self.starts = np.searchsorted(layout.operator, np.arange(1, count + 1), "left")
        self.ends = np.searchsorted(layout.operator, np.arange(1, count + 1), "right")
        self.outputs: dict[int, list[int]] = defaultdict(list)
        for number, block in enumerate(recording.blocks):
            self.outputs[block.operator].append(number)

        self._find_activations(program)

        # copying a buffer takes about as long as the fastest operator of the forward
        run = self.seconds[self.is_forward]
        self.copy_seconds = float(run[run > 0].min(initial=np.inf)) if (run > 0).any() else 0.0

        others = in_step[~np.isin(layout.block[in_step], self.activations)]
        self.other_rows, self.other_bytes = others.astype(np.float64), self.row_bytes[others]
        self._find_holders()

    def _find_activations(self, program: Program) -> None:
        """Find the blocks that a forward of the step allocates and that outlive it."""
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
        self.position = rows.astype(np.float64)
        born_in, died_in = layout.interval[births], layout.interval[deaths]
        (self.activations,) = np.nonzero(
            (births >= 0) & (deaths >= 0) & is_forward[born_in] & (died_in != born_in)
        )
        self.is_activation = np.zeros(num_blocks, bool)
        self.is_activation[self.activations] = True
        self.index = {int(block): at for at, block in enumerate(self.activations)}
        self.made_by = np.where(births >= 0, layout.operator[births] - 1, NEVER).astype(np.int64)
        self.birth_operator = self.made_by[self.activations]
        ends = [np.flatnonzero(layout.interval == i) for i in np.flatnonzero(is_forward)]
        self.forward_ends = np.array([rows[-1] for rows in ends if len(rows)])
        self.birth_at = births[self.activations].astype(np.float64)
        self.death_at = deaths[self.activations].astype(np.float64)
        self.also_saved = np.zeros(len(self.forward_ends), np.int64)

    def passing(self, span: Span) -> list[int]:
        """Return the inputs of a call that the plain step frees in forward."""
        inside = range(span.first, span.end)
        read = {block for number in inside for block in self.recording.operators[number].reads}
        return [
            block
            for block in sorted(read)
            if block not in self.index
            and self.births[block] >= 0
            and self._is_of_forward(block)
            and self.recording.blocks[block].operator < span.first
            and self.deaths[block] < span.backward
        ]

    def _find_holders(self) -> None:
        """Find the last use of each activation in forward, and the operators it is held for."""
        self.last_use = self.births[self.activations] + 0.5
        self.users: list[set[int]] = [set() for _ in self.activations]
        self.holders: list[dict[int, int]] = [{} for _ in self.activations]
        self.written: set[int] = set()  # blocks that are written in place
        self.backward_of: dict[int, list[int]] = defaultdict(list)

        for number, operator in enumerate(self.recording.operators):
            if self.is_forward[number]:
                for block in operator.reads:
                    if (at := self.index.get(block)) is not None:
                        self.users[at].add(number)
                        self.last_use[at] = max(self.last_use[at], self.ends[number] - 0.5)
                self.written.update(operator.writes)
            elif operator.forward >= 0 and self.is_forward[operator.forward]:
                self.backward_of[operator.forward].append(number)
                for block in operator.reads:
                    if (at := self.index.get(block)) is not None:
                        self.holders[at][operator.forward] = int(self.ends[number])

    def candidates(self) -> list[Candidate]:
        """Return every module that can be recomputed, in the order of their first calls.

        The model itself is left out: recomputing it would run the whole forward again.
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
            if any(self._draws_unseen(number) for number in inside):
                return None

            # the recompute can stop before the kernel of the last operator that saves its input
            span.saving = tuple(saving)
            span.stop = saving[-1] + self._saves_its_output(saving[-1])
            span.backward = int(self.starts[min(backward)])
            span.done = int(self.ends[max(backward)])
            span.state = self._state(span)

        candidate = Candidate(path, spans)
        for span in spans:
            born = (self.birth_operator >= span.first) & (self.birth_operator < span.end)
            candidate.nbytes += int(self.own[self.activations[born]].sum())
            candidate.seconds += float(self.seconds[span.first : span.stop].sum())
            copies = 2 * len(span.state)
            candidate.seconds += copies * self.copy_seconds
            candidate.num_operators += span.stop - span.first + copies
            taken = self.seconds[span.first : span.stop]
            candidate.num_kernels += int(np.count_nonzero(taken)) + copies

        candidate.items = self._items(spans)
        return candidate

    def _saves(self, forward: int) -> bool:
        """Return whether the backward of an operator reads more than gradients."""
        return any(not self._is_of_backward(block) for block in self._read_back(forward))

    def _saves_its_output(self, forward: int) -> bool:
        blocks, writes = self.recording.blocks, self.recording.operators[forward].writes
        back = self._read_back(forward)
        return any(blocks[block].operator == forward or block in writes for block in back)

    def _read_back(self, forward: int) -> Iterator[int]:
        for number in self.backward_of.get(forward, ()):
            yield from self.recording.operators[number].reads

    def _is_of_backward(self, block: int) -> bool:
        operator = self.recording.operators[self.recording.blocks[block].operator]
        return self.recording.intervals[operator.interval].phase is Phase.BACKWARD

    def _draws_unseen(self, number: int) -> bool:
        """Return whether an operator draws from cuDNN's own random state, which has no reset."""
        operator = self.recording.operators[number]
        if "_cudnn_rnn" not in operator.name or operator.signature is None:
            return False
        func, args, kwargs = call_of(operator.signature, _stand_in)
        return policies.draws(func, policies.values_of(func, args, kwargs))

    def _changes_its_inputs(self, span: Span) -> bool:
        """Return whether a call writes in place to a tensor that this step made outside of it."""
        return any(
            block in self.index or self._is_of_forward(block)
            for number in range(span.first, span.end)
            for block in self.recording.operators[number].writes
            if not span.first <= self.recording.blocks[block].operator < span.end
        )

    def _state(self, span: Span) -> tuple[int, ...]:
        """Return the buffers that a call changes: in place, or as a norm's running statistics."""
        found: set[int] = set()
        for number in range(span.first, span.end):
            operator = self.recording.operators[number]
            # the kernel of a norm writes its statistics, though its schema says that it reads them
            is_norm = "batch_norm" in operator.name
            found.update(operator.reads if is_norm else operator.writes)

        return tuple(
            block
            for block in found - self.recording.parameters.keys()
            if block not in self.index and not self._is_of_forward(block)
        )

    def _is_of_forward(self, block: int) -> bool:
        return bool(self.is_forward[self.recording.blocks[block].operator])

    def _items(self, spans: Sequence[Span]) -> list[Item]:
        """Return the outputs that can be kept; none if the calls do not run the same operators."""
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
        if signature not in self._keepable:
            self._keepable[signature] = _is_keepable(signature)
        return self._keepable[signature]

    def _instances(self, span: Span) -> dict[Instance, int]:
        counts: dict[str, int] = defaultdict(int)
        found = {}
        for number in range(span.first, span.end):
            signature = self.recording.operators[number].signature
            if signature is not None:
                found[signature[0], counts[signature[0]]] = number
                counts[signature[0]] += 1

        return found


def _is_keepable(signature: Signature) -> bool:
    try:
        func, args, kwargs = call_of(signature, _stand_in)
    except AttributeError:  # an operator that is registered in another process only
        return False
    return policies.can_be_kept(func, policies.values_of(func, args, kwargs))


def _stand_in(_: TensorSpec) -> torch.Tensor:
    return torch.empty(0, device="meta")
