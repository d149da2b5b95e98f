"""The command line: options, models by name, exit codes, JSON, and mistakes in a sentence."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner

import memlab
from memlab import StepConfig, StepResult, VerifyReport
from memlab.__main__ import main
from memlab._util.units import MIB
from memlab.cli import commands, doctor
from memlab.cli.commands import FIELDS, ExitCode, code_of, config_of, lists_of
from memlab.cli.commands import memlab as group
from memlab.cli.models import AskedModel, workload_of
from memlab.config import PRESET_POLICIES, Optimizer, allowed_value
from memlab.result import FitStatus
from memlab.search.answer import Recommendation, Recommendations
from memlab.store.database import write
from memlab.store.records import Kind
from tests import ROOT
from tests.store_parts import a_fault, a_result, a_run, a_script_run

COMMANDS = ["predict", "measure", "verify", "sweep", "recommend", "export", "compare", "explain",
            "notebooks", "demo", "doctor", "run", "watch"]  # fmt: skip
WITH_SETTINGS = ["predict", "measure", "verify", "sweep", "recommend", "export"]


def run(*words):
    """Run a command; an error that is no person's mistake comes through."""
    return CliRunner().invoke(group, list(map(str, words)), catch_exceptions=False)


@pytest.fixture
def asked(monkeypatch):
    """Stand in for `predict`; return what it was asked, and what it answers."""
    found = {"answer": {}}

    def predict(workload, config, device, **options):
        found.update(workload=workload, config=config, device=device, options=options)
        return a_result(workload_name=workload.name, config=config, **found["answer"])

    monkeypatch.setattr(commands, "predict", predict)
    return found


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Make a person's folder the current one; return a function that writes a file in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


# options


def test_all_commands_are_there_and_each_has_json():
    assert set(group.commands) == set(COMMANDS)
    for name, command in group.commands.items():
        options = [option for param in command.params for option in param.opts]
        assert "--json" in options or name in ("demo", "doctor", "watch")


@pytest.mark.parametrize("command", WITH_SETTINGS)
def test_every_setting_is_an_option_with_help(command):
    options = {param.name: param for param in group.commands[command].params}
    for name in FIELDS:
        assert f"--{name.replace('_', '-')}" in options[name].opts
        assert len(options[name].help.split()) > 3
        assert "`" not in options[name].help


def other_values():
    """Yield each field with the words that set it, and the value that they mean."""
    texts = {"checkpoint_modules": "layers.*", "checkpoint_policy": "aten.mm, aten.addmm"}
    numbers = {"memory_budget": 0.25, "offload_fraction": 0.5, "max_grad_norm": 1.5}
    for name, field in FIELDS.items():
        option = name.replace("_", "-")
        if field.type is bool:
            yield name, [f"--{option}"], True
            yield name, [f"--no-{option}"], False
        elif name in texts:
            yield name, [f"--{option}", texts[name]], texts[name]
        elif field.type in (int, int | None):
            yield name, [f"--{option}", "3"], 3
        elif name in numbers:
            yield name, [f"--{option}", str(numbers[name])], numbers[name]
        else:
            for choice in field.type if isinstance(field.type, type) else Optimizer:
                yield name, [f"--{option}", str(choice)], choice


def test_every_setting_reaches_the_config():
    options = {param.name: param for param in group.commands["predict"].params}
    said = set()
    for name, words, value in other_values():
        parser = click.Command("x", params=[options[each] for each in FIELDS])
        given = parser.make_context("x", words).params
        given = {each: text for each, text in given.items() if text is not None}
        changed = lists_of({each: (given[each],) if each in given else () for each in FIELDS})
        assert changed == {name: [value]} or name == "checkpoint_policy", name
        ((found,),) = changed.values()
        assert allowed_value(name, found) == value
        said.add(name)
    assert said == set(FIELDS)


