"""What holds the peak of a rank: the memory of libraries is told from that of the model."""

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, explain
from memlab.arguments.units import MIB
from memlab.trace import Category
from tests.predictions import predicted

LINEAR = (64 + 1) * 64 * 4  # bytes of a linear layer of this width


def replicated(build_model, compute_loss, device):
    """Return what is predicted of one of two ranks with a model each."""
    workload = Workload(
        name="replicated",
        build_model=build_model,
        make_batch=lambda n: torch.randn(n, 64),
        compute_loss=compute_loss,
    )
    config = StepConfig(sharding="ddp", world_size=2, batch_size=4)
    return predicted(config, device, workload)


@pytest.mark.parametrize(("make", "named_bytes"), [(torch.ones, LINEAR), (torch.empty, 0)])
def test_what_a_loss_keeps_is_not_called_buckets(make, named_bytes):
    kept = []

    def loss(model, batch):
        if not kept:
            kept.append(make(300, 64))
        return model(batch).square().mean()

    explained = explain(replicated(lambda: nn.Linear(64, 64), loss, "cpu"))
    # what another operator made is told apart; an empty tensor is not, so nothing is named
    assert sum(row.nbytes for row in explained.rows if row.is_bucket) == named_bytes
    rest = [row for row in explained.rows if row.category is Category.BUFFERS and not row.is_bucket]
    assert sum(row.nbytes for row in rest) == 300 * 64 * 4 + LINEAR - named_bytes


def test_the_workspace_of_a_product_in_the_loss_is_not_called_buckets():
    def loss(model, batch):
        return (model(batch) @ torch.ones(64, 64, device=batch.device)).square().mean()

    explained = explain(replicated(lambda: nn.LayerNorm(64), loss, "h100"))
    spaces = [row for row in explained.rows if row.is_workspace]
    assert sum(row.nbytes for row in spaces) == 2 * 32 * MIB  # of forward and of backward
    assert not any(row.is_bucket or "buckets" in str(row) for row in spaces)
    assert any(row.is_bucket for row in explained.rows)
