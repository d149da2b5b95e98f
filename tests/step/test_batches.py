"""Batches whose first dimension is not the sample, and batches that are objects."""

import collections
import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import memlab
from memlab import StepConfig, Workload
from memlab.errors import MemlabError, WorkloadError
from memlab.memory.meter import Meter, record
from memlab.techniques.batches import map_tensors, moved, tensors_of
from memlab.techniques.script import script
from memlab.techniques.step import build_step, set_seed
from tests.models import made_of
from tests.predictions import assert_predicted, predicted

FEATURES = 16


@dataclasses.dataclass
class Graphs:
    """Several graphs as one: nodes of all, edges between them, and which graph each belongs to."""

    nodes: torch.Tensor  # (nodes, FEATURES)
    edges: torch.Tensor  # (2, edges)
    graph: torch.Tensor  # (nodes,)

    def to(self, device):
        return Graphs(*(getattr(self, f.name).to(device) for f in dataclasses.fields(self)))

    def __len__(self):
        return int(self.graph.max()) + 1


def make_graphs(n, sizes=None):
    """Return n graphs of 2, 3, 4, ... nodes, each a ring."""
    counts = [2 + i for i in range(n)]
    starts = [sum(counts[:i]) for i in range(n)]
    rings = [
        torch.stack([torch.arange(c), (torch.arange(c) + 1) % c]) + s
        for c, s in zip(counts, starts, strict=True)
    ]
    graph = torch.repeat_interleave(torch.arange(n), torch.tensor(counts))
    return Graphs(torch.randn(sum(counts), FEATURES), torch.cat(rings, dim=1), graph)


def split_graphs(batch, sizes):
    parts, first = [], 0
    for size in sizes:
        mine = (batch.graph >= first) & (batch.graph < first + size)
        start = int(mine.nonzero()[0])
        of_mine = mine[batch.edges[0]]
        edges = batch.edges[:, of_mine] - start
        parts.append(Graphs(batch.nodes[mine], edges, batch.graph[mine] - first))
        first += size
    return parts


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.other = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, batch):
        gathered = torch.zeros_like(batch.nodes).index_add(
            0, batch.edges[1], batch.nodes[batch.edges[0]]
        )
        return (self.own(batch.nodes) + self.other(gathered)).relu()


def of_graph_means(model, batch):
    """Return the mean over the graphs of the mean over each one's nodes."""
    out = model(batch).square().mean(dim=1)
    count = len(batch)
    total = torch.zeros(count, dtype=out.dtype, device=out.device).index_add(0, batch.graph, out)
    return (total / torch.bincount(batch.graph, minlength=count)).mean()


def graphs(**fields):
    defaults = {"make_batch": make_graphs, "count_samples": len, "split_batch": split_graphs}
    return Workload(
        name="graphs",
        build_model=Convolution,
        compute_loss=of_graph_means,
        **defaults | fields,
    )


def make_tokens(n):
    """Return n packed sequences of 3, 4, 5, ... tokens, as flash attention takes them."""
    lengths = torch.arange(n) + 3
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return {"tokens": torch.randint(50, (int(ends[-1]),)), "cu_seqlens": ends}


def split_tokens(batch, sizes):
    parts, first = [], 0
    for size in sizes:
        ends = batch["cu_seqlens"][first : first + size + 1]
        tokens = batch["tokens"][int(ends[0]) : int(ends[-1])]
        parts.append({"tokens": tokens, "cu_seqlens": ends - ends[0]})
        first += size
    return parts


def tokens(**fields):
    defaults = {
        "count_samples": lambda batch: len(batch["cu_seqlens"]) - 1,
        "split_batch": split_tokens,
        "num_loss_terms": lambda batch: len(batch["tokens"]),
    }
    return Workload(
        name="tokens",
        build_model=lambda: nn.Sequential(nn.Embedding(50, FEATURES), nn.Linear(FEATURES, 1)),
        make_batch=make_tokens,
        compute_loss=lambda model, batch: model(batch["tokens"]).square().mean(),
        **defaults | fields,
    )


def make_images(n):
    """Return what a detector takes: images of different sizes, and boxes for each."""
    images = [torch.randn(3, 8 + i, 9) for i in range(n)]
    return images, [{"boxes": torch.rand(i + 1, 4), "label": "cat"} for i in range(n)]


