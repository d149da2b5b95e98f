"""The calibration of predicted memory: its arithmetic, and that the table is what it writes."""

import pytest

from benchmarks.calibrate_memory import (
    Run,
    coverage,
    errors_left_out,
    half_width,
    line_of,
    table_of,
    weights_of,
)
from memlab.cost_model.cuda_kernels import Workspaces
from memlab.prediction.memory_widths import weights, width_of

NUMBERS = ("peak_allocated_bytes", "peak_reserved_bytes", "needed_bytes")


def run(model: str, none: int, copies: int, measured: int = 100, **caps: int) -> Run:
    """Return a run of which two hypotheses say this, and all others what `NONE` says."""
    peaks = {**dict.fromkeys(Workspaces, none), Workspaces.COPIES: copies}
    given = {"needed": 90, "trained": 0, "failed": 0, **caps}
    return Run(model=model, measured=measured, peaks=peaks, **given)


def test_a_hypothesis_counts_by_its_error_and_a_model_not_by_its_runs() -> None:
    runs = [run("a", 110, 101), run("a", 110, 101), run("b", 110, 101)]
    found = weights_of(runs)
    assert found[Workspaces.COPIES] / found[Workspaces.NONE] == pytest.approx(100)
    assert sum(found.values()) == pytest.approx(1)
    mixed = [run("a", 110, 101)] * 9 + [run("b", 101, 110)]
    assert weights_of(mixed)[Workspaces.COPIES] == pytest.approx(1 / len(Workspaces))


def test_a_model_is_predicted_with_the_weights_of_the_others() -> None:
    # of each model alone, copies are right for a and wrong for b
    runs = [run("a", 150, 101), run("b", 101, 150)]
    assert errors_left_out(runs) == pytest.approx([0.5, 0.5])
    assert [each.error(weights_of(runs)) for each in runs] == pytest.approx([0.5, 0.01])


def test_widths_cover_nine_in_ten() -> None:
    errors = [-0.01 * n for n in range(1, 11)]
    assert half_width(errors) == pytest.approx(0.1)
    assert half_width(errors, 0.5) == pytest.approx(0.06)
    runs = [run("a", 101, 101), run("b", 120, 120)]
    said = coverage(runs, [0.01, 0.2])
    assert said == pytest.approx({"covered %": 50, "width %": 10.5})


def test_what_a_bracket_excludes_is_an_error() -> None:
    assert run("a", 1, 1, needed=90, trained=100, failed=80).needed_error == 0
    assert run("a", 1, 1, needed=110, trained=100, failed=80).needed_error == pytest.approx(0.1)
    assert run("a", 1, 1, needed=80, trained=100, failed=88).needed_error == pytest.approx(0.1)
    assert run("a", 1, 1, needed=80, trained=100, failed=100).needed_error == 0


def test_the_table_has_what_predictions_read() -> None:
    with_convolutions = [run("a", 105, 105), run("b", 103, 103)]
    alone = [Run(model=m, measured=100, peaks={Workspaces.NONE: 101}, needed=90, trained=0,
                 failed=0) for m in "cd"]  # fmt: skip
    table = table_of({"convolutions": with_convolutions, "others": alone})
    assert {Workspaces(name) for name in table["weights"]} == set(Workspaces) == set(weights())
    assert set(table["half_widths"]) == set(NUMBERS)
    assert table["half_widths"]["peak_reserved_bytes"] == {
        "convolutions": {"half_width": 0.05, "runs": 2, "models": 2},
        "others": {"half_width": 0.01, "runs": 2, "models": 2},
    }
    assert line_of("others", alone)["covered %"] == 100


@pytest.mark.parametrize("number", NUMBERS)
def test_the_shipped_table_says_how_sure_each_number_is(number: str) -> None:
    plain, convolutional = (width_of(number, convolutions=each) for each in (False, True))
    assert 0 < plain.half_width <= convolutional.half_width < 0.1
    assert min(plain.runs, convolutional.runs) > 30
