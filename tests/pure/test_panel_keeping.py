"""Wishes for predictions: each comes true once its prediction is exact, or is over."""

import threading

import pytest

from memlab._panel.page import Keeper
from tests.forecast_parts import MIB, estimate, predicted, question


def test_a_wish_waits_until_its_prediction_is_exact():
    known, kept = [None], []
    keeper = Keeper(lambda *_: known[0], lambda *found: kept.append(found))
    wish = keeper.wish(question(), MIB)
    assert keeper.wish(question(), MIB) is wish
    assert keeper.questions == [question()]
    for known[0] in (None, estimate(predicted(), exact=False)):
        keeper.settle()
        assert (kept, wish.is_over.is_set()) == ([], False)
    known[0] = estimate(predicted())
    keeper.settle()
    assert kept == [(known[0].result, MIB)]
    assert wish.is_over.is_set()
    assert wish.result is known[0].result
    assert keeper.questions == []


def test_nobody_waits_for_a_wish_that_will_not_come_true():
    def broken(*_):
        raise RuntimeError("the reason")

    keeper = Keeper(broken, lambda *_: None)
    wish = keeper.wish(question(), None)
    with pytest.raises(RuntimeError, match="the reason"):
        keeper.settle()
    assert wish.is_over.is_set()
    other = keeper.wish(question(4), None)
    waiting = threading.Thread(target=other.is_over.wait)
    waiting.start()
    keeper.close()
    waiting.join()
    assert keeper.wish(question(2), None).is_over.is_set()
    assert wish.result is other.result is None
