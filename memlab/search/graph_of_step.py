"""What each node of a step's graph costs: it checks in the caller, and a worker records."""

import threading
from typing import Any

import torch

from memlab._util.checks import checked, seconds
from memlab.config import StepConfig
from memlab.errors import UnsupportedError
from memlab.prediction.graph_table import GraphTable
from memlab.prediction.plans import plan_for
from memlab.running import Ended
from memlab.runtime.isolation import OnProgress, runner
from memlab.store.recorded import target_for
from memlab.workload import Workload


@checked(timeout_seconds=seconds)
def graph_table(
    workload: Workload,
    config: StepConfig,
    device: str | torch.device | None = None,
    *,
    seed: int = 0,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> GraphTable:
    """Return the graph of a step: its nodes, with the bytes and seconds of each, predicted.

    The nodes are those of `torch.fx.symbolic_trace`. If it cannot follow the model, or the step
    runs other operators than the traced graph, they are the operators that `make_fx` would give,
    and a note says why. With sharding each collective is a row, with its bytes, the ranks that take
    part and, for a cluster, its time. The sums
    over the rows are what `memlab.predict` says of the step: its time, and the activations at the
    end of the first forward.

    Args:
        workload: what is trained.
        config: how, with micro-batches of equal size.
        device: as for `memlab.predict`.
        seed: set before the model, the batch and each step.
        timeout_seconds: the table is `timed_out` after this time.
        on_progress: as for `memlab.measure`.
        cancel: as for `memlab.measure`.

    Raises:
        MemlabError: an argument is not allowed, or micro-batches differ in size.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> table = graph_table(workload, StepConfig(batch_size=4), "t4")
    >>> [row.name for row in table if row.kept_bytes]
    ['linear', 'loss']
    """
    sizes = config.micro_batch_sizes
    if len(set(sizes)) > 1:
        raise UnsupportedError(
            f"batch_size={config.batch_size} with accumulation_steps={config.accumulation_steps}: "
            "a node costs another number in micro-batches of another size; use a batch_size that "
            "divides equally"
        )

    target = target_for(device, config)
    arguments: dict[str, Any] = {
        "workload": workload, "config": config, "target": target, "seed": seed,
    }  # fmt: skip
    run = runner(True, timeout_seconds, on_progress, cancel)
    try:
        plan = plan_for(workload, config, target, seed=seed, run=run)
        found: GraphTable = run("graph", arguments | {"plan": plan})
        return found
    except Ended as ended:
        return GraphTable(
            outcome=ended.outcome, message=str(ended), device=target.name, config=config,
            workload_name=workload.name,
        )  # fmt: skip
