"""What is wrong in a person's script, proven by lifetimes and by what happened: `faults_of`.

The idea. A text may look wrong and be right, so no text is read. A fault is something that
happened: a block of an earlier step that is still alive, a forward pass whose operators no backward
refers to, gradients that were written to again without having been zeroed. What it costs is not
estimated either. Where the change frees memory earlier, the run is added up again with these blocks
freed then; where it changes what runs, the script is recorded again with it.

    the change frees blocks earlier     peak of the run before, and with those blocks gone
    the change runs something else      the script is recorded again (`Change`)

Growth needs three repetitions: a script holds the tensors of one step in variables, and at times
those of two. So what a first step makes (optimizer state, gradients, caches) is none.

Nothing is said of less than 1 % of a peak, nor of less than 1 MiB, half of the smallest segment
that the caching allocator asks a card for; except what grows without end, and training that goes
wrong. Numbers that are kept for a log are no growth: each takes one of the smallest blocks.

Left out: gradients accumulated over micro-batches without dividing the loss. A sum over
micro-batches is a mean with another learning rate, and under Adam the same, so nothing that ran
proves it wrong. A copy that is not used is only told of a script that ran to its end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memlab._util.units import MIB
from memlab.prediction.run_result import FaultKind, ScriptFault, text_of
from memlab.prediction.run_stages import peaks_of_stages
from memlab.trace import Phase, Trace
from memlab.tracing.person_script import ScriptRecording
from memlab.tracing.script_facts import NOWHERE, Action, Change, Line, ModelCall, OptimizerUpdate
from memlab.tracing.script_stages import EVALUATION, GENERATION, SAVING

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

LEAST_SHARE, LEAST_BYTES = 0.01, MIB  # of a peak, that a change lowers it by
NUMBER_BYTES = 512  # the smallest block of a card, which a number takes
REPETITIONS = 3
COPIED_SHARE = 0.9  # of a model's parameters, that a copy has too
LOG_SOFTMAX, JOINS = "aten::_log_softmax", "aten::cat"
Peaks = Mapping[str, int]  # of each stage, by name
Again = Callable[[Change], Peaks | None]  # the peaks of the run with a change; None if it fails

DOES = {
    FaultKind.KEPT_GRAPH: "keep its number with .item(), or the tensor with .detach()",
    FaultKind.GROWTH: "keep it on the host, or only what is needed of it",
    FaultKind.EVALUATION_KEPT: "move it to the host after each batch, or keep only what the "
    "metric needs",
    FaultKind.UNUSED_GRAPH: "run it under torch.no_grad()",
    FaultKind.NEVER_ZEROED: "call optimizer.zero_grad() after each update",
    FaultKind.GRADIENTS_LATE: "call optimizer.zero_grad(set_to_none=True) right after the update",
    FaultKind.OTHER_PARAMETERS: "make the optimizer once the model has its final parameters",
    FaultKind.UNUSED_COPY: "drop it, or keep it on the host",
    FaultKind.UNUSED_GRADIENTS: "freeze it with requires_grad_(False), or run it under "
    "torch.no_grad() if no gradient passes through it",
    FaultKind.FLOAT_LOGITS: "give the logits to the loss as they are, or compute it in chunks",
    FaultKind.RETAINED_GRAPH: "leave out retain_graph=True",
    FaultKind.LAST_STEP: "delete it once the step has used it, or make the step a function",
}
GOES_WRONG = (FaultKind.NEVER_ZEROED, FaultKind.OTHER_PARAMETERS)
OTHERS = (EVALUATION, GENERATION, SAVING)
GROWS = (FaultKind.KEPT_GRAPH, FaultKind.GROWTH)


@dataclass(slots=True)
class _Found:
    """A fault whose effect is not known yet.

    `absent` has blocks, each with the rows from which, and up to which, it would not be there;
    `covers` those that no other fault tells of again.
    """

    kind: FaultKind
    line: Line
    nbytes: int = 0
    per: str = ""
    absent: list[tuple[int, int, int]] = field(default_factory=list)
    covers: frozenset[int] = frozenset()
    change: Change | None = None
    everywhere: bool = False  # whether the peak of any stage counts, and not only that of the run


def faults_of(
    recorded: ScriptRecording, trace: Trace, names: Sequence[str], again: Again
) -> tuple[ScriptFault, ...]:
    """Return what is wrong in a script, the costliest first.

    Args:
        recorded: the script.
        trace: of its run.
        names: of its stages after the build, by number.
        again: returns the peaks of the stages with a change, or None if the script then fails.
    """
    run = _ScriptRun(recorded, trace, names)
    told: list[ScriptFault] = []
    for found in _all(run):
        if (fault := _tried(run, found, again)) is not None:
            told.append(fault)
    has_retained = any(fault.kind is FaultKind.RETAINED_GRAPH for fault in told)
    for found in [] if has_retained else _of_last_step(run):
        if (fault := _tried(run, found, again)) is not None:
            told.append(fault)
    return tuple(sorted(told, key=lambda each: each.after_bytes - each.before_bytes))


def _all(run: _ScriptRun) -> Iterator[_Found]:
    yield from _kept_graphs(run)
    yield from _growth(run)
    yield from _kept_in_evaluation(run)
    yield from _never_zeroed(run)
    yield from _zeroed_late(run)
    yield from _other_parameters(run)
    yield from _unused_copies(run)
    if not run.recorded.ended:  # what was cut off by an error has no proof
        yield from _unused_graphs(run)
        yield from _unused_gradients(run)
        yield from _float_logits(run)
        yield from _retained(run)


def _tried(run: _ScriptRun, found: _Found, again: Again) -> ScriptFault | None:
    """Return a fault with its effect; None if it is too small to be told."""
    if found.line == NOWHERE:
        return None
    before = run.peaks(run.live)
    after = before if found.change is None else again(found.change)
    if found.absent:
        after = run.peaks(run.without(found.absent))
    if after is None:
        return None
    run.told |= found.covers.union(block for block, _, _ in found.absent)
    saved = {name: peak - after.get(name, peak) for name, peak in before.items()}
    highest = max(before, key=lambda name: before[name])
    whole = max(before.values()) - max(after.values())
    stage = max(saved, key=lambda name: saved[name]) if found.everywhere else highest
    gain = saved[stage] if found.everywhere else whole
    is_felt = gain >= max(LEAST_BYTES, LEAST_SHARE * before[stage])
    if not is_felt and found.kind not in (*GOES_WRONG, *GROWS):
        return None
    file, number = found.line
    return ScriptFault(
        kind=found.kind, file=file, line=number, text=text_of(file, number),
        nbytes=found.nbytes, per=found.per,
        change=DOES[found.kind], stage=stage if gain > 0 else "",
        before_bytes=before[stage] if gain > 0 else 0,
        after_bytes=before[stage] - gain if gain > 0 else 0,
    )  # fmt: skip


class _ScriptRun:
    """A recorded run: rows of its trace, the life of each block, and who read it."""

    def __init__(self, recorded: ScriptRecording, trace: Trace, names: Sequence[str]) -> None:
        self.recorded, self.trace, self.names = recorded, trace, names
        self.recording, self.facts = recorded.recording, recorded.facts
        self.live = np.cumsum(trace.nbytes)
        self.told: set[int] = set()  # blocks that a fault tells of
        count = len(self.recording.blocks)
        self.births, self.deaths = np.full(count, -1), np.full(count, len(trace.nbytes))
        for places, is_birth in ((self.births, True), (self.deaths, False)):
            rows = np.flatnonzero((trace.nbytes > 0) == is_birth)
            rows = rows[trace.address[rows] < count]
            places[trace.address[rows]] = rows
        self.sizes = np.where(self.births >= 0, trace.nbytes[self.births], 0)
        self.real = np.flatnonzero(self.births >= 0).tolist()
        self.gradients: Set[int] = {
            block for each in self.facts.updates for block in each.gradients.values()
        }
        self.parameters = frozenset[int]().union(*(each.parameters for each in self.facts.calls))
        self.weights = self.parameters | self.facts.updated | self.recording.states.keys()

    def peaks(self, live: npt.NDArray[np.int64]) -> Peaks:
        """Return the peak of each stage."""
        found: dict[str, int] = {}
        for name, _, _, row in peaks_of_stages(self.trace, self.names, live):
            found[name] = max(found.get(name, 0), int(live[row]))
        return found

    def without(self, absent: Iterable[tuple[int, int, int]]) -> npt.NDArray[np.int64]:
        """Return the bytes that are live without these blocks between these rows."""
        moved = np.zeros(len(self.live) + 1, np.int64)
        for block, begin, end in absent:
            if begin < end:
                moved[begin] -= self.sizes[block]
                moved[end] += self.sizes[block]
        found: npt.NDArray[np.int64] = self.live + np.cumsum(moved[:-1])
        return found

    def row_after(self, operator: int) -> int:
        """Return the first row after an operator."""
        return int(np.searchsorted(self.trace.operator, operator + 1, "right"))

    def round(self, block: int, ends: Sequence[int]) -> int:
        """Return before which of these operators a block was made."""
        return bisect_left(ends, self.recording.blocks[block].operator)

    def made_by(self, block: int) -> str:
        """Return the name of the operator that made a block."""
        return self.recording.operators[self.recording.blocks[block].operator].name

    def stage(self, block: int) -> str:
        """Return the name of the stage in which a block was made."""
        step = self.trace.intervals[self.trace.interval[self.births[block]]].step
        return self.names[step] if step >= 0 else ""

    def phase(self, operator: int) -> Phase:
        """Return the phase in which an operator ran."""
        return self.recording.intervals[self.recording.operators[operator].interval].phase

    def line(self, block: int) -> Line:
        """Return the line that made a block; that calls the model, if a model made it."""
        return self.line_of(self.recording.blocks[block].operator, self.recorded.lines[block])

    def line_of(self, operator: int, line: Line) -> Line:
        """Return the line of an operator, or the one that calls the model which runs it."""
        calls = self.facts.calls
        at = bisect_right(calls, operator, key=lambda call: call.first) - 1
        return calls[at].line if at >= 0 and operator < calls[at].end else line

    @cached_property
    def reads(self) -> dict[int, list[int]]:
        """The operators that read each block, in order."""
        found = defaultdict(list)
        for number, operator in enumerate(self.recording.operators):
            for block in operator.reads:
                found[block].append(number)
        return found

    @cached_property
    def writes(self) -> dict[int, list[int]]:
        """The operators that write each block in place, in order."""
        found = defaultdict(list)
        for number, operator in enumerate(self.recording.operators):
            for block in operator.writes:
                found[block].append(number)
        return found

    @cached_property
    def updates(self) -> list[OptimizerUpdate]:
        """The updates of the optimizer that made the most."""
        counts = Counter(each.optimizer for each in self.facts.updates)
        (most, _), *_ = counts.most_common(1) or [(-1, 0)]
        return [each for each in self.facts.updates if each.optimizer == most]

    def last_use(self, block: int) -> int:
        """Return the last operator that makes or reads a block."""
        made, reads = self.recording.blocks[block].operator, self.reads.get(block)
        return reads[-1] if reads else made


def _kept_graphs(run: _ScriptRun) -> Iterator[_Found]:
    """Graphs that reach operators of three updates: something holds them from step to step."""
    if not run.updates:
        return
    ends = [each.operator for each in run.updates]
    reached: dict[Line, set[int]] = defaultdict(set)
    roots: dict[Line, set[int]] = defaultdict(set)  # updates whose graphs nothing else reaches
    last: dict[Line, set[int]] = defaultdict(set)  # tensors that another graph reaches
    for forward, below in run.facts.graphs:
        if forward >= 0:
            line = run.line_of(forward, run.recorded.operator_lines[forward])
            (reached if below else last)[line] |= below or {forward}
            if below:
                roots[line].add(bisect_left(ends, forward))
    spans = {line: {bisect_left(ends, each) for each in below} for line, below in reached.items()}
    for line, numbers in reached.items():
        others = {bisect_left(ends, each) for each in last[line]}
        if len(spans[line]) < REPETITIONS - 1 or len(spans[line] | others) < REPETITIONS:
            continue
        carried = {each for each in last if len({bisect_left(ends, n) for n in last[each]}) > 2}
        if len(roots[line]) == 1 and carried:  # a state, which the loss of the last step reaches
            line = max(carried, key=lambda each: max(last[each]))
        held = [
            block
            for block in run.real
            if not numbers.isdisjoint(
                [run.recording.blocks[block].operator, *run.reads.get(block, ())]
            )
        ]
        kept = _kept(run, FaultKind.KEPT_GRAPH, line, _outliving(run, held, ends), ends)
        kept.covers = frozenset(held)
        yield kept


def _outliving(run: _ScriptRun, blocks: Iterable[int], ends: Sequence[int]) -> list[int]:
    """Return those of some blocks that live on beyond the update after the one they belong to."""
    found = []
    for block in blocks:
        born, place = run.recording.blocks[block].operator, run.round(block, ends) + 1
        is_kept = place < len(ends) and run.deaths[block] > run.row_after(ends[place])
        if is_kept and run.phase(born) is not Phase.OPTIMIZER:
            found.append(block)
    return [each for each in found if each not in run.gradients | run.weights]


def _kept(
    run: _ScriptRun, kind: FaultKind, line: Line, blocks: Sequence[int], ends: Sequence[int],
    *, per: str = "step", everywhere: bool = False,
) -> _Found:  # fmt: skip
    """Return a fault of blocks that would be free at the end of their step or batch."""
    rounds = Counter[int]()
    absent = []
    for block in blocks:
        place, birth = run.round(block, ends), int(run.births[block])
        is_joined = run.made_by(block) == JOINS
        end = run.row_after(ends[place]) if place < len(ends) and not is_joined else birth
        begin, death = max(end, birth), int(run.deaths[block])
        if begin < death:
            rounds[place] += int(run.sizes[block])
            absent.append((block, begin, death))
    each = sorted(rounds.values())
    if all(run.made_by(block) == JOINS for block in blocks):
        each = np.diff(each).tolist()
    middle = each[len(each) // 2] if each else 0
    return _Found(kind, line, middle, per, absent, everywhere=everywhere)


def _growing(
    run: _ScriptRun, blocks: Iterable[int], ends: Sequence[int]
) -> Iterator[tuple[Line, list[int]]]:
    """Yield lines whose blocks of three rounds are alive at once, or joined to one another.

    Args:
        run: the run.
        blocks: that may grow.
        ends: the last operator of each round.
    """
    made: dict[tuple[Line, str, int], list[int]] = defaultdict(list)
    for block in blocks:
        operator = run.recording.operators[run.recording.blocks[block].operator]
        made[run.line(block), operator.name, operator.module].append(block)
    found: dict[Line, list[int]] = defaultdict(list)
    for (line, name, _), group in made.items():
        if len(group) >= REPETITIONS:
            is_chain = name == JOINS and _joined(run, group, ends) >= REPETITIONS - 1
            if is_chain or _most_rounds(run, group, ends) >= REPETITIONS:
                found[line] += group
    yield from found.items()


def _most_rounds(run: _ScriptRun, group: Sequence[int], ends: Sequence[int]) -> int:
    """Return from how many rounds blocks of a group are alive to the end of the same round.

    Within it a batch that was loaded ahead may lie beside that of the last round.
    """
    births, deaths = run.births[group], run.deaths[group]
    rounds = np.array([run.round(block, ends) for block in group])
    closed = np.array([run.row_after(end) for end in ends])[rounds[rounds < len(ends)]]
    until = births.copy()
    until[rounds < len(ends)] = closed
    alive = (
        (births <= at) & (until_then < deaths) for at, until_then in zip(births, until, strict=True)
    )
    return max(len(set(rounds[each].tolist())) for each in alive)


def _joined(run: _ScriptRun, group: Sequence[int], ends: Sequence[int]) -> int:
    """Return how often a block of a group is joined with more to a larger one of a later round."""
    by_operator = {run.recording.blocks[block].operator: block for block in group}
    return sum(
        run.sizes[by_operator[reader]] > run.sizes[block]
        for block in group
        for reader in run.reads.get(block, ())
        if reader in by_operator
        if run.round(by_operator[reader], ends) > run.round(block, ends)
    )


def _growth(run: _ScriptRun) -> Iterator[_Found]:
    """Blocks of three updates that are alive at once, of one line."""
    ends = [each.operator for each in run.updates]
    if len(ends) < REPETITIONS:
        return
    blocks = [
        block
        for block in run.real
        if block not in run.told | run.gradients | run.weights
        if run.phase(run.recording.blocks[block].operator) is not Phase.OPTIMIZER
        if run.sizes[block] > NUMBER_BYTES
        if run.stage(block) not in OTHERS
    ]
    for line, group in _growing(run, blocks, ends):
        yield _kept(run, FaultKind.GROWTH, line, group, ends)


def _kept_in_evaluation(run: _ScriptRun) -> Iterator[_Found]:
    """Blocks of three batches of an evaluation that are alive at once, of one line."""
    steps = [run.recording.intervals[each.interval].step for each in run.recording.operators]
    steps.append(len(run.names))  # of a call after the last operator
    found: dict[Line, _Found] = {}
    for stage, name in enumerate(run.names):
        firsts = [call.first for call in run.facts.calls if steps[call.first] == stage]
        if name != EVALUATION or len(firsts) < REPETITIONS:
            continue
        inside = [block for block in run.real if block not in run.told
                  if steps[run.recording.blocks[block].operator] == stage]  # fmt: skip
        for line, group in _growing(run, inside, firsts[1:]):
            kept = _kept(run, FaultKind.EVALUATION_KEPT, line, group, firsts[1:], per="batch",
                         everywhere=True)  # fmt: skip
            found.setdefault(line, kept)
            if found[line] is not kept:
                found[line].absent += kept.absent
    for each in found.values():
        yield _with_joined(run, each)


def _with_joined(run: _ScriptRun, found: _Found) -> _Found:
    """Return a fault of kept blocks without what is made by joining them, which the host would."""
    kept = {block for block, _, _ in found.absent}
    for block in run.real:
        operator = run.recording.operators[run.recording.blocks[block].operator]
        if block not in kept and operator.name == JOINS and not kept.isdisjoint(operator.reads):
            found.absent.append((block, int(run.births[block]), int(run.deaths[block])))
    return found


def _pairs(run: _ScriptRun) -> Iterator[tuple[OptimizerUpdate, OptimizerUpdate]]:
    """Yield each update with the next one of the same optimizer."""
    last: dict[int, OptimizerUpdate] = {}
    for update in run.facts.updates:
        if update.optimizer in last:
            yield last[update.optimizer], update
        last[update.optimizer] = update


def _is_zeroed(run: _ScriptRun, block: int, after: int, before: int) -> bool | None:
    """Return whether a gradient is zeroed between two operators before it is added to.

    What is written outside of a backward, with a backward after it, may be zeros. None if no
    backward adds to it.
    """
    written = [each for each in run.writes.get(block, ()) if after < each <= before]
    added = [each for each in written if run.phase(each) is Phase.BACKWARD]
    others = [each for each in written if run.phase(each) not in (Phase.BACKWARD, Phase.OPTIMIZER)]
    return any(other < added[-1] for other in others) if added else None


def _never_zeroed(run: _ScriptRun) -> Iterator[_Found]:
    """Gradients that two backward passes of two updates add to, with no zeros in between."""
    seen: dict[Line, list[bool]] = defaultdict(list)
    for update, following in _pairs(run):
        states = [
            _is_zeroed(run, block, update.operator, following.operator)
            for block in {*update.gradients.values()} & {*following.gradients.values()}
        ]
        known = [state for state in states if state is not None]
        is_same = len(known) > 0 and not any(known)
        seen[update.line].append(is_same)
    for line, each in seen.items():
        if len(each) >= REPETITIONS - 1 and all(each):
            yield _Found(FaultKind.NEVER_ZEROED, line)


def _zeroed_late(run: _ScriptRun) -> Iterator[_Found]:
    """Gradients that are held through a forward of their model, up to the next backward."""
    never = {found.line for found in _never_zeroed(run)}
    absent: dict[Line, list[tuple[int, int, int]]] = defaultdict(list)
    for update, _ in _pairs(run):
        if update.line in never or update.operator + 1 >= len(run.recording.operators):
            continue
        interval = run.recording.operators[update.operator + 1].interval
        done = int(np.searchsorted(run.trace.interval, interval, "right"))
        for parameter, block in update.gradients.items():
            added = [run.row_after(each - 1) for each in run.writes.get(block, ())
                     if update.operator < each and run.phase(each) is Phase.BACKWARD]  # fmt: skip
            end = min([int(run.deaths[block]), *added[:1]])
            call = next((call for call in run.facts.calls if call.first > update.operator
                         and call.has_graph and parameter in call.parameters), None)  # fmt: skip
            if call is not None and end > run.row_after(call.end - 1):
                absent[update.line].append((block, done, end))
    for line, blocks in absent.items():
        yield _Found(FaultKind.GRADIENTS_LATE, line, _most_held(run, blocks), absent=blocks)


def _other_parameters(run: _ScriptRun) -> Iterator[_Found]:
    """Optimizers with parameters outside of all models that ran, while theirs are in none."""
    seen: dict[Line, list[bool]] = defaultdict(list)
    for update in run.facts.updates:
        seen[update.made].append(update.num_idle > 0 and bool(update.orphans))
    for line, each in seen.items():
        if len(each) > 1 and all(each):
            yield _Found(FaultKind.OTHER_PARAMETERS, line)


def _unused_copies(run: _ScriptRun) -> Iterator[_Found]:
    """Blocks of the sizes of a model's parameters that nothing reads once a model has run.

    What a backward makes are gradients, which no optimizer need know.
    """
    if not run.facts.is_seen_to_end or not run.facts.calls:
        return
    first = run.facts.calls[0].first
    unread = [block for block in run.real if block not in run.weights | run.gradients | run.told
              and run.last_use(block) <= max(first, run.recording.blocks[block].operator)
              and run.phase(run.recording.blocks[block].operator) is not Phase.BACKWARD
              and run.deaths[block] > run.row_after(first)]  # fmt: skip
    by_line: dict[Line, list[int]] = defaultdict(list)
    for block in unread:
        by_line[run.line(block)].append(block)
    models = {call.parameters for call in run.facts.calls}
    for line, blocks in by_line.items():
        sizes = Counter(run.sizes[blocks].tolist())
        for model in models:
            wanted = Counter(run.sizes[list(model)].tolist())
            same = sum(size * count for size, count in (sizes & wanted).items())
            if len(model) > 1 and same >= COPIED_SHARE * sum(run.sizes[list(model)].tolist()):
                absent = [(each, int(run.births[each]), int(run.deaths[each])) for each in blocks]
                yield _Found(FaultKind.UNUSED_COPY, line, same, absent=absent)
                break


def _by_line(calls: Iterable[ModelCall]) -> dict[tuple[Line, bool], list[ModelCall]]:
    found = defaultdict(list)
    for call in calls:
        found[call.line, call.is_training].append(call)
    return found


def _unused_graphs(run: _ScriptRun) -> Iterator[_Found]:
    """Calls of models with a graph that no operator of a backward belongs to."""
    used = np.zeros(len(run.recording.operators) + 1, np.int64)
    for operator in run.recording.operators:
        used[operator.forward + 1] += operator.forward >= 0
    before = np.cumsum(used)
    for (line, training), calls in _by_line(run.facts.calls).items():
        if not any(call.has_graph for call in calls):
            continue
        if any(before[call.end] > before[call.first] for call in calls):
            continue
        largest = max(calls, key=lambda call: _held_by(run, call))
        nbytes = _held_by(run, largest)
        if nbytes >= LEAST_BYTES:
            change = Change(Action.WITHOUT_GRAPH, line, training)
            covers = frozenset(
                block
                for block in run.real
                if any(
                    call.first <= run.recording.blocks[block].operator < call.end for call in calls
                )
            )
            yield _Found(FaultKind.UNUSED_GRAPH, line, nbytes, covers=covers, change=change,
                         everywhere=True)  # fmt: skip


def _held_by(run: _ScriptRun, call: ModelCall) -> int:
    """Return the bytes that a call of a model has made and that live when it makes its last."""
    begin, end = run.row_after(call.first - 1), run.row_after(call.end - 1)
    is_made = (run.births >= begin) & (run.births < end)
    last = run.births[is_made].max(initial=begin)
    return int(run.sizes[is_made & (run.deaths > last)].sum())


def _unused_gradients(run: _ScriptRun) -> Iterator[_Found]:
    """Calls of models that get gradients, and none of whose parameters an optimizer has."""
    orphans = frozenset[int]().union(
        *(each.orphans for each in run.facts.updates if not each.num_idle)
    )
    for (line, training), calls in _by_line(run.facts.calls).items():
        given = frozenset[int]().union(*(call.parameters for call in calls if call.has_graph))
        written = [each for block in given for each in run.writes.get(block, ())
                   if each > calls[0].first]  # fmt: skip
        if given & orphans and not given & run.facts.updated and not written:
            nbytes = int(run.sizes[list(given)].sum())
            change = Change(Action.FROZEN, line, training)
            yield _Found(FaultKind.UNUSED_GRADIENTS, line, nbytes, change=change)


def _float_logits(run: _ScriptRun) -> Iterator[_Found]:
    """Copies as float32, which the script asks for, of what a cross entropy reads."""
    copies = set(run.facts.floats)
    found: Counter[Line] = Counter()
    for block in run.real:
        readers = {run.recording.operators[each].name for each in run.reads.get(block, ())}
        if run.recording.blocks[block].operator in copies and LOG_SOFTMAX in readers:
            line = run.line(block)
            found[line] = max(found[line], int(run.sizes[block]))
    for line, nbytes in found.items():
        if nbytes >= LEAST_BYTES:
            change = Change(Action.NOT_FLOAT, line)
            yield _Found(FaultKind.FLOAT_LOGITS, line, nbytes, change=change)


def _retained(run: _ScriptRun) -> Iterator[_Found]:
    """Graphs that a backward retains: the script is tried without, and fails if it needs them."""
    for line in dict.fromkeys(line for line, _ in run.facts.retained):
        yield _Found(FaultKind.RETAINED_GRAPH, line, change=Change(Action.NOT_RETAINED, line))


def _of_last_step(run: _ScriptRun) -> Iterator[_Found]:
    """Blocks that nothing reads from the next step on, and that die within that step."""
    calls = [call for call in run.facts.calls if call.has_graph]
    firsts = [next((call.first for call in calls if call.first > update.operator), None)
              for update in run.updates]  # fmt: skip
    starts = sorted({first for first in firsts if first is not None})
    rows = [*(run.row_after(start - 1) for start in starts), len(run.live)]
    found: dict[Line, list[tuple[int, int, int]]] = defaultdict(list)
    for block in run.real:
        place = int(np.searchsorted(starts, run.last_use(block), "right"))
        if place >= len(starts) or block in run.told | run.gradients | run.weights:
            continue
        if run.phase(run.recording.blocks[block].operator) in (Phase.BUILD, Phase.OPTIMIZER):
            continue
        if rows[place] < run.deaths[block] < rows[place + 1]:
            found[run.line(block)].append((block, rows[place], int(run.deaths[block])))
    for line, absent in found.items():
        yield _Found(FaultKind.LAST_STEP, line, _most_held(run, absent), absent=absent)


def _most_held(run: _ScriptRun, absent: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes that would be absent from one row on."""
    held = Counter[int]()
    for block, begin, _ in absent:
        held[begin] += int(run.sizes[block])
    return max(held.values())
