"""Callbacks for the trainers of other libraries, which record what their steps cost.

In: a trainer of a person's own, which runs as before. Out: a `StepResult` in memlab's store.

Start with `lightning_recorder.py`. It imports Lightning when a recorder is made, and only then.
"""

from memlab.callbacks.lightning_recorder import step_recorder

__all__ = ["step_recorder"]
