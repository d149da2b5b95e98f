"""Measure a step on the real device, in this process: a memory pass, then a time pass.

Both passes run the same step. The memory pass runs under a profiler, the time pass does not. Each
pass builds its own model and drops it, so that neither sees the other's tensors.
"""

import contextlib
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memlab._util.collectives import Call, communication_of
from memlab._util.torch_private.ranks import group_in, sharded_types, waited_by
from memlab._util.torch_private.tensors import TorchDispatchMode
from memlab._util.units import format_bytes, format_seconds
from memlab.config import Sharding, StepConfig
from memlab.devices.cards import of_device
from memlab.devices.generators import preserved_random_state
from memlab.devices.here import LoadWatch, describe, synchronize, versions_here
from memlab.devices.operators import NAMESPACES, call_of_collective, signature_of
from memlab.errors import WorkloadError
from memlab.memory import cuda
from memlab.memory.lifetimes import build_peak_bytes, first_crossing, growth_notes, step_memory
from memlab.memory.meter import Meter, record
from memlab.result import Outcome, Source, StepResult
from memlab.running import SMALLER, Progress, Report, explain, out_of_memory
from memlab.techniques.compilation import forget, is_compiled
from memlab.techniques.meta_init import peak_notes
from memlab.techniques.offload import offload
from memlab.techniques.optimizers.optimizers import states_of
from memlab.techniques.step import Step, build_step, notes
from memlab.techniques.technique import Plan
from memlab.trace import Phase, Trace
from memlab.tracing.fakify import NUM_STEPS, SETTLED, is_scripted, noticed_script_functions
from memlab.workload import Workload

# The collectives that a real step calls, seen where PyTorch dispatches its operators.
#
# DistributedDataParallel calls them in C++ and `fully_shard` in Python; all of them are
# dispatched. The step runs slower meanwhile, and Python holds its tensors a little longer,
# so it is neither timed nor metered.


class CollectiveCalls(TorchDispatchMode):
    """Notes the collectives of this rank while it is entered.

    Attributes:
        found: in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Call] = []
        self._passed_on = sharded_types()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it if it is a collective."""
        if any(issubclass(kind, self._passed_on) for kind in types):
            return NotImplemented  # the operators on the parts of these tensors come here
        if func.namespace in NAMESPACES:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        signature = signature_of(func, args, kwargs)
        if call_of_collective(signature, 1) is None:
            return
        found = call_of_collective(signature, len(group_in(args)[1]))
        assert found is not None
        self.found.append(found)


# Threads that carry out collectives, and frees in them that no profile sees.
#
# On a CPU, Gloo's threads hold the tensors of a collective until shortly after it is done.
# If the step drops such a tensor in this moment, the thread is the last to hold it, and
# frees it outside of any profile: the trace then counts its bytes to the end. So a metered
# step waits after each collective until these threads have nothing left to do, lets them go
# on where it would take their processor, and a trace says how many bytes it may count too
# much.

PAUSE_SECONDS = 0.003  # in which a thread that was told of the end begins to run
MOST_PAUSE_SECONDS = 0.05  # busy with other programs; a thread of a person may never rest
THREADS = Path("/proc/self/task")  # of this process, on Linux


def pause() -> None:
    """Wait until no other thread of this process runs or waits for a processor."""
    end = time.monotonic() + MOST_PAUSE_SECONDS
    time.sleep(PAUSE_SECONDS)
    while _are_others_at_work() and time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)


def _are_others_at_work() -> bool:
    own = str(threading.get_native_id())
    try:
        others = [thread for thread in os.listdir(THREADS) if thread != own]
    except OSError:
        return False
    return any(_state_of(thread) == "R" for thread in others)


