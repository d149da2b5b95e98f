"""Every two techniques: equal gradients, or a refusal that names both, also in the panel."""

import dataclasses
import re

import pytest
import torch

from benchmarks import combinations
from benchmarks.combinations import Kind, pairs, tried
from memlab import StepConfig
from memlab._panel import outlook, state, texts
from memlab._panel.questions import Estimate, Question
from memlab._panel.runs import RunLog
from memlab.devices.cards import resolve
from memlab.errors import UnsupportedError
from memlab.prediction.predict import predict_in_process
from memlab.techniques import accumulation, layout, registry
from memlab.techniques.loss.chunked_loss import CHUNKED_LOSS
from memlab.techniques.technique import Refusal
from tests.verify_parts import alike


def _need_packages_of(a, b):
    fields = combinations.settings(a, b)
    if "attention" in fields:
        pytest.importorskip("transformers")
    if "loss_kernel" in fields:
        pytest.importorskip("trl")


@pytest.mark.parametrize(("a", "b"), [pytest.param(*p, id=" + ".join(p)) for p in pairs()])
def test_two_techniques_combine_or_are_refused_by_name(a, b):
    _need_packages_of(a, b)
    found = tried(a, b)
    assert found.kind is not Kind.WRONG, found.why
    # what the page says of this pair
    page = combinations.PAGE.read_text(encoding="utf-8")
    names = list(combinations.TRIED)
    row = next(
        line for line in page.splitlines() if re.match(rf"\| \d+ \| {re.escape(a)} \|", line)
    )
    cell = row.split("|")[3 + names.index(b)].strip()
    is_said = f"- **{cell}** {found.why}\n" in page
    assert is_said if found.kind is Kind.REFUSED else cell == str(found.kind)


@pytest.mark.long
def test_the_page_says_what_was_found():  # of all pairs at once; each is compared with it above
    page = combinations.PAGE.read_text(encoding="utf-8")
    assert page == combinations.page(), "write it again: python -m benchmarks.combinations"


def test_a_wrong_gradient_a_wrong_update_and_a_nameless_refusal_are_found(monkeypatch):
    attempt = tried.__wrapped__  # past what is remembered
    for a, b in (("channels last", "fused"), ("accumulation", "fused"), ("loss chunks", "fused")):
        assert attempt(a, b).kind is Kind.TRAINS

    def scaled(model):
        for parameter in model.parameters():
            parameter.data.mul_(1.1)

    def refuse(asked):
        if asked.config.loss_chunks > 1:
            yield Refusal(why="loss_chunks=4 cannot be")

    refusing = dataclasses.replace(CHUNKED_LOSS, refusals=refuse)
    others = [technique for technique in registry.EVERY if technique is not CHUNKED_LOSS]

    monkeypatch.setattr(layout, "apply", scaled)

    def uneven(_, micro_batches, sizes):
        return [1.0] if len(sizes) == 1 else [0.9, 0.1]

    monkeypatch.setattr(accumulation, "weights", uneven)
    monkeypatch.setattr(registry, "EVERY", (*others, refusing))
    assert "differ by" in attempt("channels last", "fused").why
    assert "differ by" in attempt("accumulation", "fused").why
    assert "does not name both" in attempt("loss chunks", "fused").why


def device_of(a, b):
    return combinations.CARD if combinations.is_for_a_card(a, b) else "cpu"


def refusal(config, device):
    """Return why a config is refused before anything is built; "" if it is not."""
    try:
        registry.check(config, torch.device(resolve(device).kind))
    except UnsupportedError as error:
        return str(error)
    return ""


# docs/combinations.md, which a test compares, shows every change of this list
REFUSED = [
    pair
    for pair in pairs()
    if refusal(StepConfig(**combinations.settings(*pair)), device_of(*pair))
]


def test_the_pairs_that_fields_refuse_are_found():
    found = {frozenset(pair) for pair in REFUSED}
    assert frozenset({"in backward", "accumulation"}) in found
    assert frozenset({"compile", "offload half"}) in found
    assert frozenset({"accumulation", "fused"}) not in found


@pytest.mark.parametrize(("a", "b"), [pytest.param(*p, id=" + ".join(p)) for p in REFUSED])
def test_the_panel_says_what_cannot_be_before_it_runs(a, b):
    now = state.from_config(StepConfig(**combinations.settings(a, b)))
    device = device_of(a, b)
    lines = texts.lines(now, {}, None, device=device, name="mine", effect=alike())
    warnings = [line for line in lines.values() if line.kind == state.WARN and line.remedy]
    helped = [state.to_config({**now, **line.remedy[1]}) for line in warnings]
    assert any(not refusal(config, device) for config in helped)


@pytest.mark.parametrize(("a", "b"), [pytest.param(*p, id=" + ".join(p)) for p in REFUSED])
def test_the_prediction_on_screen_is_the_sentence_of_the_refusal(a, b):
    config, device = StepConfig(**combinations.settings(a, b)), device_of(a, b)
    target = resolve(device)
    result = predict_in_process(
        combinations.WORKLOAD, config, target, seed=0, memory_limit=None, report=lambda _: None
    ).result
    question = Question(combinations.WORKLOAD.name, config, target.name)
    estimate = Estimate(question=question, result=result, exact=True)
    shown = outlook.outlook(RunLog(), question, estimate, "")
    assert shown.costs() == f"no prediction (unsupported): {refusal(config, device)}"


def test_no_card_has_to_be_there_for_what_a_card_would_refuse():
    config = StepConfig(offload_activations=True, compile=True)
    with pytest.raises(UnsupportedError, match=r"offload_activations=True with compile=True"):
        registry.check(config, torch.device("cuda"))
