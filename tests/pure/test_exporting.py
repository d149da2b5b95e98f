"""What an exported script contains: the functions of a workload, their values, and nothing else."""

import ast
import functools
import importlib.util
import math
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memlab
from memlab import StepConfig, Workload
from memlab.errors import ConfigError, UnsupportedError
from memlab.integrations.definitions import Definitions
from memlab.integrations.export import LIBRARIES, Flavor, export_script
from memlab.integrations.own_source import NoSource, class_source, expression, import_line
from tests.models import blocks

FLAVORS = [f for f in Flavor if f != "deepspeed" or importlib.util.find_spec("deepspeed")]
OFFSET = 3
LAYER, LONG = nn.Linear(1, 1), torch.ones(2000)


class Scale(nn.Module):
    """A module of this file, which imports memlab, so that it has to be copied."""

    def __init__(self, size, by):
        super().__init__()
        self.linear = nn.Linear(size, 1)
        self.by = by

    def forward(self, x):
        return self.by * self.linear(x) + OFFSET


@dataclass(frozen=True)
class Sizes:
    size: int = 4
    by: float = 1.0

    def build(self):
        return Scale(self.size, self.by)


class Reduction(Enum):
    MEAN = "mean"


def squares(model, batch):
    return model(batch).square().mean()


class RaisesWhenAsked:
    def __call__(self, n):
        return torch.ones(n, 4)

    def __getattr__(self, name):
        raise ZeroDivisionError


def counting():
    count = 0

    def make_batch(n):
        nonlocal count
        count += 1
        return torch.ones(n, 4)

    return make_batch


def made(function, name="build"):
    """Return what the text of a function evaluates to."""
    definitions = Definitions({})
    bound = definitions.bind(name, function)
    text = "\n".join([*definitions.imports, *definitions.texts])
    names = {"__name__": "made"}
    exec(compile(text, "made.py", "exec"), names)
    return names[bound], text


def a_workload(**functions):
    given = {
        "build_model": Sizes(by=2.0).build,
        "make_batch": lambda n: torch.ones(n, 4),
        "compute_loss": squares,
    }
    return Workload(name="mine", **{**given, **functions})


