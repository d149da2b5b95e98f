"""What do people wait for, beyond the training steps themselves?

Importing: the time of `import memlab` in a fresh process that has imported torch. Goal: 50 ms.
Beside it the wall time of whole processes with and without it, in pairs, which holds the exit of
the interpreter too. First paint: importing memlab, building a panel and making what the kernel
sends, in a fresh process that has imported torch. Goal: 2 s.

Run to result: wall time of `measure` in a warm worker, less every step that it ran. Timed steps are
in the result; warm-up and the first metered step lie between two reports of progress. The end of
the second metered step is not reported: it counts as the first, or as its median in this process
if that is less, so that noise can only add to the wait. Goal: 0.3 s. Before each run is a pause, as
a person makes one, in which the worker cleans up after the last. The rest is told twice: as the
caller sees it, between reports, and function by function in this process, each without the timed
functions that it calls. There, too, what is old is frozen before a run, as the worker does, so that
collections do not walk through it.
"""

import contextlib
import gc
import pickle
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import memlab
from benchmarks import report
from benchmarks.report import fresh_python
from memlab import StepConfig, StepResult, Workload
from memlab.memory import meter
from memlab.runtime import measure
from memlab.runtime.sending import pickled
from memlab.techniques.step import Step

GOALS = {"import": 0.050, "run to result": 0.3, "first paint": 2.0}
WORKLOADS = ("gpt-small", "lstm-text")
NUM_IMPORTS, NUM_RUNS, NUM_PAINTS = 11, 7, 5
NUM_QUICK = 3
PAUSE_SECONDS = 0.5
NUM_CONTRIBUTORS = 8
CONFIG = StepConfig()

TIMED_IMPORT = """
import time, torch
start = time.perf_counter()
import memlab
print(time.perf_counter() - start)
"""
PAINT = """
import time, torch
start = time.perf_counter()
import memlab
panel = memlab.panel(memlab.workloads.get("gpt-small"))
panel._repr_mimebundle_()
print(time.perf_counter() - start)
"""


def importing(num_pairs: int) -> dict[str, Any]:
    """Return what importing memlab adds to importing torch, and its largest contributors."""
    more: list[float] = []
    alone: list[float] = []
    for index in range(num_pairs):
        codes = ["import torch", "import torch; import memlab"]
        seconds = {code: _wall_seconds(code) for code in (codes if index % 2 else codes[::-1])}
        more.append(seconds[codes[1]] - seconds[codes[0]])
        alone.append(float(fresh_python(TIMED_IMPORT).stdout))
    low, high = report.median_interval(more)
    return {
        "pairs": num_pairs,
        "import statement s": statistics.median(alone),
        "whole process s": statistics.median(more),
        "95 %": f"{low:.3f}-{high:.3f}",
        "goal s": GOALS["import"],
        "goal": report.verdict(statistics.median(alone) <= GOALS["import"]),
    }


def contributors() -> list[dict[str, Any]]:
    """Return the modules that `import memlab` loads beyond torch, the slowest first."""
    said = fresh_python("import torch; import memlab", flags=["-X", "importtime"]).stderr.decode()
    found = re.findall(r"import time:\s+(\d+) \|\s+(\d+) \| (\s*)(\S+)", said)
    names = [name for *_, name in found]
    last_of_torch = max(
        i for i, (*_, depth, name) in enumerate(found) if (depth, name) == ("", "torch")
    )
    ours = found[last_of_torch + 1 : names.index("memlab") + 1]
    rows = [
        {"module": name, "own ms": int(own) / 1e3, "with what it imports ms": int(total) / 1e3}
        for own, total, _, name in ours
    ]
    return sorted(rows, key=lambda row: -row["own ms"])[:NUM_CONTRIBUTORS]


def first_paint(num_runs: int) -> dict[str, Any]:
    """Return how long a panel takes to be built and shown in a process that has imported torch."""
    seconds = [float(fresh_python(PAINT).stdout.splitlines()[-1]) for _ in range(num_runs)]
    median = statistics.median(seconds)
    return {
        "runs": num_runs,
        "median s": median,
        "longest s": max(seconds),
        "goal s": GOALS["first paint"],
        "goal": report.verdict(median <= GOALS["first paint"]),
    }


