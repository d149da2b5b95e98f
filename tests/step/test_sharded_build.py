"""Building on meta, then sharding: the bits of a plain sharded build, and never the whole model."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.ranks import Ranks
from memlab import StepConfig, predict, workloads
from memlab._util.torch_private.ranks import group_of_none
from memlab._util.units import parse_bytes
from memlab.errors import UnsupportedError
from memlab.memory.lifetimes import build_peak_bytes
from memlab.memory.meter import Meter, record
from memlab.techniques import meta_init
from memlab.techniques.deferred import noted_build
from memlab.techniques.meta_init import replay_one_at_a_time
from memlab.techniques.sharding import fully_sharded
from memlab.techniques.sharding.ranks import local
from memlab.techniques.step import set_seed
from memlab.trace import Phase
from tests.models import Awkward, blocks
from tests.rank_parts import WIDTH as RANK_WIDTH
from tests.rank_parts import faulty

CPU = torch.device("cpu")
WIDTH = 256
SLACK = 16_384  # states of the generator, numbers
RANKS = Ranks()


@pytest.fixture(scope="module", autouse=True)
def ended_ranks():
    """End the ranks that two measurements share."""
    yield
    RANKS.end()


@contextlib.contextmanager
def rank_of(rank, world_size):
    """Be one rank among others that do not exist; a build sends nothing."""
    with group_of_none(rank, world_size):
        yield StepConfig(
            batch_size=world_size, sharding="zero3", world_size=world_size, init_on_meta=True
        )


def built(build_model, config, precision="as-built"):
    """Return a sharded model that was built on meta or plainly, and the generator's state."""
    set_seed(3)
    made = meta_init.built(build_model, CPU, config)
    if precision == "bf16":
        made.model.bfloat16()
    fully_sharded.shard(made.model, config, fully_sharded.make_mesh(config, "cpu"))
    made.fill(CPU, CPU)
    return made.model, torch.get_rng_state()


def everything(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


class Reinitialised(nn.Module):
    """As transformers do it: everything is made, then everything is initialised once more."""

    def __init__(self, num_layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
        for layer in self.layers:
            layer.weight.data.normal_(0.0, 0.02)
        self.register_buffer("first", self.layers[0].weight.detach().sum(0))


MODELS = {
    "awkward": Awkward,
    "blocks": blocks(norm=True).build_model,
    "gpt-small": workloads.get("gpt-small", num_layers=2).build_model,
    "initialised twice": Reinitialised,
}


CASES = [(name, rank, "as-built") for name in MODELS for rank in (0, 2)]


@pytest.mark.parametrize(("name", "rank", "precision"), [*CASES, ("awkward", 2, "bf16")])
def test_each_rank_has_the_bits_of_a_plain_build(name, rank, precision):
    with rank_of(rank, 3) as config:
        plain, after = built(MODELS[name], replace(config, init_on_meta=False), precision)
        made, after_this = built(MODELS[name], config, precision)
        assert torch.equal(after_this, after)
        expected, found = everything(plain), everything(made)
        assert list(expected) == list(found)
        for path, tensor in expected.items():
            assert torch.equal(local(tensor), local(found[path])), path
            assert type(tensor) is type(found[path])
            assert tensor.dtype == found[path].dtype
            assert tensor.requires_grad == found[path].requires_grad

    if name == "awkward":
        assert made.head.weight is made.embed.weight
        assert made.mixer._flat_weights[0] is made.mixer.weight_ih_l0
        assert made.table.tolist() == [1.0, 2.0, 4.0]


def test_a_rank_holds_its_parts_and_one_whole_parameter():
    weight, num_ranks = WIDTH * WIDTH * 4, 4
    with rank_of(0, num_ranks) as config:
        fully_sharded.make_mesh(config, "cpu")  # outside of the count
        for on_meta, expected in (
            (False, 4 * weight + 4 * weight // num_ranks),
            (True, 4 * weight // num_ranks + weight),
        ):
            asked, meter = replace(config, init_on_meta=on_meta), Meter()

            def build(asked=asked, meter=meter):
                meter.mark(-1, Phase.BUILD, 0)
                built(Reinitialised, asked)
                meter.mark(0, Phase.FORWARD, 0)
                torch.empty(8)

            found = build_peak_bytes(record(build, meter, CPU))
            assert found - expected in range(SLACK), on_meta


def test_weights_of_one_another_are_made_together_and_others_apart():
    def build_model():
        model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        model[1].weight.data.copy_(model[0].weight.data * 2)
        model[3].weight.data.normal_()
        model[2].weight.data.normal_()  # drawn in another order than they were made
        return model

    set_seed(0)
    plain = build_model()
    model, notes = noted_build(build_model)
    places = {path: notes.placed(p).storage for path, p in model.named_parameters()}
    names = {storage: path for path, storage in places.items()}
    seen = {}
    set_seed(0)
    replay_one_at_a_time(
        notes, CPU, set(names), lambda s, made: seen.update({names[s]: made.clone()})
    )
    assert sorted(seen) == sorted(places)
    for path, parameter in plain.named_parameters():
        assert torch.equal(parameter.detach().flatten(), seen[path].flatten()), path


def test_random_numbers_that_depend_on_others_are_drawn_in_their_order():
    def build_model():
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        chances = torch.rand(8, 8)
        for layer in model:
            layer.weight.data.mul_(torch.bernoulli(chances))  # reads a tensor
        return model

    with rank_of(1, 2) as config:
        plain, after = built(build_model, replace(config, init_on_meta=False))
        made, after_this = built(build_model, config)
        assert torch.equal(after, after_this)
        for path, parameter in plain.named_parameters():
            assert torch.equal(local(parameter), local(made.get_parameter(path)))


def test_a_parameter_that_is_held_elsewhere_too_is_refused():
    def build_model():
        model = nn.Linear(4, 4)
        model.again = [model.weight]
        return model

    with rank_of(0, 2) as config, pytest.raises(UnsupportedError, match=r"'again'.*init_on_meta=F"):
        built(build_model, config)


@pytest.mark.slow
def test_it_trains_as_a_plain_sharded_build_and_is_predicted():
    """Two real ranks."""
    config = StepConfig(batch_size=4, sharding="zero3", world_size=2)
    on_meta = replace(config, init_on_meta=True)
    plain, found = (RANKS.measured(faulty(), each) for each in (config, on_meta))
    assert found.outcome == "ok", found.message
    assert [rank.loss for rank in found.ranks] == [rank.loss for rank in plain.ranks]
    guess = predict(faulty(), on_meta, "cpu")

    weight, bias = RANK_WIDTH * RANK_WIDTH * 4, RANK_WIDTH * 4
    expected = 3 * weight // 2 + weight + 2 * bias // 2  # at the last weight
    for result in (guess, found):
        assert any("never with the whole model" in note for note in result.notes)
        said = re.search(r"this rank held at most (.*)\.$", "\n".join(result.notes), re.MULTILINE)
        assert abs(parse_bytes(said[1]) - expected) < 256  # real meshes hold some bytes
