"""`build_step`: the one way to build a training step. All other code only chooses how to run it.

The function reads from top to bottom as the list of techniques, in the order in which they must be
applied. It does not plan, measure or time anything.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from memlab._util.checks import checked
from memlab._util.torch_private.tensors import are_tensors_fake, whole_of
from memlab.config import StepConfig
from memlab.devices import cards
from memlab.devices.generators import set_seed as set_seed
from memlab.devices.here import as_device
from memlab.techniques import (
    accumulation,
    clipping,
    compilation,
    expandable_segments,
    inplace,
    layout,
    meta_init,
    precision,
    registry,
)
from memlab.techniques.attention import apply as apply_attention
from memlab.techniques.batches import map_tensors, moved
from memlab.techniques.checkpointing import blocks, checkpointing
from memlab.techniques.loss import chunked_loss, fused_loss
from memlab.techniques.loss.logits import ChunkedHead
from memlab.techniques.loss.loss_tensors import LossTensors, WithLoss
from memlab.techniques.loss.several_losses import afterwards, several_losses, trained_by
from memlab.techniques.offload import offload
from memlab.techniques.offload.offloading import Offloader
from memlab.techniques.optimizers import optimizers
from memlab.techniques.optimizers.optimizer_in_backward import InBackward
from memlab.techniques.optimizers.own import Several
from memlab.techniques.sharding import sharding
from memlab.techniques.sharding.deepspeed_engine import Engine
from memlab.techniques.sharding.ranks import Sharded, own_weights, part_sizes
from memlab.techniques.technique import Plan, Setup
from memlab.techniques.trials import Trial, check_loss, check_model
from memlab.trace import Mark, Phase, ignore
from memlab.workload import Workload


@dataclass(slots=True, eq=False)
class Step:
    """A training step that is ready to run. Each call is one optimizer update.

    Attributes:
        model: the model as built, on the device, in the format of its weights.
        run_model: what runs: the compiled model, or `model` itself.
        run_in: returns the context in which the step runs.
        loss: computes the loss, with copies of the tensors that it brings along.
        optimizer: of the trainable parameters of the model, and of the loss if it `trains`.
        micro_batches: on a CPU views of the whole batch. For a card they stay on the CPU until
            their turn comes.
        loss_weights: the weight of each micro-batch; they sum to 1.
        parameter_formats: the number formats of the trained parameters, by torch's names,
            ordered by bytes.
        head: what computes the loss without all logits, None if it is computed as built.
        sharded: how this rank takes part in a step of several ranks; None if there are none.
        notes: what a reader of this step's numbers must know about how it was built.
        is_unscaled: whether the gradients of this update have been divided by the loss scale.
        is_updated: whether the losses of this update, which were several, have updated already.
        on_part: called around the update by each of several losses, with its place among them and
            whether it is over.
    """

    workload: Workload
    config: StepConfig
    device: torch.device
    model: torch.nn.Module
    run_model: torch.nn.Module
    run_in: Callable[[], contextlib.AbstractContextManager[None]]
    loss: LossTensors
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    offloader: Offloader | None
    micro_batches: list[Any]
    loss_weights: list[float]
    parameter_formats: tuple[str, ...] = ()
    sharded: Sharded | None = None
    head: ChunkedHead | None = None
    notes: tuple[str, ...] = ()
    is_unscaled: bool = False
    is_updated: bool = False
    on_part: Callable[[int, bool], None] = lambda place, is_over: None

    @property
    def loss_scale(self) -> float:
        """The factor on the loss. It is lowered when the scaler skips an update."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    @property
    def with_loss(self) -> WithLoss:
        """The parameters and buffers of the model and of the loss."""
        return WithLoss(self.model, self.loss)

    @property
    def host_memory(self) -> offload.HostMemory:
        """The most that offloading held in host memory since the last new batch."""
        if self.engine is not None and self.device.type != "cpu":
            return offload.HostMemory(self.engine.host_bytes(), None)
        return offload.host_memory(self.config, self.model, self.optimizer, self.offloader)

    @property
    def engine(self) -> Engine | None:
        """What computes gradients and updates, if it is DeepSpeed."""
        return None if self.sharded is None else self.sharded.engine

    def set_seed(self, seed: int) -> None:
        """Set the seed of a step: ranks that compute other samples draw other numbers."""
        set_seed(seed if self.sharded is None else self.sharded.seed_of(seed))

    def value_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the values of a parameter, which may be in host memory or in other ranks."""
        if self.engine is not None:
            return self.engine.value_of(parameter)
        weights = None if self.offloader is None else self.offloader.weights
        return parameter if weights is None else weights.value_of(parameter)

    def __call__(self, mark: Mark = ignore) -> float:
        """Run one optimizer update and return its loss, weighted over the micro-batches.

        With several ranks the loss is that of this rank's part of the batch.
        """
        loss = self.accumulate(mark)
        if not self.is_updated:
            mark(Phase.OPTIMIZER, len(self.micro_batches) - 1)
        self.update()
        return float(loss)

    def take_batch(self, config: StepConfig, *, seed: int = 0, mark: Mark = ignore) -> None:
        """Continue with a new batch. `config` may differ from the step's in the batch size only."""
        self.micro_batches, self.loss_weights, _ = _make_batch(
            self.workload, config, self.device, seed, self.sharded, mark
        )
        self.config = config
        if self.offloader is not None:
            self.offloader.peak_host_bytes = 0
            self.offloader.most_of_size.clear()

    def use(self, batch: Any, sizes: Sequence[int]) -> list[float]:
        """Continue with a batch of a person's own, in micro-batches of these sizes.

        Returns the weights of their losses, which sum to 1; ranks may have to scale them.
        """
        self.micro_batches = _divided(self.workload, batch, sizes, self.config, self.device)
        self.loss_weights = accumulation.weights(self.workload, self.micro_batches, sizes)
        return self.loss_weights

    def accumulate(self, mark: Mark = ignore) -> float | torch.Tensor:
        """Run forward and backward of every micro-batch and return the loss; gradients remain."""
        total: float | torch.Tensor = 0.0
        if isinstance(self.optimizer, InBackward):
            self.optimizer.on_phase = lambda phase: mark(phase, 0)
        with self.run_in(), self.loss, precision.matrix_products(self.config.precision):
            for index, weight in enumerate(self.loss_weights):
                if weight > 0.0:  # a micro-batch without loss terms has no mean to add
                    total = total + weight * self._micro_step(index, weight, mark)

        chunked_loss.check_used(self.model, self.head)
        self.loss.check_trained()
        return total

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, unless that has been done in this update."""
        if self.scaler is not None and not self.is_unscaled:
            self.scaler.unscale_(self.optimizer)
            self.is_unscaled = True

    def skip_update(self) -> None:
        """Free the gradients without using them; after an overflow this lowers the loss scale."""
        if self.scaler is not None:
            self.scaler.update()
        self.is_unscaled = False
        self.optimizer.zero_grad(set_to_none=True)

    def update(self) -> None:
        """Apply the gradients and free them; of several losses each has done so."""
        if not self.is_updated:
            self._apply(self.optimizer)
            if self.scaler is not None:
                self.scaler.update()
        self.is_unscaled = self.is_updated = False
        if self.scheduler is not None:
            self.scheduler.step()

        self.optimizer.zero_grad(set_to_none=True)

    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        if self.config.max_grad_norm is not None and self.engine is None:
            self.unscale()
            clipping.apply(optimizer, self.config.max_grad_norm)

        if self.engine is not None:
            self.engine.update()  # it clips, too
        elif self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def _micro_step(self, index: int, weight: float, mark: Mark) -> float | torch.Tensor:
        batch = self.micro_batches[index]
        if self.device.type != "cpu":
            mark(Phase.DATA, index)
            batch = moved(batch, self.device)

        with self._in_micro_batch(index):
            mark(Phase.FORWARD, index)
            offloaded = self.offloader or contextlib.nullcontext()
            with precision.autocast(self.config, self.device), offloaded:
                loss = self.workload.compute_loss(self.run_model, batch)

            if not isinstance(loss, torch.Tensor):
                several = several_losses(loss, self.config, self.loss.parameters)
                del loss
                return self._one_after_another(several, mark)

            check_loss(loss)
            # on an accelerator .item() would wait for all queued kernels
            value = loss.item() if self.device.type == "cpu" else loss.detach()
            mark(Phase.BACKWARD, index)
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            weighted = loss if weight == 1.0 else loss * weight
            with self.offloader.in_backward() if self.offloader else contextlib.nullcontext():
                if self.engine is None:
                    weighted.backward()
                else:
                    self.engine.backward(weighted, is_last=index == len(self.micro_batches) - 1)

        return value

    def _one_after_another(self, losses: list[tuple[str, Any]], mark: Mark) -> float | torch.Tensor:
        """Run backward and update of each of several losses in turn; return their sum."""
        total: float | torch.Tensor = 0.0
        names = [name for name, _ in losses]
        for place, name in enumerate(names):
            _, loss = losses.pop(0)
            with afterwards(names, place):
                if callable(loss):
                    mark(Phase.FORWARD, 0)
                    offloaded = self.offloader or contextlib.nullcontext()
                    with precision.autocast(self.config, self.device), offloaded:
                        loss = loss()
                check_loss(loss)
                value = loss.item() if self.device.type == "cpu" else loss.detach()
                total = total + value
                optimizer, trained = self._of_loss(name)
                mark(Phase.BACKWARD, 0)
                with self.offloader.in_backward() if self.offloader else contextlib.nullcontext():
                    loss.backward(inputs=trained)
            del loss

            self.on_part(place, False)
            mark(Phase.OPTIMIZER, 0)
            self._apply(optimizer)
            optimizer.zero_grad(set_to_none=True)
            self.on_part(place, True)

        self.is_updated = True
        return total

    def _of_loss(self, name: str) -> tuple[torch.optim.Optimizer, list[torch.Tensor] | None]:
        """Return what updates by a loss, and the parameters that get its gradient; None for all."""
        if not name:  # one of a sequence
            return self.optimizer, None
        each = self.optimizer.of_each if isinstance(self.optimizer, Several) else {}
        if name in each:
            groups = each[name].param_groups
            return each[name], [p for g in groups for p in g["params"] if p.requires_grad]
        return self.optimizer, trained_by(name, self.model, list(each))

    def _in_micro_batch(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the ranks average gradients after a micro-batch, or not."""
        if self.sharded is None:
            return contextlib.nullcontext()
        is_last = index == len(self.micro_batches) - 1
        return self.sharded.in_micro_batch(is_last or self.config.sync_each_micro_batch)


