"""`VerifyReport`: what `verify` found."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from memlab._util.tables import facts_table
from memlab.result import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """How much a few updates of a step differ from those of the reference step.

    Attributes:
        ok: whether hooks, buffers, loss, weights and optimizer states agree and the error of the
            gradients is within the tolerance: `max_relative_error`, or `global_relative_error`
            if a format is narrower than fp32. Recomputing, offloading and writing in place must
            not change any bit of the step without them, at its own precision. If that step does
            not give the same bits twice, `RECOMPUTE_TOLERANCE` is allowed.
        outcome: `ok`, or why there was nothing to compare.
        max_relative_error: the largest ||g - g_ref|| / max(||g_ref||, 1e-3 ||G_ref|| / sqrt(P))
            over the P parameters and all updates, G_ref being all gradients; None without a
            comparison.
        global_relative_error: the largest ||G - G_ref|| / ||G_ref|| of an update.
        worst_parameter: the parameter with the largest error.
        tolerance: the error that is allowed: 1e-5 in fp32, 1e-4 compiled.
        bitwise: whether recomputing, offloading and writing in place change no bit of loss,
            gradients, buffers, weights, optimizer states and random state, at the precision of
            the config; None if none of them is on, or the model is compiled.
        buffers_equal: whether running statistics and other buffers equal those of the reference
            step.
        same_as_full_batch: "yes", "no" or "unknown": whether the micro-batches together give the
            gradient of the undivided batch, apart from rounding.
        num_updates: number of updates that were compared; 0 without a comparison.
        first_different_update: the first update (from 1) that differs by more than is allowed.
        why: one sentence.
        device: on which both steps ran; "" if that is not known.

    >>> print(VerifyReport(ok=True, why="largest relative error 0.0e+00"))
    gradients same: largest relative error 0.0e+00
    """

    ok: bool
    why: str
    outcome: Outcome = Outcome.OK
    max_relative_error: float | None = None
    global_relative_error: float | None = None
    worst_parameter: str | None = None
    tolerance: float | None = None
    bitwise: bool | None = None
    buffers_equal: bool | None = None
    same_as_full_batch: str = "unknown"
    num_updates: int = 0
    first_different_update: int | None = None
    device: str = ""

    @property
    def _verdict(self) -> str:
        if self.outcome is not Outcome.OK:
            return f"gradients not checked ({self.outcome})"
        return "gradients same" if self.ok else "gradients differ"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types; an error that is not finite as text."""
        data = asdict(self) | {"outcome": str(self.outcome)}
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in data.items()
        }

    def __str__(self) -> str:
        """Return one line."""
        where = f" on {self.device}" if self.device else ""
        return f"{self._verdict}{where}: {self.why}"

    def _repr_html_(self) -> str:
        """Return a small table for notebooks; it leaves out what was not compared."""
        facts = {"device": self.device, "why": self.why}
        if self.num_updates:
            facts |= {
                "largest relative error of one gradient": self._largest_error(),
                "relative error of all gradients": f"{_error(self.global_relative_error)} measured",
                "error that is allowed": _error(self.tolerance),
                "same bits as without the technique": _yes_or_no(self.bitwise),
                "same buffers": _yes_or_no(self.buffers_equal),
                "same gradient as the undivided batch": self.same_as_full_batch,
                "updates that were compared": str(self.num_updates),
                "first update that differs": str(self.first_different_update or ""),
            }
        return facts_table(self._verdict, facts)

    def _largest_error(self) -> str:
        return f"{_error(self.max_relative_error)} in {self.worst_parameter}, measured"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _yes_or_no(answer: bool | None) -> str:
    return {None: "", True: "yes", False: "no"}[answer]
