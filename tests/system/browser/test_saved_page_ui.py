"""A saved page in Chromium: no kernel, no server; its sliders move what its recording covers."""

import itertools

import pytest

import memlab
from memlab import StepConfig
from tests.system.browser.pages import NEXT_FRAME, saved_page


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    workload = memlab.workloads.get("plain-mlp")
    panel = memlab.panel(workload, device="t4", config=StepConfig(batch_size=8))
    panel.keep(batch_size=1024)
    panel.keep(batch_size=8, accumulation_steps=2)
    panel.keep(accumulation_steps=1, optimizer="sgd")  # of which the page knows nothing
    panel.set(optimizer="adamw")
    file = panel.save(tmp_path_factory.mktemp("pages") / "step.html")
    panel.close()
    return file


@pytest.fixture
def page(browser, saved):
    with saved_page(browser, saved) as opened:
        yield opened


def badge(page):
    page.evaluate(NEXT_FRAME)
    return page.locator(".ml-badge").inner_text()


def test_a_page_shows_the_bytes_that_python_predicts(page):
    workload = memlab.workloads.get("plain-mlp")
    predicted = memlab.predict(workload, StepConfig(batch_size=8), "t4")
    peak = memlab._util.units.format_bytes(predicted.peak_reserved_bytes)
    assert f"fits: reserves {peak} of" in badge(page)


def test_a_slider_changes_answer_link_and_picture_and_is_undone(page):
    before = badge(page)
    picture = page.evaluate("document.querySelector('.ml-chart canvas').toDataURL()")
    page.locator("#ml-batch").focus()
    for _ in range(6):
        page.keyboard.press("PageUp")
    assert badge(page) != before
    page.wait_for_timeout(300)
    assert "batch_size=1024" in page.url or "batch_size=768" in page.url
    assert page.evaluate("document.querySelector('.ml-chart canvas').toDataURL()") != picture
    page.get_by_role("button", name="Undo").click()
    assert badge(page) == before


def test_what_cannot_be_is_said_with_a_way_out(page):
    page.locator("#ml-accumulation").fill("8")
    assert "24 micro-batches need at least 24 samples" in badge(page)
    page.get_by_role("button", name="use 8").click()
    assert "not known from this recording" in badge(page), "a single sample may run otherwise"
    page.locator("#ml-accumulation").fill("3")
    assert "fits" in badge(page)


@pytest.mark.parametrize("typed", ["banana", "0", "-1", "1e9", "2.5", ""])
def test_nonsense_in_a_box_changes_nothing(page, typed):
    before = badge(page)
    box = page.locator("#ml-batch-box")
    box.fill(typed)
    box.press("Tab")
    assert badge(page) == before


def test_a_limit_without_unit_is_asked_back(page):
    box = page.locator(".ml-head .ml-box")
    box.fill("8")
    page.get_by_role("button", name="8 GiB").click()
    assert "of 8.00 GiB" in badge(page)
    box.fill("1 MiB")
    assert "does not fit" in badge(page)


def test_nothing_else_moves_while_sliders_do(page):
    places = set()
    for control, at in itertools.product(("#ml-batch", "#ml-budget"), range(0, 12, 3)):
        page.locator(control).fill(str(at))
        page.evaluate(NEXT_FRAME)
        boxes = [page.locator(of).bounding_box() for of in (".ml-chart", "#ml-budget", ".ml-bar")]
        places.add(str([(box["y"], box["height"]) for box in boxes]))
    assert len(places) == 1


def compare_with(page, what):
    page.get_by_label("compare with").select_option(what)
    page.evaluate(NEXT_FRAME)
    return page.locator(".ml-chart")


def is_marked(chart):
    """Whether something is drawn over a picture, such as where a pointer is."""
    return chart.locator("canvas").last.evaluate(
        """canvas => {
          const { width, height } = canvas;
          const blank = Object.assign(document.createElement("canvas"), { width, height });
          return canvas.toDataURL() !== blank.toDataURL(); }"""
    )


def test_two_steps_are_compared_as_two_pictures_and_in_words(page):
    offered = page.get_by_label("compare with").locator("option").all_inner_texts()
    assert offered == [
        "nothing",
        "before the last move",
        "run 2, predicted: batch 8, accumulation 2",
        "run 1, predicted: batch 1024",
    ]
    before, now = compare_with(page, offered[3]).all()
    workload = memlab.workloads.get("plain-mlp")
    peaks = [
        memlab.predict(workload, StepConfig(batch_size=size), "t4").peak_allocated_bytes
        for size in (1024, 8)
    ]
    less, *both = map(memlab._util.units.format_bytes, (peaks[0] - peaks[1], *peaks))
    said = page.locator(".ml-difference").inner_text()
    assert said.startswith(
        f"Peak {less} lower: {both[0]} interpolated before, {both[1]} predicted now. "
    )
    assert "ctivations" in said
    for chart, name, peak in ((before, "run 1, predicted", 0), (now, "on screen", 1)):
        label = chart.get_attribute("aria-label")
        assert label.startswith(f"{name}: batch ")
        assert f"peak {both[peak]}" in label
    assert compare_with(page, "nothing").count() == 1


