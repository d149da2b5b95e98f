"""Figures: what stands in their axes is what the result says, and the SVG is fit for a page."""

import re
import sys
import threading
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.patches import Polygon

from memlab import plots
from memlab.config import StepConfig
from memlab.errors import ConfigError, UnsupportedError
from memlab.figures import look, runs
from memlab.figures import timeline as timeline_figure
from memlab.figures.timeline import COLUMNS, thin
from memlab.result import Outcome, Source
from memlab.trace import CATEGORIES, Category
from tests.figure_parts import (
    MIB,
    make_result,
    make_timeline,
    out_of_memory,
    recommended,
    texts_of,
    transformer,
)

SVG = "{http://www.w3.org/2000/svg}"


def axes_of(figure, label):
    return next(axes for axes in figure.axes if axes.get_label() == label)


def polygons(figure):
    axes = axes_of(figure, "timeline")
    return {p.get_label(): p.get_xy() for p in axes.patches if isinstance(p, Polygon)}


def line(axes, label):
    return next(line for line in axes.lines if line.get_label() == label)


def test_stack_holds_each_value_until_the_next_instant_and_says_its_peak():
    figure = plots.timeline(make_result())
    assert polygons(figure)["parameters"][:, 1].max() == 10 * MIB
    xy = polygons(figure)["activations"]  # on top of the parameters
    assert list(dict.fromkeys(xy[1:-2, 1])) == [11 * MIB, 15 * MIB, 40 * MIB, 17 * MIB, 10 * MIB]
    assert (xy[:, 0].min(), xy[:, 0].max()) == (0, 1)
    assert (np.diff(xy[1:-2, 0]) >= 0).all()
    labels = [t.get_text() for t in axes_of(figure, "timeline").get_yticklabels()]
    assert labels == ["0", "16", "32"]  # whole numbers of a binary unit
    assert {
        "MiB allocated (measured, cpu)", "forward", "backward", "optimizer",
        "peak 40.0 MiB in backward of micro-batch 1, in a.b (aten::mm)",
    } <= set(texts_of(figure))  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6000), st.integers(0, 2**32 - 1))
def test_thinning_keeps_the_global_peak_and_stays_in_order(num_instants, seed):
    activations = np.random.default_rng(seed).integers(0, 2**40, num_instants)
    timeline = make_timeline(activations)
    rows = thin(timeline.total_bytes)
    assert timeline.peak_index in rows
    assert len(rows) <= COLUMNS
    assert (np.diff(rows) > 0).all()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 2**36), min_size=1, max_size=3000), st.integers(1, 8))
def test_any_timeline_draws_its_peak(activations, micro_batches):
    result = make_result(timeline=make_timeline(activations, micro_batches=micro_batches))
    figure = plots.timeline(result)
    highest = max(xy[:, 1].max() for xy in polygons(figure).values())
    assert highest == result.timeline.total_bytes.max()
    assert line(axes_of(figure, "timeline"), "peak").get_ydata()[0] == highest


def test_a_long_timeline_gives_a_small_svg():
    activations = np.random.default_rng(0).integers(0, 2**30, 50_000)
    svg = plots.to_svg(plots.timeline(make_result(timeline=make_timeline(activations))), label="x")
    assert len(svg) < 150_000


def test_optimizer_phase_takes_a_fifth_of_the_axis():
    x = timeline_figure.positions(make_timeline([1] * 100))
    assert x[100] == pytest.approx(0.8)
    assert (np.diff(x) > 0).all()
    assert x[0] == 0
    assert x[-1] < 1


@pytest.mark.parametrize("limit", [30 * MIB, 60 * MIB])
def test_limit_is_a_line_at_its_bytes(limit):
    figure = plots.timeline(make_result(), limit_bytes=limit)
    axes = axes_of(figure, "timeline")
    assert list(line(axes, "limit").get_ydata()) == [limit, limit]
    assert axes.get_ylim()[1] > max(limit, 40 * MIB)
    assert f"limit {limit // MIB}.0 MiB" in texts_of(figure)
    assert ("over the limit" in polygons(figure)) == (limit < 40 * MIB)


