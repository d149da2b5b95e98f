"""Exercises of chapter 12: a batch that is too long, and an evaluation that keeps all outputs."""

import functools
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab import workloads
from memlab._util.units import GIB, format_percent, is_a, shown
from memlab.config import StepConfig
from memlab.course.exercise import Exercise
from memlab.search.lengths import predict_lengths

if TYPE_CHECKING:
    from memlab.search.lengths import LengthsResult

NUM_TEXTS, NUM_LONG, LONGEST, USUAL = 96_000, 3, 2048, 1024
BATCH = 8
MOST_CHANCE, MOST_LOST = 1e-4, 0.001
EVALUATED, TOKENS, WORDS, FP32 = 64, 512, 8192, 4  # of the evaluation


@functools.cache
def over_texts() -> "LengthsResult":
    """Return the step of chapter 12 over its texts: three of 96,000 do not fit into 2 GiB."""
    lengths = np.random.default_rng(0).lognormal(5, 0.6, NUM_TEXTS).astype(int).clip(8, USUAL)
    lengths[:NUM_LONG] = LONGEST
    model = workloads.get(
        "plain-transformer", num_layers=4, hidden_size=256, sequence_length=LONGEST,
        vocab_size=WORDS,
    )  # fmt: skip
    config = StepConfig(batch_size=BATCH)
    return predict_lengths(
        model, lengths.tolist(), config, "rtx-3060", memory_limit=2 * GIB, progress=False
    )


def _chance() -> float:
    return over_texts().chance_above_limit or 0.0


def _judge_cut(asked: Exercise, given: Any) -> str:
    """Return the hint for a length at which texts are cut; "" for a good one."""
    hints = asked.hints
    if is_a(given, bool) or not is_a(given, numbers.Integral) or given < 1:
        return hints["no_length"].format(given=shown(given))
    whole = over_texts()
    cut = whole.data.cut_to(min(int(given), LONGEST))
    if (chance := cut.chance_above(whole.longest_that_fits or 0, BATCH)) >= MOST_CHANCE:
        return hints["too_long"].format(given=f"{chance:.2g}")
    lost = 1 - cut.total / whole.data.total
    return hints["too_short"].format(given=format_percent(lost)) if lost > MOST_LOST else ""


def _logits(num_texts: int = EVALUATED) -> int:
    return num_texts * TOKENS * WORDS * FP32


EXERCISES = [
    Exercise(
        number="12.1",
        reference=_chance,
        mistakes={
            "one_text": lambda: NUM_LONG / NUM_TEXTS,
            "all_long": lambda: (NUM_LONG / NUM_TEXTS) ** BATCH,
            "updates": lambda: 1 / _chance(),
            "percent": lambda: 100 * _chance(),
        },
        fraction=0.01,
        unit="parts of 1",
    ),
    Exercise(
        number="12.2",
        reference=lambda: USUAL,
        mistakes={
            "too_long": lambda: 1800,
            "too_short": lambda: 256,
            "no_length": lambda: "1024 tokens",
        },
        judge=_judge_cut,
    ),
    Exercise(
        number="12.3",
        reference=lambda: 2 * _logits(),
        mistakes={
            "once": _logits,
            "no_batch": lambda: 2 * _logits() - _logits(BATCH),
            "one_batch": lambda: _logits(BATCH),
            "halves": lambda: _logits() // 2,
        },
    ),
]
