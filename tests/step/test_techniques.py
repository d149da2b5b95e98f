"""Checkpointing and compilation: what they leave alone, and what they refuse."""

import pytest
import torch
from torch import nn
from torch._functorch import partitioners

from memlab import StepConfig, measure
from memlab.config import CompileMode
from memlab.errors import UnsupportedError
from memlab.techniques import compilation, registry
from memlab.techniques.accumulation import random_modules, sample_mixing_modules
from memlab.techniques.checkpointing.blocks import find_blocks
from memlab.techniques.step import build_step, set_seed
from memlab.trace import CATEGORIES, Category
from tests.models import blocks, linear, made_of, run_gradients

BLOCKS = StepConfig(checkpointing="blocks")
HALF = StepConfig(memory_budget=0.5, budget_engine="compile")


def test_the_repeated_blocks_are_found():
    assert list(find_blocks(blocks(depth=3).build_model())) == ["0", "1", "2"]
    assert find_blocks(nn.LSTM(3, 3, 2)) == {}

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(3)))

    model = nn.Sequential(nn.ModuleList([Stage(), Stage()]), nn.Linear(8, 8))
    found = find_blocks(model)  # the finest of the classes that hold the same parameters
    assert len(found) == 6
    assert "0.1.layers.2" in found


def test_recompute_is_bitwise_with_dropout_and_updates_statistics_once():
    workload = blocks(norm=True, dropout=0.3)
    plain, found = (run_gradients(workload, c) for c in (StepConfig(), BLOCKS))
    for name in plain:
        assert torch.equal(found[name], plain[name]), name
    plain, found = (statistics(workload, c) for c in (StepConfig(), BLOCKS))
    for name in plain:
        assert torch.equal(found[name], plain[name]), name
    assert found["0.1.num_batches_tracked"] == 3


def test_a_compiled_recompute_updates_statistics_once():
    workload = blocks(norm=True)
    plain = statistics(workload, StepConfig(optimizer="sgd"))
    config = StepConfig(optimizer="sgd", checkpointing="blocks", compile=True)
    found = statistics(workload, config)
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-4, atol=1e-4)


def statistics(workload, config):
    """Return the buffers after three updates."""
    step = build_step(workload, config, "cpu")
    for _ in range(3):
        set_seed(0)
        step()
    return dict(step.model.named_buffers())


def test_checkpointing_saves_activations_and_keeps_the_paths():
    workload = blocks(width=64, depth=6)
    plain = measure(workload, StepConfig(batch_size=256), "cpu", repeats=1, isolate=False)
    config = StepConfig(batch_size=256, checkpointing="blocks")
    saved = measure(workload, config, "cpu", repeats=1, isolate=False)
    assert saved.peak_allocated_bytes < 0.75 * plain.peak_allocated_bytes
    built = build_step(workload, config, "cpu").model
    assert built.state_dict().keys() == workload.build_model().state_dict().keys()


def test_no_blocks_is_unsupported_with_a_remedy():
    with pytest.raises(UnsupportedError, match=r"no repeated blocks in Linear.*accumulation_steps"):
        build_step(linear(), BLOCKS, "cpu")


def test_a_block_that_checkpoints_itself_is_not_wrapped_twice():
    def build():
        model = blocks().build_model()
        model[1].gradient_checkpointing = True
        return model

    workload = made_of(build, blocks().make_batch, blocks().compute_loss, name="self")
    with pytest.raises(UnsupportedError, match="1 already checkpoints itself"):
        build_step(workload, BLOCKS, "cpu")


def test_modules_that_mix_samples_or_draw_numbers_are_named():
    model = blocks(norm=True, dropout=0.1, depth=2).build_model()
    assert sample_mixing_modules(model) == ["0.1", "1.1"]
    assert random_modules(model) == ["0.4", "1.4"]
    assert random_modules(model.eval()) == []
    assert random_modules(nn.LSTM(2, 2, 2, dropout=0.5)) == [""]


def most_activations(workload, config):
    """Return the most bytes kept from forward to backward; the peak need not fall with it."""
    result = measure(workload, config, "cpu", repeats=1, isolate=False)
    column = CATEGORIES.index(Category.ACTIVATIONS)
    return result.timeline.bytes_by_category[:, column].max()