def test_a_far_limit_is_said_and_does_not_flatten_the_picture():
    figure = plots.timeline(make_result(), limit_bytes=1024 * MIB)
    assert "limit 1.00 GiB, above this axis" in texts_of(figure)
    assert axes_of(figure, "timeline").get_ylim()[1] < 50 * MIB


def test_compare_draws_the_other_total_and_names_what_differs():
    other = make_result(
        timeline=make_timeline([20 * MIB] * 4), config=StepConfig(accumulation_steps=4)
    )
    figure = plots.timeline(make_result(), compare=other)
    assert line(axes_of(figure, "timeline"), "compare").get_ydata().max() == 30 * MIB
    assert {"accumulation_steps=4", "30.0 MiB"} <= set(texts_of(figure))


def test_micro_batches_are_named():
    several = make_result(timeline=make_timeline([MIB] * 400, micro_batches=4))
    assert {"micro-batch 1", "micro-batch 4"} <= set(texts_of(plots.timeline(several)))
    many = make_result(timeline=make_timeline([MIB] * 6400, micro_batches=64))
    texts = texts_of(plots.timeline(many))
    assert "64 micro-batches, each forward (light) and backward" in texts
    assert "1" in texts
    assert "2" not in texts


def test_a_part_of_the_step_is_drawn_alone_under_its_name():
    several = make_result(timeline=make_timeline([MIB] * 399 + [9 * MIB], micro_batches=4))
    texts = texts_of(plots.timeline(several, only="backward"))
    assert "MiB allocated (measured, cpu), backward of micro-batch 4 of 4" in texts
    assert "forward" not in texts
    assert "optimizer" not in texts
    highest = polygons(plots.timeline(several, only="forward"))["activations"][:, 1].max()
    assert highest == 11 * MIB
    # the place of the peak is said only in its part
    for part in ("backward", "forward"):
        texts = texts_of(plots.timeline(make_result(), only=part))
        assert any("in a.b" in text for text in texts) == (part == "backward")


@pytest.mark.parametrize("source", list(Source))
@pytest.mark.parametrize("only", ["forward", "backward", "optimizer"])
def test_every_result_has_its_parts(source, only):
    result = make_result(source=source)
    figure = plots.timeline(result, only=only, measured=make_result(), limit_bytes=60 * MIB)
    x = line(axes_of(figure, "timeline"), "measured").get_xdata()
    assert (min(x), max(x)) == (0, 1)


def test_the_place_of_the_peak_keeps_as_many_of_its_last_modules_as_fit():
    place = replace(make_result().peak_place, module="transformer.h.11.attn.c_proj")
    figure = plots.timeline(make_result(peak_place=place), size=(5.6, 3))
    text = "peak 40.0 MiB in backward of micro-batch 1, in …h.11.attn.c_proj"
    assert text in texts_of(figure)


def test_a_part_that_there_is_not_is_refused_or_said():
    with pytest.raises(ConfigError, match="only='data' is unknown"):
        plots.timeline(make_result(), only="data")
    line_alone = make_timeline([MIB, MIB])
    forward = replace(line_alone, phase=line_alone.phase * 0 + 2)
    figure = plots.timeline(make_result(timeline=forward), only="backward")
    assert texts_of(figure) == ["This step has no backward phase."]


def test_what_ran_is_drawn_and_without_a_timeline_the_prediction_or_the_message():
    figure = plots.timeline(out_of_memory(), limit_bytes=20 * MIB)
    assert "over the limit" in polygons(figure)

    without = replace(
        make_result(), timeline=None, outcome=Outcome.CRASHED, message="It broke. " * 9
    )
    shown = " ".join(texts_of(plots.timeline(without))).replace("\n", " ")
    assert shown == without.message.strip()
    figure = plots.timeline(make_result(source=Source.PREDICTED), measured=without)
    assert polygons(figure)
    assert "measured" not in [drawn.get_label() for drawn in axes_of(figure, "timeline").lines]


