"""memlab: what a training step costs in memory and time, and what it could cost instead."""

import importlib
from typing import TYPE_CHECKING, Any

from memlab._util import torch_found as _torch_found  # noqa: F401  # isort: skip
from memlab import workloads
from memlab._version import __version__
from memlab.api import measure, measure_loading, measure_run, predict, predict_run, verify
from memlab.config import StepConfig
from memlab.cost_model.cost_store import forget_costs
from memlab.devices.cards import card
from memlab.errors import MemlabError
from memlab.loading import LoadingConfig, LoadingResult
from memlab.result import Outcome, StepResult
from memlab.running import require_ok
from memlab.runtime.verify_report import VerifyReport
from memlab.store.frames import results, stored_results, table, to_frame
from memlab.store.recorded import recorded, recordings
from memlab.workload import SampleSize, Workload, WorkloadChoices

if TYPE_CHECKING:
    from memlab import course, plots
    from memlab._panel import panel
    from memlab.integrations.export import export_script
    from memlab.integrations.from_script import from_script
    from memlab.integrations.from_trainer import from_trainer
    from memlab.integrations.out_of_memory import explain_error
    from memlab.integrations.person_script import run_script
    from memlab.integrations.snapshot import open_snapshot
    from memlab.integrations.training_step import training_step
    from memlab.integrations.watch import watch
    from memlab.memory.hygiene import replay_allocations
    from memlab.prediction.evidence import evidence
    from memlab.prediction.run_settings import Evaluation, Generation, TrainingRun
    from memlab.search.explain import explain
    from memlab.search.graph_of_step import graph_table
    from memlab.search.ladder import ladder
    from memlab.search.largest_batch import largest_batch, predict_batches
    from memlab.search.lengths import predict_lengths
    from memlab.search.quantized_base import compare_base
    from memlab.search.recommend import recommend
    from memlab.search.sweep import sweep
    from memlab.store.compare import compare
    from memlab.techniques.checkpointing.graph_segments import checkpoint_graph
    from memlab.techniques.step import build_step

__all__ = [
    "Evaluation", "Generation", "LoadingConfig", "LoadingResult", "MemlabError", "Outcome",
    "SampleSize", "StepConfig", "StepResult", "TrainingRun", "VerifyReport", "Workload",
    "WorkloadChoices", "__version__", "build_step", "card", "checkpoint_graph", "compare",
    "compare_base", "course", "evidence", "explain", "explain_error", "export_script",
    "forget_costs", "from_script", "from_trainer", "graph_table", "ladder", "largest_batch",
    "measure", "measure_loading", "measure_run", "open_snapshot", "panel", "plots", "predict",
    "predict_batches", "predict_lengths", "predict_run", "recommend", "recorded", "recordings",
    "replay_allocations", "require_ok", "results", "run_script", "stored_results", "sweep",
    "table", "to_frame", "training_step", "verify", "watch", "workloads",
]  # fmt: skip
LATE = {  # public names whose modules `import memlab` does not wait for
    "panel": "_panel", "explain_error": "integrations.out_of_memory",
    "export_script": "integrations.export",
    "run_script": "integrations.person_script", "from_script": "integrations.from_script",
    "from_trainer": "integrations.from_trainer",
    "open_snapshot": "integrations.snapshot",
    "training_step": "integrations.training_step", "replay_allocations": "memory.hygiene",
    "plots": "plots", "course": "course", "watch": "integrations.watch",
    "Evaluation": "prediction.run_settings", "evidence": "prediction.evidence",
    "Generation": "prediction.run_settings", "TrainingRun": "prediction.run_settings",
    "predict_batches": "search.largest_batch",
    "explain": "search.explain", "graph_table": "search.graph_of_step", "ladder": "search.ladder",
    "largest_batch": "search.largest_batch", "predict_lengths": "search.lengths",
    "compare_base": "search.quantized_base", "recommend": "search.recommend",
    "sweep": "search.sweep", "compare": "store.compare",
    "checkpoint_graph": "techniques.checkpointing.graph_segments", "build_step": "techniques.step",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what comes after a result when it is first asked for: explanation, plots, widgets."""
    if name in LATE:
        module = importlib.import_module(f"memlab.{LATE[name]}")
        return module if name in ("plots", "course") else getattr(module, name)
    raise AttributeError(f"module 'memlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # so that a notebook completes the late names too
