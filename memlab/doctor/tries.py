"""Which techniques work on a device: what memlab refuses there by itself, and a tiny step of each.

The step runs in a worker, so that a technique that crashes ends no more than that. Compiled steps
come last, since they take longer than all others together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab import workloads
from memlab.config import StepConfig
from memlab.devices.cards import Card
from memlab.result import Outcome, StepResult
from memlab.techniques.compiling.compilation import is_compiled
from memlab.techniques.every import EVERY, refusals
from memlab.techniques.technique import Setup
from memlab.workload import Workload

BATCH_SIZE = 4
PLAIN = "the plain step"
TINY_TEXT = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "sequence_length": 16}
TINY_IMAGES = {"image_size": 16, "hidden_sizes": (16, 32)}
FOR_IMAGES = ("channels_last", "inplace")
# formats that need a kind of card, beside the examples of EVERY. Left out: adamw-8bit, since its
# package may look for kernels on the net when it is imported
MORE: dict[str, Mapping[str, Any]] = {
    "tf32": {"precision": "tf32"},
    "fp8-mixed": {"precision": "fp8-mixed"},
}
LIMIT_BYTES = 1000  # less than any model

Measure = Callable[[Workload, StepConfig, int | None], StepResult]
"""Measures one step, given a memory limit in bytes or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """A technique that was tried.

    Attributes:
        name: as docs/combinations.md shows it.
        why_not: why it does not work here; empty if it does.
    """

    name: str
    why_not: str = ""


def settings() -> dict[str, StepConfig]:
    """Return the settings to try, by name: the plain step first, compiled ones last."""
    found = {PLAIN: StepConfig(batch_size=BATCH_SIZE)}
    examples = {name: fields for t in EVERY for name, fields in t.examples.items()}
    for name, fields in (examples | MORE).items():
        found[name] = StepConfig(**{"batch_size": BATCH_SIZE, **fields})
    return dict(sorted(found.items(), key=lambda item: is_compiled(item[1])))


def tried(
    configs: Mapping[str, StepConfig], device: torch.device, card: Card | None, measure: Measure
) -> Iterator[Try]:
    """Yield whether out of memory ends well on a device, then what each of these settings does.

    Args:
        configs: as of `settings`.
        device: of this machine.
        card: the card that it is, if it is one.
        measure: runs a step.
    """
    yield _out_of_memory(measure)
    for name, config in configs.items():
        asked = Setup(config=config, device=device, card=card)
        refused = next(iter(refusals(asked)), None)
        if refused is not None:
            yield Try(name=name, why_not=str(refused))
            continue

        result = measure(_workload(config), config, None)
        is_ok = result.outcome is Outcome.OK
        yield Try(name=name, why_not="" if is_ok else f"{result.outcome}: {result.message}")


def _workload(config: StepConfig) -> Workload:
    default = StepConfig()
    if any(getattr(config, name) != getattr(default, name) for name in FOR_IMAGES):
        return workloads.get("plain-convnet", **TINY_IMAGES)
    return workloads.get("plain-transformer", **TINY_TEXT)


def _out_of_memory(measure: Measure) -> Try:
    """Return whether a step that has too little memory ends as such, and the next one runs."""
    name, config = "an out-of-memory and the step after it", settings()[PLAIN]
    over = measure(_workload(config), config, LIMIT_BYTES)
    if over.outcome is not Outcome.OUT_OF_MEMORY:
        return Try(name=name, why_not=f"{over.outcome} under a limit of {LIMIT_BYTES} bytes")
    after = measure(_workload(config), config, None)
    if after.outcome is not Outcome.OK:
        return Try(name=name, why_not=f"{after.outcome}: {after.message}")
    return Try(name=name)
