"""Does any value of any argument of any public function give an error that is not memlab's own?

Public functions, fields and options are found by walking the package, so that a new argument is
called too. Each call has good arguments but for one or two, drawn with a seed from a table of bad
values. A call may work, be refused with a MemlabError, or end in an outcome; whatever else it
raises is raw, but for what the caller's own `on_progress` raises. Goal: 0 raw errors. What passes
all checks ends before a worker runs it, but for the last few, which are measured or predicted for
real.
"""

import atexit
import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import os
import random
import shutil
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import memlab
from benchmarks import report, snapshot
from memlab import LoadingConfig, MemlabError, StepConfig, StepResult, Workload, plots, workloads
from memlab._panel import app
from memlab._util import units
from memlab.integrations.snapshot_comparison import SnapshotComparison, compare
from memlab.prediction.graph_table import GraphTable
from memlab.prediction.run_result import RunResult
from memlab.result import Outcome
from memlab.running import Ended
from memlab.runtime import isolation
from memlab.search.answer import Recommendations
from memlab.search.length_curve import Distribution, LengthCurve, batchings
from memlab.search.lengths import LengthsResult
from memlab.techniques.script import script

NUM_CALLS, NUM_CALLS_QUICK, NUM_RUN, NUM_RUN_QUICK = 10_000, 500, 30, 3
TIMEOUT_SECONDS = 60
SHOWN_RAW = 20
OWN = {
    "build_step": {"mark"},  # called back in the middle of a build: its errors are the caller's
    "sweep": {"path"},  # a text would be a new file in the working folder
}
TELLER = "teller.<locals>.tell"  # in isolation.py, calls on_progress
MEMLAB_FOLDER = str(Path(memlab.__file__).parent)
os.environ["HF_HUB_OFFLINE"] = "1"  # a bad name is not looked for on a hub


class Awkward:
    """Nothing can be asked of it without an error."""

    def _raise(self, *args: Any) -> Any:
        raise RuntimeError("awkward")

    __repr__ = __str__ = __eq__ = __ne__ = __bool__ = __len__ = __iter__ = __hash__ = _raise
    __index__ = __float__ = __int__ = __lt__ = __gt__ = __call__ = __getitem__ = _raise


