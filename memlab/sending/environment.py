"""Give a worker the caller's environment variables as they are when a job begins.

A variable that nobody in the worker has looked at yet is simply set. One that was looked at (by a
library as it was imported, say), or that native code may have read by itself, needs a new worker.
"""

import os
from collections.abc import Mapping
from typing import Any

# variables that native code reads without Python
NATIVE = (
    "ATEN", "BLIS", "CUBLAS", "CUDA", "CUDNN", "DNNL", "GLIBC", "GOMP", "HIP", "HSA", "KMP", "LANG",
    "LC_", "LD_", "MALLOC", "MKL", "NCCL", "NUMEXPR", "NVIDIA", "OMP", "ONEDNN", "OPENBLAS",
    "PYTHON", "PYTORCH", "ROCM", "TORCH", "TRITON", "TZ",
)  # fmt: skip


# threads that spin while they wait take the cores from one another on a busy machine
DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}

# fake tensors of a card behave as on a machine without one, where all tests run, and no prediction
# waits for the driver or takes memory on a card
NO_CARDS = {"CUDA_VISIBLE_DEVICES": ""}


def for_worker(callers: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker: the caller's, and `DEFAULTS` where the caller has none."""
    return {**DEFAULTS, **callers}


def without_cards(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which a process that has not met its cards yet sees none."""
    return {**variables, **NO_CARDS}


class Environment:
    """The variables that this process was started with, and which of them were read."""

    def __init__(self) -> None:
        self._set = dict(os.environ)
        self._read: set[str] = set()

    def watch(self) -> None:
        """From now on, record which variables are read."""
        get, noted = os._Environ.__getitem__, self._read

        def getitem(self: Any, key: Any) -> Any:
            if isinstance(key, str):
                noted.add(key)
            return get(self, key)

        def copy(self: Any) -> dict[str, str]:
            # starting a process copies all variables, which does not count as reading them
            return {self.decodekey(k): self.decodevalue(v) for k, v in self._data.items()}

        os._Environ.__getitem__ = getitem  # type: ignore[method-assign]
        os._Environ.copy = copy  # type: ignore[assignment,method-assign]

    def hide_cards(self) -> None:
        """Let this process see no card; it must not have met one yet."""
        os.environ.update(NO_CARDS)
        self._set = without_cards(self._set)

    def takes(self, callers: Mapping[str, str]) -> bool:
        """Set the caller's variables and return True; False if that needs a new worker."""
        names = {*callers, *self._set}
        changed = [name for name in names if callers.get(name) != self._set.get(name)]
        if any(name in self._read or name.startswith(NATIVE) for name in changed):
            return False

        for name in changed:
            if name in callers:
                os.environ[name] = callers[name]
            else:
                os.environ.pop(name, None)

        self._set = dict(callers)
        return True
