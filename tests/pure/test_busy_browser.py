"""What the benchmark of the browser tests makes of the report of pytest."""

from benchmarks import busy_browser

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_fine"/>
<testcase classname="tests.a" name="test_left_out"><skipped message="no browser"/></testcase>
<testcase classname="tests.a" name="test_wrong"><failure message="1 is 2&#10;more"/></testcase>
<testcase classname="tests.b" name="test_unready"><error message="did not happen"/></testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_are_told_by_test_with_what_was_said_first():
    found = busy_browser.outcomes(REPORT)
    assert found == {
        "tests": 4,
        "failures": {
            "tests.a::test_wrong": "1 is 2",
            "tests.b::test_unready": "did not happen",
        },
    }


def test_runs_are_added_up_by_test():
    wrong = {"busy": 8, "seconds": 1.0, **busy_browser.outcomes(REPORT)}
    fine = {"busy": 8, "seconds": 2.0, "tests": 4, "failures": {}}
    again = {**fine, "failures": {"tests.b::test_unready": "something else"}}
    assert [row["failed"] for row in busy_browser.rows_of_runs([wrong, fine])] == [2, 0]
    assert busy_browser.rows_of_failures([fine, fine]) == []
    assert busy_browser.rows_of_failures([wrong, fine, again]) == [
        {"test": "tests.b::test_unready", "failed": 2, "of": 3, "last": "something else"},
        {"test": "tests.a::test_wrong", "failed": 1, "of": 3, "last": "1 is 2"},
    ]


def test_busy_processes_end_with_the_block():
    with busy_browser.busy(2) as working:
        assert [process.poll() for process in working] == [None, None]
    assert all(process.poll() is not None for process in working)
