"""Record a step as a device would run it, with the memory and time of its kernels.

A prediction, a plan and the list of a step's operators all begin with `from_traced_step`. Each
gives it a function of a `TracedStep`. If a person's model raises an error, they get a `Failure`.
Left out, and refused: on a card compiled steps of several ranks or of other modes; fp8.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import textwrap
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from memlab._util.torch_private.compiler import DYNAMO, backend_error
from memlab._util.torch_private.tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from memlab.config import Attention, CompileMode, Precision, Sharding, StepConfig
from memlab.cost_model.targets import Kernels, costs_found_here, kernels_of
from memlab.devices.cards import Card, Target
from memlab.devices.generators import preserved_random_state
from memlab.devices.operators import KnownCosts, Signature
from memlab.errors import UnsupportedError
from memlab.memory.garbage import older_objects_frozen
from memlab.result import Outcome
from memlab.running import Progress, Report, explain
from memlab.techniques import registry
from memlab.techniques.compilation import asked_by, is_compiled
from memlab.techniques.technique import Plan
from memlab.tracing import fake_cuda, transformers_attention
from memlab.tracing.program import Program
from memlab.tracing.trace_step import trace_step
from memlab.tracing.tracker import CompilingTracker, Tracker
from memlab.workload import Workload

MOST_SAID = 160  # characters of PyTorch's own message
VOLTA = (7, 0)  # the oldest cards for which Triton compiles
COMPILED_AS_A_WHOLE = (
    "a compiled step is predicted as a whole, without its operators and plans; use "
    "memlab.measure, or compile=False and budget_engine='eager'"
)

Made = TypeVar("Made")
Recorded = TypeVar("Recorded")

OF_JAGGED = "create_symbolic_nested_int"  # torch's function for a size that differs by sample


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedStep:
    """A step over fake tensors, as a target would run it.

    Attributes:
        config: how the step trains.
        target: a CPU, or a CUDA card that need not be there.
        device: the device of its fake tensors.
        program: the recording.
        report: called while operators run alone.
    """

    config: StepConfig
    target: Target
    device: torch.device
    program: Program
    report: Report

    def kernels(
        self,
        *,
        remeasure_before: float | None = None,
        timed: bool = True,
        judged: int | None = None,
    ) -> Kernels:
        """Return the memory and time of its kernels; the arguments are those of `kernels_of`.

        With `timed=False` a card has no times either.
        """
        text = "running new operators alone"
        card, target = self.target.card, self.target
        if card is not None and (self.config.offloads_shards or not timed):
            # if the host updates the weights, no rate of the card says in what time
            target = replace(target, card=replace(card, memory_bytes_per_second=None))
        return kernels_of(
            self.program,
            self.config.micro_batch_sizes,
            target,
            lambda share: self.report(Progress(text=text, fraction=share)),
            tf32_matmul=self.config.precision is Precision.TF32,
            remeasure_before=remeasure_before,
            timed=timed,
            judged=judged,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a step could not be recorded, or the function given to `from_traced_step` failed.

    Attributes:
        outcome: never ok.
        message: a sentence that says why.
        parameter_formats: number formats of the model's parameters; empty if it was not built.
    """

    outcome: Outcome
    message: str
    parameter_formats: tuple[str, ...] = ()


def from_traced_step(
    make: Callable[[TracedStep], Made],
    workload: Workload,
    config: StepConfig,
    target: Target,
    *,
    seed: int,
    plan: Plan | None = None,
    every_rank: bool = True,
    compiles: bool = False,
    report: Report,
    purpose: str,
) -> Made | Failure:
    """Record a step in this process and return the result of `make`, or why there is none.

    Args:
        make: called with the recorded step. An error that it raises becomes a `Failure` too.
        workload: what is trained.
        config: how.
        target: a CPU, or a CUDA card that need not be there.
        seed: set before the model, the batch and each step.
        plan: of the config's memory budget.
        every_rank: whether ranks that hold less than the one that holds most are recorded too.
        compiles: whether a compiled step is recorded; else it is refused.
        report: called with the progress. A `BaseException` that it raises stops it.
        purpose: the end of the progress text, such as "on fake tensors".
    """

    def record(device: torch.device, tracker: Tracker) -> TracedStep:
        tracker.beat = lambda doing: report(Progress(text=doing or text, fraction=0.1))
        program = trace_step(workload, config, device, seed, tracker, plan, every_rank=every_rank)
        return TracedStep(
            config=config, target=target, device=device, program=program, report=report
        )

    text = f"recording {workload.name} {purpose}"
    return from_recording(record, make, config, target, compiles=compiles, report=report, text=text)


