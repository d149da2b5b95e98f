"""torch.compile and its Memory Budget API, with checks that PyTorch lacks.

Source: `torch._functorch.config.activation_memory_budget` and the partitioner that reads it;
`partitions` judges its plans. A budget below 1 needs the whole model in one graph, and gives wrong
gradients if that graph draws random numbers (pytorch issues 190758 and 190717). memlab refuses
both.

On a CPU the backend is `aot_eager_decomp_partition`: it traces and partitions the graph but
generates no code, since there may be no C++ compiler. On CUDA it is inductor. Compare budgets only
within one backend.
"""

import contextlib
import functools
import importlib.util
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab._util.torch_private import compiler, pytree
from memlab._util.torch_private.tensors import OpOverload, storage_key
from memlab._util.units import format_bytes
from memlab.config import (
    BudgetEngine,
    BudgetEstimator,
    BudgetSolver,
    CompileMode,
    Sharding,
    StepConfig,
)
from memlab.errors import UnsupportedError
from memlab.techniques.accumulation import random_modules
from memlab.techniques.checkpointing import policies
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Control, Equivalence, Refusal, Setup, Technique, switch
from memlab.workload import Workload

# Count what the forward and backward graphs of a compiled model hold, without running them.
#
# A storage lives from the operator that makes it to the last operator that reads it or a
# view of it, because then the code that `torch.fx` generates drops it. Saved tensors live
# from forward to backward. What kernels allocate for themselves is not known. But equal
# calls allocate equally, so two plans can be compared by what is live while each of these
# calls runs. Left out: tensors that a code generator fuses away (Inductor, on CUDA), and a
# model that is called more than once before its backward.

WITH_WORKSPACE = ("convolution", "max_pool", "rnn", "lstm", "gru")
"""Parts of the names of operators whose kernels allocate at least as much as their results. On a
CPU with torch 2.13 a convolution allocates up to 60 times as much (in single small calls), pooling
6 times. Matrix products and attention of a GPT and a ViT in fp32 allocate nothing of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes beyond the inputs of the forward graph (parameters and batch).

    Attributes:
        peak_bytes: the most that is live, in forward or in backward.
        held_bytes: live when forward has ended: its outputs, and what is saved for backward.
        at_calls: the most that is live while a call with workspace runs, by operator and shapes.
    """

    peak_bytes: int
    held_bytes: int
    at_calls: Mapping[str, int]

    def is_within(self, other: "Footprint") -> bool:
        """Return whether every number is at most the other's.

        Then this plan peaks no higher, whatever the kernels of its calls allocate.
        """
        calls = all(nbytes <= other.at_calls.get(at, -1) for at, nbytes in self.at_calls.items())
        return calls and self.peak_bytes <= other.peak_bytes and self.held_bytes <= other.held_bytes


def footprint(forward: torch.fx.Graph, backward: torch.fx.Graph) -> Footprint:
    """Return what two graphs hold, whose nodes have `meta["val"]`; backward reads forward's."""
    inputs = forward.find_nodes(op="placeholder")
    names = {node.name for node in inputs}
    # inputs from outside are held anyway; backward may drop everything else that it is given
    kept = [node for node in backward.find_nodes(op="placeholder") if node.name in names]
    at_calls: dict[str, int] = {}
    forward_peak, held = _peak_and_end(forward, inputs, at_calls)
    backward_peak, _ = _peak_and_end(backward, kept, at_calls)
    return Footprint(
        peak_bytes=max(forward_peak, backward_peak), held_bytes=held, at_calls=at_calls
    )


def _peak_and_end(
    graph: torch.fx.Graph, always_held: Collection[torch.fx.Node], at_calls: dict[str, int]
) -> tuple[int, int]:
    """Return the most bytes that are live at once and those at the end, without `always_held`.

    What is live during calls with workspace is added to `at_calls`.
    """
    outside = {key for node in always_held for key, _ in _storages(node)}
    dying = _dying(graph)
    holders: Counter[int] = Counter()
    sizes: dict[int, int] = {}
    live = peak = 0

    def make(node: torch.fx.Node) -> None:
        nonlocal live, peak
        for key, nbytes in _storages(node):
            if not holders[key] and key not in outside:
                live += nbytes
            sizes[key] = nbytes
            holders[key] += 1

        peak = max(peak, live)

    def drop(node: torch.fx.Node) -> None:
        nonlocal live
        for key, _ in _storages(node):
            holders[key] -= 1
            if not holders[key] and key not in outside:
                live -= sizes[key]

    for node in graph.find_nodes(op="placeholder"):
        make(node)
    for node in graph.nodes:
        if node.op == "output":
            break

        if node.op != "placeholder":
            make(node)
            if any(name in str(node.target) for name in WITH_WORKSPACE):
                call = _signature(node)
                at_calls[call] = max(live, at_calls.get(call, 0))

        for dead in dying[node]:
            drop(dead)

    return peak, live


