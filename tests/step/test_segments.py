"""Expandable segments: what a card is predicted to reserve with them, and where there are none."""

import pytest

import memlab
from memlab import Outcome, StepConfig
from memlab._util.units import MIB
from memlab.techniques.script import script


@pytest.mark.slow
def test_less_is_reserved_and_the_same_allocated():
    workload = memlab.workloads.get("gpt-small")
    plain = memlab.predict(workload, StepConfig(batch_size=24), "t4")
    paged = memlab.predict(workload, StepConfig(batch_size=24, expandable_segments=True), "t4")
    assert paged.outcome is Outcome.OK
    assert paged.peak_allocated_bytes <= plain.peak_allocated_bytes
    assert paged.peak_reserved_bytes < plain.peak_reserved_bytes
    # one page of each pool is all that a growing segment can leave over, and holes between blocks
    assert paged.peak_reserved_bytes - paged.peak_allocated_bytes < 64 * MIB


def test_a_cpu_has_no_segments():
    workload = memlab.workloads.get("vit-digits")
    result = memlab.measure(workload, StepConfig(expandable_segments=True), "cpu")
    assert result.outcome is Outcome.UNSUPPORTED
    assert "no caching allocator" in result.message


def test_a_script_sets_them_before_the_model_is_built():
    text = script(StepConfig(expandable_segments=True), "cuda")
    assert text.index("expandable_segments:True") < text.index("build_model()")
