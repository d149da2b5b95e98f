"""Which layers are found to be divisible: against a model's own plan, and what must not be."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import memlab
from memlab import StepConfig, Workload
from memlab._util.torch_private.ranks import group_of_none, replicated_by
from memlab.errors import UnsupportedError
from memlab.techniques.registry import check
from memlab.techniques.sharding.divided_layers import Role, divide_layers
from memlab.techniques.step import build_step
from memlab.tracing.simulated_ranks import FakeLogger, FakeReducer
from tests.tensor_parts import Mixing, decoder, mixing, mlp, named, shared, used_outside

COLUMNS, ROWS, ALONE, INSIDE = Role.COLUMNS, Role.ROWS, Role.ALONE, Role.INSIDE


def divided(workload, count=2):
    """Return the step of one rank, with the placement of each parameter; None if it is whole."""
    with group_of_none(0, count):
        config = StepConfig(batch_size=4, sharding="tensor", world_size=count)
        step = build_step(workload, config, "cpu")
    return step, {
        path: parameter.placements[0] if isinstance(parameter, DTensor) else None
        for path, parameter in step.model.named_parameters()
    }


def test_llama_is_divided_as_its_own_plan_says():
    workload = memlab.workloads.get(
        "llama-1b", num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4,
        num_key_value_heads=2, vocab_size=256, sequence_length=8,
    )  # fmt: skip
    model = workload.build_model()
    plan = {"colwise": Shard(0), "rowwise": Shard(1)}
    expected = {
        f"model.{path}.weight".replace("*", str(layer)): plan[kind]
        for path, kind in model.config.base_model_tp_plan.items()
        for layer in range(2)
    }
    _, found = divided(workload)
    assert {path: placement for path, placement in found.items() if "_proj" in path} == expected
    assert found["model.embed_tokens.weight"] == Shard(0)  # its rows, as those of the head
    assert {placement for path, placement in found.items() if "norm" in path} == {None}


def test_norms_of_heads_get_the_gradient_of_all_heads():
    _, found = divided(decoder())
    block = {
        path.removeprefix("blocks.1."): p
        for path, p in found.items()
        if path.startswith("blocks.1.")
    }
    assert block["attention.query.weight"] == block["attention.query.bias"] == Shard(0)
    assert block["attention.out.weight"] == Shard(1)
    assert block["attention.out.bias"] == block["attention.key_norm.weight"] == Replicate()
    assert block["norm.weight"] is None
    # an embedding with a padding is divided along its features, and a head that shares it too
    assert found["words.weight"] == Shard(1)
    assert "head.weight" not in found


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("norm", "needs the parts of other ranks"),
        ("softmax", "needs the parts of other ranks"),
        ("mean", "needs the parts of other ranks"),
        ("flip", "needs the parts of other ranks"),
        ("parts", "needs the parts of other ranks"),
        ("dropout", "draws random numbers"),
        ("outside", "needs the parts of other ranks"),
        ("gate", "joins it with a tensor that every rank computes whole"),
    ],
)
def test_layers_with_anything_between_that_mixes_features_are_divided_alone(what, said):
    step, found = divided(mixing(what))
    found.pop("scale", None)
    assert found == {
        "up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(0), "down.bias": Shard(0),
    }  # fmt: skip
    note = next(note for note in step.notes if note.startswith("Not divided together"))
    assert "up" in note
    assert said in note


def test_what_only_looks_at_features_does_not_keep_layers_apart():
    _, found = divided(mixing("detour"))
    assert found["down.weight"] == Shard(1)


def test_heads_that_do_not_divide_are_named_with_a_remedy():
    step, found = divided(decoder(num_heads=3))
    assert found["blocks.0.up.weight"] == Shard(0)
    assert found["blocks.0.down.weight"] == Shard(1)
    assert found["blocks.0.attention.query.weight"] == Shard(0)  # alone: its output is gathered
    assert found["blocks.0.attention.out.weight"] == Shard(0)
    note = next(note for note in step.notes if "heads" in note)
    assert "Block.attention.query, Block.attention.key, Block.attention.value" in note
    assert "3 heads, which do not divide by 2 ranks; use a number of ranks by which 3" in note


def test_sizes_that_do_not_divide_stay_whole():
    _, found = divided(mlp(), count=3)  # 12 -> 32 -> 6 features
    assert found == {
        "0.weight": Shard(1), "0.bias": Replicate(), "2.weight": Shard(0), "2.bias": Shard(0),
    }  # fmt: skip


def test_a_weight_stays_one_parameter_in_all_modules_that_hold_it():
    step, found = divided(shared())
    assert found == {"shared.weight": Shard(0), "head.weight": Shard(0)}
    assert step.model.shared.weight is step.model.words.weight
    state = step.model.state_dict()
    assert torch.equal(state["shared.weight"].to_local(), state["words.weight"].to_local())


@pytest.mark.parametrize("what", ["", "before", "detached"])
def test_a_layer_whose_weight_is_used_outside_of_it_is_whole_and_no_other(what):
    step, found = divided(used_outside(what))
    assert found == {
        "words.weight": None, "up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1),
        "down.bias": Replicate(),
    }  # fmt: skip
    note = "Whole in every rank: words (its weight is also used outside of its own forward)."
    assert note in step.notes
    assert not any(note.startswith("Not divided together") for note in step.notes)


class Sparse(nn.Linear):
    """Multiplies by a sparse copy of its weight, which DTensor does not know."""

    def forward(self, x):
        return torch.sparse.mm(self.weight.to_sparse(), x.T).T + self.bias


class Odd(nn.Module):
    """Has one such layer before two that go together."""

    def __init__(self):
        super().__init__()
        self.odd, self.up, self.down = Sparse(12, 12), nn.Linear(12, 32), nn.Linear(32, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.odd(x))))


def test_layers_that_were_suspected_before_the_one_at_fault_are_divided():
    odd = Workload(
        name="odd", build_model=Odd, make_batch=mlp().make_batch, compute_loss=mlp().compute_loss
    )
    step, found = divided(odd)
    assert found["odd.weight"] is None
    assert (found["up.weight"], found["down.weight"]) == (Shard(0), Shard(1))
    assert any(note.startswith("Whole in every rank: odd (") for note in step.notes)


def test_layers_that_get_their_input_by_name_are_divided():
    step, found = divided(named())
    assert (found["words.weight"], found["head.weight"]) == (Shard(1), Shard(0))
    assert (found["up.weight"], found["down.weight"]) == (Shard(0), Shard(1))
    assert not any(note.startswith("Whole in every rank") for note in step.notes)


def test_a_model_without_such_layers_is_refused_with_a_remedy():
    convolution = Workload(
        name="convolution",
        build_model=lambda: nn.Conv1d(2, 2, 3),
        make_batch=lambda n: torch.randn(n, 2, 8),
        compute_loss=lambda model, batch: model(batch).square().mean(),
    )
    with pytest.raises(UnsupportedError, match=r"no layer of Conv1d .* use sharding='zero3'"):
        divided(convolution)
    with pytest.raises(UnsupportedError, match="no layer of Sequential can be divided over 5"):
        divided(mlp(), count=5)
    only_used_outside = Workload(
        name="outside", build_model=lambda: nn.Embedding(4, 2),
        make_batch=lambda n: torch.zeros(n, dtype=torch.int64),
        compute_loss=lambda model, batch: (model(batch) @ model.weight.T).square().mean(),
    )  # fmt: skip
    with pytest.raises(
        UnsupportedError, match=r"Embedding: its weight is also used outside .*'zero3'"
    ):
        divided(only_used_outside)


def test_a_model_that_fails_by_itself_says_its_own_error_and_stays_whole():
    made = []

    class Failing(Mixing):
        def __init__(self):
            super().__init__("")
            made.append(self)

        def forward(self, x):
            raise ValueError("only mine")

    failing = Workload(
        name="failing", build_model=Failing, make_batch=mixing("").make_batch,
        compute_loss=mixing("").compute_loss,
    )  # fmt: skip
    with pytest.raises(ValueError, match="only mine"):
        divided(failing)
    assert not any(isinstance(p, DTensor) for p in made[0].parameters())
    assert not made[0].up._forward_hooks


def test_the_notes_say_what_share_is_divided():
    step, _ = divided(mlp())
    assert "2 ranks divide layers with 99.0% of the parameters' 2.40 KiB" in step.notes[0]
    assert step.notes[1].endswith("and then input features: 0, 2.")


def test_replicas_of_divided_layers_have_this_ranks_parts_as_parameters():
    config = StepConfig(batch_size=4, sharding="ddp", world_size=4, tensor_parallel_size=2)
    # the real reducer averages in C++
    with group_of_none(0, 4), replicated_by(FakeReducer, FakeLogger):
        step = build_step(decoder(), config, "cpu")
        weight = step.model.blocks[0].up.weight
        assert isinstance(weight, DTensor)
        part = next(p for p in step.run_model._module_parameters
                    if p.data_ptr() == weight.to_local().data_ptr())  # fmt: skip
        assert not isinstance(part, DTensor)
        assert part.shape == (weight.shape[0] // 2, weight.shape[1])

        step.accumulate()
        assert step.model.blocks[0].up.weight is weight
        once = weight.grad.to_local().clone()
        assert part.grad is None
        step.accumulate()
        # each average halves, since the other replica sends nothing: (once + 2 * once) / 2
        torch.testing.assert_close(weight.grad.to_local(), 1.5 * once)
        step.update()
        assert weight.grad is None
        assert not any(isinstance(p, DTensor) for p in step.run_model._module_parameters)


def test_one_rank_alone_divides_nothing():
    step, found = divided(mlp(), count=1)
    assert set(found.values()) == {None}
    assert step.notes == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sharding": "ddp", "tensor_parallel_size": 2, "loss_chunks": 4}, "use loss_chunks=1"),
        (
            {"sharding": "zero1", "tensor_parallel_size": 2, "optimizer": "adafactor"},
            "tensor_parallel_size=2 with optimizer='adafactor'",
        ),
        ({"precision": "fp16-mixed"}, "use precision='bf16-mixed'"),
        ({"precision": "bf16-stochastic"}, "use precision='bf16-master'"),
        ({"optimizer_implementation": "foreach"}, "'single-tensor'"),
        ({"optimizer": "adafactor"}, "use optimizer='adamw'"),
        ({"loss_chunks": 4}, "use loss_chunks=1"),
        ({"sync_each_micro_batch": False}, "use sync_each_micro_batch=True"),
        ({"inplace": True}, "use inplace=False"),
        ({"compile": True}, "use compile=False"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_remedy(fields, said):
    config = StepConfig(**{"sharding": "tensor", "world_size": 4, **fields})
    with pytest.raises(UnsupportedError) as raised:
        check(config, torch.device("cpu"))
    assert said in str(raised.value)


def test_layers_are_named_by_their_paths_in_the_order_of_the_forward():
    step, _ = divided(decoder())
    block = {
        "attention.query": ("columns", 0), "attention.key": ("columns", 0),
        "attention.value": ("columns", 0), "attention.query_norm": ("inside", None),
        "attention.key_norm": ("inside", None), "attention.out": ("rows", 1),
        "gate": ("columns", 0), "up": ("columns", 0), "down": ("rows", 1),
    }  # fmt: skip
    # an embedding with a padding and the head that shares its weight, divided along its features
    expected = {
        "words": ("alone", 1),
        **{f"blocks.*.{path}": how for path, how in block.items()},
        "head": ("alone", 1),
    }
    assert list(step.sharded.layers.items()) == list(expected.items())

    # a number stands for all others only where all modules with such a path are divided alike
    step, _ = divided(mlp())
    assert step.sharded.layers == {"0": ("columns", 0), "2": ("rows", 1)}


def test_layers_are_divided_by_their_paths_or_an_error_names_the_path():
    model = Mixing("")
    with group_of_none(0, 2):
        ranks = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
        with pytest.raises(ValueError, match=r"Mixing has no layer 'blocks\.\*\.up'"):
            divide_layers(model, ranks["tensor"], {"blocks.*.up": ("columns", 0)})
        divide_layers(model, ranks["tensor"], {"up": ("columns", 0), "down": ("rows", 1)})
    assert model.up.bias.placements == model.up.weight.placements == (Shard(0),)
    assert model.down.weight.placements == (Shard(1),)
    assert model.down.bias.placements == (Replicate(),)