def _dying(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return for each node the nodes that it is the last to read; itself if no node reads it."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        last |= dict.fromkeys(node.all_input_nodes, node)

    dying: dict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
    for node, reader in last.items():
        dying[reader].append(node)
    return dying


def _signature(node: torch.fx.Node) -> str:
    """Return an operator with the shapes, strides and formats of its inputs, and its settings."""

    def text(argument: object) -> str:
        value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument
        if not isinstance(value, torch.Tensor):
            return str(value)
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"

    read = pytree.tree_map(text, (node.args, node.kwargs))
    return f"{node.target}{read}"


def _storages(node: torch.fx.Node) -> Iterator[tuple[int, int]]:
    """Yield the address and the bytes of each storage that a node's value holds."""
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            yield storage_key(storage), _hint(storage.nbytes())


def _hint(size: int | torch.SymInt) -> int:
    """Return a size; for a symbolic size the value that it was traced with."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


# Choose between the plans that torch.compile's partitioner makes for different budgets.
#
# Source: `torch/_functorch/partitioners.py`. PyTorch's budget limits what is saved for
# backward. A low budget may recompute so much at once that the step peaks higher than with
# a larger budget (pytorch issue 197838).
#
# Here a budget is an upper bound, and a lower budget never peaks higher. memlab goes down
# from budget 1 in steps and accepts a plan if its footprint is within that of the last
# accepted plan. It runs the first accepted plan at or below the requested budget. If there
# is none, it runs the last accepted plan above it.
#
# Left out: the real peaks of these plans. A plan with convolutions may therefore be skipped
# although its real peak is lower.

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
def chosen_partition(
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


def is_compiled(config: StepConfig) -> bool:
    """Return whether the step runs through torch.compile."""
    return config.compile or _is_planned(config)


def asked_by(config: StepConfig) -> str:
    """Return the setting that makes the step compiled, for the sentence of a refusal."""
    if config.compile:
        return "compile=True"
    return f"budget_engine='compile' at memory_budget={config.memory_budget:g}"


def without(config: StepConfig) -> dict[str, Any]:
    """Return the settings that make the step eager."""
    settings: dict[str, Any] = {"compile": False} if config.compile else {}
    return settings | ({"budget_engine": BudgetEngine.EAGER} if _is_planned(config) else {})


def _is_planned(config: StepConfig) -> bool:
    """Return whether PyTorch's partitioner plans what to recompute."""
    return config.memory_budget < 1.0 and config.budget_engine is BudgetEngine.COMPILE


def backend(device: torch.device) -> str:
    """Return the name of the torch.compile backend that memlab uses on this device."""
    return "aot_eager_decomp_partition" if device.type == "cpu" else "inductor"


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse a compile mode on a device for which no code is generated."""
    config, device = setup.config, setup.device
    mode = config.compile_mode
    if is_compiled(config) and device.type != "cuda" and mode is not CompileMode.DEFAULT:
        yield Refusal(
            why=f"compile_mode={str(mode)!r} tunes the code that Inductor generates, and on "
            f"{device.type} memlab's backend generates no code",
            remedies=({"compile_mode": CompileMode.DEFAULT},),
        )


def budget_refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse a solver or an estimator that PyTorch does not have on this machine."""
    config = setup.config
    if not _is_planned(config):
        return

    if config.budget_solver is BudgetSolver.ILP and importlib.util.find_spec("scipy") is None:
        yield Refusal(
            why="budget_solver='ilp' needs the package scipy, which is not installed",
            remedies=({"budget_solver": BudgetSolver.DP},),
            otherwise="install scipy",
        )

    if config.budget_estimator is BudgetEstimator.PROFILE and setup.device.type != "cuda":
        yield Refusal(
            why="budget_estimator='profile' times operators with CUDA events, which "
            f"{setup.device.type} does not have",
            remedies=({"budget_estimator": BudgetEstimator.FLOPS},),
        )


def notes(setup: Setup) -> list[str]:
    """Return what a reader of the numbers must know about a compiled step on this device.

    Once a step has run, this includes what was decided while it was compiled.
    """
    config, device = setup.config, setup.device
    if not is_compiled(config):
        return []

    said = []
    if device.type == "cpu":
        said = [
            f"torch.compile ran with backend {backend(device)}, which generates no code on a CPU."
        ]

    if _is_planned(config) and _last is not None and _last[1:3] == (config, device):
        for choice in _last[3].choices:
            said += [note for note in choice.notes(str(config.budget_solver)) if note not in said]

    return said


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script that compile the model.

    In a script the partitioner takes its own plan for the budget, while memlab replaces a plan
    that may peak higher than one for a larger budget. A script does not check for dropout either.
    """
    config, device = setup.config, setup.device
    if not is_compiled(config):
        return ScriptLines()

    budget, mode = config.memory_budget, str(config.compile_mode)
    switches = {
        "activation_memory_budget": budget,
        "activation_memory_budget_solver": str(config.budget_solver),
        "activation_memory_budget_runtime_estimator": str(config.budget_estimator),
    }
    lines = ["# the partitioner keeps this share of the activations and recomputes the rest"]
    for name, value in switches.items():
        written = f'"{value}"' if isinstance(value, str) else repr(value)
        lines.append(f"torch._functorch.config.{name} = {written}")
    why = "# compiled when it first runs: fewer kernels, and fewer passes over memory"
    arguments = f'backend="{backend(device)}", fullgraph={budget < 1.0}'
    if mode != "default":
        arguments += f', mode="{mode}"'

    compiled = (why, f"model = torch.compile(model, {arguments})")
    is_sharded = config.sharding is not Sharding.NONE
    return ScriptLines(
        imports=("import torch._functorch.config",) if budget < 1.0 else (),
        before=tuple(lines) if budget < 1.0 else (),
        model=() if is_sharded else compiled,
        optimizer=compiled if is_sharded else (),  # after the model is sharded
    )


@dataclass(slots=True)
class CompiledPlan:
    """What was decided while a model was compiled: one choice for each graph."""

    choices: list[GraphChoice] = field(default_factory=list)


_last: tuple[Workload, StepConfig, torch.device, CompiledPlan] | None = (
    None  # what dynamo holds now
)


def apply(
    model: torch.nn.Module, workload: Workload, config: StepConfig, device: torch.device
) -> tuple[torch.nn.Module, Callable[[], contextlib.AbstractContextManager[None]]]:
    """Return the compiled model and the context that each of its steps must run in.

    A second model of the same workload and config runs what was compiled for the first.

    Raises:
        UnsupportedError: a budget below 1 on a model with active dropout.
    """
    global _last
    budget = config.memory_budget
    if budget < 1.0 and (names := random_modules(model)):
        raise UnsupportedError(_random_reason(budget, f"{names[0]} draws random numbers"))

    compiled: Any = torch.compile(
        model,
        backend=backend(device),
        fullgraph=budget < 1.0,
        # pass no mode by default, since backends other than inductor warn about it
        mode=None if config.compile_mode == "default" else str(config.compile_mode),
    )
    if _last is None or _last[:3] != (workload, config, device):
        forget()
        _last = (workload, config, device, CompiledPlan())

    plan = _last[3]
    own = (workload.build_model, workload.make_batch, workload.compute_loss)
    in_main = compiler.main_of(compiler.scopes_of_main(model, own))

    def check_graph(graph: torch.fx.Graph) -> None:
        if random := next(filter(_draws, graph.nodes), None):
            raise UnsupportedError(_random_reason(budget, _describe(random)))

    @contextlib.contextmanager
    def run_in() -> Iterator[None]:
        if budget == 1.0:
            with _budget(config), in_main():
                yield
            return

        planned_before = bool(plan.choices)
        chosen = chosen_partition(stepped(budget), plan.choices.append, check_graph)
        with _budget(config), in_main(), chosen:
            try:
                yield
            except compiler.compile_error() as error:
                inner = getattr(error, "inner_exception", None)
                if isinstance(inner, UnsupportedError):  # memlab's own, raised in the partitioner
                    raise inner from None
                raise UnsupportedError(_graph_break_reason(budget, model, error)) from error

        if not planned_before:
            _check_plan(plan, budget, model)

    return compiled, run_in


def forget() -> None:
    """Drop all compiled code, because torch would silently reuse a plan for another budget."""
    global _last
    _last = None
    compiler.forget_compiled()


def _budget(config: StepConfig) -> contextlib.AbstractContextManager[None]:
    """Return the context in which PyTorch plans as the config says."""
    return compiler.planned_with(
        activation_memory_budget=stepped(config.memory_budget),
        activation_memory_budget_solver=str(config.budget_solver),
        activation_memory_budget_runtime_estimator=str(config.budget_estimator),
        # without the cache of whole graphs, so that the partitioner is always asked
        enable_autograd_cache=False,
    )


def _draws(node: torch.fx.Node) -> bool:
    """Return whether a node of a joint graph draws random numbers in this call."""
    func = node.target
    if not isinstance(func, OpOverload):
        return False
    return policies.draws(func, policies.values_of(func, node.args, dict(node.kwargs)))


def _describe(node: torch.fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    where = str(stack[-1][0]).removeprefix("L['self'].") if stack else ""
    source = (node.meta.get("stack_trace") or "").strip().splitlines()
    line = source[-1].strip() if source else ""
    named = where or (f"the line `{line}`" if line else "the model")
    return f"{named} draws random numbers ({node.target})"


def _random_reason(budget: float, what: str) -> str:
    return (
        f"memory_budget={budget:g} with budget_engine='compile' is refused: {what}, and then "
        "PyTorch computes wrong gradients for a budget below 1 (pytorch issue 190758); set the "
        "dropout to 0, or use checkpointing='blocks' with memory_budget=1.0"
    )


def _check_plan(plan: CompiledPlan, budget: float, model: torch.nn.Module) -> None:
    name = type(model).__name__
    if not plan.choices:
        raise UnsupportedError(
            f"memory_budget={budget:g} did nothing: torch.compile compiled no backward of {name}; "
            "compute_loss must call model(...) itself, and the model needs trainable parameters"
        )

    if not any(choice.changed for choice in plan.choices):
        raise UnsupportedError(
            f"memory_budget={budget:g} changed nothing: the plan of {name} is the same as at 1.0; "
            "use a lower budget, or accumulation_steps"
        )


def _graph_break_reason(budget: float, model: torch.nn.Module, error: Exception) -> str:
    first_line = str(error).strip().splitlines()[0].rstrip(".")
    where = _module_of(model, error)
    return (
        f"memory_budget={budget:g} needs {type(model).__name__} in one graph, and torch.compile "
        f"breaks the graph at {where}: {first_line}; use memory_budget=1.0 and more "
        "accumulation_steps, or checkpointing='blocks' if the model has repeated blocks"
    )


def _module_of(model: torch.nn.Module, error: Exception) -> str:
    """Return the path and class of the module at which a graph broke."""
    rnn = next(((p, m) for p, m in model.named_modules() if isinstance(m, torch.nn.RNNBase)), None)
    if rnn and "RNN" in str(error):
        return f"{rnn[0] or 'the model'} ({type(rnn[1]).__name__})"

    for frame in reversed(getattr(error, "real_stack", None) or []):
        for path, module in model.named_modules():
            code = getattr(type(module).forward, "__code__", None)
            if code is None or code.co_filename != frame.filename:
                continue
            lines = [line for *_, line in code.co_lines() if line]
            if min(lines) <= (frame.lineno or 0) <= max(lines):
                return f"{path or 'the model'} ({type(module).__name__})"

    return "the model"


PLANNED = {"budget_engine": BudgetEngine.COMPILE}
SOLVERS = {
    BudgetSolver.DP: "dynamic programming",
    BudgetSolver.GREEDY: "greedy choice, the most expensive first",
    BudgetSolver.HIRSCHBERG: "dynamic programming in little memory (may exceed the budget)",
    BudgetSolver.ILP: "integer programming (scipy)",
}
ESTIMATORS = {
    BudgetEstimator.FLOPS: "counted operations",
    BudgetEstimator.PROFILE: "measured time on this device",
}
PLANNED_BY = {BudgetEngine.EAGER: "memlab", BudgetEngine.COMPILE: "torch.compile"}


def says(setup: Setup) -> str:
    """Return what compiling does now."""
    if not setup.config.compile:
        return ""
    if setup.device.type == "cpu":
        return "torch.compile on a CPU plans the graph but generates no code"
    return "torch.compile uses inductor; the first run compiles"


def budget_says(setup: Setup) -> str:
    """Return how PyTorch's partitioner chooses."""
    config = setup.config
    if not _is_planned(config):
        return ""
    return (
        f"what is saved is chosen by {SOLVERS[config.budget_solver]}, from the "
        f"{ESTIMATORS[config.budget_estimator]} of each operator"
    )


COMPILED = Technique(
    fields=("compile", "compile_mode"),
    equivalence=Equivalence.NUMERICAL,
    examples={"compile": {"compile": True}},
    refusals=refusals,
    source=source,
    notes=notes,
    controls=(switch("compile", "torch.compile", "compiled", "not compiled"),),
    says=says,
)
COMPILED_BUDGET = Technique(
    fields=("budget_engine", "budget_solver", "budget_estimator"),
    equivalence=Equivalence.NUMERICAL,
    examples={"budget, compiled": {"memory_budget": 0.9, "budget_engine": "compile"}},
    refusals=budget_refusals,  # `source` of COMPILED writes its lines of a script
    controls=(
        Control(
            field="budget_engine",
            label="Budget planned by",
            in_words=lambda engine: PLANNED_BY[engine],
            named=lambda engine: f"budget by {PLANNED_BY[engine]}",
        ),
        Control(
            field="budget_solver",
            label="Solver",
            in_words=lambda solver: SOLVERS[solver],
            only_with=PLANNED,
        ),
        Control(
            field="budget_estimator",
            label="Cost of an operator",
            in_words=lambda estimator: ESTIMATORS[estimator],
            only_with=PLANNED,
        ),
    ),
    says=budget_says,
)
