"""litgpt's table of its own recipes on one A10G, by litgpt's own code: its rows, and predictions.

`benchmarks/data/finetune_a10g.csv` has the peak of allocated bytes of 26 runs, in units of 1e9
bytes, or "OOM": twelve sizes of Falcon, Gemma, Llama, Mistral, Phi, StableLM and TinyLlama in bf16
with LoRA, with a base in bf16 or in nf4. The rows name their recipes, and each row holds what its
recipe says of LoRA. The models and the loss are those of the installed litgpt; nothing is rebuilt,
fitted or chosen, but for what follows.

    pip install --no-deps litgpt==0.4.9
    python -m benchmarks.finetune --only hub

- Samples are cut at 512 tokens, and the longest is taken to be as long.
- Fabric turns the chunks of logits to fp32, and the loop holds them until it has the next.
- Layers in nf4 are those of `litgpt_layers.py`: the bitsandbytes of that time (0.42) kept the
  inputs of its products in an attribute, which lives as long as the graph, and the loop holds the
  graph until the next loss is there. So the inputs of two micro-batches are held at once. How long
  the one before the longest was, is not known: it is predicted as long, and as if nothing of it
  were held. What was measured lies between; the error is that of the first.
"""

import csv
import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import litgpt_table, report
from benchmarks.litgpt_layers import FourBitLinear
from benchmarks.litgpt_table import GB, OUT_OF_MEMORY
from memlab import StepConfig, StepResult, Workload
from memlab.devices import cards
from memlab.prediction.predict import predict_in_process

ROWS = Path(__file__).parent / "data" / "finetune_a10g.csv"
CARD = "a10"
HEAD_CHUNK = 128  # tokens
QUICK = 2
NAMES = {"falcon-7b": "falcon-7b", "gemma-2b": "Gemma-2b", "gemma-7b": "Gemma-7b",
         "gemma-2-9b": "Gemma-2-9b", "Meta-Llama-3-8B": "Llama-3-8B",
         "Meta-Llama-3.1-8B": "Llama-3.1-8B", "Mistral-7B-v0.2": "Mistral-7B-v0.1",
         "TinyLlama-1.1B-intermediate-step-1431k-3T": "tiny-llama-1.1b"}  # fmt: skip
"""The config of litgpt for a checkpoint that has another name; both Mistrals have one size."""

Row = dict[str, str]


class FourBit(FourBitLinear):
    """The layer with the attributes that litgpt's LoRA reads."""

    def __init__(self, layer: nn.Linear) -> None:
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, bias=has_bias, is_double=False)
        self.in_features, self.out_features = layer.in_features, layer.out_features


def read(path: Path = ROWS) -> list[Row]:
    """Return the rows."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def build(row: Row) -> nn.Module:
    """Return the model of a row, of which only the adapters are trained."""
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable  # installed by hand

    name = NAMES.get(row["checkpoint"], row["checkpoint"])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = GPT(Config.from_name(name, **json.loads(row["lora"])))
        if is_quantized(row):
            _quantize(model)
        mark_only_lora_as_trainable(model)
        model.max_seq_length = int(row["max_seq_length"])
    finally:
        torch.set_default_dtype(before)
    return model  # type: ignore[no-any-return]


def is_quantized(row: Row) -> bool:
    """Return whether the base of a row is in nf4."""
    return row["quantize"] == "bnb.nf4"


def _quantize(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, FourBit(child))
        else:
            _quantize(child)


def make_batch(num_tokens: int, num_samples: int) -> torch.Tensor:
    """Return tokens (num_samples, num_tokens)."""
    return torch.zeros(num_samples, num_tokens, dtype=torch.int64)


class Loss:
    """The loss of litgpt's loop, which holds its chunks of logits.

    Args:
        holds_last: whether the loss before is held, too, until this one is there.
    """

    def __init__(self, *, holds_last: bool) -> None:
        self.holds_last, self._last = holds_last, None

    def __call__(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of each token by those before it."""
        from litgpt.utils import chunked_cross_entropy  # installed by hand

        logits = [chunk.float() for chunk in model(tokens, lm_head_chunk_size=HEAD_CHUNK)]
        logits[-1] = logits[-1][..., :-1, :]
        loss: Any = chunked_cross_entropy(logits, tokens[..., 1:])
        loss.held = logits
        if self.holds_last:
            self._last = loss
        return loss  # type: ignore[no-any-return]


def predicted(row: Row, *, holds_last: bool) -> StepResult:
    """Return what memlab predicts of two micro-batches, both of the longest samples."""
    micro_batch, target = int(row["micro_batch_size"]), cards.resolve(CARD)
    assert target.card is not None
    workload = Workload(
        name=row["config"],
        build_model=partial(build, row),
        make_batch=partial(make_batch, int(row["max_seq_length"])),
        compute_loss=Loss(holds_last=holds_last),
    )
    made = predict_in_process(
        workload, StepConfig(batch_size=2 * micro_batch, accumulation_steps=2), target,
        seed=0, memory_limit=target.card.usable_bytes, report=lambda _: None,
    ).result  # fmt: skip
    assert made.outcome == "ok", made.message
    return made


def lines(quick: bool) -> Iterator[dict[str, Any]]:
    """Return each row beside its predictions, one by one.

    Raises:
        SystemExit: litgpt is not installed.
    """
    if importlib.util.find_spec("litgpt") is None:
        raise SystemExit("hub runs litgpt's own code: pip install --no-deps litgpt==0.4.9")
    for row in read()[: QUICK if quick else None]:
        yield line_of(row)


def line_of(row: Row) -> dict[str, Any]:
    """Return a line; errors are relative to what was measured, signed."""
    start, made = time.perf_counter(), predicted(row, holds_last=is_quantized(row))
    line = {
        "recipe": row["config"],
        "micro-batch": int(row["micro_batch_size"]),
        "measured GB": row["peak_gb"],
        "predicted GB": _gigabytes(made),
        "fits": made.fits,
        "error %": None,
        "nothing held: error %": None,
        "s": time.perf_counter() - start,
    }
    if row["peak_gb"] == OUT_OF_MEMORY:
        return line
    line["error %"] = _error(row, made)
    if is_quantized(row):
        line["nothing held: error %"] = _error(row, predicted(row, holds_last=False))
    return line


def _gigabytes(made: StepResult) -> float:
    assert made.peak_allocated_bytes is not None
    return made.peak_allocated_bytes / GB


def _error(row: Row, made: StepResult) -> float:
    return 100 * (_gigabytes(made) / float(row["peak_gb"]) - 1)


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how far off the lines are, and which of those that ran out of memory were foreseen."""
    trained = [line for line in lines if line["error %"] is not None]
    errors = [abs(line["error %"]) for line in trained]
    plain = [abs(line["error %"]) for line in trained if line["nothing held: error %"] is None]
    failed = [line for line in lines if line["error %"] is None]
    return {
        "rows": len(trained),
        "median %": float(np.median(errors)),
        "p95 %": float(np.quantile(errors, 0.95)),
        "max %": max(errors),
        "max % on bf16": max(plain, default=None),
        "out of memory": len(failed),
        "foreseen": sum(not line["fits"] for line in failed),
    }


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Print the lines and their summary."""
    report.show("litgpt's recipes on one A10G, by its own code, predicted without a card", lines)
    litgpt_table.show_summary(summary(lines))