@pytest.mark.parametrize(
    "value",
    [
        None, True, -3, 2.5, 1j, b"x", "it's", 'say "hi"\n', "\ud800", (1,), [1, [2]], {1, 2},
        set(), frozenset({1}), {"a": (1, None)}, slice(1, None), range(3), torch.float16,
        torch.Size([2]), torch.device("cuda:1"), Reduction.MEAN, Sizes(by=0.5), np.float32(0.1),
        math.inf, tuple[int, ...], int | None,
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_is_written_as_an_equal_one(value):
    def bind(name, thing):
        names[name] = thing
        return name

    names = {}
    text = expression(value, bind)
    found = eval(text, names)
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize(
    "value",
    [torch.tensor([1.5, -2.0]), torch.tensor([[1]], dtype=torch.int8), np.array([0.1, math.nan])],
    ids=repr,
)
def test_a_small_tensor_is_written_with_its_format(value):
    found = eval(expression(value, lambda name, thing: name), {"torch": torch, "np": np})
    assert found.dtype == value.dtype
    assert str(found) == str(value)


def test_a_loss_module_is_written_by_what_it_was_made_from():
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-1)
    text = expression(loss, lambda name, thing: name)
    found = eval(text, vars(nn))
    assert (found.label_smoothing, found.ignore_index, found.reduction) == (0.1, -1, "mean")
    with pytest.raises(NoSource, match="whose weights have no source"):
        expression(nn.Linear(1, 1), lambda name, thing: name)


def test_a_function_comes_with_its_closure_its_defaults_and_its_globals():
    def adders():
        return [lambda x, by=by: x + by + first + OFFSET for by in (10, 20)]

    first = 100
    for by, adder in zip((10, 20), adders(), strict=True):
        found, text = made(adder)
        assert found(0) == by + 103
        assert "memlab" not in text


@pytest.mark.parametrize("tied", [None, True, 0.5], ids=str)
def test_a_variable_of_a_closure_is_written_as_its_value(tied):
    found, text = made(lambda: tied)
    assert found() == tied
    assert f"tied = {tied}" in text
    assert "import" not in text


def test_two_things_with_one_name_are_kept_apart():
    def make(scale):
        return lambda x: scale * x

    one, two = make(2), make(3)

    def both(x):
        scale = "no global"
        return one(x), two(x), len(scale)

    found, text = made(both)
    assert found(10) == (20, 30, 9)
    assert text.count('scale = "no global"') == 1


def test_a_name_in_a_finally_is_replaced_once():
    # Python compiles such a part twice
    def make(scale):
        return lambda x: scale * x

    def outer(scale):
        def both(x):
            try:
                x = helper(x)
            finally:
                x = scale + x
            return x

        helper = make(5)
        return both

    assert made(outer(7))[0](1) == 12


def test_names_in_texts_attributes_and_arguments_are_left_alone():
    def make(name):
        return lambda x: (name, {"name": x}.get("name"), dict(name=x))  # noqa: C408

    outer = make("a")

    def both(x, name="b"):
        return outer(x), make_other(x)

    make_other = make("c")
    found, _ = made(both)
    assert found(1) == (("a", 1, {"name": 1}), ("c", 1, {"name": 1}))


def test_a_recursive_function_and_two_that_call_one_another():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n > 0 and even(n - 1)

    found, _ = made(even, "is_even")
    assert [found(n) for n in range(4)] == [True, False, True, False]


def test_text_over_several_lines_keeps_its_left_margin():
    def text():
        return """a
      b
        c"""

    assert made(text)[0]() == text()


def test_a_cached_function_stays_cached():
    @functools.lru_cache(maxsize=2)
    def cached(x):
        return object()

    found, _ = made(cached)
    assert found(1) is found(1)
    assert found.cache_parameters()["maxsize"] == 2


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (functools.partial(nn.Linear, 4).func, None),
        (eval("lambda n: torch.ones(n, 4)"), "its source is nowhere to be found"),
        (lambda n: memlab.workloads.get("plain-mlp").make_batch(n), "uses memlab"),
        (counting(), "nonlocal"),
        (lambda n, held=LAYER: held, "whose weights have no source"),
        (lambda n, held=LONG: held, r"a tensor of shape \(2000,\)"),
        (
            lambda n, held=iter([]): held,  # noqa: B008
            "an object of class list_iterator",
        ),
    ],
)
def test_what_has_no_source_is_refused_with_a_reason(function, why):
    if why is None:
        assert Definitions({}).bind("Linear", function) == "Linear"
        return
    with pytest.raises(UnsupportedError, match=f"make_batch of 'mine' cannot .*{why}.*with def"):
        export_script(a_workload(make_batch=function), StepConfig(), "cpu")


def test_an_object_that_raises_when_it_is_looked_at_is_refused():
    with pytest.raises(UnsupportedError, match="looking at it raised ZeroDivisionError"):
        export_script(a_workload(make_batch=RaisesWhenAsked()), StepConfig(), "cpu")


def test_a_model_that_is_held_is_refused():
    batch = (torch.ones(2, 3), torch.ones(2, 1))
    workload = Workload.from_module(nn.Linear(3, 1), batch, nn.functional.mse_loss)
    with pytest.raises(
        UnsupportedError, match=r"build_model of 'Linear' .* weights have no source"
    ):
        export_script(workload, StepConfig(), "cpu")


def test_a_function_that_was_edited_after_its_import_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "edited_after.py"
    file.write_text("def build():\n    return 1\n")
    names = {"__name__": "__main__"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert made(names["build"])[0]() == 1
    file.write_text("def build():\n    return 22\n")
    with pytest.raises(NoSource, match="changed after it was imported"):
        made(names["build"])


def test_a_module_without_memlab_is_imported(tmp_path, monkeypatch):
    (tmp_path / "own_model_file.py").write_text("def build():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_model_file

    definitions = Definitions({})
    assert definitions.bind("build_model", own_model_file.build) == "build_model"
    assert definitions.imports == ["from own_model_file import build as build_model"]


@pytest.mark.parametrize("name", memlab.workloads.names())
def test_every_workload_of_the_zoo_is_written_without_memlab(name):
    text = export_script(memlab.workloads.get(name), StepConfig(), "cpu")
    tree = ast.parse(text)
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not [n for n in imported if "memlab" in ast.unparse(n)]
    assert max(map(len, text.splitlines())) <= 100
    assert "zoo_import" not in text


def shape(source):
    """Return the syntax tree of a program with its texts left out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def with_text(name, text):
    return Workload(
        name=name,
        build_model=lambda: nn.Linear(1, len(text)),
        make_batch=lambda n: {text: torch.ones(n, 1)},
        compute_loss=lambda model, batch: model(batch[text]).mean(),
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.text(min_size=1), st.text(), st.sampled_from(FLAVORS))
def test_hostile_names_and_texts_stay_texts(name, text, flavor):
    own = {"sharding": "deepspeed-zero2", "world_size": 2} if flavor == "deepspeed" else {}
    config = StepConfig(optimizer="sgd", **own)
    found = export_script(with_text(name, text), config, "cpu", flavor=flavor)
    plain = export_script(with_text("plain", "plain"), config, "cpu", flavor=flavor)
    assert shape(found) == shape(plain)


@pytest.mark.parametrize(
    "text",
    ['"""', "'''", '"""\nraise SystemExit\n"""', "\\", '\\"""', "\n", "{}", "{0}", "x\r\ny", "'\""],
)
def test_these_hostile_texts_stay_texts(text):
    test = test_hostile_names_and_texts_stay_texts.hypothesis.inner_test
    for flavor in FLAVORS:
        test(text, text, flavor)


