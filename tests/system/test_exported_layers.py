"""Files whose ranks divide layers, run by torchrun, against memlab's ranks and one process."""

import ast
from collections import Counter
from dataclasses import replace

import pytest
import torch

import memlab
from memlab import StepConfig
from memlab.errors import UnsupportedError
from memlab.integrations.export import export_script
from memlab.techniques.step import build_step
from tests.exported_rank_parts import NUM_STEPS, of_files, of_steps
from tests.tensor_parts import decoder, mixing, mlp, shared, used_outside

LATE = {"accumulation_steps": 2, "sync_each_micro_batch": False}
CLIPPED = {"max_grad_norm": 0.0123456789}
PAIRS = {"world_size": 4, "tensor_parallel_size": 2}


def gpt(**options):
    return memlab.workloads.get(
        "gpt-small", num_layers=2, hidden_size=32, num_heads=2, vocab_size=256, sequence_length=8,
        **options,
    )  # fmt: skip


def llama():
    return memlab.workloads.get(
        "llama-1b", num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4,
        num_key_value_heads=2, vocab_size=256, sequence_length=8,
    )  # fmt: skip


def assert_same(pairs, folder, num_ranks):
    """Compare files with memlab's own ranks, bit by bit; return the losses and weights of each."""
    texts = [export_script(*pair, "cpu") for pair in pairs]
    for text in texts:
        defined = Counter(getattr(node, "name", None) for node in ast.parse(text).body)
        assert [name for name, count in defined.items() if name and count > 1] == []
    files = of_files(texts, folder, num_ranks)
    steps = of_steps(pairs, folder, num_ranks)
    for (workload, config), file, step in zip(pairs, files, steps, strict=True):
        said = (workload.name, str(config))
        assert file[0] == step[0], said
        assert len(set(file[0])) == NUM_STEPS, said
        for ours, theirs in zip(file[1], step[1], strict=True):
            assert ours.keys() == theirs.keys(), said
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), said
    return files


def tables_in(text):
    """Return which layers a file divides, and its plan if it has one."""
    assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in assigned
        if node.targets[0].id in ("DIVIDED_LAYERS", "PLAN")
    }


def in_one_process(workload, **fields):
    """Return the losses and the weights of one process with the whole batch."""
    step = build_step(workload, StepConfig(**fields), "cpu")
    step.set_seed(0)
    losses = [step() for _ in range(NUM_STEPS)]
    return losses, {name: p.detach() for name, p in step.model.named_parameters()}


def joined(parts, whole):
    """Return a weight from its parts; whole ones must be the same in all ranks."""
    if parts[0].shape == whole.shape:
        assert all(torch.equal(parts[0], part) for part in parts)
        return parts[0]
    [dim] = [i for i, size in enumerate(whole.shape) if parts[0].shape[i] != size]
    return torch.cat(parts, dim)


@pytest.mark.slow
def test_a_file_divides_layers_as_the_step_does_and_trains_as_one_process(tmp_path):
    cases = [
        (gpt(), {"checkpointing": "blocks", **CLIPPED}),
        (llama(), {"accumulation_steps": 2}),
        (decoder(dropout=0.2), {}),
        (mixing("dropout"), {"precision": "bf16-master"}),
        (mixing("gate"), {"init_on_meta": True, "optimizer_in_backward": True}),
        (shared(), CLIPPED),
        (used_outside(), {"optimizer": "sgd-momentum"}),
        (decoder(dropout=0.2), {"memory_budget": 0.5}),
    ]
    ranks = {"batch_size": 8, "sharding": "tensor", "world_size": 2}
    pairs = [(workload, StepConfig(**ranks, **fields)) for workload, fields in cases]
    files = assert_same(pairs, tmp_path, 2)

    for (workload, fields), (losses, weights) in zip(cases, files, strict=True):
        if fields.get("precision"):  # which rounds sums of parts in other places
            continue
        fields = {name: value for name, value in fields.items() if name != "memory_budget"}
        alone, whole = in_one_process(workload, batch_size=8, **fields)
        assert losses == pytest.approx(alone, rel=1e-5), workload.name
        for name, weight in whole.items():
            found = joined([of_rank[name] for of_rank in weights], weight)
            torch.testing.assert_close(found, weight, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.slow
def test_a_file_of_pairs_divides_layers_and_the_batch(tmp_path):
    cases = [
        (decoder(), {"sharding": "ddp", **CLIPPED, **LATE}),
        (shared(), {"sharding": "zero1", "accumulation_steps": 2, **CLIPPED}),
        (decoder(padding=None), {"sharding": "zero2", "checkpointing": "blocks"}),
        (mixing("mean"), {"sharding": "zero3", **CLIPPED, **LATE}),
    ]
    # each part of the batch draws its own random numbers
    drawing = [
        (decoder(dropout=0.2), {"sharding": "zero1"}),
        (decoder(dropout=0.2), {"sharding": "zero3", "precision": "bf16-mixed"}),
        (decoder(dropout=0.2), {"sharding": "zero3", "memory_budget": 0.5}),
    ]
    pairs = [(workload, StepConfig(batch_size=8, **PAIRS, **fields))
             for workload, fields in (*cases, *drawing)]  # fmt: skip
    files = assert_same(pairs, tmp_path, 4)

    of_ranks = ("sharding", "sync_each_micro_batch")
    for (workload, fields), (losses, _) in zip(cases, files[: len(cases)], strict=True):
        own = {name: value for name, value in fields.items() if name not in of_ranks}
        alone, _ = in_one_process(workload, batch_size=8, **own)
        assert losses == pytest.approx(alone, rel=1e-5), (workload.name, fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"sharding": "tensor"}, {"sharding": "zero3", **PAIRS}], ids=str
)
def test_a_file_with_a_memory_budget_divides_the_layers_of_the_plain_step(fields):
    config = StepConfig(**{"batch_size": 8, "world_size": 2, **fields})
    plain, planned = (
        tables_in(export_script(decoder(), replace(config, memory_budget=budget), "cpu"))
        for budget in (1.0, 0.5)
    )
    assert planned["DIVIDED_LAYERS"] == plain["DIVIDED_LAYERS"] != {}
    assert planned["PLAN"] != {}
    assert "PLAN" not in plain


@pytest.mark.parametrize("flavor", ["lightning", "transformers", "accelerate"])
@pytest.mark.parametrize("fields", [{"sharding": "tensor"}, {"sharding": "zero3", **PAIRS}])
def test_a_library_that_divides_no_layers_is_refused_by_name(flavor, fields):
    config = StepConfig(**{"world_size": 2, **fields})
    with pytest.raises(UnsupportedError, match=r"is not expressed by .* use flavor='pytorch'"):
        export_script(mlp(), config, "cpu", flavor=flavor)


def test_a_script_of_settings_alone_is_refused_with_a_remedy():
    with pytest.raises(UnsupportedError, match=r"depends on the model; use memlab.export_script"):
        memlab.techniques.script.script(StepConfig(sharding="tensor", world_size=2), "cpu")


@pytest.mark.slow
def test_a_model_of_which_nothing_divides_has_no_file():
    with pytest.raises(UnsupportedError, match=r"no layer .* over 5 ranks: .* sharding='zero3'"):
        export_script(mlp(), StepConfig(sharding="tensor", world_size=5), "cpu")
