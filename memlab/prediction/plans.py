"""Find the plan for a config. A worker makes a frontier of plans once, and it is cached here."""

import contextlib
import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from memlab.config import Checkpointing, StepConfig
from memlab.devices.cards import Target
from memlab.result import Outcome
from memlab.running import Ended, Run
from memlab.techniques import registry
from memlab.techniques.checkpointing import policies
from memlab.techniques.technique import Plan
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab.prediction.budget_frontier import BudgetFrontier

MOST_KEPT = 32


class _Key(NamedTuple):
    """What the plans of all budgets depend on."""

    workload: Workload
    config: StepConfig
    target_name: str
    seed: int


_frontiers: OrderedDict[_Key, "BudgetFrontier"] = OrderedDict()


def plan_for(
    workload: Workload, config: StepConfig, target: Target, *, seed: int, run: Run
) -> Plan | None:
    """Return the plan of a config, None if it needs none.

    Raises:
        Ended: no plan can be made; the message says why.
        MemlabError: the config's policy names an operator that does not exist.
    """
    policies.keeps(config.checkpoint_policy)
    if not config.is_planned or config.compile or config.checkpointing is not Checkpointing.NONE:
        return None  # build_step refuses settings that cannot be combined with a plan

    frontier = frontier_for(workload, config, target, seed=seed, run=run)
    if len(frontier.plans) == 1:
        raise Ended(
            Outcome.UNSUPPORTED,
            f"memory_budget={config.memory_budget:g} found no module of {workload.name!r} that can "
            "be recomputed: it has no submodules, or each of them changes its inputs in place or "
            "saves nothing for backward; use memory_budget=1.0 and more accumulation_steps",
        )

    return frontier.pick(config.memory_budget)


def frontier_for(
    workload: Workload, config: StepConfig, target: Target, *, seed: int, run: Run
) -> "BudgetFrontier":
    """Return the plans for all budgets of a config, from the cache if possible.

    Raises:
        Ended: no plans can be made; the message says why.
    """
    found = known_frontier(workload, config, target.name, seed=seed)
    if found is not None:
        return found

    key = _key(workload, config, target.name, seed)
    planning = run(
        "plan", {"workload": workload, "config": key.config, "target": target, "seed": seed}
    )
    if planning.frontier is None:
        raise Ended(planning.outcome, planning.message)

    with contextlib.suppress(TypeError):  # as below
        _frontiers[key] = planning.frontier
    while len(_frontiers) > MOST_KEPT:
        _frontiers.popitem(last=False)
    frontier: BudgetFrontier = planning.frontier
    return frontier


def known_frontier(
    workload: Workload, config: StepConfig, target_name: str, *, seed: int
) -> "BudgetFrontier | None":
    """Return the plans for all budgets of a config if they were made already, and else None."""
    try:
        return _frontiers.get(_key(workload, config, target_name, seed))
    except TypeError:  # a function of the workload cannot be hashed
        return None


def _key(workload: Workload, config: StepConfig, target_name: str, seed: int) -> _Key:
    """Return the key; fields that do not change the plans are reset, so that configs share them.

    A rank of several has the plan of one process with its part of the batch.
    """
    default = StepConfig()
    reset = {
        name: getattr(default, name)
        for t in registry.EVERY
        if not t.changes_plans
        for name in t.fields
    }
    plain = dataclasses.replace(config, batch_size=config.rank_batch_size, **reset)
    return _Key(workload, plain, target_name, seed)
