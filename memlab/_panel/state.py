"""Settings on screen to and from `StepConfig`, and the code that measures them. No widgets.

A setting on screen may be wrong for a while (accumulation above the batch size, letters in a number
box), so settings are a mapping by field name until `to_config` turns them into a `StepConfig`.
"""

import dataclasses
import keyword
from collections.abc import Iterable, Mapping
from typing import Any

from memlab._panel import saving_texts
from memlab._panel.choices import zoo_options
from memlab.arguments.quoting import literal
from memlab.config import (
    PRESET_POLICIES,
    BudgetEngine,
    BudgetEstimator,
    BudgetSolver,
    Checkpointing,
    Optimizer,
    OptimizerImplementation,
    Precision,
    StepConfig,
)
from memlab.errors import ConfigError
from memlab.result import StepResult
from memlab.workload import Workload

Settings = Mapping[str, Any]

PRECISIONS = tuple(Precision)
OPTIMIZERS = tuple(Optimizer)
IMPLEMENTATIONS = tuple(OptimizerImplementation)
CHECKPOINTING = tuple(Checkpointing)
BUDGET_ENGINES = tuple(BudgetEngine)
BUDGET_SOLVERS = tuple(BudgetSolver)
BUDGET_ESTIMATORS = tuple(BudgetEstimator)
FIELDS = (
    "memory_budget", "batch_size", "accumulation_steps", "precision", "checkpointing",
    "checkpoint_policy", "budget_engine", "budget_solver", "budget_estimator", "optimizer",
    "optimizer_implementation", "optimizer_in_backward", "compile", "channels_last",
    "init_on_meta", "model_cache",
    "loss_chunks", "inplace", "offload_activations", "offload_fraction", "offload_parameters",
    "offload_optimizer", "expandable_segments",
)  # fmt: skip
HEADER_FIELDS = ("workload", "device", "memory_limit", "check_gradients")
LOSS_CHUNKS = (1, 2, 4, 8, 16, 32, 64)
OFFLOAD_FRACTIONS = (1.0, 0.75, 0.5, 0.25)
OFFERED: dict[str, tuple[Any, ...]] = {
    "checkpoint_policy": PRESET_POLICIES,
    "loss_chunks": LOSS_CHUNKS,
    "offload_fraction": OFFLOAD_FRACTIONS,
}


def to_config(settings: Settings) -> StepConfig:
    """Return the config of these settings; choices of what is off do not count.

    They are the policy without checkpointing, solver and estimator with the eager engine, and the
    share of the activations that is offloaded where none are.

    Raises:
        ConfigError: the settings cannot be; the message is the sentence to show.
    """
    values = dict(settings)
    if values["checkpointing"] == Checkpointing.NONE:
        del values["checkpoint_policy"]
    if values["budget_engine"] == BudgetEngine.EAGER:
        del values["budget_solver"], values["budget_estimator"]
    if not values["offload_activations"]:
        del values["offload_fraction"]
    return StepConfig(**values)


def from_config(config: StepConfig) -> dict[str, Any]:
    """Return the settings that show this config.

    Raises:
        ConfigError: the panel has no control for a value of it.
    """
    for field, offered in OFFERED.items():
        if (value := getattr(config, field)) not in offered:
            names = ", ".join(repr(str(name)) for name in offered)
            raise ConfigError(
                f"{field}={str(value)!r} has no control in the panel; allowed is one of {names}"
            )
    if config.checkpoint_modules != "auto":
        raise ConfigError(
            f"checkpoint_modules={config.checkpoint_modules!r} has no control in the panel; "
            "allowed is 'auto', or memlab.measure for others"
        )
    if config.compile_mode is not config.compile_mode.DEFAULT:
        raise ConfigError(
            f"compile_mode={str(config.compile_mode)!r} has no control in the panel; allowed is "
            "'default', or memlab.measure for others"
        )
    return {field: getattr(config, field) for field in FIELDS}


def check_names(fields: Iterable[str]) -> None:
    """Check that every field has a control.

    Raises:
        ConfigError: one has none; the message says which there are.
    """
    known = (*FIELDS, *HEADER_FIELDS)
    for name in fields:
        if name not in known:
            raise ConfigError(f"the panel has no control {name!r}; allowed is one of {known}")


def problems(settings: Settings) -> dict[str, str]:
    """Return a sentence for each field that cannot be, empty if the settings are a config."""
    found = {}
    for field, value in settings.items():
        alone = {field: value}
        if field == "accumulation_steps" and isinstance(value, int):
            alone["batch_size"] = max(value, 1)
        if field == "checkpoint_policy":
            alone["checkpointing"] = Checkpointing.BLOCKS
        if field in ("budget_solver", "budget_estimator"):
            alone["budget_engine"] = BudgetEngine.COMPILE
        try:
            StepConfig(**alone)
        except ConfigError as error:
            found[field] = str(error)
    if not found:
        try:
            to_config(settings)
        except ConfigError as error:
            found["accumulation_steps"] = str(error)
    return found


