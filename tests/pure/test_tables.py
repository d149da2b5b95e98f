"""How a result, a report and a workload show themselves in a notebook: as small plain tables."""

import copy
import dataclasses
import functools
import pickle
import re

import pytest
import torch
from torch import nn

import memlab
from memlab import Outcome, StepConfig, StepResult, VerifyReport, Workload, workloads
from memlab._util.tables import columns_table, facts_table
from memlab.errors import ConfigError
from memlab.result import Source
from memlab.store.frames import ResultList
from memlab.trace import Category
from tests.panel_parts import make_result

MIB = 2**20


def facts_of(shown):
    """Return the rows of a table of facts, as a person reads them, and its title under ""."""
    page = shown._repr_html_()
    title = re.search(r"<caption[^>]*>(.*?)</caption>", page).group(1)
    rows = re.findall(r"<tr><th[^>]*>(.*?)</th><td[^>]*>(.*?)</td></tr>", page)
    return {"": title, **dict(rows)}


def predicted_result(**changes):
    values = {
        "source": Source.PREDICTED,
        "device": "h200",
        "versions": {"torch": "2.12.0"},
        "peak_reserved_bytes": 3 * MIB,
        "uncertainty": {"peak_allocated_bytes": 0.01, "step_seconds": 0.2},
    }
    return make_result(**{**values, **changes})


REPORT = VerifyReport(
    ok=True,
    why="largest relative error 1.2e-07 in h.0.mlp",
    max_relative_error=1.2e-7,
    global_relative_error=3e-8,
    worst_parameter="h.0.mlp",
    tolerance=1e-5,
    bitwise=True,
    buffers_equal=True,
    same_as_full_batch="yes",
    num_updates=3,
)


def shown_ones():
    return [make_result(), predicted_result(), REPORT, workloads.get("gpt-small")]


def test_every_text_of_a_table_is_escaped():
    assert facts_table("<b>", {"<i>": "a & b"}) == (
        "<table><caption style='text-align:left'>&lt;b&gt;</caption>"
        "<tr><th scope='row' style='text-align:left'>&lt;i&gt;</th>"
        "<td style='text-align:left'>a &amp; b</td></tr></table>"
    )
    assert "&lt;u&gt;" in columns_table(("<u>",), [("x",)])
    assert "&lt;u&gt;" in columns_table(("x",), [("<u>",)])
    # what is empty is left out
    assert "nothing" not in facts_table("title", {"nothing": "", "something": "1"})
    assert columns_table(("a", "b"), []) == ""


@pytest.mark.parametrize("number", range(4))
def test_a_table_has_no_colours_of_its_own_so_it_reads_on_light_and_dark(number):
    page = shown_ones()[number]._repr_html_()
    assert set(re.findall(r"style='([^']*)'", page)) == {"text-align:left"}
    assert "class=" not in page


def test_a_number_says_whether_it_was_measured_and_which_bytes_it_counts():
    by_category = {Category.PARAMETERS: MIB, Category.ACTIVATIONS: 2 * MIB, Category.INPUTS: 0}
    facts = facts_of(make_result(peak=3 * MIB, peak_by_category=by_category, loss=2.5))
    assert facts[""] == "tiny, measured on cpu"
    assert facts["peak allocated"] == "3.00 MiB measured"
    assert facts["of which"] == "activations 2.00 MiB, parameters 1.00 MiB"
    assert facts["peak reserved"] == "not measured"
    assert facts["time per step"] == "500 ms measured"
    assert facts["loss"] == "2.5000 measured"


def test_a_predicted_number_says_for_what_device_and_how_sure_it_is():
    facts = facts_of(predicted_result())
    assert facts[""] == "tiny, predicted for h200, torch 2.12.0"
    assert facts["peak allocated"] == "1.00 MiB predicted +-1 %"
    assert facts["peak reserved"] == "3.00 MiB predicted"
    assert facts["time per step"] == "500 ms predicted +-20 %"
    assert facts["loss"] == "not predicted"
    recorded = make_result(source=Source.RECORDED, device="amd-epyc, recorded")
    assert facts_of(recorded)[""] == "tiny, recorded on amd-epyc"


def test_a_run_without_numbers_is_its_outcome_and_the_reason():
    values = {"peak": None, "step_seconds": None, "message": "stopped"}
    facts = facts_of(make_result(Outcome.CANCELLED, **values))
    assert list(facts) == ["", "outcome", "message", "settings"]
    assert facts["outcome"] == "cancelled"


