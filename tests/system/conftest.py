"""What tests of the panel without a browser share."""

import pytest

from memlab._panel import choices, page


@pytest.fixture
def nothing_ahead(monkeypatch):
    """Predict nothing ahead of the hand: it would keep the worker busy while a test waits."""
    monkeypatch.setattr(page, "neighbours", lambda *_: [])
    monkeypatch.setattr(choices, "covering", lambda _: [])
