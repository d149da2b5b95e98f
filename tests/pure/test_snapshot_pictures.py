"""Pictures of snapshots: what stands in their axes is what the snapshot says."""

import pytest
from matplotlib.patches import Polygon, Rectangle

import memlab
from memlab import plots
from memlab._util.units import MIB
from tests.figure_parts import texts_of
from tests.snapshot_parts import SCRIPT, Card, dump, fragmented, training

PICTURES = (plots.snapshot_timeline, plots.snapshot_peak, plots.snapshot_fragmentation,
            plots.snapshot_growth)  # fmt: skip


@pytest.fixture
def opened(tmp_path):
    return lambda card: memlab.open_snapshot(dump(tmp_path / "s.pickle", card.snapshot()))


@pytest.fixture
def leaking(opened):
    return opened(training(8, leaks=True))


def axes_of(figure, label):
    return next(axes for axes in figure.axes if axes.get_label() == label)


def said(figure):
    return " | ".join(texts_of(figure))


def test_the_stack_reaches_the_peak_and_the_line_what_is_reserved(leaking):
    figure = plots.snapshot_timeline(leaking)
    axes = axes_of(figure, "snapshot")
    tops = {p.get_label(): p.get_xy()[:, 1].max() for p in axes.patches if isinstance(p, Polygon)}
    assert max(tops.values()) == leaking.peak_allocated_bytes
    assert set(tops) == {"parameters", "optimizer state", "gradients", "activations",
                         "temporaries", "unknown"}  # fmt: skip
    lines = {line.get_label(): line for line in axes.lines}
    assert max(lines["reserved"].get_ydata()) == 64 * MIB
    assert lines["peak"].get_ydata()[0] == leaking.peak_allocated_bytes
    assert "peak 33.0 MiB, the largest part by model.py:12 forward" in said(figure)


def test_what_is_unknown_has_a_colour_and_a_name_of_its_own(leaking):
    assert "unknown" in said(plots.snapshot_timeline(leaking))
    colors = [
        p.get_facecolor() for p in axes_of(plots.snapshot_timeline(leaking), "snapshot").patches
    ]
    assert len(set(colors)) == len(colors)


def test_the_map_of_the_peak_names_categories_and_lines(leaking):
    text = said(plots.snapshot_peak(leaking))
    for name in ("optimizer state", "train.py:24 train", "train.py:30 keep", "no Python frame"):
        assert name in text


def test_areas_of_the_map_are_bytes(leaking):
    figure = plots.snapshot_peak(leaking)
    areas = {p.get_label(): p.get_width() * p.get_height()
             for p in figure.artists if isinstance(p, Rectangle)}  # fmt: skip
    assert areas["optimizer state"] == pytest.approx(2 * areas["parameters"], rel=0.05)


def test_segments_show_what_is_in_use_and_the_request(opened):
    figure = plots.snapshot_fragmentation(opened(fragmented()))
    axes = axes_of(figure, "segments")
    bars = [(bars.get_label(), bars.patches[0].get_width()) for bars in axes.containers]
    assert bars == [("request", 12 * MIB), ("reserved", 20 * MIB), ("reserved", 20 * MIB)]
    used = [path.get_extents() for drawn in axes.collections for path in drawn.get_paths()]
    assert [box.width for box in used] == [10 * MIB, 10 * MIB]
    assert "12.0 MiB requested; 20.0 MiB free in 3 holes, the largest 10.0 MiB" in said(figure)


def test_a_leak_is_a_line_with_its_stack(leaking):
    figure = plots.snapshot_growth(leaking)
    (line,) = axes_of(figure, "growth").lines
    assert line.get_ydata().tolist() == list(leaking.leaks[0].bytes_at_step_ends)
    assert line.get_xdata().tolist() == list(range(2, 9))
    assert "1.00 MiB a step: train.py:30 keep" in said(figure)


def test_what_there_is_not_is_said_in_its_place(opened):
    card = Card()
    card.alloc(0, 512, SCRIPT)
    found = opened(card)
    assert "Nothing grows from step to step; no step was recognised." in said(
        plots.snapshot_growth(found)
    )
    assert "lists no segment" in said(plots.snapshot_fragmentation(found))
    card.free(0)
    assert "Nothing grows" in said(plots.snapshot_growth(opened(training(2))))
    del card.events[:]
    card.segment(0, 2 * MIB)
    assert "Nothing is allocated" in said(plots.snapshot_peak(opened(card)))


@pytest.mark.parametrize("draw", PICTURES)
@pytest.mark.parametrize("size", [(9.0, 3.4), (3.0, 2.0), (0.6, 0.6)])
def test_every_picture_has_any_size(leaking, draw, size):
    assert plots.to_png(draw(leaking, size=size), dpi=40)[1:4] == b"PNG"
    assert plots.to_svg(draw(leaking, size=size), label="a").startswith("<svg")


@pytest.mark.parametrize("draw", PICTURES)
def test_what_is_no_snapshot_is_refused(draw):
    with pytest.raises(memlab.MemlabError, match=r"memlab\.open_snapshot"):
        draw("snapshot.pickle")


def test_a_replay_stacks_up_to_what_is_reserved_and_says_its_end():
    moments = memlab.replay_allocations(["a = 1.1 GiB", "del a", "b = 12 MiB"])
    axes = axes_of(figure := plots.replay(moments), "replay")
    tops = {p.get_label(): p.get_xy() for p in axes.patches if isinstance(p, Polygon)}
    assert max(corners[:, 1].max() for corners in tops.values()) == moments[-1].reserved_bytes
    lost = tops["free, cannot be given back"]
    at_end = lost[lost[:, 0] > 0.99]
    assert at_end[:, 1].max() == moments[-1].allocated_bytes + moments[-1].non_releasable_bytes
    assert "12.0 MiB allocated, 1.10 GiB reserved, 1.09 GiB of it stuck" in said(figure)
    assert [label.get_text() for label in axes.get_xticklabels()] == [m.line for m in moments]
    long = plots.replay(memlab.replay_allocations([f"x{n} = 12 MiB" for n in range(60)]))
    names = [label.get_text() for label in axes_of(long, "replay").get_xticklabels()]
    assert len(names) < 20
    assert all("…" not in name for name in names)
    nothing = plots.replay([])
    assert "without lines" in said(nothing)
    assert memlab.course.chapter(4).guess("end", 3).on(nothing) is nothing


def test_a_picture_in_a_cell_says_in_words_what_is_written_in_it():
    png, metadata = plots.replay(memlab.replay_allocations(["a = 3 MiB"]))._repr_png_()
    assert png.startswith(b"\x89PNG")
    assert metadata["alt"].startswith("MiB after each line, replayed; at the end 3.00")
