"""`memlab.from_trainer` of arguments and files: every field is reported, errors are sentences."""

import builtins
import dataclasses
import html
import json
from types import SimpleNamespace

import pytest
import torch

import memlab
from benchmarks import imports
from benchmarks.recipes import RECIPES, RecipeKind
from memlab.integrations.reading import (
    TABLES,
    UNKNOWN,
    FieldStatus,
    SourceReading,
    read_optimizer,
    settings_of,
)
from memlab.integrations.transformers_trainer import OPTIMIZERS, read_arguments
from memlab.integrations.transformers_workload import ignores_number_of_terms

# values that a field of TrainingArguments could have, beside those of its default's type
ODD_VALUES = {
    "optim": "adafactor", "lr_scheduler_type": "cosine", "torch_compile_backend": "inductor",
    "torch_compile_mode": "max-autotune", "fsdp": "full_shard", "deepspeed": "zero.json",
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "accelerator_config": {"split_batches": True},
}  # fmt: skip
OLD_NAMES = (
    "evaluation_strategy", "no_cuda", "half_precision_backend", "fp16_backend", "fp16_opt_level",
    "adafactor", "group_by_length", "warmup_ratio", "logging_dir", "save_safetensors",
    "overwrite_output_dir", "use_ipex", "jit_mode_eval", "torchdynamo", "sharded_ddp",
    "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "past_index", "mp_parameters",
    "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token", "ray_scope",
    "use_legacy_prediction_loop", "use_mps_device", "tpu_num_cores", "tpu_metrics_debug",
    "xpu_backend", "include_inputs_for_metrics", "include_tokens_per_second", "dispatch_batches",
    "split_batches", "per_gpu_train_batch_size", "per_gpu_eval_batch_size",
    "evaluate_during_training", "gradient_checkpointing",
)  # fmt: skip


def deepspeed(**config):
    return memlab.from_trainer({"steps_per_print": 10, **config})


def field(imported, name):
    return next(each for each in imported.fields if each.name == name)


def defaults():
    """Return the fields of TrainingArguments of the installed transformers, with their defaults."""
    transformers = pytest.importorskip("transformers", reason="needs memlab[zoo]")
    return {
        each.name: each.default_factory() if each.default is dataclasses.MISSING else each.default
        for each in dataclasses.fields(transformers.TrainingArguments)
    }


def other_value(name, value):
    """Return a value of the same kind that is not the default."""
    if name in ODD_VALUES:
        return ODD_VALUES[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return {"a": 1} if name.endswith("kwargs") else "something"


def test_every_field_of_the_arguments_is_reported():
    usual = defaults()
    for name, value in usual.items():
        found = read_arguments(usual | {name: other_value(name, value)}).finish("arguments")
        assert [each.name for each in found.fields] == list(usual), name
        assert [each.name for each in found.fields if each.why == UNKNOWN] == [], name
        assert field(found, name).value == other_value(name, value) or "token" in name


def test_fields_of_older_versions_are_known_and_others_are_said_to_be_unknown():
    found = read_arguments(dict.fromkeys(OLD_NAMES) | {"model_max_length": 512}).finish("old")
    unknown = [each.name for each in found.fields if each.why == UNKNOWN]
    assert unknown == ["model_max_length"]
    assert field(found, "model_max_length").status is FieldStatus.NOT_IMPORTED


def test_all_fields_together_make_a_config():
    usual = defaults()
    changed = {name: other_value(name, value) for name, value in usual.items()}
    found = read_arguments(changed).finish("arguments")
    assert found.config.checkpointing == "blocks"
    assert found.config.compile
    assert found.config.optimizer == "adafactor"
    assert "hub_token='(hidden)'" in str(field(found, "hub_token"))


def test_every_optimizer_name_of_transformers_makes_a_config():
    pytest.importorskip("transformers", reason="needs memlab[zoo]")
    from transformers.training_args import OptimizerNames

    for name in (*OptimizerNames, "adamw_hf", "adamw_apex_fused", "paged_adamw"):
        found = read_arguments({"optim": name}).finish("arguments")
        row = OPTIMIZERS.get(str(getattr(name, "value", name)), {"status": "not imported"})
        is_known = row["status"] == "imported"
        assert (field(found, "optim").status is FieldStatus.IMPORTED) == is_known
        assert field(found, "optim").why or is_known


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
         {"batch_size": 12, "accumulation_steps": 4}),
        ({"bf16": True}, {"precision": "bf16-mixed"}),
        ({"fp16": True, "tf32": True}, {"precision": "fp16-mixed"}),
        ({"tf32": True}, {"precision": "tf32"}),
        ({"max_grad_norm": 0.0}, {"max_grad_norm": None}),
        ({"max_grad_norm": 0.3}, {"max_grad_norm": 0.3}),
        ({"torch_compile_mode": "reduce-overhead"},
         {"compile": True, "compile_mode": "reduce-overhead"}),
        ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, {"compile": False}),
        ({"gradient_checkpointing": True, "use_cache": True},
         {"checkpointing": "blocks", "model_cache": False}),
        ({"activation_checkpointing": True, "activation_checkpointing_kwargs":
          {"every_n_layers": 3}}, {"checkpoint_modules": "every 3"}),
        ({"use_cache": True}, {"model_cache": True, "checkpointing": "none"}),
        ({"optim": "adamw_torch_fused"}, {"optimizer_implementation": "fused"}),
        ({"optim": "paged_adamw_8bit"}, {"optimizer": "adamw-8bit"}),
        ({"adafactor": True}, {"optimizer": "adafactor"}),
    ],
)  # fmt: skip
def test_arguments_become_settings(values, expected):
    usual = {"optim": "adamw_torch", "use_cache": False}
    config = read_arguments(usual | values).finish("arguments").config
    assert {name: getattr(config, name) for name in expected} == expected


