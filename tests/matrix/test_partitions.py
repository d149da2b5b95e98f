"""The plans of torch.compile's partitioner: what they hold, and which one is run."""

import itertools

import pytest
import torch

from memlab import StepConfig, Workload, measure, verify, workloads
from memlab.errors import UnsupportedError
from memlab.techniques import compilation
from memlab.techniques.compilation import Footprint, Partition, footprint, stepped, take
from memlab.techniques.step import build_step
from memlab.techniques.technique import Setup
from tests.models import blocks

KIB_FLOATS = 256  # numbers of 4 bytes in a KiB


def compiled(budget: float, **changes) -> StepConfig:
    return StepConfig(memory_budget=budget, budget_engine="compile", compile=True, **changes)


def gpt() -> Workload:
    return workloads.get(
        "gpt-small", num_layers=2, hidden_size=64, num_heads=2, sequence_length=64, vocab_size=128
    )


def resnet() -> Workload:
    sizes = {"hidden_sizes": (64, 96), "depths": (1, 1), "layer_type": "bottleneck"}
    return workloads.get("resnet-digits", **sizes)


def traced(function, *numbers_of_floats: int) -> torch.fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [torch.ones(n) for n in numbers_of_floats]
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def test_what_two_graphs_hold_is_counted_by_hand():
    """The input is 1 KiB and stands outside; a and b are 1 KiB each, the views nothing."""

    def forward(x):
        a = x + 1
        b = a.view(2, -1) * 2  # a and b: 2 KiB
        return b.sum(), b  # a is gone; the sum has 4 B

    def backward(b, tangent):
        c = b * 2  # b, the tangent and c
        return (c.view(-1) * tangent,)  # c and the result: b was read for the last time

    forward_graph = traced(forward, KIB_FLOATS)
    backward_graph = traced(backward, KIB_FLOATS, 1)
    found = footprint(forward_graph, backward_graph)
    assert found.held_bytes == 1024 + 4
    assert found.peak_bytes == 2 * 1024 + 4
    names = [node.name for node in forward_graph.nodes if node.op == "placeholder"]
    assert names == ["x_1"]  # b of the backward graph is none of them: it is its own to drop


def test_a_convolution_is_noted_with_what_lives_meanwhile():
    def convolve(x, weight):
        y = torch.relu(x).view(1, 1, 16, 16)
        return torch.conv2d(y, weight.view(1, 1, 1, 1))

    graph = traced(convolve, 256, 1)
    (live,) = footprint(graph, traced(lambda x: x + 1, 1)).at_calls.values()
    assert live == 2 * 1024


def partition(budget: float, peak: int, held: int, calls: dict[str, int] | None = None):
    made = Footprint(peak_bytes=peak, held_bytes=held, at_calls=calls or {})
    return Partition(
        budget=budget, saved=frozenset({str(budget)}), kept_fraction=budget, footprint=made
    )


def plans(**peaks: int):
    """Return what makes plans: p50=7 peaks at 7 for budgets under 0.75 down to 0.5."""
    steps = sorted(((int(name[1:]) / 100, peak) for name, peak in peaks.items()), reverse=True)

    def plan_for(budget: float) -> Partition:
        peak = next((peak for at, peak in steps if budget >= at - 1e-9), steps[-1][1])
        return partition(budget, peak, round(100 * budget))

    return plan_for


def test_the_plan_is_the_next_that_peaks_no_higher_than_any_larger_budget():
    plan_for = plans(p100=10, p75=7, p50=9, p25=6, p0=20)
    taken = {b: take(b, plan_for).budget for b in map(stepped, (0.8, 0.6, 0.3, 0.1, 0.0))}
    assert [f"{b:.2f}" for b in taken.values()] == ["0.80", "0.45", "0.30", "0.25", "0.25"]


def test_a_plan_that_holds_more_or_calls_a_kernel_higher_up_is_passed_over():
    least = partition(0.5, 5, 5, {"convolution": 3})
    assert least.footprint.is_within(least.footprint)
    for other in (
        partition(0.4, 5, 6, {"convolution": 3}),
        partition(0.4, 6, 5, {"convolution": 3}),
        partition(0.4, 5, 5, {"convolution": 4}),
        partition(0.4, 5, 5, {"another convolution": 1}),
    ):
        assert not other.footprint.is_within(least.footprint)


def test_a_budget_between_two_steps_is_the_lower_one():
    assert [f"{stepped(b):.2f}" for b in (1.0, 0.99, 0.5, 0.33, 0.3, 0.04, 0.0)] == [
        "1.00", "0.95", "0.50", "0.30", "0.30", "0.00", "0.00",
    ]  # fmt: skip


