"""The field's benchmark: no tool is told what was measured, and one bad tool stops no other."""

import json
import textwrap

import pytest

from benchmarks.field import asking, judging, rows
from benchmarks.field.rows import Row, Truth

NUM_ROWS = {"litgpt_table": 35, "kernel_peaks": 59, "iteration_times": 232, "peft_table": 55,
            "litgpt_hub": 26}  # fmt: skip
TOOL = """
    import os, sys, time
    NAME = "odd"
    NEEDS = ()
    MEANS = "nothing"
    OWN_FITS = False
    def answer(setting):
        print("to the screen")
        os.write(1, b"from C\\n")
        if setting["number"] == 1:
            raise ValueError("batch=0")
        if setting["number"] == 2:
            time.sleep(60)
        if setting["number"] == 3:
            os._exit(7)
        return "no such model" if setting["number"] == 4 else {"bytes": 10 * setting["number"]}
"""


def row(size=100, *, fits=True, card=1000, seconds=None, **setting):
    told = {"card": {"bytes": card}, "image": None, "table": "gpu_peaks", **setting}
    return Row(setting=told, truth=Truth(source="s", bytes=size, fits=fits, seconds=seconds))


@pytest.mark.slow  # it waits for one that hangs
def test_a_tool_that_raises_hangs_or_dies_is_said_so_and_the_rest_stands(tmp_path):
    file = tmp_path / "by_odd.py"
    file.write_text(textwrap.dedent(TOOL))
    tool = asking._tool(file)
    settings = [{"number": number} for number in range(6)]
    found = list(asking.answers(tool, settings, tmp_path, limit=10))
    assert [each["number"] for each in found] == list(range(6))
    assert [each.get("bytes") for each in found] == [0, None, None, None, None, 50]
    assert [each.get("cannot") for each in found][1:5] == [
        "ValueError: batch=0", "no answer in 10 s", "its process ended with status 7",
        "no such model",
    ]  # fmt: skip
    assert "from C" in (tmp_path / "by_odd.log").read_text()


def test_a_tool_that_cannot_be_installed_is_said_so(tmp_path):
    tool = asking.Tool(name="none", file=tmp_path / "by_none.py", needs=("./no-such-folder",),
                       means="", own_fits=False)  # fmt: skip
    [said] = asking.answers(tool, [{"number": 0}], tmp_path)
    assert said["cannot"].startswith("not installed: pip install ./no-such-folder: ")


def test_every_file_of_a_tool_says_what_the_table_needs():
    found = asking.tools()
    assert len(found) >= 9
    assert len({tool.name for tool in found}) == len(found)
    assert all("==" in need or need in ("numpy", "pyyaml", "setuptools")
               for tool in found for need in tool.needs)  # fmt: skip
    with pytest.raises(ValueError, match="no tool 'gpt'; there are "):
        asking.tools(["gpt"])


@pytest.mark.parametrize("table", NUM_ROWS)
def test_no_tool_is_told_what_was_measured(table):
    found = rows.every((table,))
    assert len(found) == NUM_ROWS[table]
    assert not any(map(rows.contradiction, found))
    for each in found:
        text = json.dumps(each.setting)
        assert {"GPU RAM", "peak_allocated_mib", "iteration time"}.isdisjoint(
            each.setting["recipe"]
        )
        assert not any(word in text for word in ("GPU RAM", "peak_", "iteration time", "reserved_"))
        assert each.truth.source.startswith("github:")
        assert (each.truth.bytes or each.truth.seconds) is not None or not each.truth.fits
    assert len({each.setting["number"] for each in found}) == len(found)


def test_a_model_is_described_as_its_authors_count_it():
    llama = rows.described("meta-llama/Llama-2-7b-hf")
    assert llama["parameters"] == 6_738_415_616  # its card on the hub
    assert llama["largest_layer_parameters"] == 32000 * 4096
    assert llama["shape"]["intermediate"] == 11008
    falcon = rows.described("tiiuae/falcon-7b")["shape"]
    assert (falcon["kv_heads"], falcon["layers"], falcon["hidden"]) == (1, 32, 4544)


def test_errors_and_verdicts_are_counted_by_hand():
    every = [row(), row(), row(None, fits=False), row(), row()]
    said = {
        0: {"bytes": 110, "seconds": 1.0}, 1: {"bytes": 1001, "seconds": 3.0},  # above the card
        2: {"bytes": 900, "seconds": 2.0}, 3: {"cannot": "no"},
    }  # fmt: skip
    group = judging.Group(title="all", places=(0, 1, 2, 3, 4))
    found = judging.line("tool", group, every, said)
    assert (found["rows"], found["answered"]) == (5, 3)
    assert found["median %"] == pytest.approx((10 + 901) / 2)
    assert found["max %"] == pytest.approx(901)
    assert (found["false fits"], found["false does not fit"]) == (1, 1)
    assert found["s an answer"] == 2.0
    own = {0: {"bytes": 110, "fits": False}}
    assert judging.line("tool", group, every, own)["false does not fit"] == 1


def test_a_time_is_judged_by_the_time_and_a_peak_by_the_peak():
    timed = row(None, seconds=2.0)
    answer = {"bytes": 5, "step_seconds": 1.0}
    assert judging.error(timed, answer, of_time=True) == -0.5
    assert judging.error(timed, answer, of_time=False) is None
    assert judging.error(row(), answer, of_time=True) is None


def test_a_group_has_the_rows_of_its_kind():
    every = [row(), row(image=86), row(table="kernel_peaks"), row(None, seconds=1.0)]
    found = {group.title: group.places for group in judging.groups(every)}
    assert found["all peaks of training"] == (0, 1)
    assert found["convnets"] == (1,)
    assert found["single kernels"] == (2,)
    assert found["time of an update"] == (3,)


@pytest.mark.parametrize(
    ("told", "truth", "why"),
    [
        ({"optimizer": "Nonsense"}, {}, "optimizer='Nonsense'; allowed is one of Adagrad, Adam"),
        ({"batch": 0}, {}, "batch=0"),
        ({"image": 86}, {}, "sequence=384 and image=86"),
        ({"base": "nf4"}, {}, "base='nf4', which is frozen"),
        ({"tensor": 2, "data": 2, "cards": 3}, {}, "cards=3, and 4 ranks"),
        ({}, {"bytes": 100 << 30}, "a peak of 107374182400 bytes on "),
    ],
)
def test_a_row_that_contradicts_itself_is_said_so(told, truth, why):
    usual = rows._setting("mine", 3, rows._card("rtx-3060"), reads=rows.RESERVED, precision="fp32",
                          optimizer="AdamW", batch=4, sequence=384)  # fmt: skip
    plain = Row(setting=usual, truth=Truth(source="s", bytes=1 << 30))
    assert rows.contradiction(plain) == ""
    odd = Row(setting=usual | told, truth=Truth(source="s", **truth))
    assert rows.contradiction(odd).startswith(f"row 3 of mine: {why}")
