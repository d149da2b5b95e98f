"""memlab: what a training step costs in memory and time, and what it could cost instead."""

import importlib
from typing import TYPE_CHECKING, Any

from memlab import workloads
from memlab._loaders import measure_loading
from memlab._verify import VerifyReport
from memlab._version import __version__
from memlab.api import measure, predict, to_frame, verify
from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.loading import LoadingConfig, LoadingResult
from memlab.memory.cost_store import forget_costs
from memlab.result import Outcome, StepResult
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab._explain import explain
    from memlab._ladder import ladder
    from memlab._panel import panel
    from memlab._recorded import recorded, recordings

__all__ = [
    "LoadingConfig", "LoadingResult", "MemlabError", "Outcome", "StepConfig", "StepResult",
    "VerifyReport", "Workload", "__version__", "explain", "forget_costs", "ladder",
    "measure", "measure_loading", "panel", "predict", "recorded", "recordings", "to_frame",
    "verify", "workloads",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what comes after a result when it is first asked for: explanation, plots, widgets."""
    if name in ("explain", "ladder", "panel", "recorded", "recordings"):
        module = "recorded" if name == "recordings" else name
        return getattr(importlib.import_module(f"memlab._{module}"), name)
    if name == "plots":
        return importlib.import_module("memlab.plots")
    raise AttributeError(f"module 'memlab' has no attribute {name!r}")