def images(**fields):
    def loss(model, batch):
        found = [model(image).mean() - t["boxes"].mean() for image, t in zip(*batch, strict=True)]
        return torch.stack(found).square().mean()

    return Workload(
        name="images",
        build_model=lambda: nn.Conv2d(3, 4, 3),
        make_batch=make_images,
        compute_loss=loss,
        **fields,
    )


EVERY = [graphs, tokens, images]


def here(workload, config):
    return memlab.measure(workload, config, "cpu", repeats=1, isolate=False)


@pytest.mark.parametrize("make", EVERY)
def test_micro_batches_give_the_gradient_of_the_undivided_batch(make):
    report = memlab.verify(
        make(), StepConfig(batch_size=5, accumulation_steps=2), "cpu", isolate=False
    )
    assert report.ok, report.why
    assert report.same_as_full_batch == "yes", report.why


@pytest.mark.matrix
@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_prediction_is_as_measured(make, steps):
    config = StepConfig(batch_size=5, accumulation_steps=steps)
    found, measured = assert_predicted(make(), config)
    assert found.peak_by_category == measured.peak_by_category


class SharingGraphs(Graphs):
    """Graphs with a table that is in no field, and that copies share."""

    def __deepcopy__(self, memo):
        fields = [copy.deepcopy(getattr(self, f.name), memo) for f in dataclasses.fields(self)]
        copied = SharingGraphs(*fields)
        copied.tables = self.tables
        return copied


def make_sharing_graphs(n):
    batch = SharingGraphs(**vars(make_graphs(n)))
    batch.tables = {"starts": [torch.arange(1000)]}
    return batch


def test_tables_that_copies_of_an_object_share_are_foreseen():
    config = StepConfig(batch_size=5)
    found, measured = assert_predicted(graphs(make_batch=make_sharing_graphs), config)
    assert measured.peak_by_category["inputs"] > 8000
    assert found.peak_by_category == measured.peak_by_category


def test_the_tensors_of_an_object_are_inputs_and_move_to_a_card():
    batch = make_graphs(4)
    nbytes = sum(t.nbytes for t in (batch.nodes, batch.edges, batch.graph))
    result = here(graphs(make_batch=lambda n: batch), StepConfig(batch_size=4))  # made before it
    assert result.peak_by_category["inputs"] == nbytes
    card = predicted(StepConfig(batch_size=4), "h200", graphs())
    assert card.outcome == "ok", card.message
    assert card.peak_by_category["inputs"] >= nbytes


