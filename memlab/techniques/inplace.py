"""Activation functions in place: find the modules that may write over their input, and do so.

A module may write over its input if nothing reads that input afterwards, in forward or backward.
memlab finds out by trying: it runs forward and backward on two samples and records which tensors
every operator reads. Then it sets `inplace=True` on the modules that qualify, and a second run must
give the same loss and the same gradients.

Autograd alone would not be enough. It notices only changes of tensors that it has saved, so
`y = relu(x); return x + y` with an in-place relu gives a wrong result without an error. For the
same reason the finding holds only for forwards that run the same operators as those two samples;
a forward that runs other operators is refused when it happens.

The technique saves one activation, at the moment when input and output would both be held. It
lowers a peak in a forward, and no peak in a backward.

Left out: functions (`torch.relu`), which have no switch; SiLU, GELU, Mish and ELU, whose backward
reads their input, so that autograd keeps a copy or sums in another order; inputs that are views,
whose gradient autograd would copy; and dropout on accelerators, whose in-place kernel has a larger
mask. Buffers are restored after each trial run; attributes that a forward changes are not.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import (
    TorchDispatchMode,
    current_node,
    is_view,
    sequence_number_of,
    storage_key,
)
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing.recompute import NO_OPERATORS, is_counted
from memlab.techniques.compilation import asked_by, is_compiled, without
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Equivalence, Refusal, Setup, Technique, switch

# Check that a model still runs the operators that it ran on the samples of a trial.
#
# A technique that tries something on a few samples (`inplace`) may rely on the result only
# while the model runs the same operators. The names of the operators of each forward are
# compared, without views and casts. A forward whose input shapes have been checked before
# is not watched again.
#
# Left out: what runs outside of the model's forward, such as the loss; the backward, which
# follows the forward; and a forward that runs the same operators on other tensors.

END, REFUSED = "the end", "in-place operation"
# copies depend on strides, which a batch of one sample may lack, and offloading adds some
COPIES = ("clone", "copy_", "empty_like")
Shapes = tuple[tuple[int, ...], ...]


class OperatorWatch:
    """Learns which operators a model runs, and then reports a forward that runs other ones.

    Args:
        model: its forward is replaced on the instance.
        report: called with the first operator that differs; it should raise an error.
    """

    def __init__(self, model: nn.Module, report: Callable[[str], None]) -> None:
        self.report = report
        self.is_learning = False
        self.learned: set[tuple[str, ...]] = set()  # one for each forward of a step
        self.checked: set[Shapes] = set()
        forward: Callable[..., Any] = model.forward

        @functools.wraps(forward)  # libraries inspect its signature
        def watched(*args: Any, **kwargs: Any) -> Any:
            shapes = _shapes((args, kwargs))
            if shapes in self.checked and not self.is_learning:
                return forward(*args, **kwargs)

            with _OperatorNames() as names:
                try:
                    out = forward(*args, **kwargs)
                except RuntimeError as error:  # autograd refuses some operators before they run
                    refused = (REFUSED,) if REFUSED in str(error) else ()
                    self._compare((*names.ran, *refused))
                    raise

            if self.is_learning:
                self.learned.add((*names.ran, END))

            self._compare((*names.ran, END))
            self.checked.add(shapes)
            return out

        model.forward = watched

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Learn the operators that the model runs inside this context."""
        self.is_learning = True
        try:
            yield
        finally:
            self.is_learning = False

    def _compare(self, ran: tuple[str, ...]) -> None:
        """Report the first operator that differs, unless a learned forward begins like this one."""
        same = [_num_same(ran, known) for known in self.learned]
        if same and max(same) < len(ran):
            self.report(ran[max(same)])


class _OperatorNames(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator and run it."""
        is_copy = func.overloadpacket.__name__ in COPIES
        if is_counted(func) and not is_copy and func.namespace not in NO_OPERATORS:
            self.ran.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _num_same(ran: tuple[str, ...], known: tuple[str, ...]) -> int:
    pairs = zip(ran, known, strict=False)
    return next((at for at, (now, then) in enumerate(pairs) if now != then), len(ran))


def _shapes(values: Any) -> Shapes:
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return tuple(tuple(tensor.shape) for tensor in tensors)


ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
Loss = Callable[[Any], torch.Tensor]
ROUNDING = 1e-2  # allowed error of all gradients together, where kernels sum in any order


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse a compiled step, for which it would do nothing."""
    config = setup.config
    if config.inplace and is_compiled(config):
        yield Refusal(
            why=f"inplace=True with {asked_by(config)} does nothing: a compiled graph reuses "
            "memory by itself",
            remedies=({"inplace": False}, without(config)),
        )


def apply(model: nn.Module, batch: Any, loss_of: Loss) -> None:
    """Set `inplace=True` on the modules of a model that may write over their input.

    Args:
        model: with recompute already applied; its gradients must be None.
        batch: a few samples, on the device of the model.
        loss_of: sets the seed, runs the forward on the batch and returns the loss.

    Raises:
        UnsupportedError: no module can run in place, or the second run gives another result. A
            later forward that runs other operators raises it too.
    """
    found, why_not = find(model, batch, loss_of)
    if not found:
        raise UnsupportedError(
            f"inplace=True: no module of {type(model).__name__} may write over its input, "
            f"because {why_not}; use inplace=False"
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
            f"inplace=True: {error} (in place: {', '.join(found)}); use inplace=False"
        ) from error


def _refuse(operator: str) -> None:
    raise UnsupportedError(
        "inplace=True was tried on two samples, and on this batch the model runs other operators "
        f"(the first is {operator}), which may read what was written over; use inplace=False"
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
        names = " or ".join(kind.__name__ for kind in kinds)
        return {}, f"it has no active {names} that is not in place already"

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
    return found, f"for {path}, {reason}"


def source(setup: Setup) -> ScriptLines:
    """Return no lines: a script cannot do this.

    Raises:
        UnsupportedError: inplace is on. Which modules qualify depends on the model.
    """
    if setup.config.inplace:
        raise UnsupportedError(
            "inplace=True cannot be exported: which modules may write over their input depends on "
            "the model; pass inplace=True to those modules in your own code, and use inplace=False "
            "here"
        )
    return ScriptLines()


@dataclass(slots=True)
class _Called:
    """One call of a candidate: its input, the operators run by its end, its autograd node."""

    module: nn.Module
    given: torch.Tensor
    end: int
    node: int


class _InputReads(TorchDispatchMode):
    """Records which storages each operator reads."""

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
        # the input is held, so that no other tensor is given its memory meanwhile
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
            return "its input is not a tensor that the model has computed"
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
    """Run forward and backward, restore the model, and return the loss and the gradients."""
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
            f"inplace=True changes the gradients by {float(error):.1e}, because the model reads a "
            "tensor in a way that memlab cannot see; use inplace=False"
        )


def says(setup: Setup) -> str:
    """Return what it does now."""
    if not setup.config.inplace:
        return ""
    return "activation functions write over their input if nothing else reads it"


IN_PLACE = Technique(
    fields=("inplace",),
    equivalence=Equivalence.BITWISE,
    does="writing in place",
    examples={"in place": {"inplace": True}},
    refusals=refusals,
    source=source,
    controls=(switch("inplace", "activations in place", "in place", "not in place"),),
    says=says,
)
