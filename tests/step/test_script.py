"""A script against the step of `build_step`: losses and weights bit by bit, memory byte by byte."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload
from memlab.errors import UnsupportedError
from memlab.techniques import deferred, precision
from memlab.techniques.compilation import forget
from memlab.techniques.deferred import build_on_meta
from memlab.techniques.loss.logits import ChunkedHead, find_head
from memlab.techniques.offload.offloading import is_large
from memlab.techniques.precision import can_be_fp8
from memlab.techniques.script import script
from memlab.techniques.source import inlined
from memlab.techniques.technique import Plan, Region
from tests.checkpointing_parts import LATE, make_workload
from tests.models import blocks
from tests.script_parts import CPU, assert_same, by_script, by_step


@pytest.mark.matrix
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"accumulation_steps": 3},
        {"optimizer": "sgd"},
        {"optimizer": "sgd-momentum"},
        {"optimizer": "adam"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16", "optimizer": "adam"},
        {"precision": "fp16-mixed", "optimizer": "sgd-momentum", "accumulation_steps": 2},
        {"precision": "fp16"},
        {"precision": "bf16-master", "optimizer": "adamw"},
        {"precision": "bf16-master", "optimizer": "adamw", "optimizer_in_backward": True},
        {"precision": "bf16-stochastic", "optimizer": "sgd-momentum"},
        {"precision": "bf16-stochastic", "optimizer": "adamw", "optimizer_in_backward": True},
        {"optimizer": "adafactor"},
        {"optimizer": "adamw", "optimizer_implementation": "fused"},
        {"optimizer": "adamw", "optimizer_implementation": "single-tensor"},
        {"optimizer": "sgd-momentum", "optimizer_in_backward": True},
        {"checkpointing": "blocks"},
        {"checkpointing": "blocks", "checkpoint_modules": "every 2", "accumulation_steps": 2},
        {"checkpointing": "blocks", "checkpoint_modules": "1"},
        {"checkpointing": "blocks", "checkpoint_policy": "keep-matmuls"},
        {"checkpointing": "blocks", "checkpoint_policy": "recompute-pointwise"},
        {"checkpointing": "blocks", "checkpoint_policy": "aten.gelu", "precision": "bf16-mixed"},
        {"loss_chunks": 3},
        {"loss_chunks": 3, "accumulation_steps": 2},
        {"loss_chunks": 5, "precision": "fp16-mixed"},
    ],
    ids=str,
)
def test_a_script_trains_as_the_step_does(fields):
    config = StepConfig(**{"batch_size": 64, "optimizer": "sgd", **fields})
    assert_same(blocks(), config)


def test_a_script_draws_dropout_twice_alike_and_updates_statistics_once():
    config = StepConfig(batch_size=16, checkpointing="blocks", checkpoint_policy="keep-matmuls")
    workload = blocks(norm=True, dropout=0.3)
    copies = sum(b.nbytes for b in workload.build_model().buffers())  # which memlab holds
    assert_same(workload, config, slack=copies)


@pytest.mark.parametrize("name", LATE)
def test_a_script_fills_what_was_saved_before_it_was_filled(name):
    # PyTorch keeps no output that is changed in place
    policy = "aten.tanh" if "middle" in name else "recompute-all"
    config = StepConfig(batch_size=12, checkpointing="blocks", checkpoint_policy=policy)
    losses, model = by_script(make_workload(LATE[name]), config)
    plain_losses, plain = by_script(make_workload(LATE[name]), StepConfig(batch_size=12))
    assert losses == plain_losses
    weights, others = model.state_dict(), plain.state_dict()
    assert [key for key in others if not torch.equal(weights[key], others[key])] == []


def test_a_script_says_what_hooks_see_of_what_is_kept(monkeypatch):
    """PyTorch 2.14 asks for it, and warns without it."""
    seen = []
    checkpoint = torch.utils.checkpoint.checkpoint

    def newer(function, *args, respect_saved_tensors_hooks=None, **kwargs):
        seen.append(respect_saved_tensors_hooks)
        return checkpoint(function, *args, **kwargs)

    config = StepConfig(batch_size=16, checkpointing="blocks", checkpoint_policy="keep-matmuls")
    expected, _ = by_script(blocks(), config)
    monkeypatch.setattr("torch.utils.checkpoint.checkpoint", newer)
    losses, _ = by_script(blocks(), config)
    assert losses == expected
    assert set(seen) == {False}


def test_a_script_carries_out_a_plan():
    keep = frozenset({("aten.gelu.default", 0)})
    regions = (Region(path="0"), Region(path="2", keep=keep))
    plan = Plan(regions=regions, saved_bytes=1, plain_saved_bytes=2, peak_bytes=3,
                recompute_seconds=None)  # fmt: skip
    assert_same(blocks(), StepConfig(batch_size=64, memory_budget=0.5), plan)
    with pytest.raises(UnsupportedError, match="needs a plan"):
        script(StepConfig(memory_budget=0.5), CPU)


@pytest.mark.parametrize(
    "fields",
    [
        {"compile": True},
        {"compile": True, "checkpointing": "blocks"},
        {"memory_budget": 0.3, "budget_engine": "compile"},
    ],
    ids=str,
)
def test_a_compiled_script_trains_as_the_step_does(fields):
    config = StepConfig(batch_size=64, optimizer="sgd", **fields)
    try:
        losses, model = by_step(blocks(), config)
        forget()
        script_losses, compiled = by_script(blocks(), config)
    finally:
        torch._functorch.config.activation_memory_budget = 1.0
        forget()
    assert script_losses == losses
    found = compiled._orig_mod.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_attention_is_kept_by_a_script_too():
    def build():
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    workload = Workload(
        name="attention",
        build_model=build,
        make_batch=lambda n: torch.randn(n, 6, 16),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    policy = "keep-attention"
    assert_same(workload, StepConfig(checkpointing="blocks", checkpoint_policy=policy))


def test_a_script_needs_no_memlab_and_says_what_it_does(tmp_path):
    config = StepConfig(accumulation_steps=2, checkpointing="blocks", precision="fp16-mixed")
    text = script(config, "cuda")
    assert "    precision=fp16-mixed" in text.splitlines()[:6]
    (tmp_path / "it.py").write_text(text)
    code = "import sys, it; assert not any('memlab' in name for name in sys.modules); it.train"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0
    assert "memlab." not in text


def test_a_policy_function_cannot_be_written_down():
    config = StepConfig(checkpointing="blocks", checkpoint_policy=lambda *_: True)
    with pytest.raises(UnsupportedError, match="memlab does not have the source"):
        script(config, CPU)


def test_a_script_holds_definitions_of_memlab_as_they_stand_after_what_they_use():
    found = inlined(build_on_meta)
    texts = "\n".join(found.functions)
    for definition in (build_on_meta, deferred.Notes, deferred.TensorPlace, deferred.fill):
        assert inspect.getsource(definition).strip() in texts
    assert texts.startswith("RANDOM = ")
    assert texts.index("class OneMode") < texts.index("def build_on_meta")
    assert "from torch.utils import _pytree as pytree" in found.imports


def test_what_is_not_called_stays_out_of_a_script():
    (text,) = inlined(can_be_fp8).functions
    assert text == inspect.getsource(can_be_fp8).strip()


def test_a_constant_keeps_its_comments_and_stands_beside_its_neighbours():
    constants, *_ = inlined(is_large).functions
    assert constants.startswith("SMALLEST_BYTES = 1 << 18  # 256 KiB takes")


def test_a_script_defines_the_errors_that_it_raises_once():
    error, *others = inlined(find_head, ChunkedHead).functions
    assert error == "class UnsupportedError(ValueError):\n    pass"
    assert not any("class UnsupportedError" in text for text in others)


def test_what_needs_memlab_is_in_no_script():
    with pytest.raises(AssertionError, match=r"from memlab\.config import"):
        inlined(precision.source)