@pytest.mark.parametrize("make", EVERY)
def test_one_micro_batch_needs_no_way_to_split(make):
    workload = dataclasses.replace(make(), count_samples=None, split_batch=None)
    assert build_step(workload, StepConfig(batch_size=3), "cpu")() > 0


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (graphs(split_batch=None), "a Graphs at batch cannot be split.*split_batch"),
        (tokens(split_batch=None), r"at batch\['tokens'\].*split_batch"),
        (graphs(count_samples=lambda batch: 7), "count_samples counts 7 samples; allowed is 4"),
        (graphs(count_samples=lambda batch: 1.5), "count_samples returned 1.5"),
        (graphs(split_batch=lambda batch, sizes: batch), "returned Graphs; allowed is a list of 2"),
        (graphs(split_batch=lambda batch, sizes: [batch]), "returned 1 of them"),
        (
            graphs(split_batch=lambda batch, sizes: split_graphs(batch, sizes[:1]) * 2,
                   count_samples=lambda batch: len(batch) + (len(batch) == 2)),
            "counts 3 samples; allowed is 2",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(workload, words):
    with pytest.raises(WorkloadError, match=words):
        build_step(workload, StepConfig(batch_size=4, accumulation_steps=2), "cpu")


def test_a_batch_that_ignores_its_size_is_still_refused():
    fixed = made_of(
        lambda: nn.Linear(4, 1),
        lambda n: (torch.ones(3, 4), torch.ones(3, 1)),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )
    with pytest.raises(WorkloadError, match=r"make_batch.n. must use its n.*count_samples"):
        build_step(fixed, StepConfig(batch_size=4), "cpu")
    counted = dataclasses.replace(fixed, count_samples=lambda batch: 4)
    build_step(counted, StepConfig(batch_size=4), "cpu")()


@pytest.mark.parametrize("field", ["count_samples", "split_batch"])
def test_fields_are_checked(field):
    with pytest.raises(MemlabError, match=f"{field}=3 cannot be called"):
        graphs(**{field: 3})


def test_objects_are_copied_with_their_tensors_changed():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    encoding = collections.UserDict(ids=torch.arange(4), length=4)
    shared = torch.ones(2)
    batch = {"packed": packed, "encoding": encoding, "graphs": [make_graphs(1)], "name": "a",
             "twice": Graphs(shared, shared, shared)}  # fmt: skip
    doubled = map_tensors(lambda t: t * 2, batch)
    assert isinstance(doubled["packed"], PackedSequence)
    assert torch.equal(doubled["packed"].data, 2 * packed.data)
    assert torch.equal(doubled["encoding"]["ids"], 2 * torch.arange(4))
    assert torch.equal(encoding["ids"], torch.arange(4))
    assert doubled["encoding"]["length"] == 4
    assert torch.equal(doubled["graphs"][0].nodes, 2 * batch["graphs"][0].nodes)
    assert doubled["twice"].nodes is doubled["twice"].graph
    assert len(tensors_of(packed)) == 2
    there = moved(batch, torch.device("meta"))
    assert there["graphs"][0].nodes.is_meta
    assert there["encoding"]["ids"].is_meta
    assert not there["packed"].batch_sizes.is_meta
    assert not batch["graphs"][0].nodes.is_meta


def test_an_object_that_moves_itself_in_place_leaves_the_batch_where_it_is():
    class Encoding(collections.UserDict):
        """As transformers' BatchEncoding, whose `.to` changes it."""

        def to(self, device):
            self.data = {name: value.to(device) for name, value in self.data.items()}
            return self

    encoding = Encoding(ids=torch.arange(4))
    assert moved(encoding, torch.device("meta"))["ids"].is_meta
    assert not encoding["ids"].is_meta


def test_an_object_that_cannot_be_copied_is_named():
    class Locked:
        def __deepcopy__(self, memo):
            raise TypeError("no")

    with pytest.raises(WorkloadError, match=r"holds a Locked, which copy.deepcopy cannot copy"):
        map_tensors(torch.clone, [Locked()])


def trained_by_script(workload, config):
    """Return losses and the state of the model after two updates of the exported script."""
    namespace = {}
    exec(compile(script(config, "cpu", workload=workload), "script.py", "exec"), namespace)

    def made(make, *args):
        set_seed(0)
        return make(*args)

    batches = (made(workload.make_batch, config.batch_size) for _ in range(2))
    model, losses = namespace["train"](
        lambda: made(workload.build_model),
        batches,
        workload.compute_loss,
        "cpu",
        workload.split_batch,
    )
    return losses, model.state_dict()


def trained_by_step(workload, config):
    step = build_step(workload, config, torch.device("cpu"))
    return [step() for _ in range(2)], step.model.state_dict()


def peak_of(train, *args):
    found = []
    trace = record(lambda: found.append(train(*args)), Meter(), torch.device("cpu"))
    return int(trace.nbytes.cumsum().max()), *found[0]


def wide_graphs():
    """Return the workload with wide layers, beside which the making of a batch is small."""
    return dataclasses.replace(
        graphs(), build_model=lambda: nn.Sequential(Convolution(), nn.Linear(FEATURES, 512))
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    "fields",
    [{"accumulation_steps": 2}, {"accumulation_steps": 2, "precision": "bf16"}, {}],
    ids=str,
)
def test_a_script_splits_casts_and_moves_graphs_as_the_step_does(fields):
    config = StepConfig(batch_size=4, optimizer="sgd", **fields)
    peak, losses, state = peak_of(trained_by_step, wide_graphs(), config)
    script_peak, script_losses, script_state = peak_of(trained_by_script, wide_graphs(), config)
    assert script_losses == losses
    assert all(script_state[name].equal(tensor) for name, tensor in state.items())
    assert script_peak == peak


def test_a_script_of_plain_batches_is_the_same_with_and_without_its_workload():
    config = StepConfig(batch_size=4, accumulation_steps=2)
    plain = graphs(count_samples=None, split_batch=None)
    assert script(config, "cpu", workload=plain) == script(config, "cpu")
