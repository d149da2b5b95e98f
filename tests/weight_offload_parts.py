"""What the tests of offloaded weights share: models, and the state after some updates."""

import torch
from torch import nn

from memlab import Workload
from memlab.devices.cards import resolve
from memlab.prediction.planning import plan_in_process
from memlab.prediction.plans import plan_for
from memlab.techniques.step import build_step, set_seed
from memlab.workloads.language import Gpt
from tests.models import blocks

CPU = torch.device("cpu")
OFFLOADED = {"offload_parameters": True}


def mute(_):
    pass


def plan_of(workload, config):
    def run(_, arguments):
        return plan_in_process(**arguments, report=mute)

    return plan_for(workload, config, resolve("cpu"), seed=0, run=run)


def after_updates(workload, config, num_updates=3):
    """Return the losses of some updates and what the weights are then."""
    step = build_step(workload, config, CPU, plan=plan_of(workload, config))
    losses = []
    for _ in range(num_updates):
        set_seed(0)
        losses.append(step())
    assert step.offloader is None or step.offloader.host_bytes == 0
    values = {name: step.value_of(p).detach() for name, p in step.model.named_parameters()}
    return losses, values


class Layer(nn.Module):
    """`nn.MultiheadAttention` reads the weight of its `out_proj` itself."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))  # of a module with others inside

    def forward(self, x):
        return x + self.attend(x, x, x, need_weights=False)[0] * self.scale


class Attention(nn.Module):
    """Weights that are tied, written in a forward, or read by others than their modules."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8, max_norm=1.0)  # written by its own forward
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.gain = nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(nn.functional.linear(x, self.gain.weight.t() @ self.gain.weight))


def attention():
    return Workload(
        name="attention",
        build_model=Attention,
        make_batch=lambda n: torch.randint(10, (n, 4)),
        compute_loss=lambda model, tokens: (
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            + model.gain.bias.square().mean()  # read outside of all modules
        ),
    )


class Normed(nn.Module):
    """A computed weight, a norm with buffers, dropout, an RNN, a frozen layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(4))

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)))
        x = self.frozen(self.rnn(x[:, None])[0][:, 0])
        for layer in self.layers:
            x = x + layer(x)
        return x


def normed():
    return Workload(
        name="normed",
        build_model=Normed,
        make_batch=lambda n: torch.randn(n, 6),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


def gpt():
    sizes = {"num_layers": 3, "hidden_size": 16, "num_heads": 2, "sequence_length": 8}
    return Gpt(vocab_size=300, **sizes).workload("gpt")


class Odd(nn.Module):
    """Weights that are read in backward: by recomputes of the model's own, and by hooks."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.conv, self.last = nn.Linear(6, 6), nn.Conv1d(6, 6, 1), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.clamped = nn.Linear(6, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6)) for _ in range(3)
        )

    def forward(self, x):
        if not any(parameter._backward_hooks for parameter in self.last.parameters()):
            for parameter in self.last.parameters():
                parameter.register_hook(lambda g, p=parameter: g * (p.abs() > 0.2) + 0.1 * p)
        checkpoint, reentrant = torch.utils.checkpoint.checkpoint, self.reentrant
        x = checkpoint(self.conv, self.first(x)[..., None], use_reentrant=reentrant)[..., 0]
        x = checkpoint(lambda x: x * self.scale, x, use_reentrant=False)
        self.clamped.weight.data.clamp_(-0.2, 0.2)
        for layer in self.layers:
            x = layer(x)
        return self.last(self.clamped(x))


def odd(reentrant=False):
    return Workload(
        name="odd",
        build_model=lambda: Odd(reentrant),
        make_batch=lambda n: torch.randn(n, 6),
        compute_loss=lambda model, x: (
            model(x).square().mean() + 1e-2 * sum(p.square().sum() for p in model.parameters())
        ),
    )


WORKLOADS = {"odd": odd, "blocks": blocks, "attention": attention, "normed": normed, "gpt": gpt}