def test_peak_bar_adds_up_and_shows_free_and_over():
    for limit, name, span in ((60 * MIB, "free", (40, 60)), (30 * MIB, "over the limit", (30, 40))):
        axes = axes_of(plots.peak_bar(make_result(), limit_bytes=limit), "peak")
        bars = {c.get_label(): c.patches[0] for c in axes.containers}
        assert bars["parameters"].get_width() + bars["activations"].get_width() == 40 * MIB
        left = bars[name].get_x()
        assert (left, left + bars[name].get_width()) == tuple(mib * MIB for mib in span)
        assert bars["activations"].get_x() == 10 * MIB


def test_peak_bar_names_narrow_parts_below():
    parts = {str(category): 0 for category in CATEGORIES} | {"activations": 40 * MIB, "inputs": 512}
    figure = plots.peak_bar(make_result(peak_by_category=parts))
    assert {"activations 40.0 MiB", "inputs 512 B"} <= set(texts_of(figure))


def test_step_times_shows_median_repeats_and_gaps():
    steady = make_result(seconds=(0.2, 0.15, 0.3))
    results = [steady, out_of_memory(), make_result(seconds=(0.5,))]
    figure = plots.step_times(results, labels=["#1", "#2", "#3"])
    axes = axes_of(figure, "step times")
    assert [c.patches[0].get_width() for c in axes.containers] == [0.2, 0.5]
    assert list(axes.lines[0].get_xdata()) == [0.2, 0.15, 0.3]
    assert list(line(axes, "repeats").get_xdata()) == [0.15, 0.3]  # from the fastest to the slowest
    assert not any("busy" in text for text in texts_of(figure))
    assert {"out of memory", "40 samples/s", "16 samples/s"} <= set(texts_of(figure))
    assert "median step time, ms (measured, cpu)" in texts_of(figure)


NOISY = (4.5, 0.16, 1.97, 2.4, 1.2)


def test_a_time_of_a_busy_machine_is_marked_and_said():
    result = make_result(seconds=NOISY)
    figure = plots.step_times([result], labels=["a"])
    assert "▲ the machine was busy" in texts_of(figure)


@pytest.mark.parametrize(
    ("seconds", "steady"),
    [
        (NOISY, False),
        ((0.2, 0.2, 0.2, 0.21, 4.5), True),  # one slow step moves no median
        ((0.2, 0.29, 0.28), True),
        ((0.2, 0.4), True),  # two say nothing
        ((0.2, 0.31, 0.4), False),
    ],
)
def test_a_time_is_steady_while_its_median_is_near_its_fastest_repeat(seconds, steady):
    assert runs.is_unsteady(make_result(seconds=seconds)) is not steady


def test_the_machine_is_not_blamed_where_nothing_else_ran():
    assert runs.why_unsteady(make_result(seconds=NOISY, others_share=0.5)).endswith("was busy")
    alone = make_result(seconds=NOISY, others_share=0.01)
    assert runs.why_unsteady(alone) == "the repeats differ widely"
    assert runs.why_unsteady(out_of_memory()) == ""
    assert runs.why_unsteady(make_result(seconds=(0.2, 0.21, 0.2))) == ""


def test_a_predicted_time_is_a_hollow_bar():
    results = [make_result(), make_result(source=Source.PREDICTED)]
    figure = plots.step_times(results, labels=["a", "b"])
    bars = [c.patches[0] for c in axes_of(figure, "step times").containers]
    assert [bar.get_facecolor()[3] > 0 for bar in bars] == [True, False]


def test_step_times_shows_a_prediction_which_has_no_repeats():
    found = make_result(source="predicted", step_seconds=0.5, step_seconds_all=())
    figure = plots.step_times([found, make_result()], labels=["a", "b"])
    (axes, *_) = figure.axes
    assert axes.patches[0].get_width() == 0.5


def test_step_times_keeps_the_last_runs_and_says_so():
    figure = plots.step_times([make_result()] * 30, labels=[f"#{i}" for i in range(30)])
    axes = axes_of(figure, "step times")
    assert [t.get_text() for t in axes.get_yticklabels()] == [f"#{i}" for i in range(18, 30)]
    assert any("last 12 of 30" in text for text in texts_of(figure))


