"""The flavor `pytorch`: the step of `build_step` in plain PyTorch, as a whole file."""

import torch

from memlab.config import StepConfig
from memlab.exporting.whole_file import BATCHES, Loop
from memlab.plan import Plan
from memlab.script import parts, train_arguments
from memlab.workload import Workload

MAIN = '''
def main():
    """Train for NUM_STEPS updates, and print the loss of each."""
    set_seed(SEED)
    _, losses = train({})
    for step, loss in enumerate(losses, 1):
        print(f"step {{step}}: loss {{loss}}")
'''.strip()


def loop(workload: Workload, config: StepConfig, device: torch.device, plan: Plan | None) -> Loop:
    """Return the loop, whose losses are those of `build_step` bit by bit.

    Raises:
        UnsupportedError: this config is refused, or has no short form in plain PyTorch.
    """
    imports, functions = parts(config, device, plan, workload)
    more = train_arguments(config, workload)
    given = ["build_model", "make_batches()", "compute_loss", "DEVICE", *more]
    return Loop(
        title="plain PyTorch",
        imports=[line for line in imports if line],
        functions=[*functions, BATCHES, MAIN.format(", ".join(given))],
        calls=("build_model", "make_batch", "compute_loss", *more),
    )
