"""The bench of the suite: models are built once, and the worker is asked ahead."""

import contextlib
import copy
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from memlab.cli.device_visit import SEED, Bench, Case
from memlab.cost_model.traced_step import StepOperators
from memlab.devices.operators import OperatorCost, Signature
from memlab.runtime import isolation
from memlab.store.records import Kind
from memlab.techniques.step import set_seed
from memlab.workload import Workload


@dataclass(slots=True, eq=False)
class SuiteBench(Bench):
    """A bench for hundreds of cases.

    Attributes:
        models: built once each, on the CPU, by workload and options; on a card only.
        measuring_seconds: spent on measuring: no models built once, no plans, no waiting.
        asked: operators and plans that the worker was asked for ahead of the cases that need them,
            by what `need` calls them; on a card only.
        stop: set when the visit is over, so that the worker is not waited for.
    """

    models: dict[str, torch.nn.Module] = field(default_factory=dict)
    measuring_seconds: float = 0.0
    asked: dict[str, Future[Any]] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the time meanwhile as measuring."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.measuring_seconds += time.monotonic() - start

    def ask(self, function: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Have the worker do what needs fake tensors, until the visit is over."""
        return isolation.run(function, arguments, timeout_seconds=seconds, cancel=self.stop)

    def run(self, function: str, arguments: dict[str, Any], **options: Any) -> Any:
        """Run real steps, and count their time."""
        with self.measuring():
            return Bench.run(self, function, arguments, **options)

    def time_operators(
        self, signatures: Sequence[Signature], seconds: float
    ) -> tuple[dict[Signature, OperatorCost], dict[Signature, str]]:
        """Time operators, and count that too."""
        with self.measuring():
            return Bench.time_operators(self, signatures, seconds)

    def operators_of(self, case: Case, seconds: float) -> StepOperators:
        """Return the operators of a case's step, as they were asked for ahead if they were."""
        asked = self.asked.get(need(case))
        if asked is not None:
            found: StepOperators = asked.result(seconds)
            return found
        return self.ask_operators(case, seconds)

    def ask_operators(self, case: Case, seconds: float) -> StepOperators:
        """Return the operators of a case's step, from the worker."""
        # on a CPU operators are run alone by the worker: that is what is measured of them
        with contextlib.nullcontext() if self.is_card else self.measuring():
            return Bench.operators_of(self, case, seconds)

    def is_ready(self, case: Case) -> bool:
        """Return whether what a case needs of the worker, if anything, is there."""
        asked = self.asked.get(need(case))
        return asked is None or asked.done()

    def arguments_of(self, case: Case) -> dict[str, Any]:
        """Return what every function that runs real steps takes; on a card with a built model."""
        found = Bench.arguments_of(self, case)
        if self.is_card and not case.config.init_on_meta:
            build = partial(alike, self._built(found["workload"]))
            found["workload"] = dataclasses.replace(found["workload"], build_model=build)
        return found

    def _built(self, workload: Workload) -> torch.nn.Module:
        """Return the model of a workload, built on the CPU the first time."""
        key = repr(getattr(workload.build_model, "__self__", workload.name))
        if key not in self.models:
            set_seed(SEED)
            self.models[key] = workload.build_model()
        return self.models[key]


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
