"""Checkpoints of a training step that any number of ranks can load.

Source: `torch.distributed.checkpoint` (DCP), which writes each part of a tensor once and, when it
loads, reads what each rank needs of it. Parameters, buffers and optimizer state are stored whole
by their paths, so one process, other strategies and other numbers of ranks find them. A checkpoint
is written into a folder with a name of its own and renamed when all ranks have finished; the
newest complete one is loaded. Left out: the position in a data loader, and asynchronous saving.
"""

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from memlab._util.units import shown
from memlab.errors import MemlabError, UnsupportedError
from memlab.techniques.checkpoint_contents import (
    PROGRESS,
    RANDOM,
    STATE,
    WEIGHT,
    states_in,
    weights_in,
)
from memlab.techniques.optimizers.optimizers import state_of
from memlab.techniques.step import Step

NAME = "update-{:08d}"
COMPLETE = re.compile(r"update-(\d{8})")
PARTIAL = ".partial"
METADATA = ".metadata"  # the file that DCP writes last
PLAIN = (bool, int, float, str, type(None))  # values that are saved beside tensors
KERNELS = ("foreach", "fused", "capturable", "differentiable")  # another step may use others


def save(step: Step, num_updates: int, folder: Path) -> Path:
    """Write a checkpoint, all ranks together, and return its folder."""
    target = folder / NAME.format(num_updates)
    partial = folder / (target.name + PARTIAL)
    values = _values_in(step)
    if _is_first():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
    _wait()

    state = {**weights_in(step), **states_in(step), **values}
    state.update(_progress(step, num_updates))
    # copies ahead of the file would only take host memory
    writer = FileSystemWriter(partial, per_thread_copy_ahead=0)
    with _quiet():
        save_state(state, storage_writer=writer, no_dist=not _is_rank())
    _wait()
    if _is_first():
        shutil.rmtree(target, ignore_errors=True)  # of an earlier run that made as many updates
        partial.rename(target)
        _flush(folder)
    _wait()
    return target


def load(step: Step, folder: Path) -> int:
    """Give a step what the newest complete checkpoint holds; return its number of updates.

    Raises:
        MemlabError: there is none, or it is of another model or optimizer.
    """
    source = newest(folder)
    reader = FileSystemReader(source)
    stored = reader.read_metadata().state_dict_metadata
    weights = weights_in(step)
    _check_same(weights, stored, source)

    state: dict[str, Any] = {**weights, **_empty_states(step, stored), PROGRESS: ""}
    if {name for name in stored if name.startswith(RANDOM)} == set(map(_random, range(_count()))):
        state[_random(_rank())] = torch.get_rng_state()
    with _quiet():
        load_state(state, storage_reader=reader, no_dist=not _is_rank())

    paths = dict(step.with_loss.named_parameters())
    held: Any = state_of(step.optimizer)
    for name, value in state.items():
        if name.startswith(STATE):
            path, _, key = name.removeprefix(STATE).partition(": ")
            held.setdefault(paths[path], {})[key] = value
    if _random(_rank()) in state:
        torch.set_rng_state(state[_random(_rank())])
    return _continued(step, json.loads(state[PROGRESS]))


def newest(folder: Path) -> Path:
    """Return the newest complete checkpoint in a folder.

    Raises:
        MemlabError: there is none.
    """
    every = folder.iterdir() if folder.is_dir() else ()
    complete = [p for p in every if COMPLETE.fullmatch(p.name) and (p / METADATA).is_file()]
    if not complete:
        raise MemlabError(
            f"folder={shown(str(folder))} holds no complete checkpoint; pass a folder that "
            "`save` has written to"
        )
    return max(complete, key=lambda path: path.name)


