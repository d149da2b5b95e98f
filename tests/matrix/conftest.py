"""What the tests of the matrix find ready."""

import pytest

from memlab.techniques import registry
from memlab.techniques.offload import offloading


@pytest.fixture
def possible(monkeypatch):
    """Let a step on a CPU offload, however small its tensors are."""
    monkeypatch.setattr(registry, "check", lambda *_: None)
    monkeypatch.setattr(offloading, "_is_worth_it", lambda tensor: True)
    monkeypatch.setattr(offloading, "SMALLEST_BYTES", 0)
