"""Checkpoint one module: it keeps its inputs and chosen outputs, and runs again in backward.

The module's forward is wrapped; its source, paths, state dict and hooks stay as they are.

- In forward, hooks of autograd (`saved_tensors_hooks`) drop every tensor that it saves for
  backward.
- When backward asks for the first of these tensors, the module runs again and fills them all in.
  This recompute stops after the last tensor that is needed, if that has its values then
  (`memlab.techniques.checkpointing.recompute`).
- Its inputs are saved by autograd, so a checkpointed module around it drops them in turn.

`memlab.techniques.checkpointing.changes` records everything that a recompute must start from.

The method is that of the non-reentrant `torch.utils.checkpoint`. memlab has its own implementation,
because PyTorch's takes half a millisecond more Python time per call (`host` of
benchmarks/recompute_checks.py), keeps 5 kB of random number state even if nothing draws, and holds
all inputs of a module by reference.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import (
    OpOverload,
    TorchDispatchMode,
    checkpointed_by,
    innermost_transform,
    version_of,
    with_versions_counted,
)
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing.blocks import OFF
from memlab.techniques.checkpointing.changes import Changes, State
from memlab.techniques.checkpointing.policies import KeepRule, can_be_kept, values_of

# A forward whose recompute must not end before its last operator has filled what it saved.
#
# A recompute ends as soon as the last tensor that backward needs is saved. Nearly every
# operator saves a tensor whose values are complete. A few save memory first and fill it
# afterwards: the noise of `rrelu` (https://github.com/pytorch/pytorch/issues/193671). The
# schema of such an operator says that it writes to this argument, and its node in the graph
# says that it saved it. A forward that ran one saves another, empty tensor at its very end,
# so that its recompute runs as far as that.
#
# An `autograd.Function` needs nothing: what it saves is taken when its forward has returned.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def with_its_end(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a forward returns; if it fills a tensor after saving it, save one more."""
    first = torch._C._autograd._get_sequence_nr()
    out = forward(*args, **kwargs)
    if torch.is_grad_enabled() and any(map(_fills_late, _nodes_of(out, first))):
        save_one_more()
    return out


def save_one_more() -> None:
    """Make autograd save an empty tensor; what runs again until all are saved runs until here."""
    torch.empty(0, requires_grad=True).exp()


def _nodes_of(out: Any, first: int) -> Iterator[Any]:
    """Yield the nodes that lead to these outputs and were made from a number on."""
    todo: list[Any] = [tensor.grad_fn for tensor in _tensors_in(out)]
    seen = {None}
    while todo:
        node = todo.pop()
        if node not in seen and node._sequence_nr() >= first:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def _tensors_in(out: Any) -> Iterator[torch.Tensor]:
    for leaf in _pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = dataclasses.fields(leaf)
            yield from _tensors_in([getattr(leaf, field.name) for field in fields])


def _fills_late(node: Any) -> bool:
    """Return whether the operator of a node has saved an argument and then written to it."""
    kind = type(node)
    return any(hasattr(kind, f"_raw_saved_{name}") for name in _written_by(kind.__name__))


@functools.cache
def _written_by(node: str) -> frozenset[str]:
    """Return the arguments that an operator writes to, given the name of its node."""
    name = re.fullmatch(r"(\w+)Backward\d+", node)
    words = re.findall("[A-Z][a-z0-9]*", name[1]) if name else []
    operator = getattr(torch.ops.aten, "_".join(words).lower(), None) if words else None
    return frozenset(
        argument.name
        for overload in (operator.overloads() if operator else ())
        for argument in getattr(operator, overload)._schema.arguments
        if argument.is_write and not argument.kwarg_only
    )


# Dispatch modes that keep outputs of a forward, and return them in its recompute.
#
# An output is identified by its operator and a number: the third `aten.mm` of a call, for
# instance. So a forward and its recompute must run the same operators. To check this,
# memlab compares how many operators ran before each kept one. Three kinds are not counted,
# because their number may differ: casts, which autocast caches from one module to the next;
# views, which hooks make of a recompute's inputs; and copies, which bring offloaded weights
# to the device.
#
# Left out: the choice of what to keep, which `policies.py` makes.

NO_OPERATORS = ("prim", "profiler")  # namespaces of attribute reads and of annotations
CAST = torch.ops.aten._to_copy.default
MOVES = frozenset((torch.ops.aten.copy_.default, torch.ops.aten.empty_like.default))
"""Operators that bring an offloaded weight to the device."""