def test_the_config_that_was_asked_for_is_predicted(asked):
    done = run("predict", "plain-mlp", "--batch-size", 4, "--compile", "--max-grad-norm", "none",
               "--precision", "bf16-mixed", "--device", "t4", "--memory-limit", "1GiB",
               "--seed", 3)  # fmt: skip
    assert done.exit_code == 0
    assert asked["config"] == StepConfig(batch_size=4, compile=True, precision="bf16-mixed")
    assert asked["device"] == "t4"
    assert asked["options"]["memory_limit"] == "1GiB"
    assert asked["options"]["seed"] == 3


def test_settings_that_are_not_given_are_the_defaults():
    assert config_of(dict.fromkeys(FIELDS)) == StepConfig()


def test_a_sweep_takes_lists_and_options_given_twice():
    options = {param.name: param for param in group.commands["sweep"].params}
    parser = click.Command("x", params=[options[each] for each in FIELDS])
    words = ["--batch-size", "4,8", "--batch-size", "16", "--compile", "--no-compile",
             "--max-grad-norm", "none, 1.0", "--precision", "fp32,bf16", "--checkpoint-policy",
             "aten.mm, aten.addmm", "--checkpoint-policy", "keep-matmuls"]  # fmt: skip
    assert lists_of(parser.make_context("x", words).params) == {
        "batch_size": [4, 8, 16],
        "precision": ["fp32", "bf16"],
        "compile": [True, False],
        "max_grad_norm": [None, 1.0],
        "checkpoint_policy": ["aten.mm, aten.addmm", "keep-matmuls"],
    }


def test_a_policy_function_is_named_by_its_import_path(own):
    own("my_policies.py", "def keep_all(context, operator, *args, **kwargs):\n    return None\n")
    given = dict.fromkeys(FIELDS) | {
        "checkpointing": "blocks", "checkpoint_policy": "my_policies:keep_all",
    }  # fmt: skip
    assert config_of(given).checkpoint_policy.__name__ == "keep_all"


# models


OWN = """
import torch
from memlab import Workload

LINE = torch.nn.Linear(4, 2)
BATCH = (torch.zeros(3, 4), torch.zeros(3, 2))
made = Workload.from_module(LINE, BATCH, torch.nn.functional.mse_loss, name="made")

def workload():
    return made

def parts():
    return LINE, BATCH, torch.nn.functional.mse_loss

def wrong_parts():
    return LINE, 3, 4

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 4)
        self.head = torch.nn.Linear(4, 11)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

class Images(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 2, 3)

    def forward(self, images):
        return self.conv(images).mean((2, 3))

def needs(argument):
    return made

def raises():
    raise RuntimeError("no weights\\nhere")

number = 3
"""


def test_a_workload_is_found_by_its_import_path(own):
    own("package/__init__.py", "")
    own("package/mine.py", OWN)
    assert workload_of("package.mine:made", None, None).name == "made"
    assert workload_of("package.mine:workload", None, None).name == "made"
    assert workload_of("package.mine:parts", None, None).name == "parts"


def test_a_bare_module_gets_a_made_up_batch(own):
    own("mine_bare.py", OWN)
    texts = workload_of("mine_bare:Net", 5, None)
    batch = texts.make_batch(3)
    assert (texts.name, batch.shape, int(batch.max()) < 11) == (
        "mine_bare:Net, 5 tokens",
        (3, 5),
        True,
    )
    logits = texts.build_model()(batch)
    assert logits.shape == (3, 5, 11)
    assert texts.compute_loss(texts.build_model(), batch).ndim == 0

    images = workload_of("mine_bare:Images", None, 8)
    assert images.make_batch(3).shape == (3, 1, 8, 8)
    assert images.compute_loss(images.build_model(), images.make_batch(3)).isfinite()


def test_the_size_of_a_sample_is_that_of_the_workload():
    assert workload_of("gpt-small", 64, None).name == "gpt-small, sequence length 64"
    assert workload_of("resnet-digits", None, 64).name == "resnet-digits, image size 64"


