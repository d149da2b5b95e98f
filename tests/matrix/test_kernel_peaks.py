"""The benchmark of single kernels: its arithmetic, and two sizes of every kernel."""

import pytest

from benchmarks import kernel_peaks

SWEEPS = kernel_peaks.read(kernel_peaks.PEAKS, quick=True)


def name(sweep: list[kernel_peaks.Row]) -> str:
    return " ".join(kernel_peaks.sweep_of(sweep[0])[:3])


def test_the_data_has_59_rows_in_sweeps_by_size() -> None:
    sweeps = kernel_peaks.read(kernel_peaks.PEAKS, quick=False)
    assert sum(map(len, sweeps)) == 59
    for sweep in sweeps:
        sizes = [int(row["x_value"]) for row in sweep]
        assert sizes == sorted(set(sizes))
        assert len(sizes) > 3 or sweep[0]["kernel"] == "rope"


def test_errors_of_peaks_and_of_differences() -> None:
    row = {**SWEEPS[0][0], "peak_allocated_mib": "10"}
    sweep = [row, {**row, "peak_allocated_mib": "30"}]
    found = [{"bytes": mib * 2**20, "operators": [], "seconds": 0.0} for mib in (12, 30)]
    first, second = kernel_peaks.table_of(sweep, found)
    assert (first["error %"], first["of difference %"]) == (pytest.approx(20), None)
    assert (second["off by MiB"], second["of difference %"]) == (0, pytest.approx(-10))
    [line] = kernel_peaks.summary([first, second])
    assert (line["rows"], line["off by MiB"], line["goal"]) == (2, 2, "MISSED")


@pytest.mark.parametrize("sweep", SWEEPS, ids=name)
def test_the_difference_of_two_sizes_is_exact(sweep: list[kernel_peaks.Row]) -> None:
    lines = kernel_peaks.table_of(sweep, [kernel_peaks.predicted(row) for row in sweep])
    assert abs(lines[1]["of difference %"]) <= 100 * kernel_peaks.GOAL
