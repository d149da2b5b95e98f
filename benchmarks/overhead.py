"""Is the step time that `measure` reports the step's own?

One process, three workloads. Each round times three steps in random order: memlab's, as `measure`
times it, a bare hand-written loop, and a second bare loop for an A/A. All have models of their own.
Goal: the 95 % bootstrap interval of the median ratio to the bare loop lies in, or overlaps,
0.98-1.02. The A/A ratio shows how much of a deviation is this machine's noise.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import memlab
from benchmarks import report
from benchmarks.independent import BareStep
from memlab import StepConfig, Workload
from memlab.runtime.measure import timed_step
from memlab.techniques.step import build_step

WORKLOADS = ("gpt-small", "resnet-digits", "lstm-text")
GOAL = (0.98, 1.02)
NUM_ROUNDS, NUM_ROUNDS_QUICK = 48, 12  # multiples of 6: every order comes equally often
NUM_WARMUP = 3
SEED = 0


def rounds(timers: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each timer took, round by round; every order comes equally often."""
    orders = list(itertools.permutations(timers)) * -(-num_rounds // 6)
    random.Random(SEED).shuffle(orders)
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for order in orders[:num_rounds]:
        for name in order:
            seconds[name].append(timers[name]())
    return seconds


def compare(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and the paired ratios of memlab's and of the second loop to the first."""
    ratio, low, high = _ratio(seconds["memlab"], seconds["bare"])
    same, same_low, same_high = _ratio(seconds["bare again"], seconds["bare"])
    return {
        "pairs": len(seconds["bare"]),
        "memlab s": statistics.median(seconds["memlab"]),
        "bare s": statistics.median(seconds["bare"]),
        "ratio": ratio,
        "95 %": f"{low:.3f}-{high:.3f}",
        "A/A ratio": same,
        "A/A 95 %": f"{same_low:.3f}-{same_high:.3f}",
        "goal": report.verdict(low <= GOAL[1] and high >= GOAL[0]),
    }


def timers(workload: Workload) -> dict[str, Callable[[], float]]:
    """Return the three timed steps, warmed up."""
    config = StepConfig()
    definition = (workload.build_model, workload.make_batch, workload.compute_loss)
    sizes = (config.batch_size, config.accumulation_steps)
    step = build_step(workload, config, "cpu", seed=SEED)
    first, second = BareStep(*definition, *sizes), BareStep(*definition, *sizes)
    made = {
        "memlab": lambda: timed_step(step, SEED)[0],
        "bare": lambda: _seconds(first),
        "bare again": lambda: _seconds(second),
    }
    for timer in list(made.values()) * NUM_WARMUP:
        timer()
    return made


def _seconds(step: BareStep) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _ratio(over: list[float], under: list[float]) -> tuple[float, float, float]:
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return (statistics.median(ratios), *report.median_interval(ratios))


def main() -> None:
    """Time every workload."""
    given, before = report.options(__file__, __doc__), report.environment()
    rows, all_seconds = [], {}
    for name in WORKLOADS:
        num_rounds = NUM_ROUNDS_QUICK if given.quick else NUM_ROUNDS
        all_seconds[name] = rounds(timers(memlab.workloads.get(name)), num_rounds)
        rows.append({"workload": name, **compare(all_seconds[name])})
    report.show("step time reported by measure, over the same step in a bare loop", rows)
    report.write(given, before, {"goal": GOAL, "rows": rows, "seconds": all_seconds})


if __name__ == "__main__":
    main()
