"""The readings of a timeline and their readout, as a page shows them."""

import dataclasses
import re
from itertools import pairwise

import numpy as np
import pytest

from memlab import explain
from memlab._panel.pictures import lowering, moments, parts_of_peak, readout
from memlab.cost_model import cuda_kernels
from memlab.figures.look import category_names
from memlab.figures.peak import peak_bar, peak_map, peak_readings
from memlab.figures.timeline import MOST_READINGS, PARTS, part_of, readings
from memlab.search.holdings import CUBLAS
from memlab.trace import CATEGORIES, PHASES, Category, Phase, Timeline
from tests.figure_parts import MIB, held, make_held, make_result, texts_of, transformer


def timeline(totals, phases, micro_batches=None):
    """Return a timeline whose bytes are all activations, one operator an instant."""
    held = np.zeros((len(totals), len(CATEGORIES)), np.int64)
    held[:, CATEGORIES.index(Category.ACTIVATIONS)] = totals
    return Timeline(
        bytes_by_category=held,
        phase=np.array([PHASES.index(phase) for phase in phases], np.int8),
        micro_batch=np.array(micro_batches or [0] * len(totals), np.int32),
        operator=np.arange(1, len(totals) + 1, dtype=np.int32),
    )


def test_each_moment_is_the_highest_of_its_column_and_the_peak_is_among_them():
    totals = np.random.default_rng(0).integers(1, 10**9, 5000)
    line = timeline(totals, [Phase.FORWARD] * 5000)
    found = readings(line)
    assert len(found) == MOST_READINGS
    assert max(reading.nbytes for reading in found) == totals.max()
    assert [reading.is_peak for reading in found].count(True) == 1
    assert (found[0].start, found[-1].end) == (0.0, 1.0)
    assert all(one.end == other.start for one, other in pairwise(found))


def test_a_moment_says_when_and_where_in_words():
    phases = [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 3
    ran = [("transformer.h.4.mlp.act", "aten::gelu")] * 5 + [("head", "aten::mm")]
    found = readings(
        timeline([1, 2, 3, 4, 5, 6], phases), ran, ["transformer.h.3", "transformer.h.4"]
    )
    assert found[0].when == "early in forward"
    assert found[0].where == "block 1, mlp.act, gelu"
    assert found[-1].when == "late in backward"
    assert found[-1].where == "head, mm"
    line = timeline([1, 2, 3, 4], [Phase.FORWARD, Phase.BACKWARD] * 2, [0, 0, 1, 1])
    assert readings(line)[0].when == "early in forward of micro-batch 1 of 2"
    assert readings(line)[-1].when.endswith("backward of micro-batch 2 of 2")


def test_the_readout_has_a_named_button_for_each_moment_and_escapes_what_a_model_is_called():
    line = timeline([2**20, 2**21], [Phase.FORWARD, Phase.BACKWARD])
    spots = moments(readings(line, [("<b>", "aten::mm"), ("<b>", "aten::mm")]), {})
    page = readout(spots, (0.1, 0.2, 0.8, 0.5), name="one", kind="moment", label="moments")
    labels = re.findall(r'aria-label="([^"]*)"', page)
    assert len(labels) == 1 + len(spots)
    assert labels[-1].startswith("2.00 MiB, the peak, early in backward")
    assert "left:10.00%;top:20.00%;width:80.00%;height:50.00%" in page
    assert "<b>, mm" not in page
    assert readout([], (0, 0, 1, 1), name="one", kind="moment", label="moments") == ""


TWO_BATCHES = timeline(
    [1, 2, 3, 4, 5, 9, 6, 7],
    [Phase.FORWARD, Phase.BACKWARD] * 3 + [Phase.OPTIMIZER] * 2,
    [0, 0, 1, 1, 2, 2, 2, 2],
)


def test_a_part_is_one_phase_of_the_micro_batch_in_which_it_reaches_highest():
    totals = {phase: part_of(TWO_BATCHES, phase).total_bytes.tolist() for phase in PARTS}
    assert totals == {Phase.FORWARD: [5], Phase.BACKWARD: [9], Phase.OPTIMIZER: [6, 7]}


def test_readings_of_a_part_fill_the_axis_and_name_its_micro_batch():
    (forward,) = readings(TWO_BATCHES, only=Phase.FORWARD)
    assert (forward.start, forward.end) == (0.0, 1.0)
    assert forward.when == "early in forward of micro-batch 3 of 3"
    assert not forward.is_peak
    (backward,) = readings(TWO_BATCHES, only=Phase.BACKWARD)
    assert backward.is_peak
    assert readings(TWO_BATCHES, only=Phase.OPTIMIZER)[0].when == "early in optimizer"
    assert {reading.where for reading in readings(TWO_BATCHES)} == {""}  # without operators
    ran = [(f"m{i}", "aten::mm") for i in range(len(TWO_BATCHES))]  # of the whole step
    assert readings(TWO_BATCHES, ran, only=Phase.BACKWARD)[0].where == "m5, mm"
    line = timeline([1, 2], [Phase.FORWARD, Phase.BACKWARD])
    assert readings(line, only=Phase.OPTIMIZER) == []


def test_an_optimizer_in_backward_belongs_to_both_parts():
    phases = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.BACKWARD, Phase.OPTIMIZER]
    line = timeline([1, 2, 3, 4, 5], phases)
    assert part_of(line, Phase.BACKWARD).total_bytes.tolist() == [2, 3, 4]
    assert part_of(line, Phase.OPTIMIZER).total_bytes.tolist() == [3, 4, 5]