def test_a_limit_is_shown_with_whether_the_step_fits():
    fits = make_result().against_limit("4MiB")
    assert facts_of(fits)["memory limit"] == "4.00 MiB: fits"
    assert facts_of(make_result().against_limit("1KiB"))["memory limit"].endswith("does not fit")
    close = predicted_result(peak_reserved_bytes=None).against_limit(int(1.005 * MIB))
    assert facts_of(close)["memory limit"].endswith("too close to say")


def test_a_report_says_what_was_compared():
    facts = facts_of(REPORT)
    assert facts[""] == "gradients same"
    assert facts["why"] == REPORT.why
    assert facts["largest relative error of one gradient"] == "1.2e-07 in h.0.mlp, measured"
    assert facts["relative error of all gradients"] == "3.0e-08 measured"
    assert facts["error that is allowed"] == "1.0e-05"
    assert facts["same bits as without the technique"] == "yes"
    assert facts["same gradient as the undivided batch"] == "yes"
    assert facts["updates that were compared"] == "3"
    report = dataclasses.replace(REPORT, device="cuda:0")
    assert facts_of(report)["device"] == "cuda:0"
    assert str(report).startswith("gradients same on cuda:0: largest")
    assert str(REPORT).startswith("gradients same: largest")
    failed = VerifyReport(ok=False, why="it <failed>", outcome=Outcome.FAILED)
    assert facts_of(failed) == {"": "gradients not checked (failed)", "why": "it &lt;failed&gt;"}


def refuse(*_):
    raise AssertionError("a table builds nothing and runs nothing")


def test_a_workload_shows_its_functions_and_calls_none_of_them():
    own = Workload(name="<own>", build_model=refuse, make_batch=refuse, compute_loss=refuse)
    facts = facts_of(own)
    assert facts[""] == "workload &lt;own&gt;"
    assert facts["model"].startswith("refuse of ")
    assert facts["loss"].endswith("a mean over the samples")
    assert facts["samples"] == "the entries along dim 0"

    counted = dataclasses.replace(
        own, num_loss_terms=refuse, count_samples=refuse, split_batch=refuse
    )
    assert "num_loss_terms" in facts_of(counted)["loss"]
    assert facts_of(counted)["samples"].startswith("count_samples: refuse of")
    assert facts_of(counted)["micro-batches"].startswith("split_batch: refuse of")

    facts = facts_of(workloads.get("gpt-small", num_layers=2))  # one of the zoo shows its sizes
    assert "Gpt.build of" in facts["model"]
    assert "num_layers=2" in facts["model"]
    assert "sequence_length=128" in facts["batch"]

    module = nn.Linear(2, 1)
    module.__deepcopy__ = refuse
    batch = torch.zeros(2, 2), torch.zeros(2, 1)
    shown = facts_of(Workload.from_module(module, batch, nn.functional.mse_loss))
    assert shown[""] == "workload Linear"
    assert shown["model"] == "Workload.from_module.copy_of_module of memlab.workload"


class Odd:
    """A function whose attributes and text raise, as those of a person's own class may."""

    def __call__(self, *_):
        refuse()

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError("repr")


def test_a_function_that_cannot_be_described_does_not_break_the_table():
    odd = Workload(name="odd", build_model=Odd(), make_batch=Odd(), compute_loss=refuse)
    assert facts_of(odd)["model"].startswith("&lt;Odd")
    part = dataclasses.replace(odd, make_batch=functools.partial(refuse, Odd(), size=Odd()))
    assert facts_of(part)["batch"].startswith("refuse of ")


def test_texts_and_pickles_are_those_of_before():
    for value in (make_result(), REPORT):
        again = pickle.loads(pickle.dumps(value))
        assert repr(again) == repr(value)
        assert again._repr_html_() == value._repr_html_()
        assert copy.copy(value)._repr_html_() == value._repr_html_()
    assert repr(REPORT).startswith("VerifyReport(ok=True, why=")
    assert repr(workloads.get("gpt-small")).startswith("Workload(name='gpt-small', build_model=")
    result = make_result(config=StepConfig(batch_size=2))
    assert repr(result) == str(result)
    assert StepResult.from_dict(result.to_dict())._repr_html_() == result._repr_html_()


def found(**fields):
    fields = {"workload_name": "mine", "device": "t4", "peak_allocated_bytes": 3 * 2**20} | fields
    config = StepConfig(**fields.pop("config", {}))
    how = {"outcome": Outcome.OK, "message": "", "source": Source.PREDICTED, "config": config}
    return StepResult(**how, **fields)


