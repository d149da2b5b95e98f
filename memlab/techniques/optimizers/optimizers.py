"""Optimizers by name, with PyTorch's own defaults, and the choice of their implementation.

8-bit states are those of bitsandbytes: blocks of 256 values share a scale, and parameters of fewer
than 4096 values keep fp32 states. Left out: GaLore and other low-rank projections. PyTorch and
torchao have none, and galore-torch had its last release in 2024.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from memlab.config import Optimizer, OptimizerImplementation, Precision, Sharding, StepConfig
from memlab.techniques.offload.offloading import offload_state, update_one_by_one
from memlab.techniques.offload.weight_offloading import OffloadedWeights
from memlab.techniques.optimizers import master_weights, optimizer_in_backward, stochastic_rounding
from memlab.techniques.optimizers.optimizer_in_backward import InBackward
from memlab.techniques.sharding.ranks import is_tensor_parallel, local
from memlab.techniques.sharding.replicated import with_sharded_state
from memlab.techniques.source import UPDATE, ScriptLines, together, whole
from memlab.techniques.technique import Control, Keeps, Refusal, Saving, Setup, Technique, refuse
from memlab.torch_private.operators import has_kernel_for, is_registered
from memlab.torch_private.sent_parts import parts_sent_by
from memlab.torch_private.tensors import indices_of, values_of

LEARNING_RATE, ADAFACTOR_LEARNING_RATE = 1e-3, 1e-2
"""PyTorch's defaults for AdamW and Adafactor. Adafactor's rate is relative to a weight's size."""
MOMENTUM = 0.9
SCHEDULE_STEPS = 1000  # length of the cosine; it changes neither memory nor time of a step
IMPLEMENTATIONS: dict[OptimizerImplementation, dict[str, bool]] = {
    OptimizerImplementation.DEFAULT: {},
    OptimizerImplementation.FOREACH: {"foreach": True},
    OptimizerImplementation.FUSED: {"fused": True},
    OptimizerImplementation.SINGLE_TENSOR: {"foreach": False, "fused": False},
}
NOT_FUSED: tuple[dict[str, Any], ...] = (
    {"optimizer_implementation": OptimizerImplementation.FOREACH},
    {"optimizer_implementation": OptimizerImplementation.SINGLE_TENSOR},
)
EIGHT_BIT_KERNEL = "bitsandbytes::optimizer_update_8bit_blockwise"


def refusals(asked: Setup) -> Iterator[Refusal]:
    """Refuse an 8-bit optimizer whose package is not installed or has no kernel for a CPU."""
    if asked.config.optimizer is not Optimizer.ADAMW_8BIT:
        return

    instead: dict[str, Any] = {"optimizer": Optimizer.ADAFACTOR}
    if find_spec("bitsandbytes") is None:
        yield Refusal(
            why="optimizer='adamw-8bit' needs bitsandbytes, which is not installed",
            remedies=(instead,),
            otherwise="pip install 'memlab[optimizers]'",
        )
        return

    if asked.device.type != "cpu":
        return

    import bitsandbytes  # late: it sets an environment variable, for which workers are replaced

    if not (is_registered(EIGHT_BIT_KERNEL) and has_kernel_for(EIGHT_BIT_KERNEL, "CPU")):
        yield Refusal(
            why="optimizer='adamw-8bit' needs a CUDA card, because bitsandbytes "
            f"{bitsandbytes.__version__} has no kernel for a CPU",
            remedies=(instead,),
            otherwise="install bitsandbytes 0.50 or newer",
        )


def implementation_refusals(asked: Setup) -> Iterator[Refusal]:
    """Refuse an implementation that does not exist for this optimizer or number format."""
    config, chosen = asked.config, asked.config.optimizer_implementation
    said = f"optimizer_implementation={str(chosen)!r} with optimizer={str(config.optimizer)!r}"
    if config.optimizer is Optimizer.ADAMW_8BIT and IMPLEMENTATIONS[chosen]:
        yield Refusal(
            why=f"{said}: bitsandbytes has one implementation, which is fused",
            remedies=({"optimizer_implementation": OptimizerImplementation.DEFAULT},),
        )

    if config.optimizer is Optimizer.ADAFACTOR and chosen is OptimizerImplementation.FUSED:
        yield Refusal(why=f"{said}: torch.optim.Adafactor has no fused kernel", remedies=NOT_FUSED)
    if config.precision in (Precision.BF16, Precision.FP16):
        what = f"precision={str(config.precision)!r}"
        yield from _of_fused_sgd(config, asked.device, what)


