"""`VerifyReport`: what `verify` found."""

from dataclasses import dataclass

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

    def __str__(self) -> str:
        """Return one line."""
        verdict = "gradients same" if self.ok else "gradients differ"
        if self.outcome is not Outcome.OK:
            verdict = f"gradients not checked ({self.outcome})"
        return f"{verdict}: {self.why}"
