"""The course of a person's script, found by what happens: its steps, evaluations and savings.

    what the script does                what is noted
    a module runs, with gradients       a training step goes forward
    `backward`                          it goes backward; then comes its next micro-batch, if any
    an optimizer's `step`               it updates; what comes then belongs to the next stage
    weights are written without it      it updates by itself (`script_updates.py`)
    a module runs, without gradients    an evaluation, or a generation inside of a `generate`
    `torch.save`                        a checkpoint is saved

What lies between two of them belongs to the stage that comes next: its batch is loaded there. Each
stage is a step of the recording, with a name. A loop over a loader ends early, once it has shown
what it does: so a script reaches what comes after its training.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import FakeTensor, innermost_transform, storage_key
from memlab.memory.meter import name_of_class
from memlab.trace import Phase
from memlab.tracing.data_dependent import Guesses
from memlab.tracing.recording import OpTrace
from memlab.tracing.script_facts import Action, Facts, Watcher
from memlab.tracing.script_updates import OwnUpdates
from memlab.tracing.tracker import Tracker
from memlab.tracing.values import tensors_in

FIRST, STEP, BETWEEN = "first step", "step", "end"  # the last: while it is not known
EVALUATION, GENERATION, SAVING = "evaluation", "generation", "saving"
CALLS, REST = "calls like earlier ones", "the rest of the script"
MOST_BATCHES = 3  # of an evaluation that holds no more with each: the others are like the last
MOST_LOOPS = 4  # over a loader of training data: the later ones, after the first, make one update
MOST_FRAMES = 200  # that are searched for a `generate`


PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """A tensor without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_parameter: bool

    def made(self, device: Any = None) -> torch.Tensor:
        """Return a new tensor like it, on this device or its own."""
        found = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=device or self.device
        )
        return torch.nn.Parameter(found) if self.is_parameter else found


