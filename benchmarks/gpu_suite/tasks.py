"""Each kind of case carried out: what a line of the record holds of it.

On a card everything runs in this process, and plans are made in a worker that sees no card. On a
CPU measuring is the worker's affair, since no older tensors may be alive where it is done.
"""

import contextlib
import copy
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_suite import card
from benchmarks.gpu_suite.cases import Case
from benchmarks.gpu_suite.operator_times import time_operators
from memlab import Outcome, StepResult, Workload, _isolation, workloads
from memlab._operator_costs import StepOperators
from memlab._plans import plan_for
from memlab._process import Ended
from memlab._records import Kind, Run, costs_to_line
from memlab._running import Progress
from memlab.config import Precision
from memlab.memory.cards import Target, resolve
from memlab.memory.operators import Signature, to_text
from memlab.plan import Plan
from memlab.result import Source
from memlab.step import set_seed
from memlab.techniques.precision import matrix_products
from memlab.units import parse_bytes

CPU = torch.device("cpu")
SEED, WARMUP = 0, 1
REPEATS = {"cuda": 3, "cpu": 7}  # a CPU's times scatter more, and its steps are short
MOST_SECONDS = 120.0  # of one measurement
OPERATOR_SECONDS = 4.0  # of timing those of one case on a card
NUM_ROUNDS = 3
CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second until torch 2.9
BEFORE_READING = {
    "cuda": ("build", "step", "synchronize", "empty_cache", "reset_peak_memory_stats", "seed",
             "step", "synchronize"),
    "cpu": ("build", "step", "seed", "step"),
}  # fmt: skip


Tell = Callable[[Progress], None]