def test_a_table_shows_what_differs_with_units_and_uncertainty():
    rows = [
        found(config={"batch_size": 4}, uncertainty={"peak_allocated_bytes": 0.02}),
        found(config={"batch_size": 16, "memory_budget": 0.5}, step_seconds=0.25),
    ]
    table = memlab.table(rows)
    assert table.caption == "mine, predicted, t4"
    assert table.heads == ("batch size", "memory budget", "peak allocated", "step time")
    assert table.rows == (("4", "1", "3.00 MiB +-2 %", ""), ("16", "0.5", "3.00 MiB", "250 ms"))
    assert str(ResultList([found()])).splitlines()[-1] == "3.00 MiB"
    assert str(ResultList()) == "[]"

    # a step that did not run has no other format
    rows = [found(parameter_formats=("float32",)), found(peak_allocated_bytes=None)]
    assert "precision" not in memlab.table(rows).heads
    rows[1] = found(parameter_formats=("bfloat16",))
    assert [row[0] for row in memlab.table(rows).rows] == ["fp32", "as built: bfloat16"]


def test_of_notes_that_differ_in_their_numbers_the_last_stands_with_its_row():
    said = "% was timed beside other programs"
    rows = [found(notes=(f"{share} {said}", "It was fp32.")) for share in (93, 93, 100)]
    last = f"row 3 (other numbers in row 1, row 2): 100 {said}"
    assert memlab.table(rows).notes == (last, "It was fp32.")
    assert memlab.table(rows)._repr_html_().count("beside other programs") == 1
    last = f"half (other numbers in plain): 100 {said}"
    assert memlab.table({"plain": rows[0], "half": rows[2]}).notes[0] == last


def of_rate(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


@pytest.mark.parametrize(
    "made",
    [
        [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.2)],
        [of_rate(0.1), of_rate(0.2)],
    ],
)
def test_functions_of_one_name_are_told_apart(made):
    configs = [StepConfig(optimizer=function) for function in made]
    assert len({repr(config) for config in configs}) == 2
    assert configs[0].to_dict() == StepConfig(**configs[0].to_dict()).to_dict()
    table = memlab.table([found(config={"optimizer": function}) for function in made])
    assert table.heads[0] == "optimizer"
    assert "optimizer" not in table.caption
    for own in (of_rate(nn.Linear(2, 2)), functools.partial(of_rate, object())):
        assert "0x" not in repr(StepConfig(optimizer=own)), "an address is another in each process"


def test_an_outcome_that_is_not_ok_brings_its_sentence():
    failed = dataclasses.replace(
        found(), outcome=Outcome.OUT_OF_MEMORY, message="it needs more", peak_allocated_bytes=None
    )
    table = memlab.table({"plain": found(), "other": failed})
    assert table.heads == ("", "outcome", "peak allocated", "message")
    assert table.rows[0] == ("plain", "ok", "3.00 MiB", "")
    assert table.rows[1] == ("other", "out_of_memory", "", "it needs more")


def test_no_number_is_hard_to_read_or_zero_where_it_is_not():
    rows = [
        {"n": 2.5, "peak_activations_bytes": 2**20, "time_error": -0.02, "same": True, "x": None}
    ]
    table = memlab.table(rows)  # units by the ends of the names, as in a frame
    assert table.heads == ("n", "activations at the peak", "time error", "same", "x")
    assert table.rows == (("2.5", "1.00 MiB", "-2.00 %", "yes", ""),)
    row = {"n": 123456.7, "max_relative_error": 1e-7, "zero_error": 0.0, "step_seconds": 2e-8}
    small = {"n": 1e-9, "max_relative_error": -1e-5, "zero_error": -0.0, "step_seconds": 0.0}
    assert memlab.table([row, small]).rows == (
        ("123,457", "+1e-05 %", "+0.00 %", "0.02 us"),
        ("1e-09", "-0.001 %", "+0.00 %", "0 us"),
    )


@pytest.mark.parametrize(
    "rows", [3, [3], "text", [found(), {}], [{}, found()], [None], range(10**12)], ids=repr
)
def test_what_is_no_row_or_column_is_named(rows):
    with pytest.raises(ConfigError, match="pass"):
        memlab.table(rows)
    with pytest.raises(ConfigError, match="columns hold 'nope'; allowed are workload_name"):
        memlab.table([found()], ["nope"])
    with pytest.raises(ConfigError, match="is no list of names"):
        memlab.table([{"a": 1}], columns=range(10**12))


def test_the_repr_of_a_config_is_code_with_what_differs_from_the_default():
    config = StepConfig(batch_size=4, precision="bf16-mixed", max_grad_norm=1.0)
    assert repr(config) == "StepConfig(batch_size=4, precision='bf16-mixed', max_grad_norm=1.0)"
    assert eval(repr(config)) == config