@pytest.mark.parametrize("pointed", [0, 1])
def test_pointing_at_one_of_two_pictures_marks_the_other_and_a_click_stays(page, pointed):
    charts = compare_with(page, "run 2, predicted: batch 8, accumulation 2")
    box = charts.nth(pointed).bounding_box()
    assert not is_marked(charts.nth(1 - pointed))
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
    page.evaluate(NEXT_FRAME)
    assert is_marked(charts.nth(1 - pointed))
    page.mouse.move(0, 0)
    page.evaluate(NEXT_FRAME)
    assert not is_marked(charts.nth(1 - pointed))
    page.mouse.click(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.move(0, 0)
    page.evaluate(NEXT_FRAME)
    assert all(is_marked(chart) for chart in charts.all())
    chart = charts.nth(pointed)
    places = [int(chart.get_attribute("aria-valuenow"))]
    chart.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
        page.evaluate(NEXT_FRAME)
        places.append(int(chart.get_attribute("aria-valuenow")))
    assert places == sorted(set(places)), "a key goes on in either picture"


def test_what_was_before_the_last_move_is_compared_as_sliders_move(page):
    charts = compare_with(page, "before the last move")
    assert "The same peak" in page.locator(".ml-difference").inner_text()
    page.locator("#ml-batch").focus()
    page.keyboard.press("End")
    page.evaluate(NEXT_FRAME)
    names = [chart.get_attribute("aria-label").split(".")[0] for chart in charts.all()]
    assert names == ["before the last move: batch 8", "on screen: batch 1024"]
    assert "higher" in page.locator(".ml-difference").inner_text()


def test_two_pictures_lie_side_by_side_where_there_is_room_else_under_each_other(page):
    charts = compare_with(page, "run 1, predicted: batch 1024")
    for width, are_beside in ((1366, True), (900, False), (380, False)):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate(NEXT_FRAME)
        one, other = (chart.bounding_box() for chart in charts.all())
        assert (one["y"] == other["y"], one["x"] == other["x"]) == (are_beside, not are_beside)
        assert (one["height"], one["width"]) == (other["height"], other["width"])
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("policy", ["script-src 'self'", "default-src 'self'"])
def test_words_remain_where_no_script_may_run(browser, saved, policy):
    opened = browser.new_page()
    opened.route(
        "**/*",
        lambda route: route.fulfill(
            path=saved, headers={"Content-Security-Policy": policy, "Content-Type": "text/html"}
        ),
    )
    opened.goto("http://127.0.0.1/step.html")
    still = opened.locator(".ml-still")
    assert "plain-mlp, predicted for t4: budget 1, batch 8" in still.inner_text()
    assert "MiB" in still.inner_text()
    if policy.startswith("script"):
        assert opened.locator("img").evaluate("img => img.naturalWidth") > 100
    opened.close()


# where a page's theme is not the system's, and its variables are not of its theme
VS_CODE = """dark => {
  document.body.className = dark ? "vscode-dark" : "vscode-light";
  const labs = { "layout-color0": "white", "ui-font-color1": "#000d", "border-color2": "#e0e0e0" };
  for (const [name, colour] of Object.entries(labs))
    document.documentElement.style.setProperty(`--jp-${name}`, colour);
}"""
COLAB = "dark => document.documentElement.setAttribute('theme', dark ? 'dark' : 'light')"
COLOURS = """() => ["backgroundColor", "color", "colorScheme"]
  .map(name => getComputedStyle(document.querySelector(".ml"))[name])"""


@pytest.mark.parametrize("place", [VS_CODE, COLAB])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_takes_the_theme_of_vs_code_and_colab(page, place, theme):
    page.emulate_media(color_scheme=theme)
    of_theme = page.evaluate(COLOURS)
    page.emulate_media(color_scheme="light" if theme == "dark" else "dark")
    page.evaluate(place, theme == "dark")
    now = page.evaluate(COLOURS)
    assert now == [*of_theme[:2], theme]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 600, 683, 760, 1366, 1920, 2500])
def test_it_is_whole_at_every_width(page, scheme, width):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.get_by_label("Limit", exact=True).fill("1MiB")
    page.keyboard.press("Enter")
    assert "does not fit: reserves" in badge(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = "e => e.scrollHeight > e.clientHeight || e.scrollWidth > e.clientWidth"
    assert not page.locator(".ml-badge").evaluate(cut)
