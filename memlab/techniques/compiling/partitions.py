"""Choose between the plans that torch.compile's partitioner makes for different budgets.

Source: `torch/_functorch/partitioners.py`. PyTorch's budget limits what is saved for backward. A
low budget may recompute so much at once that the step peaks higher than with a larger budget
(pytorch issue 197838).

Here a budget is an upper bound, and a lower budget never peaks higher. memlab goes down from budget
1 in steps and accepts a plan if its footprint is within that of the last accepted plan. It runs the
first accepted plan at or below the requested budget. If there is none, it runs the last accepted
plan above it.

Left out: the real peaks of these plans. A plan with convolutions may therefore be skipped although
its real peak is lower.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memlab.arguments.units import format_bytes
from memlab.techniques.compiling.footprint import Footprint, footprint
from memlab.torch_private import compiler

BUDGET_STEP = 0.05
"""The step of the panel's slider. A budget between two steps is rounded down."""

SOLVER_GRAIN = 1e-4
"""The share of the activations to which PyTorch's solvers round sizes (`S` in knapsack.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A plan: what the forward graph saves for the backward graph.

    Attributes:
        budget: the budget that the partitioner was given.
        saved: names of the saved nodes.
        kept_fraction: the share of what is saved at budget 1, by PyTorch's count.
        footprint: an estimate of what the plan holds.
    """

    budget: float
    saved: frozenset[str]
    kept_fraction: float
    footprint: Footprint


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphChoice:
    """What was decided for one graph.

    Attributes:
        plain: the partitioner's plan for budget 1.
        own: its plan for the budget that was asked for.
        taken: the plan that runs.
    """

    plain: Partition
    own: Partition
    taken: Partition

    @property
    def changed(self) -> bool:
        """Whether the partitioner's plan differs from that for budget 1."""
        return self.own.saved != self.plain.saved

    def notes(self, solver: str) -> list[str]:
        """Return what a reader of the numbers must know about this choice."""
        asked, taken = self.own, self.taken
        said = []
        if taken.budget != asked.budget:
            which = "the next lower budget whose plan cannot"
            if taken.budget > asked.budget:
                which = "because every plan at or below the budget may"

            said.append(
                f"PyTorch's own plan for memory_budget={asked.budget:g} may peak higher than its "
                f"plan for a larger budget. memlab ran the plan for {taken.budget:g}, {which}: the "
                f"compiled model holds at most {format_bytes(taken.footprint.peak_bytes)} instead "
                f"of {format_bytes(asked.footprint.peak_bytes)} (estimated, without what kernels "
                "allocate for themselves)."
            )

        if asked.kept_fraction > asked.budget + SOLVER_GRAIN:
            said.append(
                f"budget_solver={solver!r} exceeds its budget: it saves "
                f"{asked.kept_fraction:.3f} of the activations for memory_budget={asked.budget:g} "
                "(pytorch issue 197871)."
            )

        return said


def stepped(budget: float) -> float:
    """Return the budget rounded down to the next step, which is the one that is planned."""
    return math.floor(budget / BUDGET_STEP + 1e-9) * BUDGET_STEP


def take(asked: float, plan_for: Callable[[float], Partition]) -> Partition:
    """Return the plan to run for a budget; no plan is made for a lower budget than needed."""
    taken = plan_for(1.0)
    for step in range(round(1 / BUDGET_STEP) - 1, -1, -1):
        plan = plan_for(step * BUDGET_STEP)
        if plan.footprint.is_within(taken.footprint):
            taken = plan
            if taken.budget <= asked:
                break

    return taken


