"""Optimizers by name, with PyTorch's own defaults, and the choice of their implementation.

A person's own function may make the optimizer instead. What other techniques need of an optimizer,
such as that it updates each parameter by itself, is then tried with small tensors (`own.py`).

8-bit states are those of bitsandbytes: blocks of 256 values share a scale, and parameters of fewer
than 4096 values keep fp32 states. Left out: GaLore and other low-rank projections. PyTorch and
torchao have none, and galore-torch had its last release in 2024.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from memlab._util.torch_private import pytree
from memlab._util.torch_private.ranks import parts_sent_by
from memlab._util.torch_private.tensors import has_kernel_for, indices_of, is_registered, values_of
from memlab.config import Optimizer, OptimizerImplementation, Precision, Sharding, StepConfig
from memlab.techniques.offload.offloading import OffloadedWeights, offload_state, update_one_by_one
from memlab.techniques.optimizers import optimizer_in_backward, own, weight_formats
from memlab.techniques.optimizers.optimizer_in_backward import InBackward
from memlab.techniques.sharding.ranks import FULLY_SHARDED, is_tensor_parallel, local
from memlab.techniques.sharding.replicated import with_sharded_state
from memlab.techniques.source import UPDATE, ScriptLines, inlined, together
from memlab.techniques.technique import Control, Equivalence, Refusal, Setup, Technique, refuse

# Lion: the sign of a momentum, with one state for each weight.
#
# Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
# Its usual learning rate is a tenth to a third of AdamW's. Left out: kernels for many
# parameters at once.
#
# It is plain PyTorch, of which exported scripts contain what they call.


class Lion(torch.optim.Optimizer):
    """Updates one parameter after another; temporaries are as large as one parameter."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            now, later = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                update = momentum.mul(now).add_(parameter.grad, alpha=1 - now).sgn_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])
                momentum.mul_(later).add_(parameter.grad, alpha=1 - later)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """What sets an optimizer apart; a new one is a row of `KINDS`.

    Attributes:
        made_by: its class, by name.
        title: on the button of the panel.
        state: what it keeps.
        learning_rate: that it begins with: PyTorch's default for AdamW, and for Adafactor, whose
            rate is relative to a weight's size.
        only: why it has one implementation; "" if it has those of `OptimizerImplementation`.
    """

    made_by: str
    title: str
    state: str
    learning_rate: float = 1e-3
    only: str = ""


KINDS: dict[Any, OptimizerKind] = {
    Optimizer.SGD: OptimizerKind(made_by="SGD", title="SGD", state="keeps no state"),
    Optimizer.SGD_MOMENTUM: OptimizerKind(
        made_by="SGD",
        title="SGD with momentum",
        state="keeps one number for each weight; cosine schedule",
    ),
    Optimizer.ADAM: OptimizerKind(
        made_by="Adam", title="Adam", state="keeps two numbers for each weight"
    ),
    Optimizer.ADAMW: OptimizerKind(
        made_by="AdamW", title="AdamW", state="keeps two numbers for each weight"
    ),
    Optimizer.ADAFACTOR: OptimizerKind(
        made_by="Adafactor",
        title="Adafactor",
        state="keeps one row and one column of numbers for each matrix",
        learning_rate=1e-2,
    ),
    Optimizer.ADAMW_8BIT: OptimizerKind(
        made_by="AdamW8bit",
        title="AdamW, 8-bit state",
        state="keeps two numbers of one byte for each weight (bitsandbytes)",
        only="bitsandbytes has one implementation, which is fused",
    ),
    Optimizer.MUON: OptimizerKind(
        made_by="muon_and_adamw",
        title="Muon",
        state="keeps one number for each weight of a matrix, and two for all others and for "
        "embeddings, which go to AdamW",
        only="torch.optim.Muon has one implementation, of one parameter after another",
    ),
    Optimizer.LION: OptimizerKind(
        made_by="Lion",
        title="Lion",
        state="keeps one number for each weight",
        only="it has one implementation, of one parameter after another",
    ),
}
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


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse an 8-bit optimizer whose package is not installed or has no kernel for a CPU."""
    yield from _of_own(setup)
    yield from _of_muon(setup.config)
    if setup.config.optimizer is not Optimizer.ADAMW_8BIT:
        return

    instead: dict[str, Any] = {"optimizer": Optimizer.ADAFACTOR}
    if find_spec("bitsandbytes") is None:
        yield Refusal(
            why="optimizer='adamw-8bit' needs bitsandbytes, which is not installed",
            remedies=(instead,),
            otherwise="pip install 'memlab[optimizers]'",
        )
        return

    if setup.device.type != "cpu":
        return

    import bitsandbytes  # late: it sets an environment variable, for which workers are replaced

    if not (is_registered(EIGHT_BIT_KERNEL) and has_kernel_for(EIGHT_BIT_KERNEL, "CPU")):
        yield Refusal(
            why="optimizer='adamw-8bit' needs a CUDA card, because bitsandbytes "
            f"{bitsandbytes.__version__} has no kernel for a CPU",
            remedies=(instead,),
            otherwise="install bitsandbytes 0.50 or newer",
        )


def _of_own(setup: Setup) -> Iterator[Refusal]:
    """Refuse what cannot be asked of an optimizer that a person's own function makes."""
    config, of_workload = setup.config, setup.has_make_optimizer
    if of_workload and config.optimizer != StepConfig().optimizer:
        yield Refusal(
            why=f"optimizer={said_of(config)} with a workload that has make_optimizer, which makes "
            "another one",
            remedies=({"optimizer": StepConfig().optimizer},),
            otherwise="leave make_optimizer out of the workload",
        )
    if not (config.has_own_optimizer or of_workload):
        return

    what = "make_optimizer" if of_workload else f"optimizer={said_of(config)}"
    unlike = [name for name, needed in _needs(config).items() if needed]
    if config.sharding is Sharding.ZERO1 or config.is_deepspeed or is_tensor_parallel(config):
        yield Refusal(
            why=f"sharding={str(config.sharding)!r} with {what} is not implemented: who divides "
            "state or layers makes optimizers of its own groups, kinds and learning rates",
            remedies=({"sharding": Sharding.DDP},),
        )
    elif of_workload and unlike:
        yield Refusal(
            why=f"make_optimizer with {unlike[0]}: the optimizer must be made for other "
            "parameters than those of the model to try whether it allows that",
            remedies=({name: getattr(StepConfig(), name) for name in unlike},),
            otherwise="pass StepConfig(optimizer=...), a function of the parameters",
        )
    if config.optimizer_implementation is not OptimizerImplementation.DEFAULT:
        yield Refusal(
            why=f"optimizer_implementation={str(config.optimizer_implementation)!r} with {what}, "
            "which says itself which implementation runs",
            remedies=({"optimizer_implementation": OptimizerImplementation.DEFAULT},),
            otherwise="let it pass foreach=True or fused=True to its optimizer",
        )


