"""How far off is memlab on the table of Lightning's guide to FSDP, of a transformer on two A100?

The guide (docs/source-pytorch/advanced/model_parallel/fsdp.rst of Lightning, "A100 40GB GPUs,
Lightning 2.1 and PyTorch 2.1") trains `Transformer(nlayers=32, nhid=4096, ninp=1024, nhead=64)` of
Lightning's demos on WikiText-2 by Adam. What the guide leaves open is assumed as its code has it:

- 32 encoder and 32 decoder layers, 33,278 words, dropout of 0.2: about a billion parameters;
- fp32, without TF32; one sample of 35 tokens on each card;
- "Memory (MB)" is the peak of allocated bytes in `torch.cuda.memory_summary`, which counts MiB;
- the two A100 have NVLink (SXM form), since the guide does not say.

Nothing is judged. What differs for certain: the guide's FSDP is FSDP1, which gathers all parameters
of a layer in one flat tensor; memlab's zero2 and zero3 are FSDP2. The units of both are the layers
of encoder and decoder. A step of 35 tokens waits for the host, whose time memlab takes as 40 us
an operator and as nothing for Lightning's own loop. NO_SHARD is not predicted, since it is FSDP1's
own form of ddp, and the row with CPU offload is not run: of such a step memlab predicts the memory
alone.

    python -m benchmarks.lightning_table --out lightning_table.json
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import report
from memlab import StepConfig, StepResult, Workload
from memlab._util.units import MIB
from memlab.devices import cards
from memlab.prediction.predict import predict_in_process

CLUSTER, NUM_CARDS = "2x-a100-40", 2
WORDS, WIDTH, INNER, HEADS, LAYERS, DROPOUT, TOKENS = 33_278, 1024, 4096, 64, 32, 0.2, 35
QUICK_LAYERS = 2
TABLE: dict[str, tuple[str | None, float, float]] = {
    "DDP": ("ddp", 23_125, 4.31),
    "NO_SHARD": (None, 19_296, 3.04),
    "SHARD_GRAD_OP": ("zero2", 11_772, 3.61),
    "FULL_SHARD": ("zero3", 9_627, 3.19),
    "FULL_SHARD, CPU offload": (None, 2_790, 0.02),
}
"""For each row of the guide memlab's strategy, MB and iterations per second."""


class Translator(nn.Module):
    """PyTorch's own encoder and decoder between an embedding and a head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(DROPOUT)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, num_layers, num_layers, INNER, DROPOUT, batch_first=True
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of probabilities (n * tokens, words) of tokens (n, tokens)."""
        count = target.shape[1]
        ahead = torch.ones(count, count, device=target.device).triu(1) == 1
        mask = torch.zeros(count, count, device=target.device).masked_fill(ahead, -math.inf)
        given, wanted = (
            self.dropout(self.embedding(tokens) * math.sqrt(WIDTH)) for tokens in (source, target)
        )
        out = self.head(self.transformer(given, wanted, tgt_mask=mask))
        return functional.log_softmax(out, dim=-1).flatten(0, 1)


def workload(num_layers: int) -> Workload:
    """Return the task of the guide with this many layers on either side."""
    return Workload(
        name="transformer of Lightning's guide",
        build_model=lambda: Translator(num_layers),
        make_batch=lambda n: (torch.randint(WORDS, (n, TOKENS)), torch.randint(WORDS, (n, TOKENS))),
        compute_loss=lambda model, batch: functional.nll_loss(model(*batch), batch[1].flatten()),
    )


def compared(row: str, num_layers: int) -> dict[str, Any]:
    """Return a row of the table beside what is predicted of it; errors are signed."""
    strategy, measured_mb, measured_speed = TABLE[row]
    found: dict[str, Any] = {
        "guide": row, "memlab": strategy or "not predicted", "MB": measured_mb,
        "predicted MiB": None, "error %": None,
        "steps/s": measured_speed, "predicted": None, "why": "",
    }  # fmt: skip
    if strategy is None:
        return found
    config = StepConfig(
        batch_size=NUM_CARDS, precision="fp32", optimizer="adam", sharding=strategy,
        world_size=NUM_CARDS,
    )  # fmt: skip
    made = predicted(config, num_layers)
    if made.peak_allocated_bytes is None:
        return found | {"why": made.message}
    return found | {
        "predicted MiB": made.peak_allocated_bytes / MIB,
        "error %": 100 * (made.peak_allocated_bytes / MIB / measured_mb - 1),
        "predicted": None if made.step_seconds is None else 1 / made.step_seconds,
        "stated +-%": 100 * (made.uncertainty or {}).get("step_seconds", 0.0),
        "at the peak": {kind: size / MIB for kind, size in (made.peak_by_category or {}).items()},
    }


def predicted(config: StepConfig, num_layers: int) -> StepResult:
    """Return what is predicted of a rank."""
    return predict_in_process(
        workload(num_layers), config, cards.resolve(CLUSTER),
        seed=0, memory_limit=None, report=lambda _: None,
    ).result  # fmt: skip


def main() -> None:
    """Print the guide's table beside memlab's."""
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    torch.set_num_threads(1)
    num_layers = QUICK_LAYERS if given.quick else LAYERS
    rows = [compared(row, num_layers) for row in TABLE]
    report.show(f"a transformer of {num_layers} + {num_layers} layers on {CLUSTER}", rows)
    report.write(given, before, {"num_layers": num_layers, "rows": rows})


if __name__ == "__main__":
    main()
