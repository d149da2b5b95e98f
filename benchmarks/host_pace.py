"""How long does the host take from one operator to the next? `python -m benchmarks.host_pace`.

Steps of torchvision's models at a batch of 12 on three machines (`benchmarks/data/convnet_ms.csv`):
all gradients are set to zero, then forward, loss and backward, which adds to them. Here that is the
second of two micro-batches, after one more operator for each parameter, at the pace of an update.
The copy of the batch from ordinary memory, which is timed too, is not known and not counted.

The deeper of two ResNets has more operators; where its kernels alone take less than half of the
step, the host sets the pace: the slope of the milliseconds over the operators, from which the copy
drops out. For each card the pace of the others is their median. The packages are those of
`gpu_peaks.py`.
"""

import csv
import dataclasses
import functools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memlab
from benchmarks import report
from benchmarks.public_runs import options_with_packages, use_packages
from memlab.cost_model.overlap import HOST_SECONDS, UPDATE_SECONDS
from memlab.cost_model.targets import LAST_STEP
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import resolve
from memlab.trace import Phase

DATA = Path(__file__).resolve().parent / "data" / "convnet_ms.csv"
SOURCE = "ryujaehun/pytorch-gpu-benchmark@3f47a9e2"
BATCH = 12
OF_ONE_PACE = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
MOST = 0.5  # that kernels alone may take of a step that waits for its host
OWN = 1e6 * HOST_SECONDS
PACES = (0.0, *map(float, range(20, 65, 5)))  # microseconds; with the first the kernels decide
Line = dict[str, Any]


def _batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 224, 224), torch.randint(1000, (n,))


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def workload(model: str) -> memlab.Workload:
    """Return the training of one of torchvision's models on images of 224 x 224."""
    from torchvision import models  # of the packages

    return memlab.Workload(
        name=model, build_model=getattr(models, model), make_batch=_batch, compute_loss=_loss
    )


@functools.cache
def recorded(model: str, number_format: str, cards: tuple[str, ...]) -> dict[str, Line]:
    """Return milliseconds by pace and card, with what is stated and the operators."""
    from torchvision import models  # of the packages

    config = memlab.StepConfig(
        batch_size=2 * BATCH, accumulation_steps=2, optimizer="sgd", precision=number_format
    )
    parameters = sum(1 for _ in getattr(models, model)().parameters())
    found: dict[str, Line] = {}
    for card in cards:
        made = from_traced_step(
            functools.partial(_at_each_pace, parameters=parameters), workload(model), config,
            resolve(card), seed=0, report=lambda _: None, purpose="for its host",
        )  # fmt: skip
        if isinstance(made, Failure):
            raise RuntimeError(f"{model}: {made.message}")
        found[card] = made
    return found


def _at_each_pace(step: TracedStep, *, parameters: int) -> Line:
    intervals = step.program.recording.intervals
    own = [
        number
        for number, interval in enumerate(intervals)
        if (interval.step, interval.micro_batch) == (LAST_STEP, 1)
        and interval.phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    found: Line = {}
    for pace in PACES:
        target = dataclasses.replace(step.target, host_seconds=max(1e-6 * pace, 1e-12))
        kernels = dataclasses.replace(step, target=target).kernels()
        overlap = kernels.overlap
        assert overlap is not None
        assert kernels.seconds is not None
        seconds = float(overlap.interval_seconds[own].sum())
        found[str(pace)] = 1e3 * (seconds + UPDATE_SECONDS * parameters)
        if pace == OWN:
            found["stated"] = 100 * overlap.half_width
            found["zeroing ms"] = 1e3 * UPDATE_SECONDS * parameters
            found["operators"] = sum(
                operator.interval in own and bool(seconds > 0)
                for operator, seconds in zip(
                    step.program.recording.operators, kernels.seconds, strict=True
                )
            )
    return found


def lines(quick: bool) -> list[Line]:
    """Return a line for each row of the data."""
    with DATA.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cards = tuple(dict.fromkeys(row["card"] for row in rows))
    found = []
    for row in rows:
        if quick and row["model"] not in OF_ONE_PACE[:2]:
            continue
        made = recorded(row["model"], row["format"], cards)[row["card"]]
        found.append({
            "card": row["card"], "format": row["format"], "model": row["model"],
            "ms": float(row["median_ms"]), **made,
        })  # fmt: skip
    return found


def off(line: Line, pace: float) -> float:
    """Return by how many percent a predicted time is off."""
    return float(100 * (line[str(pace)] / line["ms"] - 1))


def paces(given: list[Line]) -> dict[str, float]:
    """Return the microseconds of each card and format: a slope; none where kernels decide."""
    found = {}
    for card, number_format in sorted({(line["card"], line["format"]) for line in given}):
        own = [
            line
            for line in given
            if (line["card"], line["format"]) == (card, number_format)
            and line["model"] in OF_ONE_PACE
        ]
        if sum(line[str(PACES[0])] for line in own) <= MOST * sum(line["ms"] for line in own):
            count = np.array([line["operators"] for line in own])
            taken = np.array([line["ms"] - line["zeroing ms"] for line in own])
            found[f"{card} {number_format}"] = 1e3 * float(np.polyfit(count, taken, 1)[0])
    return found


def by_card(given: list[Line]) -> list[Line]:
    """Return the errors of each card and format with the pace of the other cards."""
    known, found = paces(given), []
    for card, number_format in sorted({(line["card"], line["format"]) for line in given}):
        rows = [x for x in given if (x["card"], x["format"]) == (card, number_format)]
        waiting = [x for x in rows if x[str(PACES[0])] <= MOST * x["ms"]]
        others = statistics.median(v for name, v in known.items() if not name.startswith(card))
        near = min(PACES, key=lambda pace: abs(pace - others))
        found.append({
            "card": card, "format": number_format, "rows": len(rows), "waiting": len(waiting),
            "own us": known.get(f"{card} {number_format}"), "others' us": others,
            **{f"of these: {name} off %": statistics.median(off(x, at) for x in waiting)
               for name, at in (("kernels", PACES[0]), ("by others", near), ("memlab", OWN))
               if waiting},
            "all: memlab off %": statistics.median(off(x, OWN) for x in rows),
            "within what is stated %": 100 * statistics.mean(
                abs(1 / (1 + off(x, OWN) / 100) - 1) <= x["stated"] / 100 for x in rows
            ),
        })  # fmt: skip
    return found


def main() -> None:
    """Print the steps and the paces."""
    given = options_with_packages(__file__, __doc__ or "")
    before = report.environment()
    use_packages(given.packages)
    found = lines(given.quick)
    report.show("steps of convnets at a batch of 12", [
        {**{name: line[name] for name in ("card", "format", "model", "ms", "stated")},
         "memlab's off %": off(line, OWN)}
        for line in found
    ])  # fmt: skip
    cards = by_card(found)
    report.show("by card, and by the pace of the other cards", cards)
    report.write(report.Options(quick=given.quick, out=given.out), before, {
        "steps": found, "cards": cards,
    })  # fmt: skip


if __name__ == "__main__":
    main()