def _needs(config: StepConfig) -> dict[str, bool]:
    """Return the fields that need an optimizer to update in another way than all at once."""
    exact = (Precision.BF16_MASTER, Precision.BF16_STOCHASTIC)
    return {
        "optimizer_in_backward": config.optimizer_in_backward,
        "offload_optimizer": _offloads_state(config),
        "offload_parameters": config.offload_parameters and not config.offloads_shards,
        "precision": config.precision in exact and not config.is_deepspeed,
        "sharding": config.sharding in FULLY_SHARDED,
    }


def _of_muon(config: StepConfig) -> Iterator[Refusal]:
    """Refuse Muon where torch has none, and where it does not see whole matrices by themselves."""
    if config.optimizer is not Optimizer.MUON:
        return
    adamw: dict[str, Any] = {"optimizer": Optimizer.ADAMW}
    if not hasattr(torch.optim, "Muon"):
        yield Refusal(
            why=f"optimizer='muon' needs torch.optim.Muon, which torch {torch.__version__} does "
            "not have",
            remedies=(adamw,),
            otherwise="install torch 2.9 or newer",
        )
    if config.sharding not in (Sharding.NONE, Sharding.DDP):
        yield Refusal(
            why=f"optimizer='muon' with sharding={str(config.sharding)!r} is not implemented: it "
            "goes by whole matrices, of which a rank may hold a part, and leaves others to AdamW",
            remedies=(adamw, {"sharding": Sharding.DDP}),
        )


