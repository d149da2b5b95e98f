"""The settings of sharded steps: which go together, and what each rank gets of a batch."""

import pytest
import torch
from torch import nn

from memlab import MemlabError, StepConfig, StepResult
from memlab.config import MOST_RANKS, Sharding
from memlab.errors import UnsupportedError, WorkloadError
from memlab.integrations.export import open_group
from memlab.store.records import result_from_packed, result_to_packed
from memlab.techniques import registry
from memlab.techniques.script import script
from memlab.techniques.sharding.fully_sharded import shard, units
from memlab.techniques.sharding.ranks import Sharded, own_weights, part_of, seed_of
from memlab.techniques.sharding.sharding import pairs
from memlab.techniques.sharding.sharding_source import source
from memlab.techniques.step import build_step
from memlab.techniques.technique import Setup
from tests.models import linear
from tests.store_parts import a_result

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("fields", "parts", "sizes"),
    [
        ({"sharding": "ddp", "world_size": 4, "batch_size": 8}, 4, (2,)),
        ({"sharding": "zero3", "world_size": 1, "batch_size": 5}, 1, (5,)),
        ({"sharding": "zero2", "world_size": 2, "batch_size": 12, "accumulation_steps": 3}, 2,
         (2, 2, 2)),
        ({"sharding": "tensor", "world_size": 4, "batch_size": 3}, 1, (3,)),
        ({"sharding": "zero3", "world_size": 8, "tensor_parallel_size": 4, "batch_size": 6}, 2,
         (3,)),
        ({"sharding": "hybrid", "world_size": 4, "shard_group_size": 2, "batch_size": 4}, 4, (1,)),
        ({"sharding": "zero3", "world_size": MOST_RANKS, "batch_size": 2 * MOST_RANKS}, MOST_RANKS,
         (2,)),
    ],
)  # fmt: skip
def test_a_batch_is_divided_over_the_data_parallel_ranks(fields, parts, sizes):
    config = StepConfig(**fields)
    assert config.data_parallel_size == parts
    assert config.micro_batch_sizes == sizes
    assert config.rank_batch_size * parts == config.batch_size
    assert StepConfig(**config.to_dict()) == config


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"world_size": 2}, ["world_size=2", "sharding='none'", "'zero3'"]),
        ({"shard_group_size": 2}, ["shard_group_size=2", "sharding='none'"]),
        ({"sync_each_micro_batch": False}, ["sync_each_micro_batch=False"]),
        ({"sharding": "fsdp"}, ["sharding='fsdp'", "'zero3'"]),
        ({"sharding": "ddp", "world_size": 0}, ["world_size=0 is below 1", "at most 4096"]),
        ({"sharding": "ddp", "tensor_parallel_size": 0}, ["=0 is below 1", "at most 4096"]),
        ({"sharding": "ddp", "world_size": 5000, "batch_size": 5000}, ["5000", "4096"]),
        ({"sharding": "ddp", "world_size": 3, "batch_size": 8}, ["batch_size=8", "6 or 9"]),
        ({"sharding": "ddp", "world_size": 4, "batch_size": 2}, ["batch_size=2", "=4"]),
        ({"sharding": "zero3", "world_size": 2, "batch_size": 6, "accumulation_steps": 2},
         ["batch_size=6", "4 or 8", "2 micro-batches"]),
        ({"sharding": "hybrid", "world_size": 6, "batch_size": 6},
         ["shard_group_size=None", "1, 2, 3 or 6"]),
        ({"sharding": "hybrid", "world_size": 4, "shard_group_size": 3}, ["1, 2 or 4"]),
        ({"sharding": "zero3", "world_size": 4, "shard_group_size": 2}, ["sharding='hybrid'"]),
        ({"sharding": "ddp", "world_size": 4, "tensor_parallel_size": 3}, ["1, 2 or 4"]),
        ({"sharding": "hybrid", "world_size": 4, "tensor_parallel_size": 2},
         ["sharding='ddp', 'zero1', 'zero2' or 'zero3', or leave tensor_parallel_size out"]),
        ({"sharding": "tensor", "world_size": 2, "tensor_parallel_size": 2},
         ["sharding='tensor', which", "; leave tensor_parallel_size out"]),
    ],
)  # fmt: skip
def test_sizes_that_do_not_go_together_are_refused_with_a_remedy(fields, said):
    with pytest.raises(MemlabError) as raised:
        StepConfig(**fields)
    assert all(words in str(raised.value) for words in said), str(raised.value)


