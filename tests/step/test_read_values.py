"""Losses that read values by NumPy or as lists: predicted as measured, and what is assumed said."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss

import memlab
from memlab import Outcome, StepConfig, Workload
from tests.predictions import predicted

optimize = pytest.importorskip("scipy.optimize")
WIDTH, QUERIES, CLASSES, OBJECTS = 32, 12, 5, 3


class SetPrediction(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)

    def forward(self, x):
        found, _ = self.attention(self.queries.expand(len(x), -1, -1), x, x)
        return self.classes(found), self.boxes(found).sigmoid()


def by_matching(model, batch):
    x, labels, boxes = batch
    scores, found = model(x)
    loss = 0
    for i in range(len(x)):
        cost = torch.cdist(found[i], boxes[i], p=1) - scores[i].softmax(-1)[:, labels[i]]
        rows, columns = optimize.linear_sum_assignment(cost.detach().cpu().numpy())
        rows, columns = torch.as_tensor(rows), torch.as_tensor(columns)
        loss = loss + l1_loss(found[i][rows], boxes[i][columns])
        loss = loss + cross_entropy(scores[i][rows], labels[i][columns])
    return loss / len(x)


def by_sorting(model, batch):
    x, _, boxes = batch
    scores, found = model(x)
    best = np.argsort(-np.asarray(scores.detach().max(-1).values), axis=1)[:, :OBJECTS].copy()
    places = torch.from_numpy(best)[..., None].expand(-1, -1, 4)
    return l1_loss(torch.gather(found, 1, places), boxes) + scores.square().mean()


def with_metrics(model, batch):
    x, labels, boxes = batch
    scores, found = model(x)
    loss = l1_loss(found[:, :OBJECTS], boxes) + scores.square().mean()
    chosen = scores.detach().argmax(-1).cpu().numpy()
    counts = np.unique(chosen), np.nonzero(found.detach().numpy() > 0.5), labels.tolist()
    assert counts
    assert f"{loss.detach():.3f} {scores.detach().tolist()}"
    return loss


def workload(compute_loss):
    return Workload(
        name="set",
        build_model=SetPrediction,
        make_batch=lambda n: (
            torch.randn(n, 40, WIDTH),
            torch.randint(CLASSES, (n, OBJECTS)),
            torch.rand(n, OBJECTS, 4),
        ),
        compute_loss=compute_loss,
    )


@pytest.mark.parametrize("compute_loss", [by_matching, by_sorting, with_metrics])
def test_what_reads_an_array_is_predicted_as_measured(compute_loss):
    config, made = StepConfig(batch_size=4), workload(compute_loss)
    found = predicted(config, workload=made)
    measured = memlab.measure(made, config, "cpu", repeats=1, warmup=0, isolate=False)
    assert found.outcome == measured.outcome == Outcome.OK, (found, measured)
    assert found.peak_allocated_bytes == measured.peak_allocated_bytes
    assert any("reads the values of a tensor of shape (" in note for note in found.notes)
    assert found.uncertainty["peak_allocated_bytes"] >= 1


@pytest.mark.parametrize(
    ("read", "device", "says"),
    [
        (lambda x: x.numpy(), "cpu", "requires grad"),
        (lambda x: x.detach().numpy(), "cuda", r"Tensor\.cpu\(\)"),
        (lambda x: x.detach().bfloat16().numpy(), "cpu", "BFloat16"),
        (lambda x: [0.0][x.detach().cpu().tolist()[0].__len__()], "cpu", "list index"),
    ],
)
def test_what_no_tensor_allows_is_refused_as_in_a_real_step(read, device, says):
    def compute_loss(model, batch):
        scores, _ = model(batch[0])
        read(scores)
        return scores.mean()

    found = predicted(StepConfig(batch_size=2), device, workload(compute_loss))
    assert found.outcome == Outcome.FAILED
    assert re.search(says, found.message), found.message
