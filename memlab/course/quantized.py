"""Exercises of chapter 11: a base in 4 bits, and what can make its step larger."""

from memlab._util.units import GIB
from memlab.config import Checkpointing, Optimizer, Precision, StepConfig
from memlab.course.exercise import Exercise, judge_choice
from memlab.course.settings import MustFit
from memlab.workloads.finetuned import finetune

QUANTIZED = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)  # weights of 16 blocks
START = StepConfig(batch_size=2)
FITS = MustFit(
    workload=finetune("llama-1b", base="nf4", prepare_for_kbit=True, tokens=1536),
    start=START,
    card="rtx-4090",
    limit_bytes=10 * GIB,
    kept={
        "batch_size": "other_samples", "accumulation_steps": "in_parts",
        "optimizer": "other_training", "world_size": "other_training",
    },
)  # fmt: skip

EXERCISES = [
    Exercise(
        number="11.1",
        reference=lambda: QUANTIZED * (2 - 1 / 2),
        mistakes={
            "what_is_left": lambda: QUANTIZED / 2,
            "all_of_it": lambda: QUANTIZED * 2,
            "float32": lambda: QUANTIZED * (4 - 1 / 2),
            "eight_bits": lambda: QUANTIZED,
        },
        fraction=0.01,
    ),
    Exercise(
        number="11.2",
        reference=lambda: "attention",
        mistakes={
            "cast weights": lambda: "cast weights",
            "dequantized copies": lambda: "dequantized copies",
            "other activations": lambda: "other activations",
        },
        judge=judge_choice,
    ),
    Exercise(
        number="11.3",
        reference=lambda: StepConfig(batch_size=2, checkpointing=Checkpointing.BLOCKS),
        mistakes={
            "not_yet": lambda: StepConfig(batch_size=2, precision=Precision.BF16_MIXED),
            "in_parts": lambda: StepConfig(batch_size=2, accumulation_steps=2),
            "other_samples": lambda: StepConfig(batch_size=1),
            "other_training": lambda: StepConfig(batch_size=2, optimizer=Optimizer.SGD),
            "not_moved": lambda: START,
            "no_config": lambda: "checkpointing",
        },
        judge=FITS,
    ),
]
