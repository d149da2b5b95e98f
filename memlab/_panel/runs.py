"""The runs of a panel: kept for ever, shown until cleared, pinned to be named. No widgets."""

import dataclasses
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memlab._panel import verdicts
from memlab._panel.state import others
from memlab.arguments.units import format_bytes, format_seconds
from memlab.records.recorded import is_recorded
from memlab.result import Outcome, StepResult, signed_percent
from memlab.verifying.report import VerifyReport

MOST_SHOWN = 30
NONE = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One press of Run.

    Attributes:
        number: from 1, in the order in which they ended.
        result: what it cost.
        prediction: of the same step, made without it; None if there is none.
        report: the comparison of gradients, if it was asked for.
        name: given when it was pinned; "" while it is not.
        cleared: whether it was taken off the table.
    """

    number: int
    result: StepResult
    prediction: StepResult | None = None
    report: VerifyReport | None = None
    name: str = ""
    cleared: bool = False

    @property
    def label(self) -> str:
        """How pictures call it: its name, or its number as the table has it."""
        return self.name or self.default_name

    @property
    def default_name(self) -> str:
        """Its name while it is pinned and a person has given it none."""
        return f"run {self.number}"

    @property
    def prediction_error(self) -> float | None:
        """The signed relative error of the predicted peak allocated; None if there is none."""
        predicted = self.prediction.peak_allocated_bytes if self.prediction else None
        measured = self.result.peak_allocated_bytes
        # on a CPU a limit is held against the whole step, on CUDA it ends the step
        is_whole = self.result.outcome is Outcome.OK or self.result.device == "cpu"
        if predicted is None or not measured or not is_whole:
            return None
        return predicted / measured - 1

    @property
    def own_name(self) -> str:
        """The name that a person gave it, or ""."""
        return "" if self.name == self.default_name else self.name


class RunLog:
    """All runs in order. `compared` is the number of the run that pictures compare with, or 0."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.compared = 0

    def add(self, result: StepResult, prediction: StepResult | None = None) -> Run:
        """Add a result as the newest run, with what was predicted for it."""
        run = Run(number=len(self.runs) + 1, result=result, prediction=prediction)
        self.runs.append(run)
        return run

    def change(self, number: int, **changes: object) -> None:
        """Change fields of one run."""
        self.runs[number - 1] = dataclasses.replace(self.runs[number - 1], **changes)  # type: ignore[arg-type]

    def pin(self, number: int, name: str) -> None:
        """Give a run a name and compare with it; an empty name unpins it."""
        self.change(number, name=name)
        if name:
            self.compared = number
        elif self.compared == number:
            self.compared = 0

    def clear(self) -> None:
        """Take every run off the table that is neither pinned nor the last one."""
        for run in self.runs[:-1]:
            if not run.name:
                self.change(run.number, cleared=True)
                if self.compared == run.number:
                    self.compared = 0

    @property
    def last(self) -> Run | None:
        """The newest run."""
        return self.runs[-1] if self.runs else None

    @property
    def visible(self) -> list[Run]:
        """The runs on the table, oldest first."""
        kept = [run for run in self.runs if not run.cleared]
        recent = {run.number for run in kept[-MOST_SHOWN:]}
        return [run for run in kept if run.name or run.number in recent]

    @property
    def compared_run(self) -> Run | None:
        """The run that pictures compare with."""
        return self.runs[self.compared - 1] if self.compared else None

    def comparison(self, shown: Run | None) -> Run | None:
        """Return the run to draw beside the shown one; None if that is the same or nothing is."""
        run = self.compared_run
        return None if shown is None or run is None or run.number == shown.number else run


def count_runs(number: int) -> str:
    """Return a number of runs in words."""
    return f"{number} run{'' if number == 1 else 's'}"


def _number(run: Run) -> str:
    return f"{run.number} {run.own_name}".strip()


