"""What a notebook defines under a decorator of `functools` is sent as it is, in a real process."""

import pickle
import subprocess
import sys
from functools import lru_cache

import pytest

from memlab.runtime import isolation, sending
from tests import ROOT

SCRIPT = """
import functools, sys
from memlab.runtime.sending import dumps

@functools.lru_cache(maxsize=4, typed=True)
def table(n):
    return ("table", n)

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

def inside():
    @functools.cache
    def doubled(n):
        return 2 * n
    return doubled

class Model:
    @functools.lru_cache
    def size(self):
        return 5

    @staticmethod
    @functools.cache
    def width(n):
        return n + 1

    @functools.cached_property
    def mask(self):
        return "mask"

table(1)

def use(doubled=inside()):
    said = table.cache_info().currsize, table.cache_parameters(), table.__name__
    model = Model()
    return [table(3), *said, fibonacci(30), doubled(4), model.size(), Model.width(1), model.mask]

sys.stdout.buffer.write(dumps(use))
"""
READ = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())())"


@pytest.mark.slow
def test_what_a_script_defines_under_functools_runs_in_another_process():
    sent = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, check=True)
    ran = subprocess.run(
        [sys.executable, "-c", READ], cwd=ROOT, input=sent.stdout, capture_output=True, check=True
    )
    parameters = {"maxsize": 4, "typed": True}
    expected = [("table", 3), 0, parameters, "table", 832040, 8, 5, 2, "mask"]
    assert ran.stdout.decode().strip() == str(expected)


@lru_cache
def of_a_module(n):
    return n


@pytest.mark.parametrize("function", [of_a_module, sending.pickler])
def test_what_another_process_can_import_is_sent_by_its_name(function):
    assert len(sending.dumps(function)) < 100
    assert pickle.loads(sending.dumps(function)) is function


def test_a_function_that_its_name_does_not_find_is_sent_by_value():
    assert sending._is_found_by_name(of_a_module)
    assert not sending._is_found_by_name(lru_cache(of_a_module.__wrapped__))


def test_what_can_only_be_sent_by_its_name_is_told_with_a_remedy():
    error = "AttributeError: Can't get attribute 'Id' on <module '__main__' (built-in)>"
    assert "define it in a module that you import" in isolation._unloadable(error)
    assert isolation._unloadable("KeyError: 3").endswith("KeyError: 3")
