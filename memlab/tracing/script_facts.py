"""What a person's script did that its blocks do not show, and changes of it that are tried.

What is wrong in a script (`prediction/script_faults.py`) is proven by lifetimes and by these facts:

    noted                                      where
    which blocks an optimizer updates          where it is made, and at each of its updates
    gradients that it then finds               at each update
    a call of a model, and whether it has a    where a module runs that no other has called
    graph
    a backward that retains its graph          where the script asks for it
    a copy as float32 that the script itself   in `float` and `to`, unless autocast makes the same
    asks for
    graphs that are alive after the last       from Python's list of its objects: the operators
    update                                     that they reach

A `Change` alters what one line does while the script is recorded again: its effect is measured
and not estimated.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import sequence_number_of

Line = tuple[str, int]  # file and number
NOWHERE: Line = ("", 0)
AS_FLOAT: Any = (torch.Tensor.float, torch.Tensor.to, torch.Tensor.type)


class Action(StrEnum):
    """What a change does to a line."""

    WITHOUT_GRAPH = "its calls of models run without gradients"
    FROZEN = "the models that it calls are frozen"
    NOT_RETAINED = "its backward passes free their graph"
    NOT_FLOAT = "its tensors are not copied as float32"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of what one line of a script does.

    Attributes:
        action: what is changed.
        line: of the script.
        training: whether it concerns only models in the mode of training, or of evaluation.
    """

    action: Action
    line: Line
    training: bool | None = None


@dataclass(slots=True)
class OptimizerUpdate:
    """One update by an optimizer.

    Attributes:
        optimizer: its number.
        made: the line that made the optimizer.
        line: that asked for the update.
        operator: the last one before it.
        gradients: the block of each that it finds, by the block of its parameter.
        num_idle: its parameters that belong to no model that ran, and have no gradient.
        orphans: blocks of parameters with a gradient, of models that ran, in no optimizer.
    """

    optimizer: int
    made: Line
    line: Line
    operator: int
    gradients: dict[int, int]
    num_idle: int
    orphans: frozenset[int]


@dataclass(slots=True)
class ModelCall:
    """A call of a model by the script, and not by another.

    Attributes:
        line: that calls it.
        first: its first operator.
        end: the operator after its last one.
        has_graph: whether what it returns has one.
        is_training: the mode of the model.
        parameters: blocks.
    """

    line: Line
    first: int
    end: int
    has_graph: bool
    is_training: bool
    parameters: frozenset[int]


@dataclass(slots=True)
class Facts:
    """What a script did.

    Attributes:
        updates: by optimizers, in order.
        updated: blocks of the parameters of all its optimizers.
        calls: of models, in order.
        retained: the lines of backward passes that retain their graph, each with its operator.
        floats: operators that copy a tensor as float32 because a line of the script says so.
        graphs: after the last update that was followed, for each tensor that is alive with a graph
            of its own: its operator, and the operators that its graph reaches.
        is_seen_to_end: whether the script ran on to its end.
    """

    updates: list[OptimizerUpdate] = field(default_factory=list)
    updated: set[int] = field(default_factory=set)
    calls: list[ModelCall] = field(default_factory=list)
    retained: list[tuple[Line, int]] = field(default_factory=list)
    floats: list[int] = field(default_factory=list)
    graphs: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    is_seen_to_end: bool = False


