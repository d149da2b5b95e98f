"""`StepConfig`: how a workload is trained. Every slider of the panel is one field here.

A flat frozen dataclass: vary it with `dataclasses.replace`. A field holds what was asked for;
whether this device or this version can do it is found by `build_step`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from memlab.arguments.checks import Rule, count, of_type, text
from memlab.arguments.quoting import is_a, shown
from memlab.errors import ConfigError

FP32_FORMATS = ("float32",)


class Precision(StrEnum):
    """Number formats of the step.

    as-built casts nothing: parameters, buffers and batches keep the formats that the workload gave
    them. fp32 casts them to fp32. The mixed ones do so too and autocast the forward; tf32
    multiplies fp32 matrices on tensor cores; bf16 and fp16 are the format of weights, gradients and
    optimizer state, whatever was built;
    bf16-master keeps fp32 weights beside bf16 ones, in the optimizer state; bf16-stochastic rounds
    updated bf16 weights up or down at random; fp8-mixed is bf16-mixed with the products of linear
    layers in fp8.

    Whatever casts leaves alone integers, complex numbers and quantised weights (8 bits or fewer, or
    of a class of parameters of their own), and a result's `notes` say what was cast.
    """

    AS_BUILT = "as-built"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16_MIXED = "bf16-mixed"
    FP16_MIXED = "fp16-mixed"
    BF16 = "bf16"
    FP16 = "fp16"
    BF16_MASTER = "bf16-master"
    BF16_STOCHASTIC = "bf16-stochastic"
    FP8_MIXED = "fp8-mixed"

    def in_words(self, formats: Sequence[str] = ()) -> str:
        """Return what a person calls this precision.

        Args:
            formats: of the model's parameters, as torch names them, those of most bytes first;
                empty where they are not known.

        >>> Precision.AS_BUILT.in_words(("float32",)), Precision.BF16.in_words()
        ('fp32', 'bf16')
        >>> Precision.AS_BUILT.in_words(("bfloat16", "float32"))
        'as built: bfloat16 and float32'
        """
        if self is not Precision.AS_BUILT:
            return str(self)
        if tuple(formats) == FP32_FORMATS:
            return "fp32"
        if not formats:
            return "as built"
        *others, last = formats
        return f"as built: {', '.join(others)}{' and ' * bool(others)}{last}"


class BudgetEngine(StrEnum):
    """Who plans a memory budget below 1: memlab itself, or torch.compile's partitioner."""

    EAGER = "eager"
    COMPILE = "compile"


class BudgetSolver(StrEnum):
    """How torch.compile picks what to save: `activation_memory_budget_solver` of PyTorch."""

    DP = "dp"
    GREEDY = "greedy"
    HIRSCHBERG = "dp_knapsack_sliding_hirschberg"
    ILP = "ilp"


class BudgetEstimator(StrEnum):
    """What torch.compile takes for the time of an operator that it might recompute."""

    FLOPS = "flops"
    PROFILE = "profile"


class CompileMode(StrEnum):
    """What Inductor spends on a faster step, as `torch.compile(mode=...)` names it."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


class Optimizer(StrEnum):
    """Optimizers by their usual names."""

    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    ADAFACTOR = "adafactor"
    ADAMW_8BIT = "adamw-8bit"


class OptimizerImplementation(StrEnum):
    """Which of torch.optim's implementations runs; the default is foreach on CUDA, else none."""

    DEFAULT = "default"
    FOREACH = "foreach"
    FUSED = "fused"
    SINGLE_TENSOR = "single-tensor"


class Checkpointing(StrEnum):
    """Which activations are dropped in forward and recomputed in backward."""

    NONE = "none"
    BLOCKS = "blocks"


