"""Checkpoints in a graph of torch.fx: the same updates, the bytes that are predicted, refusals."""

import dataclasses

import pytest
import torch
from torch import fx, nn

from memlab import MemlabError, StepConfig, Workload, measure, predict, verify, workloads
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing.graph_segments import (
    checkpoint_graph,
    traced,
    with_checkpoints,
)
from memlab.techniques.step import build_step, set_seed
from tests.checkpointing_parts import LateNoise
from tests.models import blocks

RNG_BYTES = 5056  # the state of a CPU's generator, which each checkpoint keeps
NUM_UPDATES = 3
DEEP = blocks(dropout=0.2, depth=6, width=64)
LATE = dataclasses.replace(
    DEEP,
    name="late-noise",
    build_model=lambda: nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(64, 64), LateNoise())), nn.Linear(64, 1)
    ),
    make_batch=lambda n: (torch.randn(n, 64), torch.randn(n, 1)),
    compute_loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
)
TEXT = workloads.get("plain-transformer", num_layers=4)


def sequential(*modules):
    return fx.symbolic_trace(nn.Sequential(*modules))


def updated(workload, config):
    """Return gradients and weights after each of three updates, with dropout's random numbers."""
    step, seen = build_step(workload, config, "cpu"), []
    for number in range(NUM_UPDATES):
        set_seed(number)
        loss = step.accumulate()
        named = dict(step.model.named_parameters())
        seen.append([loss, {name: p.grad.clone() for name, p in named.items()}])
        step.update()
        seen[-1].append({name: p.detach().clone() for name, p in named.items()})
    return seen


@pytest.mark.parametrize("workload", [DEEP, TEXT, LATE], ids=lambda workload: workload.name)
def test_three_updates_are_those_of_the_model_itself(workload):
    config = StepConfig(batch_size=4)
    plain, graph = updated(workload, config), updated(checkpoint_graph(workload, 3), config)
    for (loss, gradients, weights), (other, others, theirs) in zip(plain, graph, strict=True):
        assert loss == other
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, others[name]), name
            assert torch.equal(weights[name], theirs[name]), name


def test_a_checkpointed_graph_is_a_graph_whose_segments_are_modules():
    model = checkpoint_graph(DEEP, 3).build_model()
    assert isinstance(model, fx.GraphModule)
    called = [node.target for node in model.graph.nodes if node.op == "call_module"]
    assert called[:2] == ["segment_0", "segment_1"]
    last = [path for path in called if not path.startswith("segment")]
    assert last[-1] == "6"  # the head
    inside = [str(node.target) for k in range(2) for node in nodes_of(model, k)]
    assert inside + last == [
        name for name, module in DEEP.build_model().named_modules()
        if name and not isinstance(module, nn.Sequential)
    ]  # fmt: skip
    assert model.state_dict().keys() == DEEP.build_model().state_dict().keys()


def nodes_of(model, number):
    segment = getattr(model, f"segment_{number}")
    return [node for node in segment.graph.nodes if node.op == "call_module"]


@pytest.mark.slow
@pytest.mark.parametrize("workload", [DEEP, TEXT, LATE], ids=lambda workload: workload.name)
def test_it_saves_what_is_predicted_and_verify_agrees(workload):
    config = StepConfig(batch_size=8 if workload is TEXT else 512)
    graph = checkpoint_graph(workload, 3)
    guesses = [predict(one, config, "cpu") for one in (workload, graph)]
    found = [measure(one, config, "cpu", repeats=1, warmup=0) for one in (workload, graph)]
    assert [result.outcome for result in (*guesses, *found)] == ["ok"] * 4
    peaks = [result.peak_allocated_bytes for result in (*guesses, *found)]
    assert peaks[0] == peaks[2]
    assert peaks[3] - peaks[1] == 2 * RNG_BYTES  # of two checkpoints
    assert peaks[1] < 0.8 * peaks[0]

    report = verify(graph, config, "cpu")
    assert report.ok, report.why
    assert report.bitwise


def test_activations_of_a_segment_are_freed_and_its_input_is_kept():
    """Forward leaves the inputs of segments, and what the last one keeps."""
    count, width, batch = 8, 64, 32
    workload = Workload(
        name="line",
        build_model=lambda: nn.Sequential(
            *(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Sigmoid()))
        ),
        make_batch=lambda n: torch.randn(n, width),
        compute_loss=lambda model, x: model(x).sum(),
    )
    one, config = batch * width * 4, StepConfig(batch_size=batch)
    plain, graph = (
        predict(w, config, "cpu").timeline.bytes_of("activations", "forward")[-1]
        for w in (workload, checkpoint_graph(workload, 4))
    )
    scalar = 64
    assert plain - count * one in range(scalar)  # each sigmoid's output, for both layers
    # the outputs of three segments, the last of which begins the last segment, and two sigmoids
    assert graph - (3 + count // 4) * one in range(scalar)


def test_what_must_not_run_twice_is_refused_by_name():
    normed = sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match=r"^1 keeps statistics .*memory_budget below 1"):
        with_checkpoints(normed, 2)
    frozen = nn.BatchNorm1d(4, track_running_stats=False)
    with_checkpoints(sequential(nn.Linear(4, 4), frozen, nn.Linear(4, 4)), 2)

    writes = sequential(nn.Tanh(), nn.Hardtanh(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match=r"^1 writes over its input, .*inplace=False"):
        with_checkpoints(writes, 2)
    with_checkpoints(sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), 2)


class Adds(nn.Module):
    def forward(self, x):
        y = x.sigmoid()
        y.add_(1)
        return (y * 2).sigmoid().sum(1)


class Once(nn.Module):
    def forward(self, x):
        return x.sin()


class Asks(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class ReturnsEarly(nn.Module):
    """Returns a value that is not passed on, and one that each of three layers passes on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        first = self.layers[0](x)
        return first.sum(), self.layers[2](self.layers[1](first).tanh())


def test_a_value_that_is_returned_early_is_passed_on_to_the_end():
    model, x = ReturnsEarly(), torch.randn(2, 4)
    graph = with_checkpoints(traced(model), 2)
    assert all(map(torch.equal, graph(x), model(x)))
    with pytest.raises(UnsupportedError, match=r"at 1 places only"):
        with_checkpoints(traced(model), 3)


def test_graphs_that_cannot_be_cut_or_traced_are_refused():
    with pytest.raises(UnsupportedError, match=r"^add_ writes over its input"):
        with_checkpoints(traced(Adds()), 2)
    with pytest.raises(UnsupportedError, match="cannot be cut into segments"):
        with_checkpoints(traced(Once()), 2)
    with pytest.raises(UnsupportedError, match=r"at 2 places only.*use segments=3"):
        with_checkpoints(sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()), 5)
    with pytest.raises(UnsupportedError, match=r"cannot follow Asks: .*control flow"):
        traced(Asks())
    with pytest.raises(MemlabError, match="segments=1"):
        checkpoint_graph(DEEP, segments=1)


def test_an_untraceable_model_is_an_outcome():
    result = predict(
        checkpoint_graph(workloads.get("vit-digits", num_layers=1)), StepConfig(), "cpu"
    )
    assert result.outcome == "unsupported"
    assert "symbolic_trace cannot follow ViTForImageClassification" in result.message
