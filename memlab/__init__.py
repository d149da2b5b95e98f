"""memlab: what a training step costs in memory and time, and what it could cost instead."""

import importlib
from typing import TYPE_CHECKING, Any

from memlab._util import torch_found as _torch_found  # noqa: F401  # isort: skip
from memlab._version import __version__
from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.loading import LoadingConfig, LoadingResult
from memlab.result import Outcome, StepResult
from memlab.running import require_ok
from memlab.workload import SampleSize, Workload, WorkloadChoices

if TYPE_CHECKING:
    from memlab import course, plots, workloads
    from memlab._panel import panel
    from memlab.api import measure, measure_loading, measure_run, predict, predict_run, verify
    from memlab.cost_model.cost_store import forget_costs
    from memlab.devices.cards import card
    from memlab.integrations.export import export_script
    from memlab.integrations.from_script import from_script
    from memlab.integrations.from_trainer import from_trainer
    from memlab.integrations.out_of_memory import explain_error
    from memlab.integrations.person_script import run_script
    from memlab.integrations.snapshot import open_snapshot
    from memlab.integrations.training_step import training_step
    from memlab.integrations.watch import watch
    from memlab.memory.allocation_script import replay_allocations
    from memlab.prediction.evidence import evidence
    from memlab.prediction.run_settings import Evaluation, Generation, TrainingRun
    from memlab.runtime.verify_report import VerifyReport
    from memlab.search.explain import explain
    from memlab.search.graph_of_step import graph_table
    from memlab.search.ladder import ladder
    from memlab.search.largest_batch import largest_batch, predict_batches
    from memlab.search.lengths import predict_lengths
    from memlab.search.quantized_base import compare_base
    from memlab.search.recommend import recommend
    from memlab.search.sweep import sweep
    from memlab.store.compare import compare
    from memlab.store.frames import results, stored_results, table, to_frame
    from memlab.store.recorded import recorded, recordings
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
OF_MODULES = {  # most verbs, nouns that few need: `import memlab` does not wait for these modules
    "_panel": "panel", "course": "course", "plots": "plots", "workloads": "workloads",
    "api": "measure measure_loading measure_run predict predict_run verify",
    "cost_model.cost_store": "forget_costs", "devices.cards": "card", "search.explain": "explain",
    "integrations.export": "export_script", "integrations.from_script": "from_script",
    "integrations.from_trainer": "from_trainer", "integrations.out_of_memory": "explain_error",
    "integrations.person_script": "run_script", "integrations.snapshot": "open_snapshot",
    "integrations.training_step": "training_step", "integrations.watch": "watch",
    "memory.allocation_script": "replay_allocations", "prediction.evidence": "evidence",
    "prediction.run_settings": "Evaluation Generation TrainingRun", "search.sweep": "sweep",
    "runtime.verify_report": "VerifyReport", "search.graph_of_step": "graph_table",
    "search.ladder": "ladder", "search.largest_batch": "largest_batch predict_batches",
    "search.lengths": "predict_lengths", "search.quantized_base": "compare_base",
    "search.recommend": "recommend", "store.recorded": "recorded recordings",
    "store.frames": "results stored_results table to_frame", "store.compare": "compare",
    "techniques.checkpointing.graph_segments": "checkpoint_graph", "techniques.step": "build_step",
}  # fmt: skip
LATE = {name: module for module, names in OF_MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a late name when it is first asked for."""
    if name in LATE:
        module = importlib.import_module(f"memlab.{LATE[name]}")
        return module if name == LATE[name] else getattr(module, name)
    raise AttributeError(f"module 'memlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # so that a notebook completes the late names too
