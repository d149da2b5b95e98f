"""One checkpointed module: it keeps its inputs and what it is told to, and runs again in backward.

By a wrapped forward: the module's source, paths, state dict and hooks stay as they are. What its
forward saves for backward is dropped by hooks of autograd (`saved_tensors_hooks`), and filled in by
a recompute when backward first asks for it; that ends with the last tensor that is needed. Its
inputs are saved by autograd, so that a module around it, checkpointed too, drops them in turn.
`memlab.techniques.recompute.state` notes all that a recompute must begin with.

The method is that of `torch.utils.checkpoint`, non-reentrant; memlab has its own since a call of
that costs half a millisecond of Python more (`host` of benchmarks/recompute_checks.py), keeps 5 kB
of random numbers that nobody drew, and holds all the inputs of a module by reference.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memlab.errors import UnsupportedError
from memlab.techniques.recompute.keeping import Keep, Key, Reuse
from memlab.techniques.recompute.model_cache import OFF
from memlab.techniques.recompute.policies import Keeps
from memlab.techniques.recompute.state import Changes, State
from memlab.torch_private import pytree
from memlab.torch_private.autograd import checkpointed_by, innermost_transform
from memlab.torch_private.operators import OpOverload
from memlab.torch_private.tensors import version_of

REFUSED_HOOKS = "don't yet support saved tensor hooks"  # torch/_functorch/vmap.py
Told = Callable[[str, Iterable[Key], Iterable[OpOverload]], None]
"""Told of a forward: the module's path, what was kept, which operators ran."""


