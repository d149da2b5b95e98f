"""How long did the host take from one operator to the next? `python -m benchmarks.host_pace`.

Steps of torchvision's models at a batch of 12 on two cards (`benchmarks/data/convnet_ms.csv`). The
deeper of two ResNets with kernels of the same sizes has more operators; where its kernels take less
than the step did, the host set the pace: the slope of the milliseconds over the operators. Beside
it what memlab predicts of the kernels alone. The packages are those of `gpu_peaks.py`.
"""

import argparse
import csv
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memlab
from benchmarks import gpu_peaks, report
from benchmarks.public_runs import use_packages
from memlab.cost_model.targets import LAST_STEP, seconds_of_intervals
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import resolve
from memlab.trace import Phase

DATA = Path(__file__).resolve().parent / "data" / "convnet_ms.csv"
SOURCE = "ryujaehun/pytorch-gpu-benchmark@3f47a9e2"
BATCH = 12
OF_ONE_PACE = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


def _batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 224, 224), torch.randint(1000, (n,))


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@functools.cache
def step_of(card: str, number_format: str, model: str) -> tuple[float, int]:
    """Return the predicted milliseconds of the kernels without the update, and their number."""
    from torchvision import models  # of the packages

    workload = memlab.Workload(
        name=model, build_model=getattr(models, model), make_batch=_batch, compute_loss=_loss
    )
    config = memlab.StepConfig(batch_size=BATCH, optimizer="sgd", precision=number_format)
    found = from_traced_step(
        _kernels, workload, config, resolve(card), seed=0, report=lambda _: None,
        purpose="for its host",
    )  # fmt: skip
    if isinstance(found, Failure):
        raise RuntimeError(f"{model}: {found.message}")
    return found


def _kernels(step: TracedStep) -> tuple[float, int]:
    recording = step.program.recording
    seconds = seconds_of_intervals(recording, step.kernels())
    assert seconds is not None
    own = [
        number
        for number, interval in enumerate(recording.intervals)
        if interval.step == LAST_STEP and interval.phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    count = sum(operator.interval in own for operator in recording.operators)
    return 1e3 * float(seconds[own].sum()), count


def lines(quick: bool) -> list[dict[str, Any]]:
    """Return a line for each row of the data."""
    found = []
    with DATA.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if quick and row["model"] not in OF_ONE_PACE[:2]:
            continue
        kernels, count = step_of(row["card"], row["format"], row["model"])
        found.append({
            "card": row["card"], "format": row["format"], "model": row["model"],
            "ms": float(row["median_ms"]), "kernels ms": kernels, "operators": count,
        })  # fmt: skip
    return found


def paces(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the slope of the time of ResNets over their operators, by card and format."""
    found = []
    for card, number_format in sorted({(line["card"], line["format"]) for line in given}):
        own = [
            line
            for line in given
            if (line["card"], line["format"]) == (card, number_format)
            and line["model"] in OF_ONE_PACE
        ]
        count, taken = (np.array([line[name] for line in own]) for name in ("operators", "ms"))
        slope = float(np.polyfit(count, taken, 1)[0])
        found.append({
            "card": card, "format": number_format, "rows": len(own), "us an operator": 1e3 * slope,
            "kernels' share %": 100 * sum(x["kernels ms"] for x in own) / sum(x["ms"] for x in own),
        })  # fmt: skip
    return found


def main() -> None:
    """Print the steps and the paces."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    packages = Path("build/public")
    parser.add_argument("--packages", type=Path, default=packages, help=gpu_peaks.PACKAGES_HELP)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/host_pace.json"))
    parser.add_argument("--quick", action="store_true", help="two models of each")
    given = parser.parse_args()
    before = report.environment()
    use_packages(given.packages)
    found = lines(given.quick)
    report.show("steps of convnets at a batch of 12", found)
    slopes = paces(found)
    report.show("pace of the host, by ResNets", slopes)
    report.write(report.Options(quick=given.quick, out=given.out), before, {
        "steps": found, "paces": slopes,
    })  # fmt: skip


if __name__ == "__main__":
    main()
