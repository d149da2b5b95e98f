"""Older objects are frozen while something runs, and stay so in a process that keeps them so."""

import gc
import weakref

import pytest

from memlab.memory import garbage


class Cycle:
    """Holds itself."""

    def __init__(self):
        self.own = self


@pytest.fixture
def counts(monkeypatch):
    """How often frozen objects are counted, in a process that has not frozen any yet."""
    seen = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: seen.append(count()) or seen[-1])
    monkeypatch.setattr(garbage, "_is_kept_frozen", False)
    gc.unfreeze()
    yield seen
    gc.freeze()


def num_frozen(counts):
    gc.get_freeze_count()
    return counts.pop()


def test_what_was_frozen_for_a_run_is_thawed(counts):
    with garbage.older_objects_frozen():
        assert num_frozen(counts) > 1000
    assert num_frozen(counts) == 0
    gc.freeze()  # what a person has frozen stays so
    with garbage.older_objects_frozen():
        pass
    assert num_frozen(counts) > 1000


KEEPING = [garbage.keep_frozen, garbage.collect_new_and_freeze, garbage.collect_and_freeze]


@pytest.mark.parametrize("keep", KEEPING)
def test_a_process_that_keeps_them_frozen_does_not_count_them(counts, keep):
    keep()
    with garbage.older_objects_frozen():
        pass
    assert counts == [], "a walk through all frozen objects"
    assert num_frozen(counts) > 1000


def test_garbage_that_was_frozen_is_collected_and_the_rest_can_be_looked_at(counts):
    cycle, seen = Cycle(), []
    known = weakref.ref(cycle)
    garbage.keep_frozen()
    new = weakref.ref(Cycle())  # garbage that is not frozen yet
    del cycle
    garbage.collect_new_and_freeze()
    assert new() is None
    assert known() is not None
    garbage.collect_and_freeze(lambda: seen.append(len(gc.get_objects())))
    assert known() is None
    assert seen[0] > 1000
