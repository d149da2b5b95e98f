"""What the tests of the page's JavaScript share: node, and the folder of its tests."""

import os
import shutil

import pytest

from tests import ROOT

FOLDER = ROOT / "tests" / "page"


def node() -> str:
    """Return node's path; without it a test skips, and in CI fails."""
    found = shutil.which("node")
    if found:
        return found
    said = "node, which runs the page's JavaScript, is not on this system"
    if os.environ.get("CI") or os.environ.get("MEMLAB_REQUIRE_BROWSER") == "1":
        pytest.fail(said)
    pytest.skip(said)
