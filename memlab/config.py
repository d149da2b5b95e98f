"""`StepConfig`: how a workload is trained. Every slider of the panel is one field here.

It is a flat frozen dataclass; use `dataclasses.replace` to vary it. Only the fields themselves are
checked here. `build_step` checks whether the device and this version of torch support them.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from memlab._util.checks import (
    MakeOptimizer,
    Policy,
    Rule,
    count,
    fraction,
    modules,
    norm,
    optimizer_among,
    optional_count,
    policy_among,
    rule_for,
)
from memlab._util.functions import named
from memlab.errors import ConfigError

# `Attention`: the implementations of attention that models of transformers have.


class Attention(StrEnum):
    """What computes the attention of a model of transformers.

    - as-built changes nothing: what the model's config says, `sdpa` where nobody has chosen.
    - eager multiplies by Python's operators, and keeps the whole matrix of attention weights.
    - sdpa is `torch.nn.functional.scaled_dot_product_attention`, which chooses a kernel by itself.
    - flash_attention_2 is the kernel of the package flash_attn, for CUDA cards and 16-bit formats.
    - flex_attention is PyTorch's kernel with masks as code, compiled for CUDA cards.
    """

    AS_BUILT = "as-built"
    EAGER = "eager"
    SDPA = "sdpa"
    FLASH_ATTENTION_2 = "flash_attention_2"
    FLEX_ATTENTION = "flex_attention"


# What may compute the loss of a language model: the values of `loss_kernel`.


class LossKernel(StrEnum):
    """What computes the cross entropy of the last linear layer, without all logits at once.

    - as-built is the loss as the workload computes it.
    - liger is the fused linear cross entropy of the package liger_kernel.
    - chunked-nll is the loss of trl's SFTTrainer, the default of trl 1.
    - cut is the cut cross-entropy of the package cut_cross_entropy.
    """

    AS_BUILT = "as-built"
    LIGER = "liger"
    CHUNKED_NLL = "chunked-nll"
    CUT = "cut"


# `Sharding`: the ways in which several processes train one model, and the sizes each allows.
#
# A rank is one process with one device. Ranks that compute different samples are data
# parallel: each gets an equal part of the batch, and the gradients are averaged over them.
# How a strategy is carried out is in `techniques/sharding/`.

MOST_RANKS = 4096


class Sharding(StrEnum):
    """What each rank holds of a model that several ranks train.

    - none: one process trains by itself.
    - ddp: every rank holds everything, and gradients are averaged (`DistributedDataParallel`).
    - zero1: as ddp, and each rank keeps the optimizer state of its share of the parameters
      (`ZeroRedundancyOptimizer`).
    - zero2: each rank keeps its part of parameters, gradients and optimizer state, and gathers
      whole parameters from the first forward to the end of backward (`fully_shard` with
      `reshard_after_forward=False`).
    - zero3: as zero2, and whole parameters are freed after forward and gathered again for backward.
    - hybrid: as zero3 within groups of `shard_group_size` ranks, each with a copy of the model.
    - tensor: each rank computes a part of each layer, for all samples (DTensor).
    - deepspeed-zero1, -zero2, -zero3: DeepSpeed's own engine.
    """

    NONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    HYBRID = "hybrid"
    TENSOR = "tensor"
    DEEPSPEED_ZERO1 = "deepspeed-zero1"
    DEEPSPEED_ZERO2 = "deepspeed-zero2"
    DEEPSPEED_ZERO3 = "deepspeed-zero3"


FULLY_SHARDED = (Sharding.ZERO2, Sharding.ZERO3, Sharding.HYBRID)
"""By `fully_shard`: each rank keeps its part of parameters, gradients and optimizer state."""
OF_DEEPSPEED = (Sharding.DEEPSPEED_ZERO1, Sharding.DEEPSPEED_ZERO2, Sharding.DEEPSPEED_ZERO3)
WITH_TENSOR_PARALLEL = (Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)


def check_ranks(config: Any) -> None:
    """Raise ConfigError if the ranks, groups and samples of a `StepConfig` do not go together."""
    ranks, sharding = config.world_size, config.sharding
    if sharding is Sharding.NONE:
        _check_alone(config)
        return

    _check_groups(config)
    parts, steps = config.data_parallel_size, config.accumulation_steps
    if config.batch_size % (parts * steps):
        below = config.batch_size // (parts * steps) * parts * steps
        above = below + parts * steps
        split = f"{parts} data parallel ranks"
        split += f" in {steps} micro-batches each" if steps > 1 else ""
        raise ConfigError(
            f"batch_size={config.batch_size} does not divide into equal parts for {split} "
            f"(sharding={str(sharding)!r}, world_size={ranks}); use batch_size="
            f"{f'{below} or {above}' if below else above}, or another world_size"
        )


def _check_alone(config: Any) -> None:
    """Raise ConfigError for settings of ranks that do nothing without sharding."""
    for name, default in (
        ("world_size", 1),
        ("tensor_parallel_size", 1),
        ("shard_group_size", None),
        ("sync_each_micro_batch", True),
    ):
        value = getattr(config, name)
        if value != default:
            raise ConfigError(
                f"{name}={value!r} does nothing with sharding='none'; add sharding='zero3' or "
                "another of "
                f"{', '.join(repr(str(s)) for s in Sharding if s is not Sharding.NONE)}, or leave "
                "it out"
            )


def _check_groups(config: Any) -> None:
    """Raise ConfigError if the ranks do not divide into equal groups."""
    ranks, sharding, tensor = config.world_size, config.sharding, config.tensor_parallel_size
    if tensor > 1 and sharding is Sharding.TENSOR:
        raise ConfigError(
            f"tensor_parallel_size={tensor} with sharding='tensor', which divides each layer over "
            "all ranks by itself; leave tensor_parallel_size out"
        )
    if tensor > 1 and sharding not in WITH_TENSOR_PARALLEL:
        *names, last = (repr(str(each)) for each in WITH_TENSOR_PARALLEL)
        raise ConfigError(
            f"tensor_parallel_size={tensor} with sharding={str(sharding)!r}; use sharding="
            f"{', '.join(names)} or {last}, or leave tensor_parallel_size out"
        )
    if ranks % tensor:
        raise ConfigError(
            f"tensor_parallel_size={tensor} does not divide world_size={ranks}; allowed is "
            f"{_divisors(ranks)}"
        )

    group = config.shard_group_size
    if sharding is not Sharding.HYBRID and group is not None:
        raise ConfigError(
            f"shard_group_size={group} does nothing with sharding={str(sharding)!r}; use "
            "sharding='hybrid', or leave it out"
        )
    if sharding is Sharding.HYBRID and (group is None or ranks % group):
        raise ConfigError(
            f"shard_group_size={group} with sharding='hybrid' and world_size={ranks}; set how many "
            f"ranks hold one copy of the model, usually those of one machine: {_divisors(ranks)}"
        )


def _divisors(number: int) -> str:
    found = [str(n) for n in range(1, number + 1) if number % n == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


FP32_FORMATS = ("float32",)


class Precision(StrEnum):
    """Number formats of the step.

    - as-built casts nothing: parameters, buffers and batches keep the formats of the workload.
    - fp32 casts them to fp32.
    - bf16-mixed and fp16-mixed cast them to fp32 and autocast the forward.
    - tf32 is fp32 whose matrix products run on tensor cores.
    - bf16 and fp16 keep weights, gradients and optimizer state in that format.
    - bf16-master keeps fp32 weights beside the bf16 ones, in the optimizer state.
    - bf16-stochastic rounds updated bf16 weights up or down at random.
    - fp8-mixed is bf16-mixed with the matrix products of linear layers in fp8.

    Integers, complex numbers and quantised weights (8 bits or fewer, or a parameter class of their
    own) are never cast. The `notes` of a result say what was cast.
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
        """Return the name of this precision for people.

        Args:
            formats: the formats of the model's parameters, as torch names them, ordered by
                bytes; empty if they are not known.

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
    """What plans a memory budget below 1: memlab itself, or torch.compile's partitioner."""

    EAGER = "eager"
    COMPILE = "compile"


