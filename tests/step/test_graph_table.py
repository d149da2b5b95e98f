"""The graph of a step: its sums are the prediction's, its nodes torch.fx's, its bytes counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import memlab
from memlab import MemlabError, StepConfig, Workload, plots, workloads
from memlab.devices.cards import Target
from memlab.prediction.graph_table import NodeKind
from memlab.prediction.predict import predict_in_process
from memlab.prediction.step_graph import BY_FX, BY_OPERATORS, graph_in_process
from memlab.store.recorded import target_for
from memlab.trace import PHASES, Phase
from tests.models import IN, OUT, blocks, linear

CPU = Target(kind="cpu", card=None, name="cpu")
TEXT = workloads.get("plain-transformer")


def both(workload, config, device="h200"):
    target = CPU if device == "cpu" else target_for(device, config)
    options = {"seed": 0, "report": lambda progress: None}
    table = graph_in_process(workload, config, target, **options)
    result = predict_in_process(workload, config, target, memory_limit=None, **options).result
    assert table.outcome == result.outcome == "ok", (table.message, result.message)
    return table, result


def saved(result):
    """The activations when the first forward ends, as predicted."""
    line = result.timeline
    forward = (line.phase == PHASES.index(Phase.FORWARD)) & (line.micro_batch == 0)
    return int(line.bytes_of("activations")[np.flatnonzero(forward)[-1]])


def test_the_bytes_of_a_linear_layer_are_counted_by_hand():
    table, _ = both(linear(), StepConfig(batch_size=16), "cpu")
    rows = {row.name: row for row in table}
    (layer,) = [row for row in table if row.target == "linear"]
    assert layer.kept_bytes == layer.saved_bytes == 16 * OUT * 4  # the square needs it
    assert rows["loss"].kept_bytes == 4  # the squares are freed when their mean is known
    assert IN * OUT not in [row.kept_bytes for row in table]  # weights are no node's


SETTINGS = {
    "plain": {},
    "4 micro-batches": {"accumulation_steps": 4, "batch_size": 16},
    "recomputed": {"checkpointing": "blocks"},
    "bf16-mixed": {"precision": "bf16-mixed", "max_grad_norm": 1.0},
    "fused": {"optimizer_implementation": "fused", "loss_chunks": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_sums_are_the_prediction(setting):
    table, result = both(TEXT, StepConfig(**{"batch_size": 4, **SETTINGS[setting]}))
    assert sum(row.seconds for row in table) == pytest.approx(result.step_seconds, rel=1e-9)
    assert table.step_seconds == pytest.approx(result.step_seconds, rel=1e-9)
    assert table.saved_bytes == saved(result)


@pytest.mark.slow
def test_the_nodes_are_those_of_torch_fx_in_their_order():
    table, _ = both(TEXT, StepConfig(batch_size=4))
    assert table.traced_by == BY_FX
    graph = fx.symbolic_trace(TEXT.build_model()).graph
    nodes = [node for node in graph.nodes if node.op != "output"]
    rows = [row for row in table if row.kind in (NodeKind.MODULE, NodeKind.FUNCTION)]
    assert [row.name for row in rows] == [node.name for node in nodes]
    by_name = {row.name: row for row in rows}
    for node in nodes:
        reads = {table.rows[index].name for index in by_name[node.name].reads}
        assert reads == {read.name for read in node.all_input_nodes}

    assert by_name["blocks_0_up"].saved_bytes == 4 * 64 * 4 * 128 * 4
    assert by_name["blocks_0_down"].saved_bytes == 0  # the sum needs none of its terms
    assert by_name["blocks_0_down"].kept_bytes == 4 * 64 * 128 * 4
    assert by_name["blocks_0_down"].backward_seconds > by_name["blocks_0_down"].forward_seconds


class Asks(nn.Module):
    """Branches on a shape, which symbolic_trace cannot follow and make_fx can."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x):
        x = self.first(x)
        if x.shape[0] > 1:
            x = x.sigmoid() * 2
        return self.second(x).softmax(-1)


ASKS = Workload(
    name="asks",
    build_model=Asks,
    make_batch=lambda n: torch.randn(n, 8),
    compute_loss=lambda model, x: model(x).square().mean(),
)


def test_a_model_that_torch_fx_cannot_follow_is_a_graph_of_the_operators_of_make_fx():
    table, result = both(ASKS, StepConfig(batch_size=4), "cpu")
    assert table.traced_by == BY_OPERATORS
    assert any("symbolic_trace cannot follow Asks" in note for note in table.notes)
    assert table.saved_bytes == saved(result)

    model, batch = Asks(), torch.randn(4, 8)
    traced = make_fx(lambda x: ASKS.compute_loss(model, x))(batch)
    views = ("aten::t", "aten::detach")
    names = [node.target.name().split(".")[0] for node in traced.graph.nodes
             if node.op == "call_function"]  # fmt: skip
    found = [row.target for row in table if row.kind is NodeKind.OPERATOR]
    # the step reads the loss
    assert found == [*(name for name in names if name not in views), "aten::_local_scalar_dense"]


