"""Options that all tests and the examples in docstrings share."""

import gc
import hashlib
import itertools
import os
from collections.abc import Iterator

import pytest
import torch

from memlab.memory.garbage import collect_and_freeze, collect_new_and_freeze
from memlab.tracing import fake_cuda
from tests import ROOT

TESTS = ROOT / "tests"
MATRIX = TESTS / "matrix"
# files that take minutes begin first, or one of them would still run when nothing else is left
SYSTEM = TESTS / "system"
FIRST = (SYSTEM / "test_notebooks.py", SYSTEM / "browser", SYSTEM, MATRIX, TESTS / "step", TESTS)

num_modules = itertools.count()  # that have run


@pytest.fixture(autouse=True, scope="session")
def own_calibrations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests learn of operators under load must not be a person's later predictions."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one process learns for the other too
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMLAB_CACHE", str(folder / "calibrations"))
        yield


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """A variable that a test sets ends with it: dask sets `OMP_NUM_THREADS`, and leaves it."""
    kept = dict(os.environ)
    yield
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]
    os.environ.update(kept)


@pytest.fixture(autouse=True, scope="module")
def older_objects_frozen() -> None:
    """Collections of garbage pass over libraries and earlier tests, as they do in a worker.

    What a run has frozen and left in a cycle is found once in ten modules: to look at everything
    takes a second.
    """
    if next(num_modules) % 10 == 0:
        collect_and_freeze()
    else:
        collect_new_and_freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memlab", "memlab's tiers of tests")
    group.addoption(
        "--sample",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="run this share of tests/matrix and of tests marked `matrix` or `slow`, no `long` one",
    )
    group.addoption("--seed", default="", help="any text, such as a commit; draws the sample")


def pytest_report_header(config: pytest.Config) -> str | None:
    share, seed = config.getoption("sample"), config.getoption("seed")
    if share >= 1.0:
        return None
    what = "tests/matrix and of tests marked matrix or slow, none marked long"
    return f"sample: {share:.0%} of {what}; again by --seed={seed!r}"


def pytest_configure() -> None:
    # autograd counts the devices at the first backward of a process; a card must stay the only one
    if not torch.cuda.is_available():
        fake_cuda.device()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while all files are imported: that alone takes six seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))

    share, seed = config.getoption("sample"), config.getoption("seed")
    left_out = [item for item in items if _share(item, share) <= draw(seed, item.nodeid)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        names = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in names]
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    places = {item.path, *item.path.parents}
    return next((turn for turn, place in enumerate(FIRST) if place in places), len(FIRST))


def _share(item: pytest.Item, share: float) -> float:
    """Return the probability that a test is drawn; 1 is always."""
    if share < 1.0 and item.get_closest_marker("long"):
        return 0.0
    marked = any(item.get_closest_marker(name) for name in ("matrix", "slow"))
    return share if marked or MATRIX in item.path.parents else 1.0


def draw(seed: str, name: str) -> float:
    """Return a number in [0, 1) that depends on the seed and this one test alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