def implementation_refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse an implementation that does not exist for this optimizer or number format."""
    config, chosen = setup.config, setup.config.optimizer_implementation
    said = f"optimizer_implementation={str(chosen)!r} with optimizer={str(config.optimizer)!r}"
    kind = KINDS.get(config.optimizer)
    if kind and kind.only and IMPLEMENTATIONS[chosen]:
        yield Refusal(
            why=f"{said}: {kind.only}",
            remedies=({"optimizer_implementation": OptimizerImplementation.DEFAULT},),
        )

    if config.optimizer is Optimizer.ADAFACTOR and chosen is OptimizerImplementation.FUSED:
        yield Refusal(why=f"{said}: torch.optim.Adafactor has no fused kernel", remedies=NOT_FUSED)
    if config.precision in (Precision.BF16, Precision.FP16):
        what = f"precision={str(config.precision)!r}"
        yield from _of_fused_sgd(config, setup.device, what)


def _of_complex(config: StepConfig, model: torch.nn.Module) -> Iterator[Refusal]:
    """Refuse an 8-bit optimizer for complex weights: on a CPU it runs, and writes real ones."""
    is_complex = any(p.is_complex() and p.requires_grad for p in model.parameters())
    if is_complex and config.optimizer is Optimizer.ADAMW_8BIT:
        yield Refusal(
            why="optimizer='adamw-8bit' with complex weights: bitsandbytes drops their imaginary "
            "parts (0.50)",
            remedies=({"optimizer": Optimizer.ADAMW},),
        )


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
    make_optimizer: Callable[[torch.nn.Module], Any] | None = None,
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """Return the optimizer over the trainable parameters, and its schedule if it has one.

    Args:
        model: on its device.
        config: says which optimizer.
        weights: the offloaded weights of the model, if there are any.
        group: of the ranks that share the state with zero1; None for all ranks.
        make_optimizer: of the workload.

    Raises:
        UnsupportedError: the optimizer does not update weights of this number format correctly, or
            not as the config needs it.
        ConfigError: a person's own function made no optimizer of the model's parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if make_optimizer is not None:
        made = own.made_optimizer("make_optimizer", make_optimizer, model)
        return own.checked_optimizer("make_optimizer", made, model, parameters), None

    refuse(_of_complex(config, model))
    if config.has_own_optimizer:
        return _own(model, config, parameters, weights), None
    half = next((p for p in parameters if p.dtype in (torch.bfloat16, torch.float16)), None)
    if half is not None and config.precision is Precision.AS_BUILT:
        name = str(half.dtype).removeprefix("torch.")
        refuse(_of_fused_sgd(config, half.device, f"weights of {name}"))

    make_one = _offloaded(_maker(model, config), config, weights)
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


