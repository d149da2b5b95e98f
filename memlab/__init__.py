"""memlab: what a training step costs in memory and time, and what it could cost instead."""

import importlib
from typing import TYPE_CHECKING, Any

from memlab import workloads
from memlab._version import __version__
from memlab.api import measure, predict, verify
from memlab.config import StepConfig
from memlab.costs.cost_store import forget_costs
from memlab.devices.cards import card
from memlab.errors import MemlabError
from memlab.loaders import measure_loading
from memlab.loading import LoadingConfig, LoadingResult
from memlab.records.recorded import recorded, recordings
from memlab.result import Outcome, StepResult
from memlab.running import require_ok
from memlab.store.frames import results, stored_results, table, to_frame
from memlab.verifying.report import VerifyReport
from memlab.workload import SampleSize, Workload, WorkloadChoices

if TYPE_CHECKING:
    from memlab import plots
    from memlab._panel import panel
    from memlab._panel.live_sweep import live_sweep
    from memlab.allocator.hygiene import replay_allocations
    from memlab.changes.compare import compare
    from memlab.comparing.batches import predict_batches
    from memlab.comparing.ladder import ladder
    from memlab.comparing.pairs import compare_recompute
    from memlab.comparing.quantized_base import compare_base
    from memlab.explaining.explain import explain
    from memlab.explaining.graph_of_step import graph_table
    from memlab.exporting.export import export_script
    from memlab.graphs.segments import checkpoint_graph
    from memlab.importing.opening import from_trainer
    from memlab.lengths.predict import predict_lengths
    from memlab.recommending.largest import largest_batch
    from memlab.recommending.recommend import recommend
    from memlab.snapshots.opening import open_snapshot
    from memlab.stages.run_settings import Evaluation, Generation, TrainingRun
    from memlab.step import build_step
    from memlab.store.from_records import store_records
    from memlab.sweeping.sweep import sweep
    from memlab.training.training_step import training_step
    from memlab.whole_runs.calls import measure_run, predict_run

__all__ = [
    "Evaluation", "Generation", "LoadingConfig", "LoadingResult", "MemlabError", "Outcome",
    "SampleSize", "StepConfig", "StepResult", "TrainingRun", "VerifyReport", "Workload",
    "WorkloadChoices", "__version__", "build_step", "card", "checkpoint_graph", "compare",
    "compare_base", "compare_recompute", "explain", "export_script", "forget_costs", "from_trainer",
    "graph_table", "ladder", "largest_batch", "live_sweep", "measure", "measure_loading",
    "measure_run", "open_snapshot", "panel", "plots", "predict", "predict_batches",
    "predict_lengths", "predict_run", "recommend", "recorded", "recordings", "replay_allocations",
    "require_ok", "results", "store_records", "stored_results", "sweep", "table", "to_frame",
    "training_step", "verify", "workloads",
]  # fmt: skip
LATE = {  # public names whose modules `import memlab` does not wait for
    "Evaluation": "stages.run_settings", "build_step": "step", "predict_lengths": "lengths.predict",
    "Generation": "stages.run_settings", "export_script": "exporting.export",
    "TrainingRun": "stages.run_settings", "open_snapshot": "snapshots.opening",
    "checkpoint_graph": "graphs.segments", "plots": "plots", "predict_batches": "comparing.batches",
    "compare": "changes.compare", "explain": "explaining.explain", "ladder": "comparing.ladder",
    "compare_base": "comparing.quantized_base", "graph_table": "explaining.graph_of_step",
    "compare_recompute": "comparing.pairs", "largest_batch": "recommending.largest",
    "from_trainer": "importing.opening", "live_sweep": "_panel.live_sweep",
    "measure_run": "whole_runs.calls", "predict_run": "whole_runs.calls", "sweep": "sweeping.sweep",
    "panel": "_panel", "recommend": "recommending.recommend", "store_records": "store.from_records",
    "replay_allocations": "allocator.hygiene", "training_step": "training.training_step",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what comes after a result when it is first asked for: explanation, plots, widgets."""
    if name in LATE:
        module = importlib.import_module(f"memlab.{LATE[name]}")
        return module if name == "plots" else getattr(module, name)
    raise AttributeError(f"module 'memlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # so that a notebook completes the late names too
