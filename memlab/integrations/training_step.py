"""`training_step`: the very step that memlab measures and predicts, over batches of one's own."""

import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memlab._util.checks import checked
from memlab.config import StepConfig
from memlab.devices.here import resolve_device
from memlab.errors import UnsupportedError, WorkloadError
from memlab.prediction.plans import plan_for
from memlab.running import Ended
from memlab.runtime.isolation import runner
from memlab.store.recorded import target_for
from memlab.techniques import checkpoints
from memlab.techniques.batches import tensors_of
from memlab.techniques.sharding.ranks import is_tensor_parallel
from memlab.techniques.step import Step, build_step
from memlab.workload import Workload

PLAN_SECONDS = 600.0


class TrainingStep:
    """A step that trains: each call is one optimizer update over a batch.

    Attributes:
        model: on its device, in the format of its weights; with sharding, this rank's part.
        optimizer: of its trainable parameters, and of those of the loss.
        config: how it is trained.
        device: where.
        num_updates: made so far, those before a checkpoint that was loaded included.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.model, self.optimizer = step.model, step.optimizer
        self.config, self.device = step.config, step.device
        self.num_updates = 0

    def __call__(self, batch: Any) -> float:
        """Make one update and return its loss.

        Args:
            batch: CPU tensors as the workload's `make_batch` returns them, of any number of
                samples; the last batch of an epoch may be smaller. With sharding these are the
                samples of this rank, as many as every other rank has, and the loss is that of all
                ranks together. Ranks that divide layers have the same samples.

        Raises:
            WorkloadError: the batch cannot be divided, or the ranks have different numbers of
                samples, or those that divide layers have different samples.
        """
        _take(self._step, batch)
        loss = self._step()
        self.num_updates += 1
        return loss if self._step.sharded is None else _mean(loss, self.device)

    @property
    def loss_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that the loss brings along, by name: copies, which this step trains."""
        return self._step.loss.parameters

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint into a folder, all ranks together, and return where it is.

        It is written beside the earlier ones and gets its name when it is complete, so a process
        that is killed meanwhile loses nothing.
        """
        return checkpoints.save(self._step, self.num_updates, Path(folder))

    def load(self, folder: str | Path) -> int:
        """Continue from the newest checkpoint in a folder and return its number of updates.

        It may have been saved by another number of ranks, or with another strategy of sharding,
        but by the same model and optimizer. Random numbers continue where they were if the number
        of ranks is the same.

        Raises:
            MemlabError: the folder holds no complete checkpoint, or one of another model.
        """
        self.num_updates = checkpoints.load(self._step, Path(folder))
        return self.num_updates


@checked()
def training_step(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    seed: int = 0,
) -> TrainingStep:
    """Return the step of a config, which trains over batches of your own, in this process.

    It is what `measure` measures and `predict` predicts: gradients of micro-batches weighted by
    their samples or loss terms, recompute, precision, clipping and the optimizer as the config
    says. For a sharded config, call it in each rank: start this file by `torchrun` and open the
    process group first.

    Args:
        workload: its `build_model` and `compute_loss` are used, and `make_batch` once, for a
            batch that shows what batches are like.
        config: how it is trained.
        device: "cpu", "cuda", "cuda:1"; None is the accelerator if there is one, else the CPU.
        seed: set before the model is built.

    Raises:
        UnsupportedError: this device or this torch cannot do what the config asks for.
        MemlabError: an argument is not allowed; the message names it and what is allowed.

    >>> import memlab
    >>> workload = memlab.workloads.get("plain-mlp")
    >>> step = memlab.training_step(workload, memlab.StepConfig(batch_size=8), "cpu")
    >>> batch = workload.make_batch(8)
    >>> losses = [step(batch) for _ in range(3)]
    >>> step.num_updates, losses[2] < losses[0]
    (3, True)
    """
    target = resolve_device(device)
    try:
        run = runner(True, PLAN_SECONDS, None, None)
        plan = plan_for(workload, config, target_for(target, config), seed=seed, run=run)
    except Ended as ended:
        raise UnsupportedError(str(ended)) from None
    step = build_step(workload, config, target, plan=plan, seed=seed)
    if step.sharded is not None:
        step.set_seed(seed)  # else all ranks would drop out the same units of other samples
    return TrainingStep(step)


def _take(step: Step, batch: Any) -> None:
    """Give a step a batch of a person's own.

    Raises:
        WorkloadError: as for a call of the step.
    """
    num_samples = _num_samples(step.workload, batch)
    if num_samples < 1:
        raise WorkloadError("a batch has no samples; allowed is at least one")
    count = min(step.config.accumulation_steps, num_samples)
    sizes = [num_samples // count + (i < num_samples % count) for i in range(count)]
    weights = step.use(batch, sizes)
    if step.sharded is not None:
        if is_tensor_parallel(step.config):
            _check_alike(batch, step.sharded.part)
        own = _num_terms(step, num_samples)
        everyone = _of_all_ranks((num_samples, own, min(weights)))
        share = own / sum(terms for _, terms, _ in everyone) * dist.get_world_size()
        step.loss_weights = [weight * share for weight in weights]


def _num_terms(step: Step, num_samples: int) -> float:
    """Return of how many terms the loss of this rank's batch is the mean."""
    count = step.workload.num_loss_terms
    if count is None:
        return float(num_samples)
    return sum(float(count(micro_batch)) for micro_batch in step.micro_batches)


def _of_all_ranks(own: tuple[int, float, float]) -> list[tuple[int, float, float]]:
    """Return the numbers of samples and terms, and the least weight, of all ranks.

    Raises:
        WorkloadError: in every rank, if one would run other micro-batches than the rest.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    samples = [num_samples for num_samples, _, _ in found]
    if len(set(samples)) > 1:
        raise WorkloadError(
            f"the ranks were given {samples} samples; allowed are equal numbers: use a "
            "DistributedSampler, or drop_last=True"
        )
    if not min(least for _, _, least in found) > 0.0:
        raise WorkloadError(
            "num_loss_terms counts no terms in a micro-batch of one of the ranks, which no rank "
            "can skip; use larger micro-batches, or samples that all have terms"
        )
    return found


def _check_alike(batch: Any, part: int) -> None:
    """Check that ranks which divide layers have the same samples.

    Raises:
        WorkloadError: in every rank, if they have not; their sums would mix different samples.
    """
    digest = 0
    for tensor in tensors_of(batch):
        numbers = tensor.detach().contiguous().flatten().view(torch.uint8)
        digest = zlib.crc32(numbers.cpu().numpy().data, digest)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (part, digest))
    if len(set(found)) > len({part for part, _ in found}):
        raise WorkloadError(
            "ranks that divide layers were given different samples; allowed are the same: let "
            "rank // tensor_parallel_size, or 0 with sharding='tensor', choose the samples"
        )


def _num_samples(workload: Workload, batch: Any) -> int:
    """Return the samples of a batch."""
    if workload.count_samples is not None:
        return int(workload.count_samples(batch))
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim}
    if len(sizes) == 1:
        return int(sizes.pop())
    raise WorkloadError(
        f"a batch has tensors of {sorted(sizes)} samples along dim 0; allowed is one number, or a "
        "workload with count_samples and split_batch"
    )


def _mean(loss: float, device: torch.device) -> float:
    """Return the mean of the losses of all ranks."""
    total = torch.tensor(loss, dtype=torch.float64 if device.type == "cpu" else torch.float32)
    total = total.to(device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
