"""Private names of PyTorch: used in one room of memlab, each where and as memlab expects it.

With a new PyTorch run `pytest --noconftest tests/pure/test_torch_private.py` first. All tests but
one read the text of memlab and import none of it, so they say what to mend even where memlab cannot
be imported.
"""

import traceback

import pytest
import torch

from tests import ROOT
from tests.private_cases import CASES, MAY_BE_MISSING, at
from tests.private_names import attributes, constants, uses

PACKAGE = ROOT / "memlab"
SOURCES = {
    str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))
}
IN_ROOM = {
    name: source for name, source in SOURCES.items() if name.startswith("_util/torch_private/")
}
# Exported scripts contain definitions of these files, and cannot import memlab: there PyTorch is
# used by its own names, and each of them has a case like the names of the room. Strings that become
# lines of a script are not looked at: they import nothing here.
IN_SCRIPTS = {
    name: SOURCES[name]
    for name in (
        "techniques/batches.py",
        "techniques/deferred.py",
        "techniques/precision.py",
        "techniques/loss/logits.py",
        "techniques/offload/offloading.py",
        "techniques/checkpointing/policies.py",
        "techniques/checkpointing/recompute.py",
        "techniques/sharding/divided_layers.py",
        "techniques/sharding/fully_sharded.py",
    )
}
OF_SCRIPTS = {"_is_param", "_no_grad_trunc_normal_"}  # attributes that these have as strings
NOT_OF_TORCH = {
    "._attn_implementation": "of a config of transformers",
    "._data": "of os.environ",
    "._detect_anomaly": "of a Lightning Trainer",
    "._kind": "of memlab: the class that a fake parameter stands for",
    "._loaded_implementation": "of transformers: which flash_attn it has looked up",
    "._loss_shifts_labels": "of a transformers Trainer",
    "._pad_input": "of transformers: padding for flash_attn",
    "._repr_html_": "of IPython",
    "._repr_mimebundle_": "of IPython",
    "._set_signature_columns_if_needed": "of a transformers Trainer",
    "._signature_columns": "of a transformers Trainer",
    "._unpad_input": "of transformers: padding for flash_attn",
    "._target": "of threading.Thread",
    "._trainer": "of a LightningModule",
    "._TRITON_AVAILABLE": "of trl",
}
ATTRIBUTES = frozenset(OF_SCRIPTS).union(*map(attributes, IN_ROOM.values()))
PROCESS = constants(IN_ROOM["_util/torch_private/process.py"])
SWITCHES = [
    f"{owner}.{name}"
    for owner, names in (
        ("torch._C", "OF_TORCH"),
        ("torch._C._autograd", "OF_AUTOGRAD"),
        ("torch._C._functorch", "OF_FUNCTORCH"),
    )
    for name in PROCESS[names]
]
SET_LATE = {  # by the first use of what they belong to
    "torch.nn.modules.module.Module.___needs_generation_tag_patch",
    "torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.NO_SERIALIZED_TYPE_NAME_FOUND",
}
CACHES = [name.rstrip(".") for name in (*PROCESS["CACHES"], *PROCESS["CHANGED_ONCE"])]


def found_in(sources: dict[str, str]) -> dict[str, str]:
    """Return the private names that files use, each with the last file that does."""
    return {use.name: path for path, source in sources.items() for use in uses(source, ATTRIBUTES)}


def check(name: str, use: str, path: str, holds: object) -> None:
    """Fail by a name for which something does not hold."""
    try:
        if name.startswith("torch"):
            at(name)
        holds()
    except Exception as error:
        if name in MAY_BE_MISSING and isinstance(error, AttributeError):
            return
        line = traceback.extract_tb(error.__traceback__)[-1].line
        pytest.fail(
            f"PyTorch {torch.__version__} has moved or changed {name}, which memlab uses to {use}: "
            f"mend memlab/{path} ({type(error).__name__}: {error}, in `{line}`)",
            pytrace=False,
        )


@pytest.mark.parametrize("path", sorted(SOURCES.keys() - IN_ROOM.keys() - IN_SCRIPTS.keys()))
def test_no_file_outside_of_the_room_uses_a_private_name(path):
    found = [
        f"memlab/{path}:{use.line}: {use.name}"
        for use in uses(SOURCES[path], ATTRIBUTES)
        if use.name not in NOT_OF_TORCH
    ]
    assert found == [], "private names of PyTorch belong into memlab/torch_private"


@pytest.mark.parametrize("name", CASES)
def test_a_private_name_is_where_memlab_looks_for_it(name):
    use, holds = CASES[name]
    check(name, use, found_in(IN_SCRIPTS | IN_ROOM)[name], holds)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_the_process_can_be_asked(name):
    use = "see that a job changes the whole process"
    check(name, use, "_util/torch_private/process.py", lambda: at(name)())


def test_a_switch_that_this_torch_does_not_have_is_left_out(monkeypatch):
    from memlab._util.torch_private import process

    known = process.switches()
    monkeypatch.setattr(process, "OF_TORCH", (*process.OF_TORCH, "_no_such_switch"))
    assert process.switches() == known


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_of_the_process_is_where_memlab_looks_for_it(name):
    use = "distinguish what PyTorch remembers from what a job changes"
    place = name.rpartition(".")[0] if name in SET_LATE else name
    check(place, use, "_util/torch_private/process.py", lambda: None)


def test_every_private_name_has_a_case():
    found = found_in(IN_SCRIPTS | IN_ROOM).keys()
    found -= {*NOT_OF_TORCH, *PROCESS["CACHES"], *PROCESS["CHANGED_ONCE"]}
    found -= {name for name in found if name.startswith("torch.utils._pytree.")}  # any of it
    found -= {f".{name.rpartition('.')[2]}" for name in SWITCHES}  # asked by name
    assert {name.rstrip(".") for name in found} == set(CASES)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._foo()", "torch._C._foo"),
        ("import torch as t\nx = t._C\nx._foo", "torch._C._foo"),
        ("import torch._x as z", "torch._x"),
        ("from torch._x import y", "torch._x.y"),
        ("from torch.nn import _x", "torch.nn._x"),
        ("from torch.utils import thing\nthing._x", "torch.utils.thing._x"),
        ("import torch\ngetattr(torch, '_x')", "torch._x"),
        ("import torch\nhasattr(torch.cuda, '_x')", "torch.cuda._x"),
        ("def f(tensor): return tensor._x", "._x"),
        ("def f(tensor): return g(tensor)[0].h._x()", "._x"),
        ("read = attrgetter('_x')", "._x"),
        ("import_module('torch._x.y')", "torch._x.y"),
        ("names = ['_known']", "._known"),
        ("class A:\n    def f(self): return self._x", "._x"),
    ],
)
def test_the_scan_sees_a_private_name_in_every_form(source, found):
    assert found in {use.name for use in uses(source, frozenset(["_known"]))}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.aten._to_copy.default, torch.__version__",
        "import torch\naten = torch.ops.aten\naten._softmax",
        "import os, sys\nos._exit(0)\nsys._getframe(1)",
        "class A:\n    def f(self): self._x = 1\ndef g(a): return a._x",
        "def f(row): return row._replace(a=1)",
        "'torch._C is a module'\nsaid = f'torch._x.{1}'\nline = 'import torch._x'",
    ],
)
def test_the_scan_leaves_alone_what_is_not_private_to_torch(source):
    assert uses(source) == []


def test_a_name_that_moved_fails_by_its_name():
    with pytest.raises(pytest.fail.Exception, match=r"torch\._C\._foo, which memlab uses to jump"):
        check("torch._C._foo", "jump", "torch_private/x.py", lambda: None)
