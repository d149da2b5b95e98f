"""The peak map: squares by size, names and limits that stay in the picture."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from memlab import plots
from memlab.figures import peak
from memlab.figures.peak import squarified
from memlab.trace import CATEGORIES, Category
from tests.figure_parts import (
    MIB,
    all_texts,
    held,
    make_held,
    make_result,
    out_of_memory,
    texts_of,
    transformer,
)


def rectangles(figure):
    """Return the areas of a peak map by label, but for the swatches of its key."""
    found = {}
    for patch in figure.artists:
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
    shown = peak._tiles(many, str, sum(h.nbytes for h in many))
    assert sum(size for _, size in shown) == sum(h.nbytes for h in many)
    assert shown[-1][0] == "other"
    assert len(shown) == peak.MOST_TILES + 1


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
        for text in all_texts(figure)
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
    to_pixels = figure.artists[0].get_data_transform()
    for text in figure.texts:
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
            ground = peak._tone(color, index, name)
            light, dark = sorted((luminance(ground), luminance(peak.text_on(ground))))
            assert (dark + 0.05) / (light + 0.05) >= 4.5, (color, index)
