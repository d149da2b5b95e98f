"""Which settings are predicted ahead: the neighbours of each slider, the likeliest first."""

import dataclasses

from memlab._panel.choices import LARGEST, neighbours, positions
from tests.forecast_parts import question

OFFERED = ("as-built", "bf16")


def changed(asked, precisions=OFFERED, before=None):
    """Return what each neighbour changes: the field and its value."""
    found = []
    for one in neighbours(asked, precisions, before):
        differing = [
            (field.name, getattr(one.config, field.name))
            for field in dataclasses.fields(one.config)
            if getattr(one.config, field.name) != getattr(asked.config, field.name)
        ]
        assert len(differing) == 1
        assert (one.workload_name, one.device) == (asked.workload_name, asked.device)
        found += differing
    return found


def with_changes(asked, **changes):
    return dataclasses.replace(asked, config=dataclasses.replace(asked.config, **changes))


def test_near_positions_come_before_far_ones_and_precisions_last():
    asked = with_changes(question(32, 4), memory_budget=0.5)
    assert changed(asked) == [
        ("memory_budget", 0.45),
        ("memory_budget", 0.55),
        ("accumulation_steps", 2),
        ("accumulation_steps", 8),
        ("batch_size", 16),
        ("batch_size", 64),
        ("memory_budget", 0.4),
        ("memory_budget", 0.6),
        ("accumulation_steps", 1),
        ("accumulation_steps", 16),
        ("batch_size", 8),
        ("batch_size", 128),
        ("precision", "bf16"),
    ]


def test_the_slider_that_a_hand_is_at_comes_first():
    before = question(32, 2)
    found = changed(question(32, 4), before=before)
    assert found[:4] == [("accumulation_steps", n) for n in (2, 8, 1, 16)]
    assert len(found) == len(changed(question(32, 4)))


def test_no_neighbour_lies_beyond_the_end_of_its_slider():
    assert ("memory_budget", 1.05) not in changed(question())
    assert [c for c in changed(question(1), ()) if c[0] != "memory_budget"] == [
        ("batch_size", 2),
        ("batch_size", 4),
    ]
    largest = question(LARGEST["batch_size"], LARGEST["accumulation_steps"])
    ahead = [value for name, value in changed(largest, ()) if name != "memory_budget"]
    assert max(ahead) == LARGEST["batch_size"] // 2
    for name, most in LARGEST.items():
        assert positions(name)[-1] == most
    assert positions("batch_size")[:8] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert positions("world_size")[:4] == [1, 2, 4, 8]
    assert [positions("memory_budget")[at] for at in (0, 1, 20)] == [0.0, 0.05, 1.0]


def test_what_cannot_be_is_no_neighbour():
    found = changed(question(8, 8))  # in which every micro-batch has a sample
    assert not {("batch_size", 4), ("accumulation_steps", 16)} & set(found)
    with_blocks = with_changes(question(), checkpointing="blocks")
    assert "memory_budget" not in dict(changed(with_blocks))


SIZES = ("tiny, length 4", "tiny", "tiny, length 16", "tiny, length 32", "tiny, length 64")


def names(asked, before=None, sizes=SIZES):
    """Return the neighbours in the order in which they are predicted: sizes by name."""
    found = neighbours(asked, (), before, sizes)
    default = asked.workload_name
    return [one.workload_name if one.workload_name != default else None for one in found]


def test_sizes_come_like_the_positions_of_the_other_sliders():
    asked = with_changes(question(32, 4), memory_budget=0.5)
    near = [None, None, None, None, "tiny, length 4", "tiny, length 16", None, None]
    assert names(asked) == [*near, None, None, None, None, "tiny, length 32", None, None]
    assert [one.config for one in neighbours(asked, (), None, SIZES) if one.workload_name != "tiny"
            ] == [asked.config] * 3  # fmt: skip


def test_a_hand_at_the_size_has_sizes_predicted_first():
    before = question(32, workload_name="tiny, length 4")
    assert names(question(32), before)[:4] == [*SIZES[:1], *SIZES[2:4], None]
    of_another = question(32, workload_name="another workload")
    assert names(question(32), of_another)[:1] == [None]
    # a workload of one size has none
    assert set(names(question(32), sizes=())) == {None}
    assert set(names(question(32, workload_name="other"))) == {None}
