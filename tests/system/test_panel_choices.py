"""The controls of what else a workload can be made with: another adapter is another workload."""

import dataclasses
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, StepConfig, WorkloadChoices, workloads
from memlab._panel import asked
from memlab._panel.choices import MadeChoices, zoo_options
from memlab._util.units import literal
from memlab.errors import WorkloadError
from memlab.runtime.inspect import inspect_in_process
from memlab.workloads.finetuned import finetune_options
from tests.panel_parts import fields, line, move, until, use


def layers(width=4, bias=True):
    """One linear layer of a width, with a bias or without."""
    if width > 100:
        raise memlab.MemlabError(f"width={width} is above 100")
    return memlab.Workload(
        name=f"layer of width {width}{'' if bias else ' without bias'}",
        build_model=lambda: nn.Linear(width, 2, bias=bias),
        make_batch=lambda n: torch.ones(n, width),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        choices=WorkloadChoices(
            values={"width": width, "bias": bias},
            offered={"width": (4, 8), "bias": (True, False)},
            make_workload=layers,
        ),
    )


@pytest.fixture
def panel(nothing_ahead):
    with closing(memlab.panel(layers(), device="cpu")) as made:
        yield made


def control(panel, name):
    return next(choice for choice in panel._told.form["choices"] if choice["name"] == name)


def labels(panel, name):
    return [value["label"] for value in control(panel, name)["values"]]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"depth": 2}, "has no choice 'depth'; allowed is one of ['width', 'bias']"),
        ({"width": 101}, "width=101 is above 100"),
        ({"width": "wide"}, "TypeError"),
    ],
)
def test_a_choice_that_cannot_be_is_a_sentence(panel, fields, sentence):
    with pytest.raises(WorkloadError) as error:
        layers().chosen(**fields)
    assert sentence in str(error.value)
    with pytest.raises(WorkloadError) as error:
        panel.set(choices=fields)
    assert sentence in str(error.value)
    assert panel.workload.name == "layer of width 4"


def test_a_workload_with_other_functions_is_not_made_anew():
    other = dataclasses.replace(layers(), make_batch=lambda n: torch.zeros(n, 4))
    with pytest.raises(WorkloadError, match="another make_batch"):
        other.chosen(width=8)
    with pytest.raises(WorkloadError, match="it offers none"):
        workloads.get("plain-mlp").chosen(width=8)


def sized(length=8, bias=True, is_named=True, keeps=True):
    """One layer of a length, with a bias or without, which its name says or not."""
    own = partial(sized, is_named=is_named, keeps=keeps)
    kept = {"length": length, "bias": bias} if keeps else {}
    return memlab.Workload(
        name="layer" + ("" if bias or not is_named else " without bias"),
        build_model=lambda: nn.Linear(length, 2, bias=bias),
        make_batch=lambda n: torch.ones(n, length),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        sample_size=memlab.SampleSize(
            name="length", unit="numbers", value=length, offered=(8, 16),
            make_workload=lambda length: own(**{**kept, "length": length}),
        ),
        choices=WorkloadChoices(
            values={"bias": bias}, offered={"bias": (True, False)},
            make_workload=lambda bias: own(**{**kept, "bias": bias}),
        ),
    )  # fmt: skip


def test_a_size_and_choices_keep_one_another():
    assert layers(bias=False).chosen(width=8).name == "layer of width 8 without bias"
    assert layers().chosen().name == layers().name
    found = sized().resized(16).chosen(bias=False)
    assert found.name == "layer without bias, length 16"
    assert found.build_model().weight.shape == (2, 16)
    assert sized().chosen(bias=False).resized(16).name == found.name
    with pytest.raises(WorkloadError, match="another sample_size"):
        sized(keeps=False).resized(16).chosen(bias=False)
    with pytest.raises(WorkloadError, match="gives other choices"):
        sized(keeps=False).chosen(bias=False).resized(16)


def test_choices_that_the_name_does_not_say_are_refused():
    with pytest.raises(WorkloadError, match="another choice the same name"):
        sized(is_named=False).chosen(bias=False)
    listed = layers()
    made = MadeChoices(
        {
            listed.name: listed,
            "layer of width 8": dataclasses.replace(layers(bias=False), name="layer of width 8"),
        }
    )
    with pytest.raises(WorkloadError, match="another choice the same name"):
        made.get(listed, {"width": 8, "bias": True})


def test_a_choice_without_effect_needs_no_name_of_its_own():
    tuned = workloads.finetune("llama-tiny", adapter="ia3")
    assert tuned.chosen(rank=64).name == tuned.name
    made = MadeChoices({tuned.name: tuned})
    assert made.checked(tuned, {"rank": 64}, {}) is tuned
    for wrong in ({"rank": [1]}, {1: 2}, {"rank": {}}, {"targets": [[]]}):
        with pytest.raises(WorkloadError):
            made.checked(tuned, wrong, {})


def test_a_list_of_targets_is_shown_as_the_workload_has_it():
    with closing(memlab.panel(workloads.finetune("llama-tiny"), device="rtx-4060")) as tuned:
        tuned.set(choices={"targets": ["q_proj"]})
        assert fields(tuned)["choices"]["targets"] == ["q_proj"]
        assert ["q_proj"] in [value["value"] for value in control(tuned, "targets")["values"]]
        move(tuned, choices=fields(tuned)["choices"], batch_size=2)  # as the page has it
        assert tuned.workload.choices.values["targets"] == ("q_proj",)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"values": {"width": 1}, "offered": {}}, "allowed are the same names in both"),
        ({"values": {"a width": 1}, "offered": {"a width": (1,)}}, "names of arguments"),
        ({"values": {"width": 1}, "offered": {"width": ()}}, "a tuple of at least one value"),
        ({"values": {}, "offered": {}, "make_workload": 3}, "make_workload=3"),
    ],
)
def test_choices_that_make_no_sense_are_refused(fields, sentence):
    with pytest.raises(WorkloadError) as error:
        WorkloadChoices(**{"make_workload": layers, **fields})
    assert sentence in str(error.value)