@checked()
def build_step(
    workload: Workload,
    config: StepConfig,
    device: torch.device | str,
    *,
    plan: Plan | None = None,
    seed: int = 0,
    mark: Mark = ignore,
) -> Step:
    """Return the step that trains `workload` as `config` says.

    Args:
        workload: model, batch and loss.
        config: how to train.
        device: where to train.
        plan: what to recompute, for a memory budget below 1 with the eager engine.
        seed: set before the model and again before the batch; set it before each step with
            `set_seed`, so that every repeat draws the same numbers.
        mark: called when the build begins and when the batch is made.

    Raises:
        UnsupportedError: this device, this torch or memlab cannot do what the config asks for.
        WorkloadError: the workload breaks its contract.
        MemlabError: an argument has the wrong type or value; the message names it.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.ones(4, 64), torch.ones(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> step = build_step(workload, StepConfig(batch_size=4, optimizer="sgd"), "cpu")
    >>> first, second = step(), step()  # each call is one update, and returns its loss
    >>> second < first
    True
    """
    device = as_device(device)
    has_card = device.type == "cuda" and torch.cuda.is_available()
    card = cards.of_device(device) if has_card else None
    registry.check(config, device, card, workload)
    checkpointing.check_plan(config, plan)

    expandable_segments.apply(config, device)

    # the model, in the format and on the device of its weights
    mark(Phase.BUILD, 0)
    set_seed(seed)
    # offloaded weights are created in host memory
    on_host = config.offload_parameters and not config.is_deepspeed
    where = torch.device("cpu") if on_host else device
    built = meta_init.built(workload.build_model, where, config)
    model = built.model
    check_model(model)
    if not config.model_cache:
        blocks.switch_caches_off(model)
    attention_notes = apply_attention(model, config.attention)

    cast_notes = precision.cast_model(model, config.precision)
    formats = precision.number_formats(model)
    if config.channels_last:
        layout.apply(model)

    by_shards = config.offloads_shards
    weights = offload.apply(model, config, device) if on_host and not by_shards else None
    # `fully_shard` takes what it offloads to the device block by block, which fake tensors cannot
    if built.unfilled is None and (not by_shards or are_tensors_fake()):
        model.to(device)
    if config.precision is config.precision.FP8_MIXED:
        precision.multiply_in_fp8(model)

    model.train()

    loss = LossTensors(workload.compute_loss, model, device)
    workload = dataclasses.replace(workload, compute_loss=loss)
    trial = Trial(
        workload=workload,
        model=model,
        config=config,
        device=device,
        set_seed=partial(set_seed, seed),
    )
    divided = sharding.divide(model, config, device, trial.loss_of_few)

    # what changes how its forward runs
    head = chunked_loss.apply(model, config.loss_chunks) if config.loss_chunks > 1 else None
    head = head or fused_loss.apply(model, config.loss_kernel)
    if config.checkpointing is not config.checkpointing.NONE:
        checkpointing.apply(model, config, compiled=compilation.is_compiled(config))
    if plan is not None:
        checkpointing.apply_plan(model, plan)
    if config.inplace:
        # the step's own offloader would move tensors, and hide which operator reads them
        around = Offloader(model, 0.0, weights) if weights else None
        inplace.apply(model, trial.batch(), partial(trial.loss, around=around))

    sharded = sharding.apply(model, config, device, divided)
    built.fill(device, where)
    group = None if sharded is None else sharded.group
    make_optimizer = workload.make_optimizer
    loss.trains = sharded is None and make_optimizer is None
    trained = WithLoss(model, loss) if loss.trains else model
    optimizer, scheduler = optimizers.make(trained, config, weights, group, make_optimizer)
    if config.is_deepspeed:
        sharded = sharding.with_engine(model, optimizer, config, device)
    run_model: torch.nn.Module = model if sharded is None else sharded.run_model
    run_in: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    if compilation.is_compiled(config):
        run_model, run_in = compilation.apply(run_model, workload, config, device)

    micro_batches, loss_weights, batch_notes = _make_batch(
        workload, config, device, seed, sharded, mark
    )
    return Step(
        workload=workload,
        config=config,
        device=device,
        model=model,
        run_model=run_model,
        run_in=run_in,
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=precision.make_scaler(config.precision, device),
        offloader=offload.make_offloader(model, config, weights),
        micro_batches=micro_batches,
        loss_weights=loss_weights,
        parameter_formats=formats,
        sharded=sharded,
        head=head,
        notes=(
            *attention_notes,
            *cast_notes,
            *batch_notes,
            *(() if sharded is None else sharded.notes),
        ),
    )