class Watcher:
    """Notes the facts of one run of a script, and applies changes to it.

    Args:
        tracker: of the run.
        line: returns the line of the script that runs now.
        changes: that are tried.
    """

    def __init__(self, tracker: Any, line: Callable[[], Line], changes: Iterable[Change]) -> None:
        self._tracker, self._line = tracker, line
        self._changes = tuple(changes)
        self._optimizers: weakref.WeakKeyDictionary[Any, Line] = weakref.WeakKeyDictionary()
        self._parameters: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.facts = Facts()

    def is_changed(self, action: Action, training: bool | None = None) -> bool:
        """Return whether the line that runs now is changed in this way."""
        if not self._changes:
            return False
        line = self._line()
        return any(
            change.action is action and change.line == line and change.training in (None, training)
            for change in self._changes
        )

    @property
    def has_optimizers(self) -> bool:
        """Whether the script has made an optimizer."""
        return len(self._optimizers) > 0

    def made_optimizer(self, own: Callable[..., None]) -> Callable[..., None]:
        """Return the `__init__` of optimizers, which notes where each was made."""

        @functools.wraps(own)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            self._optimizers.setdefault(optimizer, self._line())

        return init

    def backward(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward that notes whether its graph is retained for no graph of its own."""

        @functools.wraps(own)
        def backward(
            tensors: Any, grad_tensors: Any = None, retain_graph: Any = None,
            create_graph: bool = False, *more: Any, **others: Any,
        ) -> Any:  # fmt: skip
            if retain_graph and not create_graph:
                self.facts.retained.append((self._line(), len(self._tracker.recording.operators)))
                retain_graph = not self.is_changed(Action.NOT_RETAINED)
            return own(tensors, grad_tensors, retain_graph, create_graph, *more, **others)

        return backward

    def update(self, optimizer: Any, models: Iterable[torch.nn.Module]) -> None:
        """Note what an optimizer finds before its update.

        Args:
            optimizer: that updates.
            models: that ran so far.
        """
        of_all = {id(each): each for made in self._optimizers for each in _parameters(made)}
        of_models = {id(each): each for model in models for each in model.parameters()}
        self._optimizers.setdefault(optimizer, NOWHERE)
        given = _parameters(optimizer)
        self.facts.updated |= self._blocks(of_all.values())
        gradients, recording = self._gradients(given), self._tracker.recording
        recording.gradients.update(gradients.values())
        for block in gradients:  # it may be of no module
            recording.parameters.setdefault(block, f"a parameter of {type(optimizer).__name__}")
        self.facts.updates.append(
            OptimizerUpdate(
                optimizer=list(self._optimizers).index(optimizer),
                made=self._optimizers[optimizer],
                line=self._line(),
                operator=len(recording.operators) - 1,
                gradients=gradients,
                num_idle=sum(each.grad is None and id(each) not in of_models for each in given),
                orphans=self._blocks(
                    each
                    for name, each in of_models.items()
                    if each.grad is not None and name not in of_all
                ),
            )
        )

    def _gradients(self, parameters: Iterable[torch.Tensor]) -> dict[int, int]:
        block_of = self._tracker.blocks.block_of
        found = {
            block_of(each): block_of(each.grad) for each in parameters if each.grad is not None
        }
        return {
            block: gradient for block, gradient in found.items() if None not in (block, gradient)
        }

    def _blocks(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        found = map(self._tracker.blocks.block_of, tensors)
        return frozenset(block for block in found if block is not None)

    def enter(self, model: torch.nn.Module) -> None:
        """Note that a model is called."""
        here = len(self._tracker.recording.operators)
        if self.is_changed(Action.FROZEN, model.training):
            model.requires_grad_(False)
        blocks = self._blocks_of(model)
        call = ModelCall(self._line(), here, here, False, model.training, blocks)
        self.facts.calls.append(call)

    def _blocks_of(self, model: torch.nn.Module) -> frozenset[int]:
        """Return the blocks of a model's parameters; found again once the first has moved."""
        first = next(model.parameters(), None)
        where = None if first is None else self._tracker.blocks.block_of(first)
        known, blocks = self._parameters.get(model, (None, frozenset()))
        if known != where:
            blocks = self._blocks(model.parameters())
            self._parameters[model] = where, blocks
        found: frozenset[int] = blocks
        return found

    def leave(self, out: Any) -> None:
        """Note that the model has run, and returned this."""
        call, leaves = self.facts.calls[-1], pytree.tree_leaves(out)
        call.end = len(self._tracker.recording.operators)
        call.has_graph = any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
        )

    def note_float(self) -> None:
        """Note that the last operator copies a tensor as float32 for the script itself."""
        self.facts.floats.append(len(self._tracker.recording.operators) - 1)

    def end_training(self) -> None:
        """Note which graphs are alive after the last update that is followed.

        A tensor that another one reaches, as a loss reaches its activations, reaches nothing by
        itself.
        """
        tensors = [each for each in gc.get_objects() if self._tracker.has_made(each)]
        nodes = {_graph_of(each) for each in tensors} - {None}
        reached: set[Any] = set()
        forward_of = self._tracker.forward_of
        for node in sorted(nodes, key=sequence_number_of, reverse=True):
            below = set() if node in reached else {node, *_below(node)}
            reached |= below
            numbers = {forward_of(each) for each in below} - {-1}
            forward = forward_of(node)
            made_by = max(numbers, default=-1) if forward < 0 else forward
            self.facts.graphs.append((made_by, frozenset(numbers)))


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _graph_of(tensor: torch.Tensor) -> Any:
    """Return the node of a tensor's graph; None also of a view that autograd no longer knows."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # what it is a view of was changed in place
        return None


def _below(node: Any) -> set[Any]:
    """Return the nodes of a graph that lie below one."""
    found: set[Any] = set()
    left = [each for each, _ in node.next_functions]
    while left:
        each = left.pop()
        if each is not None and each not in found:
            found.add(each)
            left += [below for below, _ in each.next_functions]
    return found


class Casts(TorchFunctionMode):
    """Sees where a script itself asks for a copy as float32.

    Args:
        watcher: that is told.
        is_persons: whether a file is one of the script.
    """

    def __init__(self, watcher: Watcher, is_persons: Callable[[str], bool]) -> None:
        super().__init__()
        self._watcher, self._is_persons = watcher, is_persons

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in AS_FLOAT or not _is_narrow(args[0]):
            return func(*args, **kwargs)
        is_direct = self._is_persons(os.path.abspath(sys._getframe(1).f_code.co_filename))
        if not is_direct or torch.is_autocast_enabled(args[0].device.type):
            return func(*args, **kwargs)
        to_float = func is torch.Tensor.float or torch.float32 in (*args, *kwargs.values())
        if to_float and self._watcher.is_changed(Action.NOT_FLOAT):
            return args[0]
        out = func(*args, **kwargs)
        if to_float:
            self._watcher.note_float()
        return out


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)