def test_arguments_and_methods_with_hostile_names_run_nothing():
    def anything(**given):
        return given

    hostile = "x=1)\nraise SystemExit\nf(y"
    given, _ = made(functools.partial(anything, **{hostile: 1}))
    assert given() == {hostile: 1}
    anything.__name__ = hostile
    assert made(anything)[0](a=1) == {"a": 1}


@pytest.mark.parametrize("flavor", LIBRARIES)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"precision": "fp16-mixed"}, "precision='fp16-mixed'"),
        ({"optimizer": "sgd-momentum"}, "optimizer='sgd-momentum'"),
        ({"init_on_meta": True}, "init_on_meta=True"),
        ({"loss_chunks": 2}, "loss_chunks=2"),
        ({"batch_size": 5, "accumulation_steps": 2}, "accumulation_steps=2 does not divide"),
    ],
    ids=str,
)
def test_what_a_library_cannot_express_is_refused_by_name(flavor, fields, named):
    with pytest.raises(UnsupportedError, match=f"{named}.*flavor='{flavor}'.*flavor='pytorch'"):
        export_script(blocks(), StepConfig(**fields), "cpu", flavor=flavor)


@pytest.mark.parametrize("flavor", ["pytorch", *LIBRARIES])
def test_what_no_script_expresses_is_not_sent_to_another_flavor(flavor):
    config = StepConfig(sharding="zero3", world_size=2, init_on_meta=True)
    with pytest.raises(UnsupportedError, match=r"the other; use init_on_meta=False$"):
        export_script(blocks(), config, "cpu", flavor=flavor)


def test_what_needs_a_card_is_exported_for_one():
    both = {"offload_parameters": True, "offload_optimizer": True}
    config = StepConfig(batch_size=2, sharding="zero3", world_size=2, **both)
    with pytest.raises(UnsupportedError, match=r"memlab\.export_script for a card: device='h200'"):
        export_script(blocks(), config, "cpu")
    assert "CPUOffloadPolicy" in export_script(blocks(), config, "h200")


@pytest.mark.parametrize("flavor", Flavor)
def test_micro_batches_of_a_list_of_samples_are_refused(flavor):
    workload = a_workload(make_batch=lambda n: {"images": [torch.ones(3, 4) for _ in range(n)]})
    assert "def train" in export_script(workload, StepConfig(), "cpu")
    with pytest.raises(UnsupportedError, match=r"list of samples; give .* a split_batch"):
        export_script(workload, StepConfig(accumulation_steps=2), "cpu", flavor=flavor)


def test_a_step_of_deepspeed_is_no_script_in_plain_pytorch():
    pytest.importorskip("deepspeed", reason="needs memlab[deepspeed]")
    config = StepConfig(sharding="deepspeed-zero2", world_size=2)
    with pytest.raises(UnsupportedError, match=r"no script in plain .* flavor='deepspeed'"):
        memlab.techniques.script.script(config, "cpu")


def test_an_unknown_flavor_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"flavor='keras'.*'pytorch'"):
        export_script(blocks(), StepConfig(), "cpu", flavor="keras")


def test_the_norm_of_clipping_is_written_in_full():
    text = export_script(a_workload(), StepConfig(max_grad_norm=0.123456789), "cpu")
    assert "clip_grad_norm_(parameters, 0.123456789)" in text


