"""How long does the kernel take to answer a move of a slider of the panel?

A panel without a browser: its own state, threads and worker. A hand's `set` message moves one
slider by one position or two; it rests for a second once the answer is there, and then stays with
that slider or takes another. Batch, accumulation, budget and precision are moved; a move that the
panel refuses is left out. It begins with an empty cache of operators, after the panel has been left
alone for some seconds. "held ms" is how long the message holds its thread (median). Left out: the
page, which computes most of these moves itself and draws them all (`panel_page.py`).

Goals: the first answer with numbers after 60 ms (median) and 150 ms (95th percentile) for each
slider. It may be an estimate that the worker makes exact later. Then it counts only if its peak
(reserved bytes on a card, allocated bytes on a CPU) is within 3 % of the exact one in 95 % of the
moves.
"""

import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import memlab
from benchmarks import report
from memlab import StepConfig, StepResult
from memlab._panel.questions import Estimate
from memlab._panel.texts import as_json

MEDIAN_GOAL_MS, HIGH_GOAL_MS = 60.0, 150.0
CLOSE, CLOSE_GOAL = 0.03, 0.95
WORKLOADS, WORKLOADS_QUICK = ("gpt-small", "vit-digits"), ("gpt-small",)
DEVICES = ("cpu", "h200")
NUM_MOVES, NUM_MOVES_QUICK = 24, 6  # of each panel
ALONE_SECONDS = 8.0  # before the first move
REST_SECONDS = (0.8, 1.2)
STAYS = 0.6  # how often a hand stays with its slider
MOST_SECONDS = 60.0  # for an answer
PRECISIONS = ("as-built", "bf16-mixed", "bf16")
SIZES = {"batch_size": 64, "accumulation_steps": 16}  # the largest
BUDGETS = [round(0.05 * i, 2) for i in range(4, 21)]
SLIDERS = ("batch_size", "accumulation_steps", "memory_budget", "precision")


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A move and the answer that followed it.

    Attributes:
        slider: which one was moved.
        held: seconds that its message held a thread.
        seconds: until the first answer with numbers of the new settings was told.
        how: that answer was "predicted", "interpolated" or an "estimate".
        first: what it said.
        exact: what the worker predicts for these settings.
    """

    slider: str
    held: float
    seconds: float
    how: str
    first: StepResult
    exact: StepResult

    @property
    def error(self) -> float:
        """By how much the peak of the first answer was off, relative to the exact one."""
        first, exact = self.first.counted_peak, self.exact.counted_peak
        if first is None or exact is None:
            return 0.0 if first is exact else 1.0
        return first.nbytes / exact.nbytes - 1.0


def hand(seed: int) -> Iterator[tuple[str, StepConfig]]:
    """Yield the slider that is moved and the settings after it, without end."""
    drawn, config = random.Random(seed), StepConfig(batch_size=16)
    slider = SLIDERS[0]
    while True:
        slider = slider if drawn.random() < STAYS else drawn.choice(SLIDERS)
        places = list(_places(slider, config))
        here = places.index(getattr(config, slider))
        there = here + drawn.choice((-2, -1, -1, 1, 1, 2))
        if slider == "precision":
            there = (here + drawn.choice((1, 2))) % len(places)
        if 0 <= there < len(places):
            config = replace(config, **{slider: places[there]})
            yield slider, config


def _places(slider: str, config: StepConfig) -> Sequence[Any]:
    """Return the positions of a slider that are allowed with the other settings."""
    if slider == "precision":
        return PRECISIONS
    if slider == "memory_budget":
        return BUDGETS
    sizes = [2**i for i in range(8) if 2**i <= SIZES[slider]]
    if slider == "batch_size":
        return [size for size in sizes if size >= config.accumulation_steps]
    return [size for size in sizes if size <= config.batch_size]


def moves(name: str, device: str, count: int) -> list[Move]:
    """Return what moves of the sliders of a panel took."""
    workload = memlab.workloads.get(name)
    panel = memlab.panel(workload, device=device, config=StepConfig(batch_size=16))
    page, answered, pause = panel._page, threading.Event(), random.Random(1)
    firsts: list[tuple[str, float, float, Estimate]] = []

    def has_answered(_: Any = None) -> None:
        """Tell of an answer with what is known of the settings on screen."""
        if page._estimate is not None and page._estimate.question == panel._asked.question:
            answered.set()

    panel.widget.observe(has_answered, "answer")
    try:
        page.refresh()
        _wait(answered, f"{name} on {device}")
        time.sleep(ALONE_SECONDS)
        for move, (slider, config) in enumerate(itertools.islice(hand(seed=count), count)):
            answered.clear()
            fields = as_json({slider: getattr(config, slider)})
            start = time.perf_counter()
            panel._hear({"type": "set", "by": "a hand", "move": move, "fields": fields})
            held = time.perf_counter() - start
            _wait(answered, f"{name} on {device}, {config}")
            firsts.append((slider, held, time.perf_counter() - start, page._estimate))
            time.sleep(pause.uniform(*REST_SECONDS))

        answers = [page.forecasts.known(shown.question) for *_, shown in firsts]
    finally:
        panel.close()

    return [
        Move(
            slider=slider,
            held=held,
            seconds=seconds,
            how=str(shown.how),
            first=shown.result,
            exact=answer or memlab.predict(workload, shown.result.config, device),
        )
        for (slider, held, seconds, shown), answer in zip(firsts, answers, strict=True)
    ]


def _wait(answered: threading.Event, what: str) -> None:
    if not answered.wait(MOST_SECONDS):
        raise RuntimeError(f"no answer to {what} after {MOST_SECONDS:g} s")


def row(device: str, slider: str, found: Sequence[Move]) -> dict[str, Any]:
    """Return the line of a slider on a device."""
    seconds, errors = [move.seconds for move in found], [abs(move.error) for move in found]
    median, high = 1e3 * statistics.median(seconds), 1e3 * float(np.quantile(seconds, 0.95))
    close = statistics.mean(error <= CLOSE for error in errors)
    met = median <= MEDIAN_GOAL_MS and high <= HIGH_GOAL_MS and close >= CLOSE_GOAL
    return {
        "device": device,
        "slider": slider,
        "moves": len(found),
        "held ms": 1e3 * statistics.median(move.held for move in found),
        "median ms": median,
        "p95 ms": high,
        "within 3 %": close,
        "largest error %": 100 * max(errors),
        "estimates": sum(move.how == "estimate" for move in found),
        "over 150 ms": sum(1e3 * one > HIGH_GOAL_MS for one in seconds),
        "goal": report.verdict(met),
    }


def main() -> None:
    """Move the sliders of every panel."""
    given, before = report.options(__file__, __doc__), report.environment()
    names = WORKLOADS_QUICK if given.quick else WORKLOADS
    count = NUM_MOVES_QUICK if given.quick else NUM_MOVES
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEMLAB_CACHE"] = cache  # before the first prediction starts a process
        found = {
            device: [move for name in names for move in moves(name, device, count)]
            for device in DEVICES
        }

    rows = [
        row(device, slider, here)
        for device, every in found.items()
        for slider in SLIDERS
        if (here := [move for move in every if move.slider == slider])
    ]
    report.show(f"from a move to its first answer: {', '.join(names)}", rows)
    detail = [
        {
            "workload": move.first.workload_name,
            "device": device,
            "slider": move.slider,
            "config": str(move.first.config),
            "ms": 1e3 * move.seconds,
            "how": move.how,
            "error": move.error,
        }
        for device, every in found.items()
        for move in every
    ]
    report.write(given, before, {"sliders": rows, "moves": detail})


if __name__ == "__main__":
    main()
