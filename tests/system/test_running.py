"""What an error of a run means: torch's own errors, raised by torch, get a remedy."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import memlab
from memlab import StepConfig
from memlab.running import REMEDIES, explain
from tests.models import made_of

FLOATS, LABELS = torch.ones(2, 4), torch.tensor([1, 2])


class ChangesItsWeight(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.ones(4)), change

    def forward(self, x):
        self.change(self.weight)
        return x * self.weight


def change_what_is_saved():
    x = torch.ones(2, requires_grad=True).exp()
    y = x * 2
    x.add_(1)
    y.sum().backward()


def backward_twice():
    loss = torch.ones(2, requires_grad=True).exp().sum()
    loss.backward()
    loss.backward()


ERRORS = {
    "leaf": (lambda: functional.relu_(nn.Linear(4, 4).weight), "changes a parameter in place"),
    "view-of-leaf": (lambda: nn.Linear(4, 4).weight[0].zero_(), "changes a parameter in place"),
    "saved": (change_what_is_saved, "not in place"),
    "twice": (backward_twice, "detach()"),
    "device": (lambda: FLOATS * torch.ones(4, device="meta"), "device=x.device"),
    "label": (
        lambda: functional.cross_entropy(FLOATS, LABELS + 2),
        "as many outputs as there are classes",
    ),
    "negative-label": (
        lambda: functional.cross_entropy(FLOATS, LABELS - 3),
        "0 to the number of outputs",
    ),
    "index": (lambda: functional.embedding(LABELS, torch.ones(2, 4)), "num_embeddings"),
    "float-label": (lambda: functional.cross_entropy(FLOATS, LABELS.float()), ".long()"),
    "float-index": (lambda: functional.embedding(FLOATS, torch.ones(2, 4)), ".long()"),
    "format": (lambda: nn.Linear(4, 4).bfloat16()(FLOATS), "weight.dtype"),
    "images": (lambda: nn.Conv2d(1, 1, 1)(torch.ones(1, 1, 2, 2).byte()), "weight.dtype"),
    "lone-sample": (lambda: nn.BatchNorm1d(4)(FLOATS[:1]), "raise batch_size"),
    "features": (lambda: nn.Linear(3, 4)(FLOATS), "in_features"),
    "shape": (
        lambda: functional.binary_cross_entropy_with_logits(FLOATS[:, :1], FLOATS[:, 0]),
        "unsqueeze(1)",
    ),
    "logits": (lambda: functional.binary_cross_entropy(FLOATS * 2, FLOATS), "with_logits"),
    "view": (lambda: FLOATS.t().view(-1), ".reshape"),
    "closure": (lambda: torch.optim.LBFGS([nn.Parameter(FLOATS)]).step(), "the one it is built on"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_torch_says_what_to_do(name):
    fail, remedy = ERRORS[name]
    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as caught:
        fail()
    outcome, message = explain(caught.value, "forward")
    assert outcome == "failed"
    assert message.startswith(f"forward raised {caught.type.__name__}: ")
    assert remedy in message.partition("; ")[2]


def test_every_pattern_finds_what_torch_says_today():
    missed = set(REMEDIES.values())
    for fail, _ in ERRORS.values():
        with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as caught:
            fail()
        missed -= {remedy for remedy in missed if remedy in explain(caught.value, "forward")[1]}
    assert missed == {REMEDIES["device-side assert"]}  # of a card


@pytest.mark.parametrize("function", [memlab.measure, memlab.predict, memlab.verify])
def test_a_model_that_changes_its_weight_is_told_what_to_do(function):
    workload = made_of(
        lambda: ChangesItsWeight(functional.relu_),
        lambda n: torch.ones(n, 4),
        lambda model, batch: model(batch).mean(),
    )
    options = {} if function is memlab.predict else {"isolate": False}
    found = function(workload, StepConfig(batch_size=2), "cpu", **options)
    said = found.why if function is memlab.verify else found.message
    assert found.outcome == "failed"
    assert "leaf Variable" in said
    assert said.endswith("or change it under torch.no_grad()")


def test_an_error_that_nobody_knows_is_left_as_it_is():
    assert explain(KeyError("hidden"), "forward") == ("failed", "forward raised KeyError: 'hidden'")
