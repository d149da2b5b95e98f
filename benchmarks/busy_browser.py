"""Do the browser tests pass on a busy machine?

The browser tests run as `make test` runs them, beside processes that count without end. What is
told is the time of each run, and each test that failed. A run takes minutes, so each is written as
soon as it ends, and added to the runs of the JSON file, whichever command they come from:
`--runs 1` five times is the same as `--runs 5` once. Without the file it begins anew.
Goal: no failure in 5 runs beside 8 processes.

Beside the JSON lie the output of pytest of the last run, and in `build/ui` what the page looked
like where a test failed. Left out: how fast the panel is on a busy machine.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report

ROOT = Path(__file__).parents[1]
NUM_RUNS, NUM_BUSY = 5, 8
PYTEST = ("-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")  # as make test
TESTS = "tests/system/browser"
NOT_PASSED = ("failure", "error")


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep as many processes at work meanwhile, each of which would take a core of its own."""
    working = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield working
    finally:
        for process in working:
            process.kill()
            process.wait()


def run_once(log: Path) -> dict[str, Any]:
    """Run the browser tests once; return the time and what failed."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        junit = Path(folder) / "junit.xml"
        subprocess.run(
            [sys.executable, *PYTEST, f"--junit-xml={junit}", TESTS],
            cwd=ROOT,
            # a browser that is not there is a failure; waiting threads leave the cores to others
            env={**os.environ, "MEMLAB_REQUIRE_BROWSER": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        if not junit.exists():
            raise RuntimeError(f"pytest did not run:\n{log.read_text()[-2000:]}")
        return {"seconds": time.perf_counter() - begin, **outcomes(junit.read_text())}


def outcomes(junit: str) -> dict[str, Any]:
    """Return how many tests ran, and the first line of each failure by its test."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    failures = {
        f"{case.get('classname')}::{case.get('name')}": (found.get("message") or "").split("\n")[0]
        for case in cases
        for found in case
        if found.tag in NOT_PASSED
    }
    return {"tests": len(cases), "failures": failures}


def rows_of_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each run."""
    return [
        {
            "run": number,
            "beside": run["busy"],
            "tests": run["tests"],
            "failed": len(run["failures"]),
            "seconds": run["seconds"],
        }
        for number, run in enumerate(runs, start=1)
    ]


def rows_of_failures(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each test that ever failed, the most frequent first."""
    counts = Counter(name for run in runs for name in run["failures"])
    last = {name: said for run in runs for name, said in run["failures"].items()}
    return [
        {"test": name, "failed": count, "of": len(runs), "last": last[name]}
        for name, count in counts.most_common()
    ]


def main() -> None:
    """Run the browser tests some times more, and show all runs so far."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="how many more runs")
    parser.add_argument("--busy", type=int, default=NUM_BUSY, help="processes beside them")
    default = Path("build/benchmarks/busy_browser.json")
    parser.add_argument("--out", type=Path, default=default, help="the runs so far, as JSON")
    given = parser.parse_args()

    given.out.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(given.out.read_text())["runs"] if given.out.exists() else []
    for _ in range(given.runs):
        before = report.environment()
        with busy(given.busy):
            found = run_once(given.out.with_suffix(".txt"))
        runs.append({"busy": given.busy, **found})
        report.write(report.Options(quick=False, out=given.out), before, {"runs": runs})

    report.show("the browser tests beside busy processes", rows_of_runs(runs))
    if failed := rows_of_failures(runs):
        report.show("tests that failed", failed)


if __name__ == "__main__":
    main()