def _own(
    model: torch.nn.Module,
    config: StepConfig,
    parameters: list[torch.nn.Parameter],
    weights: OffloadedWeights | None,
) -> torch.optim.Optimizer:
    """Return the optimizer of a person's own function, which is tried for what it is used for."""
    said = f"optimizer={said_of(config)}"
    function = own.looked_up(config.optimizer)
    kind: Callable[..., torch.optim.Optimizer] = partial(own.made_optimizer, said, function)
    given = _given(config)

    def changed(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = given(kind(parameters))
        return found

    # before anything wraps it, so that what is wrong is said of the function itself
    own.checked_optimizer(said, kind(parameters), model, parameters)
    tries: dict[str, Callable[..., Any]] = {
        "optimizer_in_backward": own.one_each,
        "offload_optimizer": own.one_by_one,
        "offload_parameters": own.one_by_one,
        "precision": partial(own.one_by_one, given=weight_formats.given_master_weights),
        "sharding": own.flat,
    }
    for name in (name for name, needed in _needs(config).items() if needed):
        value = getattr(config, name)
        value = str(value) if isinstance(value, str) else value
        own.check_same(said, f"{name}={value!r}", kind, tries[name], parameters)

    make_one = _offloaded(changed, config, weights)
    return (
        InBackward(parameters, make_one) if config.optimizer_in_backward else make_one(parameters)
    )


def _given(config: StepConfig) -> Callable[[Any], Any]:
    """Return what changes an optimizer for weights of 16 bits, or leaves it as it is."""
    given = {
        Precision.BF16_MASTER: weight_formats.given_master_weights,
        Precision.BF16_STOCHASTIC: weight_formats.given_stochastic_rounding,
    }.get(config.precision)
    if given is None or config.is_deepspeed:  # DeepSpeed keeps fp32 copies by itself
        return lambda optimizer: optimizer
    return given


def said_of(config: StepConfig) -> str:
    """Return the optimizer of a config as a message names it."""
    return repr(config.to_dict()["optimizer"])


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script that make the optimizer and its schedule."""
    config = setup.config
    if setup.has_make_optimizer:
        made_by = ScriptLines(optimizer=("optimizer = as_one(make_optimizer(model))",))
        return together([inlined(own.as_one), made_by])

    name, options = _name_and_options(config)
    rates = ", ".join(f"{k}={v!r}" for k, v in options.items())
    is_eight_bit = config.optimizer is Optimizer.ADAMW_8BIT
    module = "bitsandbytes.optim" if is_eight_bit else "torch.optim"
    made = f"{module}.{name}({{}}, {rates})"
    parts = [ScriptLines(imports=("import bitsandbytes",) if is_eight_bit else ())]
    if config.has_own_optimizer:
        made = "as_one(make_optimizer({}))"
        parts.append(inlined(own.as_one))
    elif config.optimizer is Optimizer.MUON:
        made = "make_muon({})"
        made_by = ScriptLines(optimizer=(f"make_muon = {name}(model, {rates})",))
        parts += [inlined(own.muon_and_adamw), made_by]
    elif config.optimizer is Optimizer.LION:
        made = f"{name}({{}}, {rates})"
        parts.append(inlined(Lion))

    if config.precision is Precision.BF16_MASTER and not config.is_deepspeed:
        made = f"given_master_weights({made})"
        parts.append(inlined(weight_formats.given_master_weights))
    if config.precision is Precision.BF16_STOCHASTIC:
        made = f"given_stochastic_rounding({made})"
        parts.append(inlined(weight_formats.given_stochastic_rounding))
    if _offloads_state(config):
        made = f"offload_state({made})"
    if config.offload_parameters and not config.offloads_shards:
        made = f"update_one_by_one({made}, weights.on_the_device)"
    if config.optimizer_in_backward:
        rate = None if config.has_own_optimizer else learning_rate(config)
        parts.append(optimizer_in_backward.source(made.format("own"), rate))
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
    return KINDS[Optimizer.ADAMW if config.has_own_optimizer else config.optimizer].learning_rate


def states_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the optimizer state with the path of its parameter.

    A sparse state, such as a momentum of sparse gradients, yields its two inner tensors, and a
    state that is divided over ranks the part of this rank.
    """
    for path, held in model.named_parameters():
        for value in pytree.tree_leaves(state_of(optimizer).get(held, {})):
            if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
                yield path, indices_of(value)
                yield path, values_of(value)
            elif isinstance(value, torch.Tensor):
                yield path, local(value)


def state_of(optimizer: Any) -> Mapping[torch.Tensor, dict[str, Any]]:
    """Return the state by parameter; of an optimizer of shares, the state that this rank keeps."""
    found: Mapping[torch.Tensor, dict[str, Any]] = getattr(optimizer, "optim", optimizer).state
    return found


def _maker(
    model: torch.nn.Module, config: StepConfig
) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes an optimizer of some parameters."""
    name, options = _name_and_options(config)
    kind: Any
    if config.optimizer is Optimizer.MUON:
        kind = own.muon_and_adamw(model, **options)
    elif config.optimizer is Optimizer.LION:
        kind = partial(Lion, **options)
    elif config.optimizer is Optimizer.ADAMW_8BIT:
        import bitsandbytes  # an optional package, which takes a second to import

        kind = partial(getattr(bitsandbytes.optim, name), **options)
    else:
        kind = partial(getattr(torch.optim, name), **options)
    if config.optimizer is Optimizer.ADAMW_8BIT and config.optimizer_in_backward:
        kind = _sharing_maps(kind)

    given = _given(config)
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
    if config.has_own_optimizer:
        return "", {}
    options: dict[str, Any] = {"lr": learning_rate(config)}
    if config.optimizer is Optimizer.SGD_MOMENTUM:
        options["momentum"] = MOMENTUM

    implementation = config.optimizer_implementation
    if is_tensor_parallel(config):  # kernels for many take only one kind of tensor at a time
        implementation = OptimizerImplementation.SINGLE_TENSOR
    options |= IMPLEMENTATIONS[implementation]
    if config.optimizer is Optimizer.ADAFACTOR:
        options.pop("fused", None)  # Adafactor has no such argument

    return KINDS[config.optimizer].made_by, options


TEMPORARIES = {
    OptimizerImplementation.DEFAULT: "",
    OptimizerImplementation.FOREACH: "updates all parameters at once, with temporaries as large as "
    "the weights",
    OptimizerImplementation.FUSED: "one fused kernel, no temporaries",
    OptimizerImplementation.SINGLE_TENSOR: "updates one parameter after another, with temporaries "
    "as large as one parameter",
}


def says(setup: Setup) -> str:
    """Return what state the optimizer keeps."""
    if setup.has_make_optimizer:
        return "the workload's own, by its make_optimizer"
    if setup.config.has_own_optimizer:
        return f"made by {said_of(setup.config)}"
    return KINDS[setup.config.optimizer].state


def notes(setup: Setup) -> list[str]:
    """Return a note on what Muon leaves to AdamW."""
    if setup.config.optimizer is not Optimizer.MUON:
        return []
    return ["Muon updates the matrices; AdamW updates embeddings and all that is no matrix."]


OPTIMIZER = Technique(
    fields=("optimizer",),
    equivalence=Equivalence.NOT_COMPARED,
    examples={
        "adafactor": {"optimizer": "adafactor"},
        "sgd-momentum": {"optimizer": "sgd-momentum"},
    },
    refusals=refusals,
    source=source,
    controls=(
        Control(
            field="optimizer",
            label="Optimizer",
            in_words=lambda name: KINDS[name].title if name in KINDS else "own",
            named=lambda name: str(name) if name in KINDS else "own optimizer",
        ),
    ),
    says=says,
    notes=notes,
    frees_states=True,
)
IMPLEMENTATION = Technique(
    fields=("optimizer_implementation",),
    equivalence=Equivalence.NUMERICAL,
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
    may_be_faster=True,
)
