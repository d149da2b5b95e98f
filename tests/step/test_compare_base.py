"""`compare_base`: the parts of a difference, against a hand count and against predictions."""

import dataclasses

import pytest

import memlab
from memlab import MemlabError, Outcome, StepConfig, compare_base
from memlab._util.units import signed_bytes
from memlab.search.quantized_base import ATTENTION, CASTED, QUANTIZED
from memlab.workloads.published import BASES

pytest.importorskip("peft", reason="needs memlab[finetune]")
pytest.importorskip("bitsandbytes", reason="needs memlab[finetune]")
CARD, CONFIG, TOKENS = "rtx-4090", StepConfig(batch_size=2), 512
CAST = memlab.workloads.finetune(
    "llama-tiny", rank=8, base="nf4", prepare_for_kbit=True, tokens=TOKENS
)


@pytest.fixture(scope="module")
def found():
    return compare_base(CAST, CONFIG, CARD)


@pytest.mark.slow
def test_the_parts_are_those_of_a_hand_count(found):
    sizes = BASES["llama-tiny"]
    width, middle, layers = (sizes[name] for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers",
    ))  # fmt: skip
    keys = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    weights = [width * width] * 2 + [width * keys] * 2 + [width * middle] * 3  # of a layer
    parts = {part.name: part.nbytes for part in found.parts}
    assert parts[QUANTIZED] == layers * sum(n // 2 - 2 * n for n in weights)  # whole 512 bytes
    # embeddings and head are cast from 16 to 32 bits; a norm takes 512 bytes in both
    assert parts[CASTED] == 2 * (4 - 2) * sizes["vocab_size"] * width

    more = found.quantized.peak_allocated_bytes - found.plain.peak_allocated_bytes
    assert sum(parts.values()) == more > 0
    # scores in fp32: without a flash kernel they are kept, of each sample, head and pair of tokens
    scores = 4 * layers * 2 * sizes["num_attention_heads"] * TOKENS**2
    assert scores < parts[ATTENTION] < 1.1 * scores
    assert "aten::" not in found.message
    said = str(found)
    assert "nf4 does not help here" in said
    assert f"{signed_bytes(parts[QUANTIZED])}  {QUANTIZED}" in said
    assert "2 of them: model.embed_tokens and lm_head" in said
    assert "model.layers.0" not in said  # the places of all blocks are one line
    assert QUANTIZED in found._repr_html_()


@pytest.mark.slow
def test_a_remedy_is_a_prediction_of_its_own(found):
    before = found.quantized.peak_allocated_bytes
    told = {way.name: way.nbytes for way in found.remedies}
    uncast = memlab.predict(CAST.chosen(prepare_for_kbit=False), CONFIG, CARD)
    assert told["prepare_for_kbit=False"] == uncast.peak_allocated_bytes - before < 0
    assert list(told.values()) == sorted(told.values())
    assert {"precision='bf16-mixed'", "checkpointing='blocks'", "loss_chunks=16"} < told.keys()


@pytest.mark.slow
def test_what_memlab_refuses_is_no_remedy():
    pytest.importorskip("trl", reason="has the loss kernel of this test")
    config = dataclasses.replace(CONFIG, loss_kernel="chunked-nll")
    refused = dataclasses.replace(config, loss_chunks=16)
    short = memlab.workloads.finetune("llama-tiny", base="nf4", tokens=16)
    assert memlab.predict(short, refused, CARD).outcome is Outcome.UNSUPPORTED
    told = compare_base(short, config, CARD).remedies
    assert {way.name for way in told} == {"precision='bf16-mixed'", "checkpointing='blocks'"}
    assert all(way.result.outcome is Outcome.OK for way in told)


@pytest.mark.parametrize(
    ("workload", "base", "said"),
    [
        (memlab.workloads.get("gpt-small"), "bf16", "gpt-small has no choice of a base; allowed"),
        (CAST.chosen(base="bf16", prepare_for_kbit=False), "bf16", "is what llama-tiny, .* has"),
        (CAST, "int3", "base='int3'.*allowed"),
        (CAST, "int8", r"base='int8' is quantized as well.*allowed is one of \['fp32', 'bf16', 'f"),
    ],
)
def test_what_has_no_other_base_is_an_error(workload, base, said):
    with pytest.raises(MemlabError, match=said):
        compare_base(workload, CONFIG, CARD, base=base)


@pytest.mark.slow
def test_a_base_that_is_not_quantized_is_an_error():
    wide = memlab.workloads.finetune("llama-tiny", base="fp32", tokens=16)
    with pytest.raises(MemlabError, match="is not quantized: no weight takes less memory"):
        compare_base(wide, CONFIG, CARD)
