"""Activation checkpointing: a module keeps its inputs, and what a policy says, and is run again.

Source: `torch.utils.checkpoint`, non-reentrant, by a wrapped forward: the model's source, paths,
state dict and hooks stay as they are. A recompute begins with the state that the forward began with
(random numbers of torch, NumPy and `random`; buffers that the forward changes) and leaves none
behind, so running statistics move once and dropout draws the same mask twice. Not covered: state
that a module keeps in Python attributes, which `memlab.verify` finds.
"""

import contextlib
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from memlab.config import Policy, StepConfig
from memlab.errors import UnsupportedError
from memlab.plan import Instance, Plan, Region
from memlab.techniques import blocks, policies
from memlab.techniques.policies import Keeps

NO_OPERATORS = ("prim", "profiler")  # questions about a tensor, annotations
Key = tuple[OpOverload, int]
Check = Callable[[str, Iterable[Key], Iterable[OpOverload]], None]
"""Told of a forward: the module's path, what was kept, which operators ran."""


def check(config: StepConfig, plan: Plan | None) -> None:
    """Raise UnsupportedError for a budget of the eager engine without a plan."""
    if config.is_planned and plan is None:
        raise UnsupportedError(
            f"memory_budget={config.memory_budget:g} with budget_engine='eager' needs a plan, "
            "which memlab.measure, predict and verify make and build_step does not; for a step of "
            "your own use checkpointing='blocks', or budget_engine='compile'"
        )


def apply(model: nn.Module, config: StepConfig, *, compiled: bool) -> None:
    """Checkpoint the modules of a model that the config names, in place.

    Args:
        model: as built; none of them may be checkpointed already.
        config: says which modules and what they keep.
        compiled: whether `torch.compile` will trace the model. Its graph updates running statistics
            once by itself, and it does not trace a context function.

    Raises:
        UnsupportedError: no module is meant, or one checkpoints itself.
        ConfigError: the policy names what does not exist.
    """
    modules = blocks.select(model, config.checkpoint_modules)
    keeps = policies.keeps(config.checkpoint_policy)
    if compiled and keeps is not None:
        raise UnsupportedError(
            f"checkpoint_policy={config.checkpoint_policy!r} with torch.compile is not built; use "
            "compile=False, or memory_budget with budget_engine='compile'"
        )
    tally = _Tally(config.checkpoint_policy, set(modules))
    for path, module in modules.items():
        _check(path, module)
        if compiled:
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        else:
            _Region(path, module, keeps, tally.add).wrap()


def apply_plan(model: nn.Module, plan: Plan) -> None:
    """Checkpoint the regions of a plan, in place.

    Raises:
        UnsupportedError: a region checkpoints itself already.
    """
    for region in plan.regions:
        module = model.get_submodule(region.path)
        _check(region.path, module)
        keeps = functools.partial(_by_instance, region.keep) if region.keep else None
        _Region(region.path, module, keeps, functools.partial(_as_planned, region)).wrap()


def notes(config: StepConfig, plan: Plan | None) -> list[str]:
    """Return what a plan does, and whether it is within its budget."""
    if plan is None:
        return []
    said = (
        f"{len(plan.regions)} modules are recomputed; {plan.share:.0%} of the plain step's "
        "activations are held, as predicted."
    )
    if plan.share <= config.memory_budget:
        return [said]
    return [
        f"{said} That is the least this model can hold: memory_budget={config.memory_budget:g} is "
        "below it."
    ]


def _by_instance(instances: frozenset[Instance], func: OpOverload, number: int, *_: Any) -> bool:
    return (str(func), number) in instances


def _as_planned(region: Region, _: str, kept: Iterable[Key], __: Iterable[OpOverload]) -> None:
    """Raise UnsupportedError unless a forward has kept what its plan says."""
    missing = region.keep - {(str(func), number) for func, number in kept}
    if missing:
        name, number = min(missing)
        raise UnsupportedError(
            f"{region.path} was planned to keep the output of {name} (number {number}) and does "
            "not run it: its operators differ from call to call; use checkpointing='blocks'"
        )


class _Tally:
    """What the modules of a model have kept together in their first forwards."""

    def __init__(self, policy: Policy, paths: set[str]) -> None:
        self.policy, self.paths = policy, paths
        self.seen: set[OpOverload] = set()
        self.keeps_something = False

    def add(self, path: str, kept: Iterable[Key], seen: Iterable[OpOverload]) -> None:
        """Note one module's forward.

        Raises:
            UnsupportedError: nothing was kept after all of them.
        """
        self.keeps_something |= bool(list(kept))
        self.paths.discard(path)
        self.seen.update(seen)
        if not self.keeps_something and not self.paths:
            raise UnsupportedError(policies.nothing_kept(self.policy, self.seen))


