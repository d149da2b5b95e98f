"""Offloading to the host's memory: what refuses it, and what it says of itself.

`memlab.techniques.offloading` does it. Left out: parameters, which would have to come to the device
for every forward and backward; and offloading within a compiled graph.
"""

import inspect

import torch

from memlab.config import StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques import offloading
from memlab.techniques.compilation import asked_by, is_compiled, without
from memlab.techniques.source import Source
from memlab.units import format_bytes

FIELDS = {"offload_activations": "activations", "offload_optimizer": "optimizer state"}


def check(config: StepConfig, device: torch.device) -> None:
    """Raise UnsupportedError on a CPU, and for a compiled step."""
    for field, what in FIELDS.items():
        if getattr(config, field) and device.type == "cpu":
            raise UnsupportedError(
                f"{field}=True does nothing on a CPU, where the {what} are in the host's memory "
                f"already; use {field}=False, or memlab.predict for a card: device='h200'"
            )
    if config.offload_optimizer and config.optimizer_in_backward:
        raise UnsupportedError(
            "offload_optimizer=True with optimizer_in_backward=True is not built: each parameter "
            "is updated by an optimizer of its own then; use optimizer_in_backward=False"
        )
    if config.offload_activations and is_compiled(config):
        raise UnsupportedError(
            f"offload_activations=True with {asked_by(config)} is not built: a compiled graph "
            f"saves for backward by itself; use {without(config)}, or offload_activations=False"
        )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state in the host's memory, numbers of steps left out."""
    values = (value for state in optimizer.state.values() for value in state.values())
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")


def notes(config: StepConfig, host_bytes: int) -> list[str]:
    """Return what an offloaded step holds in the host's memory, by its name."""
    names = [what for field, what in FIELDS.items() if getattr(config, field)]
    if not names:
        return []
    held = f"{format_bytes(host_bytes)} of {' and '.join(names)} are held in the host's memory"
    if host_bytes:
        return [f"{held}, beside the allocated bytes of the device."]
    return [f"{held}: no tensor is as large as {format_bytes(offloading.SMALLEST_BYTES)}."]


def source(config: StepConfig) -> Source:
    """Return what a person would add to a script."""
    if not (config.offload_activations or config.offload_optimizer):
        return Source()
    written = inspect.getsource(offloading)
    return Source(
        imports=(
            "import contextlib",
            "import functools",
            "import weakref",
            "from collections import deque",
            "from collections.abc import Callable, Iterator",
            "from typing import Any",
            "import torch",
            "from torch import nn",
            "from torch.autograd.graph import saved_tensors_hooks",
            "from torch.overrides import TorchFunctionMode",
        ),
        # the whole file but its docstring and imports
        functions=(written[written.index("SMALLEST_BYTES = ") :].rstrip(),),
        model=("offloader = Offloader(model)",) if config.offload_activations else (),
        contexts=("offloader",) if config.offload_activations else (),
        optimizer=("offload_state(optimizer)",) if config.offload_optimizer else (),
    )
