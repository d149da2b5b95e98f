import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.modules.dropout import _DropoutNd

import memlab
from memlab import MemlabError, StepConfig, workloads
from memlab.errors import WorkloadError
from memlab.runtime import isolation
from memlab.workloads import data, published
from memlab.workloads.published import BASES


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


@pytest.mark.parametrize("size", [(16, 24), (16, 16, 32)])
def test_masks_cover_the_digits_and_nothing_else(size):
    images, masks = data.digit_masks_batch(8, size)
    assert images.shape == (8, 1, *size)
    assert masks.shape == (8, *size)
    assert torch.equal(masks == 1, images[:, 0] > data.INK)
    assert 0.02 < masks.float().mean() < 0.6
    if len(size) == 3:  # the middle half of the depth, and the same in all of it
        assert not masks[:, :4].any()
        assert not masks[:, 12:].any()
        assert torch.equal(masks[:, 4], masks[:, 11])


SMALL = ["gpt-small", "resnet-digits", "vit-digits", "lstm-text", "densenet-digits", "vnet-digits"]


@pytest.mark.parametrize("name", SMALL)
def test_dropout_is_off_unless_asked_for(name):
    def drop_rates(**options):
        model = workloads.get(name, **options).build_model()
        return {m.p for m in model.modules() if isinstance(m, _DropoutNd)}

    assert drop_rates() <= {0.0}
    assert 0.25 in drop_rates(dropout=0.25)


def test_serious_sizes_are_those_of_the_papers():
    assert workloads.names()[:4] == ["gpt-small", "resnet-digits", "vit-digits", "lstm-text"]
    with torch.device("meta"):
        deep = workloads.get("resnet-1001").build_model()
        counts = {
            name: sum(p.numel() for p in workloads.get(name).build_model().parameters())
            for name in ("gpt2-medium", "vit-large", "resnet-50", "densenet-121")
        }
    assert counts == {
        "gpt2-medium": 354823168,
        "vit-large": 304326632,
        "resnet-50": 25557032,
        "densenet-121": 7978856,
    }
    layers = [
        path
        for path, module in deep.named_modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear) and "shortcut" not in path
    ]
    assert len(layers) == 1001


def test_segments_of_a_resnet_hold_the_same_blocks():
    sizes = {"depths": (5, 3, 1, 2), "image_size": 32}
    found = []
    for length in (1, 2):
        torch.manual_seed(0)
        workload = workloads.get("resnet-digits", segment_length=length, **sizes)
        model = workload.build_model()
        found.append(workload.compute_loss(model, workload.make_batch(4)))
    assert torch.equal(*found)
    assert [len(stage.layers) for stage in model.resnet.encoder.stages] == [3, 2, 1, 1]


def test_an_lstm_in_stretches_of_time_is_one_lstm():
    """The oracle is `nn.LSTM` over the whole text, with the same weights."""
    workload = workloads.get("lstm-text", hidden_size=16, sequence_length=20, chunk_length=8)
    model, (tokens, targets) = workload.build_model(), workload.make_batch(3)
    whole = torch.nn.LSTM(16, 16, num_layers=2, batch_first=True)
    for number, layer in enumerate(model.chunk.layers):
        for name, weight in layer.lstm.named_parameters():
            getattr(whole, name.replace("l0", f"l{number}")).data.copy_(weight.data)
    hidden, _ = whole(model.chunk.embedding(tokens))
    expected = torch.nn.functional.cross_entropy(
        model.chunk.decoder(hidden).flatten(0, 1), targets.flatten()
    )
    loss = workload.compute_loss(model, (tokens, targets))
    torch.testing.assert_close(loss, expected)
    found, wanted = (
        torch.autograd.grad(value, model.chunk.embedding.weight)[0] for value in (loss, expected)
    )
    torch.testing.assert_close(found, wanted)


