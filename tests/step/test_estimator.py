"""`StepClassifier` in scikit-learn: the updates of skorch's own optimizer, in its own tools."""

import functools
import re

import numpy as np
import pytest
import torch
from torch import nn

from memlab import StepConfig
from memlab.errors import UnsupportedError
from memlab.workloads.data import digits_images
from tests import ROOT

pytest.importorskip("skorch", reason="needs memlab[sklearn]")
pytestmark = pytest.mark.slow  # importing scikit-learn and skorch takes seconds

CONFIG = StepConfig(batch_size=64, optimizer="adam")


class Digits(nn.Module):
    """Two equal blocks between a linear layer on 64 pixels and one on 10 classes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in "12"))
        self.last = nn.Linear(32, 10)

    def forward(self, pixels):
        return self.last(self.blocks(self.first(pixels)))


@functools.cache
def digits():
    images, labels = digits_images()
    return images.reshape(len(images), -1)[:600], labels[:600].astype(np.int64)


def fitted(kind, *args, **options):
    torch.manual_seed(0)
    options = {"train_split": None, "verbose": 0, "max_epochs": 3, **options}
    return kind(Digits, *args, criterion=nn.CrossEntropyLoss, **options).fit(*digits())


@pytest.mark.parametrize(
    "fields", [{}, {"accumulation_steps": 4}, {"checkpointing": "blocks"}, {"memory_budget": 0.5}]
)
def test_it_trains_as_skorch_with_its_own_optimizer(fields):
    from skorch import NeuralNetClassifier

    from memlab.integrations.estimator import StepClassifier

    plain = fitted(NeuralNetClassifier, optimizer=torch.optim.Adam, lr=1e-3, batch_size=64)
    ours = fitted(StepClassifier, StepConfig(batch_size=64, optimizer="adam", **fields))
    inputs, _ = digits()
    np.testing.assert_allclose(ours.predict_proba(inputs), plain.predict_proba(inputs), atol=1e-5)
    losses = [epoch["train_loss"] for epoch in ours.history]
    assert losses == pytest.approx([epoch["train_loss"] for epoch in plain.history], rel=1e-5)
    assert ours.step_.num_updates == 3 * -(-len(inputs) // 64)
    assert str(ours.step_.config) == str(StepConfig(batch_size=64, optimizer="adam", **fields))


def test_it_works_in_a_pipeline_with_cross_validation_and_a_search():
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    from memlab.integrations.estimator import StepClassifier

    torch.manual_seed(0)
    net = StepClassifier(Digits, CONFIG, max_epochs=20, verbose=0)
    scaled = FunctionTransformer(lambda pixels: (2 * pixels - 1).astype(np.float32))
    pipeline = make_pipeline(scaled, net)
    scores = cross_val_score(pipeline, *digits(), cv=3)
    assert len(scores) == 3
    assert min(scores) > 0.7  # chance is 0.1

    configs = [CONFIG, StepConfig(batch_size=64, optimizer="sgd")]
    search = GridSearchCV(pipeline, {"stepclassifier__config": configs}, cv=2).fit(*digits())
    assert search.best_params_["stepclassifier__config"] == CONFIG
    assert search.best_estimator_.named_steps["stepclassifier"].step_.config == CONFIG


def test_training_goes_on_and_ranks_are_refused():
    from memlab.integrations.estimator import StepClassifier

    net = fitted(StepClassifier, CONFIG, max_epochs=1)
    before = net.step_
    net.partial_fit(*digits())
    assert net.step_ is before
    assert net.step_.num_updates == 2 * -(-len(digits()[0]) // 64)
    with pytest.raises(UnsupportedError, match="which is one process"):
        fitted(StepClassifier, StepConfig(sharding="ddp", world_size=2))


def test_the_example_of_the_page_runs():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    [example] = [code for code in re.findall(r"```python\n(.+?)```", page, re.S) if "cv=3" in code]
    names = {}
    exec(compile(example, "training.md", "exec"), names)
    assert min(names["scores"]) > 0.8  # chance is 0.1
