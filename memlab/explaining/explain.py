"""`explain`: what holds the peak of a result, and which settings would lower it.

It reads the result alone and runs nothing. A block is named by the module and operator that
allocated it, which is where a tensor was made and not every place where it is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlab.arguments.checks import checked
from memlab.arguments.tables import columns_table
from memlab.arguments.units import format_bytes
from memlab.explaining.holdings import WORKSPACE, Group, group, name_of_buffers
from memlab.explaining.remedies import LEAST_SHARE, REPLICATED, Remedy, remedies
from memlab.result import StepResult, format_percent
from memlab.techniques.sharding.ranks import is_tensor_parallel
from memlab.trace import Category

if TYPE_CHECKING:
    import pandas as pd

BUCKETS = "buckets of gradients"
MOST_ROWS, MOST_SAVED = 8, 5  # in print: the largest of all, and of the saved tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of what holds the peak; see `Explanation.rows`.

    Attributes:
        category: what the blocks are for.
        where: path of the module, or of the parameter; "*" stands for the number of a repeated
            block. Empty where no module was running.
        num_modules: paths that `where` stands for.
        operator: that allocated them; empty for parameters and optimizer state.
        num_blocks: of memory.
        nbytes: that they hold together.
        fraction: of the peak.
        freed_by: the settings that would free some of them.
        is_workspace: whether a library such as cuBLAS holds them; they count as buffers.
        is_bucket: whether DistributedDataParallel averages gradients in them; they count so too.
    """

    category: Category
    where: str
    num_modules: int
    operator: str
    num_blocks: int
    nbytes: int
    fraction: float
    freed_by: tuple[str, ...]
    is_workspace: bool = False
    is_bucket: bool = False

    def __str__(self) -> str:
        """Return one line, such as "12.0 MiB  9 %  activations of h.*.mlp.act (12 modules)"."""
        return "  ".join(_cells(self)).rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What holds a peak, and what would lower it.

    Attributes:
        title: what ran, and where the numbers come from.
        message: one sentence: how high the peak is and where, or why there is nothing to explain.
        peak_bytes: allocated at the peak; None if none is known.
        by_category: bytes of each category at the peak.
        rows: what holds it, the largest first; they sum to `peak_bytes`.
        remedies: settings that would lower it, those of most bytes first.
    """

    title: str
    message: str
    peak_bytes: int | None = None
    by_category: Mapping[str, int]
    rows: tuple[Row, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def saved(self) -> tuple[Row, ...]:
        """The rows of tensors that forward saved for backward, the largest first."""
        return tuple(row for row in self.rows if row.category is Category.ACTIVATIONS)

    def to_frame(self) -> "pd.DataFrame":
        """Return one line a row."""
        import pandas as pd

        names = tuple(Row.__slots__)
        table = [{name: getattr(row, name) for name in names} for row in self.rows]
        frame = pd.DataFrame(table, columns=names)
        return frame.assign(category=frame["category"].astype(str),
                            freed_by=[", ".join(row.freed_by) for row in self.rows])  # fmt: skip

    def __str__(self) -> str:
        """Return a page of plain text: the peak, what holds it, what would lower it."""
        lines = [self.title, self.message]
        if self.by_category:
            lines.append(", ".join(self._shares()))
        if shown := self._shown():
            table = [(*_cells(row), self._numbers(row)) for row in shown]
            lines += ["", "held by (in brackets what would free it)", *_aligned(table)]
            lines += [f"  {line}" for line in self._rest(shown)]
        if self.remedies:
            lines += ["", "what would lower the peak"]
        for number, remedy in enumerate(self.remedies, start=1):
            lines.append(f"  [{number}] {remedy.name}: {_freed(remedy)}")
            lines += [f"      {remedy.effect}", f"      price: {remedy.price}"]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return two small tables for notebooks: what holds the peak, what would lower it."""
        import html  # not before a table is shown

        head = f"<p><b>{html.escape(self.title)}</b><br>{html.escape(self.message)}</p>"
        shares = f"<p>{', '.join(self._shares())}</p>" if self.by_category else ""
        shown = self._shown()
        rest = "".join(f"<p>{html.escape(line)}</p>" for line in self._rest(shown))
        held = columns_table(("bytes", "share", "category", "held by", "operator", "freed by"),
                      [(*_cells(row), self._numbers(row)) for row in shown])  # fmt: skip
        lowered = columns_table(
            ("", "what would lower the peak", "by", "how", "price"),
            [(f"[{number}]", r.name, _freed(r), r.effect, r.price)
             for number, r in enumerate(self.remedies, start=1)],
        )  # fmt: skip
        return f"{head}{shares}{held}{rest}{lowered}"

    def _shares(self) -> list[str]:
        """Return every category that holds anything, its bytes and its share, largest first."""
        kinds = {row.is_workspace for row in self.rows if row.category is Category.BUFFERS}
        total = sum(self.by_category.values())
        ranked = sorted(self.by_category.items(), key=lambda item: -item[1])
        return [
            f"{name_of_buffers(kinds) if name == Category.BUFFERS else name.replace('_', ' ')} "
            f"{format_bytes(size)} ({_share(size / total)})"
            for name, size in ranked
            if size
        ]

    def _shown(self) -> list[Row]:
        saved = [row for row in self.saved[:MOST_SAVED] if row.fraction >= LEAST_SHARE]
        chosen = {*self.rows[:MOST_ROWS], *saved}
        return [row for row in self.rows if row in chosen]

    def _numbers(self, row: Row) -> str:
        """Return the remedies that free a row, as they are numbered in print."""
        names = enumerate((remedy.name for remedy in self.remedies), start=1)
        numbers = [str(number) for number, name in names if name in row.freed_by]
        return f"[{', '.join(numbers)}]" if numbers else ""

    def _rest(self, shown: Sequence[Row]) -> list[str]:
        left = sum(row.nbytes for row in self.rows) - sum(row.nbytes for row in shown)
        count = len(self.rows) - len(shown)
        return [f"{format_bytes(left)} in {count} smaller ones"] if count else []


