"""The tests of the page's JavaScript, by node: tests/page/test_*.js."""

import subprocess

import pytest

from tests.page_parts import FOLDER, node


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.js")), ids=lambda path: path.stem)
def test_javascript(path):
    done = subprocess.run([node(), "--test", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
