"""How DeepSpeed's engine starts around a model: plain PyTorch, which exported scripts hold too.

The process group is open before. Left out: DeepSpeed's own optimizers, loaders and launcher.
"""

import logging
import os
from typing import Any

import torch

from memlab.errors import UnsupportedError


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
