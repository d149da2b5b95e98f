"""What the tests of the loss of language models share: a head, labels, and losses over them."""

import dataclasses

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from memlab.workloads.language import Gpt
from tests.models import made_of

FEATURES, CLASSES = 6, 11
GPT = Gpt(num_layers=2, hidden_size=32, num_heads=2, sequence_length=32, vocab_size=2000)


class Head(nn.Module):
    """One linear head over (n, length, FEATURES), and a loss of its logits."""

    def __init__(self, loss, bias=True):
        super().__init__()
        self.head, self.loss = nn.Linear(FEATURES, CLASSES, bias=bias), loss

    def forward(self, hidden, labels):
        return self.loss(self.head(hidden), labels)


def labels_of(shape, ignored=False):
    labels = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(1))
    if ignored:
        labels.flatten()[::3] = -100
    return labels


def shifted(logits, labels):
    return cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, CLASSES), labels[:, 1:].reshape(-1)
    )


LOSSES = {
    "mean": lambda x, y: cross_entropy(x.flatten(0, 1), y.flatten()),
    "sum": lambda x, y: cross_entropy(x.view(-1, x.size(-1)), y.view(-1), reduction="sum"),
    "none": lambda x, y: cross_entropy(x.transpose(-1, -2), y, reduction="none").square().mean(),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.reshape(-1, CLASSES), y.reshape(-1)),
    "classes second": lambda x, y: cross_entropy(x.transpose(1, 2), y),
    "permuted": lambda x, y: cross_entropy(x.permute(0, 2, 1), y),
    "shifted by one": shifted,
    "smoothed": lambda x, y: cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "other index": lambda x, y: cross_entropy(
        x.flatten(0, 1), y.flatten().clamp(min=4), ignore_index=4
    ),
    "in fp64": lambda x, y: cross_entropy(x.double().flatten(0, 1), y.flatten()),
    "of a mask": lambda x, y: cross_entropy(x[y != 2], y[y != 2]),
    "last token": lambda x, y: cross_entropy(x[:, -1], y[:, -1]),
    "two losses": lambda x, y: (
        cross_entropy(x[:2].flatten(0, 1), y[:2].flatten())
        + cross_entropy(x[2:].flatten(0, 1), y[2:].flatten())
    ),
}
NO_HEAD = made_of(lambda: nn.Conv1d(2, 3, 1), (2, 5), lambda model, x: model(x).mean())
UNUSED = dataclasses.replace(
    NO_HEAD,
    build_model=lambda: nn.ModuleList([nn.Conv1d(2, 3, 1), nn.Linear(3, 4)]),
    compute_loss=lambda model, x: model[0](x).mean(),
)


def assert_same_loss(loss, apply, labels, bias=True):
    """Hold loss and gradients (hidden, weight, bias) of a changed head against a plain one's."""
    hidden, found = torch.randn(4, 5, FEATURES), []
    for change in (lambda model: None, apply):
        torch.manual_seed(0)
        model = Head(loss, bias)
        change(model)
        given = hidden.clone().requires_grad_()
        value = model(given, labels)
        (3.0 * value).backward()  # as a loss scale does
        found.append([value, given.grad, *(p.grad for p in model.parameters())])
    for plain, changed in zip(*found, strict=True):
        torch.testing.assert_close(changed, plain, rtol=1e-5, atol=1e-6)
