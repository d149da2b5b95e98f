"""Values that a step draws, keeps, mixes or reads: what they decide is predicted to the byte."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, l1_loss

from memlab import Outcome, StepConfig, Workload, measure, workloads
from memlab.trace import PHASES, Phase
from memlab.tracing.data_dependent import Draws
from tests.models import made_of
from tests.predictions import assert_predicted, predicted
from tests.processor import has_bf16_kernels


class Drops(nn.Module):
    """Layers with dropout, each skipped by chance, and at most some rows kept by a random mask."""

    def __init__(self, skips, width=32):
        super().__init__()
        self.skips = skips
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.GELU()) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            if not self.skips(x):
                x = layer(x)
        return x


def by_number(x):
    return torch.rand([]) < 0.5


def by_number_in_place(x):
    return torch.empty(1).uniform_().item() < 0.5


def by_whole_number(x):
    return int(torch.randint(0, 2, (1,))) == 1


def by_normal_number(x):
    return torch.randn(3).sum() > 0


def workload(model):
    return made_of(model, lambda n: torch.ones(n, 32), name="by chance")


class Masked(nn.Module):
    """Keeps the rows that a random mask selects."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.drop(self.first(x))
        return self.last(x[torch.rand(x.shape[0]) < 0.4])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "model",
    [
        lambda: Drops(by_number),
        lambda: Drops(by_number_in_place),
        lambda: Drops(by_whole_number),
        lambda: Drops(by_normal_number),
        Masked,
    ],
    ids=["number", "number in place", "whole number", "normal number", "mask"],
)
@pytest.mark.parametrize(("accumulation_steps", "seed"), [(1, 0), (3, 1)])
def test_chance_is_foreseen(model, accumulation_steps, seed):
    config = StepConfig(batch_size=24, accumulation_steps=accumulation_steps)
    found, _ = assert_predicted(workload(model), config, seed=seed)
    assert found.uncertainty["peak_allocated_bytes"] < 0.1
    assert not [note for note in found.notes if "assumed" in note]


@pytest.mark.slow
def test_other_seeds_take_other_ways():
    config = StepConfig(batch_size=24)
    given = workload(lambda: Drops(by_number))
    peaks = {predicted(config, workload=given, seed=seed).peak_allocated_bytes for seed in range(3)}
    assert len(peaks) > 1


def test_what_rejects_numbers_is_not_followed():
    def skips(x):
        torch.poisson(torch.ones(3))
        return torch.rand([]) < 0.5

    found = predicted(StepConfig(batch_size=4), workload=workload(lambda: Drops(skips)))
    assert any("assumed False" in note for note in found.notes)
    assert found.uncertainty["peak_allocated_bytes"] > 1


def test_models_without_branches_draw_nothing(monkeypatch):
    followed = []
    monkeypatch.setattr(Draws, "turn", lambda self: followed.append(self._may_decide) or False)
    given = workload(lambda: Drops(lambda x: False))
    assert predicted(StepConfig(batch_size=4), workload=given).outcome == "ok"
    assert followed == [False]


# the 8 bytes of each number that autograd keeps as a tensor


FORMULAS = {
    "product": lambda x: 2 * x * 0.9,
    "in place": lambda x: (x + 1).mul_(0.9).div_(3),
    "quotient": lambda x: torch.div(x / 3.0, 0.5, rounding_mode=None),
    "reciprocal": lambda x: 2.0 / (x + 10),
    "nothing kept": lambda x: (x + 1.0 - 0.5) ** 2,
    "no gradient": lambda x: x + (x.detach() * 2.0),
}


class Scaled(nn.Module):
    def __init__(self, formula):
        super().__init__()
        self.linear, self.formula = nn.Linear(32, 32), formula

    def forward(self, x):
        return x + self.formula(self.linear(x))


def forward_peak(result):
    """Return the most bytes that stand in the forward, where those of numbers are most."""
    timeline = result.timeline
    return int(
        timeline.bytes_by_category[timeline.phase == PHASES.index(Phase.FORWARD)].sum(axis=1).max()
    )


@pytest.mark.matrix
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_numbers_are_counted(formula):
    workload = made_of(
        lambda: nn.Sequential(*[Scaled(formula) for _ in range(4)]), lambda n: torch.ones(n, 32)
    )
    config = StepConfig(batch_size=4, accumulation_steps=2)
    predicted, measured = assert_predicted(workload, config)
    assert forward_peak(predicted) == forward_peak(measured)


