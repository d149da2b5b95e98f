"""A person's own modules in the worker: imported from their files, newest first."""

import importlib
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from functools import lru_cache
from pathlib import Path

import pytest

import memlab
from memlab import StepConfig, measure
from memlab.runtime import isolation, sending
from tests import ROOT
from tests.models import made_of
from tests.worker_parts import assert_worker_is_back, parameters_of


@pytest.mark.slow
def test_a_module_that_does_not_import_is_an_outcome(tmp_path, monkeypatch):
    file = tmp_path / "broken_model.py"
    file.write_text("from torch import nn\ndef build():\n    return nn.Linear(3, 3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import broken_model

    file.write_text("this is no python\n")
    workload = made_of(broken_model.build, (3,), lambda model, x: model(x).mean())
    result = measure(workload, StepConfig(), "cpu", repeats=1)
    assert result.outcome == "failed"
    assert "SyntaxError" in result.message


def test_the_callers_folder_does_not_shadow_pythons_own_modules(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('not the real one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # one with "." in it is a person's own choice
    isolation.measuring.replace()
    assert_worker_is_back()


def persons_module(folder, out):
    folder.mkdir(exist_ok=True)
    file = folder / "twice_named.py"
    file.write_text(f"from torch import nn\ndef build():\n    return nn.Linear(3, {out})\n")
    return file


@pytest.mark.slow
def test_a_module_of_the_same_name_elsewhere_is_not_mistaken(tmp_path, monkeypatch):
    found = []
    for name, out in (("one", 3), ("other", 5)):
        file = persons_module(tmp_path / name, out)
        monkeypatch.syspath_prepend(file.parent)
        sys.modules.pop("twice_named", None)
        import twice_named

        found.append(parameters_of(twice_named.build))
    assert found == [4 * (3 * 3 + 3), 4 * (3 * 5 + 5)]


@pytest.mark.slow
def test_a_file_that_is_replaced_by_one_with_an_old_date_is_read_anew(tmp_path, monkeypatch):
    file = persons_module(tmp_path / "dated", 3)
    monkeypatch.syspath_prepend(file.parent)
    sys.modules.pop("twice_named", None)
    import twice_named

    found = []
    for out in (3, 5, 7):
        persons_module(file.parent, out)
        os.utime(file, (1_700_000_000, 1_700_000_000))  # as cp -p and rsync do
        found.append(parameters_of(twice_named.build))
    assert found == [4 * (3 * out + out) for out in (3, 5, 7)]


@pytest.mark.slow
def test_files_named_as_pythons_own_modules_beside_memlab_do_no_harm(tmp_path):
    clone = tmp_path / "a:clone"
    shutil.copytree(Path(memlab.__file__).parent, clone / "memlab")
    script = textwrap.dedent(
        f"""
        import os, pathlib, sys
        sys.path.insert(0, {str(clone)!r})
        import cloudpickle
        import memlab
        import memlab.prediction.predict
        from memlab import StepConfig, measure, predict, workloads
        assert memlab.__file__.startswith({str(clone)!r})
        def outcomes():
            workload = workloads.get("gpt-small", num_layers=1, hidden_size=32)
            for function in (measure, predict):
                result = function(workload, StepConfig(batch_size=1), "cpu")
                print(result.outcome, result.message)
        for name in sys.stdlib_module_names - set(sys.modules):
            pathlib.Path({str(clone)!r}, name + ".py").write_text("raise SystemExit(__file__)")
        for name in ("random", "types", "socket", "queue", "json", "ctypes"):
            pathlib.Path({str(clone)!r}, name + ".py").write_text("raise SystemExit(__file__)")
        os.environ["PYTHONPATH"] = {str(clone)!r}  # since the start of this process
        os.environ["PYTHONHOME"] = "/nowhere"
        os.chdir({str(clone)!r})
        sys.path.insert(0, "")
        outcomes()
        """
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment
    )
    outcomes = [line.split()[0] for line in done.stdout.splitlines()]
    assert outcomes == ["ok", "ok"], done.stdout + done.stderr


def own_module(folder, monkeypatch, source, name):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_what_a_notebook_sets_on_an_own_module_is_measured(tmp_path, monkeypatch):
    source = """
        from types import SimpleNamespace
        from torch import nn
        WIDTH = 3
        SIZES = {"more": 0}
        CONFIG = SimpleNamespace(width=0)
        def more():
            return 0
        class Model(nn.Linear):
            width = 0
        def build():
            width = WIDTH + SIZES["more"] + CONFIG.width + more() + Model.width
            return Model(3, width)
    """
    module = own_module(tmp_path, monkeypatch, source, "set_from_outside")
    found = [parameters_of(module.build)]
    module.WIDTH = 4
    found.append(parameters_of(module.build))
    module.Model.width = 1
    found.append(parameters_of(module.build))
    module.SIZES["more"] = 1
    found.append(parameters_of(module.build))
    module.CONFIG.width = 1
    found.append(parameters_of(module.build))
    module.more = eval("lambda: 1", {"__name__": "__main__"})
    found.append(parameters_of(module.build))
    module.WIDTH = 3
    found.append(parameters_of(module.build))
    assert found == [4 * (3 * out + out) for out in (3, 4, 5, 6, 7, 8, 7)]


@pytest.mark.parametrize("compiles", [False, True])
def test_what_is_set_on_a_module_that_the_model_imports_itself_is_measured(
    tmp_path, monkeypatch, compiles
):
    module = own_module(tmp_path, monkeypatch, "WIDTH = 3", "imported_late")
    module.WIDTH = 5

    def build():
        import imported_late
        from torch import nn

        return nn.Linear(3, imported_late.WIDTH)

    isolation.measuring.replace()
    workload = made_of(build, (3,), lambda model, x: model(x).mean())
    found = measure(workload, StepConfig(compile=compiles), "cpu", repeats=1)
    assert found.outcome == "ok", found.message
    assert found.peak_by_category["parameters"] == 4 * (3 * 5 + 5)


def test_data_that_an_own_module_read_as_it_was_imported_is_read_anew(tmp_path, monkeypatch):
    data = tmp_path / "width.json"
    data.write_text("3")
    source = f"""
        import json
        from pathlib import Path
        from torch import nn
        WIDTHS = [nn.Identity(), json.loads(Path({str(data)!r}).read_text())]
        def build():
            return nn.Linear(3, WIDTHS[1])
    """
    module = own_module(tmp_path, monkeypatch, source, "reads_data")
    found = [parameters_of(module.build)]
    data.write_text("5")
    found.append(parameters_of(module.build))
    assert found == [4 * (3 * out + out) for out in (3, 5)]


def test_another_path_finds_another_module(tmp_path, monkeypatch):
    def build():
        import found_on_the_path

        return found_on_the_path.build()

    build.__module__ = "__main__"  # sent by value, as what a notebook defines
    found = []
    for name, out in (("one", 3), ("other", 5)):
        folder = tmp_path / name
        folder.mkdir()
        source = f"from torch import nn\ndef build():\n    return nn.Linear(3, {out})\n"
        (folder / "found_on_the_path.py").write_text(source)
        monkeypatch.syspath_prepend(folder)
        found.append(parameters_of(build))
    assert found == [4 * (3 * out + out) for out in (3, 5)]


# what a notebook defines under a decorator of `functools` is sent as it is


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
