"""A script that offloads in ranks of a CPU, and prints how far they are from one process.

On a CPU memlab refuses to offload, since nothing is saved. The code that does it runs all the same:
here `fully_shard` gets its policy, and tensors count as those of a card. Run it by torchrun.
"""

import copy
import faulthandler
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memlab.techniques import clipping
from memlab.techniques.offload import offloading
from memlab.techniques.offload.offloading import Offloader, offload_state
from memlab.techniques.sharding import replicated
from memlab.techniques.sharding.fully_sharded import shard_blocks
from memlab.techniques.sharding.ranks import whole
from tests.rank_parts import WIDTH, faulty

SAMPLES, NUM_UPDATES, MAX_NORM = 8, 3, 0.1
ROW = WIDTH * 4  # bytes of an activation of one sample


def main():
    """Train in every way and print the largest error of a weight, and the bytes on the host."""
    faulthandler.dump_traceback_later(60, exit=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # as if this were a card, and its activations large enough
    offloading._is_worth_it = lambda tensor: tensor.nbytes >= SAMPLES // 2 * ROW

    torch.manual_seed(0)
    model = faulty().build_model()
    batches = [torch.randn(SAMPLES, WIDTH) for _ in range(NUM_UPDATES)]
    expected = trained(copy.deepcopy(model), batches)
    found = {}
    for name, prepare in WAYS.items():
        weights, host_bytes = in_ranks(copy.deepcopy(model), batches, prepare)
        errors = [float((weights[key] - expected[key]).abs().max()) for key in expected]
        found[name] = (max(errors), host_bytes)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort a process that ends in the ordinary way


def trained(model, batches):
    """Return the weights that one process trains."""
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:
        model(batch).square().mean().backward()
        clipping.apply(optimizer, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def in_ranks(model, batches, prepare):
    """Return the weights that the ranks train, each on its half of a batch, and its host bytes."""
    run_model, optimizer = prepare(model)
    offloader = Offloader(run_model)
    for batch in batches:
        with offloader:
            loss = run_model(batch.chunk(2)[dist.get_rank()]).square().mean()
        loss.backward()
        clipping.apply(optimizer, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    parameters = dict(model.named_parameters())
    return {name: whole(p).detach() for name, p in parameters.items()}, offloader.peak_host_bytes


def sharded(model, *, frees, on_host):
    """Return a model that is fully sharded, and its optimizer."""
    shard_blocks(model, init_device_mesh("cpu", (2,)), frees=frees, on_host=on_host)
    return model, torch.optim.AdamW(model.parameters())


def replicated_with_state_away(model: nn.Module):
    """Return a replica, and an optimizer whose state is offloaded."""
    return replicated.replicate(model), offload_state(torch.optim.AdamW(model.parameters()))


def sharded_with_state_away(model):
    """Return a model that is fully sharded, and an optimizer whose state is offloaded."""
    model, optimizer = sharded(model, frees=True, on_host=False)
    return model, offload_state(optimizer)


WAYS = {
    "zero3": lambda model: sharded(model, frees=True, on_host=True),
    "zero2": lambda model: sharded(model, frees=False, on_host=True),
    "state alone": sharded_with_state_away,
    "replicas": replicated_with_state_away,
}


if __name__ == "__main__":
    main()
