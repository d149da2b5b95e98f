"""Categories and peaks against traces written by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.errors import MemlabError
from memlab.memory.lifetimes import first_crossing, step_memory
from memlab.trace import CATEGORIES, Category, Holding, Interval, Phase, Trace

OUTSIDE = Interval(step=-1, phase=Phase.BUILD)


def trace_of(*events, parameters=(), states=(), gradients=(), leftover=0):
    """Build a trace from (interval, address, nbytes)."""
    intervals = list(dict.fromkeys(interval for interval, *_ in events))
    count = len(events)
    return Trace(
        address=np.array([address for _, address, _ in events], np.int64),
        nbytes=np.array([nbytes for *_, nbytes in events], np.int64),
        interval=np.array([intervals.index(i) for i, *_ in events], np.int32),
        operator=np.arange(1, count + 1, dtype=np.int32),
        in_operator=np.ones(count, np.bool_),
        module=np.full(count, -1, np.int32),
        intervals=tuple(intervals),
        operators=tuple(f"op{i}" for i in range(count)),
        modules=(),
        parameters={address: f"p{address}" for address in parameters},
        leftover_bytes=leftover,
        states={address: f"p{address - 5}" for address in states},
        gradients=frozenset(gradients),
    )


def at(step, phase, micro_batch=0):
    return Interval(step=step, phase=phase, micro_batch=micro_batch)


DATA = at(-1, Phase.DATA)
F0, B0, O0 = at(0, Phase.FORWARD), at(0, Phase.BACKWARD), at(0, Phase.OPTIMIZER)
F1, B1, O1 = at(1, Phase.FORWARD), at(1, Phase.BACKWARD), at(1, Phase.OPTIMIZER)
END = at(-1, Phase.TEARDOWN)

HAND = trace_of(
    (OUTSIDE, 1, 1000),  # a parameter
    (OUTSIDE, 2, 10),  # a buffer
    (DATA, 3, 300),  # an input
    (F0, 9, 7),  # left behind by the first forward, for good: a cache
    (F0, 4, 50), (B0, 5, 1000), (B0, 4, -50), (O0, 6, 2000), (O0, 5, -1000),
    (F1, 4, 60),  # an activation
    (F1, 7, 5), (F1, 7, -5),  # a temporary
    (B1, 8, 20), (B1, 8, -20),  # a temporary
    (B1, 5, 1000), (B1, 4, -60),
    (O1, 8, 400), (O1, 8, -400), (O1, 5, -1000),
    (END, 6, -2000), (END, 9, -7), (END, 3, -300), (END, 2, -10), (END, 1, -1000),
    parameters=[1], states=[6],
)  # fmt: skip


def held(category, module, operator, phase, nbytes):
    return Holding(category=category, module=module, operator=operator, phase=phase, num_blocks=1,
                   nbytes=nbytes)  # fmt: skip


def test_holdings_at_the_peak_are_those_counted_by_hand():
    assert step_memory(HAND, 1).holdings() == (
        held(Category.OPTIMIZER_STATE, "p1", "op7", Phase.OPTIMIZER, 2000),
        held(Category.PARAMETERS, "p1", "op0", Phase.BUILD, 1000),
        held(Category.GRADIENTS, "", "op14", Phase.BACKWARD, 1000),
        held(Category.TEMPORARIES, "", "op16", Phase.OPTIMIZER, 400),
        held(Category.INPUTS, "", "op2", Phase.DATA, 300),
        held(Category.BUFFERS, "", "op1", Phase.BUILD, 10),
        held(Category.BUFFERS, "", "op3", Phase.FORWARD, 7),
    )
    first = step_memory(HAND, 1).holdings(1)  # what is live at another instant
    assert [h.nbytes for h in first if h.category is Category.ACTIVATIONS] == [60]
    assert sum(h.nbytes for h in first) == 3317 + 60


def test_what_a_forward_leaves_behind_is_no_activation():
    trace = trace_of(
        (OUTSIDE, 1, 1000), (OUTSIDE, 2, 70),  # a parameter; the bucket of its gradient
        (F0, 4, 50), (B0, 4, -50), (O0, 3, 8), (O0, 3, -8),
        (F1, 2, -70), (F1, 5, 60),  # the bucket is made anew, and stays
        (F1, 4, 50), (B1, 4, -50), (O1, 3, 8), (O1, 3, -8),
        (END, 5, -60), (END, 1, -1000),
        parameters=[1],
    )  # fmt: skip
    timeline = step_memory(trace, 1).timeline
    assert timeline.bytes_of("buffers").tolist() == [70, 0, 60, 60, 60, 60, 60]
    assert timeline.bytes_of("activations").max() == 50
    cut = trace_of((OUTSIDE, 1, 1000), (F0, 4, 50), parameters=[1])  # cut off in forward
    assert step_memory(cut, 0).timeline.bytes_of("activations").tolist() == [0, 50]


@pytest.mark.parametrize(("known", "category"), [([], "buffers"), ([5], "gradients")])
def test_a_gradient_that_is_freed_in_the_next_step_is_one_where_an_update_has_told_of_it(
    known, category
):
    trace = trace_of(
        (OUTSIDE, 1, 1000), (F0, 4, 50), (B0, 5, 1000), (B0, 4, -50), (O0, 3, 8), (O0, 3, -8),
        (F1, 4, 50), (F1, 5, -1000), (B1, 5, 1000), (B1, 4, -50), (O1, 3, 8), (O1, 3, -8),
        parameters=[1], gradients=known,
    )  # fmt: skip
    timeline = step_memory(trace, 1).timeline
    assert timeline.bytes_of(category)[:3].tolist() == [1000, 1000, 0]


def test_each_block_gets_the_category_of_its_lifetime():
    memory = step_memory(HAND, 1)
    peak = memory.timeline.peak_by_category
    assert peak == {
        "parameters": 1000, "buffers": 17, "gradients": 1000, "optimizer_state": 2000,
        "activations": 0, "temporaries": 400, "inputs": 300,
    }  # fmt: skip
    assert memory.peak_bytes == sum(peak.values()) == 4717
    assert memory.peak_place.phase is Phase.OPTIMIZER
    activations = memory.timeline.bytes_by_category[:, CATEGORIES.index(Category.ACTIVATIONS)]
    assert activations.max() == 60
    assert memory.timeline.bytes_by_category[0].sum() == 3317  # what stood before the step
    assert len(memory.timeline) == 11
    # the first step has no optimizer state before its end
    state = step_memory(HAND, 0).timeline.bytes_of("optimizer_state")
    assert state.tolist() == [0, 0, 0, 0, 0, 2000, 2000]


def test_the_bytes_of_a_category_in_a_phase_are_those_counted_by_hand():
    timeline = step_memory(HAND, 1).timeline
    assert timeline.bytes_of("activations", "forward")[-1] == 60
    assert timeline.bytes_of("temporaries", "optimizer").max() == 400
    assert timeline.bytes_of(Category.TEMPORARIES, Phase.BACKWARD).max() == 20
    assert len(timeline.bytes_of("gradients")) == len(timeline)
    for wrong in (("weights",), ("gradients", "update")):
        with pytest.raises(MemlabError, match=f"{wrong[-1]}.*allowed is"):
            timeline.bytes_of(*wrong)


def test_an_address_that_is_used_again_is_another_block():
    trace = trace_of(
        (OUTSIDE, 1, 8), (OUTSIDE, 1, -8), (OUTSIDE, 1, 16), (F0, 2, 4), (F0, 2, -4), (END, 1, -16),
        parameters=[1],
    )  # fmt: skip
    assert step_memory(trace, 0).timeline.peak_by_category["parameters"] == 16


@pytest.mark.parametrize(
    ("limit", "phase"), [(1200, Phase.DATA), (999, Phase.BUILD), (2000, Phase.BACKWARD)]
)
def test_first_crossing_names_the_phase(limit, phase):
    assert first_crossing(HAND, limit).phase is phase
    assert first_crossing(HAND, 4716).operator == "op16"
    assert first_crossing(HAND, 4717) is None  # at the peak itself


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 10**6)), min_size=1, max_size=40))
def test_rows_sum_to_what_is_allocated_whatever_the_lifetimes(blocks):
    intervals = [F0, B0, O0]
    events = sorted(
        [(kind, i + 1, size) for i, (kind, size) in enumerate(blocks)], key=lambda e: e[0]
    )
    trace = trace_of((OUTSIDE, 10**9, 1), *[(intervals[k], a, n) for k, a, n in events])
    memory = step_memory(trace, 0)
    assert sum(h.nbytes for h in memory.holdings()) == memory.peak_bytes
    assert sum(h.num_blocks for h in memory.holdings(0)) == 1
    total = memory.timeline.total_bytes
    assert total.tolist() == [1, *(1 + np.cumsum([n for *_, n in events]))]
