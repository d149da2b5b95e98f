"""Run a few updates of a step and record what each of them did, for `verify` to compare.

Everything that is recorded is copied to host memory, in its own format. An update may start from
the weights, buffers and optimizer state that another step had at that point. Without this, two runs
that only round differently would drift apart, because Adam turns the last digit of a gradient near
zero into a full step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memlab._util.torch_private.tensors import named_parts
from memlab.config import StepConfig
from memlab.runtime.measure import MAX_SKIPPED_UPDATES
from memlab.techniques.accumulation import random_modules, sample_mixing_modules
from memlab.techniques.checkpointing.mutable_state import OF_TORCH
from memlab.techniques.optimizers.optimizer_in_backward import InBackward
from memlab.techniques.optimizers.optimizers import state_of
from memlab.techniques.sharding.ranks import divided_like, seed_of, whole
from memlab.techniques.step import Step, build_step, set_seed
from memlab.techniques.technique import Plan
from memlab.trace import Phase
from memlab.workload import Workload

NUM_UPDATES = 3  # a forward may leave something behind that only a later forward reads
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class UpdateStart:
    """The tensors that an update starts from, copied to the CPU.

    Attributes:
        weights: by path, including weights that are not trained.
        buffers: by path.
        states: of the optimizer, by path and name.
    """

    weights: Tensors
    buffers: Tensors
    states: Tensors


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did.

    Attributes:
        loss: weighted over the micro-batches.
        gradients: before the optimizer, divided by the loss scale, by path.
        buffers: after backward, with the parameters that are not trained.
        after: what the next update starts from.
        random_state: of the CPU's generator, after backward.
        hooks: number of hooks in each registry of torch, by path of the module.
        parts: what each of several losses left after its update.
    """

    loss: float
    gradients: Tensors
    buffers: Tensors
    after: UpdateStart
    random_state: torch.Tensor
    hooks: dict[str, int]
    parts: list[UpdateStart] = field(default_factory=list)


@dataclass(slots=True)
class UpdatesRun:
    """The updates of one step.

    Attributes:
        mixing: modules that normalise over the batch.
        random: modules that draw random numbers.
        formats: of the weights and buffers.
        draws: whether the first update drew random numbers of torch on the CPU.
    """

    mixing: list[str]
    random: list[str]
    formats: set[torch.dtype]
    begin: UpdateStart
    draws: bool = False
    updates: list[Update] = field(default_factory=list)


def run_updates(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    seed: int,
    plan: Plan | None = None,
    *,
    like: UpdatesRun | None = None,
    num_updates: int = NUM_UPDATES,
    num_parts: int = 1,
) -> UpdatesRun:
    """Build a step and run it.

    Args:
        workload: what to train.
        config: how to train it.
        device: where to train it.
        seed: of the first update; each later update uses the next number.
        plan: for a memory budget.
        like: a run whose starting values each update takes over.
        num_updates: number of updates.
        num_parts: of one process that stands for so many ranks: the micro-batches of one rank
            after the other, each with the random numbers of its rank. Buffers become what the
            first rank makes of them, as with DistributedDataParallel.
    """
    step = build_step(workload, config, device, plan=plan, seed=seed)
    used = _used_gradients(step) if config.optimizer_in_backward else None
    run = UpdatesRun(
        sample_mixing_modules(step.model),
        random_modules(step.model),
        _formats(step.model),
        start_of(step),
    )

    for index in range(num_updates):
        if like is not None:
            _go_on_from(step, like.begin if index == 0 else like.updates[index - 1].after)
        parts = _LossUpdates(step, like.updates[index].parts if like is not None else [])
        run.updates.append(_update(step, seed + index, used, num_parts, parts))
        # a step draws random numbers if it leaves another state than a fresh seed does
        if index == 0:
            set_seed(seed)
            run.draws = not torch.equal(torch.get_rng_state(), run.updates[0].random_state)

    return run


