"""Small models whose layers several ranks divide, or cannot."""

from dataclasses import replace

import torch
from torch import nn

from memlab import Workload
from memlab.techniques.batches import map_tensors

IN, HIDDEN, OUT = 12, 32, 6
WIDTH, HEADS, TOKENS, WORDS = 16, 4, 6, 40


def mlp():
    """Two linear layers; what each of two ranks holds can be counted by hand."""
    return Workload(
        name="two-layers",
        build_model=lambda: nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT)),
        make_batch=lambda n: (torch.randn(n, IN), torch.randn(n, OUT)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


class Attention(nn.Module):
    """Attention whose queries and keys are normalised in each head, by shared weights."""

    def __init__(self, num_heads, dropout):
        super().__init__()
        self.size, self.num_heads, self.dropout = WIDTH // HEADS, num_heads, dropout
        self.query, self.key, self.value = (
            nn.Linear(WIDTH, num_heads * self.size) for _ in range(3)
        )
        self.query_norm, self.key_norm = nn.LayerNorm(self.size), nn.RMSNorm(self.size)
        self.out = nn.Linear(num_heads * self.size, WIDTH)

    def forward(self, x):
        query, key, value = (
            layer(x).view(*x.shape[:2], -1, self.size)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            self.query_norm(query).transpose(1, 2),
            self.key_norm(key).transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated perceptron, with dropout where every rank has the whole."""

    def __init__(self, num_heads, dropout):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention(num_heads, dropout)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2 if dropout else 0.0)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y = self.norm(x)
        return x + self.dropout(self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


class Decoder(nn.Module):
    """Blocks between an embedding with padding and a head that shares its weight."""

    def __init__(self, num_heads=HEADS, dropout=0.0, padding=3):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block(num_heads, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Mixing(nn.Module):
    """Two layers with something between them, most of which needs all features."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
        if what == "gate":
            self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, given):
        x = self.up(given)
        if self.what == "norm":
            x = nn.functional.layer_norm(x, (HIDDEN,))
        elif self.what == "softmax":
            x = x.softmax(-1)
        elif self.what == "mean":
            x = x - x.mean(-1, keepdim=True)
        elif self.what == "flip":
            x = x.flip(-1)
        elif self.what == "parts":
            one, two = x.chunk(2, -1)
            x = torch.cat([two, one], -1)
        elif self.what == "dropout":
            x = nn.functional.dropout(x, 0.3)
        elif self.what == "detour":
            self.seen = x.detach().sum()
        elif self.what == "gate":
            x = x * given.mean(-1, keepdim=True) * self.scale
        elif self.what == "outside":
            return self.down(x) + x[:, :OUT]
        return self.down(x)


class Named(nn.Module):
    """Gives its layers their input by name."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)  # divided by its features
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.words(input=words)
        return self.head(input=x + self.down(input=torch.relu(self.up(input=x))))


class Gated(nn.Module):
    """Two layers that share their input, which needs a gradient, and one after them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(IN))
        self.gate, self.up = nn.Linear(IN, HIDDEN), nn.Linear(IN, HIDDEN)
        self.down = nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        x = x * self.scale
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class LookedUp(nn.Module):
    """An embedding whose output is saved: by a normalisation, beside which it is added."""

    def __init__(self, is_tied):
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=not is_tied)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words)
        return self.head(x + self.down(self.up(self.norm(x)).relu()))


class Shared(nn.Module):
    """A weight of an embedding that never runs itself, as in T5, BART and Marian."""

    def __init__(self):
        super().__init__()
        self.shared, self.words = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.words.weight = self.shared.weight
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        return self.head(torch.tanh(self.words(words)))


class UsedOutside(nn.Module):
    """A head that is the embedding's weight without a layer of its own, as in nanoGPT's kin."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, words):
        weight = self.words.weight
        if self.what == "before":
            x = torch.nn.functional.one_hot(words, WORDS).to(weight.dtype) @ weight
        else:
            x = 0.0
        x = x + self.words(words)
        x = x + self.down(torch.relu(self.up(x)))
        return nn.functional.linear(x, weight.detach() if self.what == "detached" else weight)


def named():
    """The workload of a model that gives its layers their input by name."""
    return replace(shared(), name="named", build_model=Named)


def gated():
    """The workload of such layers."""
    return Workload(
        name="gated",
        build_model=Gated,
        make_batch=lambda n: (torch.randn(n, IN), torch.randn(n, OUT)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


def mixing(what):
    """The workload of a model whose two layers cannot be divided together."""
    return Workload(
        name=f"mixing-{what}",
        build_model=lambda: Mixing(what),
        make_batch=lambda n: (torch.randn(n, IN), torch.randn(n, OUT)),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


def decoder(**options):
    """The workload of a decoder: it repeats its input."""
    return _repeating("decoder", lambda: Decoder(**options))


def looked_up(*, is_tied=False):
    """The workload of a model whose embedding's output stays until backward."""
    return _repeating("tied" if is_tied else "looked-up", lambda: LookedUp(is_tied))


def shared():
    """The workload of a model that holds a weight twice and runs one of its holders."""
    return _repeating("shared", Shared)


def used_outside(what=""):
    """The workload of a model that reads a weight by itself: also before its layer, or detached."""
    return _repeating(f"used-outside{what}", lambda: UsedOutside(what))


def in_fp64(workload):
    """The workload of the same model in a format that rounds a billion times less."""

    def make_batch(num_samples):
        return map_tensors(lambda t: t.double() if t.is_floating_point() else t,
                           workload.make_batch(num_samples))  # fmt: skip

    return replace(
        workload, build_model=lambda: workload.build_model().double(), make_batch=make_batch
    )


def _repeating(name, build_model):
    return Workload(
        name=name,
        build_model=build_model,
        make_batch=lambda n: torch.randint(WORDS, (n, TOKENS)),
        compute_loss=lambda model, words: nn.functional.cross_entropy(
            model(words).flatten(0, 1), words.flatten()
        ),
    )
