"""The device that cases are carried out on, and what is kept between them.

On a card everything runs in this process, and plans are made in a worker that sees no card. On a
CPU measuring is the worker's affair, since no older tensors may be alive where it is done.
"""

import contextlib
import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from memlab import workloads
from memlab.devices.cards import Target, resolve
from memlab.operators.signatures import Signature
from memlab.plan import Plan
from memlab.planning.plans import plan_for
from memlab.predicting.operator_costs import StepOperators
from memlab.records.records import Kind
from memlab.result import Outcome, Source, StepResult
from memlab.running import Ended, Progress, explain
from memlab.step import set_seed
from memlab.visits import driver
from memlab.visits.case import Case
from memlab.worker import isolation
from memlab.workload import Workload

CPU = torch.device("cpu")
SEED, WARMUP = 0, 1
REPEATS = {"cuda": 3, "cpu": 7}  # a CPU's times scatter more, and its steps are short
Tell = Callable[[Progress], None]


@dataclass(slots=True, eq=False)
class Bench:
    """The device that cases are carried out on, and what is kept between them.

    Attributes:
        device: of this machine.
        target: the same, as predictions know it.
        models: built once each, on the CPU, by workload and options; on a card only.
        timed: operators that a line of this visit holds, TF32 told apart.
        at_start_bytes: what was held on the card before this process held anything.
        measuring_seconds: spent on measuring: no models built once, no plans, no waiting.
        workloads: by name and options, since plans are kept by workload and two alike differ.
        asked: operators and plans that the worker was asked for ahead of the cases that need them,
            by what `need` calls them; on a card only.
        stop: set when the visit is over, so that the worker is not waited for.
    """

    device: torch.device
    target: Target
    models: dict[str, torch.nn.Module] = field(default_factory=dict)
    timed: set[tuple[Signature, bool]] = field(default_factory=set)
    at_start_bytes: int = 0
    measuring_seconds: float = 0.0
    workloads: dict[str, Workload] = field(default_factory=dict)
    asked: dict[str, Future[Any]] = field(default_factory=dict)
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
        return isolation.run(function, arguments, timeout_seconds=seconds, cancel=self.stop)

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
            more = {"repeats": REPEATS[self.device.type], "memory_limit": None} | more
            arguments = self.arguments_of(case) | {"plan": plan, "warmup": WARMUP} | more
            run = isolation.run_here if self.is_card else isolation.run
            with self.measuring(), self._undisturbed():
                result: StepResult = run(
                    "measure", arguments, timeout_seconds=seconds, on_progress=tell
                )
        except Exception as error:  # a model that cannot be built here is a result like any other
            result = self._without(case, error, Source.MEASURED)
        return result, plan

    def predict(self, case: Case, seconds: float) -> StepResult:
        """Return what a step is predicted to cost on the target."""
        try:
            plan = self.plan_of(case, seconds)
            arguments = {"workload": self.workload(case), "config": case.config, "plan": plan}
            arguments |= {"target": self.target, "seed": SEED, "memory_limit": None}
            found: StepResult = self.ask("predict", arguments, seconds).result
        except Exception as error:  # as above
            return self._without(case, error, Source.PREDICTED)
        return found

    def _without(self, case: Case, error: Exception, source: Source) -> StepResult:
        """Return the result of a case that has none but an error."""
        outcome, message = why(error)
        return StepResult(
            outcome=outcome, message=message, source=source, device=str(self.device),
            versions={"torch": torch.__version__}, config=case.config, workload_name=case.workload,
        )  # fmt: skip

    def _undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Start no worker while a step is timed in this process."""
        waits = isolation.spare.waits(is_timed=True)
        return waits if self.is_card else contextlib.nullcontext()

    def plan_of(self, case: Case, seconds: float) -> Plan | None:
        """Return the plan of a case, None if it needs none.

        Raises:
            Ended: there is not a plan; says why.
        """
        run = partial(self.ask, seconds=seconds)
        return plan_for(self.workload(case), case.config, self.target, seed=SEED, run=run)

    def operators_of(self, case: Case, seconds: float) -> StepOperators:
        """Return the operators of a case's step, from the worker."""
        try:
            arguments = {"workload": self.workload(case), "config": case.config, "seed": SEED}
            arguments |= {"target": self.target, "plan": self.plan_of(case, seconds)}
            # on a CPU operators are run alone by the worker: that is what is measured of them
            with contextlib.nullcontext() if self.is_card else self.measuring():
                found: StepOperators = self.ask("operators", arguments, seconds)
        except Ended as ended:
            return StepOperators(outcome=ended.outcome, message=str(ended))
        return found

    def told_operators(self, case: Case, seconds: float) -> StepOperators:
        """Return the same, as it was asked for ahead if it was."""
        asked = self.asked.get(need(case))
        return self.operators_of(case, seconds) if asked is None else asked.result(seconds)

    def workload(self, case: Case) -> Workload:
        """Return the workload of a case, the same one each time."""
        key = f"{case.workload} {sorted(case.options.items())}"
        if key not in self.workloads:
            self.workloads[key] = workloads.get(case.workload, **case.options)
        return self.workloads[key]

    def is_ready(self, case: Case) -> bool:
        """Return whether what a case needs of the worker, if anything, is there."""
        asked = self.asked.get(need(case))
        return asked is None or asked.done()

    def arguments_of(self, case: Case) -> dict[str, Any]:
        """Return what every function of a worker takes of a case."""
        workload = self.workload(case)
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


def why(error: Exception) -> tuple[Outcome, str]:
    """Return how a case ended that raised this, and a sentence on it."""
    if isinstance(error, Ended):
        return error.outcome, str(error)
    if isinstance(error, TimeoutError):
        return Outcome.TIMED_OUT, "the worker that was asked for its operators is not done"
    return explain(error, "preparing the case")


def need(case: Case) -> str:
    """Return what a case needs of the worker that sees no card; empty if nothing."""
    if case.kind is Kind.OPERATORS:
        return case.key("")
    if not case.config.is_planned:
        return ""
    plain = dataclasses.replace(case.config, memory_budget=1.0)
    return f"plans of {case.workload} {sorted(case.options.items())}, {plain}"


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


def bench_of(device: torch.device) -> Bench:
    """Return the bench of a device of this machine; on a card, its memory is empty then."""
    at_start = driver.used_bytes(device) if device.type == "cuda" else None
    if device.type == "cuda":
        isolation.predicting.ensure()  # it starts while this process meets the card
        torch.cuda.init()
    return Bench(device=device, target=resolve(str(device)), at_start_bytes=at_start or 0)