def test_formats_of_the_model_decide_on_a_mixed_precision():
    for formats in (("float32",), ("uint8", "float32"), ()):
        assert read_arguments({"bf16": True}, formats).settings["precision"] == "bf16-mixed"
    found = read_arguments({"bf16": True}, ("bfloat16", "float32")).finish("arguments")
    assert found.config.precision == "as-built"
    assert field(found, "bf16").status is FieldStatus.NOT_IMPORTED


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_public_recipe_is_imported(recipe):
    needed = imports.missing(recipe)
    if needed or recipe.kind is RecipeKind.LIGHTNING:
        pytest.importorskip(needed or "lightning.pytorch", reason=f"needs {needed or 'lightning'}")
    given = imports.imported(recipe)
    assert imports.unreported(recipe, given) == set()
    found = {name: getattr(given.config, name) for name in recipe.expected}
    assert found == recipe.expected
    assert all(each.why for each in given.not_imported)
    assert {each.name for each in given.fields} >= set(
        imports.flattened(recipe.settings)
        if recipe.kind in (RecipeKind.DEEPSPEED, RecipeKind.ACCELERATE)
        else recipe.settings
    )


def test_deepspeed_batches_are_those_of_one_process():
    both = deepspeed(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    assert (both.config.batch_size, both.config.accumulation_steps) == (8, 2)
    total = deepspeed(train_batch_size=32, gradient_accumulation_steps=2)
    assert (total.config.batch_size, total.config.accumulation_steps) == (32, 2)
    every = deepspeed(train_batch_size=64, train_micro_batch_size_per_gpu=4)
    assert (every.config.batch_size, every.config.accumulation_steps) == (64, 16)
    assert "as if there were one process" in field(every, "train_batch_size").why
    whole = deepspeed(
        train_batch_size=64, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2
    )
    assert whole.config.batch_size == 8
    assert "all processes" in field(whole, "train_batch_size").why
    accumulated = deepspeed(gradient_accumulation_steps=16)
    assert accumulated.config.batch_size == 128


def test_deepspeed_clips_if_its_file_does_not_say_otherwise():
    constants = pytest.importorskip("deepspeed.runtime.constants", reason="needs memlab[deepspeed]")
    unsaid = deepspeed(train_batch_size=8)
    assert unsaid.config.max_grad_norm == constants.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert "from 0.19.3 on" in field(unsaid, "gradient_clipping").why
    assert deepspeed(gradient_clipping=0.0).config.max_grad_norm is None
    assert deepspeed(gradient_clipping=0.5).config.max_grad_norm == 0.5


def test_deepspeed_optimizers():
    kinds = {
        "Adam": ("adamw", "fused"), "AdamW": ("adamw", "fused"), "OneBitAdam": ("adamw", "default"),
        "SGD": ("sgd", "default"),
    }  # fmt: skip
    for kind, expected in kinds.items():
        config = deepspeed(optimizer={"type": kind}).config
        assert (config.optimizer, config.optimizer_implementation) == expected, kind
    plain = deepspeed(optimizer={"type": "Adam", "params": {"adam_w_mode": False}})
    assert plain.config.optimizer == "adam"


def test_parts_of_deepspeed_that_are_not_enabled_do_not_concern_the_step():
    found = deepspeed(
        elasticity={"enabled": False, "max_train_batch_size": 9},
        torch_autocast={"enabled": False, "dtype": "bfloat16"},
        flops_profiler={"enabled": True},
    )
    assert [each.name for each in found.not_imported] == ["batch size"]
    assert deepspeed(torch_autocast={"enabled": True, "dtype": "float16"}).config.precision == (
        "fp16-mixed"
    )


@pytest.mark.parametrize("library", TABLES)
def test_a_table_of_fields_is_whole(library):
    table = TABLES[library]
    assert table["of"]
    skipped = [name for row in table["not concerned"] for name in row["fields"]]
    left = {name: off for row in table["not imported"] for name, off in row["fields"].items()}
    into = [name for names in table.get("into", {}).values() for name in names]
    named = [*skipped, *left, *into]
    assert len(named) == len(set(named))
    assert all(isinstance(off, list) for off in left.values())
    assert all(row["why"] for row in (*table["not concerned"], *table["not imported"]))
    for row in table.get("optimizers", ()):
        config = memlab.StepConfig(**row["settings"])
        assert "optimizer" in row["settings"]
        assert row["status"] in ("imported", "not imported")
        assert row["why"] or row["status"] == "imported", config


def test_a_field_of_a_table_is_left_out_only_where_its_value_means_nothing():
    table = TABLES["deepspeed"]["not imported"]
    assert any("compile." in row["fields"] for row in table)
    given = {"compile": {"deepcompile": True, "passes": None}, "prescale_gradients": 1.0}
    status = {each.name: str(each.status) for each in deepspeed(**given).fields}
    assert status["compile.deepcompile"] == "not imported"
    assert status["compile.passes"] == status["prescale_gradients"] == "not concerned"


def test_an_optimizer_of_some_parameters_is_said():
    layer = torch.nn.Linear(2, 2)
    groups = [{"params": [layer.weight], "lr": 0.1}, {"params": []}]
    reading = SourceReading({})
    read_optimizer(reading, "optimizer", torch.optim.AdamW(groups), 2)
    found = reading.finish("a test")
    assert "1 parameters of 2" in field(found, "optimizer").why
    assert {"optimizer", "optimizer.param_groups"} == {each.name for each in found.not_imported}


def test_accelerate_reads_an_unquoted_no_as_yaml_does():
    for value in ("no", False):
        found = memlab.from_trainer({"distributed_type": value, "mixed_precision": value})
        assert found.config.precision == "as-built"
        assert [each.name for each in found.not_imported] == ["batch size"]


def test_optimizers_by_class():
    layer = torch.nn.Linear(2, 2)
    made = {
        "sgd": torch.optim.SGD(layer.parameters(), lr=0.1),
        "sgd-momentum": torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5),
        "adam": torch.optim.Adam(layer.parameters()),
        "adamw": torch.optim.AdamW(layer.parameters(), fused=True),
        "adafactor": torch.optim.Adafactor(layer.parameters()),
    }
    assert {name: settings_of(each)["optimizer"] for name, each in made.items()} == {
        name: name for name in made
    }
    assert settings_of(made["adamw"])["optimizer_implementation"] == "fused"
    assert settings_of(torch.optim.RMSprop(layer.parameters())) is None