def outline(tensor: torch.Tensor) -> TensorOutline:
    """Return a tensor without its memory."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return TensorOutline(
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, is_parameter
    )


class Enough(BaseException):
    """Ends a script that has shown what it does; no `Exception`, which it might catch."""


WHOLE = (
    "The script raises an error where an evaluation ends early, as if it counts what it has "
    "evaluated: evaluations went on to the end of their data."
)


class ScriptGuesses(Guesses):
    """What is assumed of a script; first, that a few batches of an evaluation are enough for it.

    One that counts what it has evaluated may raise an error because of that. It is run once more,
    with evaluations that go on to their end.

    Attributes:
        is_whole: whether evaluations go on to their end in this attempt.
        has_cut: whether one was ended early, in any attempt.
    """

    is_whole = has_cut = _was_whole = False

    def turn(self, reached: int) -> bool:
        """Prepare another attempt after one that failed; False if no attempt is left."""
        self.is_whole = self.has_cut and not self._was_whole
        self._was_whole |= self.is_whole
        return self.is_whole or super().turn(reached)


@dataclass(slots=True)
class _LoaderLoop:
    """A loop over a loader: what its batches are for ("" while that is not known), and how many.

    `held` is what was held, in bytes, when it was last asked for one.
    """

    kind: str = ""
    batches: int = 0
    held: int = 0

    def has_shown(self, held: int) -> bool:
        """Return whether the next batch of an evaluation is like the last, by the bytes then held.

        One that keeps something of each batch, such as its outputs, goes on to its end.
        """
        grown, self.held = held - self.held, held
        return bool(self.kind) and self.batches >= MOST_BATCHES and grown <= 0


class Course:
    """The stages of one run of a script.

    Args:
        tracker: records it.
        watcher: is told of what may be wrong.
        most_updates: after how many updates of each optimizer training has shown what it does.
        held: returns the bytes that are live now.
        guesses: say whether evaluations are ended early, and are told when one is.

    Attributes:
        names: of the stages, by number.
        updates: of optimizers, so far.
        cut: what was ended early: training (`STEP`), an evaluation, or a generation; `CALLS` if
            calls of a model were left out; `REST` if the run ended with its training, and what the
            script does afterwards was not seen.
    """

    def __init__(
        self, tracker: Tracker, watcher: Watcher, most_updates: int, held: Callable[[], int],
        guesses: ScriptGuesses,
    ) -> None:  # fmt: skip
        self._tracker, self._watcher, self._guesses = tracker, watcher, guesses
        self._most, self._held = most_updates, held
        self.names: list[str] = []
        self.updates = 0
        self._updates_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.cut: set[str] = set()
        self._has_ended = self._is_in_backward = False
        self._num_loads = 0
        self._loads_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._own = OwnUpdates(tracker)
        self._is_last = False
        self._is_used = True  # whether a backward, or an update, has followed the last forward
        self._modes: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._micro_batch = self._depth = self._training_loops = 0
        self._loads_at = 0  # the first interval of the batch that was loaded last
        self._loops: weakref.WeakKeyDictionary[Any, _LoaderLoop] = weakref.WeakKeyDictionary()
        self._loop = _LoaderLoop()
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._calls: list[str | None] = []
        self._evaluated: dict[Any, tuple[int, Any]] = {}  # by model and inputs

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what happens inside this context."""
        hooks = (
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._update),
            register_optimizer_step_post_hook(self._updated),
        )
        own: dict[tuple[Any, str], Any] = {}
        for holder, name, made in (
            (torch.autograd, "backward", self._watched_backward),
            (torch.optim.Optimizer, "__init__", self._watcher.made_optimizer),
            (torch, "save", functools.partial(_surrounded, self._saved)),
            (torch.nn.Module, "__call__", self._abridged),
            (torch.autograd, "grad", self._graded),
        ):
            own[holder, name] = getattr(holder, name)
            setattr(holder, name, made(own[holder, name]))
        try:
            yield
            self._count_own()
        finally:
            for hook in hooks:
                hook.remove()
            for (holder, name), function in own.items():
                setattr(holder, name, function)

    def load(self, iterator: Any, has_workers: bool) -> AbstractContextManager[None]:
        """Note that an iterator of a loader is asked for a batch, which is loaded in the context.

        Args:
            iterator: of a `DataLoader`.
            has_workers: whether the script has the batch made in other processes.

        Raises:
            StopIteration: the loop has shown what it does.
        """
        self._count_own()
        loop = self._loops.setdefault(iterator, _LoaderLoop())
        is_training = loop.kind == STEP
        self._num_loads += 1
        is_whole = self._guesses.is_whole
        if self._is_over if is_training else not is_whole and loop.has_shown(self._held()):
            self.cut.add(loop.kind)
            self._guesses.has_cut |= not is_training
            self._training_loops += is_training
            if is_training:
                self._end_training()
                self._is_last = self._training_loops > MOST_LOOPS
            raise StopIteration
        loop.batches += 1
        is_other = loop.kind and self._kind and loop.kind != self._kind
        is_unused = self._kind == STEP and not self._is_used and loop is not self._loop
        self._loop = loop
        if not self.names or is_other or is_unused:
            self._begin()
        elif self._kind not in ("", STEP):
            self._micro_batch += 1
        self._loads_at = len(self._tracker.recording.intervals)
        self._mark_own()
        return self._elsewhere() if has_workers else contextlib.nullcontext()

    @contextlib.contextmanager
    def _elsewhere(self) -> Iterator[None]:
        self._mark(Phase.DATA)
        yield
        self._mark_own()

    @property
    def _is_over(self) -> bool:
        """Whether each optimizer has made its updates, or one of them twice as many."""
        counts = list(self._updates_of.values())
        least, most = min(counts, default=0), max(counts, default=0)
        return least >= self._most or most >= 2 * self._most

    def _stop_after_last(self) -> None:
        """End a loop without a loader where it begins what comes after its last update.

        Raises:
            Enough: it begins.
        """
        if self._is_last:
            self.cut.update((STEP, REST))
            intervals = self._tracker.recording.intervals
            if intervals[-1].phase is Phase.DATA:  # of another step like those that were counted
                intervals[-1] = replace(intervals[-1], micro_batch=0)
            self._end_training()
            raise Enough

    def _end_training(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._watcher.end_training()

    @property
    def _kind(self) -> str:
        """What the stage is for; "" where that is not known yet."""
        name = self.names[-1] if self.names else BETWEEN
        return {BETWEEN: "", FIRST: STEP}.get(name, name)

    def _begin(self) -> None:
        self.names.append(BETWEEN)
        self._micro_batch = 0
        self._is_used = True

    def _mark(self, phase: Phase) -> None:
        self._tracker.mark(len(self.names) - 1, phase, self._micro_batch)

    def _mark_own(self) -> None:
        """Note that what follows is the script's own work between its steps."""
        self._tracker.mark(len(self.names) - 1, Phase.DATA, -1)

    def _become(self, kind: str, *, anew: bool = False) -> None:
        """Note what the stage is for; begin another if it is for something else."""
        if self._kind not in ("", kind) or not self.names or anew:
            intervals = self._tracker.recording.intervals
            self._begin()
            last = intervals[self._loads_at :] or intervals[-1:]
            if any(interval.phase is not Phase.DATA for interval in last):
                last = intervals[-1:]
            if last[-1].phase is Phase.DATA:  # its batch is loaded already
                intervals[-len(last) :] = [replace(i, step=len(self.names) - 1) for i in last]
        if self._kind != kind:
            self.names[-1] = FIRST if kind == STEP and FIRST not in self.names else kind

    def _abridged(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module's call that is left out where evaluation has shown what it does.

        So is one of a generation whose model keeps nothing from token to token.
        What it returns is made again, like that of the last call with inputs of these shapes, if
        its values are not known.
        """

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                self._count_own()
                self._stop_after_last()
                changed = self._watcher.is_changed(Action.WITHOUT_GRAPH, module.training)
                if changed and torch.is_grad_enabled():
                    with torch.no_grad():
                        return call(module, *args, **kwargs)
            if self._depth or torch.is_grad_enabled():
                return own(module, *args, **kwargs)
            shapes = [(each.shape, each.dtype, each.device, each.is_contiguous())
                      if isinstance(each, torch.Tensor) else each
                      for each in pytree.tree_leaves((args, kwargs))]  # fmt: skip
            key = (id(module), module.training, repr(shapes))
            count, known = self._evaluated.get(key, (0, None))
            if count >= MOST_BATCHES and known is not None:
                self.cut.add(CALLS)
                self._become(kind_without_gradients())
                self._watcher.enter(module)
                return pytree.tree_map_only(TensorOutline, TensorOutline.made, known)
            before = self._held()
            out = own(module, *args, **kwargs)
            leaves = pytree.tree_leaves(out)
            is_known = all(map(self._can_be_made, leaves))
            if is_known and kind_without_gradients() == GENERATION:
                # a model that keeps keys and values has more of them with each token
                storages = [leaf.untyped_storage() for leaf in tensors_in(leaves)]
                given = {storage_key(each): each.nbytes() for each in storages}
                is_known = self._held() - before <= sum(given.values())
            outlined = pytree.tree_map_only(torch.Tensor, outline, out) if is_known else None
            self._evaluated[key] = count + 1, outlined
            return out

        return call

    def _can_be_made(self, leaf: Any) -> bool:
        """Return whether a part of what a model returns can be made again: no value is lost."""
        if not isinstance(leaf, torch.Tensor):
            return isinstance(leaf, PLAIN)
        values = self._tracker.outputs.values
        is_followed = values.knows(leaf) and not values.are_assumed(leaf)
        return isinstance(leaf, FakeTensor) and not is_followed

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if not self._depth and not self._is_inside():
            kind = STEP if torch.is_grad_enabled() else kind_without_gradients()
            is_switched = self._modes.get(module, module.training) != module.training
            self._become(
                kind, anew=kind == self._kind == STEP and is_switched and not self._is_used
            )
            self._modes[module] = module.training
            self._is_used = False
            self._loop.kind = kind
            self._know(module)
            self._mark(Phase.FORWARD)
            self._watcher.enter(module)
        self._depth += 1
        path = self._paths.get(module)
        self._calls.append(path)
        if path is not None:
            self._tracker.begin_module(path)

    def _leave(self, module: torch.nn.Module, _: Any, out: Any) -> None:
        self._depth -= 1
        if self._calls.pop() is not None:
            self._tracker.end_module()
        if not self._depth and not self._is_inside():
            self._watcher.leave(out)

    def _is_inside(self) -> bool:
        """Return whether torch calls a module: a transform, a compiler, a recomputation."""
        is_called_by_torch = torch.compiler.is_compiling() or innermost_transform() is not None
        return is_called_by_torch or self._is_in_backward

    def _know(self, module: torch.nn.Module) -> None:
        """Remember the paths of a model's modules, and its parameters, when it first runs."""
        if module in self._roots:
            return
        root, is_first = name_of_class(module), not self._roots
        self._roots.add(module)
        for path, part in module.named_modules():
            name = path if is_first else f"{root}.{path}"
            self._paths.setdefault(part, name if path else root)
        self._tracker.know(module, module)

    def _watched_backward(self, own: Callable[..., Any]) -> Callable[..., Any]:
        return _surrounded(self._backward, self._watcher.backward(own))

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        if self._is_in_backward:  # a checkpoint runs one of its own
            yield
            return
        self._count_own()
        self._stop_after_last()
        self._become(STEP)
        self._is_used = self._is_in_backward = True
        updates = sum(self._updates_of.values())
        self._mark(Phase.BACKWARD)
        try:
            yield
        finally:
            self._is_in_backward = False
        self._own.is_expected = True
        if sum(self._updates_of.values()) > updates:  # by hooks of its parameters
            self._end_step(self)
            return
        self._micro_batch += 1
        self._mark_own()

    def _graded(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def grad(*args: Any, **kwargs: Any) -> Any:
            if self._watcher.has_optimizers or kwargs.get("create_graph"):  # a part of a loss
                return own(*args, **kwargs)
            with self._backward():
                return own(*args, **kwargs)

        return grad

    def look(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look for an update that no optimizer makes, before an operator runs."""
        if self._watcher.has_optimizers:
            return
        was_pending = self._own.is_pending
        reads = self._own.reads(func, args)
        if self._own.writes(func, args, kwargs) and not was_pending:
            self._become(STEP)
            self._is_used = True
        if reads and not self._depth:  # of the next step
            self._count_own()

    def _count_own(self) -> None:
        if self._own.is_pending and not self._is_in_backward:
            self._updates_of[self._own] = self._updates_of.get(self._own, 0) + 1
            self._end_step(self._own)

    @contextlib.contextmanager
    def _saved(self) -> Iterator[None]:
        self._count_own()
        self._stop_after_last()
        self._become(SAVING)
        self._mark(Phase.FORWARD)
        yield
        self._begin()
        self._mark_own()

    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._become(STEP)
        self._is_used = True
        self._watcher.update(optimizer, self._roots)
        if not self._is_in_backward:
            self._micro_batch = max(self._micro_batch - 1, 0)
        self._mark(Phase.OPTIMIZER)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for root in self._roots:
            self._tracker.know_states(root, optimizer)
        self._updates_of[optimizer] = self._updates_of.get(optimizer, 0) + 1
        if self._is_in_backward:
            self._mark(Phase.BACKWARD)
        else:
            self._end_step(optimizer)

    def _end_step(self, by: Any) -> None:
        """End a step with an update; one that nothing was loaded for is of a loop without a loader.

        Args:
            by: what updates, of which there may be several a batch.
        """
        self._own.end()
        self.updates += 1
        is_loaded = self._loads_of.get(by, 0) != self._num_loads
        self._loads_of[by] = self._num_loads
        self._is_last = self._is_over and (not is_loaded or self._training_loops >= MOST_LOOPS)
        self._begin()
        self._mark_own()


def named_by_use(names: list[str], recording: OpTrace, facts: Facts) -> list[str]:
    """Return the names of stages, in which forward passes that no backward uses are evaluations."""
    used = {operator.forward for operator in recording.operators} - {-1}
    steps = [recording.intervals[operator.interval].step for operator in recording.operators]
    trained = {interval.step for interval in recording.intervals
               if interval.phase in (Phase.BACKWARD, Phase.OPTIMIZER)}  # fmt: skip
    trained |= {steps[number] for number in used}
    called = {steps[call.first] for call in facts.calls if call.end > call.first}
    found, has_begun = [], False
    for number, name in enumerate(names):
        if name in (FIRST, STEP):
            is_unused = number in called and number not in trained
            name = EVALUATION if is_unused else STEP if has_begun else FIRST
            has_begun |= not is_unused
        found.append(name)
    return found


def _surrounded(
    during: Callable[[], AbstractContextManager[None]], function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with during():
            return function(*args, **kwargs)

    return called


def kind_without_gradients() -> str:
    """Return what a call of a model without gradients is for, by who calls it."""
    frame: Any = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "generate":
            return GENERATION
        frame = frame.f_back
    return EVALUATION
