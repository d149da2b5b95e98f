"""Identify the step of a job, so that a prediction finds measurements of exactly the same step.

A name is not enough, because a step depends on a person's functions and values. Its key is a hash
of everything that is sent to the worker: the workload and the config as cloudpickle writes them,
values that were set on a person's modules, and the caller's `sys.path`, folder and variables. In
addition, stamps of a person's own files are stored with a measured run, and the folders of
installed packages are part of the key. So a class that was defined again in a notebook, or a
package that was installed later, needs a new measurement.

Of large tensors only shape and format count, since the values of weights do not decide how long a
step takes. The gradient depends on all of them, so they count where `every_value` is asked for.
"""

import contextlib
import functools
import hashlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memlab._util.functions import is_library
from memlab._util.units import KIB
from memlab._version import __version__
from memlab.cost_model.cost_store import Store
from memlab.cost_model.measured_runs import MeasuredRun, Stamp, read_run, write_run
from memlab.result import Outcome, StepResult
from memlab.runtime.sending import (
    Hashed,
    Values,
    for_worker,
    own_files,
    pickler,
    stamp,
    tensor_text,
)
from memlab.runtime.sending import own_values as values_of

CONTENT_BYTES = 64 * KIB  # a tensor up to this size counts with its values: lengths, labels
DECISIVE = ("workload", "config", "plan", "seed")  # arguments that decide what a step is
OWN_FOLDER = str(Path(__file__).resolve().parents[1]) + os.sep
ZOO_FOLDER = OWN_FOLDER + "workloads" + os.sep


def step_of(
    function: str,
    arguments: Mapping[str, Any],
    *,
    own_values: Values,
    path: Sequence[str],
    environment: Mapping[str, str],
) -> str | None:
    """Return the key of a step on this machine's CPU; None if it has none.

    Args:
        function: that the worker is asked for; None is returned of any but "measure" and "predict".
        arguments: of that function.
        own_values: what a notebook has set on a person's modules (`sending.py`).
        path: `sys.path`.
        environment: the variables.
    """
    if not _is_on_cpu(function, arguments):
        return None

    deciding = [arguments.get(name) for name in DECISIVE]
    return _hashed(deciding, own_values=own_values, path=path, environment=environment)


def circumstances_here(
    deciding: Sequence[Any], *, every_value: bool = False
) -> tuple[str | None, dict[str, Stamp | None]]:
    """Return a hash of some objects and of what surrounds them in this process.

    None if it cannot be told. Beside it the stamps of a person's own files that are imported now.
    With `every_value` large tensors count with their values too.
    """
    files = own_files()
    # torch sets such a variable when it imports what compiles, and compiled steps are left out
    environment = {
        name: value
        for name, value in for_worker(os.environ).items()
        if not name.startswith("TORCHINDUCTOR_")
    }
    values = values_of(files)
    key = _hashed(
        deciding,
        own_values=values,
        path=sys.path,
        environment=environment,
        every_value=every_value,
    )
    return key, {file: stamp(file) for file in files.values()}


def _hashed(
    deciding: Sequence[Any],
    *,
    own_values: Values,
    path: Sequence[str],
    environment: Mapping[str, str],
    every_value: bool = False,
) -> str | None:
    """Return a hash of some objects and of what surrounds them; None if one cannot be pickled.

    Args:
        deciding: what it is the hash of.
        own_values: what a notebook has set on a person's modules (`sending.py`).
        path: `sys.path`.
        environment: the variables.
        every_value: whether large tensors count with their values.
    """
    around = [
        __version__,
        {name: dict(values) for name, values in own_values.items()},
        list(path),
        sorted(environment.items()),
        [_folder_stamp(entry) for entry in path if is_library(os.path.join(entry, "any.py"))],
    ]
    written = Hashed()

    try:
        around.append(os.getcwd())
        _pickler(every_value)(written).dump((list(deciding), around))
    except Exception:  # an object that cannot be pickled; sending the job will report it
        return None

    return written.sha256.hexdigest()


def remember(step: str | None, result: Any, stamps: Mapping[str, Stamp | None]) -> None:
    """Store what a run measured, if it has a time and the step has a key.

    Args:
        step: as `step_of` names it.
        result: of the job.
        stamps: of the files that the worker has imported and read; None of a changed one.
    """
    if step is None or not isinstance(result, StepResult) or result.outcome is not Outcome.OK:
        return

    files = {file: stamp for file, stamp in stamps.items() if not _is_machinery(file)}
    seconds = result.step_seconds_all
    if not seconds or result.step_seconds is None or result.peak_allocated_bytes is None:
        return

    run = MeasuredRun(
        step=step,
        least_seconds=min(seconds),
        median_seconds=result.step_seconds,
        num_repeats=len(seconds),
        others_share=result.others_share,
        peak_bytes=result.peak_allocated_bytes,
        taken_at=time.time(),
        files={file: stamp for file, stamp in files.items() if stamp is not None},
    )
    if len(run.files) == len(files):
        with contextlib.suppress(Exception):  # a person's code may have left anything behind
            write_run(Store(), run)


def recall(step: str | None) -> tuple[MeasuredRun | None, str | None]:
    """Return the measured run of a step or None, and a note if its row was damaged."""
    if step is None:
        return None, None
    run, note = read_run(Store(), step)
    return (run if run is not None and run.is_of_present_files() else None), note


def _is_on_cpu(function: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a job measures a step on this CPU, or predicts one for it."""
    if function == "measure":
        return bool(arguments["device"].type == "cpu")
    if function != "predict":
        return False
    target = arguments["target"]
    return bool(target.kind == "cpu" and target.costs is None)


def _is_machinery(file: str) -> bool:
    """Return whether a file is memlab's own and defines no model."""
    return file.startswith(OWN_FOLDER) and not file.startswith(ZOO_FOLDER)


def _folder_stamp(folder: str) -> int:
    """Return a value that changes when a package is installed in a folder or removed."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@functools.cache
def _pickler(every_value: bool) -> Any:
    most = math.inf if every_value else CONTENT_BYTES

    class HashPickler(pickler()):  # type: ignore[misc]
        """Writes tensors as text."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                if every_value and (obj.device.type, obj.layout) != ("cpu", torch.strided):
                    raise ValueError(f"the values of {obj.device} {obj.layout} are not hashed")
                is_strided = obj.layout is torch.strided
                place = f"{obj.device} {obj.stride() if is_strided else ''}"
                is_small = is_strided and obj.nbytes <= most
                return str, (tensor_text(obj, place, has_values=is_small),)
            if type(obj) is np.ndarray and obj.nbytes > CONTENT_BYTES and obj.dtype != object:
                values = hashlib.sha256(obj.tobytes()).hexdigest() if every_value else ""
                return str, (f"{obj.dtype} {obj.shape} {values}",)
            return super().reducer_override(obj)

    return HashPickler
