"""The list of techniques: each field in one place, and each refusal with a remedy that lifts it."""

import dataclasses
import itertools
from collections import Counter

import pytest
import torch

from benchmarks import combinations, saving
from memlab import StepConfig
from memlab.config import PRESET_POLICIES, Checkpointing, allowed_value
from memlab.devices import cards
from memlab.errors import UnsupportedError
from memlab.techniques import registry
from memlab.techniques.registry import EVERY
from memlab.techniques.technique import Equivalence, Refusal, Setup, catalogue, in_words, offers_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EXAMPLES = {name: fields for t in EVERY for name, fields in t.examples.items()}


def test_every_field_belongs_to_exactly_one_technique():
    counts = Counter(name for technique in EVERY for name in technique.fields)
    assert counts == Counter(field.name for field in dataclasses.fields(StepConfig))


def test_what_keeps_every_bit_says_what_it_does():
    for technique in EVERY:
        assert bool(technique.does) == (technique.equivalence is Equivalence.BITWISE), (
            technique.fields
        )


@pytest.mark.parametrize("technique", EVERY, ids=lambda technique: technique.fields[0])
def test_a_technique_says_what_it_saves(technique):
    assert technique.savings
    for line in technique.savings:
        assert any(f"`{field}=" in line.setting for field in technique.fields)
        assert "|" not in f"{line.setting}{line.saves}{line.costs}{line.not_for}"


def test_every_table_of_the_catalogue_is_that_of_a_technique():
    assert set(catalogue()) == {technique.fields[0] for technique in EVERY}


@pytest.mark.parametrize("row", [*itertools.chain(*catalogue().values())], ids=lambda r: r.setting)
def test_what_the_catalogue_offers_is_a_config_and_another_one(row):
    """The batch divides among the ranks, and what is replaced is what a config may have."""
    for offer in row.offers:
        before = {name: values[0] for name, values in row.replaces.items()}
        ranks = {"world_size": 16} if "sharding" in {*offer, *before} else {}
        config = StepConfig(batch_size=16, **ranks, **{"sharding": "ddp"} if ranks else {})
        config = dataclasses.replace(config, **before)
        assert dataclasses.replace(config, **offer) != config
    for name, values in row.replaces.items():
        assert all(allowed_value(name, value) == value for value in values)
    assert row.left is None or row.frees
    assert row.left is None or 0.0 <= row.left < 1.0


def test_every_preset_policy_is_offered():
    offered = [offer["checkpoint_policy"] for offer in offers_of("checkpointing")]
    assert offered == list(PRESET_POLICIES)


def test_the_rungs_of_the_ladder_are_numbered_without_a_gap():
    rungs = sorted(row.rung for row in itertools.chain(*catalogue().values()) if row.rung)
    assert rungs == list(range(1, len(rungs) + 1))


def test_fields_refuse_the_pairs_that_the_page_of_combinations_says_they_refuse():
    # a test of the matrix writes the page again; this one only reads it, in every run
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in combinations.PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    names = [row[1] for row in rows[1:]]
    on_page = {
        (name, names[column])
        for name, row in zip(names, rows[1:], strict=True)
        for column, cell in enumerate(row[2:])
        if cell.isalpha() and cell.isascii()
    }
    pairs = [*combinations.pairs(), *((b, a) for a, b in combinations.pairs())]
    assert on_page == {pair for pair in pairs if _refusal_of(*pair)}


def _refusal_of(a: str, b: str) -> str:
    """Return why two techniques are refused before anything is built; "" if they are not."""
    fields = combinations.settings(a, b)
    try:
        registry.check(StepConfig(**fields), CUDA if combinations.is_for_a_card(a, b) else CPU)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_the_page_of_savings_says_what_the_techniques_say():
    written = saving.PAGE.read_text(encoding="utf-8")
    assert written == saving.page(), "write it again: python -m benchmarks.saving"


@pytest.mark.parametrize("technique", EVERY, ids=lambda technique: technique.fields[0])
def test_a_technique_that_is_off_refuses_nothing_and_adds_nothing_to_a_script(technique):
    asked = Setup(config=StepConfig(), device=CPU)
    assert not list(technique.refusals(asked))
    assert not technique.notes(asked)
    if technique is not registry.optimizers.OPTIMIZER:
        assert technique.source(asked) == registry.ScriptLines()


def refused(config, device):
    card = cards.find("t4") if device is CUDA else None  # which has no bf16, tf32 or fp8
    return list(registry.refusals(Setup(config=config, device=device, card=card)))


PAIRS = [(a, {}) for a in EXAMPLES.values()]
PAIRS += [
    (a, b) for a, b in itertools.combinations(EXAMPLES.values(), 2) if not a.keys() & b.keys()
]
PAIRS += [({"precision": name}, {}) for name in ("tf32", "fp8-mixed", "fp16")]
PAIRS += [({"compile": True, "compile_mode": "max-autotune"}, {})]
PAIRS += [
    ({"optimizer": "adafactor"}, {"optimizer_implementation": "fused"}),
    ({"optimizer": "adamw-8bit"}, {"optimizer_implementation": "foreach"}),
    ({"optimizer": "sgd", "precision": "bf16"}, {"optimizer_implementation": "fused"}),
    ({"budget_engine": "compile", "memory_budget": 0.5}, {"budget_estimator": "profile"}),
]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_each_remedy_of_a_refusal_lifts_it(device):
    num_refusals = 0
    for a, b in PAIRS:
        asked = {"batch_size": 4} | a | b
        for refusal in refused(StepConfig(**asked), device):
            num_refusals += 1
            assert refusal.remedies
            assert all(name in str(refusal) for name in refusal.remedies[0])
            for remedy in refusal.remedies:
                config = dataclasses.replace(StepConfig(**asked), **_whole(asked, remedy))
                left = [other.why for other in refused(config, device)]
                assert refusal.why not in left, (asked, remedy)
    assert num_refusals > 10


def _whole(asked, remedy):
    """Return a remedy with what does nothing without what it takes away, as the panel does."""
    whole = dict(remedy)
    if remedy.get("offload_activations") is False:
        whole["offload_fraction"] = 1.0
    if remedy.get("checkpointing") is Checkpointing.NONE:
        whole |= {"checkpoint_modules": "auto", "checkpoint_policy": "recompute-all"}
    if "budget_engine" in remedy and remedy["budget_engine"] == "eager":
        whole |= {"budget_solver": "dp", "budget_estimator": "flops"}
    if remedy.get("compile") is False and asked.get("budget_engine") != "compile":
        whole["compile_mode"] = "default"
    return whole


def test_a_refusal_reads_as_a_sentence():
    refusal = Refusal(why="a=1 with b=2 clash", remedies=({"a": 0}, {"b": None}), otherwise="wait")
    assert str(refusal) == "a=1 with b=2 clash; use a=0, or b=None, or wait"
    assert in_words({"compile": False, "loss_chunks": 1}) == "compile=False and loss_chunks=1"


def test_a_number_format_is_refused_by_the_card_and_not_by_what_is_here():
    for name in ("bf16", "tf32", "fp8-mixed"):
        with pytest.raises(UnsupportedError, match="Tesla T4"):
            registry.check(StepConfig(precision=name), CUDA, cards.find("t4"))
    registry.check(StepConfig(precision="bf16"), CUDA, cards.find("h200"))
