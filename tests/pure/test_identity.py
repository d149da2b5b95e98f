"""When two workloads are the same: also in another process, and never if their code differs."""

import importlib
import sys
import threading

import pytest
import torch
from torch import nn

import memlab
from memlab import StepConfig, Workload
from memlab.store import identity as identities
from memlab.store.identity import identity, setting_key, workload_key
from tests.store_parts import python

CELL = """
import torch
from torch import nn
from memlab import Workload
from memlab.store.identity import workload_key
WIDTH = {width}
KINDS = frozenset({{"a", "b", "c", "d"}})

class Net(nn.Module):
    '''A model of a notebook.'''
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        assert "a" in {{"a", "b", "c", "d", "e"}}
        return nn.functional.relu(self.layer(x)).{reduce}()

workload = Workload(
    name="mine",
    build_model=lambda: Net(),
    make_batch=lambda n: torch.randn(n, WIDTH),
    compute_loss=lambda model, x: model(x),
)
"""
RUN = """
import sys, json.tool
sys.path.insert(0, sys.argv[2])
import memlab
{before}
for file in sys.argv[1].split(","):
    source = "\\n" * {lines} + open(file).read()
    names = {{"__name__": "__main__"}}
    exec(compile(source, "/tmp/ipykernel_{lines}/1.py", "exec"), names)
    sys.modules["__main__"].__dict__.update(names)
    print(names["workload_key"](names["workload"]))
"""


@pytest.mark.slow
def test_a_workload_of_a_notebook_is_the_same_after_the_kernel_was_restarted(tmp_path):
    files = []
    for number, (width, reduce) in enumerate([(3, "mean"), (4, "mean"), (3, "sum")]):
        files.append(tmp_path / f"cell{number}.txt")
        files[-1].write_text(CELL.format(width=width, reduce=reduce))

    keys = []
    for lines, before in ((0, ""), (7, "import torch.nn.utils.prune")):
        code = RUN.format(lines=lines, before=before)
        keys.append(python(code, ",".join(map(str, files)), str(tmp_path)).split())
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3


def test_a_workload_is_another_one_if_a_file_changes_that_its_code_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mynet_of_test.py").write_text("import myblock_of_test\n")

    def build():
        from mynet_of_test import Net  # nothing has imported it when the sweep begins

        return Net()

    keys = []
    for source in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "myblock_of_test.py").write_text(source)
        importlib.invalidate_caches()
        workload = Workload(
            name="mine", build_model=build, make_batch=lambda n: n, compute_loss=lambda m, x: m(x)
        )
        keys.append(workload_key(workload))
    assert keys[0] == keys[2] != keys[1]
    assert "mynet_of_test" not in sys.modules


def of_tensor(tensor) -> str | None:
    return workload_key(Workload.from_module(nn.Linear(4, 1), (tensor, torch.zeros(4, 1)), loss))


def loss(output, target):
    return (output - target).mean()


def test_random_values_are_no_new_workload_but_shapes_and_labels_are():
    assert of_tensor(torch.randn(4, 4)) == of_tensor(torch.randn(4, 4))
    assert of_tensor(torch.randn(4, 4)) != of_tensor(torch.randn(4, 4, dtype=torch.float64))
    assert of_tensor(torch.tensor([[1, 2]] * 4)) == of_tensor(torch.tensor([[1, 2]] * 4))
    assert of_tensor(torch.tensor([[1, 2]] * 4)) != of_tensor(torch.tensor([[1, 3]] * 4))


def test_options_of_the_zoo_are_part_of_a_workload():
    get = memlab.workloads.get
    assert workload_key(get("gpt-small")) == workload_key(get("gpt-small"))
    assert workload_key(get("gpt-small")) != workload_key(get("gpt-small", num_layers=2))


def test_a_workload_that_cannot_be_pickled_has_no_identity():
    lock = threading.Lock()
    workload = Workload(
        name="mine",
        build_model=lambda: lock,
        make_batch=lambda n: n,
        compute_loss=lambda model, x: x,
    )
    assert workload_key(workload) is None
    assert setting_key(None, StepConfig(), device="cpu") is None


@pytest.mark.parametrize(
    "other", [{"config": StepConfig(batch_size=9)}, {"device": "t4"}, {"seed": 1}]
)
def test_a_setting_is_workload_config_device_and_seed(other):
    given = {"config": StepConfig(), "device": "cpu", "seed": 0}
    assert setting_key("w", **given) == setting_key("w", **given)
    assert setting_key("w", **given) != setting_key("w", **{**given, **other})
    assert setting_key("w", **given) != setting_key("v", **given)


def test_a_policy_function_counts_with_its_code():
    def keys(*policies):
        made = [StepConfig(checkpointing="blocks", checkpoint_policy=each) for each in policies]
        return [setting_key("w", config, device="cpu") for config in made]

    one, again, other = keys(lambda ctx: 1, lambda ctx: 1, lambda ctx: 2)
    assert one == again != other


def test_another_version_of_a_library_is_another_workload(monkeypatch):
    before = workload_key(memlab.workloads.get("gpt-small"))
    version = identities.importlib.metadata.version
    monkeypatch.setattr(
        identities.importlib.metadata,
        "version",
        lambda name: "0.0.1" if name == "transformers" else version(name),
    )
    assert workload_key(memlab.workloads.get("gpt-small")) != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        (torch.zeros(1000, 4), torch.zeros(1, 4).expand(1000, 4)),
        ([torch.zeros(4), torch.zeros(4)], [(t := torch.zeros(4)), t[:]]),
    ],
    ids=["layout", "expanded", "shared"],
)
def test_how_tensors_lie_in_memory_counts(one, other):
    assert identity(one) != identity(other)
    assert identity(one) == identity(one)