@dataclass(slots=True, eq=False)
class Bench:
    """The device that cases are carried out on, and what is kept between them.

    Attributes:
        device: of this machine.
        target: the same, as predictions know it.
        models: built once each, on the CPU, by workload and options; on a card only.
        timed: operators that a line of this visit or an earlier one holds, TF32 told apart.
        at_start_bytes: what was held on the card before this process held anything.
        measuring_seconds: spent on measuring: no models built once, no plans, no waiting.
        asked: operators of cases that the worker was asked for ahead of their turn; on a card only.
        stop: set when the visit is over, so that the worker is not waited for.
    """

    device: torch.device
    target: Target
    models: dict[str, torch.nn.Module] = field(default_factory=dict)
    timed: set[tuple[Signature, bool]] = field(default_factory=set)
    at_start_bytes: int = 0
    measuring_seconds: float = 0.0
    asked: dict[str, Future[StepOperators]] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def is_card(self) -> bool:
        """Whether it is a CUDA card."""
        return self.device.type == "cuda"

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the time meanwhile as measuring."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.measuring_seconds += time.monotonic() - start

    def ask(self, function: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Have the worker that sees no card do what needs fake tensors.

        Raises:
            Ended: there is no answer; says why.
        """
        return _isolation.run(function, arguments, timeout_seconds=seconds, cancel=self.stop)

    def measure(
        self,
        case: Case,
        seconds: float,
        tell: Callable[[Progress], None] | None = None,
        **more: Any,
    ) -> tuple[StepResult, Plan | None]:
        """Return what a step costs here, and the plan that it was run with."""
        plan = None
        try:
            plan = self.plan_of(case, seconds)
            arguments = self.arguments_of(case) | {
                "plan": plan,
                "repeats": REPEATS[self.device.type],
            }
            arguments |= {"warmup": WARMUP, "memory_limit": None} | more
            run = _isolation.run_here if self.is_card else _isolation.run
            with self.measuring():
                result: StepResult = run(
                    "measure", arguments, timeout_seconds=seconds, on_progress=tell
                )
        except Ended as ended:
            result = StepResult(
                outcome=ended.outcome, message=str(ended), source=Source.MEASURED,
                device=str(self.device), versions={"torch": torch.__version__},
                config=case.config, workload_name=case.workload,
            )  # fmt: skip
        return result, plan

    def plan_of(self, case: Case, seconds: float) -> Plan | None:
        """Return the plan of a case, None if it needs none.

        Raises:
            Ended: there is no plan; says why.
        """
        workload = workloads.get(case.workload, **case.options)
        run = partial(self.ask, seconds=seconds)
        return plan_for(workload, case.config, self.target, seed=SEED, run=run)

    def arguments_of(self, case: Case) -> dict[str, Any]:
        """Return what every function of a worker takes of a case."""
        workload = workloads.get(case.workload, **case.options)
        if self.is_card and not case.config.init_on_meta:
            workload = dataclasses.replace(
                workload, build_model=partial(alike, self._built(workload))
            )
        facts = {"config": case.config, "device": self.device, "seed": SEED}
        return {"workload": workload, **facts}

    def _built(self, workload: Workload) -> torch.nn.Module:
        """Return the model of a workload, built on the CPU the first time."""
        key = repr(getattr(workload.build_model, "__self__", workload.name))
        if key not in self.models:
            set_seed(SEED)
            self.models[key] = workload.build_model()
        return self.models[key]


def alike(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model whose tensors are new and share their memory with its own.

    A step on a card only reads that memory, to copy it there: a copy on the CPU besides would take
    longer than most steps.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach()
    return copy.deepcopy(model, memo)


def measured_run(bench: Bench, case: Case, visit: str, seconds: float) -> dict[str, Any]:
    """Return the line of a run."""
    held: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.text.startswith("timing") and bench.is_card:
            used = card.used_bytes()
            held.append(0 if used is None else used - bench.at_start_bytes)

    start = time.monotonic()
    result, plan = bench.measure(case, seconds, watch)
    return Run(
        visit=visit,
        group=case.group,
        workload=case.workload,
        options=case.options,
        holdout=case.holdout,
        seed=SEED,
        result=result,
        plan=plan,
        process_bytes=max(held, default=None),
        wall_seconds=time.monotonic() - start,
        before_reading=BEFORE_READING[bench.device.type],
    ).to_line()


def operators(bench: Bench, case: Case, found: StepOperators, seconds: float) -> dict[str, Any]:
    """Return the line of the operators of a step: on a CPU as calibrated, on a card timed now."""
    is_tf32 = case.config.precision is Precision.TF32
    line: dict[str, Any] = {"tf32": is_tf32, "overheads": {}, "reasons": {}}
    line |= {"outcome": str(found.outcome), "message": found.message}
    new = [s for s in found.seconds if (s, is_tf32) not in bench.timed]
    if found.costs is not None:
        costs = {s: cost for s, cost in found.costs.operators.items() if s in new}
        line["overheads"] = {str(p): value for p, value in found.costs.overheads.items()}
    else:
        ordered = sorted(new, key=lambda signature: -found.seconds[signature])
        with matrix_products(case.config.precision), bench.measuring():
            costs, reasons = time_operators(ordered, bench.device, min(seconds, OPERATOR_SECONDS))
        line["reasons"] = {to_text(signature): why for signature, why in reasons.items()}
    bench.timed |= {(signature, is_tf32) for signature in costs}
    total = sum(found.seconds.values())
    told = sum(s for signature, s in found.seconds.items() if (signature, is_tf32) in bench.timed)
    return line | {"share_of_step": told / total if total else 0.0} | costs_to_line(costs)


def asked_operators(bench: Bench, case: Case, seconds: float) -> StepOperators:
    """Return the operators of a case's step, from the worker."""
    try:
        plan = bench.plan_of(case, seconds)
        workload = workloads.get(case.workload, **case.options)
        arguments = {"workload": workload, "config": case.config, "target": bench.target}
        arguments |= {"seed": SEED, "plan": plan}
        # on a CPU operators are run alone by the worker: that is what is measured of them
        with contextlib.nullcontext() if bench.is_card else bench.measuring():
            found: StepOperators = bench.ask("operators", arguments, seconds)
    except Ended as ended:
        return StepOperators(outcome=ended.outcome, message=str(ended))
    return found


def boundary(bench: Bench, case: Case, seconds: float) -> dict[str, Any]:
    """Return the line of the largest batch under a memory limit, found several times over.

    The first round doubles the batch until it fails, then halves what lies between; each one after
    tries both sides of the edge again. At last the first batch must cost what it did before
    anything failed.
    """
    end = time.monotonic() + seconds
    limit = parse_bytes(case.setting)

    def run(batch_size: int) -> StepResult:
        config = dataclasses.replace(case.config, batch_size=batch_size)
        left = max(end - time.monotonic(), 0.1)
        more = {"repeats": 1, "warmup": 0, "memory_limit": limit}
        return bench.measure(dataclasses.replace(case, config=config), left, **more)[0]

    first = run(case.config.batch_size)
    rounds = [list(_raised(run, case.config.batch_size))]
    edge = sorted({*_of(rounds[0], Outcome.OK)[-1:], *_of(rounds[0], Outcome.OUT_OF_MEMORY)[:1]})
    rounds += [[(size, str(run(size).outcome)) for size in edge] for _ in range(NUM_ROUNDS - 1)]
    last = run(case.config.batch_size)
    peaks = [(r.peak_allocated_bytes, r.peak_reserved_bytes) for r in (first, last)]
    return {
        "memory_limit_bytes": limit,
        "rounds": rounds,
        "largest_ok": [max(_of(tried, Outcome.OK), default=0) for tried in rounds],
        "recovered": last.outcome is Outcome.OK and peaks[0] == peaks[1],
        "complete": time.monotonic() < end,
    }


def _of(tried: list[tuple[int, str]], outcome: Outcome) -> list[int]:
    """Return the batch sizes that ended so, the smallest first."""
    return sorted(size for size, ended in tried if ended == outcome)


def _raised(run: Callable[[int], StepResult], batch_size: int) -> Iterator[tuple[int, str]]:
    low, high = 0, 0
    while not high or high - low > max(1, low // 8):
        batch_size = (low + high) // 2 if high else batch_size if not low else 2 * low
        outcome = run(batch_size).outcome
        yield batch_size, str(outcome)
        if outcome is Outcome.OK:
            low = batch_size
        elif outcome is Outcome.OUT_OF_MEMORY:
            high = batch_size
        else:
            return


def verify(bench: Bench, case: Case, seconds: float) -> dict[str, Any]:
    """Return the line of a comparison with the reference step."""
    try:
        arguments = bench.arguments_of(case) | {"plan": bench.plan_of(case, seconds)}
        run = _isolation.run_here if bench.is_card else _isolation.run
        with bench.measuring():
            report = run("verify", arguments, timeout_seconds=seconds)
    except Ended as ended:
        return {"report": {"ok": False, "outcome": str(ended.outcome), "why": str(ended)}}
    return {"report": dataclasses.asdict(report) | {"outcome": str(report.outcome)}}


def allocator(bench: Bench, case: Case, seconds: float) -> dict[str, Any]:
    """Return the line of a step under a setting of the allocator, in a process that begins with it.

    A process of its own, since nothing puts a setting back.
    """
    before = {name: os.environ.get(name) for name in CONF}
    os.environ |= dict.fromkeys(CONF, case.setting)
    _isolation.measuring.replace()
    try:
        arguments = {"workload": workloads.get(case.workload, **case.options), "seed": SEED}
        arguments |= {"config": case.config, "device": bench.device, "memory_limit": None}
        arguments |= {"repeats": REPEATS[bench.device.type], "warmup": WARMUP}
        with bench.measuring():
            result: StepResult = _isolation.run("measure", arguments, timeout_seconds=seconds)
    except Ended as ended:
        return {"outcome": str(ended.outcome), "message": str(ended)}
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        _isolation.measuring.replace()
    kept = ("outcome", "message", "peak_allocated_bytes", "peak_reserved_bytes", "step_seconds")
    return {name: result.to_dict()[name] for name in kept}


def bench_of(device: str) -> Bench:
    """Return the bench of a device of this machine; on a card, its memory is empty then."""
    at_start = card.used_bytes() if device == "cuda" else None
    here = torch.device("cuda", 0) if device == "cuda" else CPU
    if here.type == "cuda":
        torch.cuda.init()  # this process has seen its card, so that the next may not
        with card.hidden():
            _isolation.predicting.ensure()
    return Bench(device=here, target=resolve(str(here)), at_start_bytes=at_start or 0)


def carry_out(bench: Bench, case: Case, visit: str, seconds: float) -> dict[str, Any]:
    """Return the line of a case.

    Args:
        bench: where.
        case: what.
        visit: that the line belongs to.
        seconds: that are left for it.
    """
    left = min(seconds, MOST_SECONDS)
    if case.kind is Kind.RUN:
        return measured_run(bench, case, visit, left)
    about = {"visit": visit, "workload": case.workload, "options": dict(case.options)}
    about |= {"config": case.config.to_dict(), "holdout": case.holdout, "setting": case.setting}
    if case.kind is Kind.OPERATORS:
        asked = bench.asked.get(case.key(""))
        found = asked.result(left) if asked else asked_operators(bench, case, left)
        return about | operators(bench, case, found, left)
    return about | {Kind.BOUNDARY: boundary, Kind.VERIFY: verify, Kind.ALLOCATOR: allocator}[
        case.kind
    ](bench, case, left)
