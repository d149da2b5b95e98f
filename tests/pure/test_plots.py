"""Figures: what stands in their axes is what the result says, and the SVG is fit for a page."""

import ast
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Polygon, Rectangle

from memlab import plots
from memlab.config import StepConfig
from memlab.figures import look, peak_map
from memlab.figures import timeline as timeline_figure
from memlab.figures.peak_map import squarified
from memlab.result import Outcome, Source
from memlab.trace import CATEGORIES, Category, Holding, Phase
from tests.figure_parts import MIB, make_result, make_timeline, texts_of

SVG = "{http://www.w3.org/2000/svg}"


def out_of_memory(**changes):
    return make_result(
        outcome=Outcome.OUT_OF_MEMORY, message="out of memory in forward", step_seconds=None,
        step_seconds_all=(), samples_per_second=None, **changes,
    )  # fmt: skip


def axes_of(figure, label):
    return next(axes for axes in figure.axes if axes.get_label() == label)


def polygons(figure):
    axes = axes_of(figure, "timeline")
    return {p.get_label(): p.get_xy() for p in axes.patches if isinstance(p, Polygon)}


def line(axes, label):
    return next(line for line in axes.lines if line.get_label() == label)


def test_stack_reaches_the_total_and_its_parts():
    tops = {name: xy[:, 1].max() for name, xy in polygons(plots.timeline(make_result())).items()}
    assert tops == {"parameters": 10 * MIB, "activations": 40 * MIB}  # cumulated, bottom first


def test_stack_holds_each_value_until_the_next_instant():
    xy = polygons(plots.timeline(make_result()))["activations"]
    assert list(dict.fromkeys(xy[1:-2, 1])) == [11 * MIB, 15 * MIB, 40 * MIB, 17 * MIB, 10 * MIB]
    assert (xy[:, 0].min(), xy[:, 0].max()) == (0, 1)
    assert (np.diff(xy[1:-2, 0]) >= 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6000), st.integers(0, 2**32 - 1))
def test_thinning_keeps_the_global_peak_and_stays_in_order(num_instants, seed):
    activations = np.random.default_rng(seed).integers(0, 2**40, num_instants)
    timeline = make_timeline(activations)
    rows = timeline_figure._thin(timeline)
    assert timeline.peak_index in rows
    assert len(rows) <= timeline_figure.COLUMNS
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
    x = timeline_figure._positions(make_timeline([1] * 100))
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


def test_ticks_are_whole_numbers_of_a_binary_unit():
    figure = plots.timeline(make_result())
    labels = [t.get_text() for t in axes_of(figure, "timeline").get_yticklabels()]
    assert labels == ["0", "16", "32"]
    assert "MiB allocated (measured, cpu)" in texts_of(figure)


def test_peak_says_its_size_and_place():
    text = "peak 40.0 MiB in backward of micro-batch 1, in a.b (aten::mm)"
    assert text in texts_of(plots.timeline(make_result()))


def test_compare_draws_the_other_total_and_names_what_differs():
    other = make_result(
        timeline=make_timeline([20 * MIB] * 4), config=StepConfig(accumulation_steps=4)
    )
    figure = plots.timeline(make_result(), compare=other)
    assert line(axes_of(figure, "timeline"), "compare").get_ydata().max() == 30 * MIB
    assert {"accumulation_steps=4", "30.0 MiB"} <= set(texts_of(figure))


def test_phases_and_micro_batches_are_named():
    assert {"forward", "backward", "optimizer"} <= set(texts_of(plots.timeline(make_result())))
    several = make_result(timeline=make_timeline([MIB] * 400, micro_batches=4))
    assert {"micro-batch 1", "micro-batch 4"} <= set(texts_of(plots.timeline(several)))
    many = make_result(timeline=make_timeline([MIB] * 6400, micro_batches=64))
    texts = texts_of(plots.timeline(many))
    assert "64 micro-batches, each forward (light) and backward" in texts
    assert "1" in texts
    assert "2" not in texts