@pytest.mark.slow
def test_a_control_changes_the_workload_that_is_predicted(panel):
    assert labels(panel, "width") == ["4", "8"]
    assert labels(panel, "bias") == ["yes", "no"]
    move(panel, choices={"width": 8})
    assert panel.workload.name == "layer of width 8"
    until(lambda: panel.prediction is not None)
    assert panel.prediction.workload_name == "layer of width 8"
    until(lambda: "all 18 parameters are trained" in line(panel, "choices")["text"])
    panel.set(choices={"bias": False})
    assert panel.workload.name == "layer of width 8 without bias"
    panel.set(choices=None)
    assert panel.workload.name == "layer of width 4"


def test_a_value_that_is_not_offered_can_be_set_and_another_workload_has_no_such_row(panel):
    panel.set(choices={"width": 50})
    assert (panel.workload.name, labels(panel, "width")[-1]) == ("layer of width 50", "50")
    panel.set(workload="plain-mlp")
    assert (panel._told.form["choices"], fields(panel)["choices"]) == ([], None)
    panel.set(workload="layer of width 4")
    assert panel.workload.name == "layer of width 4"


def test_choices_that_do_not_go_together_are_explained_with_a_remedy():
    with closing(
        memlab.panel(
            workloads.finetune("llama-tiny", adapter="dora", base="nf4"), device="rtx-4060"
        )
    ) as made:
        made.set(sample_size=256)
        assert "int8" in labels(made, "base")
        move(made, choices={"base": "int8"})
        assert "loses the scales of base=" in line(made, "choices")["text"]
        assert (made.prediction, made._asked.question) == (None, None)
        use(made, "choices")
        assert made.workload.name.endswith("dora of rank 16 on nf4, sequence length 256")
        made.set(choices={"adapter": "prefix"})
        assert control(made, "rank")["disabled"]
        assert not control(made, "base")["disabled"]


def test_the_code_makes_the_choices_on_screen():
    own = layers()
    shown = own.chosen(width=8)
    assert asked.workload_source(shown, {"own": own})[0] == "own.chosen(width=8)"
    tuned = workloads.finetune("llama-tiny", rank=8, targets=("q_proj", "v_proj"), tokens=128)
    call = asked.finetune_source(tuned.chosen(base="nf4").resized(256))
    assert eval(call, {"memlab": memlab}).name == tuned.chosen(base="nf4").resized(256).name
    assert literal("nf4") in call
    held = asked.workload_source(tuned.chosen(rank=4).resized(256), {"tuned": tuned})
    assert held[0] == "tuned.chosen(rank=4).resized(256)"


def test_the_code_asks_why_a_quantized_base_does_not_help_where_there_is_one():
    tuned = workloads.finetune("llama-tiny", tokens=16)
    for workload, is_there in ((tuned, False), (tuned.chosen(base="nf4"), True)):
        config = StepConfig(batch_size=2)
        shown = dict(asked.parts("", workload, config, "t4", "", None, {"own": tuned}))
        found = [code for heading, code in shown.items() if "quantized base" in heading]
        assert bool(found) == is_there
    (call,) = found
    assert call == "print(memlab.compare_base(own.chosen(base='nf4'), config, device='t4'))"


def test_the_code_has_few_lengths_and_says_that_many_are_left_out():
    few = workloads.finetune("llama-tiny", lengths=[8, 16])
    assert eval(asked.finetune_source(few), {"memlab": memlab}).lengths == (8, 16)
    assert few.chosen(rank=4).resized(64).lengths == (8, 16)
    many = workloads.finetune("llama-tiny", lengths=range(1, 1001))
    lines = asked.workload_source(many, {})[1].splitlines()
    assert lines == [
        "# its 1,000 lengths are left out; a step does not depend on them",
        f"workload = {asked.finetune_source(many)}",
    ]
    code = asked.panel_source(many, StepConfig(), "t4", "", {})
    assert code.startswith("memlab.panel(memlab.workloads.finetune('llama-tiny'), ")
    with pytest.raises(MemlabError, match=r"lengths\[1\]=0"):
        workloads.finetune("llama-tiny", lengths=[8, 0])


@pytest.mark.parametrize("field", ["make_batch", "compute_loss", "num_loss_terms"])
@pytest.mark.parametrize(
    ("make", "options_of", "options"),
    [
        (
            lambda: workloads.get("gpt-small", num_layers=1).resized(64),
            zoo_options,
            {"num_layers": 1, "sequence_length": 64},
        ),
        (lambda: workloads.finetune("llama-tiny"), finetune_options, {"model": "llama-tiny"}),
    ],
    ids=["zoo", "finetune"],
)
def test_a_known_workload_with_another_function_is_not_written_as_one_without(
    field, make, options_of, options
):
    known = make()
    assert options_of(known) == options
    assert options_of(dataclasses.replace(known, **{field: lambda *_: None})) is None


@pytest.mark.parametrize(
    "fields", [{"base": "bf16"}, {"base": "nf4"}, {"base": "nf4", "adapter": "dora"}]
)
def test_the_trained_share_is_that_of_peft(fields):
    workload = workloads.finetune("llama-tiny", **fields)
    facts = inspect_in_process(workload, report=lambda _: None)
    model = workload.build_model().to("cpu")
    assert (facts.num_trainable, facts.num_parameters) == model.get_nb_trainable_parameters()