PRESET_POLICIES = ("recompute-all", "keep-matmuls", "keep-attention", "recompute-pointwise")
Policy = str | Callable[..., Any]
MOST_SAMPLES = 10**9  # of an update: more than any data set has, and few enough to count


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """How one optimizer update is run.

    Attributes:
        batch_size: samples per optimizer update, the effective batch.
        accumulation_steps: micro-batches that it is split into, as `torch.tensor_split` splits.
        precision: see `Precision`.
        memory_budget: 0..1, the share of the activations that the plain step keeps for backward;
            1.0 is the plain step itself, whatever the engine.
        budget_engine: see `BudgetEngine`.
        budget_solver: see `BudgetSolver`; with the compile engine.
        budget_estimator: see `BudgetEstimator`; with the compile engine.
        compile: run the model through `torch.compile`.
        compile_mode: see `CompileMode`; with compile, or the compile engine.
        channels_last: lay the weights of convolutions, and so their results, out channels last.
        init_on_meta: build the model without memory, then make it where it is trained.
        optimizer: see `Optimizer`.
        optimizer_implementation: see `OptimizerImplementation`.
        optimizer_in_backward: update each parameter as soon as backward has its gradient, and free
            that gradient.
        max_grad_norm: the norm of all gradients together that an update may have: larger ones are
            scaled down to it; None leaves them as they are.
        checkpointing: see `Checkpointing`.
        checkpoint_modules: what a block is: "auto" (the repeated blocks of the model), "every 3"
            (the first of each three), the name of a class, or a pattern of paths ("layers.*").
        checkpoint_policy: what checkpointed modules keep for backward all the same: one of
            `PRESET_POLICIES`, operators by name ("aten.mm, aten.addmm"), or a policy function as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it.
        model_cache: leave it to the model whether it fills a cache of keys and values in training,
            as transformers' decoders do by default; False sets `use_cache=False` in its configs,
            which a memory budget and checkpointing need.
        loss_chunks: pieces in which the cross entropy of the model's last linear layer is taken, so
            that its logits are never whole; 1 is all at once.
        inplace: activations write over their input where nothing else reads it.
        offload_activations: what forward saves for backward waits in the host's memory.
        offload_fraction: of its bytes that do, spread over the forward; with offload_activations.
        offload_parameters: weights wait there while other modules run.
        offload_optimizer: the optimizer's state stays there between updates.
        expandable_segments: CUDA's caching allocator grows its segments by pages.

    Raises:
        ConfigError: a value is not allowed; the message names field, value and remedy.

    >>> StepConfig(batch_size=6, accumulation_steps=4).micro_batch_sizes
    (2, 2, 1, 1)
    """

    batch_size: int = 8
    accumulation_steps: int = 1
    precision: Precision = Precision.AS_BUILT
    memory_budget: float = 1.0
    budget_engine: BudgetEngine = BudgetEngine.EAGER
    budget_solver: BudgetSolver = BudgetSolver.DP
    budget_estimator: BudgetEstimator = BudgetEstimator.FLOPS
    compile: bool = False
    compile_mode: CompileMode = CompileMode.DEFAULT
    channels_last: bool = False
    init_on_meta: bool = False
    optimizer: Optimizer = Optimizer.ADAMW
    optimizer_implementation: OptimizerImplementation = OptimizerImplementation.DEFAULT
    optimizer_in_backward: bool = False
    max_grad_norm: float | None = None
    checkpointing: Checkpointing = Checkpointing.NONE
    checkpoint_modules: str = "auto"
    checkpoint_policy: Policy = "recompute-all"
    model_cache: bool = True
    loss_chunks: int = 1
    inplace: bool = False
    offload_activations: bool = False
    offload_fraction: float = 1.0
    offload_parameters: bool = False
    offload_optimizer: bool = False
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if parse := _PARSERS.get(field.name) or (_count if field.type is int else None):
                value = parse(field.name, value)
            else:
                value = of_type(field.name, value, field.type)
            object.__setattr__(self, field.name, value)
        if self.accumulation_steps > self.batch_size:
            raise ConfigError(
                f"accumulation_steps={self.accumulation_steps} is more than "
                f"batch_size={self.batch_size}; allowed is 1 to batch_size, since every "
                "micro-batch needs a sample: raise batch_size or lower accumulation_steps"
            )
        for name in ("checkpoint_modules", "checkpoint_policy"):
            value = getattr(self, name)
            if self.checkpointing is Checkpointing.NONE and value != _default(name):
                raise ConfigError(
                    f"{name}={value!r} does nothing with checkpointing='none'; add "
                    "checkpointing='blocks', or leave it out"
                )
        if not self.offload_activations and self.offload_fraction != 1.0:
            raise ConfigError(
                f"offload_fraction={self.offload_fraction!r} does nothing with "
                "offload_activations=False; add offload_activations=True, or leave it out"
            )
        is_eager = self.budget_engine is BudgetEngine.EAGER
        if is_eager and not self.compile and self.compile_mode is not CompileMode.DEFAULT:
            raise ConfigError(
                f"compile_mode={str(self.compile_mode)!r} does nothing with compile=False; add "
                "compile=True, or leave it out"
            )
        for name in ("budget_solver", "budget_estimator"):
            value = getattr(self, name)
            if is_eager and value != _default(name):
                raise ConfigError(
                    f"{name}={str(value)!r} does nothing with budget_engine='eager', which plans "
                    "by itself; add budget_engine='compile', or leave it out"
                )

    @property
    def is_planned(self) -> bool:
        """Whether memlab plans what to recompute: a budget below 1, with the eager engine."""
        return self.memory_budget < 1.0 and self.budget_engine is BudgetEngine.EAGER

    def without_recompute(self) -> "StepConfig":
        """Return the config that keeps every activation, and is else the same."""
        default = StepConfig()
        return replace(
            self,
            memory_budget=default.memory_budget,
            checkpointing=default.checkpointing,
            checkpoint_modules=default.checkpoint_modules,
            checkpoint_policy=default.checkpoint_policy,
        )

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples in each micro-batch; they differ by at most one and sum to `batch_size`."""
        size, extra = divmod(self.batch_size, self.accumulation_steps)
        return tuple(size + (i < extra) for i in range(self.accumulation_steps))

    @property
    def micro_batch_size(self) -> int:
        """Samples in the largest micro-batch."""
        return self.micro_batch_sizes[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types; `StepConfig(**d)` gives the config back.

        A policy function is told by its name alone.
        """
        return {name: _plain(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        """Return the fields that differ from the defaults, after the batch size."""
        changed = [
            f"{field.name}={_plain(getattr(self, field.name))}"
            for field in fields(self)
            if field.name != "batch_size" and getattr(self, field.name) != field.default
        ]
        return ", ".join([f"batch_size={self.batch_size}", *changed])


def _default(name: str) -> Any:
    return next(field.default for field in fields(StepConfig) if field.name == name)


def _plain(value: Any) -> Any:
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__name__)
        return f"{getattr(value, '__module__', '')}.{name}"
    return str(value) if isinstance(value, StrEnum) else value


def _count(name: str, value: Any) -> int:
    return count(1, MOST_SAMPLES)(name, value)


def _budget(name: str, value: Any) -> float:
    return _fraction(name, value, "it is the share of the activations to keep, 1.0 keeps them all")


def _offload_fraction(name: str, value: Any) -> float:
    return _fraction(name, value, "it is the share of the activations that leave the device")


def _fraction(name: str, value: Any, means: str) -> float:
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except Exception:  # no number, or of a person's own class, which may raise anything
        raise ConfigError(f"{name}={shown(value)} is no number; allowed is 0.0 to 1.0") from None
    if not 0.0 <= number <= 1.0:
        raise ConfigError(
            f"{name}={shown(value)} is outside 0.0 to 1.0: {means}; for half of them say 0.5"
        )
    return number


def _norm(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except Exception:  # no number, or of a person's own class, which may raise anything
        number = math.nan
    if not 0.0 < number < math.inf:
        raise ConfigError(
            f"{name}={shown(value)}; allowed is a number above 0, such as 1.0, or None not to clip"
        )
    return number


def _modules(name: str, value: Any) -> str:
    found = text(name, value).strip()
    if not found:
        raise ConfigError(
            f"{name}={shown(value)}; allowed is 'auto', 'every 2', the name of a class, or a "
            "pattern of module paths such as 'layers.*'"
        )
    return found


def _policy(name: str, value: Any) -> Policy:
    if is_a(value, str) and str.strip(value):
        return text(name, value).strip()
    if not callable(value):
        raise ConfigError(
            f"{name}={shown(value)}; allowed is one of {', '.join(map(repr, PRESET_POLICIES))}, "
            "operators by name ('aten.mm, aten.addmm'), or a policy function"
        )
    found: Policy = value
    return found


# what the type of a field does not say; the others are read by their types
_PARSERS: dict[str, Rule] = {
    "memory_budget": _budget,
    "checkpoint_modules": _modules,
    "checkpoint_policy": _policy,
    "offload_fraction": _offload_fraction,
    "max_grad_norm": _norm,
}
