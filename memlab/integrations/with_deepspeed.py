"""The flavor `deepspeed`: the step of `build_step` around DeepSpeed's engine, as a whole file."""

from dataclasses import replace

import torch

from memlab.config import StepConfig
from memlab.integrations import with_pytorch
from memlab.integrations.script_file import Loop
from memlab.techniques.technique import Plan
from memlab.workload import Workload


def loop(workload: Workload, config: StepConfig, device: torch.device, plan: Plan | None) -> Loop:
    """Return the loop, whose losses are those of `build_step` bit by bit.

    Raises:
        UnsupportedError: this config is refused, or has no short form.
    """
    found = with_pytorch.loop(workload, config, device, plan)
    return replace(found, title="DeepSpeed", needs="DeepSpeed: pip install deepspeed")
