"""What DeepSpeed is told about a step, and what it is not asked to do."""

import pytest
import torch

import memlab
from memlab import Outcome, StepConfig
from memlab.integrations.from_trainer import read_deepspeed
from memlab.techniques import registry
from memlab.techniques.sharding import sharding
from memlab.techniques.sharding.deepspeed_engine import USUAL_BUCKET, deepspeed_settings
from memlab.techniques.technique import Setup
from tests.models import linear


def config(stage=2, **fields):
    own = {"batch_size": 16, "sharding": f"deepspeed-zero{stage}", "world_size": 2}
    return StepConfig(**(own | fields))


def refused(device="cpu", **fields):
    """Return the sentences with which a config is refused."""
    asked = Setup(config=config(**fields), device=torch.device(device))
    return [str(refusal) for refusal in registry.refusals(asked)]


def test_settings_are_deepspeeds_json():
    asked = config(accumulation_steps=2, max_grad_norm=0.5, precision="bf16-master")
    assert deepspeed_settings(asked) == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
    }
    assert deepspeed_settings(config())["gradient_clipping"] == 0.0  # or DeepSpeed clips at 1


def test_offloading_is_deepspeeds_own():
    asked = config(stage=3, offload_optimizer=True, offload_parameters=True)
    assert deepspeed_settings(asked)["zero_optimization"] == {
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
    }  # fmt: skip
    assert not refused("cuda", stage=3, offload_optimizer=True, offload_parameters=True)
    said = registry.notes(Setup(config=asked, device=torch.device("cuda")))
    assert any("No card has run DeepSpeed's offloading" in note for note in said)
    assert any("in stage 3 only" in why for why in refused("cuda", offload_parameters=True))
    assert any("does nothing on a CPU" in why for why in refused(offload_optimizer=True))


def test_a_bucket_is_no_larger_than_a_small_model():
    small, large = (
        deepspeed_settings(config(), count)["zero_optimization"] for count in (1000, USUAL_BUCKET)
    )
    assert small == {"stage": 2, "reduce_bucket_size": 1000}
    assert large == {"stage": 2}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["as-built", "bf16-mixed", "bf16-master"])
def test_settings_are_read_back_as_the_same_step(stage, precision):
    for steps, norm in ((2, 0.5), (1, None)):
        late = stage == 1 and steps > 1  # by its stage, DeepSpeed averages once an update or more
        fields = {"accumulation_steps": steps, "max_grad_norm": norm, "precision": precision}
        asked = config(stage, sync_each_micro_batch=not late, **fields)
        found = read_deepspeed(deepspeed_settings(asked), "a dict", world_size=2).config
        assert found == asked


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": "bf16"}, ["precision='bf16'", "use precision='bf16-master'"]),
        ({"precision": "fp16-mixed"}, ["loss scaler of its own", "use precision='bf16-mixed'"]),
        ({"optimizer": "adafactor"}, ["optimizer='adafactor'", "one flat tensor"]),
        ({"optimizer_in_backward": True}, ["optimizer_in_backward=True"]),
        ({"channels_last": True}, ["channels_last=True", "contiguous"]),
        ({"compile": True}, ["compile=True is not implemented", "by a method of its own"]),
        ({"stage": 1, "accumulation_steps": 2}, ["sync_each_micro_batch=True", "once an update"]),
        ({"accumulation_steps": 2, "sync_each_micro_batch": False},
         ["sync_each_micro_batch=False", "after every micro-batch"]),
        ({"loss_chunks": 4}, ["loss_chunks=4", "computed only in the loss"]),
        ({"stage": 3, "inplace": True}, ["inplace=True", "DeepSpeed's hooks"]),
    ],
)  # fmt: skip
def test_what_deepspeed_does_not_do_is_refused_by_name(fields, said):
    found = refused(**fields)
    assert any(all(part in why for part in said) for why in found), found


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(sharding, "find_spec", lambda name: None)
    (why,) = refused(stage=1)
    assert "needs deepspeed, which is not installed" in why
    assert "use sharding='zero1', or pip install 'memlab[deepspeed]'" in why


def test_a_prediction_is_unsupported_and_says_what_is_possible():
    result = memlab.predict(linear(), config(), "cpu")
    assert result.outcome is Outcome.UNSUPPORTED
    assert "is run, verified and measured, but not predicted" in result.message
    assert "predict sharding='zero2'" in result.message