def test_without_a_timeline_the_message_is_shown():
    crashed = replace(
        make_result(), timeline=None, outcome=Outcome.CRASHED, message="It broke. " * 9
    )
    shown = " ".join(texts_of(plots.timeline(crashed))).replace("\n", " ")
    assert shown == crashed.message.strip()


def test_out_of_memory_draws_what_ran():
    figure = plots.timeline(out_of_memory(), limit_bytes=20 * MIB)
    assert "over the limit" in polygons(figure)


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
    results = [make_result(), out_of_memory(), make_result(seconds=(0.5,))]
    figure = plots.step_times(results, labels=["#1", "#2", "#3"])
    axes = axes_of(figure, "step times")
    assert [c.patches[0].get_width() for c in axes.containers] == [0.2, 0.5]
    assert list(axes.lines[0].get_xdata()) == [0.2, 0.1, 0.3]
    assert {"out of memory", "40 samples/s", "16 samples/s"} <= set(texts_of(figure))
    assert "median step time, ms (measured, cpu)" in texts_of(figure)


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


def test_names_of_equal_runs_do_not_cover_each_other():
    figure = plots.memory_against_time([make_result()] * 3, labels=["a", "b", "c"], pinned=[0, 1])
    axes = axes_of(figure, "memory against time")
    assert len({text.get_position() for text in axes.texts}) == 3


def test_names_avoid_other_dots():
    results = [make_result(seconds=(s,)) for s in (0.50, 0.55, 1.0)]
    figure = plots.memory_against_time(results, labels=["first", "b", "c"], pinned=[0])
    axes = axes_of(figure, "memory against time")
    first = next(text for text in axes.texts if text.get_text() == "first")
    assert first.get_position()[0] < 0.50  # the second dot stands where the name would go first


def test_varying_fields_puts_the_most_varied_first():
    configs = [
        StepConfig(batch_size=b, precision=p) for b, p in ((8, "fp32"), (16, "bf16"), (32, "fp32"))
    ]
    results = [make_result(config=config) for config in configs]
    assert plots.varying_fields(results) == ["batch_size", "precision"]
    assert plots.varying_fields(results[:1]) == plots.varying_fields([]) == []


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


def test_heat_map_lists_choices_in_their_order_and_stands_without_a_peak():
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


@pytest.mark.parametrize("module", [plots, look, timeline_figure])
def test_imports_at_the_top_are_light(module):
    names = set()
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert not {n for n in names if n.split(".")[0] in ("torch", "seaborn", "pandas")}
    assert "matplotlib.pyplot" not in names


def test_every_category_has_its_own_colour_and_label():
    assert set(plots.CATEGORY_COLORS) == set(plots.CATEGORY_LABELS) == set(Category)
    assert len({to_hex(color) for color in plots.CATEGORY_COLORS.values()}) == len(Category)


def held(category, module, nbytes, operator="aten::mm"):
    return Holding(category=category, module=module, operator=operator, phase=Phase.FORWARD,
                   num_blocks=1, nbytes=nbytes)  # fmt: skip


def make_held(*holdings, **changes):
    sizes = dict.fromkeys(CATEGORIES, 0)
    for holding in holdings:
        sizes[holding.category] += holding.nbytes
    return make_result(
        peak_allocated_bytes=sum(sizes.values()), peak_by_category=sizes, peak_holdings=holdings,
        **changes,
    )  # fmt: skip


