"""The device that cases are carried out on, and what is kept between them.

On a card everything runs in this process, and plans are made in a worker that sees no card. On a
CPU measuring is the worker's affair, since no older tensors may be alive where it is done.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from memlab import workloads
from memlab._util.units import from_milliseconds
from memlab.config import Precision, StepConfig
from memlab.cost_model.traced_step import StepOperators
from memlab.devices.cards import Target, resolve
from memlab.devices.here import available_memory_bytes, describe
from memlab.devices.operators import OperatorCost, Signature, as_in_training, prepare, to_text
from memlab.prediction.plans import plan_for
from memlab.result import Outcome, Source, StepResult
from memlab.running import Ended, Progress, explain
from memlab.runtime import isolation
from memlab.store.recorded import device_name
from memlab.store.records import Kind, RecordedRun, costs_to_line
from memlab.techniques.precision import matrix_products
from memlab.techniques.technique import Plan
from memlab.workload import Workload

# `Case`: one thing that a visit to a device records, and what tells it from all others.

# Set aside for good: what memlab says of them owes nothing to what they did.
HOLDOUT = {"vit-large", "lstm-large", "densenet-121", "lstm-text", "densenet-digits"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to record.

    Attributes:
        kind: a run, or what else a line can hold.
        group: of runs: why; else empty.
        workload: name in the zoo.
        options: of the zoo.
        config: of the step.
        setting: of the allocator, or the memory limit of a boundary; else empty.
    """

    kind: Kind = Kind.RUN
    group: str = "grid"
    workload: str
    config: StepConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    setting: str = ""

    @property
    def holdout(self) -> bool:
        """Whether it is set aside, never to be fitted."""
        return self.workload in HOLDOUT

    def key(self, torch_version: str) -> str:
        """Return what tells this case from all others, in a record of one device."""
        again = self.group if self.group == "again" else ""
        options = ", ".join(f"{name}={value!r}" for name, value in sorted(self.options.items()))
        parts = (self.kind, again, self.workload, options, self.config, self.setting, torch_version)
        return "|".join(map(str, parts))


# What a device of this machine is, and what its driver says of its memory. Nothing is ever
# set.
#
# The driver is asked through NVML (`pip install nvidia-ml-py`); without it nothing is known
# of other processes but what `torch.cuda.mem_get_info` tells.


