"""`GraphTable`: the nodes of a step's graph with their bytes and seconds, a row each."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from memlab._util.tables import columns_table
from memlab._util.units import format_bytes, format_seconds
from memlab.config import StepConfig
from memlab.result import Outcome

if TYPE_CHECKING:
    import pandas as pd

HEADS = ("node", "calls", "kept", "saved", "forward", "backward", "ranks", "payload")


class NodeKind(StrEnum):
    """What a row of a graph stands for.

    - module, function: a node of torch.fx.
    - operator: an operator of PyTorch, in a graph of operators.
    - loss: what the workload computes beside its model.
    - collective: communication with other ranks.
    - other: what techniques add, such as casts, and copies around collectives.
    - gradients: sums of gradients, which belong to no node.
    - optimizer: the update, with clipping.
    - batch: copies of the batch to a card.
    """

    MODULE = "module"
    FUNCTION = "function"
    OPERATOR = "operator"
    LOSS = "loss"
    COLLECTIVE = "collective"
    OTHER = "other"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    BATCH = "batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRow:
    """A node of a graph, with what its kernels hold and take in one step.

    Attributes:
        name: of the node; unique in its table.
        kind: see `NodeKind`.
        target: what it calls: the path of a module, a function, an operator.
        module: path of the module in which it runs; empty for the model itself.
        reads: the rows whose results it reads, by index.
        kept_bytes: allocated in the forward of the first micro-batch and held when the node ends:
            its result, unless that is a view, and what it saves.
        saved_bytes: those of them that are held for backward when this forward ends.
        forward_seconds: in all forwards of the step, of its kernels; None if times are not known,
            as those of collectives without a cluster.
        backward_seconds: in all backwards, with what is recomputed; the update of an optimizer is
            neither and counts here.
        ranks: number of ranks that take part in a collective; 0 for other nodes.
        group: which ranks these are, in words such as "0-7"; empty for other nodes.
        payload_bytes: of a collective, in all its calls in the step: what an all-gather returns,
            what a reduce-scatter or an all-reduce takes. 0 for other nodes.
    """

    name: str
    kind: NodeKind
    target: str
    module: str = ""
    reads: tuple[int, ...] = ()
    kept_bytes: int = 0
    saved_bytes: int = 0
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    ranks: int = 0
    group: str = ""
    payload_bytes: int = 0

    @property
    def seconds(self) -> float | None:
        """Forward and backward together; None if times are not known."""
        if self.forward_seconds is None or self.backward_seconds is None:
            return None
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTable:
    """The graph of a step: what each node holds and takes, as `memlab.predict` knows it.

    Attributes:
        outcome: ok, or why there is no graph.
        message: a sentence about that.
        rows: the nodes in the order in which the forward runs them, then what is no node of it.
        traced_by: "torch.fx.symbolic_trace", or "operators" for the graph of operators that
            `make_fx` would give.
        notes: sentences that a reader of the rows must know.
        device: as it was asked for.
        config: how the step trains.
        workload_name: what is trained.
        step_seconds: the predicted time of the step, of which the rows are parts; None if it is not
            known.
    """

    outcome: Outcome
    message: str
    device: str
    config: StepConfig
    workload_name: str
    rows: tuple[GraphRow, ...] = ()
    traced_by: str = ""
    notes: tuple[str, ...] = ()
    step_seconds: float | None = None

    @property
    def saved_bytes(self) -> int:
        """What the first forward leaves for its backward: the activations at its end."""
        return sum(row.saved_bytes for row in self.rows)

    def to_frame(self) -> "pd.DataFrame":
        """Return one row a node, with the fields of `GraphRow` as columns."""
        import pandas as pd  # 0.3 s that few need

        found = [asdict(row) | {"kind": str(row.kind)} for row in self.rows]
        return pd.DataFrame(found, columns=list(GraphRow.__slots__))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[GraphRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        """Return one line: how many nodes there are, what they save and take."""
        head = f"graph of {self.workload_name} on {self.device}"
        if self.outcome is not Outcome.OK:
            return f"{head}: {self.outcome}: {self.message}"
        took = "" if self.step_seconds is None else f", {format_seconds(self.step_seconds)} a step"
        said = f"{len(self)} rows by {self.traced_by}, {format_bytes(self.saved_bytes)} saved"
        return f"{head}: {said} for backward{took}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        from html import escape  # 5 ms that `import memlab` need not wait for

        cells = [[*_cells(row)] for row in self.rows]
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(str(self))}</p>{columns_table(HEADS, cells)}{notes}"


def _cells(row: GraphRow) -> Iterator[Any]:
    yield row.name
    yield row.target
    yield from (format_bytes(size) if size else "" for size in (row.kept_bytes, row.saved_bytes))
    for seconds in (row.forward_seconds, row.backward_seconds):
        yield format_seconds(seconds) if seconds else ""
    yield f"{row.ranks}: {row.group}" if row.ranks else ""
    yield format_bytes(row.payload_bytes) if row.payload_bytes else ""