def test_an_adapter_and_its_base_are_options(asked):
    words = "--adapter", "dora", "--rank", 8, "--targets", "q_proj,v_proj", "--base", "nf4"
    run("predict", "llama-tiny", "--tokens", 64, *words, "--prepare-for-kbit")
    named = memlab.workloads.finetune(
        "llama-tiny", adapter="dora", rank=8, targets=("q_proj", "v_proj"), base="nf4",
        prepare_for_kbit=True, tokens=64,
    ).name  # fmt: skip
    assert asked["workload"].name == named
    run("predict", "llama-tiny", "--targets", "all-linear")  # the usual adapter
    named = memlab.workloads.finetune("llama-tiny", targets="all-linear").name
    assert asked["workload"].name == named


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama-tiny"], "add --adapter lora, or --adapter none"),
        (["llama-tiny", "--rank", "x"], "rank='x' is not a whole number"),
        (["llama-tiny", "--base", "nf4,bf16"], "--base nf4,bf16 has several values"),
        (["llama-tiny", "--base", "nf4", "--image-size", "8"], "--image-size 8 does nothing"),
        (["mine:model", "--base", "nf4"], "--base is for a base model of transformers"),
        (["gpt-small", "--adapter", "lora"], "'llama-tiny'"),
        (["llama-tiny", "--targets", ""], "--targets '' has an empty value"),
        (["llama-tiny", "--rank", "8,"], "--rank '8,' has an empty value"),
        (["llama-tiny", "--targets", "all-linear,q_proj"], "all-linear stands alone"),
        (["llama-tiny", "--rank", "-8"], "rank=-8"),
    ],
)
def test_a_fine_tuning_that_cannot_be_is_refused_in_a_sentence(words, said, asked):
    done = run("predict", *words)
    assert done.exit_code == ExitCode.WRONG_USE
    assert said in done.stderr


def test_a_file_is_written_of_a_fine_tuning():
    asked = ("export", "llama-tiny", "--adapter", "lora", "--rank", "8", "--targets", "k_proj")
    done = run(*asked, "--device", "cpu", "--batch-size", "2")
    assert done.exit_code == ExitCode.YES, done.stderr
    assert "LoraConfig(" in done.stdout
    assert 'target_modules=["k_proj"]' in done.stdout
    both = run(*asked[:3], "lora,ia3", "--device", "cpu")
    assert both.exit_code == ExitCode.WRONG_USE
    assert "--adapter lora,ia3 has several values" in both.stderr


def test_recommend_chooses_among_several_adapters_and_bases():
    several = AskedModel(model="llama-tiny", adapter="lora, none", rank="8,64", base="bf16")
    assert several.choices() == {"adapter": ["lora", "none"], "rank": [8, 64]}
    first = memlab.workloads.finetune("llama-tiny", adapter="lora", rank=8)
    assert several.first_workload().name == first.name
    later = AskedModel(model="llama-tiny", adapter="none,lora", base="nf4,bf16")
    first = memlab.workloads.finetune("llama-tiny", adapter="none", base="bf16")
    assert later.first_workload().name == first.name, "nf4 has nothing to train alone"