@contextlib.contextmanager
def chosen(
    budget: float,
    decided: Callable[[GraphChoice], None],
    check: Callable[[torch.fx.Graph], None],
) -> Iterator[None]:
    """Make every graph that is compiled in this context run memlab's choice of plan.

    Args:
        budget: as `stepped` returns it.
        decided: called with the choice for each graph.
        check: called with each joint graph; it may raise an error.
    """
    partitioners = compiler.partitioners()
    choose, extract = partitioners.choose_saved_values_set, compiler.extract_graphs()
    node_info: list[Any] = []  # of the graph that is being partitioned

    def noted(joint_graph: torch.fx.Graph, info: Any, memory_budget: float = 1) -> Any:
        check(joint_graph)
        node_info[:] = [info]
        return choose(joint_graph, info, memory_budget=memory_budget)

    def extracted(joint_module: torch.fx.GraphModule, saved: Any, **options: Any) -> Any:
        if not node_info:  # a graph without a backward is not planned
            return extract(joint_module, saved, **options)

        made = _Plans(joint_module, node_info.pop(), options, choose, extract)
        with _solved_once():
            taken = take(budget, made.plan_for)
            decided(GraphChoice(plain=made.plan_for(1.0), own=made.plan_for(budget), taken=taken))

        nodes = made.nodes(taken.budget)
        saved[:] = [node for node in nodes if not partitioners.is_sym_node(node)]
        options["saved_sym_nodes"][:] = filter(partitioners.is_sym_node, nodes)
        return extract(joint_module, saved, **options)

    with compiler.partitioned_by(choose_saved_values_set=noted, extract=extracted):
        yield


class _Plans:
    """The partitioner's plans for one joint graph, each made once."""

    def __init__(
        self,
        joint_module: torch.fx.GraphModule,
        node_info: Any,
        options: dict[str, Any],
        choose: Callable[..., Any],
        extract: Callable[..., Any],
    ) -> None:
        self._joint, self._info, self._options = joint_module, node_info, options
        self._choose, self._extract = choose, extract
        self.nodes = functools.cache(self._nodes)
        self._footprints: dict[frozenset[str], Footprint] = {}
        self._least = _saved_bytes(node_info.inputs)

    def plan_for(self, budget: float) -> Partition:
        """Return the partitioner's plan for a budget."""
        nodes = self.nodes(budget)
        names = frozenset(node.name for node in nodes)
        if names not in self._footprints:
            self._footprints[names] = self._footprint(nodes)

        span = _saved_bytes(self.nodes(1.0)) - self._least
        above = _saved_bytes(nodes) - self._least
        return Partition(
            budget=budget,
            saved=names,
            kept_fraction=max(above / span, 0.0) if span > 0 else 0.0,
            footprint=self._footprints[names],
        )

    def _nodes(self, budget: float) -> list[torch.fx.Node]:
        found = self._choose(self._joint.graph, self._info, memory_budget=budget)
        return list(found)

    def _footprint(self, nodes: list[torch.fx.Node]) -> Footprint:
        """Return what the two graphs of a plan hold, in the order in which PyTorch runs them."""
        partitioners = compiler.partitioners()
        symbols = [node for node in nodes if partitioners.is_sym_node(node)]
        tensors = [node for node in nodes if not partitioners.is_sym_node(node)]
        options = {**self._options, "saved_sym_nodes": symbols}
        forward, backward = self._extract(self._joint, tensors, **options)
        backward = partitioners.reordering_to_mimic_autograd_engine(backward)
        raised = [partitioners.raise_getitems(module) for module in (forward, backward)]
        return footprint(raised[0].graph, raised[1].graph)


def _saved_bytes(nodes: list[torch.fx.Node]) -> int:
    return sum(compiler.size_of(node) for node in nodes)


@contextlib.contextmanager
def _solved_once() -> Iterator[None]:
    """Cache the cuts and the operator times of a graph, which are the same for every budget."""
    solve, runtime = compiler.partitioners().solve_min_cut, compiler.partitioners().estimate_runtime
    cuts: dict[Any, Any] = {}

    def solved(graph: Any, info: Any, options: Any, dont_ban: Any = None) -> Any:
        key = (repr(options), frozenset(dont_ban or ()))
        if key not in cuts:
            cuts[key] = solve(graph, info, options, dont_ban)
        saved, banned = cuts[key]
        return list(saved), banned

    with compiler.partitioned_by(solve_min_cut=solved, estimate_runtime=functools.cache(runtime)):
        yield
