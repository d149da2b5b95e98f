"""DeepSpeed's own engine, as a step drives it, and what `verify` and the meter read of it.

Source: `deepspeed.initialize`, and `deepspeed.utils.safe_get_full_fp32_param` and its neighbours,
which collect a tensor from all ranks. Of each parameter DeepSpeed keeps an fp32 copy beside the
optimizer state, as a part of one flat tensor for all parameters of a rank. In stages 1 and 2 every
rank holds the whole model; in stage 3 a parameter is empty outside of its module, and its
`ds_tensor` is this rank's part. A loss is weighted by memlab, so that DeepSpeed must not divide it.

Left out: DeepSpeed's own optimizers, which it compiles when they are used, its checkpoints and its
loss scaler.
"""

import functools
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memlab.config import Precision, Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.sharding.ranks import local

# How DeepSpeed's engine starts around a model: plain PyTorch, which exported scripts hold
# too.
#
# The process group is open before. Left out: DeepSpeed's own optimizers, loaders and
# launcher.


def started_engine(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    device: torch.device,
) -> Any:
    """Return DeepSpeed's engine, which runs in place of the model.

    Args:
        model: on its device; its parameters become parts of flat tensors.
        optimizer: of torch.optim, over the trainable parameters of the model. It keeps its object
            and gets flat parameters.
        settings: DeepSpeed's, its JSON.
        device: of this rank.

    Raises:
        UnsupportedError: the parameters have a format that DeepSpeed is not told of, or DeepSpeed
            was imported before, for another kind of device.
    """
    told = torch.bfloat16 if "bf16" in settings else torch.float32
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is not told:
            name = str(parameter.dtype).removeprefix("torch.")
            raise UnsupportedError(
                f"DeepSpeed is told to train {str(told).removeprefix('torch.')} parameters, and "
                f"{path} is {name}; use precision='fp32' or 'bf16-master'"
            )

    deepspeed = imported_deepspeed(device)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def imported_deepspeed(device: torch.device) -> Any:
    """Return DeepSpeed, which then prints nothing but errors and compiles nothing.

    Raises:
        UnsupportedError: it was imported before, for another kind of device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read at the first import
    import deepspeed  # two seconds, and an optional package

    kind = deepspeed.get_accelerator().device_name()
    if kind != device.type:
        raise UnsupportedError(
            f"deepspeed was imported for {kind!r}, and this step runs on {device.type!r}; set the "
            f"environment variable DS_ACCELERATOR={device.type} before it is imported"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # a collective over shared memory, which it would compile and announce; Gloo does the same
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


# What DeepSpeed is told about a step: the JSON of its settings.
#
# Source: https://www.deepspeed.ai/docs/config-json. What is not mentioned has DeepSpeed's
# default. Two defaults show in small models: stage 3 keeps parameters of fewer than 100,000
# values whole in every rank, and gathered parameters stay whole until 1,000,000,000 values
# of them are live.

STAGES = {
    Sharding.DEEPSPEED_ZERO1: 1,
    Sharding.DEEPSPEED_ZERO2: 2,
    Sharding.DEEPSPEED_ZERO3: 3,
}
OF_TORCH = {1: Sharding.ZERO1, 2: Sharding.ZERO2, 3: Sharding.ZERO3}
USUAL_BUCKET = 500_000_000  # DeepSpeed's default, in values
PRECISIONS: dict[Precision, dict[str, Any]] = {
    Precision.AS_BUILT: {},
    Precision.FP32: {},
    Precision.TF32: {},
    Precision.BF16_MIXED: {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    Precision.BF16_MASTER: {"bf16": {"enabled": True}},
}
"""The formats that mean the same to memlab and DeepSpeed, and how DeepSpeed is told."""


def deepspeed_settings(config: StepConfig, num_parameters: int | None = None) -> dict[str, Any]:
    """Return the settings of DeepSpeed for a step: what `deepspeed.initialize` takes as `config`.

    The optimizer is not among them. It is a torch.optim object that `initialize` takes too.

    Args:
        config: with one of DeepSpeed's strategies.
        num_parameters: values of the trained parameters. DeepSpeed allocates a bucket whole, 2 GB
            in fp32, so it is made no larger than a model that is smaller.

    >>> config = StepConfig(batch_size=8, sharding="deepspeed-zero2", world_size=2)
    >>> deepspeed_settings(config)["zero_optimization"]
    {'stage': 2}
    """
    zero: dict[str, Any] = {"stage": STAGES[config.sharding]}
    if num_parameters is not None and num_parameters < USUAL_BUCKET:
        zero["reduce_bucket_size"] = max(1, num_parameters)
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}

    settings: dict[str, Any] = {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "zero_optimization": zero,
        # optimizers of torch.optim, on the CPU too: DeepSpeed's own are compiled when they are used
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # without it, DeepSpeed clips at 1 from 0.19.3 on
        "gradient_clipping": config.max_grad_norm or 0.0,
    }
    return settings | PRECISIONS[config.precision]


def notes(config: StepConfig) -> list[str]:
    """Say what DeepSpeed does that the config does not mention."""
    said = []
    if STAGES[config.sharding] == 3:
        said.append(
            "DeepSpeed's stage 3 keeps parameters of fewer than 100,000 values whole in every "
            "rank, and gathered ones from their forward to their backward unless more than "
            "1,000,000,000 values are live."
        )
    if config.offload_parameters or config.offload_optimizer:
        said.append(
            "No card has run DeepSpeed's offloading in memlab's tests: these numbers are unchecked."
        )
    return said


MASTER = "master"  # as `weight_formats.py` names fp32 copies in the state


class Engine:
    """The engine of one rank.

    Args:
        model: on its device; its parameters become parts of flat tensors.
        optimizer: of torch.optim, over the trainable parameters of the model. It keeps its object
            and gets flat parameters.
        config: with one of DeepSpeed's strategies.
        device: of this rank.

    Attributes:
        run_model: what runs instead of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: StepConfig,
        device: torch.device,
    ) -> None:
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        settings = deepspeed_settings(config, count)
        self.run_model = started_engine(model, optimizer, settings, device)
        import deepspeed  # late: it was imported for this kind of device

        self._stage, self._optimizer = STAGES[config.sharding], optimizer
        self._has_masters = config.precision is Precision.BF16_MASTER
        self._gathered = deepspeed.zero.GatheredParameters
        self._utils = deepspeed.utils
        weakref.finalize(self, _end, self.run_model).atexit = False

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the gradients of a loss; after the last micro-batch they are those of all ranks."""
        self.run_model.set_gradient_accumulation_boundary(is_last)
        self.run_model.backward(loss, scale_wrt_gas=False)

    def update(self) -> None:
        """Clip the gradients if asked to, apply them and free them."""
        self.run_model.step()

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank keeps for updates: fp32 copies and state of the whole model ("")."""
        for flat in self._flat():
            for tensor in (flat, *self._state_of(flat).values()):
                if isinstance(tensor, torch.Tensor):
                    yield "", tensor

    def host_bytes(self) -> int:
        """Return the bytes of parameters and state that are offloaded to host memory."""
        parts = [local(p) for p in self.run_model.module.parameters()]
        tensors = [*parts, *(tensor for _, tensor in self.held())]
        return sum(t.nbytes for t in tensors if t.device.type == "cpu" and t.dim() > 0)

    def value_of(self, parameter: Any) -> torch.Tensor:
        """Return a whole parameter; all ranks must ask at once, as in what follows."""
        found: torch.Tensor = parameter
        if self._stage < 3:
            return found
        with self._gathered([parameter]):
            found = parameter.detach().clone()
        return found

    def gradient_of(self, parameter: Any) -> torch.Tensor:
        """Return a whole gradient after the last micro-batch; zeros if there is none."""
        found: torch.Tensor | None = self._utils.safe_get_full_grad(parameter)
        return torch.zeros_like(self.value_of(parameter)) if found is None else found

    def states_of(self, parameter: Any) -> dict[str, torch.Tensor]:
        """Return the whole optimizer state of a parameter by name; empty before the first."""
        found: dict[str, torch.Tensor] = {}
        if not parameter.requires_grad:
            return found
        if self._has_masters:
            found[MASTER] = self._utils.safe_get_full_fp32_param(parameter)
        for name in self._divided():
            found[name] = self._utils.safe_get_full_optimizer_state(parameter, name)
        return found | dict(self._shared())

    def put(self, parameter: Any, value: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """Give a parameter another value and optimizer state, both whole and equal in all ranks."""
        with torch.no_grad():
            if self._stage < 3:
                parameter.copy_(value)
            else:
                with self._gathered([parameter], modifier_rank=0):
                    parameter.copy_(value)
        if not parameter.requires_grad:
            return
        self._put_whole(parameter, value, None)
        for name in self._divided():
            if name in states:
                self._put_whole(parameter, states[name], name)
        for name, held in self._shared():
            held.copy_(states.get(name, held))

    def _put_whole(self, parameter: Any, value: torch.Tensor, name: str | None) -> None:
        """Change the fp32 copy of a parameter, or one of its states."""
        names = () if name is None else (name,)
        if self._stage < 3:
            put = self._utils.safe_set_full_fp32_param
            put = self._utils.safe_set_full_optimizer_state if names else put
            put(parameter, value, *names)
            return
        # by the parts of ranks, since the function for whole tensors expects equal ones
        size = parameter.ds_tensor.numel()
        missing = size * dist.get_world_size() - value.numel()
        padded = nn.functional.pad(value.flatten(), (0, missing))
        part = padded[size * dist.get_rank() :][:size]
        put = self._utils.safe_set_local_fp32_param
        put = self._utils.safe_set_local_optimizer_state if names else put
        put(parameter, part, *names)

    def _flat(self) -> list[torch.Tensor]:
        zero = self.run_model.optimizer
        found: list[torch.Tensor] = (
            zero.fp32_partitioned_groups_flat
            if self._stage == 3
            else zero.single_partition_of_fp32_groups
        )
        return found

    def _state_of(self, flat: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = self._optimizer.state.get(flat, {})
        return found

    def _divided(self) -> list[str]:
        """Return the names of states that have a value for each value of the parameters.

        In the same order in all ranks, which collect them one after another.
        """
        names = {
            name
            for flat in self._flat()
            for name, state in self._state_of(flat).items()
            if isinstance(state, torch.Tensor) and state.shape == flat.shape
        }
        return sorted(names)

    def _shared(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield states that parameters share, such as the counter of updates, of each flat one."""
        for flat in self._flat():
            for name, state in self._state_of(flat).items():
                if isinstance(state, torch.Tensor) and state.shape != flat.shape:
                    yield name, state


def _end(engine: Any) -> None:
    """Let go of the model and all tensors, which Python would not collect by itself.

    DeepSpeed's hooks on nodes of autograd make a cycle through C++. Stage 3 keeps the outermost
    module in a list, and caches the result of a method by its arguments, which are modules too.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    engine.destroy()
    own, running = set(engine.module.modules()), parameter_offload.FWD_MODULE_STACK
    running[:] = [module for module in running if module not in own]
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if isinstance(cell.cell_contents, functools._lru_cache_wrapper):
                cell.cell_contents.cache_clear()
