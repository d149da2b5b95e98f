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
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

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
from memlab.techniques.compiling import partitions
from memlab.techniques.recompute import keepable
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Control, Keeps, Refusal, Saving, Setup, Technique, switch
from memlab.torch_private import compiler
from memlab.torch_private.operators import OpOverload
from memlab.workload import Workload


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
    return "inductor" if device.type == "cuda" else "aot_eager_decomp_partition"


def refusals(asked: Setup) -> Iterator[Refusal]:
    """Refuse a compile mode on a device for which no code is generated."""
    config, device = asked.config, asked.device
    mode = config.compile_mode
    if is_compiled(config) and device.type != "cuda" and mode is not CompileMode.DEFAULT:
        yield Refusal(
            why=f"compile_mode={str(mode)!r} tunes the code that Inductor generates, and on "
            f"{device.type} memlab's backend generates no code",
            remedies=({"compile_mode": CompileMode.DEFAULT},),
        )


def budget_refusals(asked: Setup) -> Iterator[Refusal]:
    """Refuse a solver or an estimator that PyTorch does not have on this machine."""
    config = asked.config
    if not _is_planned(config):
        return

    if config.budget_solver is BudgetSolver.ILP and importlib.util.find_spec("scipy") is None:
        yield Refusal(
            why="budget_solver='ilp' needs the package scipy, which is not installed",
            remedies=({"budget_solver": BudgetSolver.DP},),
            otherwise="install scipy",
        )

    if config.budget_estimator is BudgetEstimator.PROFILE and asked.device.type != "cuda":
        yield Refusal(
            why="budget_estimator='profile' times operators with CUDA events, which "
            f"{asked.device.type} does not have",
            remedies=({"budget_estimator": BudgetEstimator.FLOPS},),
        )


def notes(asked: Setup) -> list[str]:
    """Return what a reader of the numbers must know about a compiled step on this device.

    Once a step has run, this includes what was decided while it was compiled.
    """
    config, device = asked.config, asked.device
    if not is_compiled(config):
        return []

    said = []
    if device.type != "cuda":
        said = [
            f"torch.compile ran with backend {backend(device)}, which generates no code on a CPU."
        ]

    if _is_planned(config) and _last is not None and _last[1:3] == (config, device):
        for choice in _last[3].choices:
            said += [note for note in choice.notes(str(config.budget_solver)) if note not in said]

    return said


def source(asked: Setup) -> ScriptLines:
    """Return the lines of a script that compile the model.

    In a script the partitioner takes its own plan for the budget, while memlab replaces a plan
    that may peak higher than one for a larger budget. A script does not check for dropout either.
    """
    config, device = asked.config, asked.device
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

    choices: list[partitions.GraphChoice] = field(default_factory=list)


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

    def check_graph(graph: torch.fx.Graph) -> None:
        if random := next(filter(_draws, graph.nodes), None):
            raise UnsupportedError(_random_reason(budget, _describe(random)))

    @contextlib.contextmanager
    def run_in() -> Iterator[None]:
        if budget == 1.0:
            with _budget(config):
                yield
            return

        planned_before = bool(plan.choices)
        chosen = partitions.chosen(partitions.stepped(budget), plan.choices.append, check_graph)
        with _budget(config), chosen:
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
        activation_memory_budget=partitions.stepped(config.memory_budget),
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
    return keepable.draws(func, keepable.values_of(func, node.args, dict(node.kwargs)))


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


def says(asked: Setup) -> str:
    """Return what compiling does now."""
    if not asked.config.compile:
        return ""
    if asked.device.type == "cpu":
        return "torch.compile on a CPU plans the graph but generates no code"
    return "torch.compile uses inductor; the first run compiles"


def budget_says(asked: Setup) -> str:
    """Return how PyTorch's partitioner chooses."""
    config = asked.config
    if not _is_planned(config):
        return ""
    return (
        f"what is saved is chosen by {SOLVERS[config.budget_solver]}, from the "
        f"{ESTIMATORS[config.budget_estimator]} of each operator"
    )


COMPILED = Technique(
    fields=("compile", "compile_mode"),
    keeps=Keeps.ROUNDED,
    examples={"compile": {"compile": True}},
    refusals=refusals,
    source=source,
    notes=notes,
    controls=(switch("compile", "torch.compile", "compiled", "not compiled"),),
    says=says,
    savings=(
        Saving(
            setting="`compile=True`, `compile_mode`",
            saves="time; the intermediate results of fused operators",
            costs="the compilation",
            not_for="models that run a few steps only",
        ),
    ),
)
COMPILED_BUDGET = Technique(
    fields=("budget_engine", "budget_solver", "budget_estimator"),
    keeps=Keeps.ROUNDED,
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
    savings=(
        Saving(
            setting='`budget_engine="compile"`',
            saves="what PyTorch's partitioner finds, and never less than at a larger budget",
            costs="a compilation for each plan that is tried",
            not_for="dropout and graph breaks, which are refused by name",
        ),
    ),
)