def _of_fused_sgd(config: StepConfig, device: torch.device, what: str) -> Iterator[Refusal]:
    """Refuse fused SGD for weights of 16 bits on a CPU."""
    is_fused = config.optimizer_implementation is OptimizerImplementation.FUSED
    is_sgd = config.optimizer in (Optimizer.SGD, Optimizer.SGD_MOMENTUM)
    if is_fused and is_sgd and device.type == "cpu":
        yield Refusal(
            why="optimizer_implementation='fused' with optimizer="
            f"{str(config.optimizer)!r} and {what} on a CPU: torch's fused kernel does not update "
            "most of the weights (torch 2.13)",
            remedies=NOT_FUSED,
        )


def make(
    model: torch.nn.Module,
    config: StepConfig,
    weights: OffloadedWeights | None = None,
    group: Any = None,
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """Return the optimizer over the trainable parameters, and its schedule if it has one.

    Args:
        model: on its device.
        config: says which optimizer.
        weights: the offloaded weights of the model, if there are any.
        group: of the ranks that share the state with zero1; None for all ranks.

    Raises:
        UnsupportedError: the optimizer does not update weights of this number format correctly.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    half = next((p for p in parameters if p.dtype in (torch.bfloat16, torch.float16)), None)
    if half is not None and config.precision is Precision.AS_BUILT:
        name = str(half.dtype).removeprefix("torch.")
        refuse(_of_fused_sgd(config, half.device, f"weights of {name}"))

    make_one = _offloaded(_maker(config), config, weights)
    if config.optimizer_in_backward:
        optimizer: torch.optim.Optimizer = InBackward(parameters, make_one, learning_rate(config))
    elif config.sharding is Sharding.ZERO1:
        optimizer = with_sharded_state(parameters, make_one, learning_rate(config), group)
        if is_tensor_parallel(config):
            parts_sent_by(optimizer)
    else:
        optimizer = make_one(parameters)

    if config.optimizer is not Optimizer.SGD_MOMENTUM:
        return optimizer, None

    return optimizer, CosineAnnealingLR(optimizer, T_max=SCHEDULE_STEPS)


def source(asked: Setup) -> ScriptLines:
    """Return the lines of a script that make the optimizer and its schedule."""
    config = asked.config
    name, options = _name_and_options(config)
    is_eight_bit = config.optimizer is Optimizer.ADAMW_8BIT
    module = "bitsandbytes.optim" if is_eight_bit else "torch.optim"
    made = f"{module}.{name}({{}}, {', '.join(f'{k}={v!r}' for k, v in options.items())})"
    parts = [ScriptLines(imports=("import bitsandbytes",) if is_eight_bit else ())]

    if config.precision is Precision.BF16_MASTER and not config.is_deepspeed:
        made = f"given_master_weights({made})"
        parts.append(whole(master_weights))
    if config.precision is Precision.BF16_STOCHASTIC:
        made = f"given_stochastic_rounding({made})"
        parts.append(whole(stochastic_rounding))
    if _offloads_state(config):
        made = f"offload_state({made})"
    if config.offload_parameters and not config.offloads_shards:
        made = f"update_one_by_one({made}, weights.on_the_device)"
    if config.optimizer_in_backward:
        parts.append(optimizer_in_backward.source(made.format("own"), learning_rate(config)))
    elif config.sharding is Sharding.ZERO1:
        parts.append(ScriptLines(optimizer=_of_shares(made, config)))
    else:
        parts.append(ScriptLines(optimizer=(f"optimizer = {made.format('parameters')}",)))

    if config.optimizer is Optimizer.SGD_MOMENTUM:
        schedule = (
            "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR("
            f"optimizer, T_max={SCHEDULE_STEPS})"
        )
        parts.append(ScriptLines(optimizer=(schedule,), update=(UPDATE, "scheduler.step()")))

    return together(parts)


def _of_shares(made: str, config: StepConfig) -> tuple[str, ...]:
    """Return the lines of a script that make an optimizer of this rank's share of the state."""
    return (
        "# each rank keeps the state of its share of the parameters, and sends what it updates",
        "optimizer = with_sharded_state(",
        f"    parameters, lambda own: {made.format('own')}, {learning_rate(config)!r},",
        *["    group,"] * is_tensor_parallel(config),
        ")",
    )


def learning_rate(config: StepConfig) -> float:
    """Return the rate that an optimizer begins with."""
    is_adafactor = config.optimizer is Optimizer.ADAFACTOR
    return ADAFACTOR_LEARNING_RATE if is_adafactor else LEARNING_RATE


def states_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the optimizer state with the path of its parameter.

    A sparse state, such as a momentum of sparse gradients, yields its two inner tensors, and a
    state that is divided over ranks the part of this rank.
    """
    weights = [(path, p) for path, p in model.named_parameters() if p.requires_grad]
    each = optimizer.of_each if isinstance(optimizer, InBackward) else [optimizer]
    updated = [held for one in each for group in one.param_groups for held in group["params"]]

    for (path, weight), held in zip(weights, updated, strict=True):
        assert held is weight
        for value in state_of(optimizer).get(held, {}).values():
            if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
                yield path, indices_of(value)
                yield path, values_of(value)
            elif isinstance(value, torch.Tensor):
                yield path, local(value)


def state_of(optimizer: Any) -> Mapping[torch.Tensor, dict[str, Any]]:
    """Return the state by parameter; of an optimizer of shares, the state that this rank keeps."""
    found: Mapping[torch.Tensor, dict[str, Any]] = getattr(optimizer, "optim", optimizer).state
    return found


def _maker(config: StepConfig) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes an optimizer of some parameters."""
    name, options = _name_and_options(config)
    module: Any = torch.optim
    if config.optimizer is Optimizer.ADAMW_8BIT:
        import bitsandbytes  # an optional package, which takes a second to import

        module = bitsandbytes.optim

    kind: Callable[..., torch.optim.Optimizer] = partial(getattr(module, name), **options)
    if config.optimizer is Optimizer.ADAMW_8BIT and config.optimizer_in_backward:
        kind = _sharing_maps(kind)

    given = {
        Precision.BF16_MASTER: master_weights.given_master_weights,
        Precision.BF16_STOCHASTIC: stochastic_rounding.given_stochastic_rounding,
    }.get(config.precision)
    if given is None or config.is_deepspeed:  # DeepSpeed keeps fp32 copies by itself
        return kind
    return lambda parameters: given(kind(parameters))


def _offloaded(
    make_one: Callable[..., torch.optim.Optimizer],
    config: StepConfig,
    weights: OffloadedWeights | None,
) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that makes an optimizer for offloaded state and weights."""

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make_one(parameters)
        if _offloads_state(config):
            offload_state(optimizer)
        if weights is not None:
            update_one_by_one(optimizer, weights.on_the_device)
        return optimizer

    return make


def _offloads_state(config: StepConfig) -> bool:
    """Return whether the state is brought to the device for each update.

    DeepSpeed offloads by itself, and state of offloaded parts is in host memory as they are.
    """
    return config.offload_optimizer and not (config.is_deepspeed or config.offloads_shards)


def _sharing_maps(make_one: Callable[..., Any]) -> Callable[..., Any]:
    """Share the quantization maps (2 KiB) between 8-bit optimizers of single parameters."""
    maps: dict[str, torch.Tensor] = {}

    def make_sharing(parameters: list[torch.nn.Parameter]) -> Any:
        optimizer = make_one(parameters)
        maps.update(maps or optimizer.name2qmap)
        optimizer.name2qmap = maps
        return optimizer

    return make_sharing


def _name_and_options(config: StepConfig) -> tuple[str, dict[str, Any]]:
    """Return the class of the optimizer, by name, and its arguments."""
    names = {
        Optimizer.SGD: "SGD",
        Optimizer.SGD_MOMENTUM: "SGD",
        Optimizer.ADAM: "Adam",
        Optimizer.ADAMW: "AdamW",
        Optimizer.ADAFACTOR: "Adafactor",
        Optimizer.ADAMW_8BIT: "AdamW8bit",
    }
    options: dict[str, Any] = {"lr": learning_rate(config)}
    if config.optimizer is Optimizer.SGD_MOMENTUM:
        options["momentum"] = MOMENTUM

    implementation = config.optimizer_implementation
    if is_tensor_parallel(config):  # kernels for many take only one kind of tensor at a time
        implementation = OptimizerImplementation.SINGLE_TENSOR
    options |= IMPLEMENTATIONS[implementation]
    if config.optimizer is Optimizer.ADAFACTOR:
        options.pop("fused", None)  # Adafactor has no such argument

    return names[config.optimizer], options


TITLES = {
    Optimizer.SGD: "SGD",
    Optimizer.SGD_MOMENTUM: "SGD with momentum",
    Optimizer.ADAM: "Adam",
    Optimizer.ADAMW: "AdamW",
    Optimizer.ADAFACTOR: "Adafactor",
    Optimizer.ADAMW_8BIT: "AdamW, 8-bit state",
}
STATES = {
    Optimizer.SGD: "keeps no state",
    Optimizer.SGD_MOMENTUM: "keeps one number for each weight; cosine schedule",
    Optimizer.ADAM: "keeps two numbers for each weight",
    Optimizer.ADAMW: "keeps two numbers for each weight",
    Optimizer.ADAFACTOR: "keeps one row and one column of numbers for each matrix",
    Optimizer.ADAMW_8BIT: "keeps two numbers of one byte for each weight (bitsandbytes)",
}
TEMPORARIES = {
    OptimizerImplementation.DEFAULT: "",
    OptimizerImplementation.FOREACH: "updates all parameters at once, with temporaries as large as "
    "the weights",
    OptimizerImplementation.FUSED: "one fused kernel, no temporaries",
    OptimizerImplementation.SINGLE_TENSOR: "updates one parameter after another, with temporaries "
    "as large as one parameter",
}

OPTIMIZER = Technique(
    fields=("optimizer",),
    keeps=Keeps.REFERENCE,
    examples={
        "adafactor": {"optimizer": "adafactor"},
        "sgd-momentum": {"optimizer": "sgd-momentum"},
    },
    refusals=refusals,
    source=source,
    controls=(Control(field="optimizer", label="Optimizer", in_words=lambda name: TITLES[name]),),
    says=lambda asked: STATES[asked.config.optimizer],
    searches=(
        {"optimizer": "adamw-8bit"},
        {"optimizer": "adafactor"},
        {"optimizer": "sgd-momentum"},
        {"optimizer": "sgd"},
    ),
    frees_states=True,
    savings=(
        Saving(
            setting='`optimizer="adafactor"`',
            saves="both states of a matrix, but for a row and a column",
            costs="another optimizer, which learns a little differently",
        ),
        Saving(
            setting='`optimizer="adamw-8bit"`',
            saves="three quarters of the optimizer states",
            costs="the package bitsandbytes; on a CPU, fp32 temporaries of the largest parameter",
            not_for="matrices below 4096 values, which keep fp32",
        ),
    ),
)
IMPLEMENTATION = Technique(
    fields=("optimizer_implementation",),
    keeps=Keeps.ROUNDED,
    examples={"fused": {"optimizer_implementation": "fused"}},
    refusals=implementation_refusals,  # `source` of OPTIMIZER writes its lines of a script
    controls=(
        Control(
            field="optimizer_implementation",
            label="Implementation",
            named=lambda v: f"{v} implementation",
        ),
    ),
    says=lambda asked: TEMPORARIES[asked.config.optimizer_implementation],
    searches=({"optimizer_implementation": "fused"},),
    may_be_faster=True,
    savings=(
        Saving(
            setting='`optimizer_implementation="foreach"`',
            saves="time on CUDA, where it is the default",
            costs="temporaries as large as all weights",
            not_for="a step whose peak is in the update",
        ),
        Saving(
            setting='`optimizer_implementation="fused"`',
            saves="all temporaries, and time",
            not_for="`adafactor`, which has no fused form",
        ),
        Saving(
            setting='`optimizer_implementation="single-tensor"`',
            saves="the temporaries of all parameters but one",
            costs="a kernel launch for each parameter",
            not_for="many small parameters on CUDA",
        ),
    ),
)
