"""The page of `memlab run --html` in Chromium: it asks nobody, its timeline can be read."""

import pytest

from memlab._panel.run_page import run_page
from tests.store_parts import a_fault, a_script_run
from tests.system.browser.pages import NEXT_FRAME, saved_page, violations

SAID = "Loops were ended early <i>."


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    file = tmp_path_factory.mktemp("pages") / "run.html"
    file.write_text(run_page(a_script_run(faults=(a_fault(),), notes=(SAID,))), encoding="utf-8")
    return file


@pytest.fixture
def page(browser, saved):
    with saved_page(browser, saved) as opened:
        yield opened


def test_it_says_the_verdict_the_lines_the_faults_and_what_is_assumed(page):
    said = page.locator("main").inner_text()
    assert "train.py on t4: the peak is in the step: 3.00 MiB allocated" in said
    assert "every stage fits 8.00 MiB" in said
    rows = [row.inner_text().split("\t") for row in page.locator("tr").all()]
    assert ["train.py:9: loss = f(x)", "2.00 MiB", "activations"] in rows
    assert ["h.*.mlp", "2.00 MiB"] in rows
    assert ["no module", "1.00 MiB"] in rows
    assert [
        "step",
        "3.00 MiB",
        "6.00 MiB",
        "fits",
        "activations 2.00 MiB, parameters 1.00 MiB",
    ] in rows
    listed = page.locator("li").all_inner_texts()
    assert listed == [str(a_fault()), SAID]


def test_keys_read_the_timeline_stage_by_stage(page):
    chart = page.locator(".ml-chart")
    said = chart.get_attribute("aria-label")
    assert "peak 3.00 MiB in step, limit 8.00 MiB on t4" in said
    chart.focus()
    read = []
    for key in ("Home", "End"):
        page.keyboard.press(key)
        page.evaluate(NEXT_FRAME)
        read.append(chart.get_attribute("aria-valuetext"))
    assert read == [
        "step, 1.00 MiB allocated, = 1.00 MiB parameters",
        "evaluation, 3.00 MiB allocated, = 2.00 MiB activations + 1.00 MiB parameters",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1366, 1920])
def test_it_is_whole_and_shuts_nobody_out_at_every_width(page, scheme, width):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert [rule["id"] for rule in violations(page, "main")] == []


def test_a_picture_stands_there_where_no_script_runs(browser, saved):
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(saved.as_uri())
    assert "peak 3.00 MiB in step" in opened.locator("#timeline svg").text_content()
    assert opened.locator("canvas").count() == 0
    context.close()
