"""`RunResult`: what each stage of a run costs, and which of them decides."""

import linecache
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab._util.checks import check_fields
from memlab._util.tables import aligned, columns_table, facts_table
from memlab._util.units import format_bytes, listed, plus_minus, shown
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.prediction.run_settings import Evaluation, Generation, TrainingRun
from memlab.result import CountedPeak, FitStatus, Outcome, Source, reading
from memlab.trace import CATEGORIES, LiveBytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt  # it costs 5 ms at import

MOST_ROWS = 8  # of a table of what holds the peak
MOST_LETTERS = 72  # of a line of a script
WITH_WORKSPACES = "with the workspaces of kernels, without which the script ran"


def text_of(file: str, line: int) -> str:
    """Return what stands in a line of a script; "" if that is not known."""
    return linecache.getline(file, line).strip() if file else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """What one stage of a run costs.

    Attributes:
        name: "build", "first step", "step", "EMA update", "evaluation", "generation", "saving" or
            "step afterwards".
        peak_allocated_bytes: the most bytes of live tensors and workspaces.
        peak_reserved_bytes: the most that the caching allocator holds, what earlier stages left in
            its cache included; None on a CPU, which has none.
        bytes_by_category: what stands at the allocated peak, by what it is for: the categories of a
            `StepResult`, and "EMA weights", "kept outputs" and "KV cache".
        module: the module that ran at the peak; empty if it is not known.
        fits: whether the stage runs within the limit; None without a limit.
        close_to_limit: whether `fits` is another at one end of the uncertainty; None likewise.
    """

    name: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    bytes_by_category: Mapping[str, int]
    module: str = ""
    fits: bool | None = None
    close_to_limit: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def counted_bytes(self) -> int:
        """The peak that counts against a limit: reserved on a card, allocated on a CPU."""
        reserved = self.peak_reserved_bytes
        return self.peak_allocated_bytes if reserved is None else reserved

    @property
    def fit(self) -> FitStatus | None:
        """Whether the stage fits, in words: "fits", "too close" or "does not fit"."""
        return FitStatus.of(self.fits, is_close=self.close_to_limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineHolding:
    """What one line of a person's script holds at the peak of its run.

    Attributes:
        file: of the line; empty for memory that no line of a person asked for.
        line: its number, from 1.
        category: what the blocks are for, as in `StageCost.bytes_by_category`; or
            "workspaces_of_kernels".
        num_blocks: number of blocks.
        nbytes: their bytes together.
        text: what stands in the line; empty if it is not known, as of a notebook.
    """

    file: str
    line: int
    category: str
    num_blocks: int
    nbytes: int
    text: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        """Return for instance "train.py:12"."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "no line of the script"

    @property
    def quoted(self) -> str:
        """The line with what stands in it, such as "train.py:12: loss.backward()"."""
        said = f"{self}: {self.text}" if self.text else str(self)
        return said if len(said) <= MOST_LETTERS else f"{said[: MOST_LETTERS - 3]}..."


class FaultKind(StrEnum):
    """What is wrong in a script."""

    KEPT_GRAPH = "a graph is kept from step to step"
    GROWTH = "memory grows from step to step"
    EVALUATION_KEPT = "an evaluation keeps something of each batch on the device"
    UNUSED_GRAPH = "a forward pass makes a graph that no backward uses"
    NEVER_ZEROED = "gradients are never zeroed"
    GRADIENTS_LATE = "gradients of the last step are held in this one"
    OTHER_PARAMETERS = "an optimizer has parameters that the model does not use"
    UNUSED_COPY = "a copy of the weights is never used"
    UNUSED_GRADIENTS = "a model that no optimizer updates gets gradients"
    FLOAT_LOGITS = "the logits are copied as float32"
    RETAINED_GRAPH = "a backward retains a graph that is not used again"
    LAST_STEP = "a tensor of the last step is held in this one"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptFault:
    """Something wrong in a script, proven by what happened when it ran.

    Attributes:
        kind: what is wrong.
        file: of the line.
        line: its number, from 1.
        nbytes: that it holds: of one step or batch, where it grows; 0 where it costs no memory.
        per: "step" or "batch" where it grows with each, else "".
        change: what removes it.
        stage: the one whose peak it raises the most; empty if none.
        before_bytes: the peak of that stage.
        after_bytes: the same with the change, as it was tried.
        text: what stands in the line; empty if it is not known.
    """

    kind: FaultKind
    file: str
    line: int
    nbytes: int
    per: str
    change: str
    stage: str = ""
    before_bytes: int = 0
    after_bytes: int = 0
    text: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        """Return for instance "train.py:31: gradients are never zeroed: call zero_grad ..."."""
        more = f", {format_bytes(self.nbytes)}" if self.nbytes else ""
        more += f" more with each {self.per}" if more and self.per else ""
        said = f"{Path(self.file).name}:{self.line}: {self.kind}{more}: {self.change}"
        if not self.stage:
            return said
        before, after = format_bytes(self.before_bytes), format_bytes(self.after_bytes)
        return f"{said} ({self.stage}: {before} -> {after})"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunTimeline(LiveBytes):
    """Live bytes over a whole run: the highest instant of each stretch of it, and of each stage.

    Attributes:
        bytes_by_category: int64, (instants, len(categories)); the row sum is what is allocated.
        stage: int64, (instants,), index into `stages`.
        stages: the names of the stages, in the order in which they ran.
        operator: int64, (instants,), how many operators the run had dispatched.
    """

    bytes_by_category: "npt.NDArray[np.int64]"
    stage: "npt.NDArray[np.int64]"
    stages: tuple[str, ...]
    operator: "npt.NDArray[np.int64]"

    def to_dict(self) -> dict[str, Any]:
        """Return the columns as lists, by field name, and the names of the categories."""
        columns = ("bytes_by_category", "stage", "operator")
        found = {name: getattr(self, name).tolist() for name in columns}
        return {**found, "stages": list(self.stages), "categories": list(self.categories)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RunTimeline":
        """Return the timeline that `to_dict` wrote."""
        import numpy as np

        held, stage, operator = (
            np.array(data[name], np.int64) for name in ("bytes_by_category", "stage", "operator")
        )
        if held.shape != (len(stage), len(CATEGORIES)) or stage.shape != operator.shape:
            raise ValueError("the columns of the timeline do not belong together")
        return cls(
            bytes_by_category=held, stage=stage, stages=tuple(data["stages"]), operator=operator
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a whole run costs, stage by stage.

    Attributes:
        outcome: how the run ended, as in a `StepResult`.
        message: one sentence.
        source: "measured" or "predicted".
        device: where it ran, or for which it was predicted.
        versions: of memlab, torch and Python.
        config: of the steps; None of a script, whose steps are its own.
        run: what was done beside them; None of a script.
        workload_name: what was trained, or the name of the script.
        stages: in the order in which they run; empty if the outcome is not ok.
        uncertainty: relative half-width of what counts against a limit, 0.01 for +-1 %; 0 if
            measured.
        memory_limit_bytes: what the stages are judged by; None for no limit.
        notes: what a reader of these numbers must know.
        lines: of a script, what holds the peak of the run, the largest first; the bytes sum to it.
        modules: of a script, the same bytes by the path of the module in which they were made, or
            whose parameters they belong to; "" for those of no module.
        faults: what is wrong in a script, as far as the run proves it; the costliest first.
        step_seconds: of a script, one update without loading its data; None if it is not known.
        seconds_uncertainty: relative half-width of that.
        timeline: of a script, what was live as it went on; None if it did not run.
    """

    outcome: Outcome
    message: str
    source: Source
    device: str
    versions: Mapping[str, str]
    config: StepConfig | None
    run: TrainingRun | None
    workload_name: str
    stages: tuple[StageCost, ...] = ()
    uncertainty: float = 0.0
    memory_limit_bytes: int | None = None
    notes: tuple[str, ...] = ()
    lines: tuple[LineHolding, ...] = ()
    modules: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[ScriptFault, ...] = ()
    step_seconds: float | None = None
    seconds_uncertainty: float = 0.0
    timeline: RunTimeline | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def worst(self) -> StageCost | None:
        """The stage that sets the peak of the run: the one in which the most was live.

        The caching allocator keeps what it has reserved, so the stage that comes last may show the
        most reserved bytes without having asked for them.
        """
        return max(self.stages, key=lambda stage: stage.peak_allocated_bytes, default=None)

    @property
    def peak_allocated_bytes(self) -> int | None:
        """The most bytes that were allocated in the run; None if it did not end well."""
        if self.outcome is Outcome.OK and not self.stages:
            return 0
        return max((stage.peak_allocated_bytes for stage in self.stages), default=None)

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The most bytes that were reserved in the run; None on a CPU."""
        found = [stage.peak_reserved_bytes for stage in self.stages]
        return max((each for each in found if each is not None), default=None)

    @property
    def fits(self) -> bool | None:
        """Whether every stage fits the limit; None without a limit."""
        found = [stage.fits for stage in self.stages]
        return None if None in found or not found else all(found)

    def stage(self, name: str) -> StageCost:
        """Return the stage with this name.

        Raises:
            ConfigError: the run has no such stage, or none at all because it did not end well.
        """
        names = [str(stage.name) for stage in self.stages]
        if not names:
            raise ConfigError(
                f"name={shown(name)}: this run has no stages, for its outcome is {self.outcome}: "
                f"{self.message}"
            )
        if name not in names:
            raise ConfigError(
                f"name={shown(name)} is no stage of this run; allowed is one of {names}"
            )
        return self.stages[names.index(name)]

    def counted(self, stage: StageCost) -> CountedPeak:
        """Return the peak of a stage that counts against a limit, with its uncertainty."""
        kind = "allocated" if stage.peak_reserved_bytes is None else "reserved"
        return CountedPeak(kind=kind, nbytes=stage.counted_bytes, uncertainty=self.uncertainty)

    def __str__(self) -> str:
        """Return the stage of the peak and what does not fit, in one line."""
        worst = self.worst
        if self.outcome is not Outcome.OK or worst is None:
            return f"{self.outcome}: {self.message}"
        peak = f"{format_bytes(worst.peak_allocated_bytes)} allocated"
        if (reserved := self.peak_reserved_bytes) is not None:
            peak += f"; where there is room the run reserves {format_bytes(reserved)}"
        said = f"{self.workload_name} on {self.device}: the peak is in the {worst.name}: {peak}"
        return f"{said}; {self._fit_words()}" if self.memory_limit_bytes else said

    def tables(self) -> list[list[list[str]]]:
        """Return tables of texts, their heads first: the stages, and what holds the peak.

        Of a script the peak is divided by what it is for, by module and by line.
        """
        has = {"reserved": self.peak_reserved_bytes is not None,
               "limit": self.memory_limit_bytes is not None}  # fmt: skip
        stages = [["stage", "allocated", *(name for name, is_there in has.items() if is_there),
                   "holds"]]  # fmt: skip
        for stage in self.stages:
            row = [stage.name, format_bytes(stage.peak_allocated_bytes)]
            row += [format_bytes(stage.peak_reserved_bytes or 0)] * has["reserved"]
            row += [str(stage.fit or "")] * has["limit"]
            parts = [
                f"{in_plain_words(name)} {format_bytes(n)}"
                for name, n in stage.bytes_by_category.items()
            ]
            stages.append([*row, ", ".join(parts[:3])])

        worst = self.worst
        categories = worst.bytes_by_category if worst and self.lines else {}
        by_category = [[in_plain_words(name), format_bytes(n)] for name, n in categories.items()]
        alike: Counter[str] = Counter()  # such as "layers.*.mlp", for all layers
        for name, n in self.modules.items():
            alike[re.sub(r"\b\d+(?=\.)", "*", name)] += n
        by_module = [[name or "no module", format_bytes(n)] for name, n in alike.most_common()]
        by_line = [
            [held.quoted, format_bytes(held.nbytes), in_plain_words(held.category)]
            for held in self.lines
        ]
        found = [
            stages,
            [["at the peak, by kind", "holds"], *by_category],
            [["at the peak, by module", "holds"], *by_module[:MOST_ROWS]],
            [["at the peak, by line", "holds", "as"], *by_line[:MOST_ROWS]],
        ]
        return [table for table in found if len(table) > 1]

    def table(self) -> list[str]:
        """Return the tables and the faults as lines of a text."""
        found = [["", *aligned(table)] for table in self.tables()]
        found += [["", *map(str, self.faults)]] if self.faults else []
        return [line for lines in found for line in lines][1:]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON types; `from_dict` gives it back."""
        found = asdict(replace(self, timeline=None))
        return found | {
            "outcome": str(self.outcome),
            "source": str(self.source),
            "config": None if self.config is None else self.config.to_dict(),
            "timeline": None if self.timeline is None else self.timeline.to_dict(),
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "fits": self.fits,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RunResult":
        """Return the result that `to_dict` wrote.

        Raises:
            MemlabError: the data was not written by `to_dict`.
        """
        with reading(cls.__name__, data):
            given = {each.name: data[each.name] for each in fields(cls) if each.name in data}
            config, run, timeline = (data[name] for name in ("config", "run", "timeline"))
            if run is not None:
                evaluate, generate = run["evaluate"], run["generate"]
                given["run"] = TrainingRun(**{
                    **run,
                    "evaluate": evaluate and Evaluation(**evaluate),
                    "generate": generate and Generation(**generate),
                })  # fmt: skip
            return cls(**{
                **given,
                "config": config and StepConfig(**config),
                "stages": tuple(StageCost(**each) for each in data["stages"]),
                "notes": tuple(data["notes"]),
                "lines": tuple(LineHolding(**each) for each in data["lines"]),
                "faults": tuple(ScriptFault(**each) for each in data["faults"]),
                "timeline": timeline and RunTimeline.from_dict(timeline),
            })  # fmt: skip

    def _fit_words(self) -> str:
        limit = format_bytes(self.memory_limit_bytes or 0)
        over = [stage.name for stage in self.stages if stage.fits is False]
        if over:
            said = f"{listed(over)} {'does' if len(over) == 1 else 'do'} not fit {limit}"
            # a script is refused what its card has no room for, so what it asked for itself fits
            is_refused = self.config is None and self.peak_reserved_bytes is not None
            return f"{said} {WITH_WORKSPACES}" if is_refused else said
        is_over = max(stage.counted_bytes for stage in self.stages) > (self.memory_limit_bytes or 0)
        limit += " with less cache" if is_over else ""
        close = [stage.name for stage in self.stages if stage.close_to_limit]
        if close:
            return f"every stage fits {limit}, {listed(close)} only within the uncertainty"
        return f"every stage fits {limit}"

    def _repr_html_(self) -> str:
        """Return tables for notebooks."""
        title = f"{self.workload_name} on {self.device}, {self.source}"
        facts = {
            "result": str(self),
            "uncertainty": plus_minus(self.uncertainty),
            "faults": " ".join(f"{fault}." for fault in self.faults),
            "notes": " ".join(self.notes),
        }
        tables = (columns_table(heads, rows) for heads, *rows in self.tables())
        return facts_table(title, facts) + "".join(tables)


def in_plain_words(category: str) -> str:
    """Return for instance "optimizer state"."""
    return category.replace("_", " ")
