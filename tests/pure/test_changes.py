"""`memlab.compare`: what changed between two sets of results, from every kind of source."""

import dataclasses
import json

import pytest

import memlab
from memlab import MemlabError, StepConfig
from memlab._util.units import KIB, MIB
from memlab.figures.searches import MOST_ROWS
from memlab.store.compare import MEMORY_TOLERANCE, TIME_TOLERANCE, CostVerdict
from memlab.store.database import write
from tests.store_parts import a_fault, a_result, a_run, a_script_run, a_stage

HERE = {"memlab": "0.1.0", "torch": "2.13.0", "device_name": "a processor", "threads": "2"}

COLUMNS = "workload_name,device,source,outcome,batch_size,step_seconds,peak_allocated_bytes"


def a_step(times=(0.5, 0.5, 0.5), **fields):
    """Return a measured step with these repeats."""
    median = sorted(times)[len(times) // 2] if times else None
    given = {"step_seconds": median, "step_seconds_all": tuple(times), "versions": HERE, **fields}
    return a_result(**given)


def a_peak(nbytes, **fields):
    return a_step(peak_allocated_bytes=nbytes, peak_by_category={"parameters": nbytes}, **fields)


def verdict(old, new, **tolerances):
    (change,) = memlab.compare(old, new, **tolerances).changes
    return change.verdict


# bytes


def test_a_peak_that_rises_beyond_the_tolerance_is_worse_and_one_within_it_is_not():
    plain = a_peak(MIB)
    just_within = a_peak(int(MIB * (1 + MEMORY_TOLERANCE)))
    assert verdict(plain, plain) is CostVerdict.SAME
    assert verdict(plain, just_within) is CostVerdict.SAME
    assert verdict(plain, a_peak(MIB + MIB // 100)) is CostVerdict.WORSE
    assert verdict(a_peak(MIB + MIB // 100), plain) is CostVerdict.BETTER
    assert verdict(plain, a_peak(MIB + MIB // 100), memory_tolerance=0.02) is CostVerdict.SAME
    assert verdict(plain, a_peak(MIB + 1), memory_tolerance=0.0) is CostVerdict.WORSE
    (change,) = memlab.compare(a_peak(0), a_peak(MIB)).changes
    assert (change.verdict, change.reasons) == (CostVerdict.WORSE, ("peak allocated rose from 0",))
    # better time does not pay for it
    (change,) = memlab.compare(plain, a_peak(2 * MIB, times=(0.1, 0.1, 0.1))).changes
    assert change.verdict is CostVerdict.WORSE
    assert change.reasons == ("peak allocated +100.0 %", "time per step -80.0 %")


def test_reserved_bytes_are_judged_by_themselves():
    old = a_peak(MIB, device="cuda:0", peak_reserved_bytes=4 * MIB)
    new = a_peak(MIB, device="cuda:0", peak_reserved_bytes=6 * MIB)
    (change,) = memlab.compare(old, new).changes
    assert change.reasons == ("peak reserved +50.0 %",)
    assert change.costs()["peak allocated"] == "1.00 MiB -> 1.00 MiB (+0.00 %)"


# time


def test_a_step_is_slower_only_if_its_fastest_repeat_is_slower_too():
    quiet = a_step((0.50, 0.50, 0.51))
    assert verdict(quiet, a_step((0.70, 0.70, 0.71))) is CostVerdict.WORSE
    assert verdict(quiet, a_step((0.50, 0.90, 0.95))) is CostVerdict.SAME  # a busy while
    assert verdict(a_step((0.70, 0.70, 0.71)), quiet) is CostVerdict.BETTER
    assert verdict(a_step((0.50, 0.90, 0.95)), quiet) is CostVerdict.SAME
    # both are 30 % slower in median and in the fastest repeat; the second is within its noise
    assert verdict(a_step((0.50, 0.50, 0.50)), a_step((0.65, 0.65, 0.65))) is CostVerdict.WORSE
    assert verdict(a_step((0.50, 0.60, 0.70)), a_step((0.65, 0.78, 0.90))) is CostVerdict.SAME


def test_times_of_another_processor_are_not_judged_and_it_is_said():
    slow = a_step((2.0, 2.0, 2.0), versions={**HERE, "device_name": "an old processor"})
    found = memlab.compare(a_step(), slow)
    assert found.ok
    assert found.notes == (
        "Other processor or card: a processor in old, an old processor in new.",
        "Times of another processor, card or number of threads were not judged.",
    )
    assert verdict(a_step(), a_step((2.0, 2.0, 2.0))) is CostVerdict.WORSE


def test_the_uncertainty_of_a_predicted_time_counts_for_a_cpu_and_not_for_a_card():
    def predicted(seconds, **fields):
        wide = {"step_seconds": 0.3}
        return a_step((), step_seconds=seconds, source="predicted", uncertainty=wide, **fields)

    card = {"device": "t4", "versions": {"torch": "2.13.0", "device_name": "Tesla T4"}}
    assert verdict(predicted(1.0), predicted(1.4)) is CostVerdict.SAME
    assert verdict(predicted(1.0), predicted(1.6)) is CostVerdict.WORSE
    assert verdict(predicted(1.0, **card), predicted(1.4, **card)) is CostVerdict.WORSE


def test_a_time_that_only_one_side_knows_is_said():
    (change,) = memlab.compare(a_step(), a_step((), step_seconds=None)).changes
    assert change.not_judged == ("time per step is not known in new",)
    assert change.costs()["time per step"] == "500 ms -> not known"


# outcomes


def test_a_step_that_runs_or_fits_no_more_is_worse():
    fine = a_step()
    out = a_step(outcome="out_of_memory", message="512 KiB more were asked for")
    (change,) = memlab.compare(fine, out).changes
    assert change.verdict is CostVerdict.WORSE
    assert change.reasons == ("out_of_memory now, was ok: 512 KiB more were asked for",)
    assert verdict(out, fine) is CostVerdict.BETTER

    limit = {"memory_limit_bytes": KIB}
    assert verdict(a_step(**limit, fits=True), a_step(**limit, fits=False)) is CostVerdict.WORSE


# matching


def test_a_step_that_runs_on_neither_side_is_not_compared():
    failed = a_step((), outcome=memlab.Outcome.FAILED, message="no", peak_allocated_bytes=None)
    found = memlab.compare(failed, failed)
    assert (found.ok, found.compared, found.worse) == (False, (), ())
    assert "it ran on neither side: failed in old, failed in new" in str(found)


def test_settings_of_one_side_are_listed_and_not_judged():
    small, large = a_step(), a_step(config=StepConfig(batch_size=64))
    found = memlab.compare([small, large], [small, a_step(workload_name="<other>")])
    assert [cost.config.batch_size for cost in found.only_old] == [64]
    assert [cost.workload_name for cost in found.only_new] == ["<other>"]
    assert found.ok
    text = str(found)
    assert "only in old: mine on cpu (measured), batch_size=64" in text
    assert "only in new: <other> on cpu (measured), batch_size=8" in text
    assert "only in old" in found._repr_html_()
    assert "<other>" not in found._repr_html_()
    assert "&lt;other&gt;" in found._repr_html_()
    assert list(found.frame()["verdict"]) == ["same", "only in old", "only in new"]


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "cuda:0"},
        {"source": "predicted"},
        {"workload_name": "other"},
        {"memory_limit_bytes": MIB},
        {"config": StepConfig(accumulation_steps=2)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_differs_is_not_compared_and_nothing_compared_is_not_ok(fields):
    found = memlab.compare(a_step(), a_step(**fields))
    assert (found.changes, found.ok) == ((), False)
    assert "No setting is on both sides" in str(found)
    assert (len(found.only_old), len(found.only_new)) == (1, 1)


def test_other_devices_and_versions_are_said():
    newer = {**HERE, "torch": "2.14.0"}
    found = memlab.compare([a_step()], [a_step(versions=newer), a_step(device="cuda:0")])
    assert found.notes == (
        "Other devices: cpu (measured) in old, cpu (measured), cuda:0 (measured) in new.",
        "Other torch: 2.13.0 in old, 2.14.0 in new.",
    )


def test_of_several_results_of_a_setting_the_last_one_counts_and_it_is_said():
    found = memlab.compare([a_peak(MIB), a_peak(2 * MIB)], a_peak(2 * MIB))
    assert found.ok
    assert found.notes == ("Results in old that a later one of the same setting replaces: 1.",)


# where results come from


@pytest.fixture
def results():
    """Return results whose settings have values of every kind."""
    configs = [
        StepConfig(),
        StepConfig(batch_size=4, max_grad_norm=0.5, compile=True, precision="bf16-mixed"),
        StepConfig(checkpointing="blocks", checkpoint_policy="aten.mm, aten.addmm"),
    ]
    limited = {"memory_limit_bytes": 2 * MIB, "fits": True}
    return [a_step(config=config) for config in configs] + [a_step(device="cuda:0", **limited)]


def as_json(results, folder):
    path = folder / "results.json"
    path.write_text(json.dumps({"results": [result.to_dict() for result in results]}))
    return path


def as_list(results, folder):
    path = folder / "list.txt"  # whatever its name
    path.write_text(json.dumps([result.to_dict() for result in results]))
    return str(path)


def as_store(results, folder):
    path = folder / "results.sqlite3"
    for number, result in enumerate(results):
        assert write(a_run(result=result, stored_at=float(number)), path) is None
    return path


def as_table(results, folder):
    return memlab.results(path=as_store(results, folder))


def as_csv(results, folder):
    path = folder / "results.csv"
    as_table(results, folder).to_csv(path, index=False)
    return path


def as_records(results, folder):
    path = folder / "records.json"
    as_table(results, folder).to_json(path, orient="records", date_format="iso")
    return path


@pytest.mark.parametrize("write_as", [as_json, as_list, as_store, as_table, as_csv, as_records])
def test_every_kind_of_source_says_the_same(write_as, results, tmp_path):
    found = memlab.compare(results, write_as(results, tmp_path))
    assert found.ok
    assert (len(found.changes), found.only_old, found.only_new) == (4, (), ())
    assert {one.new.config for one in found.changes} == {result.config for result in results}
    assert all(one.new.memory_limit_bytes == one.old.memory_limit_bytes for one in found.changes)
    assert all(one.new.fits is one.old.fits for one in found.changes)

    one = tmp_path / "one.json"
    one.write_text(json.dumps(results[0].to_dict()))
    assert memlab.compare(one, results[0]).ok
    worse = [dataclasses.replace(result, peak_allocated_bytes=MIB) for result in results]
    assert len(memlab.compare(results, write_as(worse, tmp_path)).worse) == 4


# bad input


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "holds 1, which is no result"),
        ('{"model_type": "gpt2"}', "which is no result"),
        ('{"results": 3}', "has no list of results"),
        ('{"outcome": "ok", "config": {}}', "holds a result that `--json` did not write"),
        ('{"outcome": "ok", "config": null, "stages": []}', "holds a result that `--json` did not"),
        (json.dumps(a_script_run().to_dict()), "holds a run, which has stages; allowed is the"),
        (json.dumps([a_script_run().to_dict()]), "holds a run, which has stages; allowed is the"),
        ('{"outcome": "ok", "batch_size": 4}', "holds a row that is no result"),
        (f"{COLUMNS}\na,cpu,measured,ok,1,inf,5\n", "inf is not a number from 0"),
        (f"{COLUMNS}\na,cpu,measured,ok,1,0.5,-5\n", "-5 is not a number from 0"),
        ("a,b\n1,2\n", "holds a row that is no result (it has no 'workload_name')"),
        ("workload_name,device,source,batch_size\nm,cpu,measured,x\n", "a row that is no result"),
        (b"\xff\xfe\x00", "is no text and no store"),
        (b"SQLite format 3\0 and then nothing", "is damaged or no store"),
    ],
)
def test_a_file_that_holds_no_results_is_said(content, said, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MemlabError) as raised:
        memlab.compare(a_step(), path)
    assert str(raised.value).startswith("new")
    assert said in str(raised.value)


@pytest.mark.parametrize("given", [None, 3, b"bytes", {"a": 1}, [a_result(), 1], "no such file"])
def test_what_is_no_result_is_refused_by_name(given):
    with pytest.raises(MemlabError, match=r"^old.*old is a StepResult, several"):
        memlab.compare(given, a_step())


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), "5 %"])
def test_a_tolerance_is_a_share(tolerance):
    with pytest.raises(MemlabError, match="time_tolerance"):
        memlab.compare(a_step(), a_step(), time_tolerance=tolerance)
    assert memlab.compare(a_step(), a_step()).time_tolerance == TIME_TOLERANCE


# two runs of a script


def changed(**fields):
    """Compare the run of a script with one that differs in these fields."""
    return memlab.compare(a_script_run(), a_script_run(**fields))


def verdicts_of(found):
    return {one.new.config: str(one.verdict) for one in found.changes}


def test_the_stages_of_two_runs_are_judged_as_steps_are():
    stages = (a_stage("step", 4 * MIB), a_stage("evaluation"), a_stage("saving", MIB))
    found = changed(stages=stages)
    assert verdicts_of(found) == {
        "the whole run": "worse", "step": "worse", "evaluation": "same",
    }  # fmt: skip
    assert not found.ok
    assert [one.config for one in found.only_new] == ["saving"]
    assert found.categories == {"activations": (2 * MIB, 3 * MIB)}
    assert "worse: train.py on t4 (predicted), step: peak allocated +33.3 %" in str(found)
    assert "activations 2.00 MiB 3.00 MiB +1.00 MiB" in " ".join(str(found).split())
    assert memlab.compare(a_script_run(stages=stages), a_script_run()).ok
    assert memlab.plots.to_png(memlab.plots.cost_changes(found))


def test_two_cards_are_compared_with_the_verdict_for_each():
    there = {"torch": "2.13.0", "device_name": "GeForce"}
    other = {"device": "rtx-3050", "versions": there, "memory_limit_bytes": 4 * MIB}
    fine = changed(**other, step_seconds=5.0)
    assert fine.ok, "times of two cards are not judged"
    assert "Other devices: t4 (predicted) in old, rtx-3050 (predicted) in new." in fine.notes
    small = changed(**other, stages=(a_stage("step", fits=False), a_stage("evaluation")))
    assert verdicts_of(small)["step"] == "worse"
    assert not small.ok
    assert "new: train.py on rtx-3050" in str(small)
    assert "step does not fit 4.00 MiB" in str(small)


def test_lines_are_the_same_where_the_same_stands_in_them():
    old = a_script_run()
    moved = [dataclasses.replace(held, line=held.line + 40) for held in old.lines]
    assert changed(lines=tuple(moved)).lines == ()
    more = dataclasses.replace(moved[1], nbytes=5 * MIB)
    (found,) = changed(lines=(moved[0], more)).lines
    assert (found.line, found.old_bytes, found.new_bytes) == (
        "train.py:49: loss = f(x)", 2 * MIB, 5 * MIB,
    )  # fmt: skip
    other = dataclasses.replace(moved[1], text="loss = g(x)")
    gone, came = sorted(changed(lines=(moved[0], other)).lines, key=lambda each: each.new_bytes)
    assert (gone.new_bytes, came.old_bytes) == (0, 0)
    renamed = [dataclasses.replace(held, file="/here/changed.py") for held in moved]
    assert changed(workload_name="changed.py", lines=tuple(renamed)).lines == ()
    assert len(changed(lines=tuple(renamed)).lines) == 4, "lines of a file that is no script"


def test_what_is_newly_wrong_is_no_success_and_what_moved_is_not_new():
    old, moved, other = a_fault(), a_fault(line=70), a_fault(text="other(x)")
    found = memlab.compare(a_script_run(faults=(old,)), a_script_run(faults=(moved, other)))
    assert (found.new_faults, found.gone_faults, found.worse) == ((other,), (), ())
    assert not found.ok
    assert f"only in new: {other}" in str(found)
    assert (
        "3 same (the same within 0.5 % of memory and 20 % of time); faults only in new: 1"
        in str(found)
    )
    back = memlab.compare(a_script_run(faults=(moved, other)), a_script_run(faults=(old,)))
    assert (back.gone_faults, back.ok) == ((other,), True)


def test_a_run_that_ran_out_of_memory_is_worse_and_its_stages_are_not_compared():
    found = changed(outcome="out_of_memory", message="no room", stages=(a_stage("step", MIB),))
    assert verdicts_of(found) == {"the whole run": "worse"}
    assert "out_of_memory now, was ok: no room" in str(found)
    failed = {"outcome": "failed", "message": "no such file", "stages": (), "timeline": None}
    neither = memlab.compare(a_script_run(**failed), a_script_run(**failed))
    assert (neither.compared, neither.ok) == ((), False)


def test_a_run_comes_back_from_its_json_and_says_the_same_in_html(tmp_path):
    run = a_script_run(faults=(a_fault(),))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run.to_dict()))
    found = memlab.compare(path, dataclasses.replace(run, lines=run.lines[:1]))
    assert found.ok
    assert found.old.to_dict() == run.to_dict()
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["lines"][0]["new_bytes"] == 0
    assert "train.py:9: loss = f(x)" in found._repr_html_()
    with pytest.raises(MemlabError, match=r"old=.*holds a run, which has stages"):
        memlab.compare(run, a_step())
    spoiled = {**run.to_dict(), "lines": [{**run.to_dict()["lines"][0], "nbytes": "x"}]}
    path.write_text(json.dumps(spoiled))
    with pytest.raises(MemlabError, match="nbytes"):
        memlab.compare(path, run)


