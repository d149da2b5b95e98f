"""The graph of a step in this process, a job of the worker for predictions."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx, nn

from memlab.config import Optimizer, Sharding, StepConfig
from memlab.costs.recorded_step import Failure, RecordedStep, from_recorded_step
from memlab.devices.cards import Target
from memlab.graphs.graph_rows import GraphTable
from memlab.graphs.labels import Label, NodeFacts, labels_of, with_a_module_for_each_node
from memlab.graphs.node_costs import rows_of
from memlab.graphs.row_sums import step_seconds
from memlab.plan import Plan
from memlab.predicting.predict import MOST_UNKNOWN, trace_of_step
from memlab.result import Outcome
from memlab.running import Report
from memlab.workload import Workload

BY_FX, BY_OPERATORS = "torch.fx.symbolic_trace", "operators"
OTHER_GRAPH = "the step runs other operators than the graph of torch.fx.symbolic_trace"
NO_TIME = (
    "The time of collectives is not known, so the step has none; name a cluster, such as "
    "device='8x-h100'."
)
BESIDE = "Collectives run beside other operators, so the step takes less than all rows together."


def graph_in_process(
    workload: Workload,
    config: StepConfig,
    target: Target,
    *,
    seed: int,
    plan: Plan | None = None,
    report: Report,
) -> GraphTable:
    """Return the graph of a step with its costs; never raises for the step.

    Args:
        workload: what is trained.
        config: how, with micro-batches of equal size.
        target: a CPU, or a CUDA card that need not be there.
        seed: set before the model, the batch and each step.
        plan: of the config's memory budget.
        report: called as for a prediction; what it raises ends it.
    """
    asked: dict[str, Any] = {
        "device": target.name, "config": config, "workload_name": workload.name,
    }  # fmt: skip
    nodes: list[NodeFacts] = []
    labels, why = _labels(workload, config, target, seed, report, nodes), ""
    if isinstance(labels, Failure):
        why = labels.message
        nodes, labels = [], []

    found = from_recorded_step(
        partial(_with_costs, nodes=nodes, labels=labels, why=why),
        workload, config, target, seed=seed, plan=plan, report=report, purpose="for its graph",
    )  # fmt: skip
    if isinstance(found, Failure):
        return GraphTable(**asked, outcome=found.outcome, message=found.message)
    return GraphTable(**asked, outcome=Outcome.OK, **found)


def _labels(
    workload: Workload,
    config: StepConfig,
    target: Target,
    seed: int,
    report: Report,
    nodes: list[NodeFacts],
) -> list[Label] | Failure:
    """Return which kernels the nodes run, in order, and fill in the nodes."""
    of_nodes = dataclasses.replace(
        workload,
        build_model=partial(_build_of_nodes, workload.build_model, nodes),
        sample_size=None,
        choices=None,
        make_optimizer=None,
    )
    plain = StepConfig(
        batch_size=config.micro_batch_size, precision=config.precision, optimizer=Optimizer.SGD
    )
    return from_recorded_step(
        lambda step: labels_of(step.program.recording),
        of_nodes, plain, target, seed=seed, report=report, purpose="by torch.fx",
    )  # fmt: skip


def _build_of_nodes(build_model: Callable[[], nn.Module], nodes: list[NodeFacts]) -> fx.GraphModule:
    return with_a_module_for_each_node(build_model(), nodes)


def _with_costs(
    step: RecordedStep, *, nodes: list[NodeFacts], labels: list[Label], why: str
) -> dict[str, Any]:
    """Return the fields of a table: of the nodes of torch.fx, or else of operators."""
    kernels = step.kernels()
    num_parts = step.config.accumulation_steps
    made = step.program, kernels, trace_of_step(step, kernels), num_parts
    rows = rows_of(*made, nodes, labels) if nodes else None
    if nodes and rows is None:
        why = OTHER_GRAPH
    traced_by = BY_FX if rows is not None else BY_OPERATORS
    if rows is None:
        rows = rows_of(*made, [], [])
        assert rows is not None  # any step is a graph of its operators

    notes = [f"The nodes are operators, because {why}."] if why else []
    seconds = None
    if step.config.sharding is not Sharding.NONE and kernels.overlap is None:
        notes.append(NO_TIME)
    elif kernels.unknown_share <= MOST_UNKNOWN:
        seconds = step_seconds(step.program, kernels, num_parts)
        notes += [BESIDE] if kernels.overlap is not None else []
    return {
        "message": "",
        "rows": rows,
        "traced_by": traced_by,
        "notes": (*notes, *step.program.recording.notes, *kernels.notes),
        "step_seconds": seconds,
    }