def facts(device: torch.device) -> dict[str, Any]:
    """Return what a record says of its device."""
    title = describe(device)
    found: dict[str, Any] = {
        "device": device_name(device, title),
        "title": title,
        "type": device.type,
        "memory_bytes": available_memory_bytes(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "memory_bytes": properties.total_memory,
            "compute_capability": [properties.major, properties.minor],
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": version(),
            "process_bytes_by": "NVML" if nvml() is not None else "torch.cuda.mem_get_info",
        }
    return found


def nvml() -> Any:
    """Return the driver's library, None where it is not installed or does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # of its own kinds, which cannot be named without it
        return None
    return pynvml


def version() -> str | None:
    """Return the version of the driver; None where nobody says."""
    library = nvml()
    if library is None:
        return None
    with contextlib.suppress(library.NVMLError):
        found = library.nvmlSystemGetDriverVersion()
        return found.decode() if isinstance(found, bytes) else str(found)  # bytes until NVML 11.5
    return None


def used_bytes(device: torch.device) -> int | None:
    """Return what all processes hold on a card, the driver included; None where nobody says."""
    library = nvml()
    if library is not None:
        with contextlib.suppress(library.NVMLError):
            return int(library.nvmlDeviceGetMemoryInfo(_handle(library, device.index or 0)).used)
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - _own_bytes(device)


def _own_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if torch.cuda.is_initialized() else 0


def _handle(library: Any, index: int) -> Any:
    """Return the driver's handle of the card that PyTorch counts as this one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    if name.startswith(("GPU-", "MIG-")):
        return library.nvmlDeviceGetHandleByUUID(name)
    return library.nvmlDeviceGetHandleByIndex(int(name) if name.isdigit() else index)


def is_broken(device: torch.device) -> bool:
    """Return whether an error has left the device unusable for this process."""
    if device.type == "cpu":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except Exception:  # of many kinds: what matters is that nothing works any more
        return True
    return False


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
        at_start_bytes: what was held on the card before this process held anything.
        timed: operators that a line of this visit holds, TF32 told apart.
        workloads: by name and options, since plans are kept by workload and two alike differ.
    """

    device: torch.device
    target: Target
    at_start_bytes: int = 0
    timed: set[tuple[Signature, bool]] = field(default_factory=set)
    workloads: dict[str, Workload] = field(default_factory=dict)

    @property
    def is_card(self) -> bool:
        """Whether it is a CUDA card."""
        return self.device.type == "cuda"

    def ask(self, function: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Have the worker that sees no card do what needs fake tensors.

        Raises:
            Ended: there is no answer; says why.
        """
        return isolation.run(function, arguments, timeout_seconds=seconds)

    def run(self, function: str, arguments: dict[str, Any], **options: Any) -> Any:
        """Run real steps: on a card in this process, in which no worker is started meanwhile.

        Raises:
            Ended: there is no answer; says why.
        """
        if not self.is_card:
            return isolation.run(function, arguments, **options)
        with isolation.spare.waits(is_timed=True):
            return isolation.run_here(function, arguments, **options)

    def measure(
        self, case: Case, seconds: float, tell: Tell | None = None, **more: Any
    ) -> tuple[StepResult, Plan | None]:
        """Return what a step costs here, and the plan that it was run with."""
        plan = None
        try:
            plan = self.plan_of(case, seconds)
            more = {"repeats": REPEATS[self.device.type], "memory_limit": None} | more
            arguments = self.arguments_of(case) | {"plan": plan, "warmup": WARMUP} | more
            result: StepResult = self.run(
                "measure", arguments, timeout_seconds=seconds, on_progress=tell
            )
        except Exception as error:  # a model that cannot be built here is a result like any other
            result = self._without(case, error, Source.MEASURED)
        return result, plan

    def predict(self, case: Case, seconds: float) -> StepResult:
        """Return what a step is predicted to cost on the target."""
        try:
            arguments = self._over_fakes(case, seconds) | {"memory_limit": None}
            found: StepResult = self.ask("predict", arguments, seconds).result
        except Exception as error:  # as above
            return self._without(case, error, Source.PREDICTED)
        return found

    def operators_of(self, case: Case, seconds: float) -> StepOperators:
        """Return the operators of a case's step, from the worker."""
        try:
            arguments = self._over_fakes(case, seconds)
            found: StepOperators = self.ask("operators", arguments, seconds)
        except Ended as ended:
            return StepOperators(outcome=ended.outcome, message=str(ended))
        return found

    def time_operators(
        self, signatures: Sequence[Signature], seconds: float
    ) -> tuple[dict[Signature, OperatorCost], dict[Signature, str]]:
        """Return what `time_operators` finds on this device."""
        return time_operators(signatures, self.device, seconds)

    def plan_of(self, case: Case, seconds: float) -> Plan | None:
        """Return the plan of a case, None if it needs none.

        Raises:
            Ended: there is not a plan; says why.
        """
        run = partial(self.ask, seconds=seconds)
        return plan_for(self.workload(case), case.config, self.target, seed=SEED, run=run)

    def workload(self, case: Case) -> Workload:
        """Return the workload of a case, the same one each time."""
        key = f"{case.workload} {sorted(case.options.items())}"
        if key not in self.workloads:
            self.workloads[key] = workloads.get(case.workload, **case.options)
        return self.workloads[key]

    def arguments_of(self, case: Case) -> dict[str, Any]:
        """Return what every function that runs real steps takes of a case."""
        workload = self.workload(case)
        return {"workload": workload, "config": case.config, "device": self.device, "seed": SEED}

    def _over_fakes(self, case: Case, seconds: float) -> dict[str, Any]:
        """Return what every function that runs steps over fake tensors takes of a case."""
        facts = {"workload": self.workload(case), "config": case.config, "seed": SEED}
        return facts | {"target": self.target, "plan": self.plan_of(case, seconds)}

    def _without(self, case: Case, error: Exception, source: Source) -> StepResult:
        """Return the result of a case that has none but an error."""
        outcome, message = why(error)
        return StepResult(
            outcome=outcome, message=message, source=source, device=str(self.device),
            versions={"torch": torch.__version__}, config=case.config, workload_name=case.workload,
        )  # fmt: skip


AnyBench = TypeVar("AnyBench", bound=Bench)


def why(error: Exception) -> tuple[Outcome, str]:
    """Return how a case ended that raised this, and a sentence on it."""
    if isinstance(error, Ended):
        return error.outcome, str(error)
    if isinstance(error, TimeoutError):
        return Outcome.TIMED_OUT, "the worker that was asked for its operators is not done"
    return explain(error, "preparing the case")


def bench_of(device: torch.device, kind: type[AnyBench]) -> AnyBench:
    """Return the bench of a device of this machine; on a card, its memory is empty then."""
    at_start = used_bytes(device) if device.type == "cuda" else None
    if device.type == "cuda":
        isolation.predicting.ensure()  # it starts while this process meets the card
        torch.cuda.init()
    return kind(device=device, target=resolve(str(device)), at_start_bytes=at_start or 0)


# How long operators take on a card, each alone: CUDA events around calls in a row.
#
# Calls follow one another as in a step, so that where the host is slower than the kernel
# its time is what is found. Left out: fused RNNs, whose reserve nobody but their forward
# can make.

CALLS_BEFORE, MOST_CALLS, ENOUGH_SECONDS = 3, 50, 2e-3
NOT_ALONE = "_rnn"


def time_operators(
    signatures: Iterable[Signature], device: torch.device, seconds: float
) -> tuple[dict[Signature, OperatorCost], dict[Signature, str]]:
    """Return what operators cost in seconds, and of those that do not run alone the reason.

    Args:
        signatures: of the operators, the most important first.
        device: a card.
        seconds: to spend; what is not reached by then is in neither answer.
    """
    end = time.monotonic() + seconds
    costs: dict[Signature, OperatorCost] = {}
    reasons: dict[Signature, str] = {}
    with as_in_training():
        for signature in signatures:
            if time.monotonic() > end:
                break
            try:
                found = _seconds(signature, device)
            except Exception as error:  # of any operator there is, so that no kind can be named
                reasons[signature] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            costs[signature] = OperatorCost(output_bytes=(), peak_bytes=0, seconds=found)
    return costs, reasons


def _seconds(signature: Signature, device: torch.device) -> float:
    if NOT_ALONE in signature[0]:
        raise ValueError("a fused RNN does not run alone")
    call = prepare(signature, device)().__call__
    for _ in range(CALLS_BEFORE):
        call()
    once = _timed(call, 1, device)
    return _timed(call, max(1, min(MOST_CALLS, int(ENOUGH_SECONDS / max(once, 1e-6)))), device)


def _timed(call: Callable[[], Any], count: int, device: torch.device) -> float:
    """Return the seconds of one of so many calls in a row."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return from_milliseconds(begin.elapsed_time(end)) / count


# The lines that a visit writes of its cases: what a step cost, and what its operators take.

OPERATOR_SECONDS = 4.0  # of timing those of one case on a card
BEFORE_READING = {
    "cuda": ("build", "step", "synchronize", "empty_cache", "reset_peak_memory_stats", "seed",
             "step", "synchronize"),
    "cpu": ("build", "step", "seed", "step"),
}  # fmt: skip


def run_of(
    bench: Bench, case: Case, visit: str, seconds: float, memory_limit: int | None = None
) -> RecordedRun:
    """Return a run of a case.

    Args:
        bench: where.
        case: what.
        visit: that its line belongs to.
        seconds: that are left for it.
        memory_limit: bytes that it may not go beyond. A record of what a step costs leaves it out.
    """
    held: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.text.startswith("timing") and bench.is_card:
            used = used_bytes(bench.device)
            held.append(0 if used is None else used - bench.at_start_bytes)

    start = time.monotonic()
    result, plan = bench.measure(case, seconds, watch, memory_limit=memory_limit)
    return RecordedRun(
        visit=visit,
        group=case.group,
        workload=case.workload,
        options=case.options,
        holdout=case.holdout,
        seed=SEED,
        result=result.against_limit(None),
        plan=plan,
        process_bytes=max(held, default=None),
        wall_seconds=time.monotonic() - start,
        before_reading=BEFORE_READING[bench.device.type],
    )


def about(case: Case, visit: str) -> dict[str, Any]:
    """Return what every line but that of a run says of its case."""
    return {
        "visit": visit,
        "workload": case.workload,
        "options": dict(case.options),
        "config": case.config.to_dict(),
        "holdout": case.holdout,
        "setting": case.setting,
    }


def operators(bench: Bench, case: Case, seconds: float) -> dict[str, Any]:
    """Return the line of the operators of a step: on a CPU as calibrated, on a card timed now."""
    found = bench.operators_of(case, seconds)
    is_tf32 = case.config.precision is Precision.TF32
    line: dict[str, Any] = {"tf32": is_tf32, "overheads": {}, "reasons": {}}
    line |= {"outcome": str(found.outcome), "message": found.message}
    new = [s for s in found.seconds if (s, is_tf32) not in bench.timed]
    if found.costs is not None:
        costs = {s: cost for s, cost in found.costs.operators.items() if s in new}
        line["overheads"] = {str(p): value for p, value in found.costs.overheads.items()}
    else:
        ordered = sorted(new, key=lambda signature: -found.seconds[signature])
        with matrix_products(case.config.precision):
            costs, reasons = bench.time_operators(ordered, min(seconds, OPERATOR_SECONDS))
        line["reasons"] = {to_text(signature): why for signature, why in reasons.items()}
    bench.timed |= {(signature, is_tf32) for signature in costs}
    total = sum(found.seconds.values())
    told = sum(s for signature, s in found.seconds.items() if (signature, is_tf32) in bench.timed)
    return line | {"share_of_step": told / total if total else 0.0} | costs_to_line(costs)
