"""Models for ranks, one of them wrong in one rank, and ranks that torch's launcher starts."""

import json
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from memlab import Workload
from memlab.runtime import start
from tests import ROOT

WIDTH = 64


class Faulty(nn.Module):
    """Blocks; in its second forward rank 1 does something, and writes a file first if asked to."""

    def __init__(self, fault, sign):
        super().__init__()
        self.fault, self.sign, self.num_calls = fault, sign, 0
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        )

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls == 2 and dist.is_initialized() and dist.get_rank() == 1:
            if self.sign:
                self.sign.touch()
            FAULTS[self.fault]()
        return self.blocks(x)


def wait_for_ever():
    while True:
        time.sleep(0.1)


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def take_too_much():
    torch.empty(10**15)


def raise_an_error():
    raise ValueError("only here")


FAULTS = {
    "": lambda: None,
    "hang": wait_for_ever,
    "kill": kill_myself,
    "memory": take_too_much,
    "error": raise_an_error,
    "exit": lambda: os._exit(3),
}


def faulty(fault="", sign=None):
    """The workload of a model that goes wrong in one way; `sign` is the path of a file."""
    return Workload(
        name=f"faulty-{fault or 'not'}",
        build_model=lambda: Faulty(fault, sign),
        make_batch=lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


def tokens(n):
    labels = torch.randint(5, (n, 6))
    labels[torch.rand(n, 6) < 0.5] = -100
    labels[:, 0] = 1
    return torch.randn(n, 6, 8), labels


class Odd(nn.Module):
    """Normalises over the batch and drops out."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2))
        )
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.norm(self.blocks(x)))


ODD = Workload(
    name="odd",
    build_model=Odd,
    make_batch=tokens,
    compute_loss=lambda model, batch: nn.functional.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten()
    ),
    num_loss_terms=lambda batch: int((batch[1] >= 0).sum()),
)


class Half(nn.Module):
    """What the blocks of either half have: a layer between a residual and its activation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.layer(x))


class Encoding(Half):
    """A block of the encoder."""


class Decoding(Half):
    """A block of the decoder, which reads what the encoder made."""

    def forward(self, x, memory):
        return super().forward(x + memory)


class TwoStacks(nn.Module):
    """An encoder and a decoder, whose blocks are of two classes."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Encoding() for _ in range(3))
        self.decoder = nn.ModuleList(Decoding() for _ in range(3))

    def forward(self, x):
        memory = x
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return x


def two_stacks():
    """The workload of an encoder and a decoder."""
    return Workload(
        name="two-stacks",
        build_model=TwoStacks,
        make_batch=lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


def running():
    """Return the ranks that this test process or one of its workers has started, as `ps` does."""
    command = ["ps", "axeww", "-o", "args"]  # with the environment of each process
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    of_this_copy = f'{start.__file__} {{"rank_folder"'
    found = [line for line in listed.stdout.splitlines() if of_this_copy in line]
    name = os.environ.get("PYTEST_XDIST_WORKER")
    return [line for line in found if name is None or f" PYTEST_XDIST_WORKER={name} " in f"{line} "]


def left_running():
    """Return the ranks that are still running; those of other tests end by themselves."""
    for _ in range(50):
        found = running()
        if not found:
            return []
        time.sleep(0.2)
    return found


def trained(num_ranks, *arguments):
    """Return the losses that ranks print; torch's launcher starts them if there are several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), "-m", "tests.rank_training"]
    done = subprocess.run(
        [*command, *map(str, arguments[:-1]), json.dumps(arguments[-1])],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float.fromhex(loss) for loss in json.loads(done.stdout.strip().splitlines()[-1])]
