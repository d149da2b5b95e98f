"""One checkpointed module: it keeps its inputs and what it is told to, and runs again in backward.

Source: `torch.utils.checkpoint`, non-reentrant, by a wrapped forward: the module's source, paths,
state dict and hooks stay as they are. A recompute begins with the state that the forward began with
and leaves none behind, so running statistics move once and dropout draws the same mask twice. State
is: random numbers of torch, NumPy and `random`; buffers that the forward changes; and the plain
attributes of its modules, lists, dicts and generators among them by value. Not covered: what
objects of other kinds hold, and what lies outside of the module; `memlab.verify` finds both.
"""

import contextlib
import copy
import functools
import inspect
import random
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from memlab.errors import UnsupportedError
from memlab.techniques.keeping import Keep, Key, Reuse
from memlab.techniques.policies import Keeps

OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
BY_VALUE = (list, dict, set, deque, random.Random, np.random.Generator, np.random.RandomState)
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
    region = _Region(path, module, keeps, told)

    @functools.wraps(region.forward)  # libraries ask for the arguments that it takes
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return region.forward(*args, **kwargs)
        call = _Call(region, args, kwargs)
        with set_checkpoint_early_stop(region.stops_early), _left_when_it_raises():
            # all arguments as one, which torch searches for devices with random numbers to keep
            return checkpoint(call.run, (args, kwargs, call.anchor), use_reentrant=False)

    module.forward = forward


@contextlib.contextmanager
def _left_when_it_raises() -> Iterator[None]:
    """Leave torch's contexts if a forward raises: those of torch 2.11 would see all later ones."""
    try:
        yield
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                generator = frame.f_locals.get("gen")
                if inspect.isgenerator(generator):
                    generator.close()
        raise


@contextlib.contextmanager
def of_a_model_off() -> Iterator[list[int]]:
    """Run what a model checkpoints by itself, through torch, without checkpointing.

    Yields:
        A list that grows by one with each call that was run so.
    """
    torch_checkpoint: Any = torch.utils.checkpoint
    calls: list[int] = []

    def plain(*_: Any, **__: Any) -> Iterator[None]:
        calls.append(1)
        yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            calls.append(1)
            return function(*args)

    replaced = {"_checkpoint_without_reentrant_generator": plain, "CheckpointFunction": Plain}
    originals = {name: getattr(torch_checkpoint, name) for name in replaced}
    for name, replacement in replaced.items():
        setattr(torch_checkpoint, name, replacement)
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(torch_checkpoint, name, original)


class _Region:
    """A checkpointed module, and what there is to know of it from one call to the next."""

    def __init__(self, path: str, module: nn.Module, keeps: Keeps | None, told: Told) -> None:
        self.path, self.module, self.keeps, self.told = path, module, keeps, told
        self.forward: Callable[..., Any] = module.forward
        self.changing: list[tuple[nn.Module, str]] | None = None  # buffers; not known yet
        # RReLU saves its noise before its kernel fills it: stopping there would leave it empty
        self.stops_early = not any(isinstance(part, nn.RReLU) for part in module.modules())