def run_to_result(workload: Workload, num_runs: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the wait beyond the steps in a warm worker, and what it is spent on."""
    parts = in_this_process(workload, num_runs)
    memlab.measure(workload, CONFIG, "cpu")  # starts the worker and imports its libraries
    runs = [in_the_worker(workload, parts["second metered step"]) for _ in range(num_runs)]
    beyond = [sum(run.values()) for run in runs]
    row = {
        "workload": workload.name,
        "runs": num_runs,
        "beyond the steps s": statistics.median(beyond),
        "least s": min(beyond),
        "most s": max(beyond),
        "goal s": GOALS["run to result"],
        "goal": report.verdict(statistics.median(beyond) <= GOALS["run to result"]),
    }
    told = {
        "worker": {name: statistics.median(run[name] for run in runs) for name in runs[0]},
        "this process": parts,
    }
    return row, [
        {"workload": workload.name, "where": where, "part": name, "ms": 1e3 * seconds}
        for where, spans in told.items()
        for name, seconds in spans.items()
    ]


def in_the_worker(workload: Workload, metered_step: float) -> dict[str, float]:
    """Return what one measurement in the worker spends beyond its steps, in seconds."""
    time.sleep(PAUSE_SECONDS)
    reports: list[tuple[float, str]] = []
    start = time.perf_counter()
    result = memlab.measure(
        workload,
        CONFIG,
        "cpu",
        on_progress=lambda progress: reports.append((time.perf_counter(), progress.text)),
    )
    end = time.perf_counter()
    return beyond_steps(result, start, reports, end, metered_step)


def beyond_steps(
    result: StepResult,
    start: float,
    reports: list[tuple[float, str]],
    end: float,
    metered_step: float,
) -> dict[str, float]:
    """Return the seconds of a measurement between its reports, without those of its steps."""
    build, first, second, again, *_ = [moment for moment, _ in reports]
    timing = [moment for moment, text in reports if text.startswith("timing step")]
    after_build = next(moment for moment, _ in reports if moment > again)
    return {
        "sending": build - start,
        "build and profile start": first - build,
        "profile stop and reading the trace": again - second - min(second - first, metered_step),
        "build again": after_build - again,
        "clean-up and sending back": end - timing[0] - sum(result.step_seconds_all or ()),
    }


def in_this_process(workload: Workload, num_runs: int) -> dict[str, float]:
    """Return the median seconds of each part of a measurement that runs in this process."""
    runs = []
    for _ in range(num_runs + 1):
        gc.collect()
        gc.freeze()
        with timed_parts() as seconds:
            start = time.perf_counter()
            result = memlab.measure(workload, CONFIG, "cpu", isolate=False)
            wall = time.perf_counter() - start
        parts = {name: sum(spans) for name, spans in seconds.items() if name != "step"}
        first, second, *timed = seconds["step"]
        start = time.perf_counter()
        pickled({"workload": workload, "config": CONFIG})
        pickle.loads(pickle.dumps(result))
        parts["pickling, both ways"] = time.perf_counter() - start
        parts["all other"] = wall - sum(sum(spans) for spans in seconds.values())
        parts |= {"first metered step": first, "second metered step": second}
        runs.append(parts | {"timed steps": sum(timed), "wall": wall})
    gc.unfreeze()
    del runs[0]  # its build imports the model's library
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


@contextlib.contextmanager
def timed_parts() -> Iterator[dict[str, list[float]]]:
    """Time the functions that a measurement is made of, each without the others inside it."""
    places = {
        "build step": (measure, "build_step"),
        "step": (Step, "__call__"),
        "profile start": (torch.profiler.profile, "start"),
        "profile stop": (torch.profiler.profile, "stop"),
        "event tree and marks": (measure, "record"),
        "tree walk": (meter, "_walk"),
        "trace from events": (meter, "_trace"),
        "classification": (measure, "step_memory"),
        "gc.collect": (gc, "collect"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in places}
    inner = [0.0]  # seconds of timed functions inside each that is at work

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                elapsed = time.perf_counter() - start
                seconds[name].append(elapsed - inner.pop())
                inner[-1] += elapsed

        return call

    with contextlib.ExitStack() as stack:
        for name, (owner, attribute) in places.items():
            function = timed(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, function))
        yield seconds


def _wall_seconds(code: str) -> float:
    start = time.perf_counter()
    fresh_python(code)
    return time.perf_counter() - start


def main() -> None:
    """Time imports, runs and the panel."""
    given, before = report.options(__file__, __doc__), report.environment()
    imports = importing(NUM_QUICK if given.quick else NUM_IMPORTS)
    report.show("import memlab over import torch", [imports])
    slowest = contributors()
    report.show("its largest contributors", slowest)
    runs, parts = [], []
    for name in WORKLOADS:
        workload = memlab.workloads.get(name)
        row, spans = run_to_result(workload, NUM_QUICK if given.quick else NUM_RUNS)
        runs.append(row)
        parts += spans
    report.show("run to result, beyond the steps, in a warm worker", runs)
    report.show(
        "one measurement part by part, without steps in the worker, with them in this process",
        parts,
    )
    paint = first_paint(NUM_QUICK if given.quick else NUM_PAINTS)
    report.show("first paint of the panel, kernel side", [paint])
    rows = {"imports": imports, "contributors": slowest, "runs": runs, "parts": parts}
    report.write(given, before, {**rows, "first_paint": paint})


if __name__ == "__main__":
    main()
