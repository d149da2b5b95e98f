"""`predict_lengths` against predictions of single lengths, which it has not seen."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import memlab
from memlab import SampleSize, StepConfig, Workload, plots
from memlab.api import predict_with_size_model
from memlab.errors import ConfigError, UnsupportedError, WorkloadError
from memlab.memory.replay import AllocatorSettings, replay
from memlab.search.length_curve import runs_same, size_model_of
from memlab.search.lengths import predict_lengths
from tests.figure_parts import texts_of
from tests.models import linear, made_of

CARD, MOST = "rtx-4060", 512
LENGTHS = [20, 33, 64, 100, 101, 130, 200, 257, 256, 300, 380, 511]
CONFIG = StepConfig(batch_size=4, accumulation_steps=2)


class Eager(nn.Module):
    """A layer of attention whose weights are a tensor of length times length, with positions."""

    def __init__(self, longest):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(longest, 64))
        self.inner, self.outer = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        query, key, value = self.inner(x + self.positions[: x.shape[1]]).chunk(3, dim=-1)
        return self.outer((query @ key.transpose(1, 2)).softmax(-1) @ value)


def attention(length=128, *, layers=1, longest=MOST, **fields):
    """Return a workload whose steps hold the square of a length."""

    def other(size):
        if size > MOST:
            raise WorkloadError(f"length={size} is more than the model takes; allowed are 1 to 512")
        return attention(size, layers=layers, longest=longest, **fields)

    return Workload(
        name="attention",
        build_model=lambda: nn.Sequential(*(Eager(longest) for _ in range(layers))),
        make_batch=lambda n: torch.randn(n, length, 64),
        compute_loss=lambda model, x: model(x).square().mean(),
        sample_size=SampleSize(
            name="length", unit="tokens", value=length, offered=(64, 128), make_workload=other
        ),
        **fields,
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", [CARD, "cpu"])
def test_a_length_that_was_left_out_is_foretold(device):
    workload = attention(layers=2)
    found = predict_lengths(workload, LENGTHS, CONFIG, device)
    recorded = set(found.curve.recorded)
    assert len(recorded) == 4
    left_out = [length for length in (40, 101, 256, 300, 471) if length not in recorded]
    assert len(left_out) == 5
    for length in left_out:
        expected = memlab.predict(workload.resized(length), CONFIG, device)
        told = found.at(length)
        assert told.workload_name == expected.workload_name
        assert told.peak_allocated_bytes == pytest.approx(expected.peak_allocated_bytes, rel=1e-3)
        if device != "cpu":
            assert told.peak_reserved_bytes == pytest.approx(expected.peak_reserved_bytes, rel=1e-3)
        assert told.step_seconds is None
    assert found.worst.peak_allocated_bytes == (
        memlab.predict(workload.resized(511), CONFIG, device).peak_allocated_bytes
    )


@pytest.fixture(scope="module")
def found():
    """The lengths on a CPU, where peaks are what is live and no allocator rounds them."""
    return predict_lengths(attention(lengths=LENGTHS), config=CONFIG, device="cpu")


def test_the_limit_decides_which_batches_are_too_long(found):
    limit = found.at(256).peak_allocated_bytes
    told = found.over(LENGTHS, memory_limit=limit)
    assert told.longest_that_fits == 256
    # 257, 300, 380 and 511 are too long: the other 8 of 12 samples make 70 of 495 batches
    assert told.chance_above_limit == pytest.approx(1 - 70 / 495)
    cut = told.truncation
    assert [told.at(cut.max_length + more).fit for more in (0, 1)] == ["fits", "too close"]
    assert cut.num_samples_cut == sum(length > cut.max_length for length in LENGTHS)
    assert "86 % of random batches do not fit" in str(told)
    assert str(cut.max_length) in str(told)


def test_without_a_batch_that_fits_nothing_is_cut(found):
    told = found.over(LENGTHS, memory_limit="1KiB")
    assert (told.longest_that_fits, told.truncation, told.chance_above_limit) == (0, None, 1.0)
    assert f"not even one of {min(told.curve.recorded)} tokens fits" in str(told)


def test_other_samples_need_no_recording(found, monkeypatch):
    monkeypatch.setattr(
        "memlab.search.lengths.predict_with_size_model", lambda *a, **k: pytest.fail("asked")
    )
    told = found.over(np.random.default_rng(0).integers(20, 500, 1000))
    assert len(told.data) == 1000
    assert "batches of 4" in str(told)
    assert "interpolated" in told._repr_html_()
    assert "packing" in told._repr_html_()
    with pytest.raises(ConfigError, match="length 600 is longer than 511, the longest that was"):
        found.over([600] * 4)
    with pytest.raises(ConfigError, match=r"batch_size=4 is more than .* lengths has \(3\)"):
        found.over([1, 2, 3])


def test_the_curve_rises_and_ends_at_the_worst_batch(found):
    assert (np.diff(found.curve_bytes) >= 0).all()
    assert found.curve_lengths[-1] == 511
    assert found.curve_bytes[-1] == found.worst.peak_allocated_bytes
    assert found.chance_above(int(found.curve_bytes[-1])) == 0.0
    assert found.chance_above(1) == 1.0
    # 9 of the 12 samples are no longer than 257: they make 126 of the 495 batches
    between = (found.at(257).peak_allocated_bytes + found.at(300).peak_allocated_bytes) // 2
    assert found.chance_above(between) == pytest.approx(1 - 126 / 495)


def test_the_picture_shows_the_curve_the_limit_and_the_samples(found):
    limit = found.at(256).peak_allocated_bytes
    figure = plots.lengths(found.over(LENGTHS, memory_limit=limit))
    upper, lower = figure.axes
    lines = {line.get_label(): line for line in upper.lines}
    assert list(lines["peak"].get_ydata()) == found.curve_bytes.tolist()
    assert list(lines["limit"].get_ydata()) == [limit, limit]
    assert sum(bar.get_height() for bar in lower.patches) == len(LENGTHS)
    hatched = [bar for bar in lower.patches if bar.get_hatch()]  # 257, 300, 380 and 511
    assert sum(bar.get_height() for bar in hatched) == 4
    words = " ".join(texts_of(figure))
    assert "tokens of the longest sample" in words
    assert "do not fit" in words
    assert b"PNG" in plots.to_png(plots.lengths(found, size=(1.0, 1.0)))


@pytest.fixture(scope="module")
def on_card():
    return predict_lengths(attention(layers=2), LENGTHS, CONFIG, CARD)


def test_what_a_run_reserves_is_that_of_one_allocator_for_all_its_batches(on_card):
    paged, run = on_card.reserved_after(3)[::-1]
    assert (run.expandable_segments, paged.expandable_segments) == (False, True)
    assert len(run.longest) == 3
    assert set(run.longest.tolist()) <= set(LENGTHS)
    # the recorded run, up to its second step, and that step once more at another length
    traces = [on_card.curve.trace(length) for length in run.longest.tolist()]
    steps = [np.array([i.step for i in trace.intervals])[trace.interval] for trace in traces]
    address, nbytes = [], []
    for number, (trace, step) in enumerate(zip(traces, steps, strict=True)):
        begin, end = np.argmax(step == 1), len(step) - np.argmax(step[::-1] == 1)
        rows = slice(begin, end) if number else slice(0, begin)
        address.append(trace.address[rows])
        nbytes.append(trace.nbytes[rows])
    ends = np.cumsum([len(piece) for piece in address]) - 1
    for each in (run, paged):
        settings = AllocatorSettings(expandable_segments=each.expandable_segments)
        held = replay(np.concatenate(address), np.concatenate(nbytes), settings)
        assert each.reserved_bytes.tolist() == held.reserved_bytes[ends].tolist()


def test_reserved_memory_creeps_only_if_lengths_differ(on_card):
    run, paged = on_card.reserved_after(40)
    assert (np.diff(run.reserved_bytes) >= 0).all()
    assert run.peak_reserved_bytes > run.reserved_bytes[0]
    assert paged.peak_reserved_bytes <= run.peak_reserved_bytes
    assert run.peak_reserved_bytes >= on_card.at(int(run.longest.max())).peak_allocated_bytes
    for each in on_card.over([256] * 8).reserved_after(5, seed=1):
        assert len(set(each.reserved_bytes[1:].tolist())) == 1


def test_a_cpu_reserves_nothing(found):
    with pytest.raises(UnsupportedError, match="cpu has no caching allocator"):
        found.reserved_after(2)


def test_the_model_is_that_of_the_longest_sample():
    grows = attention(longest=64)
    made = dataclasses.replace(
        grows.sample_size, make_workload=lambda size: attention(size, longest=size)
    )
    grows = dataclasses.replace(attention(128, longest=128), sample_size=made)
    config = StepConfig(batch_size=2)
    found = predict_lengths(grows, [64, 128], config, "cpu")
    parameters = [
        each.result.peak_by_category["parameters"] for each in found.curve.recorded.values()
    ]
    assert parameters[0] == parameters[1]
    shortest = min(found.curve.recorded)
    assert found.at(8).peak_allocated_bytes == found.at(shortest).peak_allocated_bytes


def test_longer_samples_are_cut_to_max_length():
    found = predict_lengths(attention(), [64, 1000], StepConfig(batch_size=2), "cpu", max_length=64)
    assert (found.data.longest, max(found.curve.recorded)) == (64, 64)


def by_turns(length=8):
    """Return a workload that runs a layer for each element of a sample."""

    def loss(model, x):
        for _ in range(length):
            x = model(x)
        return x.square().mean()

    return made_of(
        lambda: nn.Linear(8, 8),
        (8,),
        loss,
        name="turns",
        sample_size=SampleSize(
            name="turns", unit="turns", value=length, offered=(4, 8), make_workload=by_turns
        ),
    )


@pytest.mark.parametrize(
    ("workload", "lengths", "config", "error", "said"),
    [
        (attention(), None, {}, ConfigError, "lengths=None, and attention has none"),
        (attention(), [], {}, ConfigError, "lengths is empty"),
        (attention(), [600] * 8, {}, WorkloadError, "allowed are 1 to 512; pass max_length=..."),
        (attention(), [9], {"batch_size": 2}, ConfigError, "lengths has (1); pass"),
        (linear(), [9] * 8, {}, WorkloadError, "give it a sample_size, such as memlab.SampleSize"),
        (attention(), [9] * 8, {"memory_budget": 0.5}, UnsupportedError, "memory_budget=0.5"),
        (
            attention(), [9] * 8, {"sharding": "ddp", "world_size": 2}, UnsupportedError,
            "sharding='ddp'",
        ),
        (by_turns(), [4, 8] * 4, {}, UnsupportedError, "turns 2 runs other operators with batches"),
        (
            memlab.workloads.get("vit-digits"), [8] * 8, {}, WorkloadError,
            "along 2 dimensions; allowed is a workload whose samples have a length",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_named(workload, lengths, config, error, said):
    with pytest.raises(error) as raised:
        predict_lengths(workload, lengths, StepConfig(**{"batch_size": 2, **config}), "cpu")
    assert said in str(raised.value)


def padded(length=64, multiple=300):
    """Return a workload whose model rounds a length up: no polynomial gives its bytes."""
    size = -(-length // multiple) * multiple

    def loss(model, x):
        return model(nn.functional.pad(x, (0, 0, 0, size - length))).square().mean()

    return made_of(
        lambda: nn.Linear(16, 16),
        lambda n: torch.ones(n, length, 16),
        loss,
        sample_size=memlab.SampleSize(
            name="length", unit="tokens", value=length, offered=(64, 128), make_workload=padded
        ),
    )


@pytest.mark.slow
def test_a_gap_among_the_lengths_is_no_gap_in_the_curve():
    data = [16] * 40 + [512]
    found = predict_lengths(attention(), data, CONFIG, "cpu")
    true = memlab.predict(attention().resized(128), CONFIG, "cpu").peak_allocated_bytes
    assert found.at(128).peak_allocated_bytes == pytest.approx(true, rel=1e-3)
    assert found.curve.errors
    assert found.curve.error <= 1e-3
    told = found.over(data, memory_limit=true)
    assert told.longest_that_fits >= 128
    assert told.chance_above_limit == pytest.approx(CONFIG.batch_size / 41)


def test_data_of_one_length_may_be_cut_too():
    found = predict_lengths(attention(), [512] * 16, CONFIG, "cpu")
    limit = found.at(200).peak_allocated_bytes
    told = found.over([512] * 16, memory_limit=limit)
    assert told.longest_that_fits == 200
    assert 100 < told.truncation.max_length < 200


@pytest.mark.slow
def test_what_is_no_polynomial_widens_the_uncertainty_and_is_cut_with_care():
    found = predict_lengths(padded(), range(64, 2049, 7), StepConfig(batch_size=2), "cpu")
    assert found.curve.error > 0.01
    for share in (0.3, 0.5, 0.8):
        told = found.over([2045] * 4, memory_limit=int(share * found.at(2045).peak_allocated_bytes))
        cut = padded().resized(told.truncation.max_length)
        true = memlab.predict(cut, StepConfig(batch_size=2), "cpu").peak_allocated_bytes
        assert true <= told.memory_limit_bytes


def test_lengths_that_the_workload_cannot_have_are_replaced_by_others():
    def in_eights(length=64):
        if length % 8:
            raise memlab.MemlabError(f"length={length} is no multiple of 8")
        made = attention(length)
        return dataclasses.replace(
            made, sample_size=dataclasses.replace(made.sample_size, make_workload=in_eights)
        )

    found = predict_lengths(in_eights(), [64, 70, 90, 128], StepConfig(batch_size=2), "cpu")
    assert all(length % 8 == 0 for length in found.curve.recorded)
    assert found.curve.errors


def test_the_order_in_which_autocast_frees_its_weights_does_not_matter():
    one = size_model_of(predict_with_size_model(attention(), CONFIG, "cpu")).program
    layout = one.layout
    frees = np.flatnonzero(~layout.is_birth)
    beside = next(  # freed right after another, in the same phase
        int(row)
        for row in frees[1:]
        if not layout.is_birth[row - 1] and layout.interval[row - 1] == layout.interval[row]
    )
    apart = next(int(row) for row in frees if layout.is_birth[row - 1] and row > beside)

    def swapped(first, second):
        block = layout.block.copy()
        block[[first, second]] = block[[second, first]]
        return dataclasses.replace(one, layout=dataclasses.replace(layout, block=block))

    assert runs_same(one, swapped(beside - 1, beside))
    assert not runs_same(one, swapped(beside, apart))  # something is allocated in between


@pytest.mark.slow
def test_lengths_are_predicted_at_a_precision_that_casts_weights():
    workload, config = attention(layers=4), dataclasses.replace(CONFIG, precision="bf16-mixed")
    found = predict_lengths(workload, LENGTHS, config, CARD)
    model = attention(layers=4, longest=MOST).build_model
    single = dataclasses.replace(workload.resized(200), build_model=model)
    true = memlab.predict(single, config, CARD).peak_allocated_bytes
    assert 200 not in found.curve.recorded
    assert found.at(200).peak_allocated_bytes == pytest.approx(true, rel=1e-3)


def test_samples_of_one_token_are_no_reason_to_refuse_the_others():
    workload = memlab.workloads.get("gpt-small", num_layers=1)
    found = predict_lengths(workload, [1, 2, 5, 8], StepConfig(batch_size=2), CARD)
    assert min(found.curve.recorded) == 2
    assert found.at(1).peak_allocated_bytes == found.at(2).peak_allocated_bytes


def test_what_is_assumed_of_a_step_is_among_the_notes():
    def branching(length=64):
        def loss(model, x):
            return model(x).square().mean() * (2 if (x.sum() > 0).item() else 1)

        size = dataclasses.replace(attention().sample_size, value=length, make_workload=branching)
        return dataclasses.replace(attention(length), compute_loss=loss, sample_size=size)

    found = predict_lengths(branching(), [64, 300], StepConfig(batch_size=2), "cpu")
    assert found.worst.uncertainty["peak_allocated_bytes"] > 0.5
    assert "reads a value; assumed" in " ".join(found.notes)


def test_the_chance_of_a_peak_is_that_of_its_length(found):
    for length in sorted(set(LENGTHS)):
        peak = found.at(length).peak_allocated_bytes
        assert found.chance_above(peak) == found.data.chance_above(length, CONFIG.batch_size)


def test_a_limit_within_the_uncertainty_is_not_said_to_fit_nothing(found):
    told = found.over([511] * 8, memory_limit=found.at(511).peak_allocated_bytes)
    assert (told.longest_that_fits, told.chance_above_limit) == (511, 0.0)
    assert "though within the uncertainty" in str(told)
