"""How near are the peaks of scripts, run over fake tensors, to what a meter outside memlab counts?

Each script of `benchmarks/scripts` runs twice, unchanged, on this CPU: in plain PyTorch under
PyTorch's profiler, whose events of the allocator are summed, and by `memlab.run_script`. They are
written as people write such loops, and data and models are made up by `make_data.py`. Then each
runs for a card that is not here, which has no peak to compare with.

    python -m benchmarks.script_peaks --quick --out script_peaks.json
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import memlab
from benchmarks import report

SCRIPTS = Path(__file__).with_name("scripts")
MAKES_DATA = "make_data.py"
NUM_QUICK = 3
CARD = "rtx-4090"
ALL_STEPS = 10_000  # a script is compared with its whole run
MEDIAN_GOAL, MOST_GOAL = 0.001, 0.03
METER = """
import runpy, sys, torch
from torch._C._profiler import _EventType
sys.argv = sys.argv[1:]
with torch.profiler.profile(profile_memory=True) as profile:
    runpy.run_path(sys.argv[0], run_name="__main__")
found, live, held, peak = [], {}, 0, 0
def walk(events):
    for event in events:
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        walk(event.children)
walk(profile.profiler.kineto_results.experimental_event_tree())
for _, address, nbytes in sorted(found, key=lambda each: each[0]):
    if nbytes > 0:
        live[address] = nbytes
    held += nbytes if nbytes > 0 else -live.pop(address, 0)
    peak = max(peak, held)
print("peak", peak)
"""


def metered(script: str, *arguments: str, **options: Any) -> tuple[int, float]:
    """Return the peak that the profiler saw, in bytes, and the seconds of the whole run."""
    start = time.perf_counter()
    command = [sys.executable, "-c", METER, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, **options)
    return int(done.stdout.rsplit("peak ", 1)[1]), time.perf_counter() - start


def row_of(script: str) -> dict[str, Any]:
    """Return a script's peaks on this CPU, and whether it runs for a card."""
    peak, real_seconds = metered(script)
    start = time.perf_counter()
    found = memlab.run_script(script, device="cpu", steps=ALL_STEPS, progress=False)
    seconds = time.perf_counter() - start
    told = found.peak_allocated_bytes or 0
    on_card = memlab.run_script(script, device=CARD, progress=False)
    return {
        "script": script, "metered": peak, "run_script": told, "outcome": str(found.outcome),
        "error": abs(told - peak) / peak, "seconds": seconds, "plain seconds": real_seconds,
        CARD: on_card.message[:60],
    }  # fmt: skip


def main() -> None:
    """Compare all scripts."""
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = sorted(each.name for each in SCRIPTS.glob("*.py") if each.name != MAKES_DATA)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
        os.chdir(folder)
        subprocess.run([sys.executable, MAKES_DATA], check=True, capture_output=True)
        rows = [row_of(name) for name in (names[:NUM_QUICK] if given.quick else names)]
        os.chdir(Path(__file__).parent)
    errors = [row["error"] for row in rows]
    found = {
        "median error": statistics.median(errors), "largest": max(errors),
        "goal": report.verdict(
            statistics.median(errors) <= MEDIAN_GOAL and max(errors) <= MOST_GOAL
        ),
    }  # fmt: skip
    report.show("the peak of a script on this CPU, in bytes", rows)
    report.show("all of them", [found])
    report.write(given, before, {"scripts": rows, **found})


if __name__ == "__main__":
    main()
