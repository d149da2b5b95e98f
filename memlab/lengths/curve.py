"""`LengthCurve`: what a step costs with batches of any length, from recordings at a few lengths.

While a step runs the same operators, the size of each of its blocks is a polynomial of the length:
constant for a weight, a line for a hidden state, a parabola for the weights of eager attention. So
three recorded lengths give each block at every other one, and the timeline, the caching allocator
and the limit follow from the blocks as in any prediction. Kernels that round a length up make small
steps, which a parabola cuts through. Left out: the time of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memlab.arguments.units import format_bytes
from memlab.meters.lifetimes import step_memory
from memlab.predicting.forecast import STEP, Forecast
from memlab.predicting.interpolation import interpolated
from memlab.predicting.predict import Prediction
from memlab.recording.program import Program
from memlab.result import StepResult
from memlab.trace import Phase, Trace

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

NODES = 3  # recorded lengths for a parabola


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LengthCurve:
    """Predictions of one step with batches of several lengths, all of the same operators.

    Attributes:
        recorded: predictions by length, ascending.
        name: of the workload, up to its length.
        errors: the relative error at each recorded length that the others were tried on first.
    """

    recorded: Mapping[int, Prediction]
    name: str
    errors: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """The largest error that was seen; 0 if none was looked for."""
        return max(self.errors, default=0.0)

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return sum(self._sizes)

    @property
    def longest(self) -> int:
        """The longest recorded length, which no batch may exceed."""
        return max(self.recorded)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed of values that a step reads, each sentence once."""
        steps = [forecast_of(found).program.recording for found in self.recorded.values()]
        return tuple(dict.fromkeys(said for step in steps for said in step.assumptions))

    def at(self, length: int, limit_bytes: int | None = None) -> StepResult:
        """Return what a step costs whose longest sample has this length.

        Batches that are shorter than the shortest recorded one count as that one. A time is stated
        only at recorded lengths.

        Args:
            length: at most the longest recorded one.
            limit_bytes: that the step may hold; None is what the device has.
        """
        length = max(length, min(self.recorded))
        forecast = self._forecast(length)
        known = self.recorded.get(length)
        result = self._between(length, forecast) if known is None else known.result
        return forecast.against_limit(result, limit_bytes)

    def peak_bytes(self, length: int) -> int:
        """Return the peak that counts against a limit, which takes a part of the time of `at`."""
        trace, reserved = self._forecast(length).trace(self._sizes)
        return step_memory(trace, STEP).peak_bytes if reserved is None else reserved

    def trace(self, length: int) -> Trace:
        """Return what a run allocates and frees whose longest sample has this length.

        Sizes are those that are asked for, before an allocator rounds them.
        """
        forecast = self._forecast(length)
        return forecast.program.trace(forecast.own, self._sizes)

    def fits(self, length: int, limit_bytes: int) -> bool:
        """Return whether a step fits a limit whose longest sample has this length."""
        return self._forecast(length).fits(self._sizes, limit_bytes)

    def error_of(self, prediction: Prediction, length: int) -> float:
        """Return how far off the curve is of a prediction at another length, relative to it.

        It is that of allocated or reserved bytes, whichever is larger.
        """
        told, found = self.at(length), prediction.result
        pairs = [
            (told.peak_allocated_bytes, found.peak_allocated_bytes),
            (told.peak_reserved_bytes, found.peak_reserved_bytes),
        ]
        return max(abs(one / other - 1) for one, other in pairs if one and other)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.recorded[self.longest].result.config.micro_batch_sizes

    def _between(self, length: int, forecast: Forecast) -> StepResult:
        """Return the result at a length that was not recorded."""
        near = min(self.recorded, key=lambda other: abs(other - length))
        base = self.recorded[near]
        timeless = dataclasses.replace(forecast, seconds=None)
        found = interpolated(dataclasses.replace(base, forecast=timeless), base.result.config)
        widths = {name: width + self.error for name, width in (found.uncertainty or {}).items()}
        assert found.peak_allocated_bytes is not None
        return dataclasses.replace(
            found,
            workload_name=f"{self.name} {length}",
            message=f"interpolated peak {format_bytes(found.peak_allocated_bytes)} allocated in "
            f"{found.peak_place}",
            uncertainty={name: width for name, width in widths.items() if "second" not in name},
        )

    def _forecast(self, length: int) -> Forecast:
        """Return the arithmetic of a step whose longest sample has this length."""
        length = max(length, min(self.recorded))
        known = self.recorded.get(length)
        nodes = _nodes(sorted(self.recorded), length) if known is None else [length]
        forecasts = [forecast_of(self.recorded[node]) for node in nodes]
        weights = _weights(nodes, length)
        return dataclasses.replace(
            forecasts[0],
            own=_mixed([forecast.own for forecast in forecasts], weights),
            least=_mixed([forecast.least for forecast in forecasts], weights),
        )


def forecast_of(prediction: Prediction) -> Forecast:
    """Return the forecast of a prediction that was made."""
    assert prediction.forecast is not None
    return prediction.forecast


def runs_same(one: Program, other: Program) -> bool:
    """Return whether two recorded runs allocate and free the same blocks in the same order.

    In which order blocks are freed one after the other does not matter: at its end, autocast frees
    the weights that it has cast in an order that differs from run to run. Nor does that in which
    the model is deleted after the last step.
    """
    if one.ran.names != other.ran.names or one.recording.intervals != other.recording.intervals:
        return False
    if (one.sizes, one.other_size) != (other.sizes, other.other_size):
        return False
    if not np.array_equal(one.layout.interval, other.layout.interval):
        return False
    if not np.array_equal(one.layout.is_birth, other.layout.is_birth):
        return False
    ends = np.array([i.phase is Phase.TEARDOWN for i in one.recording.intervals])
    counted = ~ends[one.layout.interval]
    return np.array_equal(_in_any_order(one)[counted], _in_any_order(other)[counted])


def _in_any_order(program: Program) -> npt.NDArray[np.int64]:
    """Return the block of each row, with blocks that are freed one after the other by number."""
    layout = program.layout
    allocated = np.cumsum(layout.is_birth)  # so far: equal where nothing is allocated in between
    order = np.lexsort((layout.block, ~layout.is_birth, allocated, layout.interval))
    return layout.block[order]


def _nodes(lengths: Sequence[int], length: int) -> Sequence[int]:
    """Return the recorded lengths around another one, of which one may be on its other side."""
    after = next(i for i, recorded in enumerate(lengths) if recorded >= length)
    first = min(max(after - 1, 0), max(len(lengths) - NODES, 0))
    return lengths[first : first + NODES]


def _weights(nodes: Sequence[int], length: int) -> list[float]:
    """Return what each node counts in the polynomial through all of them (Lagrange's form)."""
    return [
        float(np.prod([(length - other) / (node - other) for other in nodes if other != node]))
        for node in nodes
    ]


def _mixed(
    sizes: Sequence[npt.NDArray[np.int64]], weights: Sequence[float]
) -> npt.NDArray[np.int64]:
    """Return the bytes of every block, of which none is negative."""
    found = sum(weight * held for weight, held in zip(weights, sizes, strict=True))
    return np.maximum(np.rint(found), 0).astype(np.int64)
