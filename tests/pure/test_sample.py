"""What all tests share: the sample that `make test` draws, and variables of the environment."""

import os
from types import SimpleNamespace

import pytest

import conftest
from tests import ROOT


def test_a_seed_draws_the_same_again_and_another_seed_others():
    names = [f"test_{number}" for number in range(1000)]
    first, again, other = (
        {name for name in names if conftest.draw(seed, name) < 0.25} for seed in ("a", "a", "b")
    )
    assert first == again != other
    assert 200 < len(first) < 300


def modified(share):
    """Return which of some tests run at a share, in their order, and how many are left out."""

    def item(folder, *markers):
        return SimpleNamespace(
            path=ROOT / "tests" / folder / "test_any.py",
            nodeid=f"{folder} {markers}",
            get_closest_marker=lambda name: name if name in markers else None,
            add_marker=lambda marker: None,
        )

    items = [
        item("pure"),
        item("step", "slow"),
        item("step", "matrix"),
        item("matrix"),
        item("system"),
        item("system", "slow"),
        item("system", "long"),
    ]
    deselected = []
    config = SimpleNamespace(
        getoption={"sample": share, "seed": ""}.get,
        hook=SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)),
    )
    conftest.pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items], len(deselected)


def test_only_the_matrix_and_tests_marked_so_or_slow_or_long_are_left_out():
    assert modified(0.0) == (["system ()", "pure ()"], 5)  # the longest first
    names, num_left_out = modified(1.0)
    assert (len(names), num_left_out) == (7, 0)


def test_a_long_test_is_left_out_of_every_sample():
    names, _ = modified(0.999999)
    assert "system ('slow',)" in names
    assert "system ('long',)" not in names


@pytest.mark.parametrize("turn", ["first", "second"])
def test_what_a_test_sets_in_the_environment_ends_with_it(turn):
    assert "LEFT_BY_A_TEST" not in os.environ, "the first of these two tests left it"
    os.environ["LEFT_BY_A_TEST"] = turn