def from_recording(
    record: Callable[[torch.device, Tracker], Recorded],
    make: Callable[[Recorded], Made],
    config: StepConfig,
    target: Target,
    *,
    compiles: bool = False,
    report: Report,
    text: str,
    place: str = "",
) -> Made | Failure:
    """Record something in this process and return the result of `make`, or why there is none.

    Args:
        record: called where tensors dispatch as on the target, with their device.
        make: called with what it returns. An error that it raises becomes a `Failure` too.
        config: how the step trains.
        target: a CPU, or a CUDA card that need not be there.
        compiles: whether `record` compiles a compiled step; else it is refused.
        report: called with the progress. A `BaseException` that it raises stops it.
        text: of the progress.
        place: what raises the errors; "" is the step of a workload, by its phase.
    """
    tracker, threads = None, torch.get_num_threads()
    try:
        _check(config, target, compiles=compiles)
        torch.set_num_threads(config.threads_of_rank(threads))  # kernels take memory by them
        fake_cuda.device()  # autograd counts the devices at the first backward of a process
        with (
            transformers_attention.flash_attn_as_on_card(config.attention),
            transformers_attention.flex_attention_as_on_card(config.attention),
            _recording_for(target) as device,
            preserved_random_state(torch.device("cpu")),
        ):
            tracker = (CompilingTracker if is_compiled(config) else Tracker)(device.type)
            report(Progress(text=text, fraction=0.1))
            recorded = record(device, tracker)
        with older_objects_frozen():
            return make(recorded)
    except (Exception, SystemExit) as error:  # what a person's model raises is an outcome
        failure = _failure(error, tracker, place)
        # the error and its frames refer to one another, and the frames to a model built for real,
        # which would stay beside that of the next prediction
        traceback.clear_frames(error.__traceback__)
    finally:
        torch.set_num_threads(threads)
    del tracker
    gc.collect()
    return failure


def _check(config: StepConfig, target: Target, *, compiles: bool) -> None:
    """Raise UnsupportedError if the step cannot be recorded or the card cannot run it."""
    # the check of an optimizer may import its library, which must not happen during a recording
    registry.check(config, torch.device(target.kind), target.card)
    if is_compiled(config) and not compiles:
        raise UnsupportedError(COMPILED_AS_A_WHOLE)
    if is_compiled(config) and target.kind != "cpu":
        _check_compiled_for_a_card(config, target.card)
    if config.precision is Precision.FP8_MIXED:
        raise UnsupportedError(
            "precision='fp8-mixed' cannot be predicted: what torchao's fp8 layers hold is not "
            "known before they run; use memlab.measure on such a card, or precision='bf16-mixed'"
        )


def _check_compiled_for_a_card(config: StepConfig, card: Card | None) -> None:
    """Raise UnsupportedError if what Inductor would plan for a card is not known without it."""
    if card is not None and (card.compute_capability or VOLTA) < VOLTA:
        raise UnsupportedError(
            f"{asked_by(config)} on {card.title}: Triton, in which Inductor writes kernels, needs "
            "compute capability 7.0 or newer; use compile=False and budget_engine='eager'"
        )
    if config.attention is Attention.FLEX_ATTENTION:
        raise UnsupportedError(
            f"attention='flex_attention' with {asked_by(config)} cannot be predicted: the compiler "
            "writes the kernel of attention into the graph, which is not known without it; use "
            "memlab.measure on the card, or compile=False and budget_engine='eager'"
        )
    if config.compile_mode is not CompileMode.DEFAULT:
        raise UnsupportedError(
            f"compile_mode={str(config.compile_mode)!r} cannot be predicted: it times kernels on "
            "the card, or keeps CUDA graphs with memory of their own; use memlab.measure on the "
            "card, or compile_mode='default'"
        )
    if config.sharding is not Sharding.NONE:
        raise UnsupportedError(
            f"a compiled step with sharding={str(config.sharding)!r} cannot be predicted for "
            "cards: where the hooks of the ranks divide the graph is not known without them; use "
            "memlab.measure on the cards, or compile=False"
        )


