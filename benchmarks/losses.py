"""What does the loss of a long vocabulary take, and what do packages make of it?

Each line is one fine-tuning by prediction on an A100 of 80 GB: its allocated peak with the loss as
the model computes it, in chunks (`loss_chunks`), and by the packages of `loss_kernel` that are
installed. Liger and cut cross-entropy need Triton to be imported; no card is used.

`--published` compares with the peaks that Liger publishes of its own fused linear cross entropy. It
was version 0.4.2 then, and other versions allocate otherwise, so the line names the one that is
installed. The rows are those of `benchmark/data/all_benchmark_data.csv` of linkedin/Liger-Kernel
(BSD-2-Clause, (c) 2024 LinkedIn Corporation): liger, full, A100-SXM4-80GB, 2024-11-22.
"""

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import report
from benchmarks.kernel_bodies import Kernel
from benchmarks.kernel_peaks import NUM_TURNS, record
from memlab import Outcome, StepConfig, workloads
from memlab.allocator.replay import AllocatorSettings, replay
from memlab.arguments.units import GIB, MIB
from memlab.config import LossKernel
from memlab.costs.cuda_kernels import effects
from memlab.devices import cards
from memlab.predicting.predict import predict_in_process
from memlab.recording.assembly import trace_of
from memlab.techniques.loss import fused_loss

CARD = "a100-80"
MODELS = {"qwen-0.5b": 151_936, "llama-1b": 128_256}
BATCH, TOKENS = 4, 2048
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"loss_chunks": 16},
    *({"loss_kernel": kernel} for kernel in LossKernel if kernel is not LossKernel.AS_BUILT),
)
WIDTH, CLASSES = 4096, 128_256
PUBLISHED = {4096: 4245.548, 8192: 4466.970, 16384: 4910.438, 32768: 5794.626}  # MiB by tokens


def peak_of(model: str, adapter: str, setting: dict[str, Any]) -> str:
    """Return the predicted peak in GiB and its phase, or why there is none."""
    workload = workloads.finetune(model, adapter=adapter, tokens=TOKENS)
    config = StepConfig(batch_size=BATCH, checkpointing="blocks", model_cache=False, **setting)
    target = cards.resolve(CARD)
    result = predict_in_process(
        workload, config, target, seed=0, memory_limit=None, report=lambda progress: None
    ).result
    if result.outcome is not Outcome.OK:
        return result.message
    assert result.peak_allocated_bytes is not None
    return f"{result.peak_allocated_bytes / GIB:.2f}"


def compared(quick: bool) -> list[dict[str, Any]]:
    """Return the peaks of each fine-tuning by setting of its loss."""
    rows = []
    for model, classes in list(MODELS.items())[: 1 if quick else None]:
        for adapter in ("lora", "none")[: 1 if quick else None]:
            row: dict[str, Any] = {"model": model, "classes": classes, "adapter": adapter}
            for setting in SETTINGS:
                name = "as built" if not setting else str(*setting.values())
                name = "16 chunks" if name == "16" else name
                row[name] = peak_of(model, adapter, setting)
            rows.append(row)
    return rows


def _liger(tokens: int) -> Callable[[torch.device], Kernel]:
    """Return what makes Liger's head and loss, as its benchmark does."""

    def make(device: torch.device) -> Kernel:
        # the benchmark made the head of the plain loss, too, and did not use it
        other, head = (
            nn.Linear(WIDTH, CLASSES, bias=False, dtype=torch.bfloat16).to(device) for _ in range(2)
        )
        fused_loss.apply(nn.Sequential(head), LossKernel.LIGER)
        x = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
        labels = torch.randint(CLASSES, (tokens, 1), device=device).squeeze(1)
        loss = nn.CrossEntropyLoss()
        return Kernel(
            forward=lambda: loss(head(x), labels),
            backward=lambda y: y.backward(),
            kept=(other.weight,),
        )

    return make


def published() -> list[dict[str, Any]]:
    """Return what is predicted for the installed version beside what was measured."""
    card = cards.find(CARD)
    assert card is not None
    rows = []
    for tokens, measured in PUBLISHED.items():
        recording = record(_liger(tokens), "full", card)
        trace = trace_of(recording, effects(recording, card))
        allocated = replay(trace.address, trace.nbytes, AllocatorSettings()).allocated_bytes
        steps = np.array([interval.step for interval in recording.intervals])
        in_last = steps[trace.interval] == NUM_TURNS - 1
        mib = int(allocated[in_last].max(initial=0)) / MIB
        rows.append(
            {
                "tokens": tokens,
                "installed": version("liger-kernel"),
                "measured MiB (0.4.2)": measured,
                "predicted MiB": mib,
                "off by MiB": mib - measured,
                "error %": 100 * (mib / measured - 1),
            }
        )
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--published", action="store_true", help="Liger's own peaks instead")
    parser.add_argument("--quick", action="store_true", help="one model, one adapter")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/losses.json"))
    given = parser.parse_args()
    before = report.environment()
    rows = published() if given.published else compared(given.quick)
    name = "published" if given.published else "compared"
    unit = "" if given.published else f", GiB allocated on {CARD}, {BATCH} x {TOKENS} tokens"
    report.show(f"the loss of long vocabularies{unit}", rows)
    report.write(report.Options(quick=given.quick, out=given.out), before, {name: rows})


if __name__ == "__main__":
    main()
