"""Small workloads that the tests share; importable, so that a worker finds them too."""

import functools

import torch
from torch import nn

from memlab import Workload

IN, OUT = 300, 200
LIBRARY_BYTES = 2048  # tables that bitsandbytes makes at its first use in a process, and keeps


def squared(model, batch):
    """The usual loss: the mean of the squares of what the model returns."""
    return model(batch).square().mean()


def made_of(build_model, make_batch, compute_loss=squared, *, name="made", **fields) -> Workload:
    """A workload over any model; a shape in place of `make_batch` is that of random samples."""
    if isinstance(make_batch, tuple):
        return made_of(
            build_model, lambda n: torch.randn(n, *make_batch), compute_loss, name=name, **fields
        )
    return Workload(
        name=name, build_model=build_model, make_batch=make_batch, compute_loss=compute_loss,
        **fields,
    )  # fmt: skip


def linear(**kwargs) -> Workload:
    """One Linear without bias, (n, IN) -> (n, OUT); its bytes can be counted by hand."""
    return Workload(
        name="linear",
        build_model=lambda: nn.Linear(IN, OUT, bias=False),
        make_batch=lambda n: torch.randn(n, IN),
        compute_loss=lambda model, x: model(x).square().mean(),
        **kwargs,
    )


def blocks(
    *, norm: bool = False, dropout: float = 0.0, width: int = 32, depth: int = 4
) -> Workload:
    """A stack of equal blocks that can be checkpointed and compiled."""

    def build() -> nn.Module:
        def block() -> nn.Module:
            layers: list[nn.Module] = [nn.Linear(width, width)]
            layers += [nn.BatchNorm1d(width)] if norm else []
            layers += [nn.GELU(), nn.Linear(width, width)]
            layers += [nn.Dropout(dropout)] if dropout else []
            return nn.Sequential(*layers)

        return nn.Sequential(*(block() for _ in range(depth)), nn.Linear(width, 3))

    return Workload(
        name="blocks",
        build_model=build,
        make_batch=lambda n: (torch.randn(n, width), torch.randint(3, (n,))),
        compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


def ignored_labels() -> Workload:
    """Token classification in which a varying number of labels is ignored (-100)."""

    def make_batch(n: int):
        labels = torch.randint(5, (n, 7))
        labels[torch.rand(n, 7) < 0.5] = -100
        labels[0] = -100  # a sample without any label
        return torch.randn(n, 7, 6), labels

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Workload(
        name="ignored",
        build_model=lambda: nn.Linear(6, 5),
        make_batch=make_batch,
        compute_loss=loss,
        num_loss_terms=lambda batch: int((batch[1] != -100).sum()),
    )


def half_used() -> Workload:
    """A linear layer that holds another one, `idle`, which its forward does not use."""

    def build() -> nn.Module:
        model = nn.Linear(8, 8)
        model.idle = nn.Linear(8, 8)
        return model

    return Workload(
        name="half-used",
        build_model=build,
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


def run_gradients(workload: Workload, config, seed: int = 0):
    """Return the gradients that a step leaves, by parameter name."""
    from memlab.techniques.step import build_step, set_seed

    step = build_step(workload, config, "cpu", seed=seed)
    set_seed(seed)
    step.accumulate()
    return {name: p.grad.clone() for name, p in step.model.named_parameters()}


def unseen_count():
    """Return what counts its calls where no walk sees it: in a cache of functools."""

    @functools.cache
    def calls(_):
        return None

    def count():
        calls(object())
        return calls.cache_info().misses - 1

    return count


class Awkward(nn.Module):
    """What `to_empty` and `reset_parameters` lose: all of it is done by the constructor alone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.full((8,), 0.5))  # no module's own
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.table = torch.tensor([1.0, 2.0, 4.0])  # no buffer
        self.mixer = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.project = nn.Linear(8, 8)
        nn.init.orthogonal_(self.project.weight)
        nn.init.trunc_normal_(self.attention.in_proj_weight, std=0.02)
        self.attention.out_proj.weight.data.normal_(0, 0.01)
        self.apply(lambda m: isinstance(m, nn.Linear) and nn.init.constant_(m.bias, 0.1))

    def apply(self, fn):
        for module in self.modules():
            if getattr(module, "bias", None) is not None and module is not self:
                fn(module)