def transformer(num_blocks=12, unit=MIB):
    names = ("ln", "attn.qkv", "attn.out", "mlp.fc", "mlp.proj")
    places = [f"model.h.{i}.{name}" for i in range(num_blocks) for name in names]
    return make_held(
        *(held(Category.PARAMETERS, f"{p}.weight", unit) for p in places),
        *(held(Category.OPTIMIZER_STATE, f"{p}.weight", 2 * unit) for p in places),
        *(held(Category.ACTIVATIONS, p, (5 + i % 3) * unit) for i, p in enumerate(places)),
        held(Category.TEMPORARIES, "model.h.3.mlp.fc", 30 * unit),
        held(Category.INPUTS, "", unit // 64 + 1, operator="aten::clone"),
    )


def rectangles(figure):
    """Return the areas of a peak map by label, but for the swatches of its key."""
    found = {}
    for patch in figure.axes[0].patches:
        if isinstance(patch, Rectangle) and not patch.get_label().startswith("_"):
            found.setdefault(patch.get_label(), []).append(patch.get_bbox())
    return found


@given(
    st.lists(st.integers(1, 10**9), min_size=1, max_size=30),
    st.integers(20, 900),
    st.integers(20, 900),
)
def test_squares_fill_the_box_by_size_and_do_not_overlap(sizes, width, height):
    sizes = sorted(sizes, reverse=True)
    boxes = squarified(sizes, (3.0, 4.0, float(width), float(height)))
    assert len(boxes) == len(sizes)
    for size, (left, bottom, wide, high) in zip(sizes, boxes, strict=True):
        assert wide * high == pytest.approx(size / sum(sizes) * width * height, rel=1e-6)
        assert left > 3 - 1e-6
        assert bottom > 4 - 1e-6
        assert left + wide < 3 + width + 1e-6
        assert bottom + high < 4 + height + 1e-6
    for i, (left, bottom, wide, high) in enumerate(boxes):
        for left_2, bottom_2, wide_2, high_2 in boxes[i + 1 :]:
            across = min(left + wide, left_2 + wide_2) - max(left, left_2)
            up = min(bottom + high, bottom_2 + high_2) - max(bottom, bottom_2)
            assert across < 1e-6 or up < 1e-6


def test_equal_sizes_are_laid_out_as_squares():
    assert [box[2:] for box in squarified([1, 1, 1, 1], (0, 0, 100, 100))] == [(50, 50)] * 4
    assert squarified([], (0, 0, 1, 1)) == []


def test_a_peak_map_shows_categories_by_their_bytes_and_blocks_as_one():
    figure = plots.peak_map(transformer())
    areas = {name: boxes[0].width * boxes[0].height for name, boxes in rectangles(figure).items()}
    assert areas["optimizer state"] / areas["parameters"] == pytest.approx(2, rel=0.1)
    assert {"h.*.mlp.fc", "h.*.attn.qkv", "h.3.mlp.fc"} <= set(areas)
    assert "h.0.mlp.fc" not in areas
    said = " ".join(texts_of(figure))
    assert "activations  360 MiB" in said
    assert said.count("peak 570 MiB allocated (measured, cpu)") == 1
    assert "inputs 16.0 KiB" in said  # too small for a name on its area


def test_the_tiles_of_a_category_hold_all_of_it():
    many = [held(Category.ACTIVATIONS, f"branch{i}.deep.er", (40 - i) * MIB) for i in range(40)]
    shown = peak_map._tiles(many, str, sum(h.nbytes for h in many))
    assert sum(size for _, size in shown) == sum(h.nbytes for h in many)
    assert shown[-1][0] == "other"
    assert len(shown) == peak_map.MOST_TILES + 1


@pytest.mark.parametrize("size", [(5.0, 3.0), (7.0, 4.0), (9.0, 4.6), (12.0, 6.0)])
@pytest.mark.parametrize(
    "result",
    [
        transformer(),
        transformer(2, unit=3),
        make_held(held(Category.ACTIVATIONS, "a_module_with_quite_a_name." * 4 + "x", 10**12),
                  *(held(c, "w", 10**9) for c in CATEGORIES)),
        out_of_memory(memory_limit_bytes=MIB),
    ],
    ids=["transformer", "tiny", "long names", "out of memory"],
)  # fmt: skip
def test_labels_of_a_peak_map_stay_in_the_picture_and_apart(result, size):
    figure = plots.peak_map(result, size=size)
    renderer = FigureCanvasAgg(figure).get_renderer()
    width, height = size[0] * figure.dpi, size[1] * figure.dpi
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for axes in figure.axes
        for text in axes.texts
        if text.get_text()
    ]
    assert boxes
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.x1 <= width, text
        assert box.y0 >= -1, text
        assert box.y1 <= height, text
    for i, (text, box) in enumerate(boxes):
        for other, box_2 in boxes[i + 1 :]:
            across = min(box.x1, box_2.x1) - max(box.x0, box_2.x0)
            up = min(box.y1, box_2.y1) - max(box.y0, box_2.y0)
            assert across < 1 or up < 3, (text, other)  # descenders may touch the line below