def parse_number(text: str, kind: type[int] | type[float]) -> Any:
    """Return the number that was typed, or the text itself, which `StepConfig` refuses by name."""
    try:
        return kind(text.strip())
    except ValueError:
        return text.strip()


def largest_accumulation(batch_size: int) -> int:
    """Return the largest power of two that is no more than the batch size."""
    return 1 << (batch_size.bit_length() - 1)


def describe(result: StepResult) -> str:
    """Return a run's settings in words: the four sliders, then what is not as by default."""
    config = result.config
    parts = [
        f"budget {config.memory_budget:g}",
        f"batch {config.batch_size}",
        f"accumulation {config.accumulation_steps}",
        result.number_format,
        *others(config),
    ]
    return ", ".join(parts)


def others(config: StepConfig) -> list[str]:
    """Return in words what differs from the defaults beside the four sliders."""
    default, said = StepConfig(), []
    if config.checkpointing is not default.checkpointing:
        said.append(f"checkpointed {config.checkpointing}")
    if config.checkpoint_policy != default.checkpoint_policy:
        said.append(str(config.checkpoint_policy))
    if config.memory_budget < 1.0 and config.budget_engine is not default.budget_engine:
        said.append(f"budget by torch.{config.budget_engine}")
        chosen = (config.budget_solver, config.budget_estimator)
        said += [
            str(c) for c in chosen if c not in (default.budget_solver, default.budget_estimator)
        ]
    if config.optimizer is not default.optimizer:
        said.append(str(config.optimizer))
    if config.optimizer_implementation is not default.optimizer_implementation:
        said.append(f"{config.optimizer_implementation} optimizer")
    if config.optimizer_in_backward:
        said.append("optimizer in backward")
    if config.compile:
        said.append("compiled")
    if config.channels_last:
        said.append("channels last")
    return said + saving_texts.others(config)


def source(
    workload: Workload,
    config: StepConfig,
    device: str,
    memory_limit: str,
    *,
    ask: str = "measure",
    check_gradients: bool = False,
    namespace: Mapping[str, Any] | None = None,
) -> str:
    """Return Python source that measures this config, predicts it or plays it back.

    Args:
        workload: of the zoo, or a person's own.
        config: how it is trained.
        device: where.
        memory_limit: as it was typed; "" for none.
        ask: the function that is asked: "measure", "predict" or "recorded".
        check_gradients: whether the code also compares the gradients.
        namespace: the names of the notebook, in which a person's own workload is looked up.
    """
    shown = [f"batch_size={config.batch_size}"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "batch_size" and value != field.default:
            shown.append(f"{field.name}={_expression(value, namespace or {})}")
    limit = ""
    if memory_limit and ask != "recorded":
        limit = f", memory_limit={literal(memory_limit)}"
    name, line = workload_source(workload, namespace or {})
    lines = [
        "import memlab",
        "",
        line,
        f"config = memlab.StepConfig({', '.join(shown)})",
        f"result = memlab.{ask}({name}, config, device={literal(device)}{limit})",
        "print(result)",
    ]
    if check_gradients and ask == "measure":
        verified = f"memlab.verify({name}, config, device={literal(device)})"
        lines += [f"report = {verified}", "print(report)"]
    return "\n".join(lines) + "\n"


def workload_source(workload: Workload, namespace: Mapping[str, Any]) -> tuple[str, str]:
    """Return the variable that holds the workload, and the line that makes it or says so."""
    if (options := zoo_options(workload)) is not None:
        return "workload", f"workload = {zoo_source(workload.name, options)}"
    own = _variable(workload, namespace)
    if own:
        return own, f"# {own} is the workload that the panel was given"
    return "workload", "# put the workload that the panel was given here, as `workload`"


def zoo_source(name: str, options: Mapping[str, Any]) -> str:
    """Return the call that makes a workload of the zoo."""
    given = "".join(f", {option}={literal(value)}" for option, value in options.items())
    return f"memlab.workloads.get({literal(name)}{given})"


def _expression(value: Any, namespace: Mapping[str, Any]) -> str:
    """Return the value of a setting as Python: a literal, or the variable that holds a function."""
    if not callable(value):
        return literal(value)
    # a function has no literal; a name that does not exist says where to put one
    return _variable(value, namespace) or "policy_function"


def _variable(value: Any, namespace: Mapping[str, Any]) -> str | None:
    """Return the name of the notebook's variable that holds this value, if it has one."""
    for name, held in namespace.items():
        is_name = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
        if held is value and is_name:
            return name
    return None
