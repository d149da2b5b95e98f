"""Sparse gradients of embeddings: predicted as they are measured, and verified."""

import dataclasses

import pytest
import torch

import memlab
from memlab import Outcome, StepConfig, Workload
from tests.models import blocks, made_of
from tests.predictions import error_of, predicted

TOKENS, PER_SAMPLE, WIDTH = 300, 6, 32


def embedding(**options) -> torch.nn.Module:
    return torch.nn.Embedding(TOKENS, WIDTH, sparse=True, **options)


def with_head(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 4))


def bag(mode: str) -> torch.nn.Module:
    return with_head(torch.nn.EmbeddingBag(TOKENS, WIDTH, mode=mode, sparse=True))


class Twice(torch.nn.Module):
    """Two sparse gradients of one weight, which autograd adds."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = embedding(), torch.nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.embedding(x) * self.embedding(x).sin())


class Tied(torch.nn.Module):
    """A weight that gets sparse gradients and a dense one, which autograd adds."""

    def __init__(self):
        super().__init__()
        self.embedding = embedding()

    def forward(self, x):
        return self.embedding(x) @ self.embedding.weight.t()


class BySample(torch.nn.Module):
    """Bags whose places are given by offsets, and which weigh what they sum."""

    def __init__(self):
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(
            TOKENS, WIDTH, mode="sum", sparse=True, include_last_offset=True
        )

    def forward(self, x):
        offsets = torch.arange(0, x.numel() + 1, PER_SAMPLE)
        return self.bag(x.flatten(), offsets, per_sample_weights=torch.ones(x.numel()))


MODELS = {
    "embedding": lambda: with_head(embedding()),
    "padded": lambda: with_head(embedding(padding_idx=3)),
    "bag of means": lambda: bag("mean"),
    "bag of weighted sums": BySample,
    "twice": Twice,
    "tied": Tied,
}


def workload_of(name: str) -> Workload:
    return dataclasses.replace(
        blocks(),
        name=name,
        build_model=MODELS[name],
        make_batch=lambda n: torch.randint(TOKENS, (n, PER_SAMPLE)),
        compute_loss=lambda model, batch: model(batch).square().mean(),
    )


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_the_backward_of_a_bag_is_predicted_to_the_byte(mode):
    """Its peak is in the backward of the bag, which counts the indices of each bag of a sum."""
    workload = dataclasses.replace(workload_of("embedding"), build_model=lambda: bag(mode))
    assert error_of(workload, StepConfig(batch_size=64, optimizer="sgd")) == 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_a_sum_over_micro_batches_is_predicted_to_the_byte(name):
    config = StepConfig(batch_size=32, accumulation_steps=4, optimizer="sgd")
    assert error_of(workload_of(name), config) == 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["bag of means", "twice"])
@pytest.mark.parametrize("implementation", ["default", "foreach"])
def test_a_momentum_that_grows_is_predicted_to_the_byte(name, implementation):
    config = StepConfig(
        batch_size=16, optimizer="sgd-momentum", optimizer_implementation=implementation
    )
    assert error_of(workload_of(name), config) == 0


@pytest.mark.parametrize(
    "config",
    [
        StepConfig(batch_size=16, optimizer="sgd", precision="bf16-mixed"),
        StepConfig(batch_size=16, optimizer="sgd", optimizer_in_backward=True),
        StepConfig(batch_size=16, optimizer="sgd", accumulation_steps=2, precision="bf16"),
    ],
    ids=str,
)
def test_other_settings_are_predicted_to_the_byte(config):
    assert error_of(workload_of("embedding"), config) == 0


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum"])
def test_a_card_is_predicted(optimizer):
    config = StepConfig(batch_size=16, accumulation_steps=2, optimizer=optimizer)
    result = memlab.predict(workload_of("bag of means"), config, "h200")
    assert result.outcome == Outcome.OK, result.message


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_an_optimizer_that_takes_none_is_an_outcome(device):
    result = memlab.predict(workload_of("embedding"), StepConfig(optimizer="adamw"), device)
    assert result.outcome == Outcome.FAILED
    assert "sparse" in result.message


def test_what_is_not_known_is_refused_by_name():
    config = StepConfig(optimizer="sgd", precision="bf16-master")
    result = memlab.predict(workload_of("embedding"), config, "cpu")
    assert result.outcome == Outcome.UNSUPPORTED
    assert "sparse=False" in result.message


@pytest.mark.parametrize(
    "config",
    [
        StepConfig(
            batch_size=8,
            optimizer="sgd-momentum",
            checkpointing="blocks",
            checkpoint_modules="Linear",
        ),
        StepConfig(batch_size=8, optimizer="sgd", optimizer_in_backward=True),
    ],
    ids=str,
)
def test_verify_compares_sparse_gradients_and_momenta(config):
    report = memlab.verify(workload_of("embedding"), config, "cpu")
    assert report.ok, report


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_sparse_data_is_refused_in_a_sentence(layout, is_buffer):
    def adjacency():
        return torch.eye(8).to_sparse(layout=layout)

    class Graph(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            if is_buffer:
                self.register_buffer("adjacency", adjacency())

        def forward(self, x, edges=None):
            return torch.sparse.mm(self.adjacency if is_buffer else edges, self.layer(x))

    made = made_of(
        Graph,
        lambda n: (torch.randn(8, 4), *(() if is_buffer else (adjacency(),))),
        lambda model, batch: model(*batch).mean(),
        count_samples=lambda batch: 1,
        split_batch=lambda batch, sizes: [batch],
    )
    for device in ("cpu", "h200"):
        found = predicted(StepConfig(batch_size=1), device, made)
        assert found.outcome == Outcome.UNSUPPORTED, found.message
        assert f"of layout {str(layout).removeprefix('torch.')} and shape (8, 8)" in found.message