@pytest.mark.slow
def test_a_new_budget_is_planned_anew():
    workload = blocks(width=64, depth=6)
    kept = [
        most_activations(
            workload,
            StepConfig(batch_size=256, memory_budget=budget, budget_engine="compile", compile=True),
        )
        for budget in (1.0, 0.5, 1.0)
    ]
    assert kept[1] < kept[0] == kept[2]


@pytest.mark.slow
def test_two_steps_with_other_budgets_are_not_given_one_plan():
    """The trap of torch.compile: without a reset the second budget does nothing."""
    workload, whole = blocks(width=64, depth=6), StepConfig(batch_size=256, compile=True)
    half = StepConfig(batch_size=256, compile=True, memory_budget=0.5, budget_engine="compile")
    build_step(workload, whole, "cpu")()
    build_step(workload, half, "cpu")()
    plan = compilation._last[3]
    assert [choice.changed for choice in plan.choices] == [True]
    build_step(workload, half, "cpu")()
    assert len(plan.choices) == 1  # the same step again is not compiled again
    other = blocks(width=64, depth=6)
    build_step(other, half, "cpu")()
    assert compilation._last[3] is not plan
    assert [choice.changed for choice in compilation._last[3].choices] == [True]


def test_a_mode_of_inductor_is_refused_on_a_cpu_and_reaches_torch_compile_on_a_card(monkeypatch):
    tuned = StepConfig(compile=True, compile_mode="max-autotune")
    with pytest.raises(UnsupportedError, match=r"'max-autotune' tunes the code.*on cpu"):
        build_step(blocks(), tuned, "cpu")
    asked = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: asked.append(options))
    for config in (tuned, StepConfig(compile=True)):
        registry.check(config, torch.device("cuda"))
        compilation.apply(blocks().build_model(), blocks(), config, torch.device("cuda"))
    compilation.forget()
    assert [options["mode"] for options in asked] == ["max-autotune", None]
    assert asked[0]["backend"] == "inductor"
    modes = torch._inductor.list_mode_options()
    assert {str(mode) for mode in CompileMode} <= {"default", *modes}


def test_a_budget_with_dropout_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"0\.3 draws random numbers.*190758.*checkpointing"):
        build_step(blocks(dropout=0.1), HALF, "cpu")


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).relu(), 0.1, self.training)
        return x


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        if x.sum().item() > 0:
            x = x + 1
        return self.inner(x)


class Nested(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def refused(model, config=HALF):
    workload = made_of(lambda: model, (16,))
    result = measure(workload, config, "cpu", repeats=1, isolate=False)
    assert result.outcome == "unsupported"
    assert result.peak_allocated_bytes is None
    return result.message


def test_functional_dropout_is_found_in_the_graph_and_the_partitioner_put_back():
    names = ("choose_saved_values_set", "_extract_fwd_bwd_modules", "solve_min_cut")
    before = [getattr(partitioners, name) for name in names]
    assert "draws random numbers" in refused(FunctionalDropout())
    assert [getattr(partitioners, name) for name in names] == before
    assert torch._functorch.config.activation_memory_budget == 1.0


def test_a_graph_break_names_the_module():
    message = refused(Nested(nn.Linear(16, 16), Breaks()))
    assert "layers.1 (Breaks)" in message
    assert "memory_budget=1.0" in message


def test_an_rnn_is_named():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(16, 16)

        def forward(self, x):
            return self.rnn(x)[0]

    assert "rnn (LSTM)" in refused(Recurrent())


def test_an_unchanged_plan_is_refused_by_name():
    message = refused(Nested(nn.Linear(16, 16)))
    assert "the plan of Nested is the same as at 1.0" in message


def test_a_model_that_the_loss_does_not_call_is_refused():
    workload = made_of(
        lambda: Nested(nn.Linear(16, 16), nn.ReLU()), (16,), lambda model, x: model.layers(x).mean()
    )
    result = measure(workload, HALF, "cpu", repeats=1, isolate=False)
    assert result.outcome == "unsupported"
    assert "must call model(...)" in result.message


def test_attention_without_dropout_is_not_taken_for_random():
    def build():
        return Nested(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))

    workload = made_of(build, (6, 16))
    config = StepConfig(memory_budget=0.1, budget_engine="compile")
    assert measure(workload, config, "cpu", repeats=1, isolate=False).outcome == "ok"
