"""What the tests of exported scripts share: a script trains as the step does, bit by bit."""

import torch

from memlab.memory.meter import Meter, record
from memlab.techniques.script import script
from memlab.techniques.step import build_step, set_seed

CPU = torch.device("cpu")
NUM_BLOCKS = 4


def by_step(workload, config, plan=None):
    """Return losses and the model after two updates of the step."""
    step = build_step(workload, config, CPU, plan=plan)
    losses = []
    for _ in range(2):
        set_seed(0)
        losses.append(step())
    return losses, step.model


def by_script(workload, config, plan=None):
    """Return losses and the model after two updates of the script."""
    namespace = {}
    exec(compile(script(config, CPU, plan), "script.py", "exec"), namespace)

    def make_batch():
        set_seed(0)
        batch = workload.make_batch(config.batch_size)
        set_seed(0)
        return batch

    def build_model():
        set_seed(0)
        return workload.build_model()

    batches = (make_batch() for _ in range(2))
    model, losses = namespace["train"](build_model, batches, workload.compute_loss, CPU)
    return losses, model


def peak(run, *args):
    """Return the most bytes that a run allocates at once, and the state that it ends with."""
    found = []

    def keep_the_end():
        losses, model = run(*args)
        found.append(({n: t.tolist() for n, t in model.state_dict().items()}, losses))

    trace = record(keep_the_end, Meter(), CPU)
    return int(trace.nbytes.cumsum().max()), *found[0]


def assert_same(workload, config, plan=None, slack=0):
    step_peak, state, losses = peak(by_step, workload, config, plan)
    script_peak, script_state, script_losses = peak(by_script, workload, config, plan)
    assert script_losses == losses
    set_seed(0)
    before = workload.build_model().state_dict()
    assert all(state[name] != tensor.tolist() for name, tensor in before.items())
    assert script_state == state  # floats bit by bit
    if plan or config.checkpointing == "blocks":  # PyTorch's keeps random numbers for each block
        slack += (NUM_BLOCKS + 1) * torch.get_rng_state().nbytes
    assert abs(script_peak - step_peak) <= slack
