"""`from_script`: the workload and the config of the training step that a person's script takes.

The script runs once in a worker over fake tensors until its second update (`tracing/script_step`).
What was seen becomes a report of the same kind as that of a trainer: every part of the step is
named, with what memlab has for it.
"""

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from memlab._util.checks import checked, seconds
from memlab._util.units import format_bytes
from memlab.config import StepConfig
from memlab.cost_model.traced_step import Failure
from memlab.devices.cards import Target
from memlab.errors import UnsupportedError
from memlab.integrations.person_script import script_of
from memlab.integrations.reading import (
    ImportedTraining,
    SourceReading,
    read_optimizer,
    take_mixed,
    take_tf32,
)
from memlab.running import Ended
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress, run
from memlab.runtime.wire import SCRIPT_STEP
from memlab.store.recorded import target_for
from memlab.tracing.person_script import Script
from memlab.tracing.script_step import Held, SeenStep
from memlab.tracing.script_workload import ScriptModel, digest_of, name_of
from memlab.workload import Workload

AMPERE = (8, 0)  # the first cards with TF32
MADE_UP = "random numbers of the range that was seen, none of the script's own data"


@checked(timeout_seconds=seconds)
@shows_progress
def from_script(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    device: str | None = None,
    *,
    timeout_seconds: float = 600,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> ImportedTraining:
    """Return the training step that a person's script takes, as a workload and a config.

    The script runs unchanged over tensors without memory, as `run_script` runs it, until its second
    update of weights. Each `build_model` of the workload runs it again until it calls its model,
    in the worker that measures or predicts. A batch is random numbers in the shapes, formats and
    ranges that were seen. The loss is computed by the same functions of PyTorch.

    Args:
        path: of the script, or of a notebook, whose code cells are run.
        arguments: of the script.
        device: as for `memlab.predict`; a script may choose another step on another device.
        timeout_seconds: the run is given up after this time.
        on_progress: as for `memlab.measure`.
        progress: as for `memlab.measure`.
        cancel: as for `memlab.measure`.

    Returns:
        The config, the workload, and what became of every part of the step that was seen.

    Raises:
        UnsupportedError: no step was seen, or one that no workload can have, such as that of two
            optimizers; the message says which.
        MemlabError: there is no such file, or an argument is not allowed.

    >>> text = '''
    ... import torch
    ... model = torch.nn.Linear(64, 8)
    ... optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ... for _ in range(10):
    ...     loss = model(torch.randn(4, 64)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ... '''
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "train.py"
    ...     _ = file.write_text(text)
    ...     given = from_script(file, device="cpu")
    >>> print(given.config)
    batch_size=4, optimizer=sgd
    """
    script = script_of(path, arguments)
    target = target_for(device, StepConfig())
    seen = _seen(script, target, timeout_seconds, on_progress, cancel)
    name = Path(script.path).name
    workload = Workload(
        name=name,
        build_model=ScriptModel(
            script=script, digest=digest_of(script.path), folder=os.getcwd(), card=target.card,
            has_card=target.kind != "cpu", outline=seen.outline,
        ),
        make_batch=seen.batch,
        compute_loss=partial(seen.loss, fixed=seen.fixed) if seen.fixed else seen.loss,
    )  # fmt: skip
    reading = SourceReading({})
    _read_parts(reading, seen)
    _read_size(reading, seen)
    _read_precision(reading, seen, target)
    _read_clipping(reading, seen)
    optimizer = seen.optimizer or type(seen.optimizer_name, (), {})()
    read_optimizer(reading, "optimizer", optimizer, seen.num_trainable)
    _read_others(reading, seen)
    return reading.finish(f"{name} on {target.name}", workload)


def _seen(
    script: Script, target: Target, timeout_seconds: float, on_progress: OnProgress | None,
    cancel: threading.Event | None,
) -> SeenStep:  # fmt: skip
    """Return the step that a script takes, found in a worker.

    Raises:
        UnsupportedError: none was found, or the worker was stopped.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="memlab-run-") as home:  # also if it is killed
            found: SeenStep | Failure = run(
                SCRIPT_STEP, {"script": replace(script, home=home), "target": target},
                timeout_seconds=timeout_seconds, on_progress=on_progress, cancel=cancel,
            )  # fmt: skip
    except Ended as ended:
        raise UnsupportedError(str(ended)) from None
    if isinstance(found, Failure):
        raise UnsupportedError(found.message)
    return found


def _read_parts(reading: SourceReading, seen: SeenStep) -> None:
    kind, num_parameters, _ = seen.outline
    name = reading.add("model", f"{kind}, {num_parameters} parameters")
    reading.take_into("build_model", name, "each run of it runs the script up to its first call")
    name = reading.add("batch", ", ".join(map(str, seen.batch.forms)))
    reading.take_into("make_batch", name, MADE_UP)
    names = [name_of(call) for call in seen.loss.calls]
    name = reading.add("loss", ", ".join(names) or "what the model returns")
    reading.take_into("compute_loss", name, "a mean over the samples, as in memlab")
    for number, tensor in enumerate(seen.fixed):
        name = reading.add(f"fixed tensor {number}", tuple(tensor.shape))
        reading.take_into("compute_loss", name, "it has no samples and is the same in each batch")


def _read_size(reading: SourceReading, seen: SeenStep) -> None:
    count = seen.backwards
    name = reading.add("batch size", seen.batch_size)
    why = "" if count == 1 else f"{seen.batch_size} x {count} in one update"
    reading.take(name, why, batch_size=seen.batch_size * count)
    name = reading.add("backward passes in an update", count)
    reading.take(name, accumulation_steps=count)
    if not seen.is_mean:
        why = "the losses are added up, and memlab takes their mean; memory and time are the same"
        reading.leave(name, why, accumulation_steps=count)


def _read_precision(reading: SourceReading, seen: SeenStep, target: Target) -> None:
    if seen.autocast is not None:
        name = reading.add("autocast", str(seen.autocast))
        is_fp16 = seen.autocast is torch.float16
        why = "memlab scales the loss too" if is_fp16 and not seen.is_scaled else ""
        precision = "fp16-mixed" if is_fp16 else "bf16-mixed"
        take_mixed(reading, name, precision, seen.formats, why)
    if seen.is_scaled:
        name = reading.add("GradScaler", True)
        if reading.settings.get("precision") == "fp16-mixed":
            reading.same(name, "precision=fp16-mixed")
        else:
            reading.leave(name, "memlab scales the loss with precision='fp16-mixed' only")
    capability = getattr(target.card, "compute_capability", None)
    if seen.is_tf32 and capability is not None and capability >= AMPERE:
        name = reading.add("float32_matmul_precision", "not highest")
        take_tf32(reading, name, seen.formats)


def _read_clipping(reading: SourceReading, seen: SeenStep) -> None:
    if seen.is_clipped_by_value:
        name = reading.add("clip_grad_value_", True)
        reading.leave(name, "memlab clips by the norm of the gradients, not by value")
    if not seen.max_norms:
        return
    name = reading.add("clip_grad_norm_", seen.max_norms[0][0])
    if len(set(seen.max_norms)) == 1 and seen.max_norms[0][1] == 2:
        reading.take(name, max_grad_norm=seen.max_norms[0][0])
    else:
        reading.leave(name, "memlab clips once, by the 2-norm of all gradients")


def _read_others(reading: SourceReading, seen: SeenStep) -> None:
    """Report what else the step was seen to do."""
    if seen.has_schedule:
        why = "memlab has no schedules of this kind; memory and time of a step do not depend on it"
        reading.leave(reading.add("lr_scheduler", True), why)
    if seen.is_compiled:
        why = "the config is the step without it; compile=True predicts or measures it compiled"
        reading.leave(reading.add("torch.compile", True), why)
    if seen.is_recomputed:
        why = "what the model recomputes by itself stays in it, whatever checkpointing says"
        reading.take_into("build_model", reading.add("checkpointing", True), why)
    if seen.in_evaluation:
        name = reading.add("modules in evaluation mode", len(seen.in_evaluation))
        reading.leave(name, "memlab trains all modules in training mode")
    if seen.has_old_gradients:
        why = "gradients of the last update live in the next forward pass; memlab frees them before"
        reading.leave(reading.add("zero_grad", "after the forward pass"), why)
    _read_held(reading, "tensors beside the backward", seen.beside)
    _read_held(reading, "tensors beside the update", seen.in_update)


def _read_held(reading: SourceReading, name: str, held: Held) -> None:
    if held:
        places = [f"{Path(file).name}:{line}, {format_bytes(nbytes)}"
                  for (file, line), nbytes in held]  # fmt: skip
        said = "; ".join(places)
        why = f"bytes that the script holds meanwhile, and memlab's step does not: {said}"
        reading.leave(reading.add(name, sum(nbytes for _, nbytes in held)), why)