# what it looks like


def test_the_json_of_a_comparison_is_plain():
    found = memlab.compare([a_step(), a_step(device="t4")], a_peak(MIB))
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["ok"] is False
    worse, only_old = data["settings"]
    assert (worse["verdict"], worse["old_peak_allocated_bytes"]) == ("worse", KIB)
    assert worse["reasons"] == ["peak allocated +102300.0 %"]
    assert (only_old["verdict"], only_old["new_outcome"]) == ("only in old", None)


def test_the_picture_shows_each_setting_and_both_costs():
    old = [a_step(config=StepConfig(batch_size=size)) for size in range(1, MOST_ROWS + 3)]
    new = [a_step(config=one.config, times=(0.8, 0.8, 0.8)) for one in old]
    figure = memlab.plots.cost_changes(memlab.compare(old, new))
    memory, time = figure.axes
    assert len(memory.get_yticks()) == MOST_ROWS
    said = {text.get_text() for text in time.texts}
    assert said == {"+60.0 %"}
    assert {text.get_text() for text in memory.texts} == {"+0.00 %"}
    assert {line.get_marker() for line in time.lines} == {"None", "^"}  # "None": a line
    assert {line.get_marker() for line in memory.lines} == {"None", "o"}
    assert any("2 more settings" in text.get_text() for text in figure.texts)
    assert memlab.plots.to_png(figure)

    empty = memlab.plots.cost_changes(memlab.compare([], []))
    assert [text.get_text() for text in empty.texts] == ["Nothing was compared."]
