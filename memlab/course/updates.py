"""Exercises of chapter 9: what an update holds, and which leaner one is another training."""

from memlab import workloads
from memlab.config import Optimizer, Precision, StepConfig
from memlab.course.exercise import Exercise, always, judge_choice, judge_numbers, one_wrong
from memlab.course.settings import MustFit
from memlab.devices.cards import card

CARD = "rtx-4090"
BYTES = {  # of weight, gradient and optimizer state, for each weight
    "sgd": 4 + 4,
    "sgd-momentum": 4 + 4 + 4,
    "adamw": 4 + 4 + 8,
    "adafactor": 4 + 4,
    "adamw-8bit": 4 + 4 + 2,
    "adamw, bf16": 2 + 2 + 4,
    "adamw, bf16-master": 2 + 2 + 4 + 8,
}
MOST_OFF = 0.01  # by scales, rows and columns, counts of updates
START = StepConfig(batch_size=1, precision=Precision.BF16)
LEAN = StepConfig(
    batch_size=1,
    precision=Precision.BF16_STOCHASTIC,
    optimizer=Optimizer.ADAFACTOR,
    optimizer_in_backward=True,
)
FITS = MustFit(
    workload=workloads.get(
        "plain-transformer", num_layers=8, hidden_size=8192, num_heads=64, sequence_length=512,
        vocab_size=32_000,
    ),
    start=START,
    card=CARD,
    limit_bytes=card(CARD).usable_bytes,
    kept={
        "batch_size": "other_samples", "world_size": "ranks", "offload_parameters": "host",
        "offload_optimizer": "host",
    },
)  # fmt: skip


EXERCISES = [
    Exercise(
        number="9.1",
        reference=always(BYTES),
        mistakes=one_wrong(
            always(BYTES),
            {
                "sgd": 4,
                "sgd-momentum": 8,
                "adamw": 12,
                "adafactor": 16,
                "adamw-8bit": 9,
                "adamw, bf16": 12,
                "adamw, bf16-master": 12,
            },
        ),
        judge=judge_numbers,
        fraction=MOST_OFF,
    ),
    Exercise(
        number="9.2",
        reference=lambda: LEAN,
        mistakes={
            "not_yet": lambda: StepConfig(
                batch_size=1, precision=Precision.BF16, optimizer=Optimizer.ADAFACTOR
            ),
            "host": lambda: StepConfig(
                batch_size=1, precision=Precision.BF16, offload_optimizer=True
            ),
            "not_moved": lambda: START,
            "other_samples": lambda: StepConfig(batch_size=2),
            "no_config": lambda: "adafactor",
        },
        judge=FITS,
    ),
    Exercise(
        number="9.3",
        reference=lambda: "optimizer_in_backward",
        mistakes={
            "bf16": lambda: "bf16",
            "adafactor": lambda: "adafactor",
            "adamw-8bit": lambda: "adamw-8bit",
        },
        judge=judge_choice,
    ),
]