def _check(path: str, module: nn.Module) -> None:
    if getattr(module, "gradient_checkpointing", False):
        raise UnsupportedError(
            f"{path} checkpoints itself already (gradient_checkpointing=True); build the model "
            "without it, or use checkpointing='none' and memory_budget=1.0"
        )


class _Region:
    """One checkpointed module: its forward, and what there is to know from one call to the next."""

    def __init__(self, path: str, module: nn.Module, keeps: Keeps | None, check: Check) -> None:
        self.path, self.module, self.keeps, self.check = path, module, keeps, check
        self.forward: Callable[..., Any] = module.forward
        self.changing: list[tuple[nn.Module, str]] | None = None  # buffers; not known yet
        # RReLU saves its noise before its kernel fills it: stopping there would leave it empty
        self.stops_early = not any(isinstance(part, nn.RReLU) for part in module.modules())

    def wrap(self) -> None:
        """Put the checkpoint on the instance."""

        @functools.wraps(self.forward)  # libraries ask for the arguments that it takes
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return self.forward(*args, **kwargs)
            function = functools.partial(self.forward, **kwargs)
            with set_checkpoint_early_stop(self.stops_early):
                return checkpoint(function, *args, use_reentrant=False, context_fn=self._contexts)

        self.module.forward = forward

    def _contexts(self) -> tuple[Any, Any]:
        state, kept = _State(self), dict[Key, Any]()
        return self._forward(state, kept), _Recompute(state, kept if self.keeps else None)

    @contextlib.contextmanager
    def _forward(self, state: "_State", kept: dict[Key, Any]) -> Iterator[None]:
        if self.keeps is None:
            with state.noted():
                yield
            return
        keep = _Keep(self.keeps, kept)
        with state.noted(), keep:
            yield
        self.check(self.path, kept, keep.counts)


class _State:
    """What a module's forward began with beside its inputs: random numbers and buffers.

    The states of torch's own generators are kept by `torch.utils.checkpoint`.
    """

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.buffers: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self.generators: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the state, run the forward, keep what it changed as it was before."""
        region = self.region
        self.generators = random.getstate(), np.random.get_state()
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
        now = {(module, name): module._buffers[name] for module, name in self.buffers}
        generators = random.getstate(), np.random.get_state()
        assert self.generators is not None
        _set_generators(*self.generators)
        for (module, name), before in self.buffers.items():
            module._buffers[name] = before.clone()
        try:
            yield
        finally:
            _set_generators(*generators)
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer


class _Recompute:
    """The context of a recompute; a graph that is kept may enter it more than once."""

    def __init__(self, state: _State, kept: dict[Key, Any] | None) -> None:
        self.state, self.kept, self.stack = state, kept, contextlib.ExitStack()

    def __enter__(self) -> None:
        self.stack.enter_context(self.state.restored())
        if self.kept is not None:
            self.stack.enter_context(_Reuse(self.kept))

    def __exit__(self, *raised: Any) -> None:
        self.stack.__exit__(*raised)
        if self.kept is not None:
            self.kept.clear()  # what an early stop left over


class _Keep(TorchDispatchMode):
    """Keeps outputs of a forward."""

    def __init__(self, keeps: Keeps, kept: dict[Key, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeps, self.kept = keeps, kept
        self.counts: dict[OpOverload, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; keep its output if that is asked for and possible."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in NO_OPERATORS:
            return out
        number = self.counts[func]
        self.counts[func] += 1
        if self.keeps(func, number, args, kwargs, out) and policies.can_be_kept(
            func, policies.values_of(func, args, kwargs)
        ):
            self.kept[func, number] = pytree.tree_map_only(torch.Tensor, _kept, out)
        return out


class _Reuse(TorchDispatchMode):
    """Gives kept outputs back in a recompute; what was changed in place since then runs again."""

    def __init__(self, kept: dict[Key, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.counts: dict[OpOverload, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what was kept, else run the operator."""
        if func.namespace not in NO_OPERATORS:
            number = self.counts[func]
            self.counts[func] += 1
            found = self.kept.pop((func, number), None)
            if found is not None and all(kept.is_unchanged for kept in _kept_in(found)):
                return pytree.tree_map_only(_Kept, lambda kept: kept.tensor, found)
        return func(*args, **(kwargs or {}))


class _Kept:
    """A kept tensor, outside of any graph, and the version of its contents."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version


def _kept(tensor: torch.Tensor) -> _Kept:
    return _Kept(tensor.detach())


def _kept_in(found: Any) -> list[_Kept]:
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, _Kept)]


def _buffers(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], torch.Tensor]]:
    """Yield every buffer of a module and its children by where it is."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield (part, name), buffer


def _is_running_statistic(module: nn.Module, name: str) -> bool:
    return isinstance(module, _NormBase) and module.training and name.startswith("running_")


def _set_generators(python: Any, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