# formats that no kernel takes together fail where they are predicted, too


HALF = torch.bfloat16


class Meets(nn.Module):
    def __init__(self, meet):
        super().__init__()
        self.weight, self.meet = nn.Parameter(torch.ones(4, 4)), meet

    def forward(self, x):
        return self.meet(x, self.weight).float()


MEET = {
    "linear": (lambda x, w: functional.linear(x.to(HALF), w), False),
    "linear with bias": (lambda x, w: functional.linear(x, w, w[0].to(HALF)), False),
    "product": (lambda x, w: x @ w.double(), False),
    "row": (lambda x, w: torch.mv(w, x[0].to(HALF)), False),
    "norm": (lambda x, w: functional.layer_norm(x, (4,), w[0].to(HALF), w[0].to(HALF)), False),
    "norm of halves": (lambda x, w: functional.layer_norm(x.to(HALF), (4,), w[0], w[0]), True),
    "loss": (lambda x, w: functional.binary_cross_entropy((x * w[0]).sigmoid(), x.to(HALF)), False),
    "sum": (lambda x, w: x.to(HALF) + w[0], True),
    "rows put": (lambda x, w: w.clone().index_put((torch.tensor([0]),), x[:1].double()), False),
}


@pytest.mark.matrix
@pytest.mark.parametrize(("meet", "runs"), MEET.values(), ids=MEET)
def test_a_prediction_fails_where_the_step_does(meet, runs):
    workload = Workload(
        name="formats",
        build_model=lambda: Meets(meet),
        make_batch=lambda n: torch.full((n, 4), 0.5),
        compute_loss=lambda model, batch: model(batch).sum(),
    )
    config = StepConfig(batch_size=4)
    outcome = "ok" if runs else "failed"
    assert measure(workload, config, "cpu", repeats=1, isolate=False).outcome == outcome
    found = predicted(config, workload=workload)
    assert found.outcome == outcome
    assert runs or "two number formats are mixed" in found.message


class NoKernel(nn.Module):
    """Calls an operator that PyTorch has for a CPU in fp32 and fp64 only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.linalg.qr(self.linear(x)).R


@pytest.mark.parametrize(("precision", "outcome"), [("fp32", "ok"), ("bf16", "unsupported")])
def test_a_kernel_that_a_format_does_not_have_is_told_before_the_step_runs(precision, outcome):
    workload = made_of(NoKernel, (4,), lambda model, batch: model(batch).sum(), name="no kernel")
    config = StepConfig(batch_size=4, precision=precision)
    found = [
        measure(workload, config, "cpu", repeats=1, isolate=False),
        predicted(config, workload=workload),
    ]
    assert [result.outcome for result in found] == [outcome, outcome]
    if outcome != "ok":
        for result in found:
            assert "in NoKernel" in result.message
            assert "geqrf_cpu" in result.message


def test_an_lstm_in_bf16_runs_or_is_told_not_to():
    """Which of the two depends on the processor; without AVX-512 there is no such kernel."""
    config = StepConfig(batch_size=2, precision="bf16-mixed")
    workload = workloads.get("lstm-text", hidden_size=32, chunk_length=8)
    measured = measure(workload, config, "cpu", repeats=1, isolate=False)
    found = predicted(config, workload=workload)
    assert measured.outcome == ("ok" if has_bf16_kernels() else "unsupported")
    assert found.outcome == measured.outcome


# losses that read values by NumPy or as lists: what is assumed is said


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
    optimize = pytest.importorskip("scipy.optimize")
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


def of_sets(compute_loss):
    return made_of(
        SetPrediction,
        lambda n: (
            torch.randn(n, 40, WIDTH),
            torch.randint(CLASSES, (n, OBJECTS)),
            torch.rand(n, OBJECTS, 4),
        ),
        compute_loss,
    )


@pytest.mark.parametrize("compute_loss", [by_matching, by_sorting, with_metrics])
def test_what_reads_an_array_is_predicted_as_measured(compute_loss):
    found, _ = assert_predicted(of_sets(compute_loss), StepConfig(batch_size=4))
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

    found = predicted(StepConfig(batch_size=2), device, of_sets(compute_loss))
    assert found.outcome == Outcome.FAILED
    assert re.search(says, found.message), found.message