GPT = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 8,
    "n_head": 2, "n_positions": 100, "vocab_size": 50, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "num_hidden_layers": 1,
    "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "image_size": 32,
    "patch_size": 8, "num_labels": 3,
}  # fmt: skip
BERT = {
    "model_type": "bert", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
    "intermediate_size": 8, "max_position_embeddings": 40, "vocab_size": 30,
}  # fmt: skip
T5 = {
    "model_type": "t5", "num_layers": 1, "d_model": 8, "num_heads": 2, "d_kv": 4, "d_ff": 8,
    "vocab_size": 30, "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "size", "model"),
    [
        (GPT, 64, "GPT2LMHeadModel"),
        (VIT, 32, "ViTForImageClassification"),
        (BERT, 40, "BertForMaskedLM"),
        (BERT | {"architectures": ["BertForSequenceClassification"]}, 40,
         "BertForSequenceClassification"),
        (BERT | {"architectures": ["BertForTokenClassification"]}, 40,
         "BertForTokenClassification"),
        (T5, 512, "T5ForConditionalGeneration"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_config_of_transformers_is_a_model_with_batches(values, size, model, own):
    own("tiny/config.json", json.dumps(values))
    workload = workload_of("tiny", None, None)
    assert workload.sample_size.value == size
    assert workload.name == f"tiny, {workload.sample_size}"
    small = workload.resized(16)
    built, batch = small.build_model(), small.make_batch(2)
    assert type(built).__name__ == model
    loss = small.compute_loss(built, batch)
    assert loss.ndim == 0
    assert loss.isfinite()
    loss.backward()
    assert workload_of("tiny/config.json", None, None).name == workload.name


def test_the_size_of_samples_of_a_config_is_an_option(own):
    own("gpt.json", json.dumps(GPT))
    own("vit.json", json.dumps(VIT))
    assert workload_of("gpt.json", 10, None).make_batch(2)["input_ids"].shape == (2, 10)
    own("usual.json", json.dumps({name: VIT[name] for name in VIT if name != "image_size"}))
    assert workload_of("usual.json", None, 64).build_model().config.image_size == 64
    vit = workload_of("vit.json", None, 64)
    assert vit.make_batch(2)["pixel_values"].shape == (2, 3, 64, 64)
    assert vit.build_model().config.image_size == 64


def test_a_config_in_a_narrow_format_builds_a_model_of_it(own):
    own("gpt.json", json.dumps(GPT | {"dtype": "bfloat16"}))
    model = workload_of("gpt.json", None, None).build_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_code_that_a_config_names_is_not_run(own):
    own("theirs/modeling.py", "raise SystemExit('run')")
    own("theirs/config.json", json.dumps(GPT | {
        "auto_map": {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    }))  # fmt: skip
    assert workload_of("theirs", None, None).build_model().config.n_layer == 1


# answers


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, 0),
        ({"fit": FitStatus.FITS, "fits": True, "memory_limit_bytes": MIB}, 0),
        ({"fit": FitStatus.DOES_NOT_FIT, "fits": False, "memory_limit_bytes": 512}, 1),
        ({"fit": FitStatus.TOO_CLOSE, "fits": True, "memory_limit_bytes": 1025}, 1),
        ({"outcome": "out_of_memory", "fit": FitStatus.DOES_NOT_FIT}, 1),
        ({"outcome": "unsupported"}, 3),
        ({"outcome": "failed"}, 3),
        ({"outcome": "crashed"}, 3),
        ({"outcome": "timed_out"}, 3),
        ({"outcome": "cancelled"}, 3),
    ],
)
def test_the_exit_code_says_whether_it_fits(fields, code, asked):
    assert code_of(a_result(**fields)) == code
    asked["answer"] = fields
    assert run("predict", "plain-mlp").exit_code == code
    assert run("predict", "plain-mlp", "--json").exit_code == code


def test_json_is_the_result_itself_and_one_object(asked):
    asked["answer"] = {"notes": ("mind this",), "loss": float("nan"), "finite": False}
    done = run("predict", "plain-mlp", "--json", "--batch-size", 4)
    result = StepResult.from_dict(json.loads(done.stdout))
    assert (result.workload_name, result.config.batch_size) == ("plain-mlp", 4)
    assert result.notes == ("mind this",)
    text = run("predict", "plain-mlp").stdout
    assert text.startswith("plain-mlp on cpu")
    assert "note: mind this" in text


def test_what_a_persons_file_prints_does_not_mix_with_the_answer(asked, own):
    own("talks.py", "print('imported')\n" + OWN.replace("    return made\n", """
    print('called')
    return made
""", 1))  # fmt: skip
    done = run("predict", "talks:workload", "--json")
    assert json.loads(done.stdout)["workload_name"] == "made"
    assert done.stderr == "imported\ncalled\n"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fit": FitStatus.FITS, "memory_limit_bytes": MIB}, "fits 1.00 MiB, the memory limit"),
        ({"fit": FitStatus.TOO_CLOSE, "usable_memory_bytes": MIB, "device": "t4"},
         "too close to 1.00 MiB, what PyTorch can reserve on t4, to say whether it fits"),
        ({"fit": FitStatus.DOES_NOT_FIT, "usable_memory_bytes": MIB, "device": "t4"},
         "does not fit 1.00 MiB, what PyTorch can reserve on t4"),
    ],
)  # fmt: skip
def test_the_text_says_into_what_it_fits(fields, said, asked):
    asked["answer"] = fields
    assert run("predict", "plain-mlp").stdout.splitlines()[1] == said


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (VerifyReport(ok=True, why="same"), 0),
        (VerifyReport(ok=False, why="differ", max_relative_error=float("inf")), 1),
        (VerifyReport(ok=False, why="no room", outcome="out_of_memory"), 1),
        (VerifyReport(ok=False, why="it crashed", outcome="crashed"), 3),
    ],
)
def test_verify_says_whether_gradients_differ(report, code, monkeypatch):
    monkeypatch.setattr(commands, "verify", lambda *args, **options: report)
    done = run("verify", "plain-mlp", "--json")
    assert done.exit_code == code
    data = json.loads(done.stdout)
    assert data["ok"] is report.ok
    assert set(data) == {field.name for field in dataclasses.fields(VerifyReport)}
    assert run("verify", "plain-mlp").stdout == f"{report}\n"


