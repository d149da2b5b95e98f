"""Garbage is looked for while the panel rests, and only after pictures."""

import gc

import pytest

from memlab._panel import job
from memlab._panel.job import MOST_PICTURES, IdleGarbage
from tests.panel_parts import PATIENCE_SECONDS, until


@pytest.fixture
def collected(monkeypatch):
    monkeypatch.setattr(job, "REST_SECONDS", 0.01)
    return []


@pytest.fixture
def garbage(collected):
    made = IdleGarbage(lambda: collected.append(len(collected)))
    yield made
    made.close()


def noted(garbage, count):
    garbage.note(count)
    assert garbage._rest.wait(PATIENCE_SECONDS)


def test_it_is_looked_for_once_after_some_pictures(garbage, collected):
    for count in range(1, MOST_PICTURES):
        noted(garbage, count)
    assert collected == []
    noted(garbage, MOST_PICTURES)
    noted(garbage, MOST_PICTURES)
    assert collected == [0]
    noted(garbage, 2 * MOST_PICTURES)
    assert collected == [0, 1]


def test_nothing_is_looked_for_where_a_person_has_switched_that_off(garbage, collected):
    gc.disable()
    try:
        noted(garbage, MOST_PICTURES)
    finally:
        gc.enable()
    assert collected == []


def test_what_nobody_needs_is_gone_after_a_rest(monkeypatch):
    monkeypatch.setattr(job, "REST_SECONDS", 0.0)
    found, garbage = [], IdleGarbage()
    gc.callbacks.append(lambda phase, info: found.append((phase, info["generation"])))
    try:
        garbage.note(MOST_PICTURES)
        until(lambda: ("stop", 2) in found)
    finally:
        gc.callbacks.pop()
        garbage.close()
