"""`Recording`: what a run over fake tensors did: operators, storages, births and deaths."""

from __future__ import annotations

from dataclasses import dataclass, field

from memlab.operators.signatures import Signature, TensorSpec
from memlab.trace import Interval, Phase

OUTSIDE = Interval(step=-1, phase=Phase.BUILD)


@dataclass(slots=True, eq=False)
class Operator:
    """One dispatched operator.

    Attributes:
        name: as the profiler calls it, for instance "aten::addmm".
        signature: None where no kernel runs (a view).
        outputs: the tensors that it returned; none of a view.
        module: index of the module at work, -1 where none is known.
        interval: index of the interval that it ran in.
        reads: blocks of its arguments, in forward and backward; none of a view.
        writes: those among them that it changes in place.
        forward: of a backward operator, the number of the forward one that it differentiates; -1.
        crosses: whether it copies between the device and the host.
        beside: whether that copy has a stream of its own, as offloading's have.
        by_values: whether the sizes of what it returns depend on values, not on its signature.
    """

    name: str
    signature: Signature | None
    outputs: tuple[TensorSpec, ...]
    module: int
    interval: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    forward: int = -1
    crosses: bool = False
    beside: bool = False
    by_values: bool = False


@dataclass(slots=True)
class ModuleCall:
    """One call of a module's forward: the operators from `first` up to `end`."""

    module: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """A storage: the operator that brought it into being, as which output, and its bytes."""

    operator: int
    output: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """A block's birth or its death, after `operator` operators, in an interval."""

    block: int
    is_birth: bool
    operator: int
    interval: int


@dataclass(slots=True, eq=False)
class Recording:
    """What a run would do, in order.

    Attributes:
        operators: every dispatched one.
        blocks: every storage on the device.
        events: births and deaths.
        intervals: in the order in which they ran.
        modules: path to index.
        calls: of modules, in the order in which they began.
        root: what the model itself is called among the modules.
        repeated: paths of the model's repeated blocks.
        recomputed: path of each recomputed module to whether it keeps outputs of operators.
        parameters: block to path.
        states: block of the optimizer's state to the path of its parameter.
        parameter_formats: of the model's parameters, by torch's names.
        notes: sentences on how the step was built.
        assumptions: sentences: what was assumed where the run depends on values.
        host_bytes: held in the host's memory for the device, at most.
        is_ragged: whether batches of different numbers of samples, or one micro-batch and the
            next, differ in more than that.
        is_scripted: whether TorchScript runs a part of the model.
        branched: whether one of them decides what is run at all.
        spread: whether one of them decides how work is spread over parts of the model.
    """

    operators: list[Operator] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=lambda: [OUTSIDE])
    modules: dict[str, int] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    root: str = ""
    repeated: tuple[str, ...] = ()
    recomputed: dict[str, bool] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    parameter_formats: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumptions: list[str] = field(default_factory=list)
    host_bytes: int = 0
    is_ragged: bool = False
    is_scripted: bool = False
    branched: bool = False
    spread: bool = False
