"""What does the loss of a long vocabulary take, and what do packages make of it?

The first table is of the loss alone, in bf16 on an A100 of 80 GB: the most that it holds at once,
from the head to the gradients of the head and of the hidden states, beside the head and the hidden
states themselves. The loss as built takes the logits to fp32 first, as transformers does. The
second is the predicted peak of whole fine-tunings with checkpointed blocks. Each has the loss as
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
from memlab._util.units import GIB, MIB
from memlab.config import LossKernel
from memlab.cost_model.cuda_kernels import effects
from memlab.devices import cards
from memlab.errors import MemlabError
from memlab.memory.replay import AllocatorSettings, replay
from memlab.prediction.predict import predict_in_process
from memlab.techniques.loss import chunked_loss, fused_loss
from memlab.tracing.assembly import trace_of

CARD = "a100-80"
MODELS = {"qwen-0.5b": (151_936, 896), "llama-1b": (128_256, 2048)}  # classes, features
BATCH, TOKENS = 4, 2048
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"loss_chunks": 16},
    *({"loss_kernel": kernel} for kernel in LossKernel if kernel is not LossKernel.AS_BUILT),
)
WIDTH, CLASSES = 4096, 128_256
PUBLISHED = {4096: 4245.548, 8192: 4466.970, 16384: 4910.438, 32768: 5794.626}  # MiB by tokens


def name_of(setting: dict[str, Any]) -> str:
    """Return the heading of a column."""
    if "loss_chunks" in setting:
        return f"{setting['loss_chunks']} chunks"
    return str(setting.get("loss_kernel", "as built"))


def alone(classes: int, width: int, is_frozen: bool, setting: dict[str, Any]) -> str:
    """Return the GiB that one loss and its backward hold, or why they cannot be predicted."""

    def make(device: torch.device) -> Kernel:
        head = nn.Linear(width, classes, bias=False, dtype=torch.bfloat16).to(device)
        head.weight.requires_grad_(not is_frozen)
        if "loss_chunks" in setting:
            chunked_loss.apply(nn.Sequential(head), setting["loss_chunks"])
        elif setting:
            fused_loss.apply(nn.Sequential(head), setting["loss_kernel"])
        shape = BATCH * TOKENS, width
        x = torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        labels = torch.zeros(len(x), dtype=torch.long, device=device)
        loss = nn.CrossEntropyLoss()
        return Kernel(
            forward=lambda: loss(head(x).float(), labels), backward=lambda y: y.backward()
        )

    try:
        first = allocated_bytes(make, turn=0)
    except MemlabError as error:
        return str(error)
    own = 2 * width * (classes + BATCH * TOKENS) + 8 * BATCH * TOKENS
    return f"{(first - own) / GIB:.3f}"


def allocated_bytes(make: Callable[[torch.device], Kernel], turn: int) -> int:
    """Return the peak of one turn of a kernel with its backward."""
    card = cards.find(CARD)
    assert card is not None
    recording = record(make, "full", card)
    trace = trace_of(recording, effects(recording, card))
    allocated = replay(trace.address, trace.nbytes, AllocatorSettings()).allocated_bytes
    steps = np.array([interval.step for interval in recording.intervals])
    return int(allocated[steps[trace.interval] == turn].max(initial=0))


def of_losses(quick: bool) -> list[dict[str, Any]]:
    """Return what each loss holds, of the sizes of each model, with its head frozen and trained."""
    rows = []
    for model, (classes, width) in list(MODELS.items())[: 1 if quick else None]:
        for is_frozen in (True, False):
            head = "frozen" if is_frozen else "trained"
            row: dict[str, Any] = {"sizes of": model, "classes": classes, "head": head}
            for setting in SETTINGS:
                row[name_of(setting)] = alone(classes, width, is_frozen, setting)
            rows.append(row)
    return rows


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
    for model, (classes, _) in list(MODELS.items())[: 1 if quick else None]:
        for adapter in ("lora", "none")[: 1 if quick else None]:
            row: dict[str, Any] = {"model": model, "classes": classes, "adapter": adapter}
            for setting in SETTINGS:
                row[name_of(setting)] = peak_of(model, adapter, setting)
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
    rows = []
    for tokens, measured in PUBLISHED.items():
        mib = allocated_bytes(_liger(tokens), turn=NUM_TURNS - 1) / MIB
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
    found: dict[str, Any] = {}
    if given.published:
        found["published"] = published()
        report.show(
            "Liger's fused linear cross entropy, as published and predicted", found["published"]
        )
    else:
        sizes = f"GiB allocated on {CARD}, {BATCH} x {TOKENS} tokens"
        found["alone"] = of_losses(given.quick)
        report.show(f"the loss alone, {sizes}", found["alone"])
        found["steps"] = compared(given.quick)
        report.show(f"whole steps, {sizes}", found["steps"])
    report.write(report.Options(quick=given.quick, out=given.out), before, found)


if __name__ == "__main__":
    main()