Key = tuple[OpOverload, int]


class Keep(TorchDispatchMode):
    """Keeps outputs of a forward, each with the number of operators that ran before it."""

    def __init__(self, keeps: KeepRule, kept: dict[Key, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeps, self.kept, self.position = keeps, kept, 0
        self.counts: dict[OpOverload, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; keep its output if the policy says so and it can be kept."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in NO_OPERATORS or func in MOVES:
            return out

        number = self.counts[func]
        self.counts[func] += 1
        self.position += is_counted(func)

        if self.keeps(func, number, args, kwargs, out) and can_be_kept(
            func, values_of(func, args, kwargs)
        ):
            self.kept[func, number] = (
                self.position,
                pytree.tree_map_only(torch.Tensor, _kept, out),
            )

        return out


class Reuse(TorchDispatchMode):
    """Returns kept outputs in a recompute. An output that was changed in place is recomputed.

    Args:
        kept: the outputs that `Keep` kept.
        refuse: raises an error when the recompute differs from the forward.
    """

    def __init__(self, kept: dict[Key, Any], refuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.refuse, self.position = kept, refuse, 0
        self.counts: dict[OpOverload, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the kept output if there is one; otherwise run the operator."""
        if func.namespace not in NO_OPERATORS and func not in MOVES:
            number = self.counts[func]
            self.counts[func] += 1
            self.position += is_counted(func)
            position, found = self.kept.pop((func, number), (self.position, None))
            if position != self.position:
                self.refuse(f"runs other operators before {func} than the first time")
            if found is not None and all(kept.is_unchanged for kept in _kept_in(found)):
                return pytree.tree_map_only(_KeptOutputs, lambda kept: kept.tensor, found)

        return func(*args, **(kwargs or {}))


def is_counted(func: OpOverload) -> bool:
    """Return whether a recompute must run this operator exactly as often as its forward."""
    return func is not CAST and func not in MOVES and not func.is_view


class _KeptOutputs:
    """A kept tensor, detached from its graph, and the version of its contents."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, version_of(tensor)

    @property
    def is_unchanged(self) -> bool:
        return version_of(self.tensor) == self.version


def _kept(tensor: torch.Tensor) -> _KeptOutputs:
    # below autograd a detached tensor gets a version counter of its own unless this key is enabled
    with with_versions_counted():
        return _KeptOutputs(tensor.detach())


def _kept_in(found: Any) -> list[_KeptOutputs]:
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, _KeptOutputs)]


REFUSED_HOOKS = "don't yet support saved tensor hooks"  # torch/_functorch/vmap.py
AfterForward = Callable[[str, Iterable[Key], Iterable[OpOverload]], None]
"""Called with the module's path, the keys of kept outputs and the operators that ran."""


def wrap(path: str, module: nn.Module, keeps: KeepRule | None, after_forward: AfterForward) -> None:
    """Checkpoint one module, in place.

    Args:
        path: of the module in its model, for messages.
        module: its forward is replaced on the instance.
        keeps: decides which outputs to keep besides the inputs; None keeps none.
        after_forward: called after each forward that ran under autograd.

    Raises:
        UnsupportedError: a recompute cannot draw the random numbers of its forward, or not run its
            operators.
    """
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{path} cannot be recomputed: {type(part).__name__} of TorchScript runs other "
                "operators the second time than the first; build the model without torch.jit, or "
                "leave the module out by checkpoint_modules"
            )
        if isinstance(part, nn.RNNBase) and part.dropout > 0 and _is_on_an_accelerator(part):
            raise UnsupportedError(
                f"{path} cannot be recomputed: cuDNN draws the dropout={part.dropout:g} between "
                f"the layers of its {type(part).__name__} from a random state of its own, which "
                "cannot be restored; set that dropout to 0, or leave the module out by "
                "checkpoint_modules"
            )

    region = _RecomputedRegion(path, module, keeps, after_forward)
    method: Any = getattr(region.forward, "__func__", None)

    @functools.wraps(method or region.forward)  # libraries inspect its signature
    def forward(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if own is not module:  # a copy of the module, which copied this method: no recompute
            return method(own, *args, **kwargs)
        if not torch.is_grad_enabled():
            return region.forward(*args, **kwargs)
        if innermost_transform() is not None:
            region.refuse_transform("is called inside a transform of torch.func (vmap, grad, ...)")
        return _ForwardCall(region, args, kwargs).run(args, kwargs)

    made: Any = MethodType(forward, module) if method else functools.partial(forward, module)
    known: Any = forward if method else made
    known.keeps = keeps is not None
    module.forward = made


def recomputed(model: nn.Module) -> dict[str, bool]:
    """Return the checkpointed modules by path, and whether each keeps outputs of operators."""
    own = ((path, getattr(part.forward, "keeps", None)) for path, part in model.named_modules())
    return {path: keeps for path, keeps in own if keeps is not None}


@contextlib.contextmanager
def of_a_model_off() -> Iterator[list[int]]:
    """Switch torch's own checkpointing off, for models that checkpoint themselves.

    Yields:
        A list that grows by one with each call that ran without checkpointing.
    """
    calls: list[int] = []

    def plain(*_: Any, **__: Any) -> Iterator[None]:
        calls.append(1)
        yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            calls.append(1)
            return function(*args)

    with checkpointed_by(plain, Plain):
        yield calls


class _RecomputedRegion:
    """A checkpointed module, and what is remembered from one call to the next."""

    def __init__(
        self, path: str, module: nn.Module, keeps: KeepRule | None, after_forward: AfterForward
    ) -> None:
        self.path, self.keeps, self.after_forward = path, keeps, after_forward
        self.forward: Callable[..., Any] = module.forward
        self.changes = Changes(path, module)

    def refuse(self, what: str) -> None:
        """Raise UnsupportedError because a recompute did something else than its forward."""
        raise UnsupportedError(
            f"{self.path} cannot be recomputed: running again, it {what}, so it depends on "
            "something outside of the module; leave it out by checkpoint_modules"
        )

    def refuse_transform(self, why: str) -> None:
        """Raise UnsupportedError for a transform of torch.func, which allows no autograd hooks."""
        raise UnsupportedError(
            f"{self.path} cannot be recomputed: it {why}; leave it out by checkpoint_modules"
        )


class _Dropped:
    """What autograd saves instead of a tensor. The recompute fills in the tensor until its use."""

    __slots__ = ("__weakref__", "call", "kind", "tensor", "version")

    def __init__(self, call: "_ForwardCall", tensor: torch.Tensor) -> None:
        self.call, self.kind = call, _kind(tensor)
        self.tensor: torch.Tensor | None = None
        self.version = 0


class _ForwardCall:
    """One call of a region: its arguments, the state that it started from, and what it keeps."""

    def __init__(self, region: _RecomputedRegion, args: Any, kwargs: Any) -> None:
        self.region, self.kept = region, dict[Key, Any]()
        self.dropped: list[weakref.ref[_Dropped]] = []  # in the order in which they were saved
        leaves, self.structure = pytree.tree_flatten((args, kwargs))
        tensors = list(_tensors(leaves, region))
        self.versions = [(weakref.ref(tensor), _version(tensor)) for tensor in tensors]
        self.state = State(region.changes, tensors, (args, kwargs))
        is_saved = [isinstance(leaf, torch.Tensor) and not leaf.is_inference() for leaf in leaves]
        self.others = [
            None if saved else leaf for leaf, saved in zip(leaves, is_saved, strict=True)
        ]
        # save each tensor once: a module may ask whether its query is its key, as will a recompute
        distinct = {id(leaf): leaf for leaf, saved in zip(leaves, is_saved, strict=True) if saved}
        number = {key: at for at, key in enumerate(distinct)}
        self.saved_at = [(at, number[id(leaves[at])]) for at, saved in enumerate(is_saved) if saved]
        anchor = torch.empty(0, requires_grad=True)  # without it autograd would save nothing
        save: Any = _Save.apply
        self.inputs: Any = save(anchor, *distinct.values())  # its node holds the saved inputs

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the module's own forward."""
        region = self.region
        keep = Keep(region.keeps, self.kept) if region.keeps else None
        with (
            saved_tensors_hooks(self._drop, self._fetch),
            self.state.noted(),
            keep or contextlib.nullcontext(),
        ):
            try:
                out = with_its_end(region.forward, *args, **kwargs)
                if region.changes.seen.writes_unseen:  # perhaps to what was saved
                    save_one_more()
            except RuntimeError as error:
                if REFUSED_HOOKS in str(error):
                    region.refuse_transform(
                        "calls grad, vjp, jacrev or hessian of torch.func, inside of which "
                        "PyTorch cannot drop saved tensors"
                    )
                raise

        if inspect.isgenerator(out):
            raise UnsupportedError(
                f"{region.path} cannot be recomputed: its forward is a generator, whose operators "
                "run after it has returned; leave it out by checkpoint_modules"
            )

        self._check_inputs("changes an input of this module in place")
        region.after_forward(region.path, self.kept, keep.counts if keep else ())
        return out

    def _drop(self, tensor: torch.Tensor) -> _Dropped:
        dropped = _Dropped(self, tensor)
        self.dropped.append(weakref.ref(dropped))
        return dropped

    @staticmethod
    def _fetch(dropped: _Dropped) -> torch.Tensor:
        if dropped.tensor is None:
            dropped.call._run_again()
        tensor, dropped.tensor = dropped.tensor, None
        if tensor is None or _version(tensor) != dropped.version:
            raise UnsupportedError(
                f"{dropped.call.region.path} cannot be recomputed: running again, it "
                f"{'saves fewer tensors' if tensor is None else 'changes a tensor that it saved'} "
                "for backward; leave it out by checkpoint_modules"
            )

        return tensor

    def _run_again(self) -> None:
        """Run a recompute. A graph that is retained may need more than one."""
        self._check_inputs("changes an input of this module in place after its forward")
        region, leaves = self.region, list(self.others)
        given = self.inputs.grad_fn.saved_tensors
        # detached, or a hook that the module sets on an input would change the gradient twice
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in given]
        for at, number in self.saved_at:
            leaves[at] = inputs[number]

        del inputs, given
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        del leaves
        reuse = Reuse(self.kept, region.refuse) if region.keeps else contextlib.nullcontext()

        try:
            with (
                contextlib.suppress(_HasAll),
                saved_tensors_hooks(_Filling(self).fill, _as_it_is),
                torch.enable_grad(),
                self.state.restored() as run,
                reuse,
            ):
                run(with_its_end, region.forward, *args, **kwargs)
        finally:
            self.kept.clear()  # an early stop may leave some outputs unused

    def _check_inputs(self, what: str) -> None:
        """Raise UnsupportedError if an input of the call has been changed."""
        for reference, version in self.versions:
            tensor = reference()
            if tensor is not None and _version(tensor) != version:
                raise UnsupportedError(
                    f"{self.region.path} cannot be recomputed: the model {what}; leave it out by "
                    "checkpoint_modules, or use an operator that is not in place"
                )


class _Save(torch.autograd.Function):
    """Saves tensors and does nothing else."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _HasAll(BaseException):
    """Ends a recompute. It is a BaseException, so that models do not catch it by accident."""


class _Filling:
    """Fills the tensors that a recompute saves into the `_Dropped` of its forward, in order."""

    def __init__(self, call: _ForwardCall) -> None:
        self.call, self.count = call, 0

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill in the next tensor."""
        every = self.call.dropped
        if self.count == len(every):
            self.call.region.refuse("saves more tensors for backward than the first time")

        # detached, or a saved tensor would hold the graph of the recompute that holds it
        tensor = tensor.detach() if tensor.requires_grad else tensor
        dropped = every[self.count]()
        self.count += 1

        if dropped is not None:
            if dropped.kind != _kind(tensor):
                self.call.region.refuse(
                    "saves tensors of another shape or format than the first time"
                )
            dropped.tensor, dropped.version = tensor, _version(tensor)

        if self.count == len(every):
            raise _HasAll

        return tensor


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _tensors(given: Any, region: _RecomputedRegion) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments of any structure.

    Raises:
        UnsupportedError: an argument is a cache, which forward and recompute would both extend.
    """
    for leaf in pytree.tree_leaves(given, is_leaf=_is_cache):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)], region)
        elif _is_cache(leaf):
            raise UnsupportedError(
                f"an argument of {region.path} is a {type(leaf).__name__}, which a recompute would "
                f"change a second time; use {OFF}, which sets use_cache=False in the model's config"
            )


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache")


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _is_on_an_accelerator(module: nn.Module) -> bool:
    return any(parameter.device.type != "cpu" for parameter in module.parameters())
