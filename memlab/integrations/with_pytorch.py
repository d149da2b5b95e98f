"""The flavor `pytorch`: the step of `build_step` in plain PyTorch, as a whole file."""

import torch

from memlab.config import Sharding, StepConfig
from memlab.integrations import library_parts
from memlab.integrations.script_file import BATCHES, Loop
from memlab.prediction.chains import Layers
from memlab.techniques.script import parts, train_arguments
from memlab.techniques.technique import Plan, Setup
from memlab.workload import Workload

MAIN = '''
def main():
    """Train for NUM_STEPS updates, and print the loss of each."""
    set_seed(SEED)
    _, losses = train({})
    for step, loss in enumerate(losses, 1):
        print(f"step {{step}}: loss {{loss}}")
'''.strip()

IN_RANKS = '''
def main():
    """Train for NUM_STEPS updates in every rank, and print the loss of each."""
    open_group()
    set_seed(SEED)
    _, losses = train({})
    if dist.get_rank() == 0:
        for step, loss in enumerate(losses, 1):
            print(f"step {{step}}: loss {{loss}}")
    dist.destroy_process_group()
'''.strip()


def loop(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    plan: Plan | None,
    layers: Layers | None = None,
) -> Loop:
    """Return the loop, whose losses are those of `build_step` bit by bit.

    Args:
        workload: what is trained.
        config: how.
        device: where; only its type counts.
        plan: what is recomputed, for a memory budget of the eager engine.
        layers: those that the ranks divide, if they do.

    Raises:
        UnsupportedError: this config is refused, or has no short form in plain PyTorch.
    """
    asked = Setup(config=config, device=device, plan=plan, workload=workload, layers=layers)
    imports, functions = parts(asked)
    more = train_arguments(config, workload)
    given = ", ".join(["build_model", "make_batches()", "compute_loss", "DEVICE", *more])
    is_sharded = config.sharding is not Sharding.NONE
    own = [BATCHES, MAIN.format(given)]
    if is_sharded:
        own = [
            library_parts.batches_source(config),
            library_parts.open_group(config, device),
            IN_RANKS.format(given),
        ]
    found = Loop(
        title="plain PyTorch",
        imports=[line for line in imports if line],
        functions=[*functions, *own],
        calls=("build_model", "make_batch", "compute_loss", *more),
    )
    return library_parts.of_ranks(found, config) if is_sharded else found