def _state_of(thread: str) -> str:
    """Return the letter by which Linux says what a thread does: R for running, or ready to."""
    try:
        # the name in brackets may hold anything
        return (THREADS / thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return ""


@contextlib.contextmanager
def paused_for() -> Iterator[None]:
    """Pause after each collective that Python code waits for, until its thread holds no tensor.

    Not for a timed step. For collectives of DistributedDataParallel, which C++ code waits for, the
    pause is before the next forward, as the second one makes its buckets of gradients anew. Those
    of its constructor have no pause: the thread that wakes the step could only lose its processor
    to it, and `SCHED_BATCH` is Linux's word for a thread that takes none on waking.
    """
    kind: Any = dist.Work
    replica: Any = DistributedDataParallel
    own, own_forward = kind.wait, replica.forward

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        pause()
        return out

    def wait_for(own: Any, tensor: Any) -> Any:
        out = own(tensor)
        pause()
        return out

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        pause()
        return own_forward(self, *args, **kwargs)

    kind.wait, replica.forward = wait, forward
    try:
        with waited_by(wait_for), _yielding():
            yield
    finally:
        kind.wait, replica.forward = own, own_forward


@contextlib.contextmanager
def _yielding() -> Iterator[None]:
    """Let the thread that calls this take no processor from another when it wakes, on Linux.

    A sandbox may forbid it. Then only more passes have frees that no profile sees.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return

    own = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, *own)


def unseen_free_bytes(trace: Trace) -> int:
    """Return the bytes of blocks that a trace never frees, though their addresses were used again.

    With them all blocks that are left at the end: a run drops everything that it makes.
    """
    live: dict[int, int] = {}
    unseen = 0
    for address, nbytes in zip(trace.address.tolist(), trace.nbytes.tolist(), strict=True):
        if nbytes > 0:
            unseen += live.get(address, 0)
            live[address] = nbytes
        else:
            live.pop(address, None)
    return unseen + sum(live.values())


Build = Callable[..., Step]
"""`build_step` with all arguments given except `mark`."""

MOST_PASSES = 8  # over memory, for ranks whose collectives free unseen
MOST_UNSEEN_BYTES = 1024
STOPPED_BY_ANOTHER = "not timed, because another rank went above the limit"
MAX_SKIPPED_UPDATES = 24  # GradScaler halves its scale at each; 2**16 is then below any overflow


def measure_in_process(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    *,
    repeats: int,
    warmup: int,
    seed: int,
    memory_limit: int | None,
    plan: Plan | None = None,
    report: Report,
    agreed: Callable[[bool], bool] = bool,
) -> StepResult:
    """Measure what the step costs on this device. Errors of the step are outcomes, not raised.

    Args:
        workload: what is trained.
        config: how it is trained.
        device: of this machine.
        repeats: number of timed steps; the result quotes their median.
        warmup: number of untimed steps before them.
        seed: set before the model, the batch and each step.
        memory_limit: bytes; exceeding it is `out_of_memory`. On a CPU it limits allocated bytes, on
            CUDA what the caching allocator reserves.
        plan: of the config's memory budget.
        report: called during the run; an error that it raises ends the run.
        agreed: of a rank, asks all ranks whether they go on to the next pass.
    """
    built: dict[str, Any] = {}

    def build(**options: Any) -> Step:
        step = build_step(workload, config, device, plan=plan, seed=seed, **options)
        built.update(parameter_formats=step.parameter_formats, notes=step.notes)
        return step

    facts: dict[str, Any] = {
        "source": Source.MEASURED,
        "device": str(device),
        "versions": versions_of(device),
        "config": config,
        "workload_name": workload.name,
        "own_optimizer": workload.make_optimizer is not None,
        "memory_limit_bytes": memory_limit,
        "usable_memory_bytes": of_device(device).usable_bytes if device.type == "cuda" else None,
    }
    meter, timing = Meter(), False
    try:
        with preserved_random_state(device), cuda.limited_to(memory_limit, device):
            is_shared = config.sharding is not Sharding.NONE and device.type == "cpu"
            found: dict[str, Any] = {}
            least_unseen = math.inf
            for _ in range(MOST_PASSES):  # each rank keeps the best of its own
                meter = Meter()
                tried, unseen = _memory_pass(
                    workload, config, device, seed, memory_limit, build, meter, report, is_shared
                )
                if unseen < least_unseen:
                    found, least_unseen = tried, unseen
                if agreed(least_unseen < MOST_UNSEEN_BYTES):
                    break
            facts |= found
            facts["parameter_formats"] = built["parameter_formats"]
            facts["notes"] = (*notes(config, device, plan), *built["notes"], *facts["notes"])
            if not agreed("outcome" not in facts):
                facts = {"outcome": Outcome.CANCELLED, "message": STOPPED_BY_ANOTHER} | facts
                return StepResult(**facts).against_limit(memory_limit)

            timing = True
            facts |= _time_pass(workload, config, seed, repeats, warmup, build, report)
    except (Exception, SystemExit) as error:  # an error of a person's model is an outcome
        outcome, message = explain(error, "a timed step" if timing else meter.place_of(error))
        ended = {"outcome": outcome, "message": message}
        return StepResult(**{**built, **facts, **ended}).against_limit(memory_limit)
    finally:
        clean_up(config, device)

    result = StepResult(**facts, outcome=Outcome.OK, message=_summary(facts))
    return result.against_limit(memory_limit)


def _memory_pass(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    seed: int,
    memory_limit: int | None,
    build: Build,
    meter: Meter,
    report: Report,
    is_shared: bool,
) -> tuple[dict[str, Any], int]:
    """Return peaks and timeline of the first step that begins with optimizer state.

    The number is of bytes that threads of collectives freed unseen, if the CPU `is_shared` by
    ranks; the peak may be too high by as much.
    """
    peaks: list[cuda.Peaks | None] = []
    settled: list[tuple[int, bool]] = []
    hosts: list[offload.HostMemory] = []

    def run() -> None:
        report(Progress(text=f"building {workload.name}", fraction=0.0))
        step = build(mark=partial(meter.mark, -1))
        meter.know(step.with_loss)
        # hooks on the calls of modules would change a compiled graph
        with contextlib.nullcontext() if is_compiled(config) else meter.modules(step.model):
            settled.append(_run_until_settled(step, partial(metered_step, step)))
        hosts.append(step.host_memory)
        meter.mark(-1, Phase.TEARDOWN, 0)

    def metered_step(step: Step, index: int, what: str) -> float:
        report(Progress(text=f"measuring memory, {what}", fraction=min(0.1 + 0.1 * index, 0.3)))
        step.set_seed(seed)
        cuda.reset_peaks(device)
        loss = step(partial(meter.mark, index))
        kept = (
            states_of(step.with_loss, step.optimizer) if step.engine is None else step.engine.held()
        )
        meter.know_states(step.with_loss, kept)
        peaks.append(cuda.read_peaks(device))
        return loss

    with paused_for() if is_shared else contextlib.nullcontext():
        trace = record(run, meter, device)
    unseen = unseen_free_bytes(trace) if is_shared else 0
    _check_born(trace)
    last = len(peaks) - 1
    facts, said = _facts_of_trace(trace, last), _said_by(len(peaks), *settled[0])
    said += _left_over(trace, config)
    if len(trace.nbytes) and last > 0 and config.sharding is Sharding.NONE:
        said += growth_notes(trace, last)

    if (stats := peaks[last]) is not None:
        facts["peak_reserved_bytes"] = stats.reserved_bytes
        traced = facts.get("peak_allocated_bytes", 0)
        # the allocator's own count is exact, so a trace that differs has missed something
        if stats.allocated_bytes != traced:
            facts |= {
                "peak_allocated_bytes": stats.allocated_bytes,
                "peak_by_category": None,
                "peak_holdings": (),
            }
            said.append(
                f"The trace shows a peak of {format_bytes(traced)}, but the allocator's statistics "
                f"say {format_bytes(stats.allocated_bytes)}, so no breakdown is given."
            )

    if unseen >= MOST_UNSEEN_BYTES:
        said.append(
            f"The threads of collectives freed {format_bytes(unseen)} that the meter did not see: "
            "the peak may be too high by as much."
        )
    built = peak_notes(config, build_peak_bytes(trace)) if len(trace.nbytes) else []
    facts["notes"] = (*said, *built, *offload.notes(config, hosts[0], facts.get("timeline")))
    facts |= offload.facts(config, hosts[0])
    if memory_limit is None or device.type == "cuda":  # there the allocator was held to the limit
        return facts, unseen
    return facts | _if_over(memory_limit, trace, facts["peak_allocated_bytes"]), unseen


def _facts_of_trace(trace: Trace, last_step: int) -> dict[str, Any]:
    """Return peaks, breakdown and timeline; nothing if the profiler reported no allocation."""
    if not len(trace.nbytes):
        return {}

    memory = step_memory(trace, last_step)
    return {
        "timeline": memory.timeline,
        "peak_allocated_bytes": memory.peak_bytes,
        "peak_by_category": memory.timeline.peak_by_category,
        "peak_holdings": memory.holdings(),
        "peak_place": memory.peak_place,
        "first_step_peak_bytes": step_memory(trace, 0).peak_bytes,
    }


def _run_until_settled(step: Step, run: Callable[[int, str], float]) -> tuple[int, bool]:
    """Run steps until one is like all later ones: it begins with optimizer state and updates.

    This is normally the second step. It is the third if TorchScript runs a part of the model, and
    a later one if the loss scaler skips updates. Returns the number of updates, and whether
    TorchScript ran.
    """
    updates, scripted = 0, [is_scripted(step.model)]
    for index in range(MAX_SKIPPED_UPDATES + NUM_STEPS):
        scale = step.loss_scale
        with noticed_script_functions(lambda: scripted.append(True)):
            loss = run(index, "step with optimizer state" if updates else "first step")
        updates += step.loss_scale >= scale
        needed = NUM_STEPS if any(scripted) else 2
        # if the loss itself is NaN, no smaller scale helps
        if updates == needed or (index > 0 and not math.isfinite(loss)):
            break

    return updates, any(scripted)


def _check_born(trace: Trace) -> None:
    """Raise WorkloadError if a parameter existed before the run, which then did not count it."""
    born = set(trace.address[trace.nbytes > 0].tolist())
    if len(born) and not trace.parameters.keys() <= born:
        raise WorkloadError(
            "build_model returned parameters that existed before it was called, whose bytes cannot "
            "be counted; build a new model each time, for instance copy.deepcopy(model)"
        )


def _said_by(num_steps: int, updates: int, has_script: bool) -> list[str]:
    said = [SETTLED] if has_script else []
    if num_steps > updates:
        said.append(f"GradScaler skipped {num_steps - updates} updates after an overflow.")
    if updates == 0:
        said.append("No update was made, so these numbers contain no optimizer state.")
    return said


def _left_over(trace: Trace, config: StepConfig) -> list[str]:
    """Say what is still held at the end.

    Of ranks it is said from `MOST_UNSEEN_BYTES` on: torch.distributed keeps 4 bytes of a device
    mesh for each rank, and what threads of collectives free is not seen.
    """
    least = 1 if config.sharding is Sharding.NONE else MOST_UNSEEN_BYTES
    if trace.leftover_bytes < least:
        return []
    return [
        f"{format_bytes(trace.leftover_bytes)} were still held after the model, the optimizer "
        "and the batch were deleted: the workload or a library keeps tensors of its own."
    ]


def _if_over(limit_bytes: int, trace: Trace, peak_bytes: int) -> dict[str, Any]:
    """Return the outcome of a run on a CPU that went over its limit; nothing if it did not."""
    crossing = first_crossing(trace, limit_bytes)
    if crossing is None:
        return {}

    needs = f"the step needs {format_bytes(peak_bytes)}"
    remedy = SMALLER
    if crossing.phase is Phase.BUILD:  # no step has run yet, so its peak is not known
        needs = f"this run needs {format_bytes(int(np.cumsum(trace.nbytes).max()))}"
        remedy = "use a smaller model or a higher memory_limit"

    why = f"{needs} of allocated memory, and the limit is {format_bytes(limit_bytes)}"
    return {
        "outcome": Outcome.OUT_OF_MEMORY,
        "message": out_of_memory(f"in {crossing}", why, remedy),
    }


def _time_pass(
    workload: Workload,
    config: StepConfig,
    seed: int,
    repeats: int,
    warmup: int,
    build: Build,
    report: Report,
) -> dict[str, Any]:
    report(Progress(text=f"building {workload.name} again, without the meter", fraction=0.3))
    watch = LoadWatch()
    step = build()
    if step.scaler is not None:
        report(Progress(text="finding the loss scale", fraction=0.3))
        _run_until_settled(step, lambda index, what: timed_step(step, seed)[1])

    for index in range(warmup):
        report(Progress(text=f"warm-up {index + 1} of {warmup}", fraction=0.35))
        timed_step(step, seed)

    seconds: list[float] = []
    loss = math.nan
    for index in range(repeats):
        took = f", {format_seconds(seconds[-1])} a step" if seconds else ""
        fraction = 0.4 + 0.6 * index / repeats
        report(Progress(text=f"timing step {index + 1} of {repeats}{took}", fraction=fraction))
        elapsed, loss = timed_step(step, seed)
        seconds.append(elapsed)

    # the median ignores single steps that other programs slowed down
    median = float(np.median(seconds))
    calls = (
        [] if config.sharding is Sharding.NONE else _collective_calls(step, seed, warmup + repeats)
    )
    return {
        "communication": communication_of(calls),
        "step_seconds": median,
        "step_seconds_all": tuple(seconds),
        "others_share": watch.others_share(),
        "samples_per_second": config.batch_size / median,
        "loss": loss,
        "finite": math.isfinite(loss),
    }


def _collective_calls(step: Step, seed: int, num_steps: int) -> list[Call]:
    """Run the step once more and return the collectives that this rank calls in it.

    In the second step DistributedDataParallel also agrees on new buckets.
    """
    if num_steps < 2:
        timed_step(step, seed)
    calls = CollectiveCalls()
    with calls:
        timed_step(step, seed)
    return calls.found


def timed_step(step: Step, seed: int) -> tuple[float, float]:
    """Run the step once and return its wall time in seconds and its loss."""
    step.set_seed(seed)
    synchronize(step.device)
    start = time.perf_counter()
    loss = step()
    synchronize(step.device)
    return time.perf_counter() - start, loss


def _summary(facts: dict[str, Any]) -> str:
    place = facts.get("peak_place")
    text = (
        f"peak {format_bytes(facts['peak_allocated_bytes'])} allocated"
        f"{f' in {place}' if place else ''}, {format_seconds(facts['step_seconds'])} a step"
    )
    return text if facts["finite"] else f"{text}; the loss is not finite ({facts['loss']})"


def versions_of(device: torch.device) -> dict[str, str]:
    """Return the versions that a measurement on a device depends on."""
    found = versions_here() | {
        "device_name": describe(device),
        "threads": str(torch.get_num_threads()),
    }
    return found | ({"cuda": str(torch.version.cuda)} if device.type == "cuda" else {})


def clean_up(config: StepConfig, device: torch.device) -> None:
    """Give back what a run leaves behind: compiled code, cycles, cached segments."""
    if is_compiled(config):
        forget()
    gc.collect()
    cuda.release(device)
