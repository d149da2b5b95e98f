"""Exercises of chapter 10: logits of a large vocabulary, and attention that keeps its weights."""

from memlab import workloads
from memlab._util.units import GIB
from memlab.config import Checkpointing, Optimizer, Precision, StepConfig
from memlab.course.exercise import Exercise
from memlab.course.settings import MustFit

SAMPLES, TOKENS, WORDS, WIDTH = 4, 512, 151_936, 256
HEADS, HEAD_SIZE, LENGTH = 8, 60, 1024  # of the attention
FP32 = 4  # bytes a number
WHOLE = StepConfig(batch_size=SAMPLES)
FITS = MustFit(
    workload=workloads.get(
        "plain-transformer", num_layers=4, hidden_size=WIDTH, sequence_length=TOKENS,
        vocab_size=WORDS,
    ),
    start=WHOLE,
    card="rtx-4090",
    limit_bytes=2 * GIB,
    kept={
        "batch_size": "other_samples", "accumulation_steps": "in_parts", "precision": "precision",
        "optimizer": "other_training", "world_size": "other_training",
    },
)  # fmt: skip


def _logits() -> int:
    return SAMPLES * TOKENS * WORDS * FP32


def _scores() -> int:
    return SAMPLES * HEADS * LENGTH * LENGTH * FP32


EXERCISES = [
    Exercise(
        number="10.1",
        reference=_logits,
        mistakes={
            "one_sample": lambda: _logits() // SAMPLES,
            "hidden": lambda: SAMPLES * TOKENS * WIDTH * FP32,
            "head": lambda: WORDS * WIDTH * FP32,
            "halves": lambda: _logits() // 2,
        },
    ),
    Exercise(
        number="10.2",
        reference=lambda: StepConfig(batch_size=SAMPLES, loss_chunks=16),
        mistakes={
            "not_yet": lambda: StepConfig(batch_size=SAMPLES, checkpointing=Checkpointing.BLOCKS),
            "in_parts": lambda: StepConfig(batch_size=SAMPLES, accumulation_steps=4),
            "precision": lambda: StepConfig(batch_size=SAMPLES, precision=Precision.BF16),
            "other_training": lambda: StepConfig(batch_size=SAMPLES, optimizer=Optimizer.SGD),
            "other_samples": lambda: StepConfig(batch_size=1),
            "not_moved": lambda: WHOLE,
            "no_config": lambda: "loss_chunks",
        },
        judge=FITS,
    ),
    Exercise(
        number="10.3",
        reference=_scores,
        mistakes={
            "one_head": lambda: _scores() // HEADS,
            "one_sample": lambda: _scores() // SAMPLES,
            "halves": lambda: _scores() // 2,
            "outputs": lambda: SAMPLES * HEADS * LENGTH * HEAD_SIZE * FP32,
        },
    ),
]
