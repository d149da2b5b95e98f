"""What the tests of the matrix find ready."""

import pytest

from memlab.techniques.offload import offload, offloading


@pytest.fixture
def possible(monkeypatch):
    """Let a step on a CPU offload, however small its tensors are."""
    monkeypatch.setattr(offload, "check", lambda config, device: None)
    monkeypatch.setattr(offloading, "_is_worth_it", lambda tensor: True)
    monkeypatch.setattr(offloading, "SMALLEST_BYTES", 0)
