"""Activations in place: which modules may write over their input, found by trying.

A module may if nothing reads its input after it, in forward or in backward. That is seen in one
forward and backward of the model over two samples, in which every operator tells what it reads;
then the modules are switched, and a second run must give the same loss and the same gradients.
Autograd by itself notices only tensors that it has saved: of `y = relu(x); return x + y` in place
it says nothing, and the result is wrong. So what was found on two samples holds only for forwards
of the same operators, and another one is refused as it happens.

What it saves is one activation for the moment in which input and output are both held, no more: it
lowers a peak that lies in a forward, and none that lies in a backward. Left out: functions
(`torch.relu`), which are not switched but written; SiLU, GELU, Mish and ELU, whose backward reads
their input, so that autograd keeps a copy, or sums in another order; inputs that are views, whose
gradient autograd would copy; and dropout on accelerators, where in place is another kernel, with a
larger mask. Buffers are put back after each run, attributes that a forward changes are not.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.compiling.compilation import asked_by, is_compiled, without
from memlab.techniques.same_operators import OperatorWatch
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Keeps, Refusal, Setup, Technique, switch
from memlab.torch_private import pytree
from memlab.torch_private.autograd import current_node, sequence_number_of
from memlab.torch_private.dispatch import TorchDispatchMode
from memlab.torch_private.tensors import is_view, storage_key

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
Loss = Callable[[Any], torch.Tensor]
ROUNDING = 1e-2  # of all gradients together, where kernels add in any order


def refusals(asked: Setup) -> Iterator[Refusal]:
    """Yield what refuses it: a compiled step."""
    config = asked.config
    if config.inplace and is_compiled(config):
        yield Refusal(
            why=f"inplace=True with {asked_by(config)} does nothing: a compiled graph reuses "
            "memory by itself",
            remedies=({"inplace": False}, without(config)),
        )


def apply(model: nn.Module, batch: Any, loss_of: Loss) -> None:
    """Switch the modules of a model that may write over their input, in place.

    Args:
        model: with all that recomputes it; its gradients must be None.
        batch: a few samples, on the device of the model.
        loss_of: seeds, runs the forward over the batch and returns its loss.

    Raises:
        UnsupportedError: there is no such module, or a run with them gives something else. Raised
            in a later forward too, if that runs other operators.
    """
    found, why_not = find(model, batch, loss_of)
    if not found:
        raise UnsupportedError(
            f"inplace=True finds no module of {type(model).__name__} that may write over its "
            f"input: {why_not}; use inplace=False"
        )
    expected = _tried(model, batch, loss_of)
    for module in found.values():
        module.inplace = True
    watch = OperatorWatch(model, _refuse)
    try:
        with watch.learning():
            _compare(_tried(model, batch, loss_of), expected)
    except RuntimeError as error:  # autograd's own
        raise UnsupportedError(
            f"inplace=True: {error} (in place are {', '.join(found)}); use inplace=False"
        ) from error


def _refuse(operator: str) -> None:
    raise UnsupportedError(
        "inplace=True is decided on two samples, and on this batch the model runs other operators "
        f"({operator} comes first), which may read what was written over; use inplace=False"
    )


def find(model: nn.Module, batch: Any, loss_of: Loss) -> tuple[dict[str, Any], str]:
    """Return the modules that may write over their input, by path, and why others may not."""
    kinds: tuple[type[nn.Module], ...] = ACTIVATIONS
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        kinds += DROPOUTS
    candidates = {
        module: path
        for path, module in model.named_modules()
        if type(module) in kinds and not module.inplace and getattr(module, "p", 1.0) > 0.0
    }
    if not candidates:
        names = ", ".join(kind.__name__ for kind in kinds)
        return {}, f"it has no active module that is one of {names} and not in place already"
    reads = _InputReads({*model.parameters(), *model.buffers()})
    hooks = [module.register_forward_hook(reads.note_call) for module in candidates]
    try:
        _tried(model, batch, loss_of, reads)
    finally:
        for hook in hooks:
            hook.remove()
    reasons = {module: reads.why_not(module) for module in candidates}
    found = {path: module for module, path in candidates.items() if reasons[module] is None}
    path, reason = next(((p, reasons[m]) for m, p in candidates.items() if reasons[m]), ("", ""))
    return found, f"{path} may not, since {reason}"


def source(asked: Setup) -> ScriptLines:
    """Return nothing to add.

    Raises:
        UnsupportedError: modules are asked for, which depend on a model that no script knows.
    """
    if asked.config.inplace:
        raise UnsupportedError(
            "inplace=True has no lines of its own in a script: which modules may write over their "
            "input depends on the model; give them inplace=True where you build it, and use "
            "inplace=False here"
        )
    return ScriptLines()


@dataclass(slots=True)
class _Called:
    """One call of a candidate: its input, the operators before its end, its node of autograd."""

    module: nn.Module
    given: torch.Tensor
    end: int
    node: int


class _InputReads(TorchDispatchMode):
    """Sees which storages each operator reads."""

    def __init__(self, known: set[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {storage_key(tensor.untyped_storage()) for tensor in known}
        self.operators: list[tuple[str, set[int], int]] = []
        self.made: set[int] = set()
        self.calls: list[_Called] = []

    def note_call(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note a call of a candidate, which ends now."""
        node = getattr(output, "grad_fn", None)
        number = -1 if node is None else sequence_number_of(node)
        # its input is held until the end, or its memory would be another's
        self.calls.append(_Called(module, args[0], len(self.operators), number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an operator reads and run it."""
        node = current_node()
        number = -1 if node is None else sequence_number_of(node)
        out = func(*args, **(kwargs or {}))
        read = _storages((args, kwargs))
        self.operators.append((func.__name__, read, number))
        self.made |= _storages(out) - read
        return out

    def why_not(self, module: nn.Module) -> str | None:
        """Return why a module may not write over its input, None if it may."""
        calls = [call for call in self.calls if call.module is module]
        if not calls:
            return "it was not called"
        return next((reason for call in calls if (reason := self._why_not(call))), None)

    def _why_not(self, call: _Called) -> str | None:
        given = call.given
        storage = storage_key(given.untyped_storage())
        if given.is_leaf and given.requires_grad:
            return "its input is a leaf that needs a gradient"
        if storage in self.known or storage not in self.made:
            return "its input is no tensor that the model has computed"
        if is_view(given):
            return "its input is a view of another tensor"
        for name, read, node in self.operators[call.end :]:
            if storage in read and (node < 0 or node != call.node):
                return f"{name} reads its input again"
        return None


def _storages(value: Any) -> set[int]:
    leaves = pytree.tree_leaves(value)
    return {storage_key(t.untyped_storage()) for t in leaves if isinstance(t, torch.Tensor)}


def _tried(
    model: nn.Module, batch: Any, loss_of: Loss, reads: _InputReads | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run forward and backward, leave the model as it was, return the loss and the gradients."""
    with _unchanged(model), reads or contextlib.nullcontext():
        loss = loss_of(batch)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return loss.detach(), gradients


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _compare(
    found: tuple[torch.Tensor, list[torch.Tensor]],
    expected: tuple[torch.Tensor, list[torch.Tensor]],
) -> None:
    """Raise UnsupportedError unless losses and gradients are the same."""
    tensors = [found[0], *found[1]], [expected[0], *expected[1]]
    if all(torch.equal(ours, theirs) for ours, theirs in zip(*tensors, strict=True)):
        return
    norm = torch.stack([g.double().norm() for g in tensors[1]]).norm()
    pairs = zip(*tensors, strict=True)
    error = torch.stack([(a.double() - b.double()).norm() for a, b in pairs]).norm() / norm
    if found[0].device.type == "cpu" or not error <= ROUNDING:
        raise UnsupportedError(
            f"inplace=True changes the gradients, by {float(error):.1e}: the model reads a tensor "
            "in a way that memlab does not see; use inplace=False"
        )


def says(asked: Setup) -> str:
    """Return what it does now."""
    if not asked.config.inplace:
        return ""
    return "activations write over their input where nothing else reads it"


IN_PLACE = Technique(
    fields=("inplace",),
    keeps=Keeps.BITS,
    does="writing in place",
    examples={"in place": {"inplace": True}},
    refusals=refusals,
    source=source,
    controls=(switch("inplace", "in place", "in place", "not in place"),),
    says=says,
)