def _make_batch(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    seed: int,
    sharded: Sharded | None,
    mark: Mark,
) -> tuple[list[Any], list[float], list[str]]:
    """Return the micro-batches of one update, the weights of their losses, and notes.

    Of several ranks each makes the whole batch, from the same seed, and keeps its part. So all of
    them know what the others' micro-batches weigh.
    """
    mark(Phase.DATA, 0)
    set_seed(seed)
    shares = [config.batch_size] if sharded is None else part_sizes(config, sharded)
    batch = workload.make_batch(sum(shares))
    sizes, everyone = config.micro_batch_sizes, []
    said = precision.batch_notes(batch, config.precision)
    accumulation.check_batch(workload, batch, sum(shares))
    if sharded is not None:
        if workload.num_loss_terms is not None:  # else samples weigh alike, of thousands of ranks
            parts = accumulation.parts_of(workload, batch, shares)
            everyone = [m for part in parts for m in accumulation.parts_of(workload, part, sizes)]
        whole = accumulation.weights(workload, everyone, sizes * len(shares))
        batch = accumulation.part_of(workload, batch, shares, sharded.part % len(shares))

    micro_batches = _divided(workload, batch, sizes, config, device)
    if sharded is None:
        return micro_batches, accumulation.weights(workload, micro_batches, sizes), said
    return micro_batches, own_weights(whole, sharded), said


def _divided(
    workload: Workload, batch: Any, sizes: Sequence[int], config: StepConfig, device: torch.device
) -> list[Any]:
    """Return micro-batches of these sizes that belong to the run."""
    if workload.split_batch is None:
        return accumulation.parts_of(workload, own_batch(batch, config, device), sizes)
    return [own_batch(p, config, device) for p in accumulation.parts_of(workload, batch, sizes)]


def own_batch(batch: Any, config: StepConfig, device: torch.device) -> Any:
    """Return a batch that belongs to the run, in the format of the weights."""
    if device.type != "cpu":
        return precision.cast_batch(batch, config.precision)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        # a copy, for memory that the workload holds would not be counted; the gradient of a batch
        # that requires one stays on it
        is_own = whole_of(tensor).is_leaf and tensor.requires_grad
        copy = (tensor.detach() if is_own else tensor).clone()
        found: torch.Tensor = precision.cast_batch(copy, config.precision)
        return found.requires_grad_() if is_own else found

    return map_tensors(own, batch)


def notes(config: StepConfig, device: torch.device, plan: Plan | None) -> list[str]:
    """Return what a reader of this step's numbers must know about its techniques."""
    return registry.notes(Setup(config=config, device=device, plan=plan))
