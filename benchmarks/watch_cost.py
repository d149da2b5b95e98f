"""What `memlab.watch` costs a step on the CPU: the same steps with and without it, in turns.

Pairs of blocks of steps, ABBA, on a small step (about 5 ms) and a medium one (about 100 ms). The
ratio of a pair is that of the medians of its blocks; the median of the ratios is judged. Goal: at
most 1.01.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memlab
from benchmarks.report import environment, median_interval, options, show, verdict, write

GOAL = 1.01
CASES = {"small": (512, 256, 40, 60), "medium": (1024, 1536, 6, 25)}
"""Width, batch, steps of a block, pairs."""


def main() -> None:
    """Time both cases and write the numbers."""
    given = options(__file__, __doc__ or "")
    before = environment()
    rows = [measured(name, given.quick) for name in CASES]
    show("a step with the watch over one without", rows)
    met = all(row["ratio"] <= GOAL for row in rows)
    print(f"goal: at most {GOAL}: {verdict(met)}")
    write(given, before, {"goal": GOAL, "rows": rows})


def measured(name: str, quick: bool) -> dict[str, Any]:
    """Return the ratio of one case."""
    width, batch, num_steps, num_pairs = CASES[name]
    step = made(width, batch)
    block(step, num_steps, None)
    ratios, plain = [], []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(3 if quick else num_pairs):
            order = (None, folder) if pair % 2 else (folder, None)
            seconds = {which: block(step, num_steps, which) for which in order}
            ratios.append(seconds[folder] / seconds[None])
            plain.append(seconds[None])
    low, high = median_interval(ratios)
    return {
        "case": name,
        "step_seconds": statistics.median(plain),
        "pairs": len(ratios),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }


def made(width: int, batch: int) -> Callable[[], None]:
    """Return a step of a plain network with AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(width, width), nn.ReLU())])
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def block(step: Callable[[], None], num_steps: int, folder: str | None) -> float:
    """Return the median time of a step; with a folder, under the watch."""
    times = []
    with contextlib.nullcontext() if folder is None else memlab.watch(folder):
        for _ in range(num_steps):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


if __name__ == "__main__":
    main()
