"""The picture of ever more ranks: its points are those of the results."""

import itertools
import math
from dataclasses import replace

import pytest

from memlab import plots
from memlab.config import StepConfig
from memlab.result import Outcome, Source
from tests.figure_parts import MIB, make_result, texts_of

RANKS = (2, 4, 8, 1024)


def result(sharding, ranks, *, rate, peak=None, **changes):
    config = StepConfig(batch_size=ranks, sharding=sharding, world_size=ranks)
    return make_result(
        source=Source.PREDICTED, device="128x8-h100", config=config, samples_per_second=rate,
        peak_allocated_bytes=64 * MIB // ranks + MIB if peak is None else peak, **changes,
    )  # fmt: skip


def line(figure, label, name):
    (axes,) = [axes for axes in figure.axes if axes.get_label() == label]
    return next(each for each in axes.lines if each.get_label() == name)


def test_peaks_and_rates_stand_where_the_results_are():
    results = [result("zero3", n, rate=10.0 * n) for n in reversed(RANKS)]
    results += [result("ddp", n, rate=9.0 * n, peak=70 * MIB) for n in RANKS]
    figure = plots.scaling(results)
    peaks = line(figure, "peak", "zero3")
    assert list(peaks.get_xdata()) == [math.log2(n) for n in RANKS]
    assert list(peaks.get_ydata()) == [64 * MIB // n + MIB for n in RANKS]
    assert list(line(figure, "peak", "ddp").get_ydata()) == [70 * MIB] * 4
    rates = line(figure, "speed", "zero3")
    assert list(rates.get_ydata()) == pytest.approx([math.log10(10 * n) for n in RANKS])
    ideal = line(figure, "speed", "as fast as the fewest")  # the rate of each rank is the same
    assert list(ideal.get_ydata()) == pytest.approx([math.log10(20), math.log10(10240)])
    texts = " ".join(texts_of(figure))
    assert "peak MiB allocated, worst rank (predicted, 128x8-h100)" in texts
    assert {" zero3", " ddp"} <= set(texts_of(figure))


def test_what_has_no_peak_is_left_out_and_what_has_no_time_has_only_a_peak():
    failed = make_result(outcome=Outcome.FAILED, message="no", peak_allocated_bytes=None)
    assert plots.scaling([failed]).axes == []
    figure = plots.scaling([failed, result("ddp", 2, rate=1.0)])
    assert len(line(figure, "peak", "ddp").get_xdata()) == 1
    figure = plots.scaling([result("zero2", n, rate=None) for n in RANKS])  # without a time
    assert [axes.get_label() for axes in figure.axes] == ["peak"]
    assert not any("per second" in text for text in texts_of(figure))


def test_each_strategy_is_a_line_that_is_named_with_its_groups_and_what_goes_with_it():
    eight = {"world_size": 8, "sharding": "zero3"}
    fields = {
        " one process": {},
        " hybrid, groups of 4": eight | {"sharding": "hybrid", "shard_group_size": 4},
        " zero3": eight,
        " zero3, tensor 2": eight | {"tensor_parallel_size": 2},
        " zero3, offloaded": eight | {"offload_parameters": True, "offload_optimizer": True},
    }
    results = [make_result(config=StepConfig(batch_size=8, **each)) for each in fields.values()]
    assert set(fields) <= set(texts_of(plots.scaling(results)))


@pytest.mark.parametrize("size", [(2.6, 2.4), (4.4, 3.4), (9.0, 5.0)])
def test_names_of_equal_peaks_stay_below_the_title_and_apart(size):
    names = ("ddp", "zero1", "zero2", "zero3")
    results = [
        replace(result(name, n, rate=10.0 * n, peak=64 * MIB), device=f"{n}x-{card}")
        for name in names
        for n, card in ((2, "h100"), (8, "h200"))
    ]
    figure = plots.scaling(results, size=size)
    for axes in figure.axes:
        named = [text for text in axes.texts if text.get_text().strip() in names]
        heights = sorted(text.get_position()[1] for text in named)
        to_points = axes.get_window_extent().height * 72 / figure.dpi
        low, high = axes.get_ylim()
        gaps = [b - a for a, b in itertools.pairwise(heights)]
        assert heights[-1] <= high
        assert min(gaps) / (high - low) * to_points > 8