@contextlib.contextmanager
def _recording_for(target: Target) -> Iterator[torch.device]:
    """Yield the device on which fake tensors dispatch as they would on the target."""
    if target.kind == "cpu":
        yield torch.device("cpu")
    else:
        capability = None if target.card is None else target.card.compute_capability
        with fake_cuda.as_cuda(capability, target.card) as device:
            yield device


def _failure(error: BaseException, tracker: Tracker | None, named: str) -> Failure:
    place: object = named or ("building the step" if tracker is None else tracker.place())
    outcome, message = explain(_in_other_words(error, place), place)
    if outcome is Outcome.OUT_OF_MEMORY:  # this machine's memory, not the step's
        outcome = Outcome.UNSUPPORTED
        message = f"the prediction itself needs more memory than there is: {message}"
    formats = () if tracker is None else tracker.recording.parameter_formats
    return Failure(outcome=outcome, message=message, parameter_formats=formats)


def _in_other_words(error: BaseException, place: object) -> BaseException:
    """Return an error with a clear message instead of one that only a fake tensor can raise."""
    text = str(error).splitlines()[0] if str(error) else ""
    if DYNAMO in sys.modules and isinstance(error, backend_error()):
        inner = error.inner_exception
        if isinstance(inner, UnsupportedError):
            return inner
        said = textwrap.shorten(str(inner), MOST_SAID, placeholder=" ...")
        return UnsupportedError(
            f"{place}: what torch.compile plans cannot be found here ({said}); use "
            "memlab.measure, or compile=False"
        )
    is_numpy = "not supported for tensor subclasses" in text
    if is_numpy or isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return UnsupportedError(
            f"{place}: the model reads values of a tensor ({text}), which a prediction does not "
            "have; read them in make_batch, or use memlab.measure"
        )
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if OF_JAGGED in frames:
        return UnsupportedError(
            f"{place}: the model makes a nested tensor of jagged layout, whose sizes differ from "
            "sample to sample, which a prediction does not follow; pad the samples to one length, "
            "or use memlab.measure"
        )
    return error


# Which operators a step runs and what each costs: what a record of a device needs beside its
# runs.
#
# The step goes over fake tensors, as for a prediction. On a CPU each operator that is new is run
# alone; for a card its time is the datasheet's, which tells the operators that are worth timing.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepOperators:
    """The operators of a step.

    Attributes:
        outcome: ok, or why there are none.
        message: a sentence on that; empty if ok.
        seconds: by signature, of all its calls in the step together, predicted.
        costs: as found on this machine, on a CPU; None for a card.
    """

    outcome: Outcome
    message: str = ""
    seconds: dict[Signature, float] = field(default_factory=dict)
    costs: KnownCosts | None = None


def operators_in_process(
    workload: Workload,
    config: StepConfig,
    target: Target,
    *,
    seed: int,
    plan: Plan | None = None,
    report: Report,
) -> StepOperators:
    """Return the operators of a step, in this process; never raises for the step.

    Args:
        workload: what is trained.
        config: how.
        target: a CPU, or a CUDA card that need not be there.
        seed: set before the model, the batch and each step.
        plan: of the config's memory budget.
        report: called as for a prediction; what it raises ends it.
    """
    found = from_traced_step(
        _operators_of,
        workload,
        config,
        target,
        seed=seed,
        plan=plan,
        report=report,
        purpose="for its operators",
    )
    if isinstance(found, Failure):
        return StepOperators(outcome=found.outcome, message=found.message)
    return found


def _operators_of(step: TracedStep) -> StepOperators:
    kernels = step.kernels()
    recording = step.program.recording
    steps = step.program.steps_of(step.config.micro_batch_sizes)
    counts = [interval.step in steps for interval in recording.intervals]
    times = (
        [0.0] * len(recording.operators) if kernels.seconds is None else kernels.seconds.tolist()
    )

    seconds: dict[Signature, float] = defaultdict(float)
    for operator, time in zip(recording.operators, times, strict=True):
        # a copy between host and card is the bus's time, and no operator's
        if operator.signature is not None and counts[operator.interval] and not operator.crosses:
            seconds[operator.signature] += time
    return StepOperators(
        outcome=Outcome.OK,
        seconds=dict(seconds),
        costs=costs_found_here(seconds) if step.target.kind == "cpu" else None,
    )