def test_memory_against_time_places_and_names_runs():
    results = [make_result(seconds=(s,), memory_limit_bytes=50 * MIB) for s in (0.1, 0.2, 0.3)]
    results.insert(1, out_of_memory())
    figure = plots.memory_against_time(results, labels=["a", "b", "c", "d"], pinned=[0])
    axes = axes_of(figure, "memory against time")
    assert (line(axes, "run 0").get_xdata()[0], line(axes, "run 0").get_ydata()[0]) == (
        0.1,
        40 * MIB,
    )
    assert line(axes, "limit").get_ydata()[0] == 50 * MIB
    names = {"a", "b", "c", "d"} & set(texts_of(figure))
    assert names == {"a", "d"}  # the pinned one and the last
    assert line(axes, "run 0").get_marker() != line(axes, "run 3").get_marker()
    assert any("1 without a time" in text for text in texts_of(figure))


def test_runs_that_another_run_beats_are_fainter_and_the_others_are_joined():
    costs = [(0.1, 40 * MIB), (0.2, 30 * MIB), (0.3, 35 * MIB), (0.4, 30 * MIB)]
    results = [make_result(seconds=(s,), peak_allocated_bytes=peak) for s, peak in costs]
    axes = axes_of(plots.memory_against_time(results, labels=list("abcd")), "memory against time")
    front = line(axes, "Pareto front")
    assert list(zip(front.get_xdata(), front.get_ydata(), strict=True)) == costs[:2]
    strengths = [line(axes, f"run {i}").get_alpha() for i in range(4)]
    assert strengths[0] == strengths[1] == 1.0
    assert strengths[2] == strengths[3] < 1.0


def test_a_run_is_not_beaten_by_one_of_a_smaller_batch():
    small, large = (
        make_result(seconds=(s,), peak_allocated_bytes=peak, config=StepConfig(batch_size=batch))
        for s, peak, batch in ((0.1, 20 * MIB, 4), (0.2, 40 * MIB, 8))
    )
    axes = axes_of(
        plots.memory_against_time([small, large], labels=["a", "b"]), "memory against time"
    )
    assert [line(axes, f"run {i}").get_alpha() for i in range(2)] == [1.0, 1.0]
    assert "Pareto front" not in [drawn.get_label() for drawn in axes.lines]


def test_what_was_predicted_is_hollow_and_neighbours_are_faint_and_in_no_front():
    kept = make_result(seconds=(0.2,), source=Source.PREDICTED, peak_allocated_bytes=20 * MIB)
    better = make_result(seconds=(0.05,), source=Source.PREDICTED, peak_allocated_bytes=MIB)
    figure = plots.memory_against_time(
        [make_result(seconds=(0.1,)), kept], labels=["a", "b"], here=better, neighbours=[better]
    )
    axes = axes_of(figure, "memory against time")
    assert line(axes, "run 0").get_markerfacecolor() != "none"
    for name in ("run 1", "here 0", "neighbour 0"):
        assert line(axes, name).get_markerfacecolor() == "none"
    assert line(axes, "neighbour 0").get_alpha() < line(axes, "here 0").get_alpha() == 1.0
    assert len(line(axes, "Pareto front").get_xdata()) == 2
    assert "on screen" in texts_of(figure)
    assert any("allocated (measured and predicted, cpu)" in text for text in texts_of(figure))


def test_on_a_card_the_axis_is_of_allocated_bytes_and_the_limit_says_that_it_is_not():
    result = make_result(device="h200", peak_reserved_bytes=50 * MIB, memory_limit_bytes=60 * MIB)
    figure = plots.memory_against_time([result], labels=["a"])
    assert line(axes_of(figure, "memory against time"), "run 0").get_ydata()[0] == 40 * MIB
    assert " limit 60.0 MiB of reserved bytes" in texts_of(figure)
    assert any("MiB allocated" in text for text in texts_of(figure))


def test_names_of_equal_runs_do_not_cover_each_other():
    figure = plots.memory_against_time([make_result()] * 3, labels=["a", "b", "c"], pinned=[0, 1])
    axes = axes_of(figure, "memory against time")
    assert len({text.get_position() for text in axes.texts}) == 3