def test_the_parts_of_a_peak_lie_where_its_bar_draws_them_and_sum_to_it():
    result = transformer()
    found = peak_readings(result)
    assert sum(part.nbytes for part in found) == result.peak_allocated_bytes
    assert (found[0].start, found[-1].end) == (0.0, 1.0)
    assert all(one.end == other.start for one, other in pairwise(found))
    below = peak_readings(result, limit_bytes=2 * result.peak_allocated_bytes)
    assert below[-1].end == 0.5
    places = {part.category: part.places for part in found}  # the largest, in words
    assert places[Category.PARAMETERS][0] == ("ln.weight in 12 blocks", 12 * MIB)
    assert places[Category.TEMPORARIES] == (("model.h.3.mlp.fc", 30 * MIB),)
    assert places[Category.INPUTS][0][0] == "outside of all modules (clone)"
    reserved = peak_readings(make_result(peak_reserved_bytes=50 * MIB))[-1]
    assert (reserved.name, reserved.nbytes) == ("reserved, not allocated", 10 * MIB)
    assert (reserved.fraction, reserved.end) == (None, 1.0)


@pytest.mark.parametrize(
    ("operators", "name"),
    [
        (["aten::addmm"], "library workspace"),
        (["aten::addmm", "aten::zeros"], "buffers, workspace"),
        (["aten::zeros"], "buffers"),
    ],
)
def test_the_workspace_of_cublas_is_not_called_buffers(operators, name):
    kept = [held(Category.BUFFERS, "a", 32 * MIB, operator=operator) for operator in operators]
    result = make_held(*kept, peak_reserved_bytes=100 * MIB)
    names = category_names(result)
    assert names[Category.BUFFERS] == name
    assert peak_readings(result)[0].name == name
    assert any(name in text for text in texts_of(peak_bar(result, size=(9, 1))))
    assert any(name in text for text in texts_of(peak_map(result)))
    reading = dataclasses.replace(
        readings(result.timeline)[0], by_category=((Category.BUFFERS, MIB),)
    )
    (moment,) = moments([reading], {}, names)
    assert f"</i>{name} <b>" in moment.content
    explained = explain(result)
    assert name in str(explained).splitlines()[2]
    rows = [(row.operator, row.is_workspace) for row in explained.rows]
    assert rows == [(operator, operator == "aten::addmm") for operator in operators]
    assert category_names(make_held(*kept))[Category.BUFFERS] == "buffers"
    assert set(CUBLAS) == cuda_kernels.CUBLAS


def test_the_bar_and_the_timeline_say_the_same_about_what_would_lower_a_category():
    result = make_held(held(Category.ACTIVATIONS, "<script>", 30 * MIB))
    said = lowering(result)
    line = said[Category.ACTIVATIONS]  # in the words of the controls
    assert line.startswith("lower activations: ")
    assert re.search(r"accumulation 2 \(peak about [\d.]+ MiB lower\)", line)
    assert "_" not in line
    peak = max(readings(result.timeline), key=lambda reading: reading.nbytes)
    (moment,) = moments([peak], said)
    parts = parts_of_peak(peak_readings(result), said)
    for text in (moment.content, parts[-1].content, parts[-1].heard):
        assert line in text
    page = readout(parts, (0, 0, 1, 1), name="n", kind="part", label="parts")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("width", [0.5, 1.0])
def test_what_is_free_below_the_limit_leaves_its_column_empty(width):
    limit = int(40 * MIB / width)
    spot = parts_of_peak(peak_readings(make_result(), limit_bytes=limit), {})
    page = readout(spot, (0, 0, 1, 1), name="n", kind="part", label="parts")
    columns = re.search(r"grid-template-columns:([^\"]*)", page)[1].split()
    assert len(columns) == len(spot) + (width < 1)
