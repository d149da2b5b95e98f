"""Record what the card of this machine does, within so many minutes, and hold on to every result.

    python -m benchmarks.gpu_suite --out DIR --minutes 8

Each result is written as it is made, so that a cut loses only the run in flight; the same command
goes on where an earlier visit stopped. Without a card: --device cpu --small.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu_suite import card, cases, tasks, visit
from benchmarks.gpu_suite.bench import SuiteBench, need
from memlab._util.units import format_seconds
from memlab.cli import device_visit
from memlab.cli.device_visit import Case
from memlab.store.records import Kind, read_lines

BEGUN = time.monotonic() - time.process_time()  # when imports began
LAST_SECONDS = 3.0  # for the table and the end of the workers
BELL_SECONDS = 1.0  # for the table alone


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--minutes", type=float, default=8.0, help="that the visit may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="the cases that a CPU can do")
    given = parser.parse_args(arguments)
    if given.device == "cpu" and not given.small:
        parser.error("--device cpu takes hours over the cases of a card; add --small")
    return given


def record(given: argparse.Namespace, wanted: Sequence[Case]) -> None:
    """Carry out the cases that are not recorded yet and that there is time for, and tell of it."""
    cache = tempfile.TemporaryDirectory()  # operators are timed anew: what is kept is old
    os.environ["MEMLAB_CACHE"] = cache.name  # before the first worker is started
    device = torch.device(given.device, 0) if given.device == "cuda" else device_visit.CPU
    here = device_visit.bench_of(device, SuiteBench)
    facts = report.environment() | device_visit.facts(here.device)
    this = visit.begin(given.out, facts, given.minutes, BEGUN)
    missing = [case for case in wanted if not this.is_done(case)]
    bell = threading.Timer(this.seconds_left - BELL_SECONDS, _ring, [this, here])
    bell.daemon = True
    bell.start()
    with ThreadPoolExecutor(1) as ahead:
        for case in missing if here.is_card else ():
            if (name := need(case)) and name not in here.asked:
                ask = here.ask_operators if case.kind is Kind.OPERATORS else here.plan_of
                here.asked[name] = ahead.submit(ask, case, tasks.MOST_SECONDS)
        while missing:
            case = next(filter(here.is_ready, missing), missing[0])
            missing.remove(case)
            left = this.seconds_left - LAST_SECONDS
            if this.estimate(case) > left:
                continue  # a cheaper one may still fit
            _one(here, this, case, left)
            if device_visit.is_broken(here.device):
                _start_again(given, this.seconds_left)
        here.stop.set()
        ahead.shutdown(wait=False, cancel_futures=True)
    bell.cancel()
    show(this, this.end(here.measuring_seconds))


def _ring(this: visit.Visit, here: SuiteBench) -> None:
    """End the visit at its last second: nothing else ends a kernel, or a compiler, that goes on."""
    print("the minutes are over, and the run in flight is lost", flush=True)
    show(this, this.end(here.measuring_seconds))
    sys.stdout.flush()
    os._exit(0)


def _one(here: SuiteBench, this: visit.Visit, case: Case, left: float) -> None:
    start = time.monotonic()
    line = tasks.carry_out(here, case, this.name, left)
    seconds = time.monotonic() - start
    kept = this.note(case, line, seconds)
    outcome = line.get("report", line.get("result", line)).get("outcome", "ok")
    print(
        f"{format_seconds(this.seconds - this.seconds_left):>7} {case.group or case.kind} "
        f"{case.workload}, {case.config}{f', {case.setting}' * bool(case.setting)}: {outcome} "
        f"({format_seconds(seconds)}){'' if kept else ', not kept'}",
        flush=True,
    )


def _start_again(given: argparse.Namespace, seconds: float) -> None:
    """Go on in a new process: after such an error nothing in this one reaches the card any more."""
    print("the card does not answer this process any more; going on in a new one", flush=True)
    minutes = max(seconds, 0.0) / 60
    arguments = ["--out", str(given.out), "--minutes", f"{minutes:.3f}", "--device", given.device]
    arguments += ["--small"] if given.small else []
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_suite", *arguments])


def show(this: visit.Visit, summary: dict[str, Any]) -> None:
    """Print what is recorded of the device, and how the visit went."""
    lines = read_lines(this.path)
    report.show(f"recorded in {this.path}", visit.table(lines.content) or [{"of": "nothing"}])
    report.show("this visit", [{"what": name, "value": value} for name, value in summary.items()])
    for name in ("configs a minute", "share of time measuring"):
        goal = visit.GOALS[name]
        print(
            f"{name}: {summary[name]:.2f}, goal {goal:g}: {report.verdict(summary[name] >= goal)}"
        )
    print(lines.damage or f"{this.path.stat().st_size:,} bytes, all lines good")


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, and print a short table last; return the status of the process."""
    given = _options(arguments)
    if why := card.refusal(given.device):
        print(why, file=sys.stderr)
        return 2
    record(given, cases.small() if given.small else cases.on_card())
    return 0


if __name__ == "__main__":
    sys.exit(main())