def test_names_are_not_written_across_the_front_or_other_dots():
    costs = [(0.1, 40 * MIB), (0.3, 30 * MIB), (0.6, 15 * MIB)]
    results = [make_result(seconds=(s,), peak_allocated_bytes=peak) for s, peak in costs]
    figure = plots.memory_against_time(results, labels=["a", "run 2", "c"], pinned=[1])
    axes = axes_of(figure, "memory against time")
    name = next(text for text in axes.texts if text.get_text() == "run 2")
    x, y = name.get_position()
    # above its dot lies the line from the first run, and at its right the line to the last one
    assert (x < 0.3, y <= 30 * MIB) == (True, True)

    # nor across another dot: the second one stands where the name would go first
    results = [make_result(seconds=(s,)) for s in (0.50, 0.55, 1.0)]
    figure = plots.memory_against_time(results, labels=["first", "b", "c"], pinned=[0])
    texts = axes_of(figure, "memory against time").texts
    first = next(text for text in texts if text.get_text() == "first")
    assert first.get_position()[0] < 0.50


def test_varying_fields_puts_the_most_varied_first():
    configs = [
        StepConfig(batch_size=b, precision=p) for b, p in ((8, "fp32"), (16, "bf16"), (32, "fp32"))
    ]
    results = [make_result(config=config) for config in configs]
    assert plots.varying_fields(results) == ["batch_size", "precision"]
    assert plots.varying_fields(results[:1]) == plots.varying_fields([]) == []


def test_heat_map_needs_what_the_extra_installs(monkeypatch):
    monkeypatch.setitem(sys.modules, "seaborn", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'memlab\[lab\]'"):
        plots.heat_map([make_result()])


def test_heat_map_shows_the_latest_peak_of_each_cell():
    def at(batch, steps):
        return StepConfig(batch_size=batch, accumulation_steps=steps)

    results = [
        make_result(config=at(8, 1), peak_allocated_bytes=999 * MIB),
        make_result(config=at(8, 1), peak_allocated_bytes=40 * MIB),
        make_result(config=at(8, 4), peak_allocated_bytes=20 * MIB),
        out_of_memory(config=at(16, 1), peak_allocated_bytes=None),
        out_of_memory(config=at(16, 4), peak_allocated_bytes=60 * MIB),
    ]
    figure = plots.heat_map(results, limit_bytes=50 * MIB)
    axes = axes_of(figure, "heat map")
    values = np.ma.filled(axes.collections[0].get_array().astype(float), np.nan).reshape(2, 2)
    np.testing.assert_array_equal(values, [[40 * MIB, 20 * MIB], [np.nan, 60 * MIB]])
    texts = {t.get_position(): t.get_text() for t in axes.texts if t.get_text()}
    assert texts == {
        **{(0.5, 0.5): "40.0 MiB", (1.5, 0.5): "20.0 MiB"},
        **{(0.5, 1.5): "OOM", (1.5, 1.5): "60.0 MiB"},
    }
    hatched = {
        (int(a.get_x()), int(a.get_y())) for a in axes.artists + axes.patches if a.get_hatch()
    }
    assert hatched == {(0, 1), (1, 1)}
    assert {"accumulation, across", "batch size, down"} <= set(texts_of(figure))
    assert [t.get_text() for t in axes.get_yticklabels()] == ["8", "16"]

    # choices stand in their order, also without any peak
    results = [out_of_memory(config=StepConfig(precision=p)) for p in ("bf16", "fp32")]
    axes = axes_of(plots.heat_map(results, columns="precision"), "heat map")
    assert [t.get_text() for t in axes.get_xticklabels()] == ["fp32", "bf16"]


@pytest.mark.parametrize("draw", [
    lambda: plots.step_times([], labels=[]),
    lambda: plots.memory_against_time([], labels=[]),
    lambda: plots.heat_map([]),
])  # fmt: skip
def test_no_run_yet_is_said(draw):
    assert texts_of(draw()) == ["No run yet."]


def all_figures():
    results = [make_result(), out_of_memory(), make_result(config=StepConfig(batch_size=4))]
    labels = ["$5 & <b>", "#2", "#3"]
    return [
        plots.timeline(results[0], limit_bytes=30 * MIB, compare=results[2]),
        plots.peak_bar(results[0], limit_bytes=30 * MIB),
        plots.step_times(results, labels=labels),
        plots.memory_against_time(results, labels=labels, pinned=[0]),
        plots.heat_map(results),
        plots.recommendations(recommended(results[0])),
        plots.peak_map(transformer(), limit_bytes=30 * MIB),
        plots.placeholder("No run yet.", size=(3, 2)),
    ]


def test_svg_is_valid_responsive_named_and_unique():
    pictures = [plots.to_svg(figure, label='peak < "limit" & more') for figure in all_figures() * 2]
    ids = []
    for svg in pictures:
        root = ElementTree.fromstring(svg)
        assert root.tag == SVG + "svg"
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"] == 'peak < "limit" & more'
        assert root.attrib["width"] == "100%"
        assert "height" not in root.attrib
        assert len(root.attrib["viewBox"].split()) == 4
        own = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg)) <= set(own)
        ids += own
        assert not list(root.iter(SVG + "style"))
        assert not list(root.iter(SVG + "metadata"))
        assert root.findall(f".//{SVG}text")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["lr 0.0005", "3.14159 x 2.71828", "<0.0001>"])