@pytest.mark.parametrize(("workload", "size"), [(gpt(), 8), (resnet(), 16)], ids=["gpt", "resnet"])
def test_the_measured_peak_never_rises_as_the_budget_falls(workload, size):
    peaks = []
    for budget in (1.0, 0.75, 0.5, 0.25, 0.0):
        config = compiled(budget, batch_size=size)
        result = measure(workload, config, "cpu", repeats=1, isolate=False)
        assert result.outcome == "ok", result.message
        peaks.append(result.peak_allocated_bytes)
    assert all(low <= high for high, low in itertools.pairwise(peaks)), peaks
    assert any("own plan for memory_budget=0 may peak higher" in note for note in result.notes)


def test_pytorchs_own_plan_does_peak_higher_and_is_estimated(monkeypatch):
    """The reason for all this (pytorch issue 197838)."""
    workload = gpt()
    repaired = measured_and_estimated(workload)
    monkeypatch.setattr(compilation, "take", lambda asked, plan_for: plan_for(asked))
    own = measured_and_estimated(workload)
    assert own[0] > 1.3 * repaired[0]
    # a kernel at the peak takes 4 KiB of its own in one of them
    assert abs((own[0] - repaired[0]) - (own[1] - repaired[1])) <= 4096


def measured_and_estimated(workload: Workload) -> tuple[int, int]:
    """Return the measured peak at budget 0, and the estimated one of the plan that was run."""
    estimates = []
    forget = compilation.forget

    def noted() -> None:
        estimates.extend(c.taken.footprint.peak_bytes for c in compilation._last[3].choices)
        forget()

    with pytest.MonkeyPatch.context() as patch:
        forget()
        patch.setattr("memlab.runtime.measure.forget", noted)
        result = measure(workload, compiled(0.0), "cpu", repeats=1, isolate=False)
    return result.peak_allocated_bytes, estimates[-1]


def test_a_repaired_budget_has_the_gradients_of_the_reference():
    report = verify(gpt(), compiled(0.0), "cpu", isolate=False)
    assert report.ok, report.why


def test_budget_one_is_the_plain_compiled_step_to_the_byte():
    workload = gpt()
    plain = measure(workload, StepConfig(compile=True), "cpu", repeats=1, isolate=False)
    one = measure(workload, compiled(1.0), "cpu", repeats=1, isolate=False)
    assert one.peak_allocated_bytes == plain.peak_allocated_bytes
    assert (one.timeline.bytes_by_category == plain.timeline.bytes_by_category).all()


@pytest.mark.parametrize("solver", ["dp", "greedy", "dp_knapsack_sliding_hirschberg", "ilp"])
def test_every_solver_of_pytorch_runs(solver):
    config = compiled(0.5, budget_solver=solver)
    with torch._functorch.config.patch(activation_memory_budget_solver="nonsense"):
        build_step(blocks(width=64, depth=6), config, "cpu")()
    (choice,) = compilation._last[3].choices
    assert choice.changed


def test_ilp_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"budget_solver='ilp' needs the package scipy"):
        build_step(blocks(), compiled(0.5, budget_solver="ilp"), "cpu")


def test_profiling_operators_is_refused_on_a_cpu():
    config = compiled(0.5, budget_estimator="profile")
    with pytest.raises(UnsupportedError, match=r"'profile' times operators with CUDA.*'flops'"):
        build_step(blocks(), config, "cpu")


def test_a_solver_that_exceeds_its_budget_is_said():
    """In pytorch issue 197871 one solver returns more than fits; a planted one does the same."""
    from torch._functorch import partitioners

    def greedy_for_more(memory, runtimes, most):
        kept = list(range(len(memory)))
        return sum(runtimes), kept, []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioners, "greedy_knapsack", greedy_for_more)
        config = compiled(0.2, budget_solver="greedy")
        build_step(blocks(width=64, depth=6), config, "cpu")()
        said = compilation.notes(Setup(config=config, device=torch.device("cpu")))
    assert any("budget_solver='greedy' exceeds its budget" in note for note in said), said
    build_step(blocks(width=64, depth=6), compiled(0.2), "cpu")()
    said = compilation.notes(Setup(config=compiled(0.2), device=torch.device("cpu")))
    assert not any("exceeds" in note for note in said)


def test_uneven_micro_batches_are_planned_each():
    workload = blocks(width=64, depth=6)
    config = compiled(0.5, batch_size=255, accumulation_steps=2)
    assert verify(workload, config, "cpu", isolate=False).ok
    build_step(workload, config, "cpu")()
    choices = compilation._last[3].choices
    assert len(choices) == 2
    assert all(choice.plain.footprint.peak_bytes > 0 for choice in choices)
