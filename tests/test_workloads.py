import pytest
import torch

from memlab import MemlabError, workloads
from memlab.workloads import data


def test_small_ones_come_first_and_all_have_names():
    assert workloads.names()[:4] == ["gpt-small", "resnet-digits", "vit-digits", "lstm-text"]
    assert {"gpt2-medium", "vit-large"} <= set(workloads.names())


def test_text_is_real_english_and_targets_are_the_next_byte():
    tokens, targets = data.text_batch(3, 200)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    text = bytes(tokens.flatten().tolist()).decode(errors="replace")
    assert text.count(" ") > 50
    assert any(word in text for word in ("the", "of", "is"))


def test_digits_are_real_and_labelled():
    pixels, labels = data.digits_batch(64, 16, 3)
    assert pixels.shape == (64, 3, 16, 16)
    assert 0.0 <= pixels.min() < pixels.max() <= 1.0
    assert len(labels.unique()) > 5
    assert torch.equal(pixels[:, 0], pixels[:, 2])


@pytest.mark.parametrize("name", ["gpt-small", "resnet-digits", "vit-digits", "lstm-text"])
def test_dropout_is_off_unless_asked_for(name):
    def drop_rates(**options):
        model = workloads.get(name, **options).build_model()
        return {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} | {
            m.dropout for m in model.modules() if isinstance(m, torch.nn.LSTM)
        }

    assert drop_rates() <= {0.0}
    assert 0.25 in drop_rates(dropout=0.25)


def test_sizes_are_options():
    workload = workloads.get("gpt-small", sequence_length=32, num_layers=1)
    assert workload.make_batch(2)[0].shape == (2, 32)
    assert len(workload.build_model().transformer.h) == 1


def test_serious_sizes_are_those_of_the_papers():
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in workloads.get(name).build_model().parameters())
            for name in ("gpt2-medium", "vit-large", "resnet-50")
        }
    assert counts == {"gpt2-medium": 354823168, "vit-large": 304326632, "resnet-50": 25557032}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: workloads.get("gpt-smal"), "did you mean 'gpt-small'"),
        (lambda: workloads.get("gpt-small", layers=3), "no option 'layers'"),
        (lambda: workloads.get("vit-digits", dropout=1.5), "dropout=1.5"),
    ],
)
def test_unknown_names_and_options_say_what_there_is(call, said):
    with pytest.raises(MemlabError) as caught:
        call()
    assert said in str(caught.value)


def test_a_missing_zoo_names_the_command():
    with pytest.raises(MemlabError, match="pip install 'memlab"):
        data.zoo_import("a_library_that_is_not_there")