def test_labels_of_a_peak_map_stay_on_their_tiles():
    figure = plots.peak_map(transformer(), size=(5.0, 3.2))
    renderer = FigureCanvasAgg(figure).get_renderer()
    tiles = [b for boxes in rectangles(figure).values() for b in boxes]
    to_pixels = figure.axes[0].transData
    for text in figure.axes[0].texts:
        x, y = text.get_position()
        on = [b for b in tiles if b.x0 <= x <= b.x1 and b.y0 <= y <= b.y1]
        if on:
            tile = min(on, key=lambda b: b.width * b.height).transformed(to_pixels)
            box = text.get_window_extent(renderer)
            assert box.x0 >= tile.x0 - 0.5, text.get_text()
            assert box.x1 <= tile.x1 + 0.5, text.get_text()


def test_a_peak_map_without_holdings_shows_categories_and_without_those_says_why():
    figure = plots.peak_map(make_result())
    assert set(rectangles(figure)) == {"parameters", "activations"}
    nothing = plots.peak_map(make_result(peak_by_category=None, message="no breakdown"))
    assert "no breakdown" in texts_of(nothing)


def test_a_peak_map_names_the_limit_and_what_it_ran_out_of():
    said = texts_of(plots.peak_map(out_of_memory(memory_limit_bytes=30 * MIB)))
    assert "10.0 MiB over the limit of 30.0 MiB" in said
    assert any("allocated, out of memory (measured, cpu)" in text for text in said)
    below = texts_of(plots.peak_map(make_result(), limit_bytes=50 * MIB))
    assert "10.0 MiB below the limit of 50.0 MiB" in below


def test_text_reads_on_every_colour_of_a_peak_map():
    def luminance(color):
        red, green, blue = (c**2.2 for c in to_rgb(color))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for color in plots.CATEGORY_COLORS.values():
        for index, name in ((0, "a"), (1, "a"), (2, "a"), (0, "other")):
            ground = peak_map._tone(color, index, name)
            light, dark = sorted((luminance(ground), luminance(peak_map.text_on(ground))))
            assert (dark + 0.05) / (light + 0.05) >= 4.5, (color, index)


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


def test_a_run_without_a_timeline_leaves_the_prediction_alone():
    predicted, failed = make_result(source=Source.PREDICTED), out_of_memory(timeline=None)
    figure = plots.timeline(predicted, measured=replace(failed, timeline=None))
    assert polygons(figure)
    assert "measured" not in [drawn.get_label() for drawn in axes_of(figure, "timeline").lines]


def test_reserved_bytes_are_held_against_the_limit():
    result = make_result(peak_reserved_bytes=50 * MIB, device="h200")
    bar = axes_of(plots.peak_bar(result, limit_bytes=60 * MIB), "peak")
    widths = {box.get_label(): box.patches[0].get_width() for box in bar.containers}
    assert widths["reserved alone"] == 10 * MIB
    assert widths["free"] == 10 * MIB
    shown = texts_of(plots.timeline(result, limit_bytes=60 * MIB))
    assert "limit 60.0 MiB of reserved bytes" in shown