COLUMNS: tuple[tuple[str, str, Callable[[Run], str]], ...] = (
    ("#", "run, in order", _number),
    ("workload", "what is trained", lambda run: run.result.workload_name),
    ("device", "where it ran, now or when it was recorded", lambda run: run.result.device),
    ("budget", "memory budget", lambda run: f"{run.result.config.memory_budget:.2f}"),
    ("batch", "samples per optimizer update", lambda run: str(run.result.config.batch_size)),
    ("acc.", "accumulation steps", lambda run: str(run.result.config.accumulation_steps)),
    ("precision", "number format", lambda run: run.result.number_format),
    ("other", "what else differs", lambda run: ", ".join(others(run.result.config)) or NONE),
    ("peak predicted", "most bytes in live tensors (allocated), predicted before the run",
     lambda run: _bytes(run.prediction.peak_allocated_bytes if run.prediction else None)),
    ("peak measured", "most bytes in live tensors (allocated), measured",
     lambda run: _bytes(run.result.peak_allocated_bytes)),
    ("error", "of the predicted peak: predicted divided by measured, minus one",
     lambda run: _or_dash(run.prediction_error, signed_percent)),
    ("reserved", "most bytes that the caching allocator held, measured",
     lambda run: _bytes(run.result.peak_reserved_bytes)),
    ("per step", "median wall time of one optimizer update, measured",
     lambda run: _or_dash(run.result.step_seconds, format_seconds)),
    ("samples/s", "batch size divided by the time per step",
     lambda run: _or_dash(run.result.samples_per_second, _rate)),
)  # fmt: skip
MAY_BE_LONG = {"#", "other"}
ONLY_IF_DIFFERENT, ONLY_IF_ANY = (
    {"workload", "device"},
    {"other", "reserved", "peak predicted", "error"},
)
NUMBERS = {
    "budget", "batch", "acc.", "peak predicted", "peak measured", "error", "reserved", "per step",
    "samples/s",
}  # fmt: skip


def table_html(runs: Sequence[Run], compared: int = 0) -> str:
    """Return the runs as an HTML table, newest first; every cell is escaped."""
    columns = [c for c in COLUMNS if _tells(c[0], {c[2](run) for run in runs})]
    head = "".join(
        f'<th scope="col"{_align(name)} title="{title}">{name}</th>' for name, title, _ in columns
    )
    rows = "".join(_row(run, columns, run.number == compared) for run in reversed(runs))

    return (
        f'<table class="memlab-runs"><thead><tr>{head}<th scope="col">outcome</th>'
        f'<th scope="col">gradients</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _row(run: Run, columns: Sequence[tuple[str, str, Callable[[Run], str]]], compared: bool) -> str:
    cells = "".join(_table_cell(name, html.escape(show(run))) for name, _, show in columns)
    kind = " class='memlab-compared'" if compared else ""
    outcome = verdicts.outcome_verdict(run.result).html()
    gradients = verdicts.gradients_verdict(run.report).html()
    return f"<tr{kind}>{cells}<td>{outcome}</td><td>{gradients}</td></tr>"


def _table_cell(name: str, text: str) -> str:
    if name in MAY_BE_LONG:
        return f'<td class="memlab-long" title="{text}">{text}</td>'
    return f"<td{_align(name)}>{text}</td>"


def _rate(samples_per_second: float) -> str:
    digits = 0 if samples_per_second >= 100 else 1 if samples_per_second >= 10 else 2
    return f"{samples_per_second:,.{digits}f}"


def _align(name: str) -> str:
    return ' class="memlab-number"' if name in NUMBERS else ""


def _tells(name: str, shown: set[str]) -> bool:
    """Whether a column that holds these texts says more than its absence."""
    if name in ONLY_IF_DIFFERENT:
        return len(shown) > 1 or any(map(is_recorded, shown))
    return name not in ONLY_IF_ANY or bool(shown - {NONE})


def _bytes(size: int | None) -> str:
    return _or_dash(size, format_bytes)


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return NONE if value is None else show(value)