@checked()
def explain(result: StepResult) -> Explanation:
    """Return what holds the peak of a result, and which settings would lower it.

    Args:
        result: measured, predicted or recorded; one that ran out of memory too, if it was traced.

    Raises:
        MemlabError: `result` is no `StepResult`.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> explanation = explain(result)
    >>> sum(row.nbytes for row in explanation.rows) == explanation.peak_bytes
    True
    >>> [remedy.name for remedy in explanation.remedies][:2]
    ["precision='bf16'", "optimizer='adafactor'"]
    """
    title = (
        f"{result.workload_name} on {result.device}, {result.settings}: "
        f"{str(result.outcome).replace('_', ' ')} ({result.source})"
    )
    peak, by_category = result.peak_allocated_bytes, result.peak_by_category
    if peak is None or by_category is None:
        return Explanation(title=title, message=_nothing(result), peak_bytes=peak, by_category={})
    offered = remedies(result)
    groups = group(
        result.peak_holdings,
        is_cuda=result.peak_reserved_bytes is not None,
        is_tried=is_tensor_parallel(result.config),
        bucketed_bytes=_bucketed_bytes(result),
    )
    return Explanation(
        title=title,
        message=_peak(result, peak),
        peak_bytes=peak,
        by_category=dict(by_category),
        rows=tuple(_row(held, peak, offered) for held in groups),
        remedies=offered,
    )


def _bucketed_bytes(result: StepResult) -> int:
    """Return the bytes of the gradients that are averaged in buckets; 0 where none are."""
    if result.config.sharding not in REPLICATED or result.timeline is None:
        return 0
    return int(result.timeline.bytes_of(Category.GRADIENTS).max())


def _nothing(result: StepResult) -> str:
    if result.peak_allocated_bytes is not None:
        why = f"the peak of {format_bytes(result.peak_allocated_bytes)} allocated has no breakdown"
        return f"Nothing to explain: {why}: {' '.join(result.notes) or result.message}"
    ended = str(result.outcome).replace("_", " ")
    return f"Nothing to explain: no memory was {result.source}, the outcome is {ended}: " \
        f"{result.message}"  # fmt: skip


def _peak(result: StepResult, peak: int) -> str:
    text = f"peak {format_bytes(peak)} allocated ({result.source})"
    if result.peak_place is not None:
        text += f", in {result.peak_place}"
    limit, counted = result.memory_limit_bytes, result.counted_peak
    if limit is not None and counted is not None and counted.nbytes > limit:
        text += f"; {counted.beside(limit, fits=result.fits)}"
    if result.host_bytes:
        text += f"; {format_bytes(result.host_bytes)} are held in host memory"
        if result.locked_host_bytes is not None:
            text += f", where {format_bytes(result.locked_host_bytes)} are locked for them"
    if result.sent_bytes:
        how = "; ".join(map(str, result.communication))
        text += f"; a rank sends {format_bytes(result.sent_bytes)} a step ({how})"
    return text if result.peak_holdings else f"{text}; which modules hold it was not traced"


def _row(held: Group, peak: int, offered: Iterable[Remedy]) -> Row:
    return Row(
        category=held.category,
        where=held.where,
        num_modules=len(held.modules),
        operator=held.operator,
        num_blocks=held.num_blocks,
        nbytes=held.nbytes,
        fraction=held.nbytes / peak,
        freed_by=tuple(remedy.name for remedy in offered if remedy.frees(held)),
        is_workspace=held.is_workspace,
        is_bucket=held.is_bucket,
    )


def _cells(row: Row) -> tuple[str, ...]:
    where = BUCKETS if row.is_bucket else row.where or "module not known"
    if row.num_modules > 1:
        where += f" ({row.num_modules} {_kind(row)})"
    category = WORKSPACE if row.is_workspace else str(row.category).replace("_", " ")
    return (format_bytes(row.nbytes), _share(row.fraction), category, where, row.operator)


def _kind(row: Row) -> str:
    named = row.category in (Category.PARAMETERS, Category.OPTIMIZER_STATE)
    return "parameters" if named else "modules"


def _freed(remedy: Remedy) -> str:
    if remedy.freed_bytes is None:
        return "no estimate"
    return f"about {format_bytes(remedy.freed_bytes)} less"


def _share(fraction: float) -> str:
    return "<0.1 %" if fraction < 0.001 else format_percent(fraction)


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table of text; sizes and shares stand at the right of their column."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  " + "  ".join(
            cell.rjust(width) if column < 2 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]  # fmt: skip
