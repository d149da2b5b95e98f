"""Offloading to the host's memory: what refuses it, and what it says of itself.

`offloading.py` does it, and `weight_offloading.py` for parameters. Left out: offloading within a
compiled graph.
"""

import inspect
from types import ModuleType

import torch
from torch import nn

from memlab.arguments.units import format_bytes
from memlab.config import Precision, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.compiling.compilation import asked_by, is_compiled, without
from memlab.techniques.loss import chunked_loss
from memlab.techniques.offload import offloading, weight_offloading, weight_reads
from memlab.techniques.offload.offloading import Offloader
from memlab.techniques.offload.weight_offloading import OffloadedWeights
from memlab.techniques.source import Source

IMPORTS = (
    "import contextlib",
    "import functools",
    "import itertools",
    "import weakref",
    "from collections import Counter, deque",
    "from collections.abc import Callable, Iterable, Iterator",
    "from types import MethodType",
    "from typing import Any",
    "import torch",
    "from torch import nn",
    "from torch.autograd.graph import saved_tensors_hooks",
    "from torch.overrides import TorchFunctionMode",
)

FIELDS = {
    "offload_activations": "activations",
    "offload_parameters": "parameters",
    "offload_optimizer": "optimizer state",
}


def apply(model: nn.Module, config: StepConfig, device: torch.device) -> OffloadedWeights:
    """Let the model's weights wait in the host's memory and put the rest on the device.

    The head of a loss in chunks stays: its weight is read when the loss is taken.
    """
    stay = chunked_loss.find_head(model)[1].parameters() if config.loss_chunks > 1 else ()
    return OffloadedWeights(model, device, stay)


def make_offloader(
    model: nn.Module, config: StepConfig, weights: OffloadedWeights | None
) -> Offloader | None:
    """Return the context that a forward is run in, None if nothing of it is offloaded."""
    if config.offload_activations:
        return Offloader(model, config.offload_fraction, weights)
    return None if weights is None else Offloader(model, 0.0, weights)


def check(config: StepConfig, device: torch.device) -> None:
    """Raise UnsupportedError on a CPU, and for a compiled step."""
    for field, what in FIELDS.items():
        if getattr(config, field) and device.type == "cpu":
            raise UnsupportedError(
                f"{field}=True does nothing on a CPU, where the {what} are in the host's memory "
                f"already; use {field}=False, or memlab.predict for a card: device='h200'"
            )
    for field in ("offload_activations", "offload_parameters"):
        if getattr(config, field) and is_compiled(config):
            raise UnsupportedError(
                f"{field}=True with {asked_by(config)} is not built: a compiled graph saves for "
                f"backward by itself; use {without(config)}, or {field}=False"
            )
    if config.offload_parameters and config.precision is Precision.FP8_MIXED:
        raise UnsupportedError(
            "offload_parameters=True with precision='fp8-mixed' is not built: torchao's layers "
            "replace their weights; use precision='bf16-mixed', or offload_parameters=False"
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
    if not any(getattr(config, field) for field in FIELDS):
        return Source()
    # the whole files but their docstrings and imports
    functions = [_text(offloading, "SMALLEST_BYTES = ")]
    place: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    given = ""
    if config.offload_parameters:
        functions.append(_text(weight_reads, "QUESTIONS = "))
        weights = _text(weight_offloading, "class OffloadedWeights")
        functions.append(weights.replace("offloading.SMALLEST", "SMALLEST"))
        stay = ", find_head(model)[1].parameters()" if config.loss_chunks > 1 else ""
        place = (f"weights = OffloadedWeights(model, device{stay})",)
        after, given = ("weights.restore()",), ", weights"
    fraction = config.offload_fraction if config.offload_activations else 0.0
    is_hooked = config.offload_activations or config.offload_parameters
    return Source(
        imports=IMPORTS,
        functions=tuple(functions),
        place=place,
        model=(f"offloader = Offloader(model, {fraction:g}{given})",) if is_hooked else (),
        contexts=("offloader",) if is_hooked else (),
        backward_contexts=("offloader.in_backward()",) if config.offload_parameters else (),
        after=after,
    )


def _text(module: ModuleType, begins: str) -> str:
    written = inspect.getsource(module)
    return written[written.index(begins) :].rstrip()