class _Call:
    """One call of a region: its arguments, what it began with, and what it keeps."""

    def __init__(self, region: _Region, args: Any, kwargs: Any) -> None:
        self.region, self.kept, self.has_run = region, dict[Key, Any](), False
        self.state = _State(region)
        self.inputs = [(tensor, _version(tensor)) for tensor in _tensors((args, kwargs), region)]
        devices = {tensor.device for tensor, _ in self.inputs}
        own = next((p.device for p in region.module.parameters()), None)
        # a module that is given nothing on its device draws random numbers there all the same
        self.anchor = None if own in devices or own is None else torch.empty(0, device=own)

    def run(self, given: tuple[Any, Any, Any]) -> Any:
        """Run the module's own forward: the first time as such, then as its recompute."""
        args, kwargs, _ = given
        # not by torch's context_fn, which torch 2.11 leaves entered when a forward raises
        context = self._again() if self.has_run else self._first()
        self.has_run = True
        with context:
            return self.region.forward(*args, **kwargs)

    @contextlib.contextmanager
    def _first(self) -> Iterator[None]:
        region = self.region
        keep = Keep(region.keeps, self.kept) if region.keeps else None
        with self.state.noted(), keep or contextlib.nullcontext():
            yield
        self.check_inputs("changes an input of its own in place")
        region.told(region.path, self.kept, keep.counts if keep else ())

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Run a recompute; a graph that is kept may ask for more than one."""
        self.check_inputs("changes an input of it in place, after its forward")
        reuse = Reuse(self.kept) if self.region.keeps else contextlib.nullcontext()
        try:
            with self.state.restored(), reuse:
                yield
        finally:
            self.kept.clear()  # what an early stop left over

    def check_inputs(self, what: str) -> None:
        """Raise UnsupportedError if a tensor that the call was given is not as it was."""
        if any(_version(tensor) != version for tensor, version in self.inputs):
            raise UnsupportedError(
                f"{self.region.path} cannot be recomputed: the model {what}; leave it out by "
                "checkpoint_modules, or make that operator one that is not in place"
            )


class _State:
    """What a module's forward began with beside its inputs: random numbers, buffers, attributes.

    The states of torch's own generators are kept by `torch.utils.checkpoint`.
    """

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.buffers: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self.attributes: dict[nn.Module, dict[str, Any]] = {}
        self.generators: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the state, run the forward, keep what it changed as it was before."""
        region = self.region
        self.generators = random.getstate(), np.random.get_state()
        self.attributes = {part: _by_value(_plain(part)) for part in region.module.modules()}
        every = dict(_buffers(region.module))
        versions = {place: buffer._version for place, buffer in every.items()}
        wanted = every if region.changing is None else region.changing
        self.buffers = {place: every[place].detach().clone() for place in wanted}
        yield
        after = dict(_buffers(region.module))
        changed = [
            place
            for place, buffer in every.items()
            if after.get(place) is not buffer
            or buffer._version != versions[place]
            or _is_running_statistic(*place)  # its kernel changes it and does not say so
        ]
        late = [place for place in changed if place not in self.buffers]
        if late:
            raise UnsupportedError(
                f"{region.path} changes its buffer {late[0][1]!r} in this forward and did not in "
                "its first, so that it cannot be recomputed exactly; leave it out by "
                "checkpoint_modules"
            )
        if region.changing is None:
            region.changing = changed
        self.buffers = {place: self.buffers[place] for place in changed}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run a recompute from the noted state and leave everything as it is now."""
        buffers = {(module, name): module._buffers[name] for module, name in self.buffers}
        attributes = {part: _plain(part) for part in self.attributes}
        generators = random.getstate(), np.random.get_state()
        assert self.generators is not None
        _set_generators(*self.generators)
        for (module, name), before in self.buffers.items():
            module._buffers[name] = before.clone()
        for part, noted in self.attributes.items():
            _set_attributes(part, _by_value(noted))  # a kept graph may need them once more
        try:
            yield
        finally:
            _set_generators(*generators)
            for (module, name), buffer in buffers.items():
                module._buffers[name] = buffer
            for part, now in attributes.items():
                _set_attributes(part, now)


def _tensors(given: Any, region: _Region) -> Iterator[torch.Tensor]:
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
                "once more; build the model with use_cache=False"
            )


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache")


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _buffers(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], torch.Tensor]]:
    """Yield every buffer of a module and its children by where it is."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield (part, name), buffer


def _is_running_statistic(module: nn.Module, name: str) -> bool:
    return isinstance(module, _NormBase) and module.training and name.startswith("running_")


def _is_on_an_accelerator(module: nn.Module) -> bool:
    return any(parameter.device.type != "cpu" for parameter in module.parameters())


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are neither parameters, buffers nor torch's own."""
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH}


def _by_value(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in attributes.items()}


def _value(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) in BY_VALUE:
        deep = type(value).__module__ not in ("builtins", "collections")
        return copy.deepcopy(value) if deep else copy.copy(value)
    return value


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in _plain(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)


def _set_generators(python: Any, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