def _formats(model: nn.Module) -> set[torch.dtype]:
    """Return the formats of weights and buffers, and those in which quantized weights multiply."""
    found = {tensor.dtype for tensor in [*model.parameters(), *model.buffers()]}
    for weight in model.parameters():  # of bitsandbytes, in 4 and in 8 bits
        packed = getattr(weight, "quant_state", None)
        if packed is not None:
            found.add(packed.dtype)
        if hasattr(weight, "CB"):
            found.add(torch.float16)
    return found


def start_of(step: Step) -> UpdateStart:
    """Return copies of what the next update starts from."""
    states = dict(_states(step, dict(step.with_loss.named_parameters())))
    weights = {name: step.value_of(p) for name, p in step.with_loss.named_parameters()}
    buffers = dict(step.with_loss.named_buffers())
    return UpdateStart(*(_on_the_host(tensors) for tensors in (weights, buffers, states)))


class _LossUpdates:
    """The updates of one step by several losses; each goes on from those of another step.

    Attributes:
        gradients: of each loss, by path; by its number too if an earlier one has that path.
        ended: what each update left.
    """

    def __init__(self, step: Step, like: list[UpdateStart]) -> None:
        self.gradients: Tensors = {}
        self.ended: list[UpdateStart] = []
        self._step, self._like = step, like
        self._trained: list[set[str]] = []
        step.on_part = self._on_part

    def _on_part(self, place: int, is_over: bool) -> None:
        named = self._step.with_loss.named_parameters()
        if is_over:
            self.ended.append(start_of(self._step))
            if place < len(self._like) - 1:  # in the graphs of later losses others must not change
                _go_on_from(self._step, _of_paths(self._like[place], self._trained[place]))
            return
        found = {name: p.grad.to_dense() for name, p in named if p.grad is not None}
        self._trained.append(set(found))
        for name, gradient in _on_the_host(found).items():
            is_new = name not in self.gradients
            self.gradients[name if is_new else f"{name} of loss {place + 1}"] = gradient

    def after(self, end: UpdateStart) -> UpdateStart:
        """Return the end of the step, with what each loss has trained as its update left it."""
        for ended, trained in zip(self.ended, self._trained, strict=True):
            own = _of_paths(ended, trained)
            end.weights.update(own.weights)
            end.states.update(own.states)
        return end


def _of_paths(start: UpdateStart, paths: set[str]) -> UpdateStart:
    """Return the weights and optimizer states of some parameters."""
    return UpdateStart(
        weights={path: t for path, t in start.weights.items() if path in paths},
        buffers={},
        states={key: t for key, t in start.states.items() if key.partition(": ")[0] in paths},
    )


def _update(
    step: Step, seed: int, used: Tensors | None, num_parts: int, parts: _LossUpdates
) -> Update:
    """Run one update. After an fp16 overflow it runs again with a smaller loss scale."""
    before = _on_the_host(dict(step.with_loss.named_buffers()))
    loss = 0.0
    for _ in range(MAX_SKIPPED_UPDATES):
        loss = _accumulate(step, seed, num_parts)
        if step.scaler is None:
            break

        step.unscale()
        if all(p.grad.isfinite().all() for p in step.with_loss.parameters() if p.grad is not None):
            break

        step.skip_update()  # as training does after an overflow
        _copy_into(dict(step.with_loss.named_buffers()), before)

    gradients = _gradients(step) | _on_the_host(used or {}) | parts.gradients
    buffers = _buffers(step)
    random_state = torch.get_rng_state()
    step.update()
    if used is not None:
        used.clear()

    after = parts.after(start_of(step))
    return Update(loss, gradients, buffers, after, random_state, _hooks(step.model), parts.ended)


