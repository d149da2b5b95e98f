"""The rows of `benchmarks/data/operator_ms.csv` as the work of operators of PyTorch.

Each row is built as a call on meta tensors, so that the same code says what it does as for the
operators of a recorded step.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from memlab.cost_model.roofline import Work, work_of
from memlab.devices import cards
from memlab.devices.cards import Card
from memlab.devices.operators import TensorSpec, signature_of

FILE = Path(__file__).parent / "data" / "operator_ms.csv"
aten = torch.ops.aten
ONE_INPUT = {
    "gelu": (aten.gelu.default,),
    "relu": (aten.relu.default,),
    "tanh": (aten.tanh.default,),
    "addu": (aten.add.Scalar, 1.0),
    "divu": (aten.div.Scalar, 2.0),
    "mulu": (aten.mul.Scalar, 2.0),
    "powu": (aten.pow.Tensor_Scalar, 2.0),
    "softmax": (aten._softmax.default, -1, False),
}
TWO_INPUTS = {"add": aten.add.Tensor, "div": aten.div.Tensor, "mul": aten.mul.Tensor,
              "pow": aten.pow.Tensor_Tensor}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """A row: the operator, what it does, the card, and the seconds that it took."""

    operator: str
    work: Work
    card: Card
    seconds: float


@cache
def card_of(title: str) -> Card:
    """Return the card of a driver's name."""
    found = cards.find(title)
    assert found is not None, title
    return found


def read(path: Path = FILE) -> list[Measured]:
    """Return every row."""
    with path.open(newline="") as file:
        return [_measured(row) for row in csv.DictReader(file)]


def _measured(row: dict[str, str]) -> Measured:
    sizes = tuple(int(row[name] or 0) for name in "BMNKH")
    work = _work(row["op"], *sizes)
    return Measured(row["op"], work, card_of(row["device"]), float(row["ms"]) / 1e3)


@cache
def _work(operator: str, batch: int, rows: int, columns: int, inner: int, width: int) -> Work:
    if operator == "bmm":
        left, right = _meta(batch, rows, inner), _meta(batch, inner, columns)
        return _of(aten.bmm.default, (left, right), (batch, rows, columns))
    if operator == "linear":
        left, right, bias = _meta(rows, inner), _meta(inner, columns), _meta(columns)
        return _of(aten.addmm.default, (bias, left, right), (rows, columns))
    x = _meta(batch, width)
    if operator == "ln":
        weight = _meta(width)
        return _of(aten.native_layer_norm.default, (x, [width], weight, weight, 1e-5), x.shape)
    if operator in TWO_INPUTS:
        return _of(TWO_INPUTS[operator], (x, _meta(batch, width)), x.shape)
    function, *rest = ONE_INPUT[operator]
    return _of(function, (x, *rest), x.shape)


def _of(function: object, args: tuple[object, ...], shape: tuple[int, ...]) -> Work:
    output = _meta(*shape)
    spec = TensorSpec(output.dtype, tuple(output.shape), output.stride())
    return work_of(signature_of(function, args, {}), (spec,))  # type: ignore[arg-type]


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")
