"""Exercises of chapters 0 to 2: can a card train it, what is in a step, what does mine take."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memlab import workloads
from memlab._util.units import MIB, is_a, shown
from memlab.api import predict
from memlab.config import Precision, StepConfig
from memlab.course.exercise import Exercise
from memlab.course.settings import MustFit
from memlab.result import Outcome, StepResult
from memlab.running import require_ok
from memlab.workload import Workload

CARD, CARD_LIMIT = "t4", 1536 * MIB  # of chapter 0
TOO_LARGE = StepConfig(batch_size=256)  # needs several times as much
SAMPLES_AND_TRAINING = {
    "batch_size": "other_samples", "optimizer": "other_training", "world_size": "other_training",
}  # fmt: skip
FITS = MustFit(
    workload=workloads.get("gpt-small"), start=TOO_LARGE, card=CARD, limit_bytes=CARD_LIMIT,
    kept=SAMPLES_AND_TRAINING,
)  # fmt: skip
IN_ONE_PART = replace(
    FITS,
    kept=SAMPLES_AND_TRAINING | {"accumulation_steps": "in_parts", "precision": "precision"},
)
BATCH = 2048  # of chapter 1
INPUTS, OUTPUTS = 1024, 4096  # of its first layer
OWN_FRACTION = 0.2  # within which a person should know what their own step takes


@functools.cache
def mlp() -> Workload:
    """Return the model of chapter 1: two linear layers of 784, 512 and 10, with a ReLU between."""
    return Workload(
        name="mlp",
        build_model=lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)),
        make_batch=lambda n: (torch.randn(n, 784), torch.randint(0, 10, (n,))),
        compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


@functools.cache
def mlp_step(batch_size: int = BATCH) -> StepResult:
    """Return the step of chapter 1 as memlab predicts it: to the byte, on a CPU."""
    return require_ok(predict(mlp(), StepConfig(batch_size=batch_size), "cpu", progress=False))


def _peak(batch_size: int = BATCH) -> int:
    return mlp_step(batch_size).peak_allocated_bytes or 0


def _part(name: str) -> int:
    return (mlp_step().peak_by_category or {})[name]


def _weights() -> int:
    return _part("parameters")


def _state() -> int:
    return _part("optimizer_state")


def _hidden() -> int:
    return BATCH * 512 * 4


def _linear(width: int = 4) -> int:
    layer = nn.Linear(INPUTS, OUTPUTS, device="meta")
    return width * sum(parameter.numel() for parameter in layer.parameters())


def _per_sample() -> float:
    return (_peak(2 * BATCH) - _peak()) / BATCH


def _own(asked: Exercise, given: Any) -> str:
    """Return the hint for a workload of one's own, with a guess of what its step takes."""
    hints = asked.hints
    if not (is_a(given, tuple) and len(given) == 3):
        return hints["not_three"].format(given=shown(given))
    workload, config, guessed = given
    if not is_a(workload, Workload):
        return hints["no_workload"].format(given=shown(workload))
    if not is_a(config, StepConfig):
        return hints["no_config"].format(given=shown(config))
    found = predict(workload, config, "cpu", progress=False)
    if found.outcome is not Outcome.OK:
        return f"your step cannot be predicted yet: {found.message}"
    peak, parts = found.peak_allocated_bytes or 0, found.peak_by_category or {}
    # of a small model these may lie near another mistake
    if is_a(guessed, int) and guessed == parts["parameters"]:
        return hints["weights_alone"]
    without = peak - parts["activations"] - parts["temporaries"]
    mistakes = {"without_activations": lambda: without}
    return replace(asked, reference=lambda: peak, mistakes=mistakes).of_number(guessed)


def _of_own(nbytes: Callable[[], int]) -> Callable[[], Any]:
    """Return what answers exercise 2.1 for the model of chapter 1, with this number of bytes."""
    return lambda: (mlp(), StepConfig(batch_size=BATCH), nbytes())


EXERCISES = [
    Exercise(
        number="0.1",
        reference=lambda: replace(TOO_LARGE, accumulation_steps=4),
        mistakes={
            "other_samples": lambda: StepConfig(batch_size=16),
            "other_training": lambda: replace(TOO_LARGE, accumulation_steps=8, optimizer="sgd"),
            "not_moved": lambda: TOO_LARGE,
            "not_yet": lambda: replace(TOO_LARGE, accumulation_steps=2),
            "no_config": lambda: 16,
        },
        judge=FITS,
    ),
    Exercise(
        number="0.2",
        reference=lambda: replace(TOO_LARGE, memory_budget=0.0),
        mistakes={
            "in_parts": lambda: replace(TOO_LARGE, accumulation_steps=8),
            "precision": lambda: replace(TOO_LARGE, precision=Precision.FP16_MIXED),
            "not_yet": lambda: replace(TOO_LARGE, memory_budget=0.5),
            "other_samples": lambda: StepConfig(batch_size=128, memory_budget=0.0),
        },
        judge=IN_ONE_PART,
    ),
    Exercise(
        number="1.1",
        reference=_linear,
        mistakes={
            "no_bias": lambda: 4 * INPUTS * OUTPUTS,
            "numbers": lambda: _linear(1),
            "halves": lambda: _linear(2),
            "gradient_too": lambda: 2 * _linear(),
        },
    ),
    Exercise(
        number="1.2",
        reference=_state,
        mistakes={
            "one_average": _weights,
            "no_count": lambda: 2 * _weights(),
            "weights_too": lambda: _state() + _weights(),
            "gradients_too": lambda: _state() + 2 * _weights(),
        },
    ),
    Exercise(
        number="1.3",
        reference=_peak,
        mistakes={
            "no_state": lambda: _peak() - _state(),
            "no_backward": lambda: _peak() - 2 * _hidden(),
            "one_gradient": lambda: _peak() - _hidden(),
            "all_gradients": lambda: _peak() + _weights() - _part("gradients"),
            "layer_output": lambda: _peak() + _hidden(),
        },
        fraction=1e-6,
    ),
    Exercise(
        number="2.1",
        reference=_of_own(_peak),
        mistakes={
            "weights_alone": _of_own(_weights),
            "without_activations": _of_own(
                lambda: _peak() - _part("activations") - _part("temporaries")
            ),
            "not_three": lambda: MIB,
            "no_workload": lambda: (mlp().build_model, StepConfig(batch_size=BATCH), MIB),
            "no_config": lambda: (mlp(), BATCH, MIB),
        },
        judge=_own,
        fraction=OWN_FRACTION,
    ),
    Exercise(
        number="2.2",
        reference=_per_sample,
        mistakes={
            "divided": lambda: _peak() / BATCH,
            "sample_alone": lambda: 784 * 4 + 8,
            "one_size": lambda: _per_sample() - 2 * _hidden() / BATCH,
        },
        fraction=0.05,
    ),
]