def test_recommend_passes_on_what_is_chosen_and_prints_the_answer(monkeypatch):
    given = {}
    one = Recommendation(result=a_result(), reasons=("it fits",), predicted=a_result())

    def recommend(workload, memory_limit, batch_size, device, **options):
        given.update(options, memory_limit=memory_limit, device=device)
        return Recommendations(fitting=(one,) * given["top"], message="the answer", limit_bytes=MIB)

    monkeypatch.setattr(commands, "recommend", recommend)
    words = ("recommend", "plain-mlp", "--memory-limit", "1MiB", "--device", "t4", "--batch-size",
             16, "--allow", "memory-budget", "--allow", "precision", "--exact")  # fmt: skip
    done = run(*words, "--top", 1, "--json")
    assert done.exit_code == 0
    assert (given["memory_limit"], given["device"], given["exact"]) == ("1MiB", "t4", True)
    assert given["allow"] == ["memory_budget", "precision"]
    assert given["config"] == StepConfig(batch_size=16)
    data = json.loads(done.stdout)
    assert data["message"] == "the answer"
    assert data["recommendations"][0]["reasons"] == ["it fits"]
    none = run(*words, "--top", 0)
    assert (none.exit_code, none.stdout.splitlines()[0]) == (1, "the answer")


# compare


def saved(path, **fields):
    path.write_text(json.dumps({"results": [a_result(**fields).to_dict()]}))
    return path


def test_compare_fails_where_bytes_rose(tmp_path):
    old = saved(tmp_path / "old.json")
    worse = saved(tmp_path / "new.json", peak_allocated_bytes=2048)
    assert run("compare", old, old).exit_code == ExitCode.YES
    done = run("compare", old, worse)
    assert done.exit_code == ExitCode.NO
    assert "peak allocated 1.00 KiB -> 2.00 KiB (+100.0 %)" in done.stdout
    assert run("compare", old, worse, "--memory-tolerance", 1.0).exit_code == ExitCode.YES
    assert json.loads(run("compare", old, worse, "--json").stdout)["ok"] is False


def test_compare_of_nothing_in_common_is_no_answer(tmp_path):
    old = saved(tmp_path / "old.json")
    other = saved(tmp_path / "new.json", device="t4")
    done = run("compare", old, other)
    assert done.exit_code == ExitCode.NO_ANSWER
    assert "only in old" in done.stdout
    assert "only in new" in done.stdout


def test_compare_shows_a_name_that_no_terminal_can(tmp_path):
    odd = saved(tmp_path / "odd.json", device="\ud800\x1b[31m")
    done = run("compare", odd, odd)
    assert (done.exit_code, "mine on \\ud800\\x1b[31m" in done.stdout) == (0, True)


def test_compare_reads_stores_and_draws(tmp_path):
    store = tmp_path / "results.sqlite3"
    write(a_run(), store)
    old = saved(tmp_path / "old.json")
    picture = tmp_path / "changes.png"
    assert run("compare", old, store, "--picture", picture).exit_code == 0
    assert picture.read_bytes()[1:4] == b"PNG"


