"""How far off is the time of a step of BERT on one card, on 13 kinds of cards from 29 machines?

`benchmarks/data/bert_ms.csv`: NVIDIA's fine-tuning of BERT base and large on SQuAD, 384 tokens, as
others timed it ("FP32", which NVIDIA's containers compute in TF32). Nothing in memlab was fitted to
these rows. The model is transformers' own with plain attention, as that code had it; the optimizer
is PyTorch's AdamW without foreach, with clipped gradients. That code's optimizer, too, updates one
tensor after the other, so that the card waits for the host.
"""

import csv
import functools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memlab
from benchmarks import report
from memlab import StepConfig, StepResult

DATA = Path(__file__).resolve().parent / "data" / "bert_ms.csv"
TOKENS, WORDS = 384, 30522
SIZES: dict[str, dict[str, int]] = {
    "bert-base": {},
    "bert-large": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}  # fmt: skip


def workload(model: str) -> memlab.Workload:
    """Return the fine-tuning of a BERT that answers questions by a span of the text."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertForQuestionAnswering

        return BertForQuestionAnswering(BertConfig(**SIZES[model], attn_implementation="eager"))

    def batch(n: int) -> dict[str, torch.Tensor]:
        words = torch.randint(WORDS, (n, TOKENS))
        at = {f"{end}_positions": torch.randint(TOKENS, (n,)) for end in ("start", "end")}
        return {"input_ids": words, "attention_mask": torch.ones_like(words), **at}

    return memlab.Workload(
        name=model, build_model=build, make_batch=batch,
        compute_loss=lambda made, given: made(**given).loss,
    )  # fmt: skip


@functools.cache
def predicted(card: str, model: str, batch: int) -> StepResult:
    """Return the predicted step."""
    config = StepConfig(
        batch_size=batch, precision="tf32", optimizer="adamw",
        optimizer_implementation="single-tensor", max_grad_norm=1.0,
    )  # fmt: skip
    return memlab.require_ok(memlab.predict(workload(model), config, card, progress=False))


def lines(quick: bool) -> list[dict[str, Any]]:
    """Return a line for each row of the data."""
    with DATA.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows[:: 16 if quick else 1]:
        made = predicted(row["card"], row["model"], int(row["batch"]))
        assert made.step_seconds is not None
        found.append({
            "card": row["card"], "model": row["model"], "batch": int(row["batch"]),
            "system": row["system"], "ms": float(row["step_ms"]),
            "predicted ms": 1e3 * made.step_seconds,
            "off %": 1e5 * made.step_seconds / float(row["step_ms"]) - 100,
            "stated %": 100 * (made.uncertainty or {})["step_seconds"],
            "source": row["source"].partition(":")[0],
        })  # fmt: skip
    return found


def by_card(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the errors of each card, and of all."""
    groups = {card: [each for each in given if each["card"] == card]
              for card in dict.fromkeys(each["card"] for each in given)}  # fmt: skip
    found = []
    for name, own in [*groups.items(), ("all", given)]:
        off = [each["off %"] for each in own]
        found.append({
            "card": name, "rows": len(own), "median off %": statistics.median(off),
            "median |off| %": statistics.median(map(abs, off)),
            "9 of 10 within %": float(np.quantile(np.abs(off), 0.9)),
            "within what is stated %": 100 * statistics.mean(
                abs(1 / (1 + each["off %"] / 100) - 1) <= each["stated %"] / 100 for each in own
            ),
        })  # fmt: skip
    return found


def main() -> None:
    """Print the steps and the errors of each card."""
    options, before = report.options(__file__, __doc__ or ""), report.environment()
    found = lines(options.quick)
    report.show("steps of BERT, fp32 as NVIDIA's containers compute it", [
        {name: value for name, value in each.items() if name != "source"} for each in found
    ])  # fmt: skip
    cards = by_card(found)
    report.show("by card", cards)
    report.write(options, before, {"steps": found, "cards": cards})


if __name__ == "__main__":
    main()
