"""`Timeline`: the live bytes of one step, by category, instant by instant.

An instant is one allocation or one free. The same type holds what was measured, predicted and
recorded. `Trace` is what a meter sees: every allocation and every free of a whole run, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from memlab._util.checks import of_type

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import


class Category(StrEnum):
    """What a block is for, decided by its lifetime. The order is that of the timeline's columns."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    INPUTS = "inputs"


class Phase(StrEnum):
    """Phases of a run. A step is data, forward, backward for each micro-batch, then optimizer."""

    BUILD = "build"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    TEARDOWN = "teardown"


Mark = Callable[[Phase, int], None]
"""Called at the beginning of each phase with the phase and the index of the micro-batch."""


def ignore(phase: Phase, micro_batch: int) -> None:
    """Do nothing: the mark of a timed step, which records no phases."""


CATEGORIES: tuple[Category, ...] = tuple(Category)
STATES = (Category.PARAMETERS, Category.BUFFERS, Category.OPTIMIZER_STATE)  # held between steps
STANDING = (*STATES, Category.INPUTS)  # held before the first forward
PHASES: tuple[Phase, ...] = tuple(Phase)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in the step something happened; a text is empty if it is not known.

    `loss` says what of a loss is computed there, such as "log-softmax over 50,257 words".
    """

    phase: Phase
    micro_batch: int
    module: str = ""
    operator: str = ""
    loss: str = ""

    def __str__(self) -> str:
        """Return for instance "backward of micro-batch 2, in encoder.layer.3 (aten::addmm)"."""
        text = str(self.phase)
        per_batch = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)
        if self.phase in per_batch and self.micro_batch >= 0:
            text += f" of micro-batch {self.micro_batch + 1}"
        if where := f"the loss: {self.loss}" if self.loss else self.module:
            text += f", in {where}"
        return text + (f" ({self.operator})" if self.operator else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Memory blocks that are live at the peak and share category, module, operator and phase.

    Attributes:
        category: what the blocks are for.
        module: path of the module that was running when they were allocated; for parameters and
            optimizer state the path of the parameter. Empty if it is not known.
        operator: the operator that allocated them, such as "aten::addmm"; empty if none was
            running.
        phase: the phase in which they were allocated.
        num_blocks: number of blocks.
        nbytes: their bytes together.
    """

    category: Category
    module: str
    operator: str
    phase: Phase
    num_blocks: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the holding as plain JSON types; `from_dict` gives it back."""
        return asdict(self) | {"category": str(self.category), "phase": str(self.phase)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Holding:
        """Return the holding that `to_dict` wrote."""
        kinds = {"category": Category(data["category"]), "phase": Phase(data["phase"])}
        return cls(**{**data, **kinds})


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """One phase of one micro-batch of one step (step -1 is outside of any step).

    What a script does between its steps, loading included, is `Phase.DATA` of micro-batch -1.
    """

    step: int
    phase: Phase
    micro_batch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """Every allocation and free of a run, from before the model is built until it is deleted.

    Attributes:
        address: int64, (events,); a block is known by it from its allocation to its free.
        nbytes: int64, (events,), positive for an allocation, negative for a free.
        interval: int32, (events,), index into `intervals`.
        operator: int32, (events,), operators dispatched since the run began; indexes `operators`
            where that operator was running during the event, else `in_operator` is False.
        in_operator: bool, (events,).
        module: int32, (events,), index into `modules`; -1 where no module is known.
        intervals: in the order in which they ran.
        operators: names of the dispatched operators, in order.
        modules: paths of modules.
        parameters: path of the parameter by the address of its storage when the first step begins;
            of tied ones the first path.
        leftover_bytes: allocated in the run and not freed at its end.
        states: path of the parameter by the address of a tensor of its optimizer state, as the
            last update left them.
        logits: over how many words or classes the last layer decides, and which of both; 0 if that
            is not known.
        gradients: addresses of what was the gradient of a parameter at an update of a script.
        stream: int32, (events,), number of the card's stream for which the block is allocated; None
            if all are for one.
    """

    address: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    interval: npt.NDArray[np.int32]
    operator: npt.NDArray[np.int32]
    in_operator: npt.NDArray[np.bool_]
    module: npt.NDArray[np.int32]
    intervals: tuple[Interval, ...]
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: Mapping[int, str]
    leftover_bytes: int
    states: Mapping[int, str] = field(default_factory=dict)
    logits: tuple[int, str] = (0, "")
    gradients: frozenset[int] = frozenset()
    stream: npt.NDArray[np.int32] | None = None

    def where(self) -> npt.NDArray[np.int64]:
        """Return step, phase (as an index into `PHASES`) and micro-batch of each event, a row each.

        The shape is (3, events).
        """
        rows = [(i.step, PHASES.index(i.phase), i.micro_batch) for i in self.intervals]
        return np.array(rows, np.int64)[self.interval].T

    def place(self, event: int) -> Place:
        """Return where the event with this index happened."""
        interval, module = self.intervals[self.interval[event]], int(self.module[event])
        return Place(
            phase=interval.phase,
            micro_batch=interval.micro_batch,
            module=self.modules[module] if module >= 0 else "",
            operator=self.operators[self.operator[event] - 1] if self.in_operator[event] else "",
        )


def highest_of_each(total: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.intp]:
    """Return the first highest instant of each of at most `most` equal runs of instants."""
    width = max(-(-len(total) // most), 1)
    padded = np.full(-(-len(total) // width) * width, -1)
    padded[: len(total)] = total
    rows: npt.NDArray[np.intp]
    rows = np.arange(0, len(padded), width) + padded.reshape(-1, width).argmax(axis=1)
    return rows


class LiveBytes:
    """What the timelines of steps and of snapshots share.

    Attributes:
        bytes_by_category: int64, (instants, len(categories)); the row sum is what is allocated.
        categories: the names of its columns.
    """

    __slots__ = ()

    bytes_by_category: npt.NDArray[np.int64]
    categories: ClassVar[tuple[str, ...]] = tuple(map(str, CATEGORIES))

    def __len__(self) -> int:
        return len(self.bytes_by_category)

    @property
    def total_bytes(self) -> npt.NDArray[np.int64]:
        """Allocated bytes at each instant, (instants,)."""
        total: npt.NDArray[np.int64] = self.bytes_by_category.sum(axis=1)
        return total

    @property
    def peak_index(self) -> int:
        """The first instant at which most bytes are allocated."""
        return int(self.total_bytes.argmax())

    @property
    def peak_by_category(self) -> dict[str, int]:
        """Bytes at the peak for every category; they sum to the peak."""
        row = self.bytes_by_category[self.peak_index].tolist()
        return dict(zip(self.categories, row, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline(LiveBytes):
    """Live bytes over one step, one row after each allocation or free.

    Attributes:
        bytes_by_category: int64, (instants, len(CATEGORIES)); the row sum is what is allocated.
        phase: int8, (instants,), index into `PHASES`.
        micro_batch: int32, (instants,), from 0; in the optimizer phase that of the last one.
        operator: int32, (instants,), how many operators the step has dispatched so far.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> int(result.timeline.total_bytes.max()) == result.peak_allocated_bytes
    True
    """

    bytes_by_category: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int8]
    micro_batch: npt.NDArray[np.int32]
    operator: npt.NDArray[np.int32]

    def bytes_of(
        self, category: Category | str, phase: Phase | str | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the live bytes of one category, int64, (instants,), of a phase or of all.

        Args:
            category: such as "activations".
            phase: "data", "forward", "backward" or "optimizer"; its instants alone, of all
                micro-batches. None for the whole step.

        Raises:
            MemlabError: there is no such category or phase; the message lists them.

        What forward leaves for backward, and the most that the update takes beside it:

        >>> import memlab
        >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
        >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
        >>> int(result.timeline.bytes_of("activations", "forward")[-1])
        15493688
        >>> int(result.timeline.bytes_of("temporaries", "optimizer").max())
        2101260
        """
        column = CATEGORIES.index(of_type("category", category, Category))
        found: npt.NDArray[np.int64] = self.bytes_by_category[:, column]
        if phase is not None:
            found = found[self.phase == PHASES.index(of_type("phase", phase, Phase))]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the arrays as lists of int, by field name."""
        return {name: getattr(self, name).tolist() for name in self.__slots__}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Timeline:
        """Return the timeline that `to_dict` wrote.

        Raises:
            ValueError: its columns have several lengths, or it has a phase that there is not.
        """
        made = cls(
            bytes_by_category=np.array(data["bytes_by_category"], np.int64).reshape(
                -1, len(CATEGORIES)
            ),
            phase=np.array(data["phase"], np.int8),
            micro_batch=np.array(data["micro_batch"], np.int32),
            operator=np.array(data["operator"], np.int32),
        )
        shapes = {column.shape for column in (made.phase, made.micro_batch, made.operator)}
        if shapes != {(len(made),)} or not np.isin(made.phase, range(len(PHASES))).all():
            raise ValueError("the columns of the timeline do not belong together")
        return made