def _accumulate(step: Step, seed: int, num_parts: int) -> float:
    """Run forward and backward of all micro-batches and return the loss, of all ranks together."""
    if step.sharded is not None:
        step.set_seed(seed)
        mean = torch.tensor(float(step.accumulate()), dtype=torch.float64)
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    size = len(step.micro_batches) // num_parts
    of_first: list[Tensors] = []

    def mark(phase: Phase, micro_batch: int) -> None:
        if phase is Phase.FORWARD and micro_batch % size == 0:
            set_seed(seed_of(seed, micro_batch // size))
            if micro_batch == size:
                of_first.append(_on_the_host(dict(step.with_loss.named_buffers())))

    loss = float(step.accumulate(mark))
    if of_first:
        _copy_into(dict(step.with_loss.named_buffers()), of_first[0])
    return loss


def _used_gradients(step: Step) -> Tensors:
    """Return a dict that backward fills with each gradient, before an update frees it.

    A weight that is updated too early shows in the gradients that are computed after it.
    """
    used: Tensors = {}
    names: dict[Any, str] = {
        parameter: name for name, parameter in step.with_loss.named_parameters()
    }

    def keep(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        used[names[parameter]] = parameter.grad.detach().to_dense().to("cpu", copy=True)

    assert isinstance(step.optimizer, InBackward)
    step.optimizer.on_gradient = keep
    return used


def _gradients(step: Step) -> Tensors:
    return _on_the_host(
        {
            name: _gradient_of(step, p)
            for name, p in step.with_loss.named_parameters()
            if p.requires_grad
        }
    )


def _gradient_of(step: Step, parameter: torch.Tensor) -> torch.Tensor:
    if step.engine is not None:
        return step.engine.gradient_of(parameter)
    found = parameter.grad
    return torch.zeros_like(parameter) if found is None else found.to_dense()


def _buffers(step: Step) -> Tensors:
    """Return copies of the buffers, and of frozen parameters, which a forward may change too."""
    parameters = step.with_loss.named_parameters()
    frozen = {name: step.value_of(p) for name, p in parameters if not p.requires_grad}
    return _on_the_host(dict(step.with_loss.named_buffers()) | frozen)


def _hooks(model: nn.Module) -> dict[str, int]:
    return {
        f"{path}: {name}": len(held)
        for path, module in model.named_modules()
        for name, held in vars(module).items()
        if name in OF_TORCH and "hook" in name and isinstance(held, dict) and held
    }


def _on_the_host(tensors: Tensors) -> Tensors:
    return {
        name: part.detach().to("cpu", copy=True)
        for path, tensor in tensors.items()
        for name, part in named_parts(path, whole(tensor))
    }


def _go_on_from(step: Step, other: UpdateStart) -> None:
    """Give a step the weights, buffers and optimizer state of another."""
    paths = dict(step.with_loss.named_parameters())
    if step.engine is not None:
        _copy_into(dict(step.with_loss.named_buffers()), other.buffers)
        for name, parameter in paths.items():
            step.engine.put(parameter, other.weights[name], _states_of_one(other.states, name))
        return
    _copy_into({name: step.value_of(p) for name, p in paths.items()}, other.weights)
    _copy_into(dict(step.with_loss.named_buffers()), other.buffers)
    states = dict(_states(step, paths))
    _copy_into(states, other.states)
    # fp32 master weights are state here, but the other step holds them as weights
    masters = {name: states[key] for name in paths if (key := f"{name}: master") in states}
    _copy_into(masters, other.weights)


def _states(step: Step, paths: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in paths.items():
        if step.engine is not None:
            held = step.engine.states_of(parameter)
        else:
            held = state_of(step.optimizer).get(parameter, {})
        for key, value in held.items():
            if isinstance(value, torch.Tensor):
                yield f"{name}: {key}", value


def _states_of_one(states: Tensors, name: str) -> Tensors:
    """Return the states of one parameter by their own names."""
    begin = f"{name}: "
    return {key.removeprefix(begin): t for key, t in states.items() if key.startswith(begin)}


def _copy_into(targets: Tensors, sources: Tensors) -> None:
    """Copy the values of tensors with the same name; of those of a quantized weight, each part."""
    with torch.no_grad():
        for path, target in targets.items():
            parts = [(path, target)] if path in sources else named_parts(path, target)
            for name, part in parts:
                source = sources.get(name)
                if source is not None and source.shape == part.shape:
                    part.copy_(divided_like(source, part))