def test_a_sharded_step_has_its_collectives_with_bytes_and_ranks():
    width, depth, ranks = 32, 4, 4
    config = StepConfig(batch_size=8, sharding="zero3", world_size=ranks)
    table, result = both(blocks(), config, "cpu")
    assert table.traced_by == BY_FX
    assert table.step_seconds is None
    assert table.saved_bytes == saved(result)

    found = [row for row in table if row.kind is NodeKind.COLLECTIVE]
    block = 2 * (width * width + width) * 4
    # the head: (3, 32) weights and 3 biases, each padded to one row for every rank
    rest = ranks * (width + 1) * 4
    gathers = [row.payload_bytes for row in found if row.target == "all-gather"]
    scatters = [row.payload_bytes for row in found if row.target == "reduce-scatter"]
    assert sorted(scatters) == sorted([rest, *[block] * depth])
    # in forward all of them, in backward those that were freed: the last block comes again
    assert sorted(gathers) == sorted([rest, *[block] * 2 * depth])
    predicted = {each.collective: each.payload_bytes for each in result.communication}
    assert predicted == {"all-gather": sum(gathers), "reduce-scatter": sum(scatters)}
    assert {(row.ranks, row.group) for row in found} == {(ranks, "0-3")}
    assert "4: 0-3" in table._repr_html_()
    times = plots.step_graph(table).axes[1]
    named = [text.get_text() for text in times.texts]
    assert named.count("not known, ranks 0-3") == len(found)
    assert all(row.seconds is None for row in found)
    plain, _ = both(blocks(), StepConfig(batch_size=2), "cpu")
    names = [row.name for row in plain if row.kind is NodeKind.MODULE]
    assert [row.name for row in table if row.kind is NodeKind.MODULE] == names


def test_ddp_averages_all_gradients_of_every_micro_batch():
    config = StepConfig(batch_size=8, sharding="ddp", world_size=2, accumulation_steps=2)
    table, _ = both(blocks(), config, "cpu")
    num_bytes = sum(p.nbytes for p in blocks().build_model().parameters())
    total = sum(row.payload_bytes for row in table if row.target == "all-reduce")
    assert total == 2 * num_bytes


@pytest.mark.slow
def test_between_cards_collectives_take_time_beside_others():
    config = StepConfig(batch_size=32, sharding="zero3", world_size=8)
    table, result = both(TEXT, config, "8x-h100")
    found = [row for row in table if row.kind is NodeKind.COLLECTIVE]
    assert all(row.seconds > 0 for row in found)
    assert table.step_seconds == pytest.approx(result.step_seconds, rel=1e-9)
    assert sum(row.seconds for row in table) > table.step_seconds
    assert any("beside other operators" in note for note in table.notes)


@pytest.mark.slow
def test_the_groups_of_a_collective_are_named():
    config = StepConfig(batch_size=16, sharding="hybrid", world_size=16, shard_group_size=4)
    table, _ = both(blocks(), config, "16x1-h100")
    found = [row for row in table if row.kind is NodeKind.COLLECTIVE]
    groups = {row.target: (row.ranks, row.group) for row in found}
    # parts are gathered in the group of rank 0, and averaged with those who have the same part
    assert groups["all-gather"] == groups["reduce-scatter"] == (4, "0-3")
    assert groups["all-reduce"] == (4, "0, 4 ... 12")
    times = plots.step_graph(table).axes[1]
    assert "ranks 0, 4 ... 12" in [text.get_text() for text in times.texts]


def test_what_is_asked_for_is_checked_and_a_failure_is_an_outcome():
    with pytest.raises(MemlabError, match=r"accumulation_steps=4: .*divides equally"):
        memlab.graph_table(linear(), StepConfig(batch_size=6, accumulation_steps=4), "t4")
    broken = replace(linear(), name="broken", compute_loss=lambda model, x: 1 / 0)
    table = graph_in_process(broken, StepConfig(), CPU, seed=0, report=lambda progress: None)
    assert table.outcome == "failed"
    assert "ZeroDivisionError" in str(table)
    assert table.rows == ()
    assert plots.step_graph(table).get_size_inches()[0] == 9.0


def test_a_table_shows_itself_as_a_page_a_frame_and_a_picture():
    table = memlab.graph_table(TEXT, StepConfig(batch_size=4), "h200")
    frame = table.to_frame()
    assert len(frame) == len(table)
    assert frame["saved_bytes"].sum() == table.saved_bytes
    assert "blocks_0_attention_norm" in table._repr_html_()
    assert "symbolic_trace" in str(table)

    figure = plots.step_graph(table)
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    shown = [row for row in table if row.kept_bytes or row.seconds]
    assert len(names) == len(shown)
    deep = memlab.graph_table(
        workloads.get("plain-transformer", num_layers=6), StepConfig(batch_size=4), "h200"
    )
    names = [text.get_text() for text in plots.step_graph(deep).axes[0].get_yticklabels()]
    assert [name for name in names if "nodes" in name] == [
        f"blocks.{number} (10 nodes)" for number in range(6)
    ]