class NoClass:
    """It has no class that can be asked for, and no attributes."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attribute")


class LyingText(str):
    """A text that prints as another."""

    def __str__(self) -> str:
        return "import os"

    __repr__ = __str__


class LyingInt(int):
    """A number that compares as no number does."""

    def __lt__(self, other: Any) -> Any:
        raise RuntimeError("no order")

    __gt__ = __le__ = __ge__ = __lt__


def bad_values() -> dict[str, Any]:
    """Return the values that are thrown, by the words that a report says of them."""
    nested: list[Any] = []
    nested.append(nested)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    texts = {repr(text): text for text in (
        "", " ", "no", "1", "nan", "-1GiB", "1e999", "9" * 40, "24GiB", "a\x00b", "\ud800",
        'x"""\nraise SystemExit', "$\\frac{$", "cpu", "cuda:-1", "cuda:99999999999", "auto",
        "h200, recorded", "٣", "every 99999999999999999999",
        "8", "40 %", "0,5", "8GB", "llama-3.3-70b", "owner/model", "timm/resnet50",
        "vit-l/16")}  # fmt: skip
    numbers = {f"{type(n).__name__} {n}": n for n in (
        -1, 0, 1, 3, 2**31, 2**63, -(2**63), 0.5, -0.0, 1e308, float("nan"), math.inf,
        -math.inf, np.int64(3), np.float32(0.5), np.bool_(True), 1j)}  # fmt: skip
    return texts | numbers | {
        "None": None, "True": True, "False": False, "10**400": 10**400, "-(10**5000)": -(10**5000),
        "bytes": b"", "a list": [], "a dict": {}, "a tuple of ints": (1, 2), "a set": {1},
        "[None]": [None], "{'x': 1}": {"x": 1}, "a list in itself": nested, "a deep list": deep,
        "an object": object(), "a class": int, "a class of memlab": StepConfig,
        "a lambda": lambda: 3,
        "a module": torch, "nn.Linear": nn.Linear(1, 1), "a tensor": torch.zeros(3),
        "a scalar tensor": torch.tensor(3), "a meta tensor": torch.zeros(3, device="meta"),
        "an array": np.zeros(3), "a device": torch.device("cpu"),
        "a meta device": torch.device("meta"),
        "an awkward object": Awkward(), "an object without a class": NoClass(),
        "a lying text": LyingText("cpu"),
        "a lying int": LyingInt(4),
        "a huge text": "x" * 10**6, "an endless iterator": itertools.count(),
        "a range": range(10**9),
        "an exception": ValueError("x"), "Ellipsis": ..., "NotImplemented": NotImplemented,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A public function: good arguments by name, and the names of all that it takes."""

    name: str
    call: Callable[..., Any]
    good: dict[str, Any]
    arguments: tuple[str, ...]


def targets() -> list[Target]:
    """Return every public function, class and option of the zoo with arguments that work.

    Raises:
        AssertionError: one of them has no good arguments here; add them.
    """
    good = _good_arguments()
    found = []
    for name, call in public_callables().items():
        assert name in good, f"{name} is public: give it good arguments in benchmarks/bad_calls.py"
        options = good[name]
        parameters = inspect.signature(call).parameters.values()
        names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        names = [each for each in names if each not in OWN.get(name, ())]
        found.append(Target(name=name, call=call, good=options,
                            arguments=tuple(dict.fromkeys([*names, *options]))))  # fmt: skip
    for name, spec in workloads.SPECS.items():
        options = [field.name for field in dataclasses.fields(spec)]
        found.append(Target(name=f"workloads.get({name!r})", call=workloads.get,
                            good={"name": name}, arguments=tuple(options)))  # fmt: skip
    return found


def public_callables() -> dict[str, Callable[..., Any]]:
    """Return what a person can call, by its name below memlab."""
    found: dict[str, Callable[..., Any]] = {}
    for name in memlab.__all__:
        value = getattr(memlab, name)
        is_made_by_memlab = value in (MemlabError, Outcome, memlab.VerifyReport)
        if callable(value) and not is_made_by_memlab:
            found[name] = value
    found |= {f"plots.{n}": getattr(plots, n) for n in plots.__all__ if callable(getattr(plots, n))}
    found |= {
        f"units.{f.__name__}": f
        for f in (units.parse_bytes, units.format_bytes, units.format_seconds)
    }
    found |= {
        "workloads.get": workloads.get,
        "workloads.names": workloads.names,
        "Workload.resized": workloads.get("vit-digits").resized,
        "Workload.from_module": Workload.from_module,
        "StepResult.from_dict": StepResult.from_dict,
        "Snapshot.compare": compare,
        "script": script,
    }
    return found


def _good_arguments() -> dict[str, dict[str, Any]]:
    workload, config = workloads.get("vit-digits"), StepConfig(batch_size=2)
    step = {"workload": workload, "config": config}
    bias = {"values": {"bias": True}, "offered": {"bias": (True, False)}}
    chosen = dataclasses.replace(
        workload, choices=memlab.WorkloadChoices(**bias, make_workload=lambda bias: chosen)
    )
    record = memlab.recordings()[0]
    result = next(run.result for run in record.runs if run.result.timeline is not None)
    figure = plots.placeholder("nothing", size=(1.0, 1.0))
    named = {"results": [result], "labels": ["one"]}
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    snapshot.write(folder / "snapshot.pickle", "shared frames", 10**5)
    opened = {"snapshot": memlab.open_snapshot(folder / "snapshot.pickle")}
    shutil.copy(Path(__file__).with_name("step_scripts") / "mlp.py", folder / "train.py")
    compared = SnapshotComparison(
        path="s.pickle", device="t4", workload_name="x", config=config, rows=(),
        measured_peak_bytes=2, predicted_peak_bytes=1, measured_peak_phase="forward",
        predicted_peak_phase="forward", measured_at_peak_bytes=2, predicted_at_peak_bytes=1,
        matched_fraction=1.0, found_by="", measured=np.array([2]), predicted=np.array([1]),
        phase=np.array([2], np.int8),
    )  # fmt: skip
    lengths = LengthsResult(
        workload_name="x", unit="tokens", data=Distribution.of([8, 16]), worst=result,
        memory_limit_bytes=None, longest_that_fits=None, truncation=None,
        batchings=batchings(Distribution.of([8, 16]), (1,), None),
        curve_lengths=np.array([8, 16]), curve_bytes=np.array([1, 2]),
        curve=LengthCurve(recorded={}, name="x"), notes=(),
    )  # fmt: skip
    fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    about: dict[str, Any] = {"outcome": Outcome.OK, "message": "", "device": "cpu",
                             "config": config, "workload_name": "x"}  # fmt: skip
    graph = GraphTable(**about | {"device": "t4"})
    ran = RunResult(**about, source=result.source, versions={}, run=memlab.TrainingRun())
    loading = about | {"loading": LoadingConfig()}
    module = nn.Linear(2, 2)
    batch = (torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))
    own = {"build_model": workload.build_model, "make_batch": workload.make_batch,
           "compute_loss": workload.compute_loss}  # fmt: skip
    sizes = {"name": "length", "unit": "tokens", "value": 8, "offered": [8, 16],
             "make_workload": workload.resized}  # fmt: skip
    return {
        "measure": step, "predict": step, "verify": step, "explain": {"result": result},
        "evidence": {"result": result},
        "export_script": step | {"device": "cpu"}, "training_step": step | {"device": "cpu"},
        "graph_table": step | {"device": "t4"}, "checkpoint_graph": {"workload": workload},
        "ladder": {"workload": workload, "rungs": [], "device": "t4", "batch_size": 2},
        "measure_loading": step | {"dataset": torch.utils.data.TensorDataset(*batch)},
        "panel": {}, "recorded": step | {"device": record.name}, "recordings": {},
        "forget_costs": {}, "build_step": step | {"device": "cpu"}, "card": {"name": "t4"},
        "results": {}, "stored_results": {},
        "sweep": {"workload": workload, "configs": [config], "device": "t4"},
        "compare": {"old": result, "new": [result]},
        "compare_base": {"workload": memlab.workloads.finetune(base="nf4"), "device": "t4"},
        "recommend": {"workload": chosen, "device": "t4", "choices": {"bias": [True]}},
        "largest_batch": step | {"device": "t4", "batch_limit": 4},
        "predict_batches": step | {"batch_sizes": [2, 4], "device": "t4"},
        "predict_lengths": {"workload": memlab.workloads.get("gpt-small"), "lengths": [8] * 8},
        "predict_run": step | {"device": "t4"}, "measure_run": step | {"device": "cpu"},
        "replay_allocations": {"story": ["a = 1 MiB", "del a"]},
        "run_script": {"path": folder / "train.py"}, "watch": {},
        "from_script": {"path": folder / "train.py"},
        "explain_error": {"message": "CUDA out of memory. Tried to allocate 2.00 GiB"},
        "open_snapshot": {"path": folder / "snapshot.pickle"},
        "from_trainer": {"source": {"train_micro_batch_size_per_gpu": 4}},
        "plots.snapshot_timeline": opened, "plots.snapshot_peak": opened,
        "plots.snapshot_fragmentation": opened, "plots.snapshot_growth": opened,
        "plots.snapshot_comparison": {"comparison": compared},
        "plots.replay": {"moments": memlab.replay_allocations(["a = 1 MiB"])},
        "Snapshot.compare": opened | step | {"device": "t4"},
        "to_frame": {"results": [result]}, "table": {"rows": [result]},
        "require_ok": {"results": [result]}, "StepConfig": {}, "LoadingConfig": {},
        "StepResult": fields, "LoadingResult": loading, "Workload": own | {"name": "x"},
        "SampleSize": sizes, "Evaluation": {}, "Generation": {}, "TrainingRun": {},
        "WorkloadChoices": bias | {"make_workload": lambda bias: workload},
        "plots.peak_bar": {"result": result}, "plots.timeline": {"result": result},
        "plots.recommendations": {
            "ranked": Recommendations(fitting=(), message="none", limit_bytes=1)},
        "plots.peak_map": {"result": result}, "plots.step_times": named,
        "plots.memory_against_time": named, "plots.heat_map": {"results": [result]},
        "plots.varying_fields": {"results": [result]}, "plots.waterfall": {"results": [result]},
        "plots.step_graph": {"table": graph}, "plots.rank_peaks": {"result": result},
        "plots.rank_timelines": {"result": result}, "plots.lengths": {"result": lengths},
        "plots.scaling": {"results": [result]}, "plots.run": {"result": ran},
        "plots.run_timeline": {"result": ran},
        "plots.cost_changes": {"changes": memlab.compare(result, result)},
        "plots.placeholder": {"text": "x", "size": (1.0, 1.0)}, "plots.to_png": {"figure": figure},
        "plots.to_svg": {"figure": figure, "label": "x"}, "units.parse_bytes": {"value": "1GiB"},
        "units.format_bytes": {"num_bytes": 1}, "units.format_seconds": {"seconds": 1.0},
        "workloads.get": {"name": "vit-digits"}, "workloads.names": {},
        "Workload.resized": {"size": 64},
        "Workload.from_module": {"module": module, "example_batch": batch,
                                 "loss_fn": nn.functional.cross_entropy},
        "StepResult.from_dict": {"data": result.to_dict() | {"timeline": None}},
        "script": {"config": config, "device": "cpu"},
    }  # fmt: skip


@contextlib.contextmanager
def no_worker() -> Iterator[None]:
    """End what passes every check where a worker would take it on."""

    def end(*args: Any, **kwargs: Any) -> Any:
        raise Ended(Outcome.CANCELLED, "it passed every check")

    with (
        mock.patch.object(isolation, "run", end),
        mock.patch.object(isolation, "run_here", end),
        mock.patch.object(app, "prewarm", return_value=None),
    ):
        yield


def ended(target: Target, arguments: dict[str, Any]) -> tuple[str, str]:
    """Return how a call ended: worked, refused, or raw with the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = target.call(**(target.good | arguments))
            if isinstance(made, app.Panel):
                made.close()
            if isinstance(made, StepConfig | LoadingConfig | StepResult):
                str(made)
    except MemlabError as error:
        return "refused", str(error)
    except Exception as error:
        if is_callers(error):
            return "worked", ""
        return "raw", f"{type(error).__name__}: {str(error)[:200]}"
    return "worked", ""


def is_callers(error: Exception) -> bool:
    """Return whether `on_progress` raised an error, which has to come through, and not memlab."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    was_called = any(code.co_qualname == TELLER for code in frames)
    return was_called and not frames[-1].co_filename.startswith(MEMLAB_FOLDER)


def draw(rng: random.Random, every: list[Target]) -> tuple[Target, dict[str, Any], str]:
    """Return a function, what is passed to it in place of good arguments, and that in words."""
    target = rng.choice([target for target in every if target.arguments])
    values = bad_values()
    names = rng.sample(target.arguments, min(rng.choice((1, 1, 1, 2)), len(target.arguments)))
    thrown = {name: rng.choice(list(values)) for name in names}
    said = ", ".join(f"{name}: {value}" for name, value in thrown.items())
    return target, {name: values[value] for name, value in thrown.items()}, said


def calls(num_calls: int, seed: int = 0) -> list[dict[str, str]]:
    """Return how each of so many drawn calls ended, without running a worker."""
    rng, every, found = random.Random(seed), targets(), []
    with no_worker():
        for _ in range(num_calls):
            target, arguments, said = draw(rng, every)
            how, error = ended(target, arguments)
            found.append({"function": target.name, "passed": said, "ended": how, "error": error})
    return found


def run_for_real(num_run: int, seed: int = 1) -> list[dict[str, str]]:
    """Return how calls that pass every check end in a worker."""
    rng, found = random.Random(seed), list[dict[str, str]]()
    every = [t for t in targets() if t.name in ("measure", "predict", "verify")]
    while len(found) < num_run:
        target, arguments, said = draw(rng, every)
        arguments.setdefault("timeout_seconds", TIMEOUT_SECONDS)
        with no_worker():
            is_refused = ended(target, arguments)[0] != "worked"
        if not is_refused:
            how, error = ended(target, arguments)
            found.append({"function": target.name, "passed": said, "ended": how, "error": error})
    return found


def main() -> None:
    """Call, print a table by function, write JSON."""
    options = report.options(__file__, __doc__ or "")
    start = time.perf_counter()
    found = calls(NUM_CALLS_QUICK if options.quick else NUM_CALLS)
    ran = run_for_real(NUM_RUN_QUICK if options.quick else NUM_RUN)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found + ran:
        counts[each["function"].split("(")[0]][each["ended"]] += 1
    print(f"{'function':28} {'calls':>6} {'refused':>8} {'worked':>7} {'raw':>4}")
    for name, count in sorted(counts.items()):
        row = f"{count.total():6} {count['refused']:8} {count['worked']:7} {count['raw']:4}"
        print(f"{name:28} {row}")
    raw = [each for each in found + ran if each["ended"] == "raw"]
    for each in raw[:SHOWN_RAW]:
        print(f"raw: {each['function']} with {each['passed']}: {each['error']}")
    print(f"{len(found)} calls that end in the caller and {len(ran)} that run: {len(raw)} raw "
          f"errors (goal 0), {time.perf_counter() - start:.0f} s")  # fmt: skip
    numbers = {"environment": report.environment(), "num_calls": len(found), "num_run": len(ran),
               "by_function": counts, "raw": raw}  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
