"""memlab: what a training step costs in memory and time, and what it could cost instead."""

import importlib
from typing import TYPE_CHECKING, Any

from memlab import workloads
from memlab._version import __version__
from memlab.api import measure, predict, to_frame, verify
from memlab.config import StepConfig
from memlab.costs.cost_store import forget_costs
from memlab.errors import MemlabError
from memlab.loaders import measure_loading
from memlab.loading import LoadingConfig, LoadingResult
from memlab.result import Outcome, StepResult
from memlab.verifying.verify import VerifyReport
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab._panel import panel
    from memlab.comparing.ladder import ladder
    from memlab.explaining.explain import explain
    from memlab.records.recorded import recorded, recordings

__all__ = [
    "LoadingConfig", "LoadingResult", "MemlabError", "Outcome", "StepConfig", "StepResult",
    "VerifyReport", "Workload", "__version__", "explain", "forget_costs", "ladder",
    "measure", "measure_loading", "panel", "predict", "recorded", "recordings", "to_frame",
    "verify", "workloads",
]  # fmt: skip
LATE = {"explain": "explaining.explain", "ladder": "comparing.ladder", "panel": "_panel"}
LATE |= {"plots": "plots", "recorded": "records.recorded", "recordings": "records.recorded"}


def __getattr__(name: str) -> Any:
    """Import what comes after a result when it is first asked for: explanation, plots, widgets."""
    if name in LATE:
        module = importlib.import_module(f"memlab.{LATE[name]}")
        return module if name == "plots" else getattr(module, name)
    raise AttributeError(f"module 'memlab' has no attribute {name!r}")
