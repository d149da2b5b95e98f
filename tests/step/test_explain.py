"""What holds a peak, told by repeated block, and what would lower it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import memlab
from memlab import MemlabError, StepConfig, Workload, explain, measure, predict, workloads
from memlab._panel.outlook import advice_line
from memlab._panel.panes import peak_pane
from memlab.config import WITH_TENSOR_PARALLEL, Precision, Sharding
from memlab.devices import cards
from memlab.devices.cards import Card, Target
from memlab.figures.look import category_names
from memlab.prediction.predict import predict_in_process
from memlab.result import Outcome, Source, StepResult, format_percent
from memlab.search.holdings import CUBLAS, blocks_pattern, group, repeated_children
from memlab.techniques import registry
from memlab.techniques.loss.logits import logits_of
from memlab.trace import CATEGORIES, PHASES, Category, Holding, Phase, Place, Timeline
from memlab.workloads.language import Gpt
from tests.models import blocks, linear, made_of
from tests.predictions import predicted

MIB = 2**20
LAYERS = [
    f"h.{i}.{name}"
    for i in range(12)
    for name in ("ln.weight", "mlp.fc.weight", "mlp.fc.bias", "mlp.proj.weight")
]


def holding(category, module, nbytes, operator="aten::mm", num_blocks=1):
    return Holding(
        category=category, module=module, operator=operator, phase=Phase.FORWARD,
        num_blocks=num_blocks, nbytes=nbytes,
    )  # fmt: skip


def transformer(**changes):
    """Return a hand-made result: 12 blocks whose activations are live when backward begins."""
    held = [holding(Category.PARAMETERS, path, MIB, operator="") for path in LAYERS]
    held += [holding(Category.OPTIMIZER_STATE, p, 2 * MIB, num_blocks=2) for p in LAYERS]
    held += [holding(Category.ACTIVATIONS, f"h.{i}.mlp.act", 16 * MIB) for i in range(12)]
    held += [holding(Category.ACTIVATIONS, "head", 8 * MIB)]
    return result_of(held, **changes)


def result_of(held, **changes):
    """Return a result that holds this in the middle of its step, and before it what stands."""
    table = np.zeros((4, len(CATEGORIES)), np.int64)
    for h in held:
        last = 2 if h.category is Category.ACTIVATIONS else 4
        first = 1 if h.category is Category.ACTIVATIONS else 0
        table[first:last, CATEGORIES.index(h.category)] += h.nbytes
    timeline = Timeline(
        bytes_by_category=table,
        phase=np.array([PHASES.index(p) for p in ("forward", "forward", "backward", "optimizer")],
                       np.int8),
        micro_batch=np.zeros(4, np.int32),
        operator=np.arange(4, dtype=np.int32),
    )  # fmt: skip
    result = StepResult(
        outcome=Outcome.OK,
        message="done",
        source=Source.MEASURED,
        device="cpu",
        config=StepConfig(),
        workload_name="hand-made",
        timeline=timeline,
        peak_allocated_bytes=int(timeline.total_bytes.max()),
        # what has an allocator with a cache is a card
        peak_reserved_bytes=None if changes.get("device", "cpu") == "cpu" else 256 * MIB,
        peak_by_category=timeline.peak_by_category,
        peak_holdings=tuple(held),
        peak_place=Place(phase=Phase.BACKWARD, micro_batch=0, module="head"),
    )
    return replace(result, **changes)


def remedies(result):
    return {remedy.name: remedy for remedy in explain(result).remedies}


@pytest.mark.parametrize(
    ("device", "name", "offered"),
    [
        ("t4", "Tesla T4", "fp16-mixed"),
        ("rtx-4090", "", "bf16-mixed"),
        ("2x-rtx-4090", "NVIDIA GeForce RTX 4090", "bf16-mixed"),
        ("cuda:0", "Tesla V100-SXM2-32GB", "fp16-mixed"),
        ("cuda:0", "NVIDIA A100-SXM4-40GB", "bf16-mixed"),
        ("24GiB", "a card of 24 GiB", None),
        ("cuda:0", "NVIDIA RTX 2000 Ada Generation", None),  # of another machine
        ("cuda:1", "NVIDIA RTX 2000 Ada Generation", "bf16-mixed"),  # here, says the driver
        ("cuda:1", "Quadro RTX 6000", "fp16-mixed"),
        ("cuda:1", "NVIDIA GeForce RTX 2080 Ti", "fp16-mixed"),
    ],
)
def test_bf16_is_offered_by_what_is_known_of_the_card(monkeypatch, device, name, offered):
    asked = cards.resolve

    def resolve(known):
        if known != "cuda:1":
            return asked(known)
        capability = (7, 5) if "Ada" not in name else (8, 9)
        card = Card(name="here", title=name, memory_bytes=2**34, compute_capability=capability)
        return Target(kind="cuda", card=card, name="cuda:1")

    monkeypatch.setattr(cards, "resolve", resolve)
    result = transformer(device=device, versions={"device_name": name})
    formats = {r.change["precision"] for r in explain(result).remedies if "precision" in r.change}
    wanted = set() if offered is None else {offered}
    assert formats == wanted | ({"bf16"} if offered == "bf16-mixed" else set())


class Decoder(torch.nn.Module):
    """An embedding and a head, and the loss inside of the model, as transformers has it."""

    def __init__(self, words, is_inside):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(words, 8), torch.nn.Linear(8, words)
        self.is_inside = is_inside

    def forward(self, batch):
        logits = self.head(self.embedding(batch)).flatten(0, 1)
        return cross_entropy(logits, batch.flatten()) if self.is_inside else logits


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_a_peak_in_the_loss_is_named_and_chunks_are_offered(is_inside, device):
    def loss(model, batch):
        found = model(batch)
        return found if is_inside else cross_entropy(found, batch.flatten())

    workload = Workload(
        name="decoder", build_model=lambda: torch.nn.Sequential(Decoder(3001, is_inside)),
        make_batch=lambda n: torch.zeros(n, 64, dtype=torch.long), compute_loss=loss,
    )  # fmt: skip
    config = StepConfig(batch_size=8, optimizer="sgd")
    result = predict(workload, config, device)
    where = "in the loss: log-softmax over 3,001 words (aten::_log_softmax_backward_data)"
    assert where in str(result.peak_place)
    assert where in explain(result).message
    if device == "cpu":
        assert measure(workload, config, device, repeats=1).peak_place == result.peak_place
    line = advice_line(result, [], result.peak_allocated_bytes // 2)
    assert line.text.startswith("the peak is in the loss, log-softmax over 3,001 words: try loss")
    assert line.remedy[1] == {"loss_chunks": 16}


def test_logits_are_classes_or_words_and_a_peak_elsewhere_is_in_its_module():
    assert logits_of(torch.nn.Sequential(torch.nn.Linear(8, 5000))) == (5000, "classes")
    assert logits_of(torch.nn.Conv2d(3, 21, 1)) == (0, "")
    place = predict(linear(), StepConfig(batch_size=8), "cpu").peak_place
    assert place.loss == ""


@st.composite
def valid_configs(draw):
    """Draw any settings that are valid: odd batches, ranks, tensor parallel, hybrid, compiled."""
    pick = {
        "accumulation_steps": st.integers(1, 6), "precision": st.sampled_from(Precision),
        "memory_budget": st.sampled_from([0.0, 0.5, 1.0]),
        "budget_engine": st.sampled_from(["eager", "compile"]), "compile": st.booleans(),
        "checkpointing": st.sampled_from(["none", "blocks"]), "loss_chunks": st.integers(1, 2),
        "optimizer": st.sampled_from(["sgd", "adamw"]), "optimizer_in_backward": st.booleans(),
        "offload_activations": st.booleans(), "sharding": st.sampled_from(Sharding),
    }  # fmt: skip
    fields = draw(st.fixed_dictionaries({}, optional=pick))
    ranks = {"none": 1, "hybrid": 4}.get(fields.get("sharding", "none"), 0)
    fields["world_size"] = ranks or draw(st.sampled_from([1, 2, 4]))
    if ranks == 4:
        fields["shard_group_size"] = draw(st.sampled_from([1, 2, 4]))
    if fields.get("sharding") in WITH_TENSOR_PARALLEL:
        fields["tensor_parallel_size"] = draw(st.sampled_from([1, fields["world_size"]]))
    unit = fields["world_size"] * fields.get("accumulation_steps", 1)
    return StepConfig(**fields, batch_size=unit * draw(st.sampled_from([1, 2, 3, 7, 9, 35])))


@settings(deadline=None)
@given(valid_configs())
@example(StepConfig(batch_size=12, accumulation_steps=2, sharding="zero3", world_size=2))
def test_what_is_offered_of_any_valid_settings_is_valid_and_not_refused(config):
    device = "cpu" if config.world_size == 1 else "2x-rtx-4090"
    result = transformer(config=config, device=device)
    for remedy in explain(result).remedies:
        assert remedy.config == replace(config, **remedy.change)
    for told in peak_pane(result, None)["remedies"]:  # in the words of the controls
        assert "_" not in told["label"]
        assert "price: " in told["effect"]
        assert replace(config, **told["fields"]) != config
    line = advice_line(result, [], result.peak_allocated_bytes - 1)
    if line.remedy is not None and "held before" not in line.text:
        asked = replace(config, **line.remedy[1])
        assert asked != config
        assert not registry.is_refused(asked, "cpu" if device == "cpu" else "cuda")


def test_ranks_divide_their_part_into_equal_micro_batches():
    of_ranks = {"sharding": "zero3", "world_size": 2}
    for batch, steps, further in ((12, 2, 6), (12, 1, 2), (6, 1, 3), (50, 1, 5), (16, 8, None)):
        found = StepConfig(batch_size=batch, accumulation_steps=steps, **of_ranks).divided_further()
        assert (found and found.accumulation_steps) == further
    alone = StepConfig(batch_size=12, accumulation_steps=8).divided_further()
    assert alone.accumulation_steps == 12
    assert StepConfig(batch_size=1).divided_further() is None


def test_equal_places_of_repeated_blocks_are_one_row():
    explanation = explain(transformer())
    first = explanation.rows[0]
    assert (first.where, first.num_modules, first.nbytes) == ("h.*.mlp.act", 12, 12 * 16 * MIB)
    assert first.fraction == pytest.approx(192 / (192 + 8 + 48 + 96))
    assert explanation.saved == (first, explanation.rows[-1])
    assert explanation.rows[-1].where == "head"
    assert "h.*.mlp.act (12 modules)" in str(explanation)
    assert "192 MiB" in str(explanation)


def test_layers_of_a_plain_sequential_are_no_blocks():
    assert repeated_children(["0.weight", "2.weight", "4.weight"]) == set()
    assert repeated_children(["0.fc.weight", "1.fc.weight", "2.weight"]) == {"0", "1"}
    # a block that only lacks the shortcut of its sibling is its like; another kind is not
    paths = ["s.0.conv.weight", "s.0.short.weight", "s.1.conv.weight", "s.2.attn.weight"]
    assert repeated_children(paths) == {"s.0", "s.1"}
    assert repeated_children(["lstm.weight_ih_l0", "decoder.weight"]) == set()


def test_a_place_that_is_live_in_one_block_alone_keeps_its_number():
    held = [holding(Category.PARAMETERS, path, 1) for path in LAYERS]
    groups = group([*held, holding(Category.TEMPORARIES, "h.3.mlp.act", 5)])
    assert [g.where for g in groups if g.category is Category.TEMPORARIES] == ["h.3.mlp.act"]


@pytest.mark.parametrize("name", ["gpt-small", "resnet-digits", "vit-digits", "lstm-text"])
def test_blocks_are_those_that_checkpointing_finds(name):
    from memlab.techniques.checkpointing.blocks import find_blocks

    model = workloads.get(name).build_model()
    held = [holding(Category.PARAMETERS, path, p.nbytes) for path, p in model.named_parameters()]
    found, pattern = find_blocks(model), blocks_pattern(held)
    assert bool(found) == bool(pattern)
    for path in found:
        parts = zip(path.split("."), pattern.split("."), strict=True)
        assert all(own == part or (part == "*" and own.isdecimal()) for own, part in parts)


@given(st.lists(st.tuples(st.sampled_from(CATEGORIES), st.sampled_from([*LAYERS, "", "0.1"]),
                          st.integers(1, 2**40)), min_size=1))  # fmt: skip
def test_grouping_keeps_every_byte(entries):
    held = [holding(category, module, size) for category, module, size in entries]
    groups = group(held)
    for category in CATEGORIES:
        own = [h.nbytes for h in held if h.category is category]
        assert sum(g.nbytes for g in groups if g.category is category) == sum(own)
    assert [g.nbytes for g in groups] == sorted((g.nbytes for g in groups), reverse=True)


def test_estimates_are_those_counted_by_hand():
    found = remedies(transformer())
    # 48 MiB of parameters and 96 of state stand; 192 in blocks and 8 outside are saved
    assert found["optimizer='sgd-momentum'"].freed_bytes == 48 * MIB
    assert found["accumulation_steps=2"].freed_bytes == 100 * MIB
    assert found["checkpointing='blocks'"].freed_bytes == pytest.approx(11 * 16 * MIB, abs=2)
    assert found["precision='bf16'"].freed_bytes == (48 + 96 + 200) * MIB // 2
    assert found["precision='bf16-mixed'"].freed_bytes is None
    assert found["accumulation_steps=2"].config == StepConfig(accumulation_steps=2)


def test_bf16_under_autocast_saves_what_autocast_has_left_in_fp32():
    found = remedies(transformer(config=StepConfig(precision="bf16-mixed")))["precision='bf16'"]
    assert found.effect == "saves half of the parameters, gradients and optimizer state"


def test_accumulation_counts_the_gradients_that_then_stand():
    gradients = np.array([0, 0, 48, 48]) * MIB
    result = transformer()
    table = result.timeline.bytes_by_category.copy()
    table[:, CATEGORIES.index(Category.GRADIENTS)] = gradients
    result = replace(result, timeline=replace(result.timeline, bytes_by_category=table))
    # after: 144 + 48 of gradients + 100 of activations, where 344 were; the newborn ones come apart
    assert (
        remedies(result)["accumulation_steps=2"].freed_bytes == 344 * MIB - (144 + 48 + 100) * MIB
    )


def test_buckets_of_gradients_shrink_with_nothing_but_parts():
    config = StepConfig(sharding="ddp", world_size=2, batch_size=8)
    alone, result = transformer(config=replace(config, sharding="zero2")), transformer()
    table = result.timeline.bytes_by_category.copy()
    table[1:, CATEGORIES.index(Category.BUFFERS)] += 48 * MIB  # made in forward, never freed
    timeline = replace(result.timeline, bytes_by_category=table)
    with_buckets = remedies(replace(result, config=config, timeline=timeline))
    assert {"sharding='zero2'", "sharding='zero3'"} <= set(with_buckets)
    assert "no buckets" in with_buckets["sharding='zero2'"].effect
    # what is freed is what would be freed without them
    freed = with_buckets["accumulation_steps=2"].freed_bytes
    assert freed == remedies(alone)["accumulation_steps=2"].freed_bytes == 100 * MIB
    assert not any(name.startswith("sharding=") for name in remedies(alone))


@pytest.mark.parametrize("sharding", ["ddp", "zero1"])
def test_the_row_of_buckets_offers_what_has_none(sharding):
    config = StepConfig(sharding=sharding, world_size=2, batch_size=8)
    target = Target(kind="cpu", card=None, name="cpu")
    made = predict_in_process(
        blocks(width=64), config, target, seed=0, memory_limit=None, report=lambda progress: None
    )
    explained = explain(made.result)
    [row] = [row for row in explained.rows if row.is_bucket]
    weights = sum(p.nbytes for p in blocks(width=64).build_model().parameters())
    assert (row.category, row.nbytes) == (Category.BUFFERS, weights)
    assert set(row.freed_by) == {"sharding='zero2'", "sharding='zero3'"}
    assert "buckets of gradients" in str(row)
    assert not any(each.is_bucket for each in explain(transformer()).rows)


def test_a_remedy_is_named_at_the_rows_that_it_frees_alone():
    explanation = explain(transformer())
    freed_by = {(row.category, row.where): row.freed_by for row in explanation.rows}
    assert "checkpointing='blocks'" in freed_by[Category.ACTIVATIONS, "h.*.mlp.act"]
    assert "checkpointing='blocks'" not in freed_by[Category.ACTIVATIONS, "head"]
    assert "accumulation_steps=2" in freed_by[Category.ACTIVATIONS, "head"]
    state = freed_by[Category.OPTIMIZER_STATE, "h.*.mlp.fc.weight"]
    assert set(state) == {
        "optimizer='adafactor'",
        "precision='bf16'",
        "optimizer='sgd-momentum'",
    }


def test_an_update_in_backward_is_offered_where_gradients_stand_and_can_be_used_at_once():
    held = [holding(Category.GRADIENTS, "head.weight", 9 * MIB)]
    assert "optimizer_in_backward=True" in remedies(result_of(held))
    for config in (StepConfig(accumulation_steps=2), StepConfig(precision="fp16-mixed")):
        assert "optimizer_in_backward=True" not in remedies(result_of(held, config=config))


def test_nothing_is_offered_that_is_on_or_cannot_be():
    everything = StepConfig(batch_size=2, accumulation_steps=2, checkpointing="blocks",
                            precision="bf16", optimizer="sgd")  # fmt: skip
    assert remedies(transformer(config=everything)) == {}
    weight = holding(Category.PARAMETERS, "lstm.weight_ih_l0", MIB)
    saved = holding(Category.ACTIVATIONS, "lstm", 9 * MIB, "aten::mkldnn_rnn_layer")
    lstm = result_of([weight, saved])
    assert "checkpointing='blocks'" not in remedies(lstm)
    assert not any("memory_budget" in name for name in remedies(lstm))
    assert remedies(lstm)["precision='bf16'"].freed_bytes is None  # workspace does not halve


def test_only_what_acts_at_the_peak_is_offered():
    held = [holding(Category.PARAMETERS, "0.weight", 90 * MIB, ""),
            holding(Category.TEMPORARIES, "", 50 * MIB)]  # fmt: skip
    result = result_of(held)
    table = result.timeline.bytes_by_category.copy()
    table[:3, CATEGORIES.index(Category.TEMPORARIES)] = 0  # the peak is in the optimizer
    table[1, CATEGORIES.index(Category.ACTIVATIONS)] = 40 * MIB
    result = replace(result, timeline=replace(result.timeline, bytes_by_category=table))
    assert set(remedies(result)) == {"precision='bf16'"}


GPT = Gpt(num_layers=2, hidden_size=32, num_heads=2, sequence_length=32, vocab_size=2000)
IN_CHUNKS = "loss_chunks=16"


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"accumulation_steps": 2}, {"checkpointing": "blocks"},
                                    {"precision": "bf16-mixed"}], ids=str)  # fmt: skip
def test_logits_at_the_peak_are_offered_in_chunks_by_what_that_saves(fields):
    workload = GPT.workload("gpt")
    plain = predict(workload, StepConfig(batch_size=8, **fields), "cpu")
    remedy = remedies(plain)[IN_CHUNKS]
    chunked = predict(workload, remedy.config, "cpu")
    freed = plain.peak_allocated_bytes - chunked.peak_allocated_bytes
    assert remedy.freed_bytes == pytest.approx(freed, rel=0.1)
    assert freed > 0.3 * plain.peak_allocated_bytes
    rows = {row.operator for row in explain(plain).rows if IN_CHUNKS in row.freed_by}
    assert rows == {"aten::_log_softmax", "aten::_log_softmax_backward_data",
                    "aten::nll_loss_backward"}  # fmt: skip
    assert IN_CHUNKS not in remedies(chunked)


@pytest.mark.slow
def test_a_loss_in_stretches_is_offered_what_stands_of_it():
    workload, config = workloads.get("lstm-text"), StepConfig(batch_size=8)
    plain = predict(workload, config, "h200")
    remedy = remedies(plain)[IN_CHUNKS]
    chunked = predict(workload, remedy.config, "h200")
    freed = plain.peak_allocated_bytes - chunked.peak_allocated_bytes
    assert remedy.freed_bytes == pytest.approx(freed, rel=0.1)


def test_logits_are_not_offered_in_chunks_where_they_cannot_be():
    def names(loss="aten::nll_loss_forward", **changes):
        held = [holding(Category.ACTIVATIONS, "", 9 * MIB, "aten::_log_softmax"),
                holding(Category.ACTIVATIONS, "", 4, loss)]  # fmt: skip
        return remedies(result_of(held, **changes))

    assert IN_CHUNKS in names()
    assert IN_CHUNKS not in names(config=StepConfig(compile=True))
    assert IN_CHUNKS not in names(config=StepConfig(loss_chunks=4))
    assert IN_CHUNKS not in names(loss="aten::nll_loss2d_forward")  # of a convolution
    assert IN_CHUNKS not in names(loss="aten::mul")  # a log-softmax of another kind


@pytest.mark.slow
@pytest.mark.parametrize("config", [
    StepConfig(batch_size=64),
    StepConfig(batch_size=64, optimizer="sgd", precision="bf16-mixed"),
    StepConfig(batch_size=64, accumulation_steps=2, checkpointing="blocks"),
], ids=str)  # fmt: skip
def test_every_remedy_of_a_real_result_runs_and_frees(config):
    workload = blocks(width=128, depth=4)
    result = here(workload, config)
    found = explain(result).remedies
    assert found
    for remedy in found:
        after = here(workload, remedy.config)
        assert after.outcome == "ok", (remedy.name, after.message)
        freed = result.peak_allocated_bytes - after.peak_allocated_bytes
        if remedy.freed_bytes is not None:
            assert freed == pytest.approx(remedy.freed_bytes, rel=0.4), remedy.name


def here(workload, config=None, **options):
    return measure(workload, config or StepConfig(), "cpu", repeats=1, isolate=False, **options)


def test_a_run_out_of_memory_is_explained():
    result = here(linear(), memory_limit="200KiB")
    explanation = explain(result)
    assert result.outcome == "out_of_memory"
    assert explanation.rows
    assert "over the limit of 200 KiB" in explanation.message


def test_a_recorded_result_is_explained_like_the_measured_one():
    result = here(linear())
    recorded = StepResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert str(explain(recorded)) == str(explain(result))


def test_why_there_is_nothing_to_explain():
    result = here(linear(), StepConfig(precision="tf32"))
    text = str(explain(result))
    assert "Nothing to explain: no memory was measured, the outcome is unsupported" in text
    assert "bf16-mixed" in text
    untold = transformer(peak_by_category=None, peak_holdings=(), notes=("No breakdown: why.",))
    assert "has no breakdown: No breakdown: why." in explain(untold).message
    older = explain(transformer(peak_holdings=()))
    assert "not traced" in older.message
    assert older.rows == ()
    assert older.by_category["activations"] == 200 * MIB


@pytest.mark.parametrize("wrong", [None, {"peak": 3}, StepConfig()])
def test_a_wrong_type_is_refused_by_name(wrong):
    with pytest.raises(MemlabError, match=r"is not a StepResult; pass what memlab\.measure"):
        explain(wrong)


def test_tables_hold_the_rows_and_escape_names():
    odd = [holding(Category.ACTIVATIONS, "<b>", MIB), holding(Category.PARAMETERS, "w", MIB)]
    explanation = explain(result_of(odd))
    page = explanation._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b><" not in page
    frame = explain(transformer()).to_frame()
    assert frame["nbytes"].sum() == transformer().peak_allocated_bytes
    assert frame.loc[0, "where"] == "h.*.mlp.act"
    assert list(explain(here(linear(), StepConfig(precision="tf32"))).to_frame().columns)


def test_predicted_numbers_say_how_sure_they_are():
    sure = {"peak_allocated_bytes": 0.0125, "step_seconds": 0.15}
    predicted = transformer(source=Source.PREDICTED, step_seconds=0.2, uncertainty=sure)
    assert "peak 344 MiB allocated +-1.2 %" in str(predicted)
    assert "200 ms a step +-15 %" in str(predicted)
    assert "+-1.2 %" in predicted._repr_html_()
    assert "not predicted" in predicted._repr_html_()
    assert "+-" not in str(transformer())
    assert StepResult.from_dict(predicted.to_dict()).uncertainty == sure
    assert memlab.to_frame([predicted]).loc[0, "peak_allocated_bytes"] == 344 * MIB


def test_percents_have_one_or_two_digits():
    assert [format_percent(f) for f in (0, 0.0005, 0.01, 0.099, 0.5, 1.5)] == [
        "0 %", "0.05 %", "1 %", "9.9 %", "50 %", "150 %",
    ]  # fmt: skip


def test_a_record_without_holdings_is_still_read():
    data = transformer().to_dict()
    del data["peak_holdings"], data["uncertainty"]
    again = StepResult.from_dict(data)
    assert (again.peak_holdings, again.uncertainty) == ((), None)
    full = transformer()
    assert StepResult.from_dict(full.to_dict()).peak_holdings == full.peak_holdings


# what holds the peak of a rank: the memory of libraries is told from that of the model


LINEAR = (64 + 1) * 64 * 4  # bytes of a linear layer of this width


def of_two(build_model, compute_loss, device, sharding="ddp"):
    """Return what is predicted of one of two ranks."""
    workload = made_of(build_model, (64,), compute_loss)
    config = StepConfig(sharding=sharding, world_size=2, batch_size=4)
    return predicted(config, device, workload)


@pytest.mark.parametrize(("make", "named_bytes"), [(torch.ones, LINEAR), (torch.empty, 0)])
def test_what_a_loss_keeps_is_not_called_buckets(make, named_bytes):
    kept = []

    def loss(model, batch):
        if not kept:
            kept.append(make(300, 64))
        return model(batch).square().mean()

    explained = explain(of_two(lambda: nn.Linear(64, 64), loss, "cpu"))
    # what another operator made is told apart; an empty tensor is not, so nothing is named
    assert sum(row.nbytes for row in explained.rows if row.is_bucket) == named_bytes
    rest = [row for row in explained.rows if row.category is Category.BUFFERS and not row.is_bucket]
    assert sum(row.nbytes for row in rest) == 300 * 64 * 4 + LINEAR - named_bytes


def test_the_workspace_of_a_product_in_the_loss_is_not_called_buckets():
    def loss(model, batch):
        return (model(batch) @ torch.ones(64, 64, device=batch.device)).square().mean()

    explained = explain(of_two(lambda: nn.LayerNorm(64), loss, "h100"))
    spaces = [row for row in explained.rows if row.is_workspace]
    assert sum(row.nbytes for row in spaces) == 2 * 32 * MIB  # of forward and of backward
    assert not any(row.is_bucket or "buckets" in str(row) for row in spaces)
    assert any(row.is_bucket for row in explained.rows)


@pytest.mark.parametrize("sharding", ["zero3", "tensor"])
def test_the_workspace_of_a_trial_is_not_called_buffers(sharding):
    def build():
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    # layers are divided by a trial, which multiplies before the step begins
    result = of_two(build, lambda model, x: model(x).square().mean(), "h100", sharding)
    kept = [row for row in explain(result).rows if row.category is Category.BUFFERS]
    spaces = [row for row in kept if row.operator in CUBLAS]
    assert all(row.is_workspace for row in spaces)
    assert sum(row.nbytes for row in spaces) == 2 * 32 * MIB  # of forward and of backward
    assert "workspace" in category_names(result)[Category.BUFFERS]
