"""A script that trains a few updates, saves or loads, and prints its losses; run it by torchrun.

FOLDER, "save", "load", "train" (neither) or "differ" (in each rank other samples), and the settings
as JSON; with "is_held_twice" the model is one of which two modules hold a weight.
"""

import faulthandler
import json
import os
import sys

import torch
import torch.distributed as dist

from memlab import StepConfig, training_step
from memlab.techniques.batches import map_tensors
from memlab.techniques.sharding.ranks import part_of
from tests.rank_parts import WIDTH, faulty
from tests.tensor_parts import TOKENS, WORDS, shared

BATCH, NUM_BATCHES, SAVED_AFTER = 8, 6, 3


def batches(is_of_words=False):
    """Return the batches of all ranks, the same in every process."""
    draw = torch.Generator().manual_seed(1)
    if is_of_words:
        return [torch.randint(WORDS, (BATCH, TOKENS), generator=draw) for _ in range(NUM_BATCHES)]
    shapes = [(BATCH, WIDTH)] * 2
    return [tuple(torch.randn(shape, generator=draw) for shape in shapes)
            for _ in range(NUM_BATCHES)]  # fmt: skip


def main(folder, what, settings):
    """Train and print the losses of the updates after the checkpoint, exactly."""
    faulthandler.dump_traceback_later(60, exit=True)
    rank, count = 0, 1
    if "RANK" in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
        rank, count = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    is_held_twice = settings.pop("is_held_twice", False)
    config = StepConfig(batch_size=BATCH, **settings)
    size, part = BATCH // config.data_parallel_size, part_of(config, rank)
    own = slice(part * size, (part + 1) * size)
    mine = [map_tensors(lambda t: t[own], batch) for batch in batches(is_held_twice)]
    if what == "differ":
        mine = [tuple(t + rank for t in batch) for batch in mine]

    step = training_step(shared() if is_held_twice else faulty(), config, "cpu")
    if what not in ("load", "train"):
        for batch in mine[:SAVED_AFTER]:
            step(batch)
        step.save(folder)
    if what == "load":
        assert step.load(folder) == SAVED_AFTER
    losses = [step(batch) for batch in (mine if what == "train" else mine[SAVED_AFTER:])]
    assert step.num_updates == NUM_BATCHES
    if rank == 0:
        print(json.dumps([loss.hex() for loss in losses]), flush=True)
    if count > 1:
        dist.barrier()
        os._exit(0)  # Gloo's threads can abort a process that ends in the ordinary way


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
