"""A predicted run written as a snapshot compares equal; each change of it is named."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Polygon

import memlab
from memlab import plots
from memlab._util.units import MIB
from memlab.integrations import snapshot_alignment
from memlab.integrations.snapshot_alignment import align
from memlab.integrations.snapshot_blocks import BLOCK
from memlab.integrations.snapshot_comparison import BEFORE, Difference, compare_with_trace
from memlab.trace import Phase
from tests.comparison_parts import Event, repeated, snapshot_of, story, trace_of
from tests.figure_parts import texts_of
from tests.snapshot_parts import KEPT, dump

CONFIG = memlab.StepConfig(batch_size=4)


@pytest.fixture
def compared(tmp_path):
    """Return a function that compares a story, as a snapshot, with another as predicted."""

    def compare(events, predicted=None, config=CONFIG, **options):
        snapshot = snapshot_of(events, **options)
        opened = memlab.open_snapshot(dump(tmp_path / "snapshot.pickle", snapshot))
        return compare_with_trace(opened, trace_of(predicted or story()), config, "t4", "mine")

    return compare


def changed(events, *, after, what):
    """Return a story with more events after the last event of a block."""
    at = max(i for i, event in enumerate(events) if event.block == after)
    return [*events[: at + 1], *what, *events[at + 1 :]]


def in_backward(block, nbytes):
    return Event(block, nbytes, 2, Phase.BACKWARD)


def without(events, block):
    return [event for event in events if event.block != block]


def check_sums(found):
    """Check that the rows explain both numbers at the peak, to the byte."""
    assert sum(row.measured_at_peak_bytes for row in found.rows) == found.measured_at_peak_bytes
    assert sum(row.predicted_at_peak_bytes for row in found.rows) == found.predicted_at_peak_bytes
    assert max(found.measured) == found.measured_peak_bytes
    assert max(found.predicted) == found.predicted_peak_bytes
    assert len(found.measured) == len(found.predicted) == len(found.phase)
    higher = max(found.measured_peak_bytes, found.predicted_peak_bytes)
    assert higher in (found.measured_at_peak_bytes, found.predicted_at_peak_bytes)


# equal


@pytest.mark.parametrize("stacks", [True, False])
@pytest.mark.parametrize("most_events", [None, 60, 75, 90])
def test_a_prediction_equals_itself_to_the_byte(compared, stacks, most_events):
    found = compared(story(), stacks=stacks, most_events=most_events)
    assert found.differences == ()
    assert found.measured_peak_bytes == found.predicted_peak_bytes == 42 * MIB
    assert found.matched_fraction == 1.0
    assert found.summary == (
        "The step held what was predicted, to the byte: at its peak 42.0 MiB, in backward. Every "
        "allocation is as predicted."
    )
    check_sums(found)


def test_the_first_step_is_compared_with_the_first_one(compared):
    found = compared(story(num_steps=1))
    assert (found.differences, found.measured_peak_bytes) == ((), 36 * MIB)
    assert any("first one of the training" in note for note in found.notes)


@pytest.mark.parametrize("stacks", [True, False])
def test_of_many_steps_the_last_whole_one_is_compared(compared, stacks):
    events = repeated(story(num_steps=2), 6)
    events = events[: len(events) - 5]  # written in the middle of a step
    cut = changed(events, after="w 1 1 again 6", what=[])
    found = compared(cut, stacks=stacks)
    assert found.measured_peak_bytes == 42 * MIB
    assert not [row for row in found.differences if row.num_measured != row.num_predicted]


def test_operators_are_summed_over_modules(compared):
    (matmul,) = [row for row in compared(story()).operators
                 if (row.phase, row.operator) == ("forward", "aten::mm")]  # fmt: skip
    assert (matmul.num_measured, matmul.measured_bytes) == (3, 18 * MIB)
    assert matmul.measured_bytes == matmul.predicted_bytes


def test_an_optimizer_that_allocates_in_the_first_step_alone_marks_no_steps(compared):
    plain = [event for event in story() if not event.block.startswith("u ")]
    found = compared(plain, plain)
    assert (found.found_by, found.differences) == ("backward passes", ())
    assert (found.measured_peak_bytes, found.notes) == (42 * MIB, ())


# changed


@pytest.mark.parametrize("stacks", [True, False])
def test_an_allocation_that_was_not_predicted_is_named(compared, stacks):
    what = [in_backward("new", 12 * MIB), in_backward("new", None)]
    events = story()
    at = next(i for i, e in enumerate(events) if e.block == "w 1 2")
    found = compared([*events[: at + 1], *what, *events[at + 1 :]], stacks=stacks)
    (row,) = found.differences
    assert (row.difference, row.measured_bytes) == (Difference.NOT_PREDICTED, 12 * MIB)
    assert (row.num_predicted, row.phase) == (0, "backward")
    assert row.place == "an allocation beside aten::convolution_backward of layers.1"
    assert found.summary == (
        "The step held 6.00 MiB more than predicted at its peak (48.0 MiB, in backward; predicted "
        "42.0 MiB, in backward); at that place 12.0 MiB differ, all of it in an allocation beside "
        "aten::convolution_backward of layers.1 in backward (not predicted)."
    )
    check_sums(found)


def test_an_allocation_with_a_stack_is_named_by_its_line(compared):
    events = changed(story(), after="w 2 2", what=[])
    at = next(i for i, e in enumerate(events) if e.block == "y 1 2")
    events.insert(at, Event("kept", 20 * MIB, 2, Phase.FORWARD))
    found = compared(events, extra={"kept": {"frames": KEPT}})
    (row,) = found.differences
    assert row.name.startswith("train.py:30 keep")
    assert "all of it in train.py:30 keep" in found.summary
    assert found.measured_peak_bytes == 62 * MIB


@pytest.mark.parametrize("stacks", [True, False])
def test_an_allocation_that_the_snapshot_lacks_is_named(compared, stacks):
    found = compared(without(story(), "w 2 2"), stacks=stacks)
    (row,) = found.differences
    assert (row.difference, row.operator, row.module) == (
        Difference.NOT_MEASURED, "aten::convolution_backward", "layers.2")  # fmt: skip
    assert found.predicted_peak_bytes - found.measured_peak_bytes == 6 * MIB
    assert "MiB less than predicted" in found.summary
    assert "all of it in aten::convolution_backward in backward of layers.2" in found.summary
    check_sums(found)


@pytest.mark.parametrize("stacks", [True, False])
def test_an_allocation_of_another_size_is_named(compared, stacks):
    events = [dataclasses.replace(event, nbytes=9 * MIB) if event.block == "w 2 2" and event.nbytes
              else event for event in story()]  # fmt: skip
    found = compared(events, stacks=stacks)
    (row,) = found.differences
    assert (row.difference, row.measured_bytes, row.predicted_bytes) == (
        Difference.RESIZED, 9 * MIB, 6 * MIB)  # fmt: skip
    assert found.measured_peak_bytes == 45 * MIB
    check_sums(found)


@pytest.mark.parametrize("stacks", [True, False])
def test_an_allocation_elsewhere_in_the_order_is_named(compared, stacks):
    events = story()
    (moved,) = [e for e in events if e.block == "g 2 2" and e.nbytes]
    events.remove(moved)
    found = compared(changed(events, after="w 2 2", what=[moved]), stacks=stacks)
    (row,) = found.differences
    assert (row.difference, row.operator, row.module) == (Difference.MOVED, "aten::mm", "layers.2")
    assert row.measured_bytes == row.predicted_bytes == 3 * MIB
    check_sums(found)


@pytest.mark.parametrize("stacks", [True, False])
def test_a_block_that_is_freed_later_is_named(compared, stacks):
    events = story()
    (free,) = [e for e in events if e.block == "y 2 2" and e.nbytes is None]
    events.remove(free)
    found = compared(changed(events, after="y 0 2", what=[free]), stacks=stacks)
    (row,) = found.differences
    assert (row.difference, row.operator, row.module) == (
        Difference.FREED_LATER, "aten::mm", "layers.2")  # fmt: skip
    assert found.measured_peak_bytes > found.predicted_peak_bytes
    assert "(freed later than predicted)" in found.summary
    check_sums(found)


def test_a_block_that_is_freed_earlier_is_named(compared):
    events = story()
    (free,) = [e for e in events if e.block == "y 0 2" and e.nbytes is None]
    events.remove(free)
    found = compared(changed(events, after="w 2 2", what=[dataclasses.replace(free)]))
    assert [row.difference for row in found.differences] == [Difference.FREED_EARLIER]


def test_what_stands_before_the_step_is_compared_too(compared):
    extra = Event("ema", 30 * MIB, -1, Phase.BUILD)
    found = compared([extra, *story()])
    (row,) = found.differences
    assert (row.phase, row.difference, row.measured_bytes) == (
        BEFORE, Difference.NOT_PREDICTED, 30 * MIB)  # fmt: skip
    assert "all of it in parameters from before the step" in found.summary
    check_sums(found)


def test_gradients_that_the_next_step_drops_belong_to_the_step_before(compared):
    events = []
    for event in story():
        if event.block.startswith("g ") and event.nbytes is None and event.step < 2:
            continue
        events.append(event)
        if event.block.startswith("x ") and event.nbytes and event.step:
            events += [Event(f"g {k} {event.step - 1}", None, event.step, Phase.DATA)
                       for k in range(3)]  # fmt: skip
    assert compared(events).differences == ()


def test_another_stream_is_said(compared):
    events = changed(story(), after="y 1 2", what=[])
    at = next(i for i, e in enumerate(events) if e.block == "t 1 2")
    events.insert(at, Event("next x", 3 * MIB, 2, Phase.FORWARD))
    found = compared(events, extra={"next x": {"stream": 7}})
    (row,) = found.differences
    assert row.name.endswith("on stream 7 in forward")


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_backward_passes_mark_the_micro_batches_of_a_step(compared, accumulation_steps):
    plain = [e for e in story(num_steps=6) if not e.block.startswith(("u ", "m "))]
    predicted = [dataclasses.replace(e, step=e.step // accumulation_steps) for e in plain]
    config = memlab.StepConfig(batch_size=4, accumulation_steps=accumulation_steps)
    found = compared(plain, predicted, config)
    assert (found.found_by, found.differences) == ("backward passes", ())
    matmul = next(row for row in found.operators if row.operator == "aten::mm")
    assert matmul.num_measured == 3 * accumulation_steps


# what cannot be compared


def test_another_workload_is_said(compared):
    other = [dataclasses.replace(e, nbytes=e.nbytes * 3 + 1536) if e.nbytes else e
             for e in story(num_layers=5)]  # fmt: skip
    found = compared(other)
    assert found.matched_fraction < 0.5
    assert "Check that the workload, the batch size" in found.summary
    check_sums(found)
    with pytest.raises(memlab.MemlabError, match=r"no three allocations in a row .* pass the w"):
        compared(other, stacks=False)


@pytest.mark.parametrize("stacks", [True, False])
@pytest.mark.parametrize("most_events", [20, 25])
def test_half_a_step_is_refused_with_a_remedy(compared, stacks, most_events):
    with pytest.raises(memlab.MemlabError, match=r"no whole training step .*max_entries="):
        compared(story(), stacks=stacks, most_events=most_events)


def test_a_snapshot_without_events_and_a_cpu_are_refused(tmp_path):
    snapshot = {**snapshot_of(story()), "device_traces": [[]]}
    opened = memlab.open_snapshot(dump(tmp_path / "s.pickle", snapshot))
    workload = memlab.workloads.get("mlp-tiny") if "mlp-tiny" in memlab.workloads.names() else (
        memlab.workloads.get(memlab.workloads.names()[0]))  # fmt: skip
    with pytest.raises(memlab.MemlabError, match="no events to compare; record three steps"):
        opened.compare(workload, CONFIG, "t4")
    with pytest.raises(memlab.MemlabError, match=r"'cpu' is no card, .* pass the card"):
        opened.compare(workload, CONFIG, "cpu")
    with pytest.raises(memlab.MemlabError, match="rtx-3090"):
        opened.compare(workload, CONFIG, "rtx-3091")


def test_steps_too_long_and_too_different_are_refused(monkeypatch):
    monkeypatch.setattr(snapshot_alignment, "MOST_CELLS", 8)
    sides = [blocks([(512 * size, -1) for size in sizes]) for sizes in ((1, 2, 3), (4, 5, 6))]
    with pytest.raises(memlab.MemlabError, match="has 3 allocations and the predicted one 3"):
        align(*sides)


CHANGES = st.lists(
    st.tuples(st.sampled_from(["drop", "add", "keep", "resize", "swap", "script", "stream"]),
              st.integers(0, 10**6), st.integers(1, 9 * MIB)),
    max_size=8,
)  # fmt: skip


def changed_at_random(changes):
    """Return a story with random changes, and more for the events of single blocks."""
    events, extra = story(num_layers=2), {}
    for kind, number, nbytes in changes:
        at = number % len(events)
        block = events[at].block
        if kind == "drop":
            events = without(events, block)
        elif kind in ("add", "keep"):
            new = dataclasses.replace(
                events[at], block=f"new {number} {len(events)}", nbytes=nbytes
            )
            gone = [dataclasses.replace(new, nbytes=None)] if kind == "add" else []
            events[at + 1 : at + 1] = [new, *gone]
        elif kind == "resize":
            events = [dataclasses.replace(e, nbytes=nbytes) if e.block == block and e.nbytes else e
                      for e in events]  # fmt: skip
        elif kind == "swap" and at and events[at - 1].block != block:
            events[at - 1 : at + 1] = [events[at], events[at - 1]]
        elif kind in ("script", "stream"):
            extra[block] = {"frames": KEPT} if kind == "script" else {"stream": 5}
    return events, extra


@settings(max_examples=80, deadline=None)
@given(CHANGES, st.booleans(), st.one_of(st.none(), st.integers(1, 120)))
def test_any_change_is_explained_to_the_byte_or_refused(
    tmp_path_factory, changes, stacks, most_events
):
    events, extra = changed_at_random(changes)
    if not stacks:
        extra = {}
    snapshot = snapshot_of(events, extra=extra, stacks=stacks)
    if most_events is not None:
        (trace,) = snapshot["device_traces"]
        snapshot["device_traces"] = [trace[-most_events:]]
    opened = memlab.open_snapshot(dump(tmp_path_factory.mktemp("s") / "s.pickle", snapshot))
    found, refusal = None, ""
    try:
        found = compare_with_trace(opened, trace_of(story(num_layers=2)), CONFIG, "t4", "mine")
    except memlab.MemlabError as error:
        refusal = str(error)
    if found is None:
        assert "max_entries=" in refusal or "pass the workload" in refusal
        return
    check_sums(found)
    assert str(found)
    assert found.measured_peak_bytes <= opened.peak_allocated_bytes
    if found.measured_peak_bytes != found.predicted_peak_bytes:
        assert found.differences


# what a person sees


def test_a_comparison_reads_as_a_page_and_as_a_table(compared):
    import pandas as pd

    found = compared(without(story(), "w 2 2"))
    assert str(found).startswith(found.summary)
    assert "-6.00 MiB  0 B  6.00 MiB  aten::convolution_backward in backward" in str(found)
    assert "<th scope='col'" in found._repr_html_()
    assert "not in the snapshot" in found._repr_html_()
    frame = pd.DataFrame(list(found.rows))
    assert frame["predicted_at_peak_bytes"].sum() == found.predicted_at_peak_bytes
    assert {"phase", "operator", "module", "measured_bytes", "predicted_bytes"} <= set(frame)


def test_the_picture_shows_both_peaks(compared):
    found = compared(without(story(), "w 2 2"))
    figure = plots.snapshot_comparison(found)
    (axes,) = [axes for axes in figure.axes if axes.get_label() == "comparison"]
    (area,) = [patch for patch in axes.patches if isinstance(patch, Polygon)]
    lines = {line.get_label(): line for line in axes.lines}
    assert area.get_xy()[:, 1].max() == found.predicted_peak_bytes
    assert max(lines["snapshot"].get_ydata()) == found.measured_peak_bytes
    assert lines["peak"].get_ydata()[0] == found.predicted_peak_bytes
    said = " | ".join(texts_of(figure))
    assert "the largest difference: aten::convolution_backward in backward of layers.2" in said
    for text in ("mine, t4", "forward", "backward", "-6.00 MiB"):
        assert text in said


@pytest.mark.parametrize("size", [(9.0, 3.4), (3.0, 2.0), (0.6, 0.6)])
def test_the_picture_has_any_size(compared, size):
    figure = plots.snapshot_comparison(compared(story()), size=size)
    assert plots.to_png(figure, dpi=40)[1:4] == b"PNG"
    with pytest.raises(memlab.MemlabError, match=r"pass what Snapshot\.compare returned"):
        plots.snapshot_comparison("snapshot.pickle")


# alignment


def blocks(pairs):
    """Return blocks of these sizes and phases."""
    made = np.zeros(len(pairs), BLOCK).view(np.recarray)
    made.size_bytes, made.phase = np.array(pairs, np.int64).reshape(-1, 2).T
    return made


def points_of(size, phases):
    return int(size // 512).bit_length() * (1 + (phases[0] == phases[1] != -1))


def heaviest(a, b):
    """Return the most points of a common subsequence, by trying every one."""
    table = {}
    for i, j in itertools.product(range(len(a) + 1), range(len(b) + 1)):
        if not i or not j:
            table[i, j] = 0
            continue
        best = max(table[i - 1, j], table[i, j - 1])
        if a[i - 1][0] == b[j - 1][0]:
            both = a[i - 1][1], b[j - 1][1]
            best = max(best, table[i - 1, j - 1] + points_of(a[i - 1][0], both))
        table[i, j] = best
    return table[len(a), len(b)]


BLOCKS = st.lists(st.tuples(st.integers(1, 5).map(lambda n: 512 * n**3), st.integers(-1, 2)),
                  max_size=25)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(BLOCKS, BLOCKS, st.sampled_from([1, 2**20]))
def test_any_alignment_is_in_order_whole_and_heaviest(a, b, cells):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_alignment, "DIRECT_CELLS", cells)
        pairs = align(blocks(a), blocks(b))
        # blocks that only one side has, so that nothing is paired as an equal beginning or end
        ends = [blocks([(512 * size, -1), *side, (512 * (size + 1), -1)])
                for size, side in ((3, a), (9, b))]  # fmt: skip
        middle = align(*ends).same.tolist()
    assert sum(points_of(a[i - 1][0], (a[i - 1][1], b[j - 1][1])) for i, j in middle) == (
        heaviest(a, b)
    )
    assert (np.diff(pairs.same, axis=0) > 0).all()
    for side in (0, 1):
        used = np.concatenate([pairs.same, pairs.moved, pairs.resized])[:, side]
        assert len(set(used.tolist())) == len(used)
    for i, j in np.concatenate([pairs.same, pairs.moved]).tolist():
        assert a[i][0] == b[j][0]
    small = [sorted((a[i][0], b[j][0])) for i, j in pairs.resized.tolist()]
    assert all(large <= snapshot_alignment.LIKE_SIZE * little for little, large in small)
