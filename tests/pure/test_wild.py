"""The benchmark of models that nobody here wrote: its draw, its rules, its judgement."""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import wild_models, wild_plain, wild_report, wild_trial
from benchmarks.wild_models import shrinking
from benchmarks.wild_models.recipe import arguments, default_loss

FOLDER = Path(wild_models.__file__).parent


class Registry:
    """A package of two groups, one far larger than the other."""

    @staticmethod
    def names():
        return [*(f"large/{i}" for i in range(50)), *(f"small/{i}" for i in range(3))]


def test_the_draw_is_fixed_by_its_seed_and_takes_groups_in_turn(monkeypatch):
    monkeypatch.setattr(wild_models, "_module", lambda package: Registry)
    first = wild_models.draw("torch", 0)
    assert first == wild_models.draw("torch", 0)
    assert first != wild_models.draw("torch", 1)
    assert len(first) == wild_models.SOURCES["torch"].most_drawn
    assert sum(name.startswith("small/") for name in first[:6]) == 3
    assert set(first) <= set(Registry.names())


def test_enough_models_of_enough_packages_are_wanted():
    sources = wild_models.SOURCES.values()
    assert len(sources) >= 8
    assert sum(source.wanted for source in sources) >= 120
    assert all(source.most_drawn > source.wanted for source in sources)
    assert all((FOLDER / f"{source.module}.py").exists() for source in sources)


def test_the_reference_imports_nothing_of_memlab():
    files = [Path(wild_plain.__file__), *FOLDER.glob("*.py")]
    assert len(files) > len(wild_models.SOURCES)
    for file in files:
        tree = ast.parse(file.read_text())
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not [name for name in names if name.split(".")[0] == "memlab"], file


def test_arguments_are_given_by_name_and_a_missing_rule_is_named():
    assert arguments(nn.Linear, {"in_features": 2, "out_features": 3, "k": 4}) == {
        "in_features": 2, "out_features": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no rule for the argument 'out_features'"):
        arguments(nn.Linear, {"in_features": 2})


def test_a_configuration_shrinks_alike_what_must_stay_equal():
    transformers = pytest.importorskip("transformers")
    config = shrinking.shrunk(transformers.LlamaConfig, 0)
    assert config.num_hidden_layers == 2
    assert config.hidden_size == 64
    assert config.hidden_size == config.num_attention_heads * config.head_dim
    assert config.vocab_size == shrinking.VOCABULARY
    deep = shrinking.shrunk(transformers.LlamaConfig, 2)
    assert (deep.num_hidden_layers, deep.hidden_size) == (2, 4096)


def test_a_loss_is_the_models_own_or_the_size_of_what_it_returns():
    class Own(nn.Linear):
        def forward(self, x):
            found = type("Outputs", (), {})()
            found.loss = super().forward(x).mean()
            return found

    x = torch.ones(2, 3)
    assert default_loss(Own(3, 1), (x,)).requires_grad
    plain = nn.Linear(3, 1)
    assert default_loss(plain, (x,)) == plain(x).square().mean()
    with pytest.raises(ValueError, match="no output depends on a parameter"):
        default_loss(nn.ReLU(), (x,))


def test_recompute_is_judged_bit_by_bit_against_plain_pytorch():
    found = wild_plain.reference("torch", "GELU")
    assert (found["plain"], found["repeats"]) == ("trains", True)
    made = partial(wild_trial.workload, "torch", "GELU", found["variant"])
    fields = {"checkpointing": "blocks", "checkpoint_modules": "GELU"}
    assert wild_trial.recomputed(made, fields, found["updates"]) == {"is": "same"}

    (loss, digest), *later = found["updates"]
    others = [[loss, digest[::-1]], *later]
    said = wild_trial.recomputed(made, fields, others)
    assert said["is"] == "differs"
    assert "weights of update 1" in said["message"]

    refused = wild_trial.recomputed(made, {**fields, "checkpoint_modules": "nothing"}, others)
    assert refused["is"] == "refused"


def test_what_plain_pytorch_cannot_train_is_left_out_with_its_reason():
    assert wild_plain.reference("torch", "MaxUnpool1d")["plain"] == "fails"
    assert wild_plain.reference("torch", "TransformerEncoder")["why"].startswith("ValueError")


def row(measured=100, predicted=100, claim=0.0, is_="same", card="ok"):
    stages = {
        "measure": {"outcome": "ok", "bytes": measured},
        "predict": {"outcome": "ok", "bytes": predicted, "claim": claim},
        **{name: {"outcome": card, "message": "why"} for name in wild_trial.CARDS},
        **{kind: {"is": is_, "message": "why"} for kind in wild_trial.RECOMPUTE},
    }
    return {"package": "p", "name": "m", "plain": "trains", "stages": stages}


def test_the_summary_counts_what_is_wrong():
    left_out = {"package": "p", "name": "n", "plain": "fails", "why": "no"}
    rows = [row(), row(predicted=110), row(predicted=101, claim=0.02), left_out]
    rows += [row(is_="differs"), row(is_="raises", card="crashed"), row(is_="refused")]
    line = wild_report.summary(rows)[-1]
    assert (line["drawn"], line["tried"], line["run and predicted"]) == (7, 6, 6)
    assert line["max %"] == pytest.approx(10)
    assert line["beyond claim"] == 1
    assert line["no answer for a card"] == 2
    assert (line["same"], line["refused"], line["silently other"], line["raise"]) == (9, 3, 3, 3)
    assert len(wild_report.failures(rows)) == 1 + 3 + 3 + 2
    assert wild_report.exclusions(rows) == ["p n: plain PyTorch: fails: no"]