def test_a_vnet_segments_volumes_and_images():
    for size in ((16, 16, 16), (32, 16)):
        workload = workloads.get("vnet-digits", volume_size=size)
        batch = workload.make_batch(2)
        with torch.no_grad():
            model = workload.build_model()
            assert model(batch[0]).shape == (2, 2, *size)
            assert 0.1 < workload.compute_loss(model, batch) < 3.0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: workloads.get("gpt-smal"), "did you mean 'gpt-small'"),
        (lambda: workloads.get("gpt-small", layers=3), "no option 'layers'"),
        (lambda: workloads.get("vit-digits", dropout=1.5), "dropout=1.5"),
        (lambda: workloads.get("lstm-text", chunk_length=0), "chunk_length=0"),
        (lambda: workloads.get("resnet-digits", segment_length=0), "segment_length=0"),
        (
            lambda: workloads.get("vnet-digits", volume_size=(20, 20, 20)),
            "volume_size=(20, 20, 20)",
        ),
        (
            lambda: workloads.get("bert-base-uncased", sequence_length=64),
            "from_config('bert-base-uncased') takes tokens",
        ),
    ],
)
def test_unknown_names_and_options_say_what_there_is(call, said):
    with pytest.raises(MemlabError) as caught:
        call()
    assert said in str(caught.value)


def test_infinite_numbers_of_a_config_are_read_as_transformers_writes_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(hidden_size=64, num_heads=8, head_dim=16, n_groups=1)
    config.save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    made = workloads.from_config(tmp_path, tokens=8).build_model.__self__
    assert tuple(made.config().time_step_limit) == tuple(config.time_step_limit)


def test_a_config_that_is_no_file_is_said_with_what_writes_one():
    transformers = pytest.importorskip("transformers")
    with pytest.raises(MemlabError, match=r"an object of T5Config.*save_pretrained\(folder\)"):
        workloads.from_config(transformers.T5Config())


NEEDS = {
    "gpt-small": ("transformers", "zoo"),
    "vit-digits": ("sklearn", "zoo"),
    "vnet-digits": ("monai", "zoo"),
    "lora on nf4": ("bitsandbytes", "finetune"),
    "lora on fp16": ("peft", "finetune"),
    "ia3 on int8-weight-only": ("torchao", "fp8"),
}


def named(name):
    adapter, _, base = name.partition(" on ")
    return (
        workloads.finetune("llama-tiny", adapter=adapter, base=base)
        if base
        else workloads.get(name)
    )


@pytest.mark.parametrize("name", NEEDS)
@pytest.mark.parametrize("verb", [memlab.predict, memlab.measure, memlab.verify])
def test_a_missing_package_is_named_before_any_worker_or_model(name, verb, monkeypatch):
    package, extra = NEEDS[name]
    workload = named(name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(isolation.Lane, "ensure", lambda lane: pytest.fail("a worker was asked"))
    with pytest.raises(WorkloadError, match=rf"needs {package}, .*pip install 'memlab\[{extra}\]'"):
        verb(workload, StepConfig(), "cpu")
    with pytest.raises(WorkloadError, match=f"needs {package},"):
        memlab.export_script(workload, StepConfig(), "cpu")


def test_packages_that_a_workload_does_not_need_may_be_missing(monkeypatch):
    for package in ("peft", "bitsandbytes", "torchao", "monai", "sklearn"):
        monkeypatch.setitem(sys.modules, package, None)
    for workload in (
        workloads.get("gpt-small"),
        workloads.get("lstm-text"),
        workloads.finetune("llama-tiny", adapter="none"),
    ):
        workloads.check_installed(workload)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("vit-l/16", "vit-large"),
        ("google/ViT-large-patch16-224", "vit-large"),
        ("resnet50", "resnet-50"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-1b"),
        ("GPT2_medium", "gpt2-medium"),
        ("gpt2", "gpt2, sequence length 1024"),
        ("google-bert/bert-base-uncased", "bert-base-uncased, sequence length 512"),
    ],
)
def test_a_model_is_found_by_the_name_that_people_write(written, meant):
    assert workloads.get(written).name == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("llama-3.2-1b", "llama-1b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("Qwen/Qwen2.5-0.5B", "qwen-0.5b"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
    ],
)
def test_a_base_is_found_by_its_published_name(written, meant):
    found = workloads.finetune(written, tokens=64).name
    assert found == f"{meant}, lora of rank 16 on bf16, sequence length 64"


