"""torch.compile, and its Memory Budget API with the guards that it lacks.

Source: `torch._functorch.config.activation_memory_budget` and the partitioner that reads it
(`torch/_functorch/partitioners.py`). A budget below 1 needs the whole model in one graph, and is
wrong where that graph draws random numbers (pytorch issues 190758 and 190717); both are refused.
On a CPU the backend is `aot_eager_decomp_partition` (graph and partitioner, no code generation,
since there may be no C++ compiler); on CUDA it is inductor. Compare budgets within one of them.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab.config import BudgetEngine, Checkpointing, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques import policies
from memlab.techniques.accumulation import random_modules
from memlab.techniques.source import Source
from memlab.workload import Workload


def is_compiled(config: StepConfig) -> bool:
    """Return whether the step runs through torch.compile."""
    planned = config.memory_budget < 1.0 and config.budget_engine is BudgetEngine.COMPILE
    return config.compile or planned


def backend(device: torch.device) -> str:
    """Return the name of the torch.compile backend that memlab uses on this device."""
    return "inductor" if device.type == "cuda" else "aot_eager_decomp_partition"


def check(config: StepConfig) -> None:
    """Raise UnsupportedError for what does not go with a budget of the eager engine."""
    if not config.is_planned:
        return
    asked = f"memory_budget={config.memory_budget:g} with budget_engine='eager'"
    if config.compile:
        raise UnsupportedError(
            f"{asked} plans eager steps, and compile=True was asked for; use "
            "budget_engine='compile', or compile=False"
        )
    if config.checkpointing is not Checkpointing.NONE:
        raise UnsupportedError(
            f"{asked} chooses itself what to recompute, and checkpointing="
            f"{str(config.checkpointing)!r} was asked for; use checkpointing='none', or "
            "memory_budget=1.0"
        )


def notes(config: StepConfig, device: torch.device) -> list[str]:
    """Return what a reader of the numbers must know about a compiled step on this device."""
    if not is_compiled(config) or device.type == "cuda":
        return []
    return [f"torch.compile ran with backend {backend(device)}: no code is generated on a CPU."]


def source(config: StepConfig, device: torch.device) -> Source:
    """Return what a script compiles; dropout with a budget below 1 it must not have."""
    if not is_compiled(config):
        return Source()
    budget = config.memory_budget
    switch = f"torch._functorch.config.activation_memory_budget = {budget!r}"
    return Source(
        imports=("import torch._functorch.config",) if budget < 1.0 else (),
        before=(switch,) if budget < 1.0 else (),
        model=(
            f"model = torch.compile(model, backend={backend(device)!r}, fullgraph={budget < 1.0})",
        ),
    )


@dataclass(slots=True)
class Plan:
    """What the partitioner did while a model was compiled: one entry for each graph."""

    changed: list[bool] = field(default_factory=list)
    random_operators: list[str] = field(default_factory=list)


_last: tuple[Workload, StepConfig, torch.device, Plan] | None = None  # what dynamo holds now


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
    compiled: Any = torch.compile(model, backend=backend(device), fullgraph=budget < 1.0)
    if _last is None or _last[:3] != (workload, config, device):
        forget()
        _last = (workload, config, device, Plan())
    plan = _last[3]

    @contextlib.contextmanager
    def run_in() -> Iterator[None]:
        if budget == 1.0:
            with _budget(budget):
                yield
            return
        planned_before = bool(plan.changed)
        with _budget(budget), _observed(plan):
            try:
                yield
            except torch._dynamo.exc.TorchDynamoException as error:
                inner = getattr(error, "inner_exception", None)
                if isinstance(inner, UnsupportedError):  # ours, from inside the partitioner
                    raise inner from None
                raise UnsupportedError(_graph_break_reason(budget, model, error)) from error
        if not planned_before:
            _check_plan(plan, budget, model)

    return compiled, run_in


def forget() -> None:
    """Drop all compiled code, since a plan for another budget would be used again in silence."""
    global _last
    _last = None
    torch._dynamo.reset()


@contextlib.contextmanager
def _budget(budget: float) -> Iterator[None]:
    # without the cache of whole graphs, so that the partitioner is always asked
    with torch._functorch.config.patch(
        activation_memory_budget=budget, enable_autograd_cache=False
    ):
        yield


@contextlib.contextmanager
def _observed(plan: Plan) -> Iterator[None]:
    """Note for each graph whether the budget changed what is saved, and its random operators."""
    partitioners = torch._functorch.partitioners
    choose = partitioners.choose_saved_values_set

    def observe(joint_graph: Any, node_info: Any, memory_budget: float = 1) -> Any:
        plain = choose(joint_graph, node_info, memory_budget=1)
        saved = choose(joint_graph, node_info, memory_budget=memory_budget)
        plan.changed.append(set(saved) != set(plain))
        plan.random_operators += [_describe(n) for n in joint_graph.nodes if _draws(n)]
        if plan.random_operators:
            raise UnsupportedError(_random_reason(memory_budget, plan.random_operators[0]))
        return saved

    partitioners.choose_saved_values_set = observe
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = choose


def _draws(node: torch.fx.Node) -> bool:
    """Return whether a node of a joint graph draws random numbers in this call."""
    func = node.target
    if not isinstance(func, torch._ops.OpOverload):
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
        f"memory_budget={budget:g} with budget_engine='compile' is refused: {what}, and PyTorch "
        "gives wrong gradients for a budget below 1 then (pytorch issue 190758); set the dropout "
        "to 0, or use checkpointing='blocks' with memory_budget=1.0"
    )


def _check_plan(plan: Plan, budget: float, model: torch.nn.Module) -> None:
    name = type(model).__name__
    if not plan.changed:
        raise UnsupportedError(
            f"memory_budget={budget:g} did nothing: torch.compile planned no backward of {name}; "
            "compute_loss must call model(...) itself, and the model needs trainable parameters"
        )
    if not any(plan.changed):
        raise UnsupportedError(
            f"memory_budget={budget:g} left the plan of {name} as it is at 1.0: there is nothing "
            "more to recompute within it; use a lower budget, or accumulation_steps"
        )


def _graph_break_reason(budget: float, model: torch.nn.Module, error: Exception) -> str:
    first_line = str(error).strip().splitlines()[0].rstrip(".")
    where = _module_of(model, error)
    return (
        f"memory_budget={budget:g} needs {type(model).__name__} in one graph, and torch.compile "
        f"breaks it at {where}: {first_line}; use memory_budget=1.0 and "
        "more accumulation_steps, or checkpointing='blocks' where the model has repeated blocks"
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