def test_two_runs_are_compared_and_what_is_newly_wrong_ends_with_one(tmp_path):
    old, new, step = (tmp_path / name for name in ("old.json", "new.json", "step.json"))
    old.write_text(json.dumps(a_script_run().to_dict()))
    new.write_text(json.dumps(a_script_run(faults=(a_fault(),)).to_dict()))
    saved(step)
    assert run("compare", old, old).exit_code == 0
    done = run("compare", old, new)
    assert (done.exit_code, "only in new: train.py:7: a forward pass" in done.stdout) == (1, True)
    done = run("compare", old, step)
    assert (done.exit_code, "holds a run, which has stages" in done.stderr) == (2, True)


def test_a_run_is_written_as_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "run_script", lambda *_, **__: a_script_run())
    page = tmp_path / "run.html"
    assert run("run", "--html", page, "train.py").exit_code == 0
    assert "train.py:9: loss = f(x)" in page.read_text()


@pytest.mark.parametrize("option", ["--html", "--picture"])
@pytest.mark.parametrize(
    ("place", "why"), [("no/x.png", "there is no folder"), ("a.png", "is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    tmp_path, monkeypatch, option, place, why
):
    ran = []
    monkeypatch.setattr(commands, "run_script", lambda *_, **__: ran.append(1) or a_script_run())
    (tmp_path / "a.png").mkdir()
    file = tmp_path / place
    done = run("run", option, file, "train.py")
    said = " ".join(done.stderr.split())
    assert (done.exit_code, done.stdout, ran) == (2, "", [])
    assert f"{option} {file}: " in said
    assert why in said
    assert "name a file in a folder" in said


# notebooks and doctor


def test_notebooks_are_listed_and_copied(tmp_path):
    listed = run("notebooks").stdout.splitlines()
    assert listed[0].startswith("00_quickstart: ")
    assert all(len(line.partition(": ")[2]) > 10 for line in listed)
    done = run("notebooks", "05", "00_quickstart", "--copy", tmp_path / "mine", "--json")
    paths = [each["path"] for each in json.loads(done.stdout)["notebooks"]]
    assert paths == [
        str(tmp_path / "mine" / f"{name}.ipynb") for name in ("05_ladder", "00_quickstart")
    ]
    assert all(
        (tmp_path / "mine" / f"{name}.ipynb").exists() for name in ("05_ladder", "00_quickstart")
    )
    again = run("notebooks", "05", "--copy", tmp_path / "mine")
    assert (again.exit_code, "has a 05_ladder.ipynb already" in again.stderr) == (2, True)


def test_a_clean_copy_has_the_code_the_headings_and_the_exercises(tmp_path):
    run("notebooks", "c01", "--copy", tmp_path / "whole")
    assert run("notebooks", "c01", "--copy", tmp_path / "clean", "--clean").exit_code == 0
    whole, clean = (
        json.loads((tmp_path / folder / "c01_what_is_in_a_step.ipynb").read_text())["cells"]
        for folder in ("whole", "clean")
    )
    code = [[cell for cell in cells if cell["cell_type"] == "code"] for cells in (whole, clean)]
    assert code[0] == code[1]
    prose = "".join(line for cell in clean if cell not in code[1] for line in cell["source"])
    assert "# 1. What is in a step?" in prose
    assert prose.count("**Exercise") == 3
    assert "Live at that instant are" not in prose
    without = run("notebooks", "c01", "--clean")
    assert (without.exit_code, "add --copy" in without.stderr) == (2, True)


def test_a_demo_opens_a_copy_of_the_quickstart_and_never_writes_over_it(monkeypatch, tmp_path):
    opened = []
    stub = SimpleNamespace(main=opened.append)
    monkeypatch.setitem(sys.modules, "jupyterlab.labapp", stub)
    monkeypatch.chdir(tmp_path)
    mine = Path("memlab-demo", "00_quickstart.ipynb")
    assert run("demo", "--no-browser").exit_code == 0
    assert opened == [[str(mine), "--no-browser"]]
    assert mine.read_bytes() == (ROOT / "notebooks" / mine.name).read_bytes()
    mine.write_text("changed")
    assert run("demo").exit_code == 0
    assert mine.read_text() == "changed"
    monkeypatch.setattr(commands, "DEMO", Path("memlab-demo", "changed", "below a file"))
    Path("memlab-demo", "changed").write_text("no folder")
    refused = run("demo")
    assert refused.exit_code == 2
    assert refused.stderr.startswith(
        "Error: folder memlab-demo/changed/below a file cannot be written"
    )
    monkeypatch.setitem(sys.modules, "jupyterlab.labapp", None)
    without = run("demo")
    assert without.exit_code == 2
    assert "pip install 'memlab[lab]'" in without.stderr


def test_notebooks_are_not_run_without_papermill(monkeypatch, tmp_path):
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    without = run("notebooks", "--run", "--copy", str(tmp_path / "copies"))
    assert without.exit_code == 2
    assert "--run needs papermill" in without.stderr
    assert not (tmp_path / "copies").exists()


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1)])
def test_notebooks_are_run_by_their_own_runner(status, code, monkeypatch, tmp_path):
    given = []

    def runner(path):
        return {"main": lambda options: given.append((path, options)) or status}

    monkeypatch.setattr(commands.runpy, "run_path", runner)
    done = run("notebooks", "00", "--run", "--quick", "--device", "cpu", "--out", tmp_path)
    assert done.exit_code == code
    ((path, options),) = given
    assert path.endswith("run.py")
    assert options[0].endswith("00_quickstart.ipynb")
    assert options[1:] == ["--out", str(tmp_path), "--quick", "--device", "cpu"]


