"""What holds the peak of a rank: the memory of libraries is told from that of the model."""

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, explain
from memlab._util.units import MIB
from memlab.figures.look import category_names
from memlab.search.holdings import CUBLAS
from memlab.trace import Category
from tests.predictions import predicted

LINEAR = (64 + 1) * 64 * 4  # bytes of a linear layer of this width


def of_two(build_model, compute_loss, device, sharding="ddp"):
    """Return what is predicted of one of two ranks."""
    workload = Workload(
        name="of-two",
        build_model=build_model,
        make_batch=lambda n: torch.randn(n, 64),
        compute_loss=compute_loss,
    )
    config = StepConfig(sharding=sharding, world_size=2, batch_size=4)
    return predicted(config, device, workload)


@pytest.mark.parametrize(("make", "named_bytes"), [(torch.ones, LINEAR), (torch.empty, 0)])
def test_what_a_loss_keeps_is_not_called_buckets(make, named_bytes):
    kept = []

    def loss(model, batch):
        if not kept:
            kept.append(make(300, 64))
        return model(batch).square().mean()

    explained = explain(of_two(lambda: nn.Linear(64, 64), loss, "cpu"))
    # what another operator made is told apart; an empty tensor is not, so nothing is named
    assert sum(row.nbytes for row in explained.rows if row.is_bucket) == named_bytes
    rest = [row for row in explained.rows if row.category is Category.BUFFERS and not row.is_bucket]
    assert sum(row.nbytes for row in rest) == 300 * 64 * 4 + LINEAR - named_bytes


def test_the_workspace_of_a_product_in_the_loss_is_not_called_buckets():
    def loss(model, batch):
        return (model(batch) @ torch.ones(64, 64, device=batch.device)).square().mean()

    explained = explain(of_two(lambda: nn.LayerNorm(64), loss, "h100"))
    spaces = [row for row in explained.rows if row.is_workspace]
    assert sum(row.nbytes for row in spaces) == 2 * 32 * MIB  # of forward and of backward
    assert not any(row.is_bucket or "buckets" in str(row) for row in spaces)
    assert any(row.is_bucket for row in explained.rows)


@pytest.mark.parametrize("sharding", ["zero3", "tensor"])
def test_the_workspace_of_a_trial_is_not_called_buffers(sharding):
    def build():
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    # layers are divided by a trial, which multiplies before the step begins
    result = of_two(build, lambda model, x: model(x).square().mean(), "h100", sharding)
    kept = [row for row in explain(result).rows if row.category is Category.BUFFERS]
    spaces = [row for row in kept if row.operator in CUBLAS]
    assert all(row.is_workspace for row in spaces)
    assert sum(row.nbytes for row in spaces) == 2 * 32 * MIB  # of forward and of backward
    assert "workspace" in category_names(result)[Category.BUFFERS]