def module_of(tmp_path, monkeypatch, name, text):
    """Return a module of a person's own."""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


OWN = """
from torch import nn
WIDTH = 64

class Net(nn.Linear):
    scale = 1.0
    def forward(self, x):
        return self.scale * super().forward(x)

def forward_2(self, x):
    return x

def build():
    return nn.Linear(WIDTH, WIDTH)
"""


def test_a_module_is_imported_unless_its_values_were_changed(tmp_path, monkeypatch):
    own = module_of(tmp_path, monkeypatch, "own_values_module", OWN)
    function, text = made(own.build)
    assert "from own_values_module import build" in text
    monkeypatch.setattr(own, "WIDTH", 200)
    function, text = made(own.build)
    assert "own_values_module" not in text
    assert function().weight.shape == (200, 200)


@pytest.mark.parametrize("change", [{"scale": 7.0}, {"forward": "forward_2"}, {"size": 3}])
def test_a_class_that_was_changed_is_not_taken_from_its_file(tmp_path, monkeypatch, change):
    own = module_of(tmp_path, monkeypatch, "own_class_module", OWN)
    class_source(own.Net)
    for name, value in change.items():
        monkeypatch.setattr(own.Net, name, getattr(own, str(value), value), raising=False)
    with pytest.raises(NoSource, match="changed after it was imported"):
        class_source(own.Net)


def test_a_library_that_has_replaced_itself_is_imported(monkeypatch):
    # as transformers does, while the name in a notebook is bound to what it was first
    now = ModuleType("numpy.linalg")
    vars(now).update(vars(np.linalg))
    monkeypatch.setitem(sys.modules, "numpy.linalg", now)
    assert import_line(np.linalg, "linalg") == "from numpy import linalg"

    of_another_file = ModuleType("numpy.linalg")
    of_another_file.__file__ = "/elsewhere/linalg.py"
    assert import_line(of_another_file, "linalg") is None


def test_a_module_that_no_import_finds_is_copied(tmp_path, monkeypatch):
    file = tmp_path / "my-model.py"
    file.write_text(OWN)
    spec = importlib.util.spec_from_file_location("my-model", file)
    own = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my-model", own)
    spec.loader.exec_module(own)
    function, text = made(own.build)
    assert "my-model" not in text
    assert function().weight.shape == (64, 64)


@dataclass
class Doubling:
    width: int = 1

    def __post_init__(self):
        self.width *= 2


def test_an_object_that_its_class_would_make_differently_is_refused():
    with pytest.raises(NoSource, match="its field width"):
        expression(Doubling(8), lambda name, thing: name)


def test_a_parameter_of_the_loss_is_refused_on_every_device(tmp_path, monkeypatch):
    text = "from torch import nn\nHEAD = nn.Linear(4, 1)\n\ndef own(model, batch):\n"
    text += "    return HEAD(model(batch)).mean()\n"
    module = module_of(tmp_path, monkeypatch, "of_a_trained_loss", text)
    trained = a_workload(compute_loss=module.own)
    with pytest.raises(UnsupportedError, match=r"uses loss\.HEAD\.\w+, which requires a gradient"):
        export_script(trained, StepConfig(), "cpu")
    module.HEAD.requires_grad_(False)
    assert "import own" in export_script(trained, StepConfig(), "cpu")


def test_a_module_that_does_not_train_stays_so():
    assert expression(nn.Dropout(0.9).eval(), lambda name, thing: name) == "Dropout(p=0.9).eval()"


def test_an_empty_tensor_keeps_its_shape():
    text = expression(torch.zeros(0, 3), lambda name, thing: name)
    assert eval(text, {"torch": torch}).shape == (0, 3)


def test_what_has_no_samples_is_not_cut_by_a_library_flavor():
    def make_batch(n):
        return torch.ones(n, 4), torch.ones(100)

    def loss(model, batch):
        return model(batch[0]).mean() * batch[1].mean()

    workload = a_workload(make_batch=make_batch, compute_loss=loss)
    text = export_script(workload, StepConfig(batch_size=8), "cpu", flavor="accelerate")
    names = {"__name__": "made"}
    body = text[: text.index("def main")].replace("from accelerate import Accelerator", "")
    exec(compile(body, "made.py", "exec"), names)
    assert [tuple(t.shape) for t in names["make_micro_batches"]()[0]] == [(8, 4), (100,)]
