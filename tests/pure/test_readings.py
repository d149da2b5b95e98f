"""The parts of a timeline and of a peak: where they lie, and what they are called."""

from itertools import pairwise

import numpy as np
import pytest

from memlab import explain
from memlab.cost_model import cuda_kernels
from memlab.figures.look import category_names
from memlab.figures.peak import peak_bar, peak_map, peak_readings
from memlab.figures.timeline import PARTS, part_of
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


TWO_BATCHES = timeline(
    [1, 2, 3, 4, 5, 9, 6, 7],
    [Phase.FORWARD, Phase.BACKWARD] * 3 + [Phase.OPTIMIZER] * 2,
    [0, 0, 1, 1, 2, 2, 2, 2],
)


def test_a_part_is_one_phase_of_the_micro_batch_in_which_it_reaches_highest():
    totals = {phase: part_of(TWO_BATCHES, phase).total_bytes.tolist() for phase in PARTS}
    assert totals == {Phase.FORWARD: [5], Phase.BACKWARD: [9], Phase.OPTIMIZER: [6, 7]}


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
    explained = explain(result)
    assert name in str(explained).splitlines()[2]
    rows = [(row.operator, row.is_workspace) for row in explained.rows]
    assert rows == [(operator, operator == "aten::addmm") for operator in operators]
    assert category_names(make_held(*kept))[Category.BUFFERS] == "buffers"
    assert set(CUBLAS) == cuda_kernels.CUBLAS