def test_the_weights_of_all_ranks_average_to_those_of_one_process():
    everyone = [0.1, 0.2, 0.3, 0.4]
    ranks = [
        own_weights(everyone, Sharded(run_model=None, part=p, num_parts=2, in_micro_batch=None))
        for p in (0, 1)
    ]
    assert ranks == [[0.2, 0.4], [0.6, 0.8]]
    with pytest.raises(WorkloadError, match="num_loss_terms"):
        own_weights([0.0, 1.0], Sharded(run_model=None, part=1, num_parts=2, in_micro_batch=None))


def test_ranks_draw_different_numbers_unless_they_share_their_samples():
    data = StepConfig(sharding="ddp", world_size=4)
    assert [part_of(data, rank) for rank in range(4)] == [0, 1, 2, 3]
    both = StepConfig(sharding="ddp", world_size=4, tensor_parallel_size=2)
    assert [part_of(both, rank) for rank in range(4)] == [0, 0, 1, 1]
    assert len({seed_of(7, part) for part in range(4)}) == 4
    assert seed_of(7, 0) == 7


class Tied(nn.Module):
    """Blocks, one of which shares its weight with the head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.blocks[1][0].weight


def test_a_block_that_shares_a_parameter_is_left_to_the_whole_model():
    model = Tied()
    assert units(model) == [model.blocks[0], model.blocks[2]]


SIZES = {"d_model": 32, "vocab_size": 64, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
         "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 0}  # fmt: skip
LAYERS = ("EncoderLayer", "DecoderLayer", "T5Block")
TRANSLATORS = {
    "BartForConditionalGeneration": SIZES,
    "WhisperForConditionalGeneration": SIZES,
    "MarianMTModel": SIZES,
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2,
                                   "num_heads": 2, "vocab_size": 64},
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSLATORS)
def test_the_units_of_an_encoder_and_decoder_are_the_layers_of_both(name):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(**TRANSLATORS[name]))
    expected = [m for m in model.modules() if type(m).__name__.endswith(LAYERS)]
    assert set(units(model)) == set(expected)
    assert len(expected) == 4


class Double(nn.Module):
    """Two convolutions."""

    def __init__(self, given, made):
        super().__init__()
        self.double = nn.Sequential(nn.Conv2d(given, made, 3), nn.Conv2d(made, made, 3))


class Down(nn.Module):
    """A block of the first half of a UNet."""

    def __init__(self, given, made):
        super().__init__()
        self.pooled = nn.Sequential(nn.MaxPool2d(2), Double(given, made))


class Up(nn.Module):
    """A block of the second half of a UNet."""

    def __init__(self, given, made):
        super().__init__()
        self.up, self.double = nn.ConvTranspose2d(given, made, 2, 2), Double(given, made)


class UNet(nn.Module):
    """Its blocks are attributes, in no list."""

    def __init__(self):
        super().__init__()
        self.first, self.down1, self.down2 = Double(3, 8), Down(8, 16), Down(16, 32)
        self.up1, self.up2, self.last = Up(32, 16), Up(16, 8), nn.Conv2d(8, 2, 1)


class Router(nn.Module):
    """Experts, of which each sample needs one."""

    def __init__(self):
        super().__init__()
        self.choose = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))


def test_the_units_of_a_unet_are_blocks_of_both_halves():
    model = UNet()
    downs = {model.down1.pooled[1], model.down2.pooled[1]}  # all that they hold
    assert set(units(model)) == downs | {model.up1, model.up2}


def test_experts_belong_to_their_block_which_every_rank_calls():
    class Dense(nn.Sequential):
        pass

    layers = [Dense(nn.Linear(4, 4)), Router(), Dense(nn.Linear(4, 4)), Router()]
    model = nn.Sequential(*layers)
    assert set(units(model)) == set(layers)


@pytest.mark.parametrize("sharding", [s for s in Sharding if s is not Sharding.NONE])
def test_a_process_that_is_no_rank_is_told_how_to_start_the_ranks(sharding):
    fields = {"shard_group_size": 1} if sharding is Sharding.HYBRID else {}
    with pytest.raises(UnsupportedError, match=r"torchrun|not implemented"):
        build_step(linear(), StepConfig(sharding=sharding, world_size=2, **fields), "cpu")


def test_a_sharded_result_survives_packing_and_json():
    ranks = tuple(a_result(rank_numbers=(rank,), message=f"rank {rank}") for rank in range(2))
    config = StepConfig(sharding="zero3", world_size=2)
    whole = a_result(ranks=ranks, config=config)
    for back in (
        result_from_packed(result_to_packed(whole)),
        type(whole).from_dict(whole.to_dict()),
    ):
        assert back.to_dict() == whole.to_dict()
        assert [rank.rank_numbers for rank in back.ranks] == [(0,), (1,)]
        assert back.config.sharding is Sharding.ZERO3


def test_a_result_of_an_older_version_has_no_ranks():
    data = a_result().to_dict()
    del data["ranks"], data["rank_numbers"]
    assert StepResult.from_dict(data).ranks == ()


@pytest.mark.parametrize("fields", [
    {"sharding": "tensor"},
    {"sharding": "zero3", "tensor_parallel_size": 2},
    {"sharding": "zero3", "init_on_meta": True},
    {"sharding": "deepspeed-zero3", "offload_parameters": True},
])  # fmt: skip
def test_no_script_leaves_the_sharding_out_silently(fields):
    config = StepConfig(world_size=2, **fields)
    asked = Setup(config=config, device=torch.device("cpu"))
    with pytest.raises(
        UnsupportedError, match=r"(is not implemented|would need|depends on the model)"
    ):
        source(asked)
    with pytest.raises(UnsupportedError):
        script(config, "cpu")


def test_a_script_shards_first_and_then_offloads_and_compiles():
    both = {"offload_parameters": True, "offload_optimizer": True, "offload_activations": True}
    config = StepConfig(world_size=2, batch_size=2, sharding="zero3", max_grad_norm=1.0, **both)
    text = script(config, "cuda")
    assert "model.to(device)" not in text  # a block at a time goes there
    sharded = text.index("shard_blocks(model, mesh, frees=True, on_host=True)")
    assert sharded < text.index("offloader = Offloader(model, 1.0)") < text.index("with offloader:")
    assert 'dist.init_process_group("cpu:gloo,cuda:nccl")' in open_group(config, CUDA)
    assert 'dist.init_process_group("nccl")' in open_group(StepConfig(), CUDA)

    text = script(StepConfig(world_size=2, batch_size=2, sharding="ddp", compile=True), "cpu")
    assert text.index("model = replicate(model)") < text.index("model = torch.compile(model")


@pytest.mark.parametrize(("fields", "said"), [
    ({"sharding": "ddp", "memory_budget": 0.5, "budget_engine": "compile"},
     "in one graph, which the hooks of DistributedDataParallel break"),
    ({"sharding": "zero2", "memory_budget": 0.5, "budget_engine": "compile"}, "hooks of FSDP2"),
    ({"sharding": "tensor", "compile": True}, "does not trace the DTensors"),
    ({"sharding": "zero3", "inplace": True}, "makes the inputs of its units views"),
    ({"sharding": "tensor", "inplace": True}, "sees DTensors"),
    ({"sharding": "tensor", "loss_chunks": 2}, "multiplies by a whole weight"),
    ({"sharding": "zero3", "precision": "fp8-mixed"}, "nothing has checked"),
])  # fmt: skip
def test_pairs_that_do_not_go_together_are_refused_with_a_reason_and_a_remedy(fields, said):
    asked = Setup(config=StepConfig(world_size=2, batch_size=2, **fields), device=CUDA)
    refusals = [refusal for refusal in registry.refusals(asked) if said in str(refusal)]
    assert len(refusals) == 1
    assert refusals[0].remedies


def test_the_norm_of_offloaded_gradients_needs_a_backend_for_host_memory(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
    config = StepConfig(world_size=2, sharding="zero3", batch_size=2, max_grad_norm=1.0,
                        offload_parameters=True, offload_optimizer=True)  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"cuda:nccl.*cpu:gloo,cuda:nccl"):
        shard(nn.Linear(2, 2), config, None)


def test_each_row_of_refusals_names_settings_that_there_are():
    for pair in (row for rows in pairs().values() for row in rows):
        for settings in (pair.settings, pair.unless, *pair.use):
            assert all(hasattr(StepConfig(), name) for name in settings), pair
        known = {*map(str, Sharding), "*", "replicated", "sharded", "divided", "undivided"}
        assert known.issuperset(word for each in pair.ranks for word in each.split()), pair