def test_doctor_takes_its_own_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out
    assert run("doctor", "--device", "rtx-4091").exit_code == 2


def test_the_json_of_doctor_is_its_record_and_its_text_goes_to_stderr(monkeypatch, capsys):
    def examine(device, keeper, home, *, seconds):
        print("This machine")
        keeper.add(Kind.RUN, {"case": 1})
        return 0

    monkeypatch.setattr(doctor, "examine", examine)
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["lines"] == [{"kind": "run", "case": 1}]
    assert said.err == "This machine\n"


# mistakes


MISTAKES = {
    "a module that is not there": (("predict", "nothing_here:make"), "No module named"),
    "a function that is not there": (("predict", "mine_bad:absent"), "mine_bad has no absent"),
    "a file that does not parse": (("predict", "broken:make"), "SyntaxError"),
    "a file that raises": (("predict", "raising:make"), "KeyError: 'x' (raising.py, line 1)"),
    "a file that ends Python": (("predict", "ending:make"), "SystemExit: 7"),
    "a function with arguments": (("predict", "mine_bad:needs"), "without arguments: TypeError"),
    "a function that raises": (("predict", "mine_bad:raises"), "RuntimeError: no weights here"),
    "a number": (("predict", "mine_bad:number"), "mine_bad:number is 3; allowed is a memlab"),
    "parts of no workload": (("predict", "mine_bad:wrong_parts"), "a tuple that is no workload"),
    "a module without a size": (("predict", "mine_bad:Net"), "--tokens 128"),
    "a module with two sizes": (
        ("predict", "mine_bad:Net", "--tokens", 3, "--image-size", 3), "either tokens"),
    "a path of a file": (("predict", "mine_bad.py:made"), "write mine_bad:made, as in an import"),
    "no import path": (("predict", "a b:c"), "is no import path"),
    "an unknown zoo name": (("predict", "gpt-smal"), "did you mean 'gpt-small'?"),
    "a size of another kind": (("predict", "gpt-small", "--image-size", 64), "use --tokens"),
    "a size of one that has none": (("predict", "plain-mlp", "--tokens", 64), "one size only"),
    "a config that is not there": (("predict", "absent.json"), "is no file"),
    "a folder without config": (("predict", "folder"), "holds no config.json"),
    "a config that is no JSON": (("predict", "no.json"), "no.json is no JSON"),
    "a config that is a list": (("predict", "list.json"), "has no model_type"),
    "a config of an unknown type": (("predict", "odd.json"), "did you mean 'gpt2'?"),
    "a config with wrong values": (("predict", "values.json"), "is refused by transformers"),
    "a config without batches": (("predict", "clip.json"), "makes no batches"),
    "a config of a model without a loss": (("predict", "base.json"), "describes 'BertModel'"),
    "a config's size of another kind": (
        ("predict", "gpt.json", "--image-size", 8), "use tokens"),
    "an unknown value": (("predict", "plain-mlp", "--precision", "fp23"), "precision='fp23'"),
    "no number": (("predict", "plain-mlp", "--batch-size", "x"), "batch_size='x'"),
    "settings that need others": (
        ("predict", "plain-mlp", "--compile-mode", "max-autotune"), "does nothing with"),
    "an unknown option": (("predict", "plain-mlp", "--bach-size", 3), "--batch-size"),
    "an unknown device": (("predict", "plain-mlp", "--device", "rtx-4061"), "rtx-4060"),
    "no size": (("predict", "plain-mlp", "--memory-limit", "24G"), "memory_limit='24G'"),
    "an unknown flavor": (("export", "plain-mlp", "--flavor", "keras"), "flavor='keras'"),
    "a list for one setting": (("measure", "plain-mlp", "--batch-size", "4,8"), "'4,8'"),
    "a folder as a store": (
        ("sweep", "plain-mlp", "--device", "t4", "--store", "folder"), "is a folder"),
    "a broken store": (
        ("sweep", "plain-mlp", "--device", "t4", "--store", "no.json"), "no store"),
    "a field that is none": (
        ("recommend", "plain-mlp", "--device", "t4", "--allow", "momentum"), "momentum"),
    "no results": (("compare", "gpt.json", "gpt.json"), "which is no result"),
    "an absent file": (("compare", "absent", "gpt.json"), "cannot be read"),
    "a picture of no kind": (
        ("compare", "fine.json", "fine.json", "--picture", "x.docx"), "--picture x.docx"),
    "an unknown notebook": (("notebooks", "99"), "notebook '99' is unknown"),
    "an unknown command": (("predcit",), "predict"),
    "no model": (("predict",), "MODEL"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence_on_stderr_with_status_two(mistake, own, capsys):
    own("mine_bad.py", OWN)
    own("broken.py", "def make(:\n")
    own("raising.py", "{}['x']\n")
    own("ending.py", "raise SystemExit(7)\n")
    own("folder/other.txt", "")
    own("no.json", "{'a': 1}")
    own("list.json", "[1, 2]")
    own("gpt.json", json.dumps(GPT))
    own("odd.json", json.dumps(GPT | {"model_type": "gpt-2"}))
    own("values.json", json.dumps(GPT | {"n_layer": "many"}))
    own("clip.json", json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))
    own("base.json", json.dumps(BERT | {"architectures": ["BertModel"]}))
    saved(own("fine.json", ""))

    words, said = MISTAKES[mistake]
    done = run(*words)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert len(re.findall("^Error: ", done.stderr, re.MULTILINE)) == 1


def test_ctrl_c_ends_a_command_with_its_own_status(asked, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "predict", interrupted)
    done = run("predict", "plain-mlp")
    assert (done.exit_code, done.stderr) == (ExitCode.INTERRUPTED, "Interrupted.\n")


def test_the_help_names_the_policies_and_the_exit_codes():
    assert all(
        name in " ".join(run("predict", "--help").stdout.split()) for name in PRESET_POLICIES
    )
    assert "Exit codes: 0 yes, 1 no" in run("--help").stdout
    assert memlab.__version__ in run("--version").stdout


def test_a_missing_package_ends_a_command_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    done = run("predict", "llama-tiny", "--adapter", "lora", "--base", "nf4", "--device", "t4")
    assert done.exit_code == ExitCode.WRONG_USE
    assert "needs peft, which is not installed; run: pip install 'memlab[finetune]'" in done.output