def test_a_result_shows_every_field():
    found = deepspeed(zero_optimization={"stage": 3}, gradient_clipping=0.5)
    assert str(found).endswith("not imported (zero_optimization.stage, batch size)")
    page = found._repr_html_()
    assert all(each.name in page for each in found.fields)
    told = [each for each in found.fields if each.status is not FieldStatus.NOT_CONCERNED]
    assert all(html.escape(each.why) in page for each in told)
    assert "max_grad_norm=0.5" in page


def test_what_no_rule_names_is_not_lost():
    reading = SourceReading({"a": 1, "b": 2})
    reading.skip("a", "it is about nothing")
    found = reading.finish("a test")
    assert [str(each.status) for each in found.fields] == ["not concerned", "not imported"]
    assert found.fields[1].why == UNKNOWN


BROKEN = {
    "broken.json": ('{"train_batch_size": 4,', "not valid JSON"),
    "broken.yaml": ("distributed_type: [", "not valid YAML"),
    "empty.json": ("{}", "holds no fields"),
    "list.json": ("[1, 2]", "holds no fields"),
    "other.json": ('{"learning_rate": 1}', "none that a config"),
    "negative.json": ('{"train_batch_size": -4}', "train_batch_size=-4 is below 1"),
    "text.json": ('{"train_batch_size": "four"}', "train_batch_size='four' is not a whole number"),
    "norm.json": ('{"gradient_clipping": "much"}', "max_grad_norm='much'"),
    "deep.json": ("[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_a_sentence(tmp_path, name):
    if name.endswith("yaml"):
        pytest.importorskip("yaml", reason="needs PyYAML")
    text, said = BROKEN[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(memlab.MemlabError, match=said):
        memlab.from_trainer(path)


def test_a_missing_file_a_folder_and_bytes(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path, said in [
        (tmp_path / "no.json", "does not exist"), (tmp_path, "is a folder"),
        (tmp_path / "bytes.json", "cannot be read"), ("a\0b", "no path|does not exist"),
    ]:  # fmt: skip
        with pytest.raises(memlab.MemlabError, match=said):
            memlab.from_trainer(str(path))


class Hostile:
    @property
    def __class__(self):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")


def test_an_unknown_object_is_a_sentence():
    for source in (3, None, object(), torch.nn.Linear(1, 1), [1], Hostile()):
        with pytest.raises(memlab.MemlabError, match="allowed are a transformers Trainer"):
            memlab.from_trainer(source)


class HostileMapping(dict):
    def __iter__(self):
        raise RuntimeError("no")


def test_a_mapping_that_cannot_be_read_is_a_sentence():
    held = {"fp16": {}}
    held["fp16"]["again"] = held
    for source in (HostileMapping(fp16=1), held):
        with pytest.raises(memlab.MemlabError, match="cannot be read"):
            memlab.from_trainer(source)


def test_a_module_is_for_lightning_only():
    with pytest.raises(memlab.MemlabError, match="is for a Lightning Trainer"):
        memlab.from_trainer({"train_batch_size": 1}, torch.nn.Linear(1, 1))


def test_a_trainer_of_an_unknown_version_is_a_sentence():
    kind = type("Trainer", (), {"__module__": "transformers.trainer"})
    with pytest.raises(memlab.MemlabError, match="cannot be read: AttributeError"):
        memlab.from_trainer(kind())


def test_yaml_without_its_package_names_the_command(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text("mixed_precision: bf16")
    real = builtins.__import__

    def without(name, *rest):
        if name == "yaml":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(memlab.MemlabError, match="pip install pyyaml"):
        memlab.from_trainer(path)


def test_a_json_file_may_have_any_suffix(tmp_path):
    path = tmp_path / "ds_config"
    path.write_text(json.dumps({"train_batch_size": 4}))
    assert memlab.from_trainer(path).config.batch_size == 4


def test_the_lightning_observers_are_no_reason_to_complain():
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    from memlab.integrations.reading import TABLES

    observers = set(TABLES["lightning"]["observers"])
    known = {name for name in dir(lightning.callbacks) if name[0].isupper()}
    assert {"ModelCheckpoint", "EarlyStopping", "LearningRateMonitor"} <= observers & known


def test_a_field_is_told_in_one_line():
    found = SimpleNamespace(**{each.name: str(each) for each in deepspeed().fields})
    assert found.steps_per_print.startswith("steps_per_print=10, not concerned: ")


def test_an_old_file_of_accelerate_keeps_its_fp16():
    old = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "fp16": True}
    assert memlab.from_trainer(old).config.precision == "fp16-mixed"


def of_ranks(source, world_size=2):
    """Return the imported sharding, ranks and batch, and what was not imported."""
    found = memlab.from_trainer(source, world_size=world_size)
    config = found.config
    others = {each.name: each.why for each in found.not_imported}
    return (str(config.sharding), config.world_size, config.batch_size), others


@pytest.mark.parametrize(("stage", "sharding"), [
    (0, "ddp"), (1, "deepspeed-zero1"), (2, "deepspeed-zero2"), (3, "deepspeed-zero3"),
])  # fmt: skip
def test_stages_of_deepspeed_are_imported_for_a_number_of_ranks(stage, sharding):
    source = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 4,
              "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}}  # fmt: skip
    found = memlab.from_trainer(source, world_size=2).config
    assert found.sync_each_micro_batch is (stage > 1)
    assert of_ranks(source) == ((sharding, 2, 16), {})
    assert of_ranks({**source, "train_batch_size": 16}) == ((sharding, 2, 16), {})
    without = memlab.from_trainer(source)
    assert (without.config.sharding, without.config.batch_size) == ("none", 8)


def test_what_means_another_sharding_is_not_imported():
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    found, others = of_ranks({"zero_optimization": offload, "train_batch_size": 8})
    assert found[0] == "none"
    assert "reads no settings of DeepSpeed's offloading" in others["world_size"]
    assert "no stage 7" in of_ranks({"zero_optimization": {"stage": 7}})[1]["world_size"]


@pytest.mark.parametrize(("fields", "sharding"), [
    ({"distributed_type": "MULTI_GPU"}, "ddp"),
    ({"distributed_type": "FSDP", "fsdp_config": {
        "fsdp_version": 2, "fsdp_reshard_after_forward": True}}, "zero3"),
    ({"distributed_type": "FSDP", "fsdp_config": {
        "fsdp_version": 2, "fsdp_reshard_after_forward": False}}, "zero2"),
    ({"distributed_type": "FSDP", "fsdp_config": {
        "fsdp_sharding_strategy": "FULL_SHARD"}}, "zero3"),
    ({"distributed_type": "FSDP", "fsdp_config": {
        "fsdp_sharding_strategy": 2, "fsdp_offload_params": True}}, "zero2"),
    ({"distributed_type": "DEEPSPEED", "deepspeed_config": {
        "zero_stage": 3}}, "deepspeed-zero3"),
])  # fmt: skip
def test_a_file_of_accelerate_for_several_ranks(fields, sharding):
    source = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, **fields}
    found, others = of_ranks(source)
    assert found == (sharding, 2, 16)
    assert set(others) == {"batch size"}
    wrong = of_ranks(source, world_size=4)
    assert "for 2 processes, and world_size=4" in wrong[1]["num_processes"]
    hybrid = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
    assert "groups of hybrid" in of_ranks(hybrid)[1]["world_size"]


@dataclasses.dataclass
class Arguments:
    """The fields of TrainingArguments that are about ranks, as different versions hold them."""

    fsdp: object = None
    fsdp_config: object = None
    gradient_accumulation_steps: int = 2
    per_device_train_batch_size: int = 4


@pytest.mark.parametrize(("fsdp", "options", "sharding"), [
    (None, None, "ddp"),
    (True, {"version": 2, "reshard_after_forward": True}, "zero3"),
    (True, {"reshard_after_forward": False}, "zero2"),
    ("full_shard auto_wrap", {"fsdp_min_num_params": 0}, "zero3"),
    (["shard_grad_op"], None, "zero2"),
    ("full_shard offload", None, "zero3"),
    ("no_shard offload", None, "none"),
    ("hybrid_shard", None, "none"),
])  # fmt: skip
def test_arguments_of_transformers_for_several_ranks(fsdp, options, sharding):
    values = dataclasses.asdict(Arguments(fsdp=fsdp, fsdp_config=options))
    config = read_arguments(values, world_size=2).finish("a test").config
    assert config.sharding == sharding
    is_offloaded = fsdp == "full_shard offload"
    assert config.offload_parameters is config.offload_optimizer is is_offloaded
    assert config.batch_size == (8 if sharding == "none" else 16)
    # accelerate averages gradients with the last micro-batch only
    assert config.sync_each_micro_batch == (sharding == "none")


@pytest.mark.parametrize(
    ("body", "ignores"),
    [
        ("return model(inputs).loss  # num_items_in_batch is not read", True),
        ("return model(inputs).sum() / num_items_in_batch", False),
        ("return (lambda: num_items_in_batch)()", False),
        ("return model(inputs, **locals())", False),
    ],
)
def test_whether_a_loss_without_a_source_reads_the_number_of_terms(body, ignores):
    made = {}
    exec(f"def compute_loss(self, model, inputs, num_items_in_batch=None):\n    {body}", made)
    assert ignores_number_of_terms(made["compute_loss"]) is ignores
    assert not ignores_number_of_terms(len)
