"""Options that all tests share; what only browser tests need is in tests/browser/conftest.py."""

import os
from collections.abc import Iterator

import pytest
import torch

from memlab.recording import stand_in


@pytest.fixture(autouse=True, scope="session")
def own_calibrations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests learn of operators under load must not be a person's later predictions."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one process learns for the other too
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMLAB_CACHE", str(folder / "calibrations"))
        yield


def pytest_configure() -> None:
    # autograd counts the devices at the first backward of a process; a card must stay the only one
    if not torch.cuda.is_available():
        stand_in.device()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))