def wrap(path: str, module: nn.Module, keeps: Keeps | None, told: Told) -> None:
    """Checkpoint one module, in place.

    Args:
        path: of the module in its model, for messages.
        module: its forward is replaced on the instance.
        keeps: what to keep beside the inputs; None is nothing.
        told: called after each forward that ran under autograd.

    Raises:
        UnsupportedError: a recompute cannot draw the random numbers of its forward.
    """
    for part in module.modules():
        if isinstance(part, nn.RNNBase) and part.dropout > 0 and _is_on_an_accelerator(part):
            raise UnsupportedError(
                f"{path} cannot be recomputed: cuDNN draws the dropout={part.dropout:g} between "
                f"the layers of its {type(part).__name__} from a state of its own, which nothing "
                "rewinds; set that dropout to 0, or leave the module out by checkpoint_modules"
            )
    region = _RecomputedRegion(path, module, keeps, told)
    method: Any = getattr(region.forward, "__func__", None)

    @functools.wraps(method or region.forward)  # libraries ask for the arguments that it takes
    def forward(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if own is not module:  # a copy, with which a method goes: it keeps all it saves
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
    """Return for the path of each checkpointed module whether it keeps outputs of operators."""
    own = ((path, getattr(part.forward, "keeps", None)) for path, part in model.named_modules())
    return {path: keeps for path, keeps in own if keeps is not None}


@contextlib.contextmanager
def of_a_model_off() -> Iterator[list[int]]:
    """Run what a model checkpoints by itself, through torch, without checkpointing.

    Yields:
        A list that grows by one with each call that was run so.
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
    """A checkpointed module, and what there is to know of it from one call to the next."""

    def __init__(self, path: str, module: nn.Module, keeps: Keeps | None, told: Told) -> None:
        self.path, self.keeps, self.told = path, keeps, told
        self.forward: Callable[..., Any] = module.forward
        self.changes = Changes(path, module)
        # RReLU saves its noise before its kernel fills it: stopping there would leave it empty
        self.stops_early = not any(isinstance(part, nn.RReLU) for part in module.modules())

    def refuse(self, what: str) -> None:
        """Raise UnsupportedError for what a recompute does otherwise than its forward."""
        raise UnsupportedError(
            f"{self.path} cannot be recomputed: running again, it {what}; what it does "
            "depends on something that is not part of it: leave it out by checkpoint_modules"
        )

    def refuse_transform(self, why: str) -> None:
        """Raise UnsupportedError for a transform of torch.func, where autograd takes no hooks."""
        raise UnsupportedError(
            f"{self.path} cannot be recomputed: it {why}; leave it out by checkpoint_modules"
        )


class _Dropped:
    """What autograd holds in place of a tensor; the tensor is here from recompute to its use."""

    __slots__ = ("__weakref__", "call", "kind", "tensor", "version")

    def __init__(self, call: "_ForwardCall", tensor: torch.Tensor) -> None:
        self.call, self.kind = call, _kind(tensor)
        self.tensor: torch.Tensor | None = None
        self.version = 0


class _ForwardCall:
    """One call of a region: its arguments, what it began with, and what it keeps."""

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
        # each once: a module may ask whether its query is its key, and the recompute asks again
        distinct = {id(leaf): leaf for leaf, saved in zip(leaves, is_saved, strict=True) if saved}
        number = {key: at for at, key in enumerate(distinct)}
        self.saved_at = [(at, number[id(leaves[at])]) for at, saved in enumerate(is_saved) if saved]
        anchor = torch.empty(0, requires_grad=True)  # or autograd would save nothing
        save: Any = _Save.apply
        self.inputs: Any = save(anchor, *distinct.values())  # whose node lives as long as it does

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
                out = region.forward(*args, **kwargs)
            except RuntimeError as error:
                if REFUSED_HOOKS in str(error):
                    region.refuse_transform(
                        "calls grad, vjp, jacrev or hessian of torch.func, inside of which PyTorch "
                        "lets no tensors be dropped"
                    )
                raise
        if inspect.isgenerator(out):
            raise UnsupportedError(
                f"{region.path} cannot be recomputed: its forward is a generator, whose operators "
                "run after it has returned; leave it out by checkpoint_modules"
            )
        self._check_inputs("changes an input of its own in place")
        region.told(region.path, self.kept, keep.counts if keep else ())
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
                f"{'saves less for backward' if tensor is None else 'changes what it has saved'} "
                "than before; leave it out by checkpoint_modules"
            )
        return tensor

    def _run_again(self) -> None:
        """Run a recompute; a graph that is kept may ask for more than one."""
        self._check_inputs("changes an input of it in place, after its forward")
        region, leaves = self.region, list(self.others)
        given = self.inputs.grad_fn.saved_tensors
        # a hook that the module sets on an input would else act on the gradient once more
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
                run(region.forward, *args, **kwargs)
        finally:
            self.kept.clear()  # what an early stop left over

    def _check_inputs(self, what: str) -> None:
        """Raise UnsupportedError if a tensor that the call was given is not as it was."""
        for reference, version in self.versions:
            tensor = reference()
            if tensor is not None and _version(tensor) != version:
                raise UnsupportedError(
                    f"{self.region.path} cannot be recomputed: the model {what}; leave it out by "
                    "checkpoint_modules, or make that operator one that is not in place"
                )


class _Save(torch.autograd.Function):
    """Saves tensors and does nothing else."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _HasAll(BaseException):
    """Ends a recompute; no model that catches exceptions is to catch it."""


class _Filling:
    """Gives the tensors that a recompute saves to those who hold their place."""

    def __init__(self, call: _ForwardCall) -> None:
        self.call, self.count = call, 0

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the next tensor."""
        every = self.call.dropped
        if self.count == len(every):
            self.call.region.refuse("saves more for backward than before")
        # outside of the recompute's graph, which a tensor that it saves would else hold for ever
        tensor = tensor.detach() if tensor.requires_grad else tensor
        dropped = every[self.count]()
        self.count += 1
        if dropped is not None:
            if dropped.kind != _kind(tensor):
                self.call.region.refuse("saves tensors of another shape or format than before")
            dropped.tensor, dropped.version = tensor, _version(tensor)
        if self.call.region.stops_early and self.count == len(every):
            raise _HasAll
        return tensor


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _tensors(given: Any, region: _RecomputedRegion) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments of any structure.

    Raises:
        UnsupportedError: one is a cache, which the forward and its recompute would both extend.
    """
    for leaf in pytree.tree_leaves(given, is_leaf=_is_cache):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)], region)
        elif _is_cache(leaf):
            raise UnsupportedError(
                f"{region.path} is given a {type(leaf).__name__}, which a recompute would change "
                f"once more; use {OFF}, which sets use_cache=False in the model's config"
            )


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache")


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _is_on_an_accelerator(module: nn.Module) -> bool:
    return any(parameter.device.type != "cpu" for parameter in module.parameters())