def test_svg_shortens_coordinates_and_no_words(name):
    svg = plots.to_svg(plots.step_times([make_result()], labels=[name]), label="times")
    assert f"{name} " in " ".join(ElementTree.fromstring(svg).itertext()) + " "
    assert not re.findall(r'\b[xy]="[^"]*\.\d{3}', svg)


def test_svg_takes_ink_and_font_from_the_page():
    svg = plots.to_svg(plots.step_times([make_result()], labels=["$5 & <b>"]), label="x")
    assert "var(--jp-ui-font-color1" in svg
    assert "var(--jp-border-color2" in svg
    assert "var(--jp-ui-font-family, sans-serif)" in svg
    assert "DejaVu" not in svg
    assert f"fill: {look.INK}" not in svg
    assert "$5 &amp; &lt;b&gt;" in svg


def test_svg_leaves_the_figure_as_it_was():
    figure = plots.timeline(make_result())
    before = figure.dpi
    first, second = (plots.to_svg(figure, label="x") for _ in range(2))
    assert figure.dpi == before
    assert re.sub(r"memlab\d+-", "", first) == re.sub(r"memlab\d+-", "", second)


def test_figures_can_be_drawn_from_threads():
    expected = re.sub(r"memlab\d+-", "", plots.to_svg(plots.timeline(make_result()), label="x"))
    seen = []

    def draw():
        svg = plots.to_svg(plots.timeline(make_result()), label="x")
        seen.append(re.sub(r"memlab\d+-", "", svg))

    threads = [threading.Thread(target=draw) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 6


def test_png_is_transparent():
    png = plots.to_png(plots.timeline(make_result()))
    assert png.startswith(b"\x89PNG")
    assert png[25] == 6  # colour type: with alpha


def test_no_pyplot_figure_is_left():
    all_figures()
    pyplot = sys.modules.get("matplotlib.pyplot")  # seaborn imports it
    assert pyplot is None or pyplot.get_fignums() == []


def test_every_category_has_its_own_colour_and_label():
    assert set(plots.CATEGORY_COLORS) == set(plots.CATEGORY_LABELS) == set(Category)
    assert len({to_hex(color) for color in plots.CATEGORY_COLORS.values()}) == len(Category)


def test_a_run_is_a_line_over_its_prediction_with_the_signed_error():
    predicted = make_result(source=Source.PREDICTED)
    measured = make_result(timeline=make_timeline([MIB, 5 * MIB, 40 * MIB, 7 * MIB]))
    other = make_result(timeline=make_timeline([MIB, 2 * MIB, 3 * MIB, 2 * MIB]))
    figure = plots.timeline(predicted, measured=measured, compare=other)
    axes = axes_of(figure, "timeline")
    assert polygons(figure)["activations"][:, 1].max() == 40 * MIB
    assert max(line(axes, "measured").get_ydata()) == 50 * MIB
    assert max(line(axes, "compare").get_ydata()) == 13 * MIB
    assert line(axes, "measured").get_linestyle() != line(axes, "compare").get_linestyle()
    assert "-20.0 %" in texts_of(figure)
    assert any("measured and predicted" in text for text in texts_of(figure))


def test_reserved_bytes_are_compared_with_the_limit():
    result = make_result(peak_reserved_bytes=50 * MIB, device="h200")
    bar = axes_of(plots.peak_bar(result, limit_bytes=60 * MIB), "peak")
    widths = {box.get_label(): box.patches[0].get_width() for box in bar.containers}
    assert widths["reserved alone"] == 10 * MIB
    assert widths["free"] == 10 * MIB
    shown = texts_of(plots.timeline(result, limit_bytes=60 * MIB))
    assert "limit 60.0 MiB of reserved bytes" in shown


def ranks(*optimizer_mib):
    """Return a result of ranks that differ by their optimizer state."""
    made = []
    for number, size in enumerate(optimizer_mib):
        held = {"parameters": 10 * MIB, "optimizer_state": size * MIB, "activations": 30 * MIB}
        count = max(len(optimizer_mib), 2)
        config = StepConfig(sharding="zero1", world_size=count, batch_size=count)
        made.append(make_result(config=config, peak_by_category=held, rank_numbers=(number,)))
    return replace(made[0], ranks=tuple(made), rank_numbers=())


def test_a_bar_of_each_distinct_rank_has_its_bytes_by_category():
    axes = axes_of(plots.rank_peaks(ranks(8, 8, 4, 8)), "rank peaks")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ranks 0-1, 3", "rank 2"]
    widths = {}
    for bar in axes.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        widths[row, to_hex(bar.get_facecolor())] = bar.get_width()
    color = plots.CATEGORY_COLORS[Category.OPTIMIZER_STATE]
    assert (widths[0, color], widths[1, color]) == (8 * MIB, 4 * MIB)
    assert sum(width for (row, _), width in widths.items() if row == 1) == 44 * MIB
    assert "44.0 MiB" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_bars_of_ranks_have_as_much_room_above_as_below(count):
    axes = axes_of(plots.rank_peaks(ranks(*range(1, count + 1))), "rank peaks")
    bottom, top = axes.get_ylim()
    assert -0.5 - top == bottom - (count - 0.5) >= 0
    assert bottom - top == max(count, 3)


def test_of_many_distinct_ranks_the_highest_are_drawn_and_one_device_has_none():
    many = ranks(*range(1, 13))
    figure = plots.rank_peaks(many)
    axes = axes_of(figure, "rank peaks")
    assert len(axes.get_yticklabels()) == 8
    assert axes.get_yticklabels()[0].get_text() == "rank 4"
    assert any("8 highest of 12" in text for text in texts_of(figure))
    texts = texts_of(plots.rank_timelines(many))
    assert sum(": peak " in text for text in texts) == 8
    assert not any(text.startswith("rank 0:") for text in texts)
    assert any(text.endswith(", 8 of 12 ranks") for text in texts)
    for draw in (plots.rank_peaks, plots.rank_timelines):
        assert any("One device" in text for text in texts_of(draw(make_result())))


def test_a_prediction_of_the_heaviest_rank_is_a_bar_and_has_no_timelines():
    alone = replace(ranks(8), ranks=(), timeline=None)
    axes = axes_of(plots.rank_peaks(alone), "rank peaks")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["heaviest rank"]
    assert texts_of(plots.rank_timelines(alone)) == [alone.message]


def test_each_distinct_rank_has_its_timeline_on_one_scale():
    figure = plots.rank_timelines(ranks(8, 8, 4, 16))
    axes = {label: axes_of(figure, label) for label in ("ranks 0-1", "rank 2", "rank 3")}
    assert {each.get_ylim() for each in axes.values()} == {(0, 56 * MIB)}
    texts = set(texts_of(figure))
    assert {"ranks 0-1: peak 48.0 MiB", "rank 2: peak 44.0 MiB", "rank 3: peak 56.0 MiB"} <= texts
    assert "optimizer state" in texts
    assert all(each.patches or each.collections for each in axes.values())