class BudgetSolver(StrEnum):
    """How torch.compile chooses what to save: PyTorch's `activation_memory_budget_solver`."""

    DP = "dp"
    GREEDY = "greedy"
    HIRSCHBERG = "dp_knapsack_sliding_hirschberg"
    ILP = "ilp"


class BudgetEstimator(StrEnum):
    """How torch.compile estimates the time of an operator that it might recompute."""

    FLOPS = "flops"
    PROFILE = "profile"


class CompileMode(StrEnum):
    """How much effort Inductor spends on a faster step: the `mode` of `torch.compile`."""

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
    MUON = "muon"
    LION = "lion"


class OptimizerImplementation(StrEnum):
    """Which implementation of torch.optim runs. The default is foreach on CUDA only."""

    DEFAULT = "default"
    FOREACH = "foreach"
    FUSED = "fused"
    SINGLE_TENSOR = "single-tensor"


class Checkpointing(StrEnum):
    """Which activations are dropped in forward and recomputed in backward."""

    NONE = "none"
    BLOCKS = "blocks"


PRESET_POLICIES = ("recompute-all", "keep-matmuls", "keep-attention", "recompute-pointwise")
MOST_SAMPLES = 10**9  # in one update: more than any data set has, and small enough to count
COUNT = count(1, MOST_SAMPLES)
RANK_FIELDS = dict.fromkeys(("world_size", "tensor_parallel_size"), count(1, MOST_RANKS))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """How one optimizer update is run.

    Attributes:
        batch_size: samples per optimizer update, the effective batch.
        accumulation_steps: number of micro-batches, split as `torch.tensor_split` splits.
        precision: see `Precision`.
        memory_budget: 0..1, how much of the activations of the plain step is kept for backward;
            the rest is recomputed. 1.0 is the plain step itself, with either engine.
        budget_engine: see `BudgetEngine`.
        budget_solver: see `BudgetSolver`; with the compile engine.
        budget_estimator: see `BudgetEstimator`; with the compile engine.
        compile: run the model through `torch.compile`.
        compile_mode: see `CompileMode`; with compile, or the compile engine.
        channels_last: store the weights of convolutions, and thereby their outputs, channels last.
        init_on_meta: build the model without memory, then create its weights on the device.
        optimizer: see `Optimizer`; or a function of the list of trainable parameters that returns
            a `torch.optim.Optimizer`, such as a class, or its import path ("torch.optim.NAdam").
        optimizer_implementation: see `OptimizerImplementation`.
        optimizer_in_backward: update each parameter as soon as backward has its gradient, and free
            that gradient.
        max_grad_norm: gradients whose total norm is larger are scaled down to it; None does not
            clip.
        checkpointing: see `Checkpointing`.
        checkpoint_modules: which modules are checkpointed: "auto" (the repeated blocks of the
            model), "every 3" (every third block), the name of a class, or a pattern of paths
            ("layers.*").
        checkpoint_policy: what checkpointed modules still save for backward: one of
            `PRESET_POLICIES`, operators by name ("aten.mm, aten.addmm"), or a policy function as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it.
        model_cache: True lets the model fill its cache of keys and values during training, as
            transformers' decoders do by default. False sets `use_cache=False` in its configs,
            which a memory budget and checkpointing need.
        attention: see `Attention`; of models of transformers.
        loss_chunks: number of chunks in which the cross entropy of the last linear layer is
            computed, so that all logits are never held at once; 1 computes it at once.
        loss_kernel: see `LossKernel`; a package that computes the same without all logits.
        inplace: activation functions write over their input if nothing else reads it.
        offload_activations: activations saved for backward are kept in host memory.
        offload_fraction: the share of their bytes that is offloaded, spread over the forward;
            with offload_activations.
        offload_parameters: weights are kept in host memory while other modules run.
        offload_optimizer: the optimizer's state is kept in host memory between updates.
        expandable_segments: CUDA's caching allocator grows its segments instead of adding new ones.
        sharding: how several processes, the ranks, train one model, see `Sharding`. `batch_size`
            stays that of all ranks together; each takes an equal part, in `accumulation_steps`
            micro-batches.
        world_size: number of ranks, one for each device.
        tensor_parallel_size: how many ranks hold one copy of the batch and a part of each weight;
            1 is no tensor parallelism. With sharding="tensor" these are all ranks.
        shard_group_size: how many ranks share the parts of one copy of the model; with
            sharding="hybrid".
        sync_each_micro_batch: the ranks sum their gradients after every micro-batch. With False
            (`no_sync`) they do so once an update, and hold whole gradients until then.

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
    optimizer: Optimizer | MakeOptimizer = Optimizer.ADAMW
    optimizer_implementation: OptimizerImplementation = OptimizerImplementation.DEFAULT
    optimizer_in_backward: bool = False
    max_grad_norm: float | None = None
    checkpointing: Checkpointing = Checkpointing.NONE
    checkpoint_modules: str = "auto"
    checkpoint_policy: Policy = "recompute-all"
    model_cache: bool = True
    attention: Attention = Attention.AS_BUILT
    loss_chunks: int = 1
    loss_kernel: LossKernel = LossKernel.AS_BUILT
    inplace: bool = False
    offload_activations: bool = False
    offload_fraction: float = 1.0
    offload_parameters: bool = False
    offload_optimizer: bool = False
    expandable_segments: bool = False
    sharding: Sharding = Sharding.NONE
    world_size: int = 1
    tensor_parallel_size: int = 1
    shard_group_size: int | None = None
    sync_each_micro_batch: bool = True

    def __post_init__(self) -> None:
        for name, rule in _rules():
            object.__setattr__(self, name, rule(name, getattr(self, name)))

        if self.accumulation_steps > self.batch_size:
            raise ConfigError(
                f"accumulation_steps={self.accumulation_steps} is more than "
                f"batch_size={self.batch_size}; allowed is 1 to batch_size, since every "
                "micro-batch needs a sample: raise batch_size or lower accumulation_steps"
            )

        check_ranks(self)
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
        """Whether memlab plans what to recompute: a budget below 1 with the eager engine."""
        return self.memory_budget < 1.0 and self.budget_engine is BudgetEngine.EAGER

    @property
    def loss_reads_head(self) -> bool:
        """Whether the loss reads the weight of the last linear layer, outside of that layer."""
        return self.loss_chunks > 1 or self.loss_kernel is not LossKernel.AS_BUILT

    @property
    def has_own_optimizer(self) -> bool:
        """Whether a function makes the optimizer, or what an import path names."""
        return not isinstance(self.optimizer, Optimizer)

    def without_recompute(self) -> "StepConfig":
        """Return the same config with recompute off, so that every activation is kept."""
        default = StepConfig()
        return replace(
            self,
            memory_budget=default.memory_budget,
            checkpointing=default.checkpointing,
            checkpoint_modules=default.checkpoint_modules,
            checkpoint_policy=default.checkpoint_policy,
        )

    @property
    def data_parallel_size(self) -> int:
        """Into how many equal parts the ranks divide a batch; 1 without sharding."""
        if self.sharding is Sharding.TENSOR:
            return 1
        return self.world_size // self.tensor_parallel_size

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed's engine carries out the step."""
        return self.sharding in OF_DEEPSPEED

    @property
    def offloads_shards(self) -> bool:
        """Whether FSDP2 keeps parameters, gradients and optimizer state in host memory."""
        return self.offload_parameters and self.sharding in FULLY_SHARDED

    def threads_of_rank(self, threads: int) -> int:
        """Return how many threads of this machine's CPU each rank has for an operator."""
        return max(1, threads // self.world_size)

    @property
    def rank_batch_size(self) -> int:
        """Samples per update that one rank computes; `batch_size` without sharding."""
        return self.batch_size // self.data_parallel_size

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples in each micro-batch of a rank; they differ by at most one.

        Their sum is `rank_batch_size`, which is `batch_size` without sharding.
        """
        size, extra = divmod(self.rank_batch_size, self.accumulation_steps)
        return tuple(size + (i < extra) for i in range(self.accumulation_steps))

    @property
    def micro_batch_size(self) -> int:
        """Samples in the largest micro-batch."""
        return -(-self.rank_batch_size // self.accumulation_steps)

    def divided_further(self) -> "StepConfig | None":
        """Return the config with twice as many micro-batches; None if each has one sample.

        Ranks take micro-batches of equal size: three samples become three micro-batches.
        """
        size, steps = self.micro_batch_size, min(2 * self.accumulation_steps, self.batch_size)
        if self.sharding is not Sharding.NONE:
            factors = (n for n in range(2, math.isqrt(size) + 1) if size % n == 0)
            steps = self.accumulation_steps * next(factors, size)
        return None if size == 1 else replace(self, accumulation_steps=steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types; `StepConfig(**d)` gives the config back.

        Of a function only the name is kept.
        """
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def __str__(self) -> str:
        """Return the batch size and the fields that differ from their defaults."""
        return ", ".join(f"{name}={value}" for name, value in self._changed().items())

    def __repr__(self) -> str:
        """Return the code that makes this config, as far as its values have code."""
        said = ", ".join(f"{name}={value!r}" for name, value in self._changed().items())
        return f"StepConfig({said})"

    def _changed(self) -> dict[str, Any]:
        return {
            field.name: _plain(getattr(self, field.name))
            for field in fields(self)
            if field.name == "batch_size" or getattr(self, field.name) != field.default
        }


def allowed_value(name: str, value: Any) -> Any:
    """Return a value of one field as a config holds it, whatever other fields it needs.

    Raises:
        ConfigError: no config allows this value.
    """
    return dict(_rules())[name](name, value)


@functools.cache
def _rules() -> tuple[tuple[str, Rule], ...]:
    """Return the name of each field and the rule for its value."""
    types: dict[str, Any] = {field.name: field.type for field in fields(StepConfig)}
    by_type = {name: COUNT if kind is int else rule_for(kind) for name, kind in types.items()}
    return tuple((by_type | RANK_FIELDS | _PARSERS).items())


@functools.cache
def _default(name: str) -> Any:
    return next(field.default for field in fields(StepConfig) if field.name == name)


def _plain(value: Any) -> Any:
    if callable(value):
        return named(value)
    return str(value) if isinstance(value, StrEnum) else value


# parsers of the fields whose type alone does not say which values are allowed
_PARSERS: dict[str, Rule] = {
    "memory_budget": fraction("it is the share of the activations to keep; 1.0 keeps them all"),
    "checkpoint_modules": modules,
    "checkpoint_policy": policy_among(PRESET_POLICIES),
    "optimizer": optimizer_among(Optimizer),
    "offload_fraction": fraction("it is the share of the activations that leave the device"),
    "max_grad_norm": norm,
    "shard_group_size": optional_count,
}