@pytest.mark.parametrize(
    "other", ["Qwen/Qwen-7B-Chat", "Qwen-7B-Chat", "huggyllama/llama-7b", "Llama-3-21B"]
)
def test_the_sizes_of_a_base_are_not_those_of_a_model_of_another_owner_or_version(other):
    with pytest.raises(WorkloadError, match="no model that memlab knows by name"):
        workloads.finetune(other)


def test_every_published_name_means_something_and_none_means_two_things():
    published_names = published._published()
    known = {*workloads.names(), *BASES}
    assert set(published_names["same"].values()) <= known
    letters = [
        published._letters(n) for n in (*published_names["same"], *published_names["config"])
    ]
    assert len(letters) == len(set(letters))
    assert not {published._letters(name) for name in known} & set(letters)
    names = {*letters, *map(published._letters, known)}
    owned = [name for names_of in published_names["owner"].values() for name in names_of]
    assert {published._letters(name) for name in owned} <= names


def of_hub(folder, name, **options):
    """The hub's config, read from a local folder instead."""
    transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2).save_pretrained(folder)
    read = transformers.AutoConfig.from_pretrained
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoConfig, "from_pretrained", lambda n, **o: read(folder, **o))
        return workloads.from_config(name, **options)


def test_a_config_of_the_hub_is_read_only_if_that_is_allowed(tmp_path, monkeypatch):
    made = of_hub(tmp_path, "someone/tiny", tokens=32, from_hub=True)
    assert made.name == "someone/tiny, sequence length 32"
    assert len(made.build_model().transformer.h) == 1
    for name in ("someone/gpt2", "openai-community/gpt2", "someone/llama-1b"):
        assert of_hub(tmp_path, name, from_hub=True).name == f"{name}, sequence length 1024"
    with pytest.raises(WorkloadError, match=r"'someone/tiny' is no file.*from_hub=True"):
        of_hub(tmp_path, "someone/tiny")
    assert of_hub(tmp_path, "openai-community/gpt2").name == "gpt2, sequence length 1024"
    monkeypatch.setenv("MEMLAB_FROM_HUB", "1")
    assert of_hub(tmp_path, "someone/tiny").name == "someone/tiny, sequence length 1024"


def test_a_hub_that_cannot_be_reached_is_said_with_a_remedy(monkeypatch):
    def fails(name, **options):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fails)
    with pytest.raises(WorkloadError, match=r"someone/tiny.*couldn't connect.*config\.json"):
        workloads.finetune("someone/tiny", from_hub=True)


def test_a_model_of_timm_without_its_weights(monkeypatch):
    made = []

    def create_model(name, **options):
        made.append((name, options))
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 1000))

    entry = SimpleNamespace(input_size=(3, 32, 32), fixed_input_size=True)
    timm = SimpleNamespace(
        __version__="1", list_models=lambda: ["vit_tiny"], create_model=create_model,
        get_pretrained_cfg=lambda name: entry,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "timm", timm)
    workload = workloads.from_config("timm/vit_tiny")
    assert workload.name == "timm/vit_tiny, image size 32"
    assert workload.compute_loss(workload.build_model(), workload.make_batch(2)).ndim == 0
    assert made == [("vit_tiny", {"pretrained": False, "num_classes": 1000, "img_size": 32})]
    with pytest.raises(WorkloadError, match=r"no model 'vit_tine' \(did you mean 'vit_tiny'\?\)"):
        workloads.from_config("timm/vit_tine")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(WorkloadError, match=r"cannot be imported.*pip install timm"):
        workloads.from_config("timm/vit_tiny")