def _values_in(step: Step) -> dict[str, Any]:
    """Return the optimizer state that is no tensor, such as a count of updates, by path and name.

    Raises:
        UnsupportedError: it is neither a number nor text.
    """
    held = state_of(step.optimizer)
    found = {}
    for path, parameter in step.with_loss.named_parameters():
        for key, value in held.get(parameter, {}).items():
            if type(value) in PLAIN:
                found[f"{STATE}{path}: {key}"] = value
            elif not isinstance(value, torch.Tensor):
                raise UnsupportedError(
                    f"the optimizer's state[{key!r}] is a {type(value).__name__}, which a "
                    "checkpoint cannot hold; allowed are tensors, numbers and text: keep each "
                    "tensor under a name of its own"
                )
    return found


def _progress(step: Step, num_updates: int) -> dict[str, Any]:
    """Return what else training continues with."""
    said = {
        "num_updates": num_updates,
        "learning_rates": [group["lr"] for group in step.optimizer.param_groups],
        "groups": [
            {k: v for k, v in group.items() if type(v) in PLAIN and k not in KERNELS}
            for group in step.optimizer.param_groups
        ],
        "schedule": None if step.scheduler is None else step.scheduler.state_dict(),
        "loss_scale": None if step.scaler is None else step.scaler.state_dict(),
    }
    return {PROGRESS: json.dumps(said), _random(_rank()): torch.get_rng_state()}


def _continued(step: Step, said: Mapping[str, Any]) -> int:
    """Let schedule and loss scale go on; return the number of updates made before."""
    for group, rate in zip(step.optimizer.param_groups, said["learning_rates"], strict=True):
        group["lr"] = rate
    for group, values in zip(step.optimizer.param_groups, said.get("groups", ()), strict=False):
        group.update(values)
    if step.scheduler is not None and said["schedule"] is not None:
        step.scheduler.load_state_dict(said["schedule"])
    if step.scaler is not None and said["loss_scale"] is not None:
        step.scaler.load_state_dict(said["loss_scale"])
    return int(said["num_updates"])


def _check_same(
    weights: Mapping[str, torch.Tensor], stored: Mapping[str, Any], source: Path
) -> None:
    """Raise MemlabError if a checkpoint is of a model with other weights."""
    kept = {name: tuple(stored[name].size) for name in stored if name.startswith(WEIGHT)}
    own = {name: tuple(value.shape) for name, value in weights.items()}
    differing = sorted(kept.items() ^ own.items())
    if differing:
        name, shape = differing[0]
        raise MemlabError(
            f"{source} is a checkpoint of another model: {name.removeprefix(WEIGHT)} has shape "
            f"{shape} in {'the checkpoint' if kept.get(name) == shape else 'this model'} only; "
            "pass the workload that it was saved with"
        )


def _empty_states(step: Step, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors to load the state into that this rank will keep; None for a plain value."""
    optimizer: Any = getattr(step.optimizer, "optim", step.optimizer)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    paths = dict(step.with_loss.named_parameters())
    found: dict[str, Any] = {}
    for name, kept in stored.items():
        path = name.removeprefix(STATE).partition(": ")[0]
        if name.startswith(STATE) and paths.get(path) in groups:
            is_tensor = hasattr(kept, "properties")
            found[name] = _empty(paths[path], kept, groups[paths[path]]) if is_tensor else None
    return found


def _empty(parameter: Any, kept: Any, group: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor for one state of a parameter: divided as the parameter, if it is as large."""
    dtype = kept.properties.dtype
    if kept.size == parameter.shape and parameter.ndim:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # counters of steps are on the CPU, except for kernels that read them on the device
    is_on_device = kept.size.numel() > 1 or group.get("fused") or group.get("capturable")
    return torch.empty(kept.size, dtype=dtype, device=parameter.device if is_on_device else "cpu")


def _random(rank: int) -> str:
    return f"{RANDOM}{rank}"


def _is_rank() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _is_rank() else 0


def _count() -> int:
    return dist.get_world_size() if _is_rank() else 1


def _is_first() -> bool:
    return _rank() == 0


def _wait() -> None:
    """Wait until all ranks are here."""
    if _is_rank():
        dist.barrier()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warning that one process saves or loads by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _flush(folder: Path) -> None:
    """Have the system write down a new name, where it can be asked to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
