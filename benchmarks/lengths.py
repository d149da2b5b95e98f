"""How close are steps of lengths that were not recorded, and how long does a data set take?

For each setting a data set of 10,000 lengths is predicted from few recordings. Then the same data
set is asked for again, which records nothing (the fastest of three counts), and lengths that were
left out are predicted one by one. Not covered: measured steps, see `benchmarks.accuracy`.

    python -m benchmarks.lengths --quick --out lengths.json
"""

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import report
from memlab import StepConfig, Workload, predict, predict_lengths, workloads

NUM_SAMPLES, GOAL_SECONDS, GOAL_ERROR = 10_000, 2.0, 0.001
LEFT_OUT = (0.21, 0.34, 0.63, 0.88)  # of the longest sample
TIMEOUT_SECONDS, REPEATS = 600.0, 3
CHECKPOINTED = StepConfig(batch_size=4, checkpointing="blocks")
PLAIN = StepConfig(batch_size=4, accumulation_steps=2)


def settings(*, is_quick: bool) -> dict[str, tuple[Workload, StepConfig, str, int]]:
    """Return workload, config, device and longest sample of each setting."""
    gpt = workloads.get("gpt-small")
    made = {
        "gpt-small, cpu": (gpt, PLAIN, "cpu", 256),
        "gpt-small, t4": (gpt, PLAIN, "t4", 256),
    }
    if is_quick:
        return made
    tiny, large = workloads.finetune("llama-tiny"), workloads.finetune("llama-1b")
    return made | {
        "llama-tiny with lora, cpu": (tiny, PLAIN, "cpu", 512),
        "llama-1b with lora, rtx-4060": (large, CHECKPOINTED, "rtx-4060", 2048),
    }


def sample_lengths(longest: int) -> list[int]:
    """Return lengths as texts have them: many short ones, and few as long as is allowed."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 8), 0.7, NUM_SAMPLES)
    found: list[int] = np.clip(drawn, 8, longest).astype(int).tolist()
    return found


def compared(name: str, workload: Workload, config: StepConfig, device: str, longest: int) -> Any:
    """Return the row of one setting."""
    lengths = sample_lengths(longest)
    begin = time.perf_counter()
    found = predict_lengths(workload, lengths, config, device, timeout_seconds=TIMEOUT_SECONDS)
    recorded, seconds = time.perf_counter() - begin, []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        again = found.over(lengths)
        seconds.append(time.perf_counter() - begin)
    model = workload.resized(longest).build_model
    errors = []
    for share in LEFT_OUT:
        length = int(share * longest)
        own = replace(workload.resized(length), build_model=model)
        told = again.at(length)
        real = predict(own, config, device, timeout_seconds=TIMEOUT_SECONDS)
        errors += [
            abs(getattr(told, field) / getattr(real, field) - 1.0)
            for field in ("peak_allocated_bytes", "peak_reserved_bytes")
            if getattr(real, field)
        ]
    return {
        "setting": name,
        "recorded": len(found.curve.recorded),
        "seconds to record": recorded,
        "seconds after that": min(seconds),  # what else the machine does only adds to it
        "the slowest of them": max(seconds),
        "median error": statistics.median(errors),
        "largest error": max(errors),
    }


def main() -> None:
    """Compare every setting and judge the goals."""
    given, before = report.options(__file__, __doc__), report.environment()
    rows = []
    for name, setting in settings(is_quick=given.quick).items():
        rows.append(compared(name, *setting))
        print(rows[-1], flush=True)
    slowest = max(row["seconds after that"] for row in rows)
    worst = max(row["largest error"] for row in rows)
    report.show(f"{NUM_SAMPLES:,} lengths, and peaks at lengths that were left out", rows)
    print(f"{slowest:.2f} s after the recording: {report.verdict(slowest < GOAL_SECONDS)}")
    print(f"largest error {worst:.3%}: {report.verdict(worst <= GOAL_ERROR)}")
    report.write(given, before, {"slowest_seconds": slowest, "max_error": worst, "rows": rows})


if __name__ == "__main__":
    main()
