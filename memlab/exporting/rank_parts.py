"""What the scripts of several ranks share: how they are launched, and how each rank begins.

`torchrun` starts the ranks on one machine or on several. The script checks that it was started so.
"""

from dataclasses import replace

import torch

from memlab.config import Sharding, StepConfig
from memlab.exporting.whole_file import Loop
from memlab.techniques.sharding.ranks import SEEDS_BETWEEN_RANKS

PER_MACHINE = 8  # devices, as most machines for training have
IMPORTS = ("import os", "import torch.distributed as dist")
HOW = "this file is for {NUM_RANKS} ranks: torchrun --nproc-per-node {NUM_RANKS} {__file__}"

CHECK_LAUNCH = '''
def check_launch():
    """Stop unless torchrun has started as many ranks as this file is for."""
    if os.environ.get("WORLD_SIZE") != str(NUM_RANKS):
        raise SystemExit(
            f"{how}"
        )
'''.strip().replace("{how}", HOW)

OPEN_GROUP = '''
def open_group():
    """Join the other ranks, which torchrun has started."""
    check_launch()
    {lines}
'''.strip()

BATCHES = '''
def make_batches():
    """Yield one batch again and again, as memlab measures a step; put your own loader here.

    It must give every rank the same batches.
    """
    set_seed(SEED)
    batch = make_batch(BATCH_SIZE)
    {seeded}
    for _ in range(NUM_STEPS):
        yield batch
'''.strip()

OTHER_UNITS = "ranks must not drop out the same units"
SAME_UNITS = "all ranks must drop out the same units: they compute the same samples"
SEEDED = "    set_seed(SEED)\n"  # with which each `main` begins
SETTING = "NUM_RANKS = {}  # {}"


def batches(config: StepConfig) -> str:
    """Return the function that makes batches: ranks of other samples draw other numbers."""
    if config.sharding is Sharding.TENSOR:
        return BATCHES.replace("{seeded}", f"set_seed(SEED)  # {SAME_UNITS}")
    part = "dist.get_rank()"
    if config.tensor_parallel_size > 1:
        part = f"({part} // {config.tensor_parallel_size})"
    seeded = f"set_seed(SEED + {SEEDS_BETWEEN_RANKS:_} * {part})  # {OTHER_UNITS}"
    return BATCHES.replace("{seeded}", seeded)


def open_group(config: StepConfig, device: torch.device) -> str:
    """Return the function with which a rank of this kind of device begins."""
    lines = ['dist.init_process_group("gloo")']
    if device.type != "cpu":
        # the norm of offloaded gradients is added up in host memory
        backends = "cpu:gloo,cuda:nccl" if config.offloads_shards else "nccl"
        lines = [
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            f'dist.init_process_group("{backends}")',
        ]
    return OPEN_GROUP.replace("{lines}", "\n    ".join(lines))


def of_ranks(loop: Loop, config: StepConfig) -> Loop:
    """Return a loop with what the scripts of all libraries say about their ranks.

    A library opens the process group by itself, so its `main` checks how it was launched.
    """
    *others, main = loop.functions
    if "open_group()" not in main:
        main = main.replace(SEEDED, f"    check_launch()\n{SEEDED}", 1)
    return replace(
        loop,
        functions=[CHECK_LAUNCH, *others, main],
        imports=[*loop.imports, *IMPORTS],
        settings=(*loop.settings, SETTING.format(config.world_size, _what_each_has(config))),
        launch=launch(config.world_size),
    )


def _what_each_has(config: StepConfig) -> str:
    if config.sharding is Sharding.TENSOR:
        return "each has its part of the divided layers"
    if config.tensor_parallel_size > 1:
        return f"each {config.tensor_parallel_size} of them have a part of a batch"
    return "each has its part of a batch"


def launch(num_ranks: int) -> str:
    """Return the command that starts this many ranks.

    >>> launch(2)
    'torchrun --nproc-per-node 2 FILE'
    >>> launch(16).partition(" --rdzv")[0]
    'torchrun --nnodes 2 --nproc-per-node 8'
    """
    if num_ranks <= PER_MACHINE or num_ranks % PER_MACHINE:
        return f"torchrun --nproc-per-node {num_ranks} FILE"
    return (
        f"torchrun --nnodes {num_ranks // PER_MACHINE} --nproc-per-node {PER_MACHINE} "
        "--rdzv-backend c10d --rdzv-endpoint HOST:29500 FILE"
    )
